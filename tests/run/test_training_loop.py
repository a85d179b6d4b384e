"""The loop over a run's moments: what it yields, and that nothing done there changes the run."""

import contextlib
import gc
import inspect
import json
import os
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

import chipwise as cw
import tasks
from chipwise.base.errors import RecipeError
from chipwise.run.folder import run_folder
from chipwise.run.folder.media import medium_of
from chipwise.run.folder.run_reader import read_media, read_run
from refusals import refused

pytestmark = pytest.mark.as_users_compile

HOW = {"on": cw.On(devices=1), "log_every": "4st", "eval_every": "10st", "progress": "none"}


@pytest.fixture(scope="module")
def recipe():
    """The small task at its quickest to compile, with averaged parameters."""
    task = tasks.quick_task(
        loss=tasks.plain_loss, augment=None, predict=lambda p, s, x: tasks.plain_logits(p, x)
    )
    return tasks.quick(task=task, ema=0.5)


@pytest.fixture(scope="module")
def whole(recipe):
    return cw.fit(recipe, **HOW)


def test_fit_and_moments_take_the_same():
    one, other = (inspect.signature(f).parameters for f in (cw.fit, cw.training))
    assert list(one.values()) == list(other.values())


def test_after_the_loop_its_last_event_is_over(recipe, tmp_path):
    *_, event = cw.training(recipe, tmp_path, stop_after="5st", **HOW)
    before = (tmp_path / "metrics.jsonl").read_text()
    for call in (lambda: event.log({"mine/x": 1.0}), lambda: event.text("mine/text", "a")):
        with refused(RecipeError, "event-over", kind="end", step=5):
            call()
    assert (tmp_path / "metrics.jsonl").read_text() == before and event.parameters()


def test_every_row_is_a_moment_and_code_there_changes_no_bit(recipe, whole, tmp_path):
    seen, seconds = [], 0.0
    for event in cw.training(recipe, tmp_path, checkpoint_every="13st", **HOW):
        seen.append((event.kind, event.step, event.done - event.step))
        assert event.epoch == pytest.approx(event.step * 24 / 101, abs=1e-5) and event.total == 30
        np.random.seed(event.step)
        jax.config.update("jax_enable_x64", True)  # as some library may
        jax.numpy.arange(3) + 1
        if event.kind == "log":
            assert set(event.metrics) == {"train/loss"} and event.rates["lr"] > 0
            time.sleep(0.02)
            seconds += 0.02
        if event.kind == "evaluation":
            assert set(event.metrics) == {"eval/loss"}
    jax.config.update("jax_enable_x64", False)
    logs = [
        ("log", step, late) for step, late in ((4, 1), (8, 1), (12, 1), (16, 1), (20, 0), (24, 1), (28, 1))
    ]
    others = [("evaluation", 10, 0), ("evaluation", 20, 0), ("checkpoint", 13, 0), ("checkpoint", 26, 0)]
    ends = [("log", 30, 0), ("evaluation", 30, 0), ("end", 30, 0)]
    assert seen[-3:] == ends and sorted(seen) == sorted(logs + others + ends)
    assert event.result.fingerprint == whole.fingerprint and event.metrics == whole.metrics
    kept = [{k: v for k, v in row.items() if "/" in k} for row in event.result.history]
    assert kept == [{k: v for k, v in row.items() if "/" in k} for row in whole.history]
    assert 0.5 * seconds < event.result.seconds["own_code"]
    # Where nobody has code there, the section holds only what a busy machine took from the loop.
    assert whole.seconds.get("own_code", 0.0) < event.result.seconds["own_code"]
    assert event.result.seconds["train"] < seconds + whole.seconds["total"]


@pytest.mark.parametrize(
    "how", ["stop", *(pytest.param(how, marks=pytest.mark.slow) for how in ("break", "raise", "close"))]
)
def test_a_loop_that_is_left_leaves_a_run_that_goes_on(recipe, whole, tmp_path, how):
    loop = cw.training(recipe, tmp_path, **HOW)
    with contextlib.suppress(ZeroDivisionError):
        for event in loop:
            if event.step == 8:
                if how == "raise":
                    raise ZeroDivisionError
                if how != "stop":
                    break
                event.stop()
    loop.close()
    stored = read_run(tmp_path)
    left = "done" if how == "stop" else "stopped"
    assert [(e["event"], e.get("how")) for e in stored.processes] == [("start", None), ("end", left)]
    assert stored.checkpoints == [9] and stored.result is None
    if how == "stop":
        assert (event.kind, event.result.steps, event.result.complete) == ("end", 9, False)
    done = cw.fit(recipe, tmp_path, **HOW)
    assert done.fingerprint == whole.fingerprint
    assert [row["step"] for row in done.history] == [row["step"] for row in whole.history]


