"""Verdicts on changes of a small recipe: bits first, then pairs, and the book."""

import dataclasses
import json
import shutil

import jax
import pytest

import chipwise as cw
import tasks
from chipwise.study.referee import referee
from chipwise.study.referee.tries import FILE
from chipwise.study.study_file import Run
from chipwise.study.study_runs import StudyRun
from refusals import refused

HERE = cw.On(devices=1)


@pytest.fixture
def made_up(monkeypatch):
    """Runs end at once: a function of the recipe and the seed gives the loss, another the speed."""
    ended = {}

    def fake(loss, speed=lambda recipe, seed: 100.0, bits=None, names=()):
        def train(job, origin, options, progress):
            of = origin.make(seed=job.seed)
            numbers = {
                "metrics": {name: loss(of, job.seed) for name in ("eval/loss", *names)},
                "examples_per_second": speed(of, job.seed),
            }
            fingerprint = bits or f"{of.optimizer.lr} {job.seed}"
            ended[job.folder] = Run(job.seed, job.run, True, steps=4, fingerprint=fingerprint, **numbers)

        monkeypatch.setattr(StudyRun, "train", train)
        for read in ("finished", "_stated"):
            monkeypatch.setattr(StudyRun, read, lambda job: ended.get(job.folder))
        return ended

    return fake


def recipe(duration="4st", **task):
    made = tasks.task(**{"loss": tasks.plain_loss, "augment": None, **task})
    return tasks.recipe(task=made, duration=duration, optimizer=cw.sgd(lr=0.1))


def judged(tmp_path, base, change, **more):
    return referee(base, change, run=tmp_path / "referee", on=HERE, **more)


def test_a_refactor_is_the_same_to_the_bit_without_training(tmp_path):
    def renamed(params, state, batch, key, train):
        return tasks.plain_loss(params, state, batch, key, train)

    other = dataclasses.replace(recipe(loss=renamed), name="other", seed=5)
    found = judged(tmp_path, recipe(), other)
    assert (found.verdict, found.fact.code, found.values) == ("same", "referee-same", [])
    assert len(set(found.digests)) == 1 and found.tries["tries"] == 1
    assert [path.name for path in (tmp_path / "referee").iterdir() if path.is_dir()] == []


def test_a_change_is_judged_by_pairs_and_later_tries_share_the_runs(tmp_path, made_up):
    slow = dataclasses.replace(recipe(), optimizer=cw.sgd(lr=1e-4))
    ended = made_up(lambda of, seed: seed + (0.0 if of.optimizer.lr > 0.01 else 1.0 + seed % 2 / 10))
    said = []
    found = judged(tmp_path, recipe(), slow, say=said.append)
    assert (found.verdict, found.metric) == ("worse", "eval/loss")
    assert found.difference > found.low > 0 and 4 <= len(found.values) <= 6 and 0 < found.level < 0.05
    (cost,) = [one for one in said if one.code == "referee-cost"]
    assert cost["pairs"] == found.predicted and abs(found.predicted - len(found.values)) <= 2
    runs = len(ended)
    again = judged(tmp_path, slow, recipe())
    assert again.verdict == "better" and len(again.values) >= len(found.values)
    assert len(ended) - runs == 2 * (len(again.values) - len(found.values))
    rows = [json.loads(line) for line in (tmp_path / "referee" / FILE).read_text().splitlines()]
    assert [row["verdict"] for row in rows] == ["worse", "better"]
    json.dumps(found.to_json())


def test_runs_that_another_rule_ends_are_not_shared(tmp_path, made_up):
    ended = made_up(lambda of, seed: seed + 1e3 * of.optimizer.lr + seed % 2 / 10)
    slow = dataclasses.replace(recipe(), optimizer=cw.sgd(lr=1e-4))
    rule = {"keep_best": "eval/loss", "patience": "2st"}
    bases = [
        judged(tmp_path, recipe(), slow, **options).digests[0]
        for options in ({}, {"keep_best": "eval/loss"}, rule, {**rule, "eval_every": "1st"})
    ]
    assert bases[0] == bases[1] and len(set(bases)) == 3
    assert len({folder.parent for folder in ended}) == 6


@pytest.mark.slow
def test_planted_results_decide_nothing(tmp_path):
    """Neither eight folders with a result alone, nor eight copies of a whole run."""
    near = dataclasses.replace(recipe(), optimizer=cw.sgd(lr=0.1001))
    first = judged(tmp_path, recipe(), near, spend=0)
    for side in (tmp_path / "referee").glob("*/seed-0"):
        for seed in range(1, 9):
            other = side.with_name(f"seed-{seed}")
            if seed < 5:
                other.mkdir()
                shutil.copy(side / "result.json", other)
            else:
                shutil.copytree(side, other)
    again = judged(tmp_path, recipe(), near, spend=0)
    assert (again.verdict, again.values) == ("open", first.values)


