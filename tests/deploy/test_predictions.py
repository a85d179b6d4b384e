import csv
import json

import jax
import numpy as np
import pytest

import chipwise as cw
import tasks
from chipwise.base.locks import hold
from chipwise.deploy import predictions as module
from chipwise.deploy.model import Trained
from chipwise.deploy.table import Columns
from refusals import refused

PARAMS, STATE = jax.tree.map(np.asarray, tasks.init(jax.random.key(1)))
NAMES = ("ant", "bee", "cat", "dog", 'elk, "big"')
ONE = cw.On(devices=1)
BLOCK = 7  # an eighth of the 53 examples, of which a part holds at most 8


def logits(params, state, inputs):
    return tasks.plain_logits(params, inputs)


def trained(**changes):
    settings = {"predict": logits, "loss": tasks.plain_loss, "classes": tasks.CLASSES, **changes}
    return Trained(tasks.recipe(task=tasks.task(**settings)), PARAMS, STATE)


EXPECTED = np.asarray(logits(PARAMS, STATE, {"x": tasks.data(53, 1).columns["x"]}))


@pytest.mark.slow
def test_a_result_predicts_its_evaluation_data():
    recipe = tasks.recipe(
        task=tasks.task(predict=logits, loss=tasks.plain_loss, augment=None, class_names=NAMES),
        duration="3st",
    )
    result = cw.fit(recipe, on=ONE, progress="none")
    found = cw.predict(result, on=ONE)
    assert (found.examples, found.outputs.shape, found.file) == (53, (53, tasks.CLASSES), None)
    expected = np.asarray(logits(result.params, result.state, {"x": tasks.data(53, 1).columns["x"]}))
    np.testing.assert_allclose(found.outputs, expected, rtol=1e-5, atol=1e-6)
    assert np.array_equal(found.labels, found.outputs.argmax(1))
    np.testing.assert_allclose(found.probabilities.sum(1), 1, rtol=1e-6)
    assert found.accuracy is None  # without Task(classes=...) outputs are only numbers


def test_accuracy_is_of_labels_that_the_data_has():
    found = cw.predict(trained(), on=ONE)
    right = EXPECTED.argmax(1) == tasks.data(53, 1).columns["label"]
    assert found.accuracy == pytest.approx(right.mean())
    assert cw.predict(trained(), cw.Arrays(x=tasks.data(9).columns["x"]), on=ONE).accuracy is None


@pytest.mark.slow
def test_the_average_is_used_where_the_recipe_has_one(tmp_path):
    recipe = tasks.recipe(
        task=tasks.task(predict=logits, loss=tasks.plain_loss, augment=None), duration="3st", ema=0.5
    )
    result = cw.fit(recipe, tmp_path / "run", on=ONE, progress="none")
    by_folder = cw.predict(tmp_path / "run", recipe=recipe, on=ONE)
    assert np.array_equal(by_folder.outputs, cw.predict(result, on=ONE).outputs)
    expected = np.asarray(logits(result.params, result.state, {"x": tasks.data(53, 1).columns["x"]}))
    np.testing.assert_allclose(by_folder.outputs, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".parquet"])
def test_a_file_has_every_example_once_and_in_order(tmp_path, suffix):
    out = tmp_path / f"p{suffix}"
    if suffix == ".parquet":
        pytest.importorskip("pyarrow")
    found = cw.predict(trained(class_names=NAMES), on=ONE, out=out, top=2, probabilities=True)
    assert (found.outputs, found.file, found.examples) == (None, out, 53)
    if suffix == ".csv":
        rows = list(csv.DictReader(out.read_text().splitlines()))
        rows = [{**row, "probabilities": json.loads(row["probabilities"])} for row in rows]
    elif suffix == ".jsonl":
        rows = [json.loads(line) for line in out.read_text().splitlines()]
    else:
        import pyarrow.parquet

        rows = pyarrow.parquet.read_table(out).to_pylist()
    assert [int(row["index"]) for row in rows] == list(range(53))
    assert [int(row["label"]) for row in rows] == tasks.data(53, 1).columns["label"].tolist()
    order = np.argsort(-EXPECTED, axis=1)
    assert [int(row["prediction"]) for row in rows] == order[:, 0].tolist()
    assert [row["class_2"] for row in rows] == [NAMES[i] for i in order[:, 1]]
    chances = np.exp(EXPECTED - EXPECTED.max(1, keepdims=True))
    chances /= chances.sum(1, keepdims=True)
    np.testing.assert_allclose([row["probabilities"] for row in rows], chances, rtol=1e-5)
    np.testing.assert_allclose([float(row["probability"]) for row in rows], chances.max(1), rtol=1e-5)


class Named:
    """A source whose examples have names, and that cannot be read past an example."""

    def __init__(self, stops_at=53):
        self.of, self.stops_at = tasks.data(53, 1), stops_at

    def __len__(self):
        return len(self.of)

    def __getitem__(self, index):
        if index >= self.stops_at:
            raise cw.errors.DataError("source-empty")
        return self.of[index]

    def record_name(self, index):
        return f"x/{index}.jpg"


