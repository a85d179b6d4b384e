"""Metrics that are no means: finished once, on the host, in both logs and in the result."""

import json

import jax
import numpy as np
import pytest

import chipwise as cw
import tasks
from chipwise.recipe.task import finished
from chipwise.run.evaluate import evaluate
from refusals import refused

QUIET = {"progress": "none"}


def loss(params, state, batch, key, train):
    made, state = tasks.plain_loss(params, state, batch, key, train)
    right = cw.losses.correct(tasks.plain_logits(params, batch), batch["label"])
    made["perplexity"] = cw.metrics.perplexity(made["loss"])
    made["each"] = cw.metrics.f1(tasks.plain_logits(params, batch), batch["label"], None)
    # A function made anew in every trace, as people will write it.
    made["odds"] = cw.Sum(right.sum(), np.float32(right.size), lambda total, count: total / (count - total))
    return made, state


def recipe(**changes):
    return tasks.quick(**{"task": tasks.quick_task(loss=loss, augment=None), "duration": "12st", **changes})


@pytest.mark.slow
def test_a_run_shows_finished_values_and_resumes(tmp_path):
    cw.fit(recipe(), tmp_path, on=cw.On(devices=1), stop_after="5st", log_every="5st", **QUIET)
    result = cw.fit(recipe(), tmp_path, on=cw.On(devices=1), log_every="5st", **QUIET)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in lines if "train/perplexity" in row] == [5, 10, 12]
    for row in [*lines, result.metrics]:
        for part in ("train", "eval"):
            if f"{part}/loss" in row:
                assert row[f"{part}/perplexity"] == pytest.approx(np.exp(row[f"{part}/loss"]), rel=1e-12)
                assert row[f"{part}/odds"] > 0
    each = result.metrics["eval/each"]
    assert isinstance(each, np.ndarray) and each.shape == (tasks.CLASSES,) and "eval/each" not in lines[-1]
    assert json.loads((tmp_path / "result.json").read_text())["metrics"]["eval/each"] == each.tolist()


@pytest.mark.slow
def test_one_program_for_all_finishes_the_same():
    result = cw.fit(
        recipe(task=tasks.quick_task(loss=loss, augment=None, eval=None)),
        on=cw.On(devices=1, exact=False),
        **QUIET,
    )
    assert result.metrics["train/perplexity"] == pytest.approx(
        np.exp(result.metrics["train/loss"]), rel=1e-12
    )
    assert result.metrics["train/odds"] > 0


def test_parts_of_24_bits_are_added_without_rounding():
    most = 2**24 - 1  # the largest odd whole number that float32 knows

    def counting(params, state, batch, key, train):
        made, state = tasks.plain_loss(params, state, batch, key, train)
        return {**made, "tokens": cw.Sum(np.float32(most), np.float32(1), lambda total, count: total)}, state

    task = tasks.quick_task(loss=counting, augment=None)
    params, state = tasks.init(jax.random.key(0))
    metrics = evaluate(tasks.quick(task=task, eval_block=1), params, state, on=cw.On(devices=1))
    assert metrics["tokens"] == len(task.eval) * most


def test_finish_gets_float64_and_may_give_numbers_only():
    def look(total, count):
        assert total.dtype == count.dtype == np.float64
        return total / count

    sums = cw.Sum(np.float32(1), np.float32(3), look)
    assert finished({"third": sums})["third"] == 1 / 3
    assert np.isnan(finished({"none": cw.Sum(np.float32(0), np.float32(0))})["none"])
    with refused(cw.errors.RecipeError, "finish-failed", metric="third", error="IndexError", total=[2]):
        finished({"third": cw.Sum(np.zeros(2), np.float32(3), lambda total, count: total[2])})
    with refused(cw.errors.RecipeError, "finish-failed", metric="third"):
        finished({"third": cw.Sum(np.zeros(2), np.float32(3), lambda total, count: {"a": total})})


@pytest.mark.parametrize(
    ("sums", "code"),
    [
        ({"loss": cw.Sum(1.0, 1.0, np.exp)}, "loss-with-finish"),
        ({"loss": cw.Sum(1.0, 1.0), "f1": cw.Sum(1.0, 1.0, "macro")}, "finish-is-no-function"),
    ],
)
def test_a_finish_that_breaks_the_contract_is_told_how(sums, code):
    task = tasks.quick_task(loss=lambda params, state, batch, key, train: (sums, state))
    with refused(cw.errors.RecipeError, code):
        cw.fit(tasks.quick(task=task), **QUIET)
