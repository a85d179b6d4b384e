"""Sides of git revisions, whose modules do not meet."""

import contextlib
import importlib
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


def git(*words):
    who = ["-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run(["git", *who, *words], check=True, capture_output=True)


def committed():
    git("add", ".")
    git("commit", "-qm", "more")


@pytest.fixture
def repository(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"):
        monkeypatch.delenv(name, raising=False)

    git("init", "-q")
    (tmp_path / ".gitignore").write_text("__pycache__\n")
    (tmp_path / "mine.py").write_text(RECIPE)
    (tmp_path / "helper.py").write_text("BATCH = 32\n")
    committed()
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


def test_modules_that_the_process_has_belong_to_no_side(repository):
    """Neither those of the working tree, however they were found, nor those of a folder without git."""
    below = repository / "tasks" / "lib"
    below.mkdir(parents=True)
    text = RECIPE.replace("import helper", "from lib import helper")
    (repository / "tasks" / "mine.py").write_text(text)
    (below / "helper.py").write_text("BATCH = 32\n")
    committed()
    (below / "helper.py").write_text("BATCH = 48\n")
    name = "tasks/mine.py:recipe"
    with restored():
        assert cw.load(name).batch == 48
        kept = sys.modules["lib.helper"]
        before, here = sides(f"HEAD:{name}", name)
        assert (before.make(0).batch, here.make(0).batch) == (32, 48)
        assert sys.modules["lib.helper"] is kept


def test_a_revision_finds_its_own_of_all_folders_of_the_repository(repository):
    """Here the common module is in the folder above, which the path of the process has, or the file adds."""
    adding = "import sys, pathlib\nsys.path.append(str(pathlib.Path(__file__).parents[1]))\n"
    name = "tasks/my_task.py:recipe"
    (repository / "tasks").mkdir()
    for text in (RECIPE, adding + RECIPE):
        (repository / "tasks" / "my_task.py").write_text(text)
        (repository / "helper.py").write_text("BATCH = 32\n")
        committed()
        (repository / "helper.py").write_text("BATCH = 48\n")
        with restored():
            sys.path.extend([] if text.startswith(adding) else [str(repository)])
            before, here = sides(f"HEAD:{name}", name)
            for _ in range(2):
                assert (here.make(1).batch, before.make(0).batch) == (48, 32)


def test_folders_without_git_keep_their_modules_apart(tmp_path):
    for name, batch in (("a", 32), ("b", 48)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine.py").write_text(RECIPE)
        (tmp_path / name / "helper.py").write_text(f"BATCH = {batch}\n")
    names = [f"{tmp_path / name}/mine.py:recipe" for name in "ab"]
    with restored():
        for name in names:
            cw.load(name)
            sys.modules.pop("helper")
        cw.load(names[0])
        assert [side.make(0).batch for side in sides(*names)] == [32, 48]


def test_packages_that_are_installed_in_the_repository_are_shared(repository):
    place = repository / ".venv" / "lib" / "site-packages"
    place.mkdir(parents=True)
    (place / "installed_here.py").write_text("BATCH = 16\n")
    (repository / "mine.py").write_text(RECIPE.replace("helper", "installed_here"))
    with restored():
        sys.path.append(str(place))
        kept = importlib.import_module("installed_here")
        kept.BATCH = 24
        (here,) = sides("mine.py:recipe")
        assert here.make(0).batch == 24 and sys.modules["installed_here"] is kept
        assert sys.modules["__main__"] and cw is sys.modules["chipwise"]


@contextlib.contextmanager
def restored():
    modules, path = dict(sys.modules), list(sys.path)
    try:
        yield
    finally:
        sys.path[:] = path
        for name in [name for name in sys.modules if name not in modules]:
            del sys.modules[name]


def sides(*names):
    return Contender.each(names, [["duration=1ep"]] * len(names), None)


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


def test_links_out_of_the_repository_are_left_out_of_a_revision_whose_files_go_with_it(repository):
    (repository / "data").symlink_to("/tmp")
    (repository / "same").symlink_to("helper.py")
    (repository / "helper.py").write_text("BATCH = 32\n")
    committed()
    side = Contender.of("HEAD:mine.py:recipe", ["duration=1ep"], None)
    assert side.make(0).batch == 32 and (side.root / "same").is_symlink()
    assert not (place := side.root / "data").is_symlink() and place.parent.is_dir()
    del side
    assert not place.parent.exists()


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


@pytest.mark.parametrize("sides", [{"set": ["seed=5"]}, {"set": ["lr=0.1"], "set_base": [" seed = 5"]}])
def test_a_seed_is_no_setting_where_pairs_have_seeds(sides, tmp_path):
    with refused(cw.errors.RecipeError, "seed-is-no-setting"):
        cw.referee.referee("digits", **sides, run=tmp_path)
    with refused(cw.errors.RecipeError, "seed-is-no-setting"):
        cw.sweep("digits", seeds=2, run=tmp_path, set=["seed=5"])
    assert not list(tmp_path.iterdir())