@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".parquet"])
def test_a_file_of_several_parts_has_the_same_bytes_on_any_devices(tmp_path, monkeypatch, suffix):
    if suffix == ".parquet":
        pytest.importorskip("pyarrow")
    monkeypatch.setattr(module, "_PART_ROWS", 8)
    written, said = [], []
    for devices, batch in ((1, 4), (2, None), (8, 16)):
        out = tmp_path / f"{devices}{suffix}"
        found = cw.predict(
            trained(), Named(), on=cw.On(devices=devices), out=out, batch=batch, say=said.append
        )
        written.append(out.read_bytes())
    assert written[0] == written[1] == written[2]
    assert [one["done"] for one in said[:3]] == [BLOCK, 2 * BLOCK, 3 * BLOCK]
    right = EXPECTED.argmax(1) == tasks.data(53, 1).columns["label"]
    assert found.accuracy == pytest.approx(right.mean())


def test_predictions_that_stop_leave_no_file_and_begin_again(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_PART_ROWS", 8)
    out = tmp_path / "p.csv"
    with refused(cw.errors.DataError, "source-empty"):
        cw.predict(trained(), Named(stops_at=37), on=ONE, out=out, batch=4)
    assert not list(tmp_path.iterdir())
    (tmp_path / ".p.csv.making").mkdir()
    (tmp_path / ".p.csv.making" / "whole").write_text("half")  # of a kill
    cw.predict(trained(), Named(), on=ONE, out=out, batch=4)
    assert [path.name for path in tmp_path.iterdir()] == ["p.csv"]
    assert out.read_text().splitlines()[1].startswith("0,x/0.jpg,")


def test_a_file_is_replaced_only_by_fresh(tmp_path):
    out = tmp_path / "p.csv"
    out.write_text("mine")
    with refused(cw.errors.DataError, "predictions-exist"):
        cw.predict(trained(), on=ONE, out=out)
    with refused(cw.errors.DataError, "source-empty"):
        cw.predict(trained(), Named(stops_at=3), on=ONE, out=out, fresh=True)
    assert out.read_text() == "mine"
    cw.predict(trained(), on=ONE, out=out, fresh=True)
    assert len(out.read_text().splitlines()) == 54


def test_one_process_makes_a_file(tmp_path):
    out, beside = tmp_path / "p.csv", tmp_path / ".p.csv.making"
    beside.mkdir()
    with hold(beside), refused(cw.errors.RunError, "folder-in-use", path=str(beside)):
        cw.predict(trained(), on=ONE, out=out)


def test_outputs_that_are_no_logits_become_columns(tmp_path):
    def several(params, state, inputs):
        made = tasks.plain_logits(params, inputs)
        return {"score": made[:, 0], "vector": made[:, :2], "grid": made[:, :4].reshape(-1, 2, 2)}

    out = tmp_path / "p.jsonl"
    model = trained(predict=several)
    cw.predict(model, on=ONE, out=out)
    row = json.loads(out.read_text().splitlines()[7])
    np.testing.assert_allclose(row["score"], EXPECTED[7, 0], rtol=1e-5)
    np.testing.assert_allclose(row["vector"], EXPECTED[7, :2], rtol=1e-5)
    np.testing.assert_allclose(row["grid"], EXPECTED[7, :4], rtol=1e-5)
    found = cw.predict(model, on=ONE)
    assert found.outputs["grid"].shape == (53, 2, 2)
    with refused(cw.errors.RecipeError, "predictions-without-logits"):
        _ = found.labels


def test_numbers_read_back_as_they_were_and_what_is_no_number_is_null(tmp_path):
    def odd(params, state, inputs):
        x = inputs["x"][:, 0].astype(np.float32)
        return jax.numpy.where(x > 100, jax.numpy.float32(np.nan), x / 3e7)

    out = tmp_path / "p.jsonl"
    cw.predict(trained(predict=odd), on=ONE, out=out)
    found = [json.loads(line)["outputs"] for line in out.read_text().splitlines()]
    x = tasks.data(53, 1).columns["x"][:, 0]
    assert [value is None for value in found] == (x > 100).tolist()
    kept = np.asarray([value for value in found if value is not None], np.float32)
    assert np.array_equal(kept, cw.predict(trained(predict=odd), on=ONE).outputs[x <= 100])


def test_a_name_without_a_known_ending_is_refused_before_anything_is_computed(tmp_path):
    with refused(cw.errors.DataError, "predictions-format"):
        cw.predict(trained(), on=ONE, out=tmp_path / "p.xlsx")
    with refused(cw.errors.RecipeError, "top-below-one"):
        cw.predict(trained(), on=ONE, top=0)
    with refused(cw.errors.RecipeError, "wrong-kind", what="model", value=3):
        cw.predict(3, on=ONE)


def test_classes_follow_the_logits_where_probabilities_are_0():
    columns = Columns("logits", ("a", "b", "c"), top=3)
    rows = columns.rows(0, None, None, {"outputs": np.float32([[0, -200, -150], [1, 1, 2]])})
    assert [rows[f"prediction{mark}"].tolist() for mark in ("", "_2", "_3")] == [[0, 2], [2, 0], [1, 1]]
    assert rows["class_2"] == ["c", "a"] and rows["probability_2"][0] == 0


def test_an_output_does_not_take_the_name_of_a_column():
    label, outputs = (
        np.int32([1]),
        {"label": np.float32([2]), "index": np.float32([3]), "mine": np.float32([4])},
    )
    with refused(cw.errors.RecipeError, "predictions-names-taken", names=["index", "label"]):
        Columns("values").rows(0, ["a.jpg"], label, outputs)
    assert list(Columns("values").rows(0, None, None, {"name": label})) == ["index", "name"]
