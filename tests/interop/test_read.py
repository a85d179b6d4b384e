"""Readers: each result is compared with the other framework's own arithmetic, done by hand here."""

import jax.numpy as jnp
import numpy as np
import pytest

import chipwise as cw
from chipwise.recipe.duration import Clock
from chipwise.words.facts import fact
from refusals import refused


def test_fenwicks_decay_acts_once_for_each_core():
    """Eight cores, each with the gradient of an eighth of the loss plus the decay, summed; then one step."""
    cores, rate, decay, w = 8, 0.3, 1.25e-4, 2.0
    grads = np.linspace(-1, 1.5, cores)  # of each core's mean loss
    theirs = w - rate * sum(g / cores + decay * w for g in grads)
    read = cw.read.fenwicks(batch=256, lr=rate, weight_decay=decay, cores=cores)
    assert read.weight_decay == 1e-3
    optimizer = cw.sgd(lr=read.lr, momentum=0, weight_decay=read.weight_decay)
    params = {"w": jnp.float32(w)}
    ours, _ = optimizer.update(
        {"w": jnp.float32(grads.mean())}, optimizer.init(params), params,
        {"lr": read.lr, "weight_decay": read.weight_decay},
    )  # fmt: skip
    assert float(ours["w"]) == pytest.approx(theirs, rel=1e-6)
    assert cw.read.fenwicks(batch=256, lr=rate, weight_decay=decay, cores=1).weight_decay == decay


def test_fenwicks_runs_of_davidnet_become_the_recipe_that_really_ran():
    """A summed loss with lr / 512 and decay x 512, on a TPU of 8 cores."""
    read = cw.read.fenwicks(
        batch=512, lr=0.4 / 512, weight_decay=1.25e-4 * 512, cores=8, summed_loss=True, epochs=24,
        examples=50_000,
    )  # fmt: skip
    assert read.settings == ["batch=512", "replicas=8", "lr=0.4", "weight_decay=0.001", "duration=2328st"]
    recipe = cw.load("cifar10-davidnet", read.settings)
    assert recipe.forgetting == pytest.approx(0.039, rel=0.01)
    assert cw.check(recipe) == []
    notes = {note.code: note for note in read.notes}
    assert (notes["read-decay-each-core"]["means"], notes["read-decay-each-core"]["cores"]) == (1e-3, 8)
    assert (notes["read-batch-dropped"]["means"], notes["read-batch-dropped"]["exact"]) == (2328, 2344)
    assert str(read).splitlines()[1:] == [str(note) for note in read.notes]


def test_fenwicks_mnist_on_a_tpu():
    """The mnist recipe is that tutorial's: its own schedule is read, and a decay would act eightfold."""
    read = cw.read.fenwicks(batch=256, lr=0.01, base_lr=1e-4, decay_steps=2000, weight_decay=1e-4, cores=8)
    recipe = cw.load("mnist")
    assert (read.batch, read.replicas) == (recipe.batch, recipe.replicas)
    assert read.lr == recipe.optimizer.lr
    assert read.weight_decay == 8e-4
    assert fact("read-peak-is-sum", lr=0.01, base=1e-4, means=0.0101) in read.notes
    assert "lr=" not in " ".join(read.settings)  # a schedule cannot be typed
    assert cw.read.fenwicks(batch=256, lr=0.01, weight_decay=1e-4, optimizer="adam").weight_decay == 0


def test_ddp_averages_the_gradients_of_its_processes():
    read = cw.read.pytorch_ddp(batch=64, world=4, lr=0.1, weight_decay=5e-4, epochs=10, examples=50_001)
    assert read.settings == ["batch=256", "replicas=4", "lr=0.1", "weight_decay=0.0005", "duration=10ep"]
    assert fact("read-examples-repeated", repeated=3) in read.notes
    # a summed loss: lr (64 g + wd w) on the average over processes
    summed = cw.read.pytorch_ddp(batch=64, world=4, lr=0.1, weight_decay=0.64, summed_loss=True)
    g, w = 0.7, 2.0
    assert summed.lr * (g + summed.weight_decay * w) == pytest.approx(0.1 * (64 * g + 0.64 * w))
    assert cw.read.pytorch_ddp(batch=64, world=4, lr=0.1, sync_batch_norm=True).replicas == 1