def test_the_verdict_goes_the_way_that_the_metric_does(tmp_path, made_up):
    """A change that raises every metric: by the name, by the task, and as typed."""

    def more(params, state, batch, key, train):
        sums, state = tasks.plain_loss(params, state, batch, key, train)
        return {**sums, "bpb": sums["loss"], "odd": sums["loss"]}, state

    made_up(lambda of, seed: seed + (of.optimizer.lr < 0.01) + seed % 2 / 10, names=("eval/bpb", "eval/odd"))

    def verdict(metric, better, task):
        sides = recipe(loss=more, better=task)
        slow = dataclasses.replace(sides, optimizer=cw.sgd(lr=1e-4))
        found = judged(tmp_path / f"{metric} {better} {task}", sides, slow, metric=metric, better=better)
        assert found.to_json()["better"] == found.better and f"{found.better} is better" in str(found.fact)
        return found.verdict, found.better

    assert verdict("eval/bpb", {}, {}) == ("worse", "lower")
    assert verdict("eval/odd", {}, {"odd": "higher"}) == ("better", "higher")
    assert verdict("eval/odd", {"odd": "lower"}, {"odd": "higher"}) == ("worse", "lower")
    with refused(cw.errors.RecipeError, "direction-unknown", metric="eval/odd"):
        verdict("eval/odd", {}, {})


def test_pairs_that_differ_alike_by_chance_leave_an_interval(tmp_path, made_up):
    made_up(lambda of, seed: (300 + seed % 3 + (of.optimizer.lr > 0.1)) / 360)
    near = dataclasses.replace(recipe(), optimizer=cw.sgd(lr=0.1001))
    found = judged(tmp_path, recipe(), near)
    assert found.verdict == "worse" and len(found.values) > 4
    assert 0 < found.low < found.difference - 1e-4 < found.difference + 1e-4 < found.high


@pytest.mark.parametrize("value", [None, [0.5, 1.0], "inf"])
def test_a_metric_that_is_no_finite_number_is_refused(tmp_path, made_up, value):
    made_up(lambda of, seed: value if seed == 1 and of.optimizer.lr > 0.1 else 1.0)
    near = dataclasses.replace(recipe(), optimizer=cw.sgd(lr=0.1001), name="near")
    facts = {"side": "near", "seed": 1, "metric": "eval/loss", "value": str(value)}
    with refused(cw.errors.RecipeError, "referee-no-number", **facts):
        judged(tmp_path, recipe(), near)


def test_a_difference_within_the_margin_is_equal(tmp_path, made_up):
    made_up(lambda of, seed: 1.0 + seed / 10 + (of.optimizer.lr > 0.1) * (0.001 + seed % 2 / 1000))
    near = dataclasses.replace(recipe(), optimizer=cw.sgd(lr=0.1001))
    found = judged(tmp_path, recipe(), near, margin="20%")
    assert found.verdict == "equal" and abs(found.difference) < found.margin


@pytest.mark.slow
def test_no_time_shows_nothing_and_says_what_it_takes(tmp_path):
    near = dataclasses.replace(recipe(), optimizer=cw.sgd(lr=0.1001))
    found = judged(tmp_path, recipe(), near, spend=0)
    assert found.verdict == "open" and len(found.values) == 1 and found.low is None


@pytest.mark.slow
def test_the_same_bits_are_compared_by_speed(tmp_path, made_up):
    def loss(params, state, batch, key, train):
        sums, state = tasks.plain_loss(params, state, batch, key, train)
        return {**sums, "more": cw.Sum.of(batch["x"][:, 0].astype("float32"))}, state

    def speed(of, seed):
        return (160 if of.task.loss is loss else 100) + seed

    made_up(lambda of, seed: 1.0, speed, "equal")
    found = judged(tmp_path, recipe(), recipe(loss=loss))
    assert found.verdict == "faster" and found.speed[1] > 1 and found.difference == 0
    assert judged(tmp_path, recipe(loss=loss), recipe(), spend=0).verdict == "open"  # nothing ran now


@pytest.mark.slow
def test_other_data_and_metrics_are_refused(tmp_path):
    with refused(cw.errors.RecipeError, "referee-other-data"):
        judged(tmp_path, recipe(), recipe(eval=tasks.data(50, 7)))
    slow = dataclasses.replace(recipe(), optimizer=cw.sgd(lr=1e-4))
    with refused(cw.errors.RecipeError, "direction-unknown", metric="eval/blue"):
        judged(tmp_path, recipe(), slow, metric="eval/blue")
    assert not any(path.is_dir() for path in (tmp_path / "referee").glob("*"))  # nothing was trained
    with refused(cw.errors.RecipeError, "referee-metric", name="eval/bleu"):
        judged(tmp_path, recipe(), slow, metric="eval/bleu")
    for margin in ("much", -1, "0%", float("nan")):
        with refused(cw.errors.RecipeError, "referee-margin"):
            judged(tmp_path, recipe(), slow, margin=margin)


@pytest.mark.slow
def test_what_diverges(tmp_path):
    def broken(params, state, batch, key, train):
        _, state = tasks.plain_loss(params, state, batch, key, train)
        return {"loss": cw.Sum.of(jax.numpy.log(-batch["x"][:, 0].astype("float32") - 1))}, state

    found = judged(tmp_path, recipe(), recipe(loss=broken))
    assert (found.verdict, found.diverged, found.fact.code) == ("worse", True, "referee-diverged")
    with refused(cw.errors.RunError, "referee-base-diverged", seed=0):
        judged(tmp_path, recipe(loss=broken), recipe())
