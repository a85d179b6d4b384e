import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import chipwise as cw
import tasks
from chipwise.engine.checkpoint import Checkpoints
from chipwise.engine.stored import read_run
from chipwise.words.facts import fact
from refusals import refused

QUIET = {"progress": "none"}


def rows(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """An uninterrupted run with a folder."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    return cw.fit(tasks.recipe(), folder, on=cw.On(devices=1), log_every="4st", **QUIET), folder


def test_the_result_says_everything(whole):
    result, folder = whole
    assert result.steps == 30
    assert len(result.fingerprint) == 64
    assert set(result.metrics) == {"train/loss", "train/accuracy", "eval/loss", "eval/accuracy"}
    assert set(result.seconds) == {
        "start",
        "compile",
        "train",
        "wait_data",
        "evaluate",
        "checkpoint",
        "total",
    }
    assert result.speed["batch"] == 24
    assert result.speed["share_of_peak"] is None
    low, high = result.speed["examples_per_second_quartiles"]
    assert low <= result.examples_per_second <= high
    stored = json.loads((folder / "result.json").read_text())
    assert stored == result.to_json()
    assert stored["devices"]["replicas_per_device"] == 8


def test_metrics_cover_every_step_once(whole):
    result, folder = whole
    logged = [row["step"] for row in rows(folder) if "train/loss" in row]
    assert logged == [4, 8, 12, 16, 20, 24, 28, 30]
    assert result.history == rows(folder)


def test_the_seconds_of_rows_are_of_the_whole_run(whole, tmp_path):
    result, _ = whole
    seconds = [row["seconds"] for row in result.history]
    assert seconds[0] > 0 and seconds == sorted(seconds)
    assert seconds[-1] <= result.seconds["total"] + 1e-3  # rounded to milliseconds
    folder = tmp_path / "run"
    cw.fit(tasks.recipe(), folder, on=cw.On(devices=1), stop_after="8st", **QUIET)
    before = rows(folder)
    assert before[-1]["step"] == 8
    (folder / "metrics.jsonl").write_text("")  # a process that was stopped between rows counts too
    resumed = cw.fit(tasks.recipe(), folder, on=cw.On(devices=1), **QUIET).history
    assert resumed[0]["seconds"] > before[-1]["seconds"]


def test_tensorboard_can_read_the_events(whole):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    result, folder = whole
    events = EventAccumulator(str(folder))
    events.Reload()
    losses = events.Scalars("train/loss")
    assert [e.step for e in losses] == [4, 8, 12, 16, 20, 24, 28, 30]
    assert losses[-1].value == pytest.approx(result.metrics["train/loss"])


@pytest.mark.parametrize("then", [2, pytest.param(8, marks=pytest.mark.slow)])
def test_resuming_on_other_devices_gives_the_same_bits(whole, tmp_path, then):
    first = cw.fit(tasks.recipe(), tmp_path, on=cw.On(devices=1), stop_after="13st", log_every="4st", **QUIET)
    assert first.steps == 13
    second = cw.fit(tasks.recipe(), tmp_path, on=cw.On(devices=then), log_every="4st", **QUIET)
    result, folder = whole
    assert second.fingerprint == result.fingerprint
    assert second.metrics["eval/accuracy"] == result.metrics["eval/accuracy"]
    a, b = (
        [{k: v for k, v in row.items() if k in ("step", "lr") or "/" in k} for row in rows(f)]
        for f in (folder, tmp_path)
    )
    assert a == b  # also the sums of steps before and after the stop; and the stop made no row
    assert first.metrics["train/loss"] != a[2]["train/loss"] and "eval/loss" in first.metrics


def test_a_finished_run_is_not_trained_again(whole, capsys):
    result, folder = whole
    again = cw.fit(tasks.recipe(), folder, on=cw.On(devices=1), **QUIET)
    assert again.fingerprint == result.fingerprint
    assert again.metrics == result.metrics
    assert again.seconds["train"] == 0


def test_another_recipe_is_refused_with_what_differs(whole):
    _, folder = whole
    before = (folder / "result.json").read_bytes()
    with refused(cw.errors.RunError, "run-of-another-recipe", changes=[("seed", 3, 4)]):
        cw.fit(tasks.recipe(seed=4), folder, **QUIET)
    assert (folder / "result.json").read_bytes() == before


def test_data_may_be_streamed_to_the_same_bits(whole, monkeypatch):
    monkeypatch.setattr("chipwise.engine.feed.fits", lambda source, limit: False)
    result, _ = whole
    assert cw.fit(tasks.recipe(), on=cw.On(devices=2), **QUIET).fingerprint == result.fingerprint


def test_any_source_with_len_and_index_will_do(whole):
    columns = tasks.data().columns
    examples = [{name: column[i] for name, column in columns.items()} for i in range(101)]
    result, _ = whole
    assert (
        cw.fit(tasks.recipe(task=tasks.task(train=examples)), on=cw.On(devices=1), **QUIET).fingerprint
        == result.fingerprint
    )


def test_an_error_in_a_streamed_source_reaches_the_caller(monkeypatch):
    class Broken(list):
        def __getitem__(self, i):
            if i == 50:
                raise cw.errors.DataError("photo 50 cannot be read")
            return super().__getitem__(i)

    monkeypatch.setattr("chipwise.engine.feed.fits", lambda source, limit: False)
    columns = tasks.data().columns
    examples = Broken({name: column[i] for name, column in columns.items()} for i in range(101))
    with pytest.raises(cw.errors.DataError, match="photo 50"):
        cw.fit(tasks.recipe(task=tasks.task(train=examples, eval=None)), on=cw.On(devices=1), **QUIET)


@pytest.mark.parametrize(
    "replicas,found,used",
    [*(pytest.param(*n, marks=pytest.mark.slow) for n in ((8, 8, 8), (6, 8, 6), (12, 8, 8))), (1, 8, 1)],
)
def test_all_devices_are_used_that_the_replicas_can_use(replicas, found, used, capsys):
    recipe = tasks.recipe(replicas=replicas, duration="1st", task=tasks.task(eval=None))
    result = cw.fit(recipe, progress="lines")
    assert result.devices["count"] == used
    said = capsys.readouterr().err
    assert ("devices found" in said) == (used < found)
    each = f"{replicas // used}" + f" to {-(-replicas // used)}" * (replicas % used > 0)
    assert f"{used} × cpu (simulated), {each} of {replicas} replicas each" in said


def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_the_last_good_checkpoint(tmp_path, monkeypatch):
    def loss(params, state, batch, key, train):
        metrics, state = tasks.loss(params, state, batch, key, train)
        if train:
            bad = state["calls"] > 20
            total = jax.numpy.where(bad, jax.numpy.nan, metrics["loss"].total)
            metrics = {**metrics, "loss": cw.Sum(total, metrics["loss"].count)}
        return metrics, state

    recipe = tasks.recipe(task=tasks.task(loss=loss))
    every = {"log_every": "5st", "checkpoint_every": "5st", "eval_every": None}
    with refused(cw.errors.DivergedError, "loss-not-finite", first=21, last=25, value="nan", checkpoint=20):
        cw.fit(recipe, tmp_path, on=cw.On(devices=1), **every, **QUIET)
    assert cw.engine.restore_run(recipe, tmp_path).steps == 20
    stored = read_run(tmp_path)
    assert stored.rows[-1]["diverged"] == {"code": "loss-not-finite", "first": 21, "last": 25, "value": "nan"}
    assert [event["event"] for event in stored.processes] == ["start", "end"] and not stored.running
    assert (stored.processes[-1]["how"], stored.processes[-1]["code"]) == ("diverged", "loss-not-finite")

    def full(checkpoints):
        raise cw.errors.RunError("run-disk-full", path="", checkpoint=None, reason="")

    monkeypatch.setattr(Checkpoints, "wait", full)  # which must not hide why the run ends
    with refused(cw.errors.DivergedError, "loss-not-finite", checkpoint=20):
        cw.fit(recipe, tmp_path, on=cw.On(devices=1), **every, **QUIET)


@pytest.mark.parametrize(
    "changes",
    [
        {"duration": "0st"},
        {"batch": 800, "duration": "2st", "optimizer": cw.sgd(lr=cw.one_cycle(0.1, warmup="5ep"))},
    ],
)
def test_a_recipe_that_cannot_do_what_it_says_is_warned_about(changes, capsys):
    task = tasks.task(loss=tasks.plain_loss, augment=None, eval=None)  # quick to compile
    recipe = tasks.recipe(task=task, replicas=1, **changes)
    cw.fit(recipe, on=cw.On(devices=1), progress="lines")
    shown = capsys.readouterr().err
    assert recipe.warnings() and all(f"warning: {warning}" in shown for warning in recipe.warnings())


def test_the_average_is_evaluated_and_the_trained_parameters_are_fingerprinted(whole):
    result = cw.fit(tasks.recipe(ema=0.5), on=cw.On(devices=1), **QUIET)
    assert result.fingerprint == whole[0].fingerprint
    different = [
        not np.array_equal(a, b)
        for a, b in zip(jax.tree.leaves(result.params), jax.tree.leaves(whole[0].params), strict=True)
    ]
    assert all(different)
    assert result.metrics["eval/loss"] != whole[0].metrics["eval/loss"]


@pytest.mark.slow
def test_mix_sees_one_replicas_batch_and_a_key():
    shapes = []

    def mix(batch, key):
        shapes.append(batch["x"].shape)
        return {**batch, "x": jax.random.permutation(key, batch["x"])}

    one = cw.fit(tasks.recipe(task=tasks.task(mix=mix), duration="3st"), on=cw.On(devices=1), **QUIET)
    two = cw.fit(tasks.recipe(task=tasks.task(mix=mix), duration="3st"), on=cw.On(devices=2), **QUIET)
    assert set(shapes) == {(3, tasks.FEATURES)}
    assert one.fingerprint == two.fingerprint


@pytest.mark.parametrize("momentum, warned", [(0.99, True), (0.5, False)])
def test_running_statistics_that_hold_their_start_are_named(momentum, warned, capsys):
    """0.98 in training, 0.10 in evaluation: 20 steps are too few for a momentum of 0.99."""

    def loss(params, state, batch, key, train):
        mean = jnp.mean(batch["x"].astype(jnp.float32), axis=0)
        if train:
            state = {"mean": momentum * state["mean"] + (1 - momentum) * mean}
        else:
            mean = state["mean"]
        logits = (batch["x"].astype(jnp.float32) - mean[None]) @ params["w"]
        values = cw.losses.softmax_cross_entropy(logits, batch["label"])
        right = cw.losses.correct(logits, batch["label"])
        return {"loss": cw.Sum.of(values), "accuracy": cw.Sum.of(right)}, state

    label = np.arange(48, dtype=np.int32) % 2
    x = (100 + np.random.default_rng(0).normal(size=(48, 2))).astype(np.float32)
    x[:, 0] += 6 * label
    data = cw.Arrays(x=x, label=label)
    start = {"w": jnp.zeros((2, 2))}, {"mean": jnp.zeros(2)}
    task = cw.Task(init=lambda key: start, loss=loss, train=data, eval=data)
    recipe = cw.Recipe(task=task, batch=48, replicas=1, duration="20st", optimizer=cw.sgd(lr=0.1))
    result = cw.fit(recipe, on=cw.On(devices=1), progress="none")
    assert result.metrics["train/accuracy"] > 0.98
    assert (result.metrics["eval/accuracy"] < 0.6) is warned
    told = str(fact("statistics-unsettled", steps=20))
    assert capsys.readouterr().err.count(told) == warned
