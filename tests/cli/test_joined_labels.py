"""`--eval-data` is joined by name to the classes of the run's training, also if that folder has changed."""

import json

import pytest

from chipwise.data import write_packed
from named_classes import THINGS, columns, most_slow, parts

MINE = """
import dataclasses
import chipwise as cw
from named_classes import THINGS, recipe as made

packed = cw.PackedFolder({folder!r}, None)
recipe = made(packed)
"""


def packed_at(path, names):
    given = {"classes": len(names), "names": names} if names else {"classes": 3}
    return write_packed(path, [columns(names or THINGS[:3])], split=None, **given)


@pytest.fixture
def trained(chipwise, tmp_path):
    """Trains on a pack of the classes `known`: what was said, and the options of later commands."""

    def train(known, *more):
        if not (tmp_path / "train").exists():
            packed_at(tmp_path / "train", known)
        (tmp_path / "mine.py").write_text(MINE.format(folder=str(tmp_path / "train")))
        named = f"{tmp_path / 'mine.py'}:recipe"
        said = chipwise("train", named, "--run", tmp_path / "run", "--devices", 1, "--lines", *more)
        return said, ["--recipe", named, "--devices", 1, "--json"]

    return train


@most_slow
def test_the_data_of_later_commands(trained, chipwise, tmp_path, known, own, missing):
    known, own, missing = parts(known, own, missing)
    _, same = trained(known)
    packed_at(tmp_path / "own", own)
    evaluated = ["eval", tmp_path / "run", "--eval-data", tmp_path / "own", *same]
    predicted = ["predict", tmp_path / "run", "--data", tmp_path / "own", "--out", tmp_path / "a.csv", *same]
    if missing:
        for command in (evaluated, predicted):
            assert chipwise(*command).refused(3, "classes-unjoined", classes=missing)
        return
    said = chipwise(*evaluated)
    assert json.loads(said.out)["metrics"]["accuracy"] == 1, said.err
    assert ("by name" in said.err) == bool(known and own and known != own)
    assert json.loads(chipwise(*predicted).out)["accuracy"] == 1


def test_a_run_says_and_stores_what_was_joined(trained, chipwise, tmp_path):
    packed_at(tmp_path / "own", ("dog", "bee"))
    said, _ = trained(("bee", "cat", "dog"), "--eval-data", tmp_path / "own")
    first = [line for line in said.err.splitlines() if "by name" in line]
    assert first and "classes dog, bee are joined" in first[0] and "it lacks cat" in first[0]
    assert "eval/accuracy 1.0000" in said.err
    stored = json.loads((tmp_path / "run" / "recipe.json").read_text())["classes"]
    assert stored == ["bee", "cat", "dog"]
    # Resumed with the same names, and with others
    again, _ = trained((), "--eval-data", tmp_path / "own")
    assert again.code == 0, again.err
    packed_at(tmp_path / "other", ("dog", "cat"))
    again, _ = trained((), "--eval-data", tmp_path / "other")
    assert again.code == 5 and again.error.code == "ledger-of-other-data"


def test_weights_of_a_run_are_joined_to_the_classes_of_the_next(trained, chipwise, tmp_path):
    _, same = trained(("ant", "bee", "cat"))
    (tmp_path / "train").rename(tmp_path / "old")
    packed_at(tmp_path / "train", ("cat", "ant", "bee"))
    start = ["--from", tmp_path / "run", "--devices", 1, "--lines"]
    named = same[1]
    said = chipwise("train", named, *start, "--run", tmp_path / "next", "--eval-data", tmp_path / "old")
    assert said.code == 0, said.err
    first = said.err[: said.err.index("step 1/1")]
    assert "its head is joined by name to the classes cat, ant, bee" in first
    assert "eval/accuracy 1.0000" in said.err
    (tmp_path / "train").rename(tmp_path / "second")
    packed_at(tmp_path / "train", ("ant", "bee", "dog"))
    said = chipwise("train", named, *start, "--run", tmp_path / "last")
    assert said.refused(2, "head-of-other-classes", classes=["dog"])


def test_the_classes_of_the_training_outlive_its_folder(trained, chipwise, tmp_path):
    """Another class was added to the folder since, and one was taken away: numbers there have moved."""
    _, same = trained(("ant", "bee", "cat"))
    (tmp_path / "train").rename(tmp_path / "old")
    packed_at(tmp_path / "train", ("bee", "cat", "dog"))
    packed_at(tmp_path / "own", ("ant", "cat"))
    said = chipwise("eval", tmp_path / "run", "--eval-data", tmp_path / "own", *same)
    assert json.loads(said.out)["metrics"]["accuracy"] == 1
    (tmp_path / "own").rename(tmp_path / "old own")
    packed_at(tmp_path / "own", ("dog", "cat"))
    said = chipwise("eval", tmp_path / "run", "--eval-data", tmp_path / "own", *same)
    assert said.code == 3 and said.error.facts["classes"] == ["dog"]


def test_a_run_of_before_has_no_names(trained, chipwise, tmp_path):
    """A run folder whose recipe states no classes continues, by the names of its data."""
    trained(("ant", "bee", "cat"))
    file = tmp_path / "run" / "recipe.json"
    stored = json.loads(file.read_text())
    del stored["classes"]
    file.write_text(json.dumps(stored))
    again, same = trained(())
    assert again.code == 0, again.err
    packed_at(tmp_path / "own", ("cat",))
    said = chipwise("eval", tmp_path / "run", "--eval-data", tmp_path / "own", *same)
    assert json.loads(said.out)["metrics"]["accuracy"] == 1
