"""What a newcomer sees first: the help, and completion in a shell."""

import os
import subprocess
import sys

import pytest

from chipwise.base.facts import fact
from chipwise.cli import COMMANDS


@pytest.fixture
def shell(tmp_path):
    """Runs `chipwise` as a program, for a person whose home is empty."""
    script = tmp_path / "chipwise"
    script.write_text("from chipwise.cli import main\n\nmain()\n")

    def run(*words, **environment):
        return subprocess.run(
            [sys.executable, str(script), *words], capture_output=True, text=True, timeout=60,
            env=os.environ | {"HOME": str(tmp_path), "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
            | environment,
        )  # fmt: skip

    return run


@pytest.mark.slow
def test_completion_installs_and_completes(shell, tmp_path):
    done = shell("--install-completion", "bash")
    assert done.returncode == 0, done.stderr
    (script,) = tmp_path.rglob("chipwise*.sh")
    assert str(script) in (tmp_path / ".bashrc").read_text()
    for words, at, answer in (("chipwise pl", 1, "plan"), ("chipwise sweep --see", 2, "--seeds")):
        asked = {"_CHIPWISE_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(at)}
        assert answer in shell(**asked).stdout.split()


def test_the_main_help_has_the_first_commands_first_and_the_exit_codes_once(chipwise):
    said = chipwise("--help")
    assert said.code == 0 and said.out.count("Exit codes:") == 1
    titles = [str(fact(title)) for title in COMMANDS]
    assert sorted(titles, key=said.out.index) == titles
    assert list(COMMANDS["commands-first"]) == ["plan", "train", "report"]
    assert "Exit codes" not in chipwise("plan", "--help").out


def test_at_most_19_commands_each_in_one_group(chipwise):
    names = [name for group in COMMANDS.values() for name in group]
    listed = [line.split()[0] for line in chipwise("--help").out.splitlines() if line.startswith("  ")]
    assert len(names) == len(set(names)) <= 19 and set(names) <= set(listed)
    assert all(chipwise(name, "--help").code == 0 for name in names)
