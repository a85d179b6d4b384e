"""What the README shows is run or read: its example as it stands, some of its commands; the command line
takes every command of README and docs."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from chipwise.cli import app

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
OVERVIEW = (ROOT / "docs" / "overview.md").read_text()
RUN = ["devices", "train digits"]
SLOW = ["find-lr digits"]
"""What a reader types first: these are run as they stand. The tests of each command run it in many ways."""


def blocks(page, language):
    return re.findall(rf"```{language}\n(.*?)```", page, re.DOTALL)


def commands(page):
    lines = [line for block in blocks(page, "sh") for line in block.replace("\\\n", " ").splitlines()]
    lines = [
        re.sub(r"^chipwise (--(processes|restart) \d+ |--rejoin )+", "chipwise ", line) for line in lines
    ]
    return [line.split(" #")[0].strip() for line in lines if line.startswith("chipwise ")]


def test_the_example_runs(capsys):
    (example,) = blocks(README, "python")
    assert len(example.splitlines()) <= 26
    exec(compile(example, "README.md", "exec"), {})
    accuracy, fingerprint = capsys.readouterr().out.split()
    assert float(accuracy) > 0.9
    assert re.fullmatch("[0-9a-f]{64}", fingerprint)


def test_the_command_line_takes_every_command():
    """Without running it: names of options, types of values. The overview shows every command."""
    group = typer.main.get_command(app())
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    typed = [(page.name, command) for page in pages for command in commands(page.read_text())]
    shown = {shlex.split(command)[1] for name, command in typed if name == "overview.md"}
    assert shown == set(group.commands)
    for page, command in typed:
        words = shlex.split(command)[1:]
        context = group.make_context("chipwise", words[:1], resilient_parsing=True)
        subcommand = group.get_command(context, words[0])
        assert subcommand is not None, f"{page}: {command}"
        subcommand.make_context(words[0], words[1:], parent=context)


@pytest.mark.slow
@pytest.mark.parametrize("typed", [RUN, pytest.param(SLOW, marks=pytest.mark.slow)])
def test_the_first_commands_run(tmp_path, typed):
    assert {f"chipwise {words}" for words in typed} <= set(commands(README)) | set(commands(OVERVIEW))
    code = (
        "import json, sys, chipwise.cli\n"
        "for words in json.loads(sys.argv[1]):\n"
        "    if code := chipwise.cli.main(words): sys.exit(f'{words}: {code}')"
    )
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    done = subprocess.run(  # in one process, since each start takes seconds
        [sys.executable, "-c", code, json.dumps([shlex.split(words) for words in typed])],
        cwd=tmp_path,
        env=environment | {"XDG_CACHE_HOME": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def test_every_linked_file_is_there():
    for target in re.findall(r"\]\(([^)]+)\)", README):
        assert target.startswith("http") or (ROOT / target.partition("#")[0]).exists(), target


def test_make_targets_exist():
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"^make ([\w-]+)", README, re.MULTILINE)) <= targets


RACES = ("cifar10_airbench.py", "gpt2_track3.py")
"""Races are run with whole programs: net, data and optimizer are in one file, shorter than the race's own."""


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.py")), ids=lambda p: p.name)
def test_an_example_is_short_and_says_what_to_expect(path):
    text = path.read_text()
    assert text.startswith('"""')
    assert len(text.splitlines()) < (320 if path.name in RACES else 100)
