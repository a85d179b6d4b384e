"""What the README shows is run: its example as it stands, its commands as they are typed."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", README, re.DOTALL)
COMMANDS = [
    line.split("#")[0].strip()
    for language, block in BLOCKS
    if language == "sh"
    for line in block.splitlines()
    if line.startswith("chipwise")
]
MNIST = ROOT.parent / "shared" / "data"


def test_the_example_runs(capsys):
    (example,) = [block for language, block in BLOCKS if language == "python"]
    assert len(example.splitlines()) <= 26
    exec(compile(example, "README.md", "exec"), {})
    accuracy, fingerprint = capsys.readouterr().out.split()
    assert float(accuracy) > 0.9
    assert re.fullmatch("[0-9a-f]{64}", fingerprint)


def test_the_commands_run(tmp_path):
    """One after another in one folder, since `eval` uses what `train` made; MNIST shortened, or left
    out where its files are not at hand."""
    assert len(COMMANDS) >= 6
    os.symlink(ROOT / "examples", tmp_path / "examples")
    for label in "ab":
        folder = tmp_path / "PHOTOS" / label
        folder.mkdir(parents=True)
        for i in range(5):
            Image.effect_noise((40, 30), 50 + i).save(folder / f"{i}.jpg")
    data = Path(os.environ.get("CHIPWISE_DATA", MNIST))
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    environment["XDG_CACHE_HOME"] = str(tmp_path / "cache")
    together: list[list[str]] = []  # in one process, since each start takes seconds
    for command in COMMANDS:
        if "mnist" in command and not (data / "mnist").is_dir():
            continue
        words = shlex.split(command.replace("DIR", str(data)))[1:]
        if words[0] == "bench-feed":
            words += ["--seconds", "0.5"]
        if words[0] == "bench":
            words += ["--steps", "10", "--warmup", "5"]
        if words[0] == "sweep" or "--seeds" in words:
            words += ["--set", "duration=20st", "--eval-every", "end", "--seeds", "2"]
        elif words[0] == "train":
            words += ["--stop-after", "20st", "--eval-every", "end"]
        if "--simulate" in words:  # JAX's devices are made once a process
            typed(together, tmp_path, environment)
            typed([words], tmp_path, environment)
            together = []
        else:
            together.append(words)
    typed(together, tmp_path, environment)


def typed(commands, folder, environment):
    """Runs commands, words each, one after another in one process; all must succeed."""
    code = (
        "import json, sys, chipwise.cli\n"
        "for words in json.loads(sys.argv[1]):\n"
        "    if code := chipwise.cli.main(words): sys.exit(f'{words}: {code}')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(commands)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def test_every_linked_file_is_there():
    for target in re.findall(r"\]\(([^)]+)\)", README):
        assert target.startswith("http") or (ROOT / target).exists(), target


def test_make_targets_exist():
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"^make ([\w-]+)", README, re.MULTILINE)) <= targets


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.py")), ids=lambda p: p.name)
def test_an_example_is_short_and_says_what_to_expect(path):
    text = path.read_text()
    assert text.startswith('"""')
    assert path.name == "demo.py" or len(text.splitlines()) < 60
