"""The best evaluation is kept and patience ends a run, after a stop as without one."""

import dataclasses
import json
import math
import os
import shutil
import sys

import jax.numpy as jnp
import numpy as np
import pytest

import chipwise as cw
import tasks
from chipwise.base.errors import CheckpointError, DataError, RecipeError, RunError
from chipwise.base.facts import fact
from chipwise.explain.report.run_report import report
from chipwise.proof.audit import audit
from chipwise.run.evaluate import evaluate
from chipwise.run.folder.checkpoint import Checkpoints, restore_run
from chipwise.run.folder.early_stopping import EarlyStopping, Kept
from chipwise.run.folder.run_reader import read_run
from chipwise.run.session import Session
from refusals import refused

pytestmark = pytest.mark.as_users_compile

QUIET = {"progress": "none", "eval_every": "4st", "log_every": "4st", "keep_best": "eval/loss"}


def rows(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def recipe():
    """Its rate is too large after a while, so that a middle evaluation is the best."""
    rising = cw.schedules.piecewise([("0st", 0.05), ("12st", 0.05), ("13st", 6.0), ("30st", 6.0)])
    return tasks.quick(optimizer=cw.sgd(lr=rising))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("best") / "run"
    return cw.fit(recipe(), folder, on=cw.On(devices=1), **QUIET), folder


def test_the_best_evaluation_can_be_had_again(whole):
    result, folder = whole
    losses = {row["step"]: row["eval/loss"] for row in rows(folder) if "eval/loss" in row}
    best = min(losses, key=losses.get)
    assert best < 30 and result.kept == Kept("eval/loss", losses[best], best, better="lower")
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
        tasks.quick(task=tasks.quick_task(eval=third)), best.params, best.state, on=on
    )
    with refused(DataError, "evaluation-columns", wrong=["x"]):
        cw.evaluate(best, cw.Arrays(x=np.zeros((3, 2), np.uint8), label=np.zeros(3, np.int32)))


@pytest.mark.slow
def test_a_run_without_a_best_says_so(tmp_path):
    run = cw.fit(tasks.quick(duration="2st"), tmp_path, on=cw.On(devices=1), progress="none")
    assert run.kept is None
    with refused(CheckpointError, "run-without-best", run=str(tmp_path)):
        _ = cw.result(tmp_path, tasks.quick(duration="2st")).best


@pytest.mark.slow
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
    best = EarlyStopping(recipe(), "eval/recalls", None)
    with refused(RecipeError, "best-metric-array", metric="eval/recalls", shape=[3]):
        best.improved(4, {"eval/recalls": np.zeros(3)})
    assert EarlyStopping(recipe(), "eval/loss", None).improved(4, {"eval/loss": 0.5})


def test_the_lowest_error_is_the_best():
    for metric in ("eval/rmse", "eval/distance_lower"):
        best = EarlyStopping(recipe(), metric, None)
        assert [best.improved(step, {metric: value}) for step, value in ((4, 0.5), (8, 0.7), (12, 0.4))] == [
            True, False, True,
        ]  # fmt: skip


@pytest.mark.slow
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


@pytest.mark.slow
def test_patience_ends_the_run_once_and_for_all(whole, tmp_path, capsys):
    (result, _), hook = whole, sys.unraisablehook
    lines = {**QUIET, "progress": "lines"}
    early = cw.fit(recipe(), tmp_path / "run", on=cw.On(devices=1), patience="8st", **lines)
    assert early.kept == dataclasses.replace(result.kept, ended_early=True, patience="8st")
    said = fact(
        "ended-early", metric="eval/loss", value=early.kept.value, best=early.kept.step, step=early.steps,
        total=30, patience="8st", better="lower",
    )  # fmt: skip
    lines = capsys.readouterr().err.splitlines()
    assert str(said) in lines and "eval/loss: lower is better" in lines
    assert sys.unraisablehook == hook  # of two folders of checkpoints, nothing stays
    assert early.steps == early.kept.step + 8 < 30
    stored = json.loads((tmp_path / "run" / "result.json").read_text())
    assert stored["steps"] == early.steps
    again = cw.fit(recipe(), tmp_path / "run", on=cw.On(devices=2), patience="8st", **QUIET)
    assert (again.steps, again.fingerprint) == (early.steps, early.fingerprint)


