"""The public names, so that none comes or goes unnoticed, and that each path the documents name is there."""

import ast
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest

import chipwise as cw

ROOT = Path(__file__).parents[1]
NAMES = """
Arrays BatchSearch CheckpointError ChipwiseError DataError DeviceError DivergedError Export Finding HostLost
ImageFolder Lazy LrSearch On PackedFolder Plan Predictions Recipe RecipeError Result RunError Stepper
Stopped Study Sum Task Transfer Validated Weights adam adamw attention augment check compare constant
cosine datasets detect equinox evaluate exponential export features find_batch find_lr fit freeze
from_optax fsdp functional grouped hosts keras lamb lars layerwise linear linen load lookahead losses
metrics nnx one_cycle one_cycle_momentum pack piecewise plan polynomial predict pretrained read remat report
restore_run sgd simulate sweep torch transfer warmup
""".split()  # noqa: SIM905
SCHEMAS = "record report plan find_lr find_batch comparison check transfer".split()  # noqa: SIM905
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
    assert cw.__all__ == sorted(NAMES)
    assert set(NAMES) <= set(dir(cw))


def test_types_see_the_names_that_a_run_loads():
    tree = ast.parse(Path(cw.__file__).read_text())
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    seen = {
        alias.asname: "." + line.module
        for line in block.body
        if isinstance(line, ast.ImportFrom)
        for alias in line.names
    }
    assert seen == cw._MODULES


def test_every_public_name_is_documented():
    for name in NAMES:
        assert getattr(cw, name).__doc__, name


@pytest.mark.parametrize("path", documented())
def test_every_documented_path_is_there(path):
    assert pkgutil.resolve_name(path) is not None


def test_an_unknown_name_is_an_attribute_error():
    assert not hasattr(cw, "fitt")


def test_importing_loads_nothing_and_modules_take_no_name_away():
    code = """
import sys, os
import chipwise as cw
heavy = set("jax numpy flax optax orbax scipy sklearn matplotlib absl tensorboard typer rich".split())
assert not heavy & set(sys.modules), heavy & set(sys.modules)
assert os.environ["NPROC"]
import importlib, types
from chipwise.cli import app
app()
assert "jax" not in sys.modules  # help and mistakes take no second
for name in "planner.planner recipe.check study.transfer study.sweep data.pack recipe.recipe".split():
    importlib.import_module(f"chipwise.{name}")
for name in "plan check transfer sweep pack fit find_lr evaluate detect simulate load".split():
    assert isinstance(getattr(cw, name), types.FunctionType), name
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_exit_codes_are_distinct_where_the_fix_differs():
    codes = [
        e.exit_code
        for e in (cw.RecipeError, cw.DataError, cw.DeviceError, cw.RunError, cw.DivergedError, cw.Stopped)
    ]
    assert len(set(codes)) == len(codes)
    assert 0 not in codes and 1 not in codes
