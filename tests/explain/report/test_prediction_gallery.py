"""The gallery of predictions: which examples it shows, and that the page fetches nothing for it."""

import dataclasses
import json
import re

import jax.numpy as jnp
import numpy as np
import pytest

import chipwise as cw
from chipwise.base.errors import RecipeError
from chipwise.deploy.model import Trained
from chipwise.explain.page import render
from chipwise.explain.report.prediction_gallery import gallery
from chipwise.explain.report.report_parts import parts
from chipwise.explain.report.run_report import report
from explain.report.stories import whole
from pages import Reader
from refusals import refused

# What 8 examples are, and the logits of three classes: the pixels of their first row
LABELS = [0, 0, 1, 1, 1, 2, 2, 2]
LOGITS = [[9, 0, 0], [0, 2, 0], [0, 5, 0], [4, 0, 0], [3, 0, 0], [0, 0, 1], [0, 0, 6], [7, 0, 0]]


def predict(params, state, inputs):
    return inputs["image"][:, 0, :].astype(jnp.float32) + params["zero"][None]


def loss(params, state, batch, key, train):
    logits = predict(params, state, batch)
    return {"loss": cw.Sum.of(cw.losses.softmax_cross_entropy(logits, batch["label"]))}, state


def trained(**changes):
    pixels = np.zeros((8, 3, 3), np.uint8)
    pixels[:, 0] = LOGITS
    data = cw.Arrays(image=pixels, label=np.array(LABELS, np.int32))
    about = {"classes": 3, "class_names": ("a", "b", "c"), "predict": predict, **changes}
    task = cw.Task(init=lambda key: ({"zero": jnp.zeros(3)}, {}), loss=loss, train=data, eval=data, **about)
    recipe = cw.Recipe(task=task, batch=8, duration="1st", optimizer=cw.sgd(lr=0.1))
    return Trained(recipe, {"zero": np.zeros(3, np.float32)}, {}, steps=5)


@pytest.fixture(scope="module")
def found():
    return gallery(trained(), on=cw.On(devices=1))


def test_the_worst_the_best_and_the_confused(found):
    assert (found["steps"], found["examples"], found["accuracy"]) == (5, 8, 4 / 8)
    assert [tile["index"] for tile in found["worst"]][:4] == [7, 3, 4, 1]
    assert [tile["index"] for tile in found["best"]][:3] == [0, 6, 2]
    assert found["best"][0]["probability"] == pytest.approx(1.0, abs=1e-3)
    first = found["confused"][0]
    assert (first["actual"], first["predicted"], first["count"]) == ("b", "a", 2)
    assert [tile["index"] for tile in first["tiles"]] == [3, 4]
    assert [(p["actual"], p["predicted"]) for p in found["confused"][1:]] == [("a", "b"), ("c", "a")]
    assert len({tile["image"] for tile in found["worst"]}) == 8
    json.dumps(found, allow_nan=False)


def test_a_prediction_that_is_no_number_is_the_worst(tmp_path):
    def unsure(params, state, inputs):
        logits = predict(params, state, inputs)
        return jnp.where(logits[:, 1:2] == 5, jnp.nan, logits)  # of example 2, one of the best

    found = gallery(trained(predict=unsure), on=cw.On(devices=1))
    assert [tile["index"] for tile in found["worst"]][:3] == [2, 7, 3]
    assert [tile["index"] for tile in found["best"]][:2] == [0, 6] and found["best"][-1]["index"] == 2
    assert found["worst"][0]["probability"] is None
    json.dumps(found, allow_nan=False)
    whole(tmp_path)
    document = report(tmp_path / "run", found)
    assert "unknown" in render([*parts(document)], document)


def test_the_page_shows_it_and_fetches_nothing(found, tmp_path):
    whole(tmp_path)
    document = report(tmp_path / "run", found)
    page = render([*parts(document)], document)
    sources = [attributes["src"] for tag, attributes in Reader(page).elements if tag == "img"]
    assert len(sources) == 8 + 8 + 4 and all(s.startswith("data:image/png;base64,") for s in sources)
    assert not re.search(r"url\((?!#)|@import", page)
    without = report(tmp_path / "run")
    assert "<img" not in render([*parts(without)], without)


def test_what_is_no_classifier_or_has_no_labels_is_refused():
    with refused(RecipeError, "gallery-no-classes"):
        gallery(trained(classes=None, class_names=()), on=cw.On(devices=1))
    unlabelled = cw.Arrays(image=np.zeros((2, 3, 3), np.uint8))
    model = trained()
    task = dataclasses.replace(model.recipe.task, eval=unlabelled)
    with refused(RecipeError, "gallery-no-classes"):
        gallery(
            dataclasses.replace(model, recipe=dataclasses.replace(model.recipe, task=task)), cw.On(devices=1)
        )