def test_lightning_steps_its_scheduler_once_an_epoch_unless_told():
    given = dict(batch=32, devices=4, nodes=2, accumulate_grad_batches=2, lr=0.1, epochs=10, examples=51_200)
    read = cw.read.lightning(**given, schedule_length=1000)
    assert (read.batch, read.replicas, read.schedule) == (512, 16, "1000ep")
    assert read.notes[-1] == fact("read-schedule-outlasts", share=0.01)
    by_step = cw.read.lightning(**given, schedule_length=1000, interval="step")
    assert by_step.schedule == "1000st" and by_step.notes[-1].code == "read-schedule-by-step"  # 10 epochs
    short = cw.read.lightning(**given, schedule_length=100, interval="step")
    assert short.notes[-1] == fact("read-schedule-over", share=0.1)


@pytest.mark.parametrize("split", [False, True])
def test_accelerate_steps_its_scheduler_once_for_each_process(split):
    processes, length, examples, batch = 4, 800, 25_600, 32
    read = cw.read.accelerate(
        batch=batch, processes=processes, lr=0.1, split_batches=split, epochs=4, examples=examples,
        schedule_length=length,
    )  # fmt: skip
    count, ended = 0, None  # what the wrapped scheduler does
    for step in range(1, 4 * examples // read.batch + 1):
        count += 1 if split else processes
        if ended is None and count >= length:
            ended = step
    assert read.schedule == f"{ended}st"
    assert read.batch == (32 if split else 128)
    assert read.notes[-1] == fact("read-schedule-over", share=0.25)


def test_tpu_util_never_reached_its_peak():
    read = cw.read.tpu_util(batch=32, lr=1e-3, epochs=10, examples=14_905)
    assert (read.batch, read.replicas, read.duration, read.schedule) == (256, 8, "580st", "4650st")
    table = read.lr.table(Clock(14_905, 256, 580))
    assert table[0] == pytest.approx(4e-5) and table[-1] == pytest.approx(3.4e-4, rel=0.01)
    cut = next(note for note in read.notes if note.code == "read-cycle-cut")
    assert (cut["ran"], cut["planned"]) == (580, 4650) and "lr=" not in " ".join(read.settings)
    assert read.notes[-2] == fact("read-peak-never-reached", lr=read.lr.end)
    meant = cw.read.tpu_util(batch=32, lr=1e-3, epochs=10, examples=14_905, cores=1)
    assert meant.lr == cw.one_cycle(1e-3, "40%", 4e-5, 4e-9, "linear-cosine")
    assert meant.duration == meant.schedule


@pytest.mark.parametrize(
    "read, code",
    [
        (lambda: cw.read.fenwicks(batch=0, lr=0.1), "read-count"),
        (lambda: cw.read.fenwicks(batch=8, lr=0.1, optimizer="lamb"), "read-choice"),
        (lambda: cw.read.fenwicks(batch=8, lr=0.1, epochs=3), "read-examples-missing"),
        (lambda: cw.read.pytorch_ddp(batch=8, world=2.5, lr=0.1), "read-count"),
        (lambda: cw.read.lightning(batch=8, devices=1, lr=0.1, interval="batch"), "read-choice"),
        (lambda: cw.read.accelerate(batch=9, processes=2, lr=0.1, split_batches=True), "read-batch-unsplit"),
        (lambda: cw.read.tpu_util(batch=64, lr=0.1, epochs=1, examples=100), "read-no-batch"),
    ],
)
def test_mistakes_are_one_line(read, code):
    with refused(cw.RecipeError, code):
        read()
