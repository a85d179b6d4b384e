"""The batch finder: capped by the data, bound by memory, confirmed by a step."""

import dataclasses
import json

import jax
import numpy as np
import optax
import pytest

import chipwise as cw
import tasks
from chipwise.engine import programs
from chipwise.engine.layout import Layout
from chipwise.engine.on import On
from chipwise.machine.detect import detect
from chipwise.study import largest_batch as batches
from chipwise.study import trial
from chipwise.study.largest_batch import find_batch
from chipwise.study.trial import LONGEST_SECONDS, Trial, rounds, timed_steps, try_batch
from chipwise.words.facts import fact
from refusals import refused


def recipe(**changes):
    task = tasks.task(loss=tasks.plain_loss, augment=None)
    return tasks.recipe(**{"task": task, "optimizer": cw.sgd(lr=0.1), "batch": 8, "replicas": 4, **changes})


@pytest.fixture
def stepped(monkeypatch):
    """Batches that were tried with a real step, which all succeed at 1,000 examples/s, at no cost."""
    tried = []

    def pretend(recipe, on):
        tried.append(recipe.batch)
        return Trial(1000.0)

    monkeypatch.setattr(batches, "try_batch", pretend)
    return tried


ALL_EXAMPLES = fact("bound-examples", examples=101)


