"""The batch finder: capped by the data, bound by memory, confirmed by a step."""

import dataclasses
import json

import jax
import numpy as np
import pytest

import chipwise as cw
import tasks
from chipwise.engine import programs
from chipwise.engine.layout import Layout
from chipwise.engine.on import On
from chipwise.machine.detect import detect
from chipwise.study import largest_batch as batches
from chipwise.study.largest_batch import find_batch, refusal
from chipwise.words.facts import fact
from refusals import refused


def recipe(**changes):
    task = tasks.task(loss=tasks.plain_loss, augment=None)
    return tasks.recipe(**{"task": task, "optimizer": cw.sgd(lr=0.1), "batch": 8, "replicas": 4, **changes})


@pytest.fixture
def accelerator(monkeypatch):
    """Makes `find_batch` believe that the devices are no CPU's."""

    def lay_out(*about):
        machine, *more = real(*about)
        return dataclasses.replace(machine, platform="gpu"), *more

    real = batches.lay_out
    monkeypatch.setattr(batches, "lay_out", lay_out)


@pytest.fixture
def stepped(accelerator, monkeypatch):
    """Batches that were tried with real steps, which all succeed, at no cost."""
    tried = []
    monkeypatch.setattr(batches, "refusal", lambda recipe, batch, on: tried.append(batch) or "")
    return tried


ALL_EXAMPLES = fact("bound-examples", examples=101)


@pytest.mark.parametrize("at_most, batch, bound", [
    (None, 100, ALL_EXAMPLES), (102, 100, ALL_EXAMPLES), (101, 100, ALL_EXAMPLES),
    *((limit, batch, fact("bound-asked", limit=limit)) for limit, batch in ((12, 12), (11, 8), (4, 4))),
])  # fmt: skip
def test_a_multiple_of_the_replicas_capped_by_the_data_and_by_request(stepped, at_most, batch, bound):
    found = find_batch(recipe(), on=On(devices=1), at_most=at_most)
    assert (found.batch, found.bound, found.confirmed) == (batch, bound, True)
    assert batch in stepped and found.memory.fits


def test_real_steps_confirm(accelerator, monkeypatch):
    on = On(2, "cpu")
    monkeypatch.setattr(batches, "refusal", lambda recipe, batch, _: refusal(recipe, batch, on))
    found = find_batch(recipe(), on=on)
    assert found.batch == 100 and found.confirmed
    told = json.loads(json.dumps(found.to_json(), allow_nan=False))
    assert told["memory_bytes_per_device"]["fits"]


def test_the_need_is_the_compilers_and_grows_with_the_batch():
    machine = detect(1)
    sizes = []
    for n in (8, 40, 80):
        tried = recipe(batch=n)
        memory = batches.needed(tried, machine, Layout(n, 4, 1))
        params, _ = tasks.init(jax.random.key(0))
        assert memory.parameters == sum(np.asarray(x).nbytes for x in params.values())
        assert memory.data >= sum(c.nbytes for c in tried.task.train.columns.values())
        sizes.append(memory.needed)
    assert sizes == sorted(sizes) and sizes[0] < sizes[-1]


def test_an_optimizer_with_norms_of_layers_has_more_programs():
    lamb, plain = (recipe(optimizer=make(lr=0.1)) for make in (cw.recipe.lamb, cw.adamw))
    needs = [batches.needed(one, detect(1), Layout.of(one, 1)).needed for one in (lamb, plain)]
    assert needs[0] >= needs[1] > 0


def test_a_group_of_devices_is_asked_for_what_each_needs(monkeypatch):
    asked = []
    monkeypatch.setattr(programs, "compiler_options", lambda *about: asked.append(about))
    whole, cut = (
        batches.needed(one, detect(one.shards), Layout.of(one, one.shards))
        for one in (recipe(), recipe(shards=2))
    )
    assert whole.parameters / 2 <= cut.parameters < whole.parameters  # biases are whole on each
    assert list(dict.fromkeys(asked)) == [("cpu", True, "cpu", 1), ("cpu", True, "cpu", 2)]


@pytest.fixture
def memory_for(monkeypatch):
    """`memory_for(batch)`: pretends that a device has what this batch needs and no more."""

    def limit(n):
        made = batches.needed(recipe(batch=n), detect(1), Layout(n, 4, 1))
        monkeypatch.setattr(batches, "available", lambda machine, devices: (made.needed, "pretended"))
        return made.needed

    return limit


def test_memory_binds(memory_for, stepped):
    limit = memory_for(60)
    found = find_batch(recipe(batch=56), on=On(devices=1))
    assert found.bound.code == "bound-memory" and found.batch == 60
    assert found.memory.needed <= limit and found.confirmed and stepped == [60]


def test_the_memory_of_a_host_is_not_risked(monkeypatch):
    monkeypatch.setattr(batches, "refusal", None)
    found = find_batch(recipe(), on=On(devices=1), at_most=16)
    assert found.batch == 16 and not found.confirmed and fact("host-memory-filled") in found.notes


def test_where_nothing_fits_no_batch_is_named(monkeypatch, stepped):
    monkeypatch.setattr(batches, "available", lambda machine, devices: (100, "pretended"))
    found = find_batch(recipe(), on=On(devices=1))
    assert found.batch is None and stepped == []
    assert found.bound.code == "bound-nothing-fits" and found.memory.needed > 100
    json.dumps(found.to_json(), allow_nan=False)


REASON = "RESOURCE_EXHAUSTED: out of it"


@pytest.mark.parametrize("most, batch, tried", [(85, 76, [100, 88]), (0, None, [100, 88, 76])])
def test_a_batch_that_the_device_refuses_is_stepped_down(accelerator, monkeypatch, most, batch, tried):
    monkeypatch.setattr(batches, "refusal", lambda r, n, on: "" if n <= most else REASON)
    found = find_batch(recipe(), on=On(devices=1))
    assert found.batch == batch and found.confirmed is (batch is not None)
    assert found.bound.code == ("bound-refused" if batch else "bound-nothing-fits")
    assert found.notes[: len(tried)] == tuple(fact("batch-refused", batch=n, reason=REASON) for n in tried)
    assert found.memory.needed < batches.needed(recipe(batch=100), detect(1), Layout(100, 4, 1)).needed


def test_running_out_of_memory_is_an_answer_and_other_errors_are_raised():
    def failing(error):
        def loss(params, state, batch, key, train):
            raise error

        return recipe(task=tasks.task(loss=loss, augment=None))

    assert refusal(failing(MemoryError("no room")), 8, On(devices=1)) == "no room"
    with refused(cw.errors.RecipeError, "task-fails", error="ZeroDivisionError"):
        refusal(failing(ZeroDivisionError()), 8, On(devices=1))


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
