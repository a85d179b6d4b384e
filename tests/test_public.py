"""The public names, so that none comes or goes unnoticed, and that each path the documents name is there."""

import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest

import chipwise as cw

ROOT = Path(__file__).parents[1]
NAMES = """
Arrays On PackedFolder Recipe Stepper Sum Task adam adamw augment check compare datasets equinox errors
evaluate export find_lr fit from_optax keras linen load losses metrics nnx one_cycle pack
plan predict pretrained report result schedules sgd simulate sweep torch training transfer
""".split()  # noqa: SIM905
SCHEMAS = "record report plan find_lr comparison check transfer".split()  # noqa: SIM905
"""`chipwise.record/1` and the like in the documents are schemas of JSON, not paths."""


def documented():
    """Every `cw.x.y` and `chipwise.x.y` of README and docs."""
    paths = set()
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        for path in re.findall(r"\b(?:cw|chipwise)((?:\.[A-Za-z_]\w*)+)\b(?!/)", page.read_text()):
            if path[1:] not in SCHEMAS and not path.endswith(".X"):
                paths.add(f"chipwise{path}")
    return sorted(paths)


def test_public_names():
    assert cw.__all__ == dir(cw) == sorted(NAMES) and len(NAMES) <= 40


@pytest.mark.parametrize("package", cw._PACKAGES.split())
def test_packages_have_the_names_that_their_stubs_list(package):
    module = getattr(cw, package)
    assert module.__all__
    for name in module.__all__:
        assert getattr(module, name).__doc__, name


def test_every_public_name_is_documented():
    for name in NAMES:
        assert getattr(cw, name).__doc__, name


@pytest.mark.parametrize("path", documented())
def test_every_documented_path_is_there(path):
    assert pkgutil.resolve_name(path) is not None


TASKS = ("chipwise.recipes.classification", "chipwise.recipes.tokens")
"""The tasks of built-in recipes, which two examples share."""


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.stem)
def test_an_example_imports_public_names(path):
    for module, names in re.findall(r"^from (chipwise[.\w]*) import (.+)$", path.read_text(), re.M):
        if module not in TASKS:
            home = pkgutil.resolve_name(module)
            assert module == "chipwise" or module.split(".")[1] in cw._PACKAGES.split()
            assert set(names.split(", ")) <= set(home.__all__)


def test_an_unknown_name_is_an_attribute_error():
    assert not hasattr(cw, "fitt")


def test_importing_loads_nothing_and_modules_take_no_name_away():
    code = """
import sys, os
import chipwise as cw
heavy = set("jax numpy flax optax orbax scipy sklearn absl tensorboard typer rich".split())
assert not heavy & set(sys.modules), heavy & set(sys.modules)
assert os.environ["NPROC"]
import importlib, types
from chipwise.cli import app
app()
assert "jax" not in sys.modules  # help and mistakes take no second
for name in "planner.ask recipe.check study.transfer study.sweep data.pack recipe.recipe".split():
    importlib.import_module(f"chipwise.{name}")
for name in "plan check transfer sweep pack fit find_lr evaluate simulate load".split():
    assert isinstance(getattr(cw, name), types.FunctionType), name
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_exit_codes_are_distinct_where_the_fix_differs():
    errors = cw.errors
    kinds = (errors.RecipeError, errors.DataError, errors.DeviceError, errors.RunError, errors.DivergedError)
    codes = [kind.exit_code for kind in (*kinds, errors.Stopped)]
    assert len(set(codes)) == len(codes)
    assert 0 not in codes and 1 not in codes


def test_jax_before_chipwise_prints_nothing_more_than_jax_does():
    code = """
import contextlib, io, sys
import jax
jax.devices()
print("jax", file=sys.stderr)
import chipwise as cw
cw.check(cw.load("digits", synthetic=True))
assert jax.devices()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "" and done.stderr.rpartition("jax\n")[2] == ""