HELD = """
import multiprocessing, sys
import chipwise as cw
import tasks

loop = cw.training(tasks.quick(), sys.argv[1], on=cw.On(devices=1), log_every="2st", progress="none")
print(next(loop).step)
child = multiprocessing.get_context("fork").Process(target=print, args=("child",), kwargs={"flush": True})
child.start()
child.join()
"""


@pytest.mark.slow
def test_a_loop_that_a_program_holds_at_its_end_saves_its_state(tmp_path):
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", HELD, str(tmp_path)],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert (done.returncode, done.stdout) == (0, "2\nchild\n") and "Traceback" not in done.stderr
    stored = read_run(tmp_path)
    assert [(e["event"], e.get("how")) for e in stored.processes] == [("start", None), ("end", "stopped")]
    assert stored.checkpoints


@pytest.mark.slow
def test_to_leave_the_loop_at_its_end_is_no_stop(recipe, whole, tmp_path):
    for event in cw.training(recipe, tmp_path, **HOW):
        if event.kind == "end":
            break
    assert read_run(tmp_path).processes[-1]["how"] == "done" and read_run(tmp_path).result is not None
    (again,) = cw.training(recipe, tmp_path, **HOW)  # a finished run has one event left
    assert again.kind == "end" and again.result.fingerprint == whole.fingerprint


@pytest.mark.slow
def test_parameters_and_predictions_are_those_of_the_steps_done(recipe, whole, tmp_path):
    data = recipe.task.eval
    for event in cw.training(recipe, tmp_path, keep=9, **HOW):
        if (event.kind, event.step) == ("evaluation", 10):
            at_ten = event.parameters()[0]
            assert cw.evaluate(event, data)["loss"] == event.metrics["eval/loss"]
            outputs = cw.predict(event, data).outputs
            event.save()
        if (event.kind, event.step) == ("log", 12):
            assert event.done == 13 and not np.array_equal(event.parameters()[0]["w"], at_ten["w"])
    assert 10 in read_run(tmp_path).checkpoints
    assert all(np.array_equal(event.parameters()[0][n], whole.params[n]) for n in whole.params)
    short = cw.fit(recipe, stop_after="10st", **HOW)
    assert all(np.array_equal(at_ten[n], short.params[n]) for n in short.params)
    assert np.array_equal(outputs, cw.predict(short, data).outputs)


@pytest.mark.slow
def test_own_numbers_are_rows_once(recipe, tmp_path):
    def numbers(**more):
        for event in cw.training(recipe, tmp_path, **HOW, **more):
            if event.kind in ("evaluation", "end"):
                event.log({f"mine/{event.kind}": event.step / 2})

    numbers(stop_after="20st")
    numbers()
    numbers()
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    mine = [(row["step"], row["mine/evaluation"]) for row in rows if "mine/evaluation" in row]
    assert mine == [(10, 5.0), (20, 10.0), (30, 15.0)]
    assert [row["step"] for row in rows if "mine/end" in row] == [20, 30]


def test_what_a_moment_refuses(recipe, tmp_path):
    loop = cw.training(recipe, **HOW)
    first = next(loop)
    with refused(RecipeError, "save-nowhere"):
        first.save()
    for name in ("bleu", "train/bleu"):
        with refused(RecipeError, "row-name", value=name):
            first.log({name: 1.0})
    next(loop)
    for use in (first.parameters, lambda: first.log({"a/b": 1})):
        with refused(RecipeError, "event-over", kind="log", step=4):
            use()
    del loop
    gc.collect()  # closes it


PIXELS = np.arange(2 * 4 * 3, dtype=np.uint8).reshape(2, 4, 3)


