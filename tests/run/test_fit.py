import importlib
import inspect
import json
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import chipwise as cw
import tasks
from chipwise.base.errors import RunError
from chipwise.base.facts import fact
from chipwise.run import session
from chipwise.run.folder.checkpoint import Checkpoints
from chipwise.run.folder.run_reader import read_run
from refusals import refused

pytestmark = pytest.mark.as_users_compile

QUIET = {"progress": "none"}


def rows(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """An uninterrupted run with a folder."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    return cw.fit(tasks.quick(), folder, on=cw.On(devices=1), log_every="4st", **QUIET), folder


def test_the_result_says_everything(whole):
    result, folder = whole
    assert result.steps == 30
    assert len(result.fingerprint) == 64
    assert set(result.metrics) == {"train/loss", "train/accuracy", "eval/loss", "eval/accuracy"}
    # A busy machine may take a millisecond between two steps, which counts as code of the user
    assert set(result.seconds) - {"own_code"} == {
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


def test_every_option_is_passed_on(monkeypatch):
    names = [name for name in inspect.signature(cw.fit).parameters if name not in ("recipe", "run")]
    assert names == list(inspect.signature(cw.training).parameters)[2:]
    given, passed = {name: object() for name in names}, {}

    def training(recipe, run, **options):
        passed.update(options)
        yield SimpleNamespace(result="result")

    monkeypatch.setattr(importlib.import_module("chipwise.run.fit"), "training", training)
    assert cw.fit.__wrapped__(None, None, **given) == "result" and passed == given


def test_metrics_cover_every_step_once(whole):
    result, folder = whole
    logged = [row["step"] for row in rows(folder) if "train/loss" in row]
    assert logged == [4, 8, 12, 16, 20, 24, 28, 30]
    assert result.history == rows(folder)


@pytest.mark.slow
def test_the_seconds_of_rows_are_of_the_whole_run(whole, tmp_path):
    result, _ = whole
    seconds = [row["seconds"] for row in result.history]
    assert seconds[0] > 0 and seconds == sorted(seconds)
    assert seconds[-1] <= result.seconds["total"] + 1e-3  # rounded to milliseconds
    folder = tmp_path / "run"
    cw.fit(tasks.quick(), folder, on=cw.On(devices=1), stop_after="8st", **QUIET)
    before = rows(folder)
    assert before[-1]["step"] == 8
    (folder / "metrics.jsonl").write_text("")  # a process that was stopped between rows counts too
    resumed = cw.fit(tasks.quick(), folder, on=cw.On(devices=1), **QUIET).history
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
    first = cw.fit(tasks.quick(), tmp_path, on=cw.On(devices=1), stop_after="13st", log_every="4st", **QUIET)
    assert first.steps == 13
    second = cw.fit(tasks.quick(), tmp_path, on=cw.On(devices=then), log_every="4st", **QUIET)
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
    again = cw.fit(tasks.quick(), folder, on=cw.On(devices=1), **QUIET)
    assert again.fingerprint == result.fingerprint
    assert again.metrics == result.metrics
    assert again.seconds["train"] == 0


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A short run that is over."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    cw.fit(tasks.quick(duration="4st"), folder, on=cw.On(devices=1), progress="none")
    return folder


def edited(**changes):
    """The recipe of `finished` with changes of its task that keep their names, as in an edited file."""
    return tasks.quick(task=tasks.quick_task(**changes), duration="4st")


@pytest.mark.slow
def test_a_finished_run_does_not_answer_for_edited_code(finished):
    made, how = edited(loss=tasks.edited_loss), {"on": cw.On(devices=1), "progress": "none"}
    with refused(RunError, "finished-run-of-other-programs") as error:
        cw.fit(made, finished, **how)
    assert {name for name, _, _ in error.value.facts["changes"]} == {"code", "evaluation"}
    told = json.loads((finished / "result.json").read_text())
    assert cw.fit(made, finished, changed_code=True, **how).fingerprint == told["fingerprint"]
    assert cw.fit(edited(), finished, **how).fingerprint == told["fingerprint"]
    assert json.loads((finished / "result.json").read_text()) == told


@pytest.mark.parametrize("source", ["train", "eval"])
def test_a_finished_run_does_not_answer_for_other_labels(finished, source):
    there = getattr(tasks.quick_task(), source)
    columns = {name: column.copy() for name, column in there.columns.items()}
    columns["label"][3] = (columns["label"][3] + 1) % tasks.CLASSES
    name = {"train": "training", "eval": "evaluation"}[source]
    with refused(RunError, "ledger-of-other-data", name=name):
        cw.fit(edited(**{source: cw.Arrays(**columns)}), finished, on=cw.On(devices=1), progress="none")


def test_a_finished_run_answers_after_an_update_of_jax(finished, monkeypatch):
    """Its traces are other ones, which proves nothing about the code."""
    now = session.versions() | {"jax": "99.0"}
    monkeypatch.setattr(session, "versions", lambda: now)
    assert cw.fit(edited(loss=tasks.edited_loss), finished, on=cw.On(devices=1), progress="none").steps == 4


def test_another_recipe_is_refused_with_what_differs(whole):
    _, folder = whole
    before = (folder / "result.json").read_bytes()
    with refused(cw.errors.RunError, "run-of-another-recipe", changes=[("seed", 3, 4)]):
        cw.fit(tasks.quick(seed=4), folder, **QUIET)
    assert (folder / "result.json").read_bytes() == before


@pytest.mark.slow
def test_data_may_be_streamed_to_the_same_bits(whole, monkeypatch):
    monkeypatch.setattr("chipwise.run.feed.fits", lambda source, limit: False)
    result, _ = whole
    assert cw.fit(tasks.quick(), on=cw.On(devices=2), **QUIET).fingerprint == result.fingerprint


@pytest.mark.slow
def test_any_source_with_len_and_index_will_do(whole):
    columns = tasks.data().columns
    examples = [{name: column[i] for name, column in columns.items()} for i in range(101)]
    result, _ = whole
    assert (
        cw.fit(tasks.quick(task=tasks.quick_task(train=examples)), on=cw.On(devices=1), **QUIET).fingerprint
        == result.fingerprint
    )


def test_an_error_in_a_streamed_source_reaches_the_caller(monkeypatch):
    class Broken(list):
        def __getitem__(self, i):
            if i == 50:
                raise cw.errors.DataError("photo 50 cannot be read")
            return super().__getitem__(i)

    monkeypatch.setattr("chipwise.run.feed.fits", lambda source, limit: False)
    columns = tasks.data().columns
    examples = Broken({name: column[i] for name, column in columns.items()} for i in range(101))
    with pytest.raises(cw.errors.DataError, match="photo 50"):
        cw.fit(tasks.quick(task=tasks.quick_task(train=examples, eval=None)), on=cw.On(devices=1), **QUIET)


@pytest.mark.parametrize(("stop", "saved"), [(None, 2), ("4st", 4)])
def test_an_evaluation_whose_data_fails_is_made_when_the_run_goes_on(tmp_path, monkeypatch, stop, saved):
    class Failing(list):
        failing = True

        def __getitem__(self, i):
            if self.failing and i == 50:
                raise cw.errors.DataError("photo 50 cannot be read")
            return super().__getitem__(i)

    columns = tasks.data().columns
    source = Failing({name: column[i] for name, column in columns.items()} for i in range(101))
    monkeypatch.setattr("chipwise.run.feed.fits", lambda source, limit: False)
    recipe = tasks.quick(duration="8st", task=tasks.quick_task(eval=source))
    run, options = tmp_path / "run", {"eval_every": "4st", "checkpoint_every": "2st"}
    with pytest.raises(cw.errors.DataError, match="photo"):
        cw.fit(recipe, run, on=cw.On(devices=1), stop_after=stop, **options, **QUIET)
    assert cw.run.restore_run(recipe, run).steps == saved
    source.failing = False
    told = [
        (event.kind, event.step, event.done)
        for event in cw.training(recipe, run, on=cw.On(devices=1), **options, **QUIET)
        if event.kind == "evaluation"
    ]
    assert told == [("evaluation", 4, 4), ("evaluation", 8, 8)]
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "eval/loss" in row] == [4, 8]


@pytest.mark.slow
@pytest.mark.parametrize("replicas,found,used", [(8, 8, 8), (6, 8, 6), (12, 8, 8), (1, 8, 1)])
def test_all_devices_are_used_that_the_replicas_can_use(replicas, found, used, capsys):
    recipe = tasks.quick(replicas=replicas, duration="1st", task=tasks.quick_task(eval=None))
    result = cw.fit(recipe, progress="lines")
    assert result.devices["count"] == used
    said = capsys.readouterr().err
    assert ("devices are used" in said) == (used < found)
    each = f"{replicas // used}" + f" to {-(-replicas // used)}" * (replicas % used > 0)
    assert f"{used} × cpu (simulated), {each} of {replicas} replicas each" in said


@pytest.mark.slow
def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_the_last_good_checkpoint(tmp_path, monkeypatch):
    def loss(params, state, batch, key, train):
        metrics, state = tasks.loss(params, state, batch, key, train)
        if train:
            bad = state["calls"] > 20
            total = jax.numpy.where(bad, jax.numpy.nan, metrics["loss"].total)
            metrics = {**metrics, "loss": cw.Sum(total, metrics["loss"].count)}
        return metrics, state

    recipe = tasks.quick(task=tasks.quick_task(loss=loss))
    every = {"log_every": "5st", "checkpoint_every": "5st", "eval_every": None}
    with refused(cw.errors.DivergedError, "loss-not-finite", first=21, last=25, value="nan", checkpoint=20):
        cw.fit(recipe, tmp_path, on=cw.On(devices=1), **every, **QUIET)
    assert cw.run.restore_run(recipe, tmp_path).steps == 20
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
    task = tasks.quick_task(loss=tasks.plain_loss, augment=None, eval=None)  # quick to compile
    recipe = tasks.quick(task=task, replicas=1, **changes)
    cw.fit(recipe, on=cw.On(devices=1), progress="lines")
    shown = capsys.readouterr().err
    assert recipe.warnings() and all(f"warning: {warning}" in shown for warning in recipe.warnings())


@pytest.mark.slow
def test_the_average_is_evaluated_and_the_trained_parameters_are_fingerprinted(whole):
    result = cw.fit(tasks.quick(ema=0.5), on=cw.On(devices=1), **QUIET)
    assert result.fingerprint == whole[0].fingerprint
    assert all(not np.array_equal(result.params[name], whole[0].params[name]) for name in ("w", "v"))
    assert result.metrics["eval/loss"] != whole[0].metrics["eval/loss"]


@pytest.mark.slow
def test_mix_sees_one_replicas_batch_and_a_key():
    shapes = []

    def mix(batch, key):
        shapes.append(batch["x"].shape)
        return {**batch, "x": jax.random.permutation(key, batch["x"])}

    one = cw.fit(tasks.quick(task=tasks.quick_task(mix=mix), duration="3st"), on=cw.On(devices=1), **QUIET)
    two = cw.fit(tasks.quick(task=tasks.quick_task(mix=mix), duration="3st"), on=cw.On(devices=2), **QUIET)
    assert set(shapes) == {(3, tasks.FEATURES)}
    assert one.fingerprint == two.fingerprint


@pytest.mark.parametrize(
    "changes, codes",
    [
        ({"batch": 8, "replicas": 8}, ["batch-norm-few"]),
        ({"batch": 32, "replicas": 2}, []),
        ({"batch": 32, "replicas": 2, "ema": 0.9999}, ["ema-long"]),
    ],
)
def test_a_run_warns_of_what_check_finds_in_its_evaluation(changes, codes, capsys):
    """Batch norm over one example gives zeros in training, and anything in evaluation."""
    recipe = tasks.recipe(duration="1st", optimizer=cw.sgd(lr=0.1), **changes)
    found = [one for one in cw.check(recipe) if one.code in ("batch-norm-few", "ema-long")]
    assert [one.code for one in found] == codes
    cw.fit(recipe, on=cw.On(devices=1), progress="none")
    warned = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning: ")]
    assert warned == [f"warning: {one}" for one in found]


def of_running_mean(momentum, **settings):
    """A recipe whose evaluation subtracts a mean that training has blended from 0."""

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
    return cw.Recipe(task=task, batch=48, replicas=1, optimizer=cw.sgd(lr=0.1), **settings)


@pytest.mark.slow
@pytest.mark.parametrize(
    "momentum, ema, code",
    [
        (0.99, None, "statistics-unsettled"),
        (0.5, None, None),
        (0.99, 0.9999, "ema-long"),
        (0.5, 0.5, None),
    ],
)
def test_an_evaluation_near_the_start_says_what_holds_it_there(momentum, ema, code, capsys):
    """0.98 in training, 0.10 in evaluation: 20 steps are too few for a momentum of 0.99, and for an average
    over 10,000."""
    recipe = of_running_mean(momentum, duration="20st", ema=ema)
    result = cw.fit(recipe, on=cw.On(devices=1), progress="none")
    assert result.metrics["train/accuracy"] > 0.98
    assert (result.metrics["eval/accuracy"] < 0.6) is (code is not None)
    shown = capsys.readouterr().err
    assert shown.count(str(fact("statistics-unsettled", steps=20))) == (code == "statistics-unsettled")
    found = [str(one) for one in cw.check(recipe) if one.code == "ema-long"]
    assert len(found) == (code == "ema-long")
    assert all(shown.count(line) == 2 for line in found)  # in the first lines, and after the evaluation


@pytest.mark.slow
@pytest.mark.parametrize(("steps", "warned"), [(400, True), (1200, False)])
def test_what_a_longer_run_settles_is_no_doubt(steps, warned, capsys):
    """After 150 steps a fifth of the first mean is left, and after 1,200 nothing: mnist, whose momentum is
    0.99, says nothing of it."""
    recipe = of_running_mean(0.99, duration=f"{steps}st")
    seen = []
    for event in cw.training(recipe, on=cw.On(devices=1), progress="none", eval_every="150st"):
        if event.kind == "evaluation":
            seen.append(event.metrics["eval/accuracy"])
    assert seen[0] < 0.6
    doubt = str(fact("statistics-unsettled", steps=150))
    assert (doubt in capsys.readouterr().err) is warned
