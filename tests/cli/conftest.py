"""The command line as a function, and a recipe file of one's own."""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import jsonschema
import pytest
import typer

from chipwise import cli
from chipwise.base.errors import ChipwiseError
from chipwise.cli import skill

TESTS = Path(__file__).parents[1]
MINE = '''
import optax

import chipwise as cw
import tasks

PLAIN = tasks.task(loss=tasks.plain_loss, augment=None)


def recipe(rate: float = 0, batch: int = 24, classes=None, ema=None):
    """Small enough to train in a moment, with settings of its own."""
    return cw.Recipe(
        name="mine",
        task=cw.Task(
            init=tasks.init, loss=tasks.plain_loss, train=tasks.data(), eval=tasks.data(53, 1),
            classes=classes,
        ),
        batch=batch,
        duration="12st",
        optimizer=cw.sgd(lr=cw.one_cycle(rate or 0.1, warmup="20%"), momentum=0.5),
        ema=ema,
    )


finished = recipe(rate=0.3)
lion = cw.Recipe(
    name="lion", task=PLAIN, batch=24, duration="12st",
    optimizer=cw.from_optax(optax.lion, learning_rate=cw.schedules.cosine(1e-3), b1=0.8),
)
'''


class Said(NamedTuple):
    code: int
    out: str
    err: str
    error: ChipwiseError | None
    """What `err` says in one line, where a command was refused."""

    def refused(self, code, error, **facts):
        """Asserts the exit code, the error's code and facts, one line of it, and nothing else printed."""
        assert self.error is not None and self.code == code, self.err
        if " " not in self.error.code:  # not all errors of the engine are codes yet
            assert error in (None, self.error.code), f"{self.error.code}: {self.err}"
            assert {name: self.error.facts[name] for name in facts} == facts
        assert self.err == f"error: {cli.error_line(self.error)}\n" and self.out == ""
        return True


def valid(document):
    """Asserts that a document is as its schema says, and has no field that the schema does not name."""
    schema = json.loads(skill.schema(document["schema"]))
    jsonschema.Draft202012Validator(schema).validate(document)
    assert not set(document) - set(schema["properties"])


@pytest.fixture(scope="module")
def mine(tmp_path_factory):
    """A recipe file: `recipe`, a function with settings; `finished` and `lion`, finished recipes."""
    file = tmp_path_factory.mktemp("mine") / "my_task.py"
    file.write_text(MINE)
    return file


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """A run of a built-in recipe: 360 evaluation examples."""
    folder = tmp_path_factory.mktemp("digits") / "run"
    settings = ["--set", "duration=30st", "--devices", "1", "--eval-every", "end", "--quiet"]
    assert cli.main(["train", "digits", "--run", str(folder), *settings]) == 0
    return folder


MAKE = cli.app
COMMANDS = functools.cache(lambda: typer.main.get_command(MAKE()))  # made once, not with each call


@pytest.fixture
def chipwise(capfd, monkeypatch):
    """`chipwise(*arguments)` in this process, on its 8 simulated devices: exit code, output, errors."""
    errors = []

    def watched(commands):
        def call(**named):
            try:
                return commands(**named)
            except ChipwiseError as error:
                errors.append(error)
                raise

        return call

    monkeypatch.setattr(cli, "app", lambda: watched(COMMANDS()))

    def call(*arguments):
        capfd.readouterr()
        errors.clear()
        code = cli.main([str(a) for a in arguments])
        said = Said(code, *capfd.readouterr(), errors[-1] if errors else None)
        if "--json" in arguments and said.out:
            valid(json.loads(said.out))
        return said

    return call


@pytest.fixture(scope="session")
def subprocess_chipwise():
    """`chipwise` in a process of its own, with JAX as it comes."""

    def call(*arguments, **options):
        env = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
        env |= {"PYTHONPATH": str(TESTS), "JAX_PLATFORMS": "cpu"}
        command = [sys.executable, "-c", "from chipwise.cli import main; main()", *map(str, arguments)]
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=240, **options)

    return call
