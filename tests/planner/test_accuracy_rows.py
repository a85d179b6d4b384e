"""The rows of benchmarks/plan_accuracy name recipes that can still be planned."""

import functools
import importlib
import json
import pkgutil
from dataclasses import replace
from pathlib import Path

import jax
import pytest

import chipwise as cw
from chipwise import recipes
from chipwise.step.layout import Layout, usable_devices
from plugins.draw import drawn

ROOT = Path(__file__).parents[2]


@pytest.fixture
def rows(monkeypatch):
    monkeypatch.syspath_prepend(ROOT)
    made = importlib.import_module("benchmarks.plan_accuracy.rows").rows()
    return [row for row in made if row.use != "apart"]


def test_the_table_groups_what_is_inside_by_chip_program_and_net(rows, monkeypatch):
    page = importlib.import_module("benchmarks.plan_accuracy.page")
    some = [row for row in rows if (row.on, row.clock, row.program) == ("v100", "steps", "library")][:3]
    speeds = {"value": 1.0, "low": 0.9, "high": 1.1, "run": {"train": 1.0}, "flops": 1e9}
    off = (1.0, 1.05, 2.0)  # predicted over measured
    answers = {
        row.row: {**speeds, **{name: speeds[name] * row.measured * by for name in ("value", "low", "high")}}
        for row, by in zip(some, off, strict=True)
    }
    known = [
        page.Prediction(replace(one.row, use="held-out", family="a net"), one.answer)
        for one in page.predictions(some, answers)
    ]
    lines = page._summaries(known)
    assert lines[0].startswith("**2 of 3 held-out") and "median error is 5%" in lines[0]
    nothing = "| 0 | - | - | - |"
    for name in (some[0].target.chip.name, page.PROGRAMS["library"], "a net"):
        assert f"| {name} | 3 | 1.05 | 5% | 2 of 3 {nothing}" in lines


def builds(row):
    recipe = row.load()
    layout = Layout.of(recipe, usable_devices(recipe, row.target.devices))
    assert (recipe.batch, recipe.precision) == (row.batch, row.values["precision"])
    assert layout.devices <= row.target.devices and row.seconds > 0
    return recipe


@pytest.mark.slow
def test_every_row_names_a_recipe_with_its_settings_and_a_target(rows, monkeypatch):
    """Without the models of the rows' own files: tracing all layers of all sizes takes minutes."""
    for module in pkgutil.iter_modules(recipes.__path__):  # else they would keep what stands in below
        importlib.import_module(f"{recipes.__name__}.{module.name}")
    monkeypatch.setattr(cw.nnx, "functional", lambda make_model: (make_model, make_model))
    for row in rows:
        builds(row)
    assert len(rows) >= 140


@pytest.mark.slow
def test_every_peak_names_a_model_with_its_settings_and_an_answer(monkeypatch):
    monkeypatch.syspath_prepend(ROOT)
    peaks = importlib.import_module("benchmarks.plan_accuracy.peaks")
    answers = json.loads(peaks.ANSWERS.read_text(encoding="utf-8"))
    for row in (rows := peaks.rows()):
        made = peaks.recipe(row)
        assert (made.adapters is None) == (row["rank"] == "") and float(row["peak"]) > 0
        assert peaks.command(row) in answers
    assert len(rows) >= 10


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_model_of_a_row_is_traced(rows, draw):
    """All take four minutes: a merge traces a quarter."""
    different = {}
    for row in rows:
        sizes = [one for one in row.settings if not one.startswith(("batch=", "replicas="))]
        different.setdefault(" ".join([row.recipe, *sizes]), row)
    part = different if draw is None else drawn([*different], draw, 0.25)
    for name in part:
        task = builds(different[name]).task
        params, state = jax.eval_shape(task.init, jax.random.key(0))
        batch = {name: jax.ShapeDtypeStruct((2, *x.shape), x.dtype) for name, x in task.train.spec.items()}
        traced = functools.partial(jax.eval_shape, lambda *given, task=task: task.loss(*given, True))
        with jax.numpy_rank_promotion("allow"):  # as JAX does for the users whose nets these are
            sums, _ = traced(params, state, batch, jax.random.key(0))
        assert sums["loss"].total.shape == ()
