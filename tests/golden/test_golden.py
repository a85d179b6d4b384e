"""Programs, cache keys and bits are those that are stored; see `golden_values.py`.

A failure names what moved. If that is meant, `python tools/golden.py --write` stores the new
values, in a commit of its own.
"""

import subprocess
import sys
from pathlib import Path

import pytest

import golden_values as golden
from golden_cases import CASES

TOOL = Path(__file__).parents[2] / "tools" / "golden.py"

SLOW_TO_TRACE = ("imagenet-resnet50", "vit-s16")


def compared(part):
    """Skips the test where stored values of a part do not hold."""
    if reason := golden.why_not_compared(part):
        pytest.skip(reason)


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.slow if n in SLOW_TO_TRACE else ()) for n in CASES],
)
def test_programs_are_those_that_are_stored(name):
    compared("programs")
    made = golden.programs(CASES[name].recipe())
    assert golden.moved(golden.stored("programs", name), made) == []


@pytest.mark.parametrize("part", golden.PARTS)
def test_what_is_stored_is_of_the_cases(part):
    """A case that is renamed or gone leaves no file behind."""
    cases = {name for name, case in CASES.items() if part != "trainings" or case.trained}
    folders = (golden.FOLDER / part).iterdir() if part == "trainings" else [golden.FOLDER / part]
    for folder in folders:
        assert {file.stem for file in folder.glob("*.json")} == {*cases, "holds"}, folder


@pytest.mark.parametrize("value", ["program", "key", "row", "fingerprint"])
def test_a_value_that_moves_is_named(value):
    rows = {
        "1": {"gradient": "a", "parameters": "b"},
        "2": {"gradient": "c", "parameters": "d"},
        "10": {"gradient": "e", "parameters": "f"},
    }
    old, new, said = {
        "program": (
            {"replica": "a", "update": "b"},
            {"replica": "a", "update": "c"},
            "update: b -> c",
        ),
        "key": ({"t4": {"update": "a"}}, {"t4": {"update": "b"}}, "t4 update: a -> b"),
        "row": (
            {"rows": rows},
            {"rows": rows | {"2": {"gradient": "c", "parameters": "x"}, "10": {}}},
            "step 2 is the first that differs: parameters: d -> x",
        ),
        "fingerprint": (
            {"fingerprint": "a", "rows": rows},
            {"fingerprint": "b", "rows": rows},
            "fingerprint: a -> b",
        ),
    }[value]
    assert golden.moved(old, old) == [] and golden.moved(old, new) == [said]


def test_a_case_without_stored_values_has_moved():
    assert golden.moved(None, {"update": "a"}) != []


@pytest.mark.slow
@pytest.mark.parametrize("part", ["keys", "trainings"])
def test_nothing_moved(part):
    """In a process of its own: programs are compiled as a user's, whatever this one compiles."""
    if part == "keys":
        compared(part)
    command = [sys.executable, str(TOOL), "--part", part]
    made = subprocess.run(command, capture_output=True, text=True, check=False)
    print(made.stdout)
    assert made.returncode == 0, f"{made.stdout}\n{made.stderr[-2000:]}"
    cases = [name for name, case in CASES.items() if part != "trainings" or case.trained]
    same = {line.split()[1] for line in made.stdout.splitlines() if line.endswith("same")}
    assert same == {*cases}