@pytest.mark.parametrize("at_most, batch, bound", [
    (None, 100, ALL_EXAMPLES), (102, 100, ALL_EXAMPLES), (101, 100, ALL_EXAMPLES),
    *((limit, batch, fact("bound-asked", limit=limit)) for limit, batch in ((12, 12), (11, 8), (4, 4))),
])  # fmt: skip
def test_a_multiple_of_the_replicas_capped_by_the_data_and_by_request(stepped, at_most, batch, bound):
    found = find_batch(recipe(), on=On(devices=1), at_most=at_most)
    assert (found.batch, found.bound, found.confirmed) == (batch, bound, True)
    assert (found.batch_per_replica, found.batch_per_device) == (batch // 4, batch)
    assert batch in stepped and found.memory.fits


@pytest.mark.slow
def test_a_real_step_and_what_moving_there_does(monkeypatch):
    monkeypatch.setattr(trial, "ROUNDS", 2)
    found = find_batch(recipe(), on=On(devices=2))
    assert found.batch == 100 and found.batch_per_device == 50 and found.confirmed
    assert set(found.examples_per_second) == {8, 100} and found.speedup.value > 0
    assert all(len(speeds) == 2 and min(speeds) > 0 for speeds in found.examples_per_second.values())
    assert found.move.recipe.describe() == recipe().transfer(batch=100).describe()
    assert [str(f) for f in found.findings] == [str(f) for f in cw.check(found.move.recipe, "cpu")]
    assert fact("host-memory-filled") in found.notes
    told = json.loads(json.dumps(found.to_json(), allow_nan=False))
    assert len(told["examples_per_second"]["100"]) == 2 and told["speedup"]["verdict"]
    assert told["memory_bytes_per_device"]["fits"] and told["transfer"]["recipe"]["batch"] == 100


def test_the_need_is_the_compilers_and_grows_with_the_batch():
    machine = detect(1)
    sizes = []
    for n in (8, 40, 80):
        tried = recipe(batch=n)
        memory = trial.needed(tried, machine, Layout(n, 4, 1))
        params, _ = tasks.init(jax.random.key(0))
        assert memory.parameters == sum(np.asarray(x).nbytes for x in params.values())
        assert memory.data >= sum(c.nbytes for c in tried.task.train.columns.values())
        sizes.append(memory.needed)
    assert sizes == sorted(sizes) and sizes[0] < sizes[-1]


def test_an_optimizer_with_norms_of_layers_has_more_programs():
    lamb, plain = (recipe(optimizer=make(lr=0.1)) for make in (cw.recipe.lamb, cw.adamw))
    needs = [trial.needed(one, detect(1), Layout.of(one, 1)).needed for one in (lamb, plain)]
    assert needs[0] >= needs[1] > 0


def test_a_group_of_devices_is_asked_for_what_each_needs(monkeypatch):
    asked = []
    monkeypatch.setattr(programs, "compiler_options", lambda *about: asked.append(about))
    whole, cut = (
        trial.needed(one, detect(one.shards), Layout.of(one, one.shards))
        for one in (recipe(), recipe(shards=2))
    )
    assert whole.parameters / 2 <= cut.parameters < whole.parameters  # biases are whole on each
    assert list(dict.fromkeys(asked)) == [("cpu", True, "cpu", 1), ("cpu", True, "cpu", 2)]


@pytest.fixture
def memory_for(monkeypatch):
    """`memory_for(batch)`: pretends that a device has what this batch needs and no more."""

    def limit(n):
        made = trial.needed(recipe(batch=n), detect(1), Layout(n, 4, 1))
        monkeypatch.setattr(trial, "available", lambda machine, devices: (made.needed, "pretended"))
        return made.needed

    return limit


def test_memory_binds(memory_for, stepped):
    limit = memory_for(60)
    found = find_batch(recipe(batch=56), on=On(devices=1))
    assert found.bound.code == "bound-memory" and found.batch == 60
    assert found.memory.needed <= limit
    # So much of the host's memory is not risked on a CPU.
    assert not found.confirmed and set(stepped) == {56} and found.speedup is None
    assert fact("batch-risky", batch=60, share=batches.SAFE_SHARE) in found.notes


def test_where_nothing_fits_no_batch_is_named(monkeypatch, stepped):
    monkeypatch.setattr(trial, "available", lambda machine, devices: (100, "pretended"))
    found = find_batch(recipe(), on=On(devices=1))
    assert found.batch is None and found.batch_per_device is None and stepped == []
    assert found.bound.code == "bound-nothing-fits" and found.memory.needed > 100
    json.dumps(found.to_json(), allow_nan=False)


def test_a_batch_that_the_device_refuses_is_stepped_down(monkeypatch):
    monkeypatch.setattr(
        batches, "try_batch",
        lambda r, on: Trial(500.0) if r.batch <= 85 else Trial(None, "RESOURCE_EXHAUSTED: out of it"),
    )  # fmt: skip
    found = find_batch(recipe(), on=On(devices=1))
    assert found.batch == 76 and found.confirmed and found.bound.code == "bound-refused"
    reason = "RESOURCE_EXHAUSTED: out of it"
    assert found.notes[:2] == tuple(fact("batch-refused", batch=n, reason=reason) for n in (100, 88))
    assert found.memory.needed < trial.needed(recipe(batch=100), detect(1), Layout(100, 4, 1)).needed


def test_a_step_that_would_take_minutes_on_a_cpu_is_not_made(monkeypatch):
    monkeypatch.setattr(batches, "try_batch", lambda r, on: Trial(1.0))
    found = find_batch(recipe(), on=On(devices=1))
    assert found.batch == 100 and not found.confirmed
    assert fact("batch-slow", batch=100, own=8, seconds=300.0) in found.notes


def times(monkeypatch, speeds, seconds=0.0):
    """What `find_batch` makes of these examples/s, by batch one a visit, each visit of so many seconds."""
    order, left = [], {batch: list(values) for batch, values in speeds.items()}

    def pretend(recipe, on):
        order.append(recipe.batch)
        speed = left[recipe.batch].pop(0)
        return Trial(speed, "" if speed else "RESOURCE_EXHAUSTED: later", seconds=seconds)

    monkeypatch.setattr(batches, "try_batch", pretend)
    return find_batch(recipe(), on=On(devices=1), at_most=16, progress="none"), order


def test_batches_are_timed_in_turn_and_the_ratio_is_theirs(monkeypatch):
    found, order = times(monkeypatch, {8: [100, 101, 102, 103, 104], 16: [200, 202, 204, 206, 208]})
    assert order == [8, 16] * 5 and found.examples_per_second[16] == (200, 202, 204, 206, 208)
    assert found.speedup.value == pytest.approx(2.0) and found.speedup.verdict == "higher"


def test_speeds_that_overlap_show_no_difference(monkeypatch):
    found, _ = times(monkeypatch, {8: [100, 300, 100, 300, 100], 16: [300, 100, 300, 100, 300]})
    assert found.speedup.verdict == "difference-not-shown"


def test_long_steps_are_timed_in_fewer_rounds(monkeypatch):
    found, order = times(monkeypatch, {8: [100] * 5, 16: [100] * 5}, seconds=10.0)
    assert order == [8, 16] * 3
    found, order = times(monkeypatch, {8: [100] * 5, 16: [100] * 5}, seconds=40.0)
    assert order == [8, 16] and found.speedup.verdict == "one-run-each"


def test_a_batch_that_is_refused_later_says_so(monkeypatch):
    found, order = times(monkeypatch, {8: [100] * 5, 16: [100, None]})
    assert order == [8, 16, 8, 16] and found.batch == 16 and found.confirmed
    about = {"batch": 16, "rounds": 1, "reason": "RESOURCE_EXHAUSTED: later"}
    assert fact("batch-refused-later", **about) in found.notes


def test_how_much_is_timed():
    assert [timed_steps(each) for each in (1e-4, 0.05, 0.06, 0.5, 2.0, 20.0)] == [3000, 6, 5, 5, 1, 1]
    assert [rounds(s) for s in (0.0, 1.0, 12.0, 12.1, 30.0, 31.0, LONGEST_SECONDS, 500.0)] == [
        5, 5, 5, 4, 2, 1, 1, 1
    ]  # fmt: skip


def test_running_out_of_memory_is_an_answer_and_other_errors_are_raised():
    def failing(error):
        def loss(params, state, batch, key, train):
            raise error

        return recipe(task=tasks.task(loss=loss, augment=None))

    assert try_batch(failing(MemoryError("no room")), on=On(devices=1)) == Trial(None, "no room")
    with refused(cw.errors.RecipeError, "task-fails", error="ZeroDivisionError"):
        try_batch(failing(ZeroDivisionError()), on=On(devices=1))


def test_an_optimizer_without_a_rule_is_said_to_have_none(stepped):
    lion = recipe(optimizer=cw.from_optax(optax.lion, learning_rate=1e-3))
    found = find_batch(lion, on=On(devices=1), at_most=16)
    assert found.batch == 16 and found.move is None
    assert "no-rule-for-optimizer" in [note.code for note in found.notes]


def test_what_cannot_be_searched_is_an_error(stepped):
    for wrong in (3, 0, -1, True):
        with refused(cw.errors.RecipeError, "at-most-below-least", least=4):
            find_batch(recipe(), on=On(devices=1), at_most=wrong)
    with refused(cw.errors.DeviceError, "devices-above-blocks", devices=5, most=4):
        find_batch(recipe(), on=On(devices=5))
    few = dataclasses.replace(
        recipe(), task=tasks.task(train=tasks.data(3), loss=tasks.plain_loss, augment=None)
    )
    with refused(cw.errors.DataError, "examples-below-least", examples=3):
        find_batch(few, on=On(devices=1))
