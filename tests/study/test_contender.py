"""Sides of git revisions, whose modules do not meet."""

import subprocess
import sys

import pytest

import chipwise as cw
from chipwise.study.referee.contender import Contender, checked_out
from refusals import refused

RECIPE = """
import helper
import chipwise as cw

def recipe(seed=0):
    return cw.load("digits", [f"seed={seed}", f"batch={helper.BATCH}"])
"""


@pytest.fixture
def repository(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"):
        monkeypatch.delenv(name, raising=False)

    def git(*words):
        who = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", *who, *words], check=True, capture_output=True)

    git("init", "-q")
    (tmp_path / "mine.py").write_text(RECIPE)
    (tmp_path / "helper.py").write_text("BATCH = 32\n")
    git("add", ".")
    git("commit", "-qm", "first")
    (tmp_path / "helper.py").write_text("BATCH = 48\n")
    return tmp_path


def test_a_revision_has_its_own_helper(repository):
    committed, here = (
        Contender.of(name, ["duration=1ep"], None) for name in ("HEAD:mine.py:recipe", "mine.py:recipe")
    )
    for _ in range(2):  # by turns
        assert (committed.make(0).batch, here.make(1).batch) == (32, 48)
    assert "helper" not in sys.modules and str(repository) not in sys.path
    assert here.make(3).seed == 3 and (repository / "helper.py").read_text() == "BATCH = 48\n"


def test_what_was_planted_under_a_revisions_name_does_not_run(repository):
    sha = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    for folder in ("runs/revisions", "runs/referee/revisions"):
        planted = repository / folder / sha[:12] / "mine.py"
        planted.parent.mkdir(parents=True)
        planted.write_text("raise SystemExit('planted')")
    assert Contender.of("HEAD:mine.py:recipe", ["duration=1ep"], None).make(0).batch == 32


@pytest.mark.parametrize("path", ["../outside.py", "below/../../outside.py"])
def test_a_path_does_not_leave_the_revision(repository, tmp_path_factory, path):
    place = tmp_path_factory.mktemp("a") / "files"
    place.mkdir()
    (place.parent / "outside.py").write_text("")
    with refused(cw.errors.RecipeError, "revision-file-missing", path=path):
        checked_out("HEAD", f"{path}:recipe", place)


def test_what_git_does_not_know(repository):
    folder = repository / "files"
    folder.mkdir()
    with refused(cw.errors.RecipeError, "revision-unknown", revision="HEAD~7"):
        checked_out("HEAD~7", "mine.py:recipe", folder)
    with refused(cw.errors.RecipeError, "revision-unknown", revision="--output=x"):
        checked_out("--output=x", "mine.py:recipe", folder)
    with refused(cw.errors.RecipeError, "revision-file-missing", path="yours.py"):
        checked_out("HEAD", "yours.py:recipe", folder)


def test_settings_of_a_finished_recipe_are_refused():
    recipe = cw.load("digits", ["duration=1ep"])
    with refused(cw.errors.RecipeError, "recipe-is-finished"):
        cw.referee.referee(recipe, set=["lr=0.1"])
