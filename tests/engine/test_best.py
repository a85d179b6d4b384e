"""The best evaluation is kept and patience ends a run, after a stop as without one."""

import dataclasses
import json
import math
import os
import shutil
import sys

import numpy as np
import pytest

import chipwise as cw
import tasks
from chipwise.engine.best import Best, Kept
from chipwise.engine.checkpoint import Checkpoints, restore_run
from chipwise.engine.evaluate import evaluate
from chipwise.errors import CheckpointError, DataError, RecipeError, RunError
from chipwise.words.facts import fact
from refusals import refused

QUIET = {"progress": "none", "eval_every": "4st", "log_every": "4st", "keep_best": "eval/loss"}


def rows(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def recipe():
    """Its rate is too large after a while, so that a middle evaluation is the best."""
    rising = cw.schedules.piecewise([("0st", 0.05), ("12st", 0.05), ("13st", 6.0), ("30st", 6.0)])
    return tasks.recipe(optimizer=cw.sgd(lr=rising))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("best") / "run"
    return cw.fit(recipe(), folder, on=cw.On(devices=1), **QUIET), folder


def test_the_best_evaluation_can_be_had_again(whole):
    result, folder = whole
    losses = {row["step"]: row["eval/loss"] for row in rows(folder) if "eval/loss" in row}
    best = min(losses, key=losses.get)
    assert best < 30 and result.kept == Kept("eval/loss", losses[best], best)
    kept = restore_run(recipe(), folder, best=True)
    assert kept.steps == best
    again = evaluate(recipe(), kept.params, kept.state, on=cw.On(devices=1))
    assert again["loss"] == losses[best]
    assert restore_run(recipe(), folder).steps == 30


def test_a_result_is_read_back_and_its_best_evaluates_to_what_was_kept(whole):
    result, folder = whole
    read = cw.result(folder, recipe())
    for name in ("fingerprint", "steps", "metrics", "kept", "devices", "speed", "seconds", "history"):
        assert getattr(read, name) == getattr(result, name), name
    assert read.to_json() == result.to_json()
    best = read.best
    assert best.steps == result.kept.step and best.metrics["eval/loss"] == result.kept.value
    assert best.fingerprint != result.fingerprint and result.best.fingerprint == best.fingerprint
    on = cw.On(devices=1)
    assert cw.evaluate(best, on=on)["loss"] == result.kept.value
    third = tasks.data(31, 5)
    assert cw.evaluate(best, third, on=on) == evaluate(
        tasks.recipe(task=tasks.task(eval=third)), best.params, best.state, on=on
    )
    with refused(DataError, "evaluation-columns", wrong=["x"]):
        cw.evaluate(best, cw.Arrays(x=np.zeros((3, 2), np.uint8), label=np.zeros(3, np.int32)))


def test_a_run_without_a_best_says_so(tmp_path):
    run = cw.fit(tasks.recipe(duration="2st"), tmp_path, on=cw.On(devices=1), progress="none")
    assert run.kept is None
    with refused(CheckpointError, "run-without-best", run=str(tmp_path)):
        _ = cw.result(tmp_path, tasks.recipe(duration="2st")).best


def test_any_number_of_devices_keeps_the_same_best_and_ends_at_the_same_step(whole, tmp_path):
    result, folder = whole
    early = cw.fit(recipe(), tmp_path / "1", on=cw.On(devices=1), patience="8st", **QUIET)
    for devices in (4,):
        run = tmp_path / f"{devices}"
        other = cw.fit(recipe(), run, on=cw.On(devices=devices), patience="8st", **QUIET)
        assert (other.steps, other.kept) == (early.steps, early.kept) and other.steps < result.steps
        for one, there in zip(rows(folder), rows(run), strict=False):
            assert one.get("eval/loss") == there.get("eval/loss")


def test_a_metric_of_several_numbers_cannot_be_the_best():
    best = Best(recipe(), "eval/recalls", None)
    with refused(RecipeError, "best-metric-array", metric="eval/recalls", shape=[3]):
        best.improved(4, {"eval/recalls": np.zeros(3)})
    assert Best(recipe(), "eval/loss", None).improved(4, {"eval/loss": 0.5})


def test_the_lowest_error_is_the_best():
    for metric in ("eval/rmse", "eval/distance_lower"):
        best = Best(recipe(), metric, None)
        assert [best.improved(step, {metric: value}) for step, value in ((4, 0.5), (8, 0.7), (12, 0.4))] == [
            True, False, True,
        ]  # fmt: skip


def test_a_best_that_cannot_be_written_is_an_error(tmp_path, monkeypatch):
    wait = Checkpoints.wait

    def full(checkpoints):
        if checkpoints.folder.name == "best":
            raise RunError("run-disk-full", path="", checkpoint=None, reason="")
        wait(checkpoints)

    monkeypatch.setattr(Checkpoints, "wait", full)
    with refused(RunError, "run-disk-full"):
        cw.fit(recipe(), tmp_path, on=cw.On(devices=1), stop_after="4st", **QUIET)


@pytest.mark.slow
@pytest.mark.parametrize("stop", [pytest.param("6st", marks=pytest.mark.slow), "14st"])
def test_a_run_that_was_stopped_keeps_the_same(whole, tmp_path, stop):
    result, folder = whole
    cw.fit(recipe(), tmp_path / "run", on=cw.On(devices=2), stop_after=stop, **QUIET)
    resumed = cw.fit(recipe(), tmp_path / "run", on=cw.On(devices=4), **QUIET)
    assert resumed.fingerprint == result.fingerprint
    assert resumed.kept == dataclasses.replace(result.kept, value=pytest.approx(result.kept.value, rel=1e-5))
    one, other = (restore_run(recipe(), f, best=True) for f in (folder, tmp_path / "run"))
    assert all(np.array_equal(a, other.params[name]) for name, a in one.params.items())


def test_patience_ends_the_run_once_and_for_all(whole, tmp_path, capsys):
    (result, _), hook = whole, sys.unraisablehook
    lines = {**QUIET, "progress": "lines"}
    early = cw.fit(recipe(), tmp_path / "run", on=cw.On(devices=1), patience="8st", **lines)
    assert early.kept == dataclasses.replace(result.kept, ended_early=True, patience="8st")
    said = fact(
        "ended-early", metric="eval/loss", value=early.kept.value, best=early.kept.step, step=early.steps,
        total=30, patience="8st",
    )  # fmt: skip
    assert str(said) in capsys.readouterr().err.splitlines()
    assert sys.unraisablehook == hook  # of two folders of checkpoints, nothing stays
    assert early.steps == early.kept.step + 8 < 30
    stored = json.loads((tmp_path / "run" / "result.json").read_text())
    assert stored["steps"] == early.steps
    again = cw.fit(recipe(), tmp_path / "run", on=cw.On(devices=2), patience="8st", **QUIET)
    assert (again.steps, again.fingerprint) == (early.steps, early.fingerprint)


def test_a_best_of_steps_that_are_made_again_is_forgotten(tmp_path):
    """As of a process that was killed after the best of step 5, before the checkpoint of that step."""
    one = {**QUIET, "on": cw.On(devices=1), "checkpoint_every": "3st"}
    first = cw.fit(recipe(), tmp_path, **{**one, "eval_every": "5st"}, stop_after="5st")
    assert first.kept.step == restore_run(recipe(), tmp_path, best=True).steps == 5
    shutil.rmtree(tmp_path / "checkpoints" / "5")
    resumed = cw.fit(recipe(), tmp_path, **one, stop_after="4st")
    assert resumed.kept.step == restore_run(recipe(), tmp_path, best=True).steps == 4


def test_a_stop_between_evaluations_decides_nothing(tmp_path):
    stopped = cw.fit(recipe(), tmp_path, on=cw.On(devices=1), stop_after="3st", **QUIET)
    assert math.isfinite(stopped.metrics["eval/loss"]) and math.isfinite(stopped.metrics["train/loss"])
    assert stopped.history == [] and stopped.kept.step == 0 and not (tmp_path / "best").exists()


def test_no_older_best_stays(whole, tmp_path):
    result, folder = whole
    assert os.listdir(folder / "best") == [str(result.kept.step)]
    run = tmp_path / "run"
    cw.fit(recipe(), run, on=cw.On(devices=1), stop_after="12st", **QUIET)
    newest = max(int(name) for name in os.listdir(run / "best"))
    shutil.copytree(run / "best" / str(newest), run / "best" / "1")  # as a killed process leaves it
    resumed = cw.fit(recipe(), run, on=cw.On(devices=1), stop_after="13st", **QUIET)
    assert os.listdir(run / "best") == [str(resumed.kept.step)]


def test_a_best_that_cannot_be_had_again_counts_no_more():
    best = Best(tasks.recipe(), "eval/loss", "2st")
    best.go_on(
        [{"step": 1, "eval/loss": 0.5}, {"step": 2, "eval/loss": 0.4}], [1], 9, lambda what, value: value
    )
    assert not best.over and best.improved(10, {"eval/loss": 0.7}) and best.step == 10


def test_larger_is_better_but_for_losses_and_errors():
    accuracy = Best(tasks.recipe(), "eval/accuracy", None)
    rows = [{"step": 1, "eval/accuracy": 0.5}, {"step": 1, "train/loss": 1.0}]
    accuracy.go_on(rows, [1], 1, lambda what, value: value)
    assert not accuracy.improved(2, {"eval/accuracy": 0.5})
    assert not accuracy.improved(3, {"eval/accuracy": math.nan})
    assert accuracy.improved(4, {"eval/accuracy": 0.6}) and accuracy.step == 4
    loss = Best(tasks.recipe(), "eval/loss", "2st")
    assert not loss.waited_enough(100) and loss.improved(1, {"eval/loss": 0.5})
    assert loss.improved(2, {"eval/loss": 0.4}) and not loss.improved(3, {"eval/loss": 0.4})
    assert not loss.waited_enough(3) and loss.waited_enough(4)


def test_what_makes_no_sense_is_refused(tmp_path):
    one = {"on": cw.On(devices=1), "progress": "none"}
    with refused(RecipeError, "patience-without-best", patience="5ep"):
        cw.fit(tasks.recipe(), tmp_path / "a", patience="5ep", **one)
    with refused(RecipeError, "best-without-run", metric="eval/loss"):
        cw.fit(tasks.recipe(), keep_best="eval/loss", **one)
    with refused(RecipeError, "best-of-evaluation", metric="train/loss"):
        cw.fit(tasks.recipe(), tmp_path / "b", keep_best="train/loss", **one)
    with refused(RecipeError, "best-metric-unknown", metric="eval/los", hint="eval/loss"):
        cw.fit(tasks.recipe(), tmp_path / "c", keep_best="eval/los", **one)
    assert not (tmp_path / "c").exists()  # known before anything is trained
    with refused(CheckpointError, "run-without-best"):
        restore_run(tasks.recipe(), tmp_path, best=True)
