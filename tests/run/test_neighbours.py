import jax
import jax.numpy as jnp
import numpy as np
import pytest

import chipwise as cw
import comparing_losses
import tasks
from chipwise.run import neighbours
from chipwise.run.progress import Reporter
from chipwise.run.session import Session
from refusals import refused

ONE = cw.On(devices=1)
MODEL = jax.tree.map(np.asarray, tasks.init(jax.random.key(1)))


def named(loss):
    return loss.__name__


def found(loss, **changes):
    made = tasks.recipe(task=tasks.task(loss=loss, **changes), replicas=1)
    few = neighbours.few_examples(made)
    compared, summed = neighbours.trial(made, MODEL, few, jax.devices("cpu")[0])
    assert not (compared and summed)
    return "compares" if compared else "sums" if summed else None


@pytest.mark.parametrize("loss", comparing_losses.COMPARING, ids=named)
def test_a_loss_that_compares_examples_is_found(loss):
    assert found(loss) == "compares"


@pytest.mark.parametrize("loss", comparing_losses.SUMMING, ids=named)
def test_a_loss_that_sums_over_its_examples_is_found(loss):
    assert found(loss) == "sums"


@pytest.mark.slow
@pytest.mark.parametrize("loss", comparing_losses.ALONE, ids=named)
def test_no_other_loss_is(loss):
    assert found(loss) is None


@pytest.mark.parametrize("counted", [[3, 4], [1, 7]])
def test_halves_that_count_nothing_do_not_make_a_loss_that_sums(counted):
    """Beside such a half, the mean times the number of examples is twice that of the other half alone."""
    x = np.random.default_rng(0).integers(0, 256, (8, tasks.FEATURES)).astype(np.uint8)
    label = np.where(np.isin(np.arange(8), counted), comparing_losses.RARE, 0).astype(np.int32)
    made = tasks.recipe(task=tasks.task(loss=comparing_losses.counted_rarely), replicas=1)
    few = {"x": x, "label": label}
    assert [*neighbours.trial(made, MODEL, few, jax.devices("cpu")[0])] == [False, False]


def test_a_run_of_a_loss_that_sums_is_refused_without_advice(capsys):
    made = tasks.recipe(task=tasks.task(loss=comparing_losses.counted_once), replicas=4, ema=0.9999)
    with refused(cw.errors.RecipeError, "loss-summed", replicas=4):
        cw.fit(made, on=ONE, progress="none")
    assert "warning" not in capsys.readouterr().err


# ---- what a run says


class Heard(Reporter):
    """A reporter that keeps what it is given."""

    def __init__(self):
        super().__init__("none")
        self.facts = []

    def say(self, text, style=None):
        self.facts.append(text)

    warn = say


def told(loss=comparing_losses.two_towers, steps=0, replicas=8, **of_task):
    made = tasks.recipe(task=tasks.task(loss=loss, **of_task), replicas=replicas)
    with Session(made, ONE) as session:
        few = neighbours.few_examples(session.recipe)
        session.begin()
        session.advance(steps)
        heard = Heard()
        neighbours.tell(session, few, heard)
    return [(fact.code, dict(fact.numbers)) for fact in heard.facts]


OF_REPLICA = ("loss-compares", {"examples": 3, "batch": 24})
OF_STEP = ("loss-compares-all", {"examples": 24, "batch": 24})
OF_EVALUATION = ("evaluation-of-single-examples", {"group": 3})


@pytest.mark.parametrize(
    "of_task, replicas, facts",
    [
        ({}, 8, [OF_REPLICA, OF_EVALUATION]),
        pytest.param({"eval_group": 8}, 8, [OF_REPLICA], marks=pytest.mark.slow),
        pytest.param({"eval": None}, 8, [OF_REPLICA], marks=pytest.mark.slow),
        pytest.param({"eval": None}, 1, [OF_STEP], marks=pytest.mark.slow),
        pytest.param({"loss": comparing_losses.softmax}, 8, [], marks=pytest.mark.slow),
    ],
)
def test_a_run_says_what_the_loss_compares_and_that_evaluation_shows_single_examples(
    of_task, replicas, facts
):
    assert told(**of_task, replicas=replicas) == facts