@pytest.mark.slow
def test_a_run_that_is_trained_beyond_its_early_end_is_not_finished(tmp_path):
    one = {**QUIET, "on": cw.On(devices=1)}
    early = cw.fit(recipe(), tmp_path, patience="8st", **one)
    told = (tmp_path / "result.json").read_bytes()
    other = tasks.quick(task=tasks.quick_task(loss=never_a_number), optimizer=recipe().optimizer)
    with refused(RunError, "run-of-another-recipe"):
        cw.fit(other, tmp_path, **one)
    assert cw.fit(recipe(), tmp_path, patience="8st", **one).steps == early.steps
    assert (tmp_path / "result.json").read_bytes() == told
    last = early.steps + 3
    assert cw.fit(recipe(), tmp_path, stop_after=f"{last}st", **one).steps == last < 30
    result = cw.result(tmp_path, recipe())
    assert result.steps == last and not result.complete and not (tmp_path / "result.json").exists()
    verdict, _ = audit(tmp_path, recipe(), steps="0:4", on=cw.On(devices=1))
    assert verdict.code == "audit-passed"


@pytest.mark.slow
def test_a_resume_that_is_refused_removes_nothing(tmp_path, monkeypatch):
    one = {**QUIET, "on": cw.On(devices=1), "checkpoint_every": "3st", "stop_after": "5st"}
    cw.fit(recipe(), tmp_path, **one)
    shutil.rmtree(tmp_path / "checkpoints" / "5")
    names = ["metrics.jsonl", "ledger.jsonl"]

    def there():
        best = sorted(os.listdir(tmp_path / "best"))
        return [(tmp_path / name).read_bytes() for name in names], best

    before = there()
    assert before[1] == ["4"]
    edited = dataclasses.replace(recipe(), task=tasks.quick_task(loss=tasks.edited_loss))
    with refused(RunError, "run-of-other-programs"):
        cw.fit(edited, tmp_path, **one)
    data = tasks.data()
    data.columns["label"][17] ^= 1
    with refused(RunError, "ledger-of-other-data"):
        cw.fit(dataclasses.replace(recipe(), task=tasks.quick_task(train=data)), tmp_path, **one)

    def full(session, steps=1):
        raise RecipeError("not-enough-memory", "no room")

    monkeypatch.setattr(Session, "compile", full)
    with refused(RecipeError, "not-enough-memory"):
        cw.fit(recipe(), tmp_path, **one)
    assert there() == before


@pytest.mark.slow
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


@pytest.mark.slow
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
    best = EarlyStopping(tasks.quick(), "eval/loss", "2st")
    best.go_on(
        [{"step": 1, "eval/loss": 0.5}, {"step": 2, "eval/loss": 0.4}], [1], 9, lambda what, value: value
    )
    assert not best.over and best.improved(10, {"eval/loss": 0.7}) and best.step == 10


def test_every_host_goes_on_from_the_best_of_the_first():
    rows = [{"step": 1, "eval/loss": 0.5}, {"step": 2, "eval/loss": 0.4}, {"step": 3, "eval/loss": 0.6}]
    sent = []
    first, other = (EarlyStopping(tasks.quick(), "eval/loss", "2st") for _ in range(2))
    first.go_on(rows, [1, 2], 3, lambda what, value: (sent.append(json.loads(json.dumps(value))), value)[1])
    other.go_on([], [], 3, lambda what, value: sent.pop(0))
    assert other.kept(False) == first.kept(False) == Kept("eval/loss", 0.4, 2, False, "2st", "lower")
    assert other.since == first.since == 2 and not sent


def never_a_number(params, state, batch, key, train):
    metrics, state = tasks.plain_loss(params, state, batch, key, train)
    return {**metrics, "score": cw.Sum.of(jnp.full(batch["label"].shape, jnp.nan), better="higher")}, state


def test_a_metric_that_is_never_a_number_is_told_once_and_ends_by_patience(tmp_path, capsys):
    task = tasks.quick_task(loss=never_a_number, augment=None)
    how = {**QUIET, "keep_best": "eval/score", "patience": "8st", "on": cw.On(devices=1)}
    result = cw.fit(tasks.quick(task=task), tmp_path, **how)
    assert (result.steps, result.kept) == (12, Kept("eval/score", None, 0, True, "8st", "higher"))
    warned = fact("best-not-a-number", metric="eval/score", step=4)
    assert capsys.readouterr().err.count("eval/score") == 1 == str(warned).count("eval/score")
    assert cw.result(tmp_path, tasks.quick(task=task)).kept == result.kept
    (said,) = report(tmp_path)["status"]["facts"]
    assert said["code"] == "ended-early-never-a-number"
    assert cw.fit(tasks.quick(task=task), tmp_path, **how).steps == 12


def test_the_first_number_is_the_best_though_patience_counted_before():
    best = EarlyStopping(tasks.quick(), "eval/loss", "8st")
    for step, value, improved, enough in (
        (4, math.nan, False, False), (8, math.inf, False, False), (11, 2.0, True, False),
        (18, math.nan, False, False), (19, 2.0, False, True),
    ):  # fmt: skip
        assert best.improved(step, {"eval/loss": value}) == improved
        assert best.waited_enough(step) == enough


