"""Several steps in one call change neither what is logged, evaluated and saved nor, here, a bit."""

import dataclasses
import json

import pytest

import chipwise as cw
import tasks
from chipwise.engine import dispatch
from chipwise.words.facts import fact
from refusals import refused

FREE = cw.On(devices=1, exact=False)
LOOSE = {"on": FREE, "progress": "none"}


def rows(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    folder = tmp_path_factory.mktemp("single") / "run"
    return cw.fit(tasks.recipe(), folder, log_every="7st", eval_every="11st", **LOOSE), folder


@pytest.mark.slow
@pytest.mark.parametrize("steps", [7, pytest.param(64, marks=pytest.mark.slow)])
def test_everything_happens_at_its_step(single, tmp_path, monkeypatch, steps):
    monkeypatch.setattr("chipwise.engine.feed._WINDOW_STEPS", 9)  # windows end where no call may cross
    one, folder = single
    result = cw.fit(
        tasks.recipe(), tmp_path, log_every="7st", eval_every="11st", steps_per_call=steps, **LOOSE
    )
    assert result.fingerprint == one.fingerprint

    def told(folder):
        kept = ("step", "train/loss", "train/accuracy", "eval/loss", "eval/accuracy")
        return [{k: row[k] for k in kept if k in row} for row in rows(folder)]

    assert told(tmp_path) == told(folder)


@pytest.mark.slow
def test_a_trial_decides_and_harms_nothing(single, monkeypatch, capsys):
    monkeypatch.setattr("chipwise.engine.fit.MANY", 1)
    for ratio, steps in ((2.04, 16), (1.05, 1)):
        monkeypatch.setattr(dispatch, "worth_a_trial", lambda *_: True)
        monkeypatch.setattr(dispatch, "gain", lambda *_, ratio=ratio: ratio)
        result = cw.fit(tasks.recipe(), **{**LOOSE, "progress": "lines"})
        tried = fact("steps-per-call-tried", steps=steps, tried=16, ratio=ratio)
        assert str(tried) in capsys.readouterr().err
        assert result.fingerprint == single[0].fingerprint
    monkeypatch.undo()
    monkeypatch.setattr("chipwise.engine.fit.MANY", 1)
    assert cw.fit(tasks.recipe(), **LOOSE).fingerprint == single[0].fingerprint


@pytest.mark.parametrize(
    "given",
    [
        {"on": cw.On(devices=1)},
        {"on": cw.On(2, exact=False)},
        {"on": dataclasses.replace(FREE, feed="host")},
        {"steps_per_call": 0},
        {"steps_per_call": -2},
    ],
)
def test_where_it_cannot_be_is_said_before_anything_is_made(tmp_path, given):
    code = "steps-per-call-below-one" if given.get("steps_per_call", 4) < 1 else "steps-per-call-impossible"
    with refused(cw.errors.RecipeError, code):
        cw.fit(tasks.recipe(), tmp_path / "run", **{**LOOSE, "steps_per_call": 4, **given})
    assert not (tmp_path / "run").exists()
