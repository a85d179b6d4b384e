"""Measuring predictions: what the record holds. No speed is asserted."""

import dataclasses
import pickle

import numpy as np
import pytest

import chipwise as cw
import tasks
from chipwise.data.sources import take
from chipwise.data.workers import chosen
from chipwise.engine.predict import Predictor
from chipwise.machine.record import read
from chipwise.measure import bench_predict
from chipwise.measure.bench_predict import ALONE, _Endless, measure_predict
from chipwise.measure.timing import INTERVALS
from refusals import refused


def recipe(**changes):
    def predict(params, state, inputs):
        return tasks.plain_logits(params, inputs)

    return tasks.recipe(task=tasks.task(**{"predict": predict, "loss": tasks.plain_loss, **changes}))


@pytest.mark.parametrize("devices", [1, 2])
def test_a_record_of_predictions_survives_the_file(tmp_path, devices):
    record = measure_predict(recipe(), seconds=0.05, on=cw.On(devices=devices))
    assert (record.kind, record.name, record.measured["block"]) == ("predict", "recipe", 256)
    assert record.measured["devices"]["count"] == devices
    speed, alone = record.figures["examples_per_second"], record.figures["latency_seconds"]
    assert (len(speed.runs), len(alone.runs)) == (INTERVALS, ALONE)
    assert min(speed.runs) > 0 and min(alone.runs) > 0
    record.write(tmp_path / "r.json")
    assert read(tmp_path / "r.json", "predict") == record
    with refused(cw.errors.DataError, "record-kind", kind="predict", expected="train"):
        read(tmp_path / "r.json", "train")


class Plain:
    """One that only one thread may read."""

    def __init__(self, n=7):
        self.examples = tasks.data(n)

    def __len__(self):
        return len(self.examples)

    def __getitem__(self, index):
        return self.examples[index]


class Batched(Plain):
    def __getitems__(self, indices):
        return [self[index] for index in indices]


@pytest.mark.parametrize(
    "source, doors", [(tasks.data(7), {"fill"}), (Plain(), set()), (Batched(), {"__getitems__"})]
)
def test_the_source_is_read_as_a_prediction_reads_it(source, doors):
    endless = pickle.loads(pickle.dumps(_Endless(source)))  # as a process gets it
    assert {door for door in ("fill", "take", "__getitems__") if hasattr(endless, door)} == doors
    assert chosen(endless, 3) == chosen(source, 3) and chosen(endless, None) == chosen(source, None)
    rows = np.asarray([6, 7, 20])
    expected = tasks.data(7).take(rows % 7)
    for name, column in take(endless, rows).items():
        np.testing.assert_array_equal(column, expected[name])


def test_a_group_of_devices_predicts_together(monkeypatch):
    seen = []

    class Seen(Predictor):
        def __init__(self, *arguments, **block):
            super().__init__(*arguments, **block)
            seen.append((self.placement.shards, self.placement.groups, self.block))

    monkeypatch.setattr(bench_predict, "Predictor", Seen)
    monkeypatch.setattr(bench_predict, "ALONE", 1)
    plain = dataclasses.replace(recipe(augment=None), shards=2)
    measure_predict(plain, seconds=0.01, on=cw.On(devices=4))
    assert seen == [(2, 2, 256), (2, 1, 2)]


def test_what_cannot_be_measured_is_refused():
    with refused(cw.errors.RecipeError, "task-without-predict"):
        measure_predict(tasks.recipe(), seconds=0.05, on=cw.On(devices=1))
    with refused(cw.errors.RecipeError, "bench-nothing-to-time"):
        measure_predict(recipe(), seconds=0, on=cw.On(devices=1))