def test_larger_is_better_but_for_losses_and_errors():
    accuracy = EarlyStopping(tasks.quick(), "eval/accuracy", None)
    rows = [{"step": 1, "eval/accuracy": 0.5}, {"step": 1, "train/loss": 1.0}]
    accuracy.go_on(rows, [1], 1, lambda what, value: value)
    assert not accuracy.improved(2, {"eval/accuracy": 0.5})
    assert not accuracy.improved(3, {"eval/accuracy": math.nan})
    assert accuracy.improved(4, {"eval/accuracy": 0.6}) and accuracy.step == 4
    loss = EarlyStopping(tasks.quick(), "eval/loss", "2st")
    assert not loss.waited_enough(100) and loss.improved(1, {"eval/loss": 0.5})
    assert loss.improved(2, {"eval/loss": 0.4}) and not loss.improved(3, {"eval/loss": 0.4})
    assert not loss.waited_enough(3) and loss.waited_enough(4)


def test_what_makes_no_sense_is_refused(tmp_path):
    one = {"on": cw.On(devices=1), "progress": "none"}
    with refused(RecipeError, "patience-without-best", patience="5ep"):
        cw.fit(tasks.quick(), tmp_path / "a", patience="5ep", **one)
    with refused(RecipeError, "best-without-run", metric="eval/loss"):
        cw.fit(tasks.quick(), keep_best="eval/loss", **one)
    with refused(RecipeError, "best-of-evaluation", metric="train/loss"):
        cw.fit(tasks.quick(), tmp_path / "b", keep_best="train/loss", **one)
    with refused(RecipeError, "best-metric-unknown", metric="eval/los", hint="eval/loss"):
        cw.fit(tasks.quick(), tmp_path / "c", keep_best="eval/los", **one)
    assert not (tmp_path / "c").exists()  # known before anything is trained
    unsaid = with_metrics()
    with refused(RecipeError, "direction-unknown", metric="eval/mystery"):
        cw.fit(unsaid, tmp_path / "d", keep_best="eval/mystery", patience="2st", **one)
    for typed in ({"mystery": "lower", "mistery": "lower"}, {"mystery": "down"}):
        with pytest.raises(RecipeError):
            cw.fit(unsaid, tmp_path / "d", keep_best="eval/mystery", better=typed, **one)
    assert not (tmp_path / "d").exists()
    with refused(CheckpointError, "run-without-best"):
        restore_run(tasks.quick(), tmp_path, best=True)


def with_metrics(**task):
    """`recipe`, with its loss by names that say which way is better, or state it, or say nothing."""

    def loss(params, state, batch, key, train):
        sums, state = tasks.quick_loss(params, state, batch, key, train)
        own = sums["loss"]
        stated = dataclasses.replace(own, better="lower")
        return {**sums, "val_bpb": own, "stated": stated, "mystery": own}, state

    return dataclasses.replace(recipe(), task=tasks.quick_task(loss=loss, **task))


@pytest.mark.parametrize(
    ("metric", "task", "typed"),
    [
        ("eval/val_bpb", {}, {}),
        pytest.param("eval/stated", {}, {}, marks=pytest.mark.slow),
        pytest.param("eval/mystery", {"better": {"mystery": "lower"}}, {}, marks=pytest.mark.slow),
        ("eval/mystery", {"better": {"mystery": "higher"}}, {"eval/mystery": "lower"}),
    ],
)
def test_the_lowest_of_what_is_declared_is_kept_by_a_run_that_goes_on(
    whole, tmp_path, capsys, metric, task, typed
):
    result, _ = whole
    how = {**QUIET, "keep_best": metric, "better": typed, "on": cw.On(devices=1), "progress": "lines"}
    cw.fit(with_metrics(**task), tmp_path, **how, stop_after="14st")
    begun = read_run(tmp_path)
    name = metric.removeprefix("eval/")
    assert begun.better[name] == begun.kept.better == "lower" and begun.kept.metric == metric
    kept = cw.fit(with_metrics(**task), tmp_path, **how)
    assert (kept.kept.value, kept.kept.step) == (result.kept.value, result.kept.step)
    stored = json.loads((tmp_path / "result.json").read_text())
    assert stored["better"] == {
        "loss": "lower",
        "accuracy": "higher",
        "val_bpb": "lower",
        "stated": "lower",
    } | {name: "lower"}
    assert stored["best"]["better"] == "lower" and kept.to_json()["better"] == stored["better"]
    said = capsys.readouterr().err
    assert f"{metric}: lower is better" in said and ("as typed" in said) == bool(typed)
    read = read_run(tmp_path)
    assert read.better == stored["better"] and vars(read.kept) == stored["best"]