@pytest.mark.slow
def test_a_run_that_goes_on_says_nothing():
    assert told(steps=1) == []


def two_views(params, state, batch, key, train):
    """Of views that `augment` makes; evaluation has none."""
    made = {"x": jnp.concatenate([batch["one"], batch["other"]])}
    return comparing_losses.two_towers(params, state, made, key, train)


def test_views_may_be_made_by_augment():
    def augment(example, key):
        return {**example, "one": example["x"], "other": example["x"][::-1]}

    assert found(two_views, eval=None, augment=augment) == "compares"


def refusing(params, state, batch, key, train):
    """Takes no batch but the recipe's, and in evaluation one example."""
    assert batch["x"].shape[0] in (1, 3), "three examples"
    return comparing_losses.two_towers(params, state, batch, key, train)


def test_a_net_that_is_too_large_is_not_tried(monkeypatch):
    monkeypatch.setattr(neighbours, "MOST_FLOPS", {"cpu": 10})
    assert found(comparing_losses.two_towers) is None


@pytest.mark.slow
def test_what_cannot_be_tried_is_named(monkeypatch):
    ((code, facts),) = told(refusing)
    assert code == "loss-untried" and "three examples" in facts["reason"]
    monkeypatch.setattr(neighbours, "MOST_BYTES", 1000)
    assert told() == []


def of_fours(params, state, batch, key, train):
    """Takes examples by fours, or one in evaluation, and sums."""
    logits = tasks.plain_logits(params, batch)
    losses = comparing_losses.cross_entropy(logits, batch["label"])
    if len(losses) > 1:
        losses = losses.reshape(-1, 4)
    return {"loss": cw.Sum(losses.sum(), jnp.float32(1))}, state


def test_a_comparison_that_was_tried_is_not_called_untried():
    ((code, facts),) = told(of_fours, replicas=6)
    assert code == "loss-sum-untried" and "reshape" in facts["reason"]


class Broken:
    def __len__(self):
        return 9

    def __getitem__(self, index):
        raise OSError("no such disk")


def test_data_that_cannot_be_read_is_told_elsewhere():
    assert neighbours.few_examples(tasks.recipe(task=tasks.task(eval=Broken()))) == {}


# ---- trained


def negatives(params, state, batch, key, train):
    """SimCLR, and what each example is compared with."""
    sums, state = comparing_losses.nt_xent(params, state, batch, key, train)
    count = batch["x"].shape[0]
    return {**sums, "negatives": cw.Sum.of(jnp.full(count, 2.0 * count - 2))}, state


def trained(devices, **changes):
    task = tasks.task(loss=negatives, augment=None, eval_group=8)
    made = tasks.recipe(task=task, duration="8st", **changes)
    return cw.fit(made, on=cw.On(devices=devices), progress="none")


@pytest.mark.slow
def test_simclr_sees_a_replica_on_any_devices():
    alone, on_eight = trained(1), trained(8)
    assert alone.fingerprint == on_eight.fingerprint and alone.metrics == on_eight.metrics
    assert alone.metrics["train/negatives"] == 2 * 3 - 2
    # Six groups of 8 and one of 5
    assert alone.metrics["eval/negatives"] == (48 * 14 + 5 * 8) / 53


@pytest.mark.slow
def test_simclr_sees_the_whole_batch_of_one_replica_on_one_device_and_on_eight():
    alone, on_eight = trained(1, replicas=1), trained(8, replicas=1, shards=8)
    assert alone.metrics["train/negatives"] == on_eight.metrics["train/negatives"] == 2 * 24 - 2
    assert alone.metrics["eval/negatives"] == on_eight.metrics["eval/negatives"] == (48 * 14 + 5 * 8) / 53
    assert alone.metrics["eval/loss"] == pytest.approx(on_eight.metrics["eval/loss"], rel=1e-3)