def shown(recipe, run, **more):
    """Trains with a text and a picture at each evaluation: what the run keeps of them, and the result."""
    for event in cw.training(recipe, run, **{**HOW, "checkpoint_every": "13st", **more}):
        if event.kind == "evaluation":
            event.text("mine/says", f"of {event.step}, \ud800\n<b>")
            event.picture("mine/says", PIXELS + np.uint8(event.step))
            event.text("mine/says", "a second one is not the first")
        if event.kind == "log":
            event.log({"mine/number": 1.0})
    return read_media(run), event.result


@pytest.mark.slow
def test_texts_and_pictures_are_kept_once_and_change_no_bit(recipe, whole, tmp_path):
    rows, result = shown(recipe, tmp_path / "run")
    assert result.fingerprint == whole.fingerprint
    assert [(row["step"], row["name"]) for row in rows] == [
        (s, "mine/says") for s in (10, 10, 20, 20, 30, 30)
    ]
    assert rows[0]["text"] == "of 10, ?\n<b>" and medium_of(rows[0]) == rows[0]["text"]
    np.testing.assert_array_equal(medium_of(rows[3]), PIXELS + np.uint8(20))
    content = b"".join(file.read_bytes() for file in (tmp_path / "run").glob("events.out.*"))
    assert content.count(b"mine/says/text_summary") == 3 and content.count(b"\x89PNG") == 3
    shown(recipe, tmp_path / "again", stop_after="17st")  # the evaluation of step 10 is before the checkpoint
    assert read_media(tmp_path / "again") == rows[:2]
    with open(tmp_path / "again" / "media.jsonl", "a") as file:  # of work that was lost
        file.write(json.dumps({"step": 25, "name": "mine/says", "text": "lost"}) + "\n")
    resumed, ended = shown(recipe, tmp_path / "again", on=cw.On(devices=2))
    assert ended.fingerprint == whole.fingerprint
    assert resumed == rows
    assert shown(recipe, tmp_path / "again", fresh=True, stop_after="5st")[0] == []


@pytest.mark.parametrize(
    ("call", "code"),
    [
        (lambda m: m.text("mine", "x"), "row-name"),
        (lambda m: m.text("train/x", "x"), "row-name"),
        (lambda m: m.text("mine/x\n", "x"), "row-name"),
        (lambda m: m.text("mine/" + "x" * 96, "x"), "row-name"),
        (lambda m: m.text(3, "x"), "row-name"),
        (lambda m: m.log({"mine/\x1b[31m": 1.0}), "row-name"),
        (lambda m: m.text("mine/x", b"x"), "media-text"),
        (lambda m: m.text("mine/x", "x" * (1 + (1 << 16))), "media-text"),
        (lambda m: m.picture("mine/x", PIXELS.astype(np.float32)), "media-picture"),
        (lambda m: m.picture("mine/x", PIXELS[..., 0]), "media-picture"),
        (lambda m: m.picture("mine/x", PIXELS[..., :2]), "media-picture"),
        (lambda m: m.picture("mine/x", PIXELS[:0]), "media-picture"),
        (lambda m: m.picture("mine/x", np.zeros((1, 1 + (1 << 22), 3), np.uint8)), "media-picture"),
        (lambda m: m.picture("mine/x", "mine.png"), "media-picture"),
    ],
)
def test_what_cannot_be_shown_is_refused(moment_of_a_run, call, code):
    with refused(RecipeError, code):
        call(moment_of_a_run)


@pytest.fixture(scope="module")
def moment_of_a_run(recipe, tmp_path_factory):
    loop = cw.training(recipe, tmp_path_factory.mktemp("run"), **HOW)
    yield next(loop)
    loop.close()


def test_without_a_folder_there_is_no_place_for_them(recipe):
    with contextlib.closing(cw.training(recipe, **HOW)) as loop, refused(RecipeError, "show-nowhere"):
        next(loop).text("mine/x", "x")


@pytest.mark.slow
def test_a_full_run_says_so_once_and_goes_on(recipe, whole, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(run_folder, "MOST_MEDIA", 9)
    rows, result = shown(recipe, tmp_path)
    assert rows == [] and result.fingerprint == whole.fingerprint
    assert capsys.readouterr().err.count("of step 10 and later ones") == 1
