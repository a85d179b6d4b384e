"""The parts of `.ci/run`, its clock and its verdict, with a `make` that only says what it was asked."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MAKE = """#!/bin/sh
echo "asked: $1"
[ "$1" != "$FAILS" ] && exit
case "$LASTLY" in "") exit 1 ;; esac  # it breaks before a test fails
case "$2" in *--lf*) [ "$LASTLY" = passes ]; exit ;; esac
mkdir -p .pytest_cache/v/cache
echo '{"tests/test_ci.py::test_parts_can_be_named": true}' >.pytest_cache/v/cache/lastfailed
exit 1
"""


@pytest.fixture
def run(tmp_path):
    """A checkout of the script alone; *returns* a function that runs it."""
    home = tmp_path / "checkout"
    shutil.copytree(ROOT / ".ci", home / ".ci")
    for name in ("wheel", "newest"):
        script = home / ".ci" / name
        script.write_text(f"#!/bin/sh\necho 'asked: {name}'\n")
        script.chmod(0o755)
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("chromium", "slurmctld", "ip", "make"):  # all is installed
        (tools / name).write_text(MAKE)
        (tools / name).chmod(0o755)

    def call(*parts, **environment):
        environment = {"CI_MEMORY": str(tmp_path / "memory"), "FAILS": "", "LASTLY": "", **environment}
        environment |= {"PATH": f"{tools}:{os.environ['PATH']}"}
        script = ["bash", str(home / ".ci" / "run"), *parts]
        return subprocess.run(script, env=os.environ | environment, capture_output=True, text=True)

    return call


def asked(done):
    return [line.split()[1] for line in done.stdout.splitlines() if line.startswith("asked: ")]


def said(done, kind):
    lines = done.stdout.splitlines()
    return [line.removeprefix(f"{kind}: ") for line in lines if line.startswith(f"{kind}: ")]


TESTS = ["test", "test-prices"]
SLOW = ["test-slow", "test-kernels"]
ALL = ["demo", "install-all", *TESTS, "lint", "docs", "wheel", "newest", *SLOW]


def test_every_part_runs_in_its_order(run):
    done = run()
    assert (done.returncode, asked(done), said(done, "left out")) == (0, ALL, []), done.stderr


def test_one_part_that_fails_fails_the_run_and_the_others_run_too(run):
    done = run(FAILS="docs")
    assert (done.returncode, asked(done), said(done, "FAILED")) == (1, ALL, ["docs"])


def test_after_its_time_nothing_is_started_and_the_next_run_begins_with_that(run):
    late = run("lint", "docs", CI_STOP_MINUTE="-1")
    assert (late.returncode, asked(late), said(late, "left out")) == (0, [], ["lint", "docs"])
    assert said(run("lint"), "left out") == ["docs"]
    assert said(run("lint", CI_STOP_MINUTE="-1"), "left out") == ["docs", "lint"]
    after = run()
    assert asked(after) == ["docs", "lint", *(part for part in ALL if part not in ("lint", "docs"))]
    assert asked(run()) == ALL


def test_parts_can_be_named(run):
    assert asked(run("docs", "demo")) == ["docs", "demo"]


@pytest.mark.parametrize("part, target", [("tests", "test"), ("slow", "test-slow")])
def test_a_suite_that_breaks_before_a_test_fails_is_not_run_again(run, part, target):
    done = run(part, FAILS=target)
    assert (done.returncode, asked(done), said(done, "unsteady")) == (1, [target], [])


@pytest.mark.parametrize("part, target", [("tests", "test"), ("slow", "test-slow")])
def test_a_test_that_fails_once_is_named_and_holds_nothing_up(run, part, target):
    done = run(part, FAILS=target, LASTLY="passes")
    assert (done.returncode, asked(done), said(done, "FAILED")) == (0, [target, target], [])
    assert said(done, "unsteady") == ["tests/test_ci.py::test_parts_can_be_named"]


def test_a_test_that_fails_twice_fails_the_run(run):
    done = run("tests", FAILS="test", LASTLY="fails")
    assert (done.returncode, said(done, "unsteady"), said(done, "FAILED")) == (1, [], ["tests"])


def test_after_the_end_no_test_is_tried_again(run):
    done = run("tests", FAILS="test", LASTLY="passes", CI_END_MINUTE="-1")
    assert (done.returncode, asked(done), said(done, "unsteady")) == (1, ["test"], [])
