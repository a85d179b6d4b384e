"""Predictions of a classifier to look at: the worst, the best, and the classes that it confuses."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ...data.sheet import picture_of
from ...data.sources import take
from ...deploy.inputs import name_of
from ...deploy.model import Trained
from ...deploy.predictions import predict
from ...engine.on import ALL, On
from ...errors import RecipeError
from ...words.figures import one_line

TILES, PAIRS, OF_PAIR = 8, 4, 4
"""Examples of the worst and of the best; pairs of classes, and examples of each."""


def gallery(model: Trained, source: Any = None, on: On = ALL) -> dict[str, Any]:
    """Predicts the evaluation data, or `source`, and chooses examples, as JSON values.

    *Returns* `steps`, `examples`, `accuracy`; `worst` and `best`, tiles by the probability of their own
    class, ties in the data's order; `confused`: pairs of classes (`actual`, `predicted`, `count` of them, and
    tiles), the most frequent first. A tile: `index`, `name`, `actual`, `predicted`, `probability` of the
    actual class, and `image`, a PNG as data, or `None`.

    Raises `RecipeError` for a model that is no classifier or data without labels, `DataError`.
    """
    data = model.evaluation() if source is None else source
    classes = model.recipe.task.classes
    predictions = predict(model, data, on=on)
    outputs = predictions.outputs
    if classes is None or not isinstance(outputs, np.ndarray) or outputs.shape[1:] != (classes,):
        text = "{recipe} is no classifier: --predictions needs Task(classes=..., predict=...) with logits."
        raise RecipeError("gallery-no-classes", text, recipe=model.recipe.name)
    everything = np.arange(len(data))
    columns = take(data, everything)
    if "label" not in columns:
        text = "{recipe}: --predictions needs evaluation data with a column label, this has {columns:list}."
        raise RecipeError("gallery-no-labels", text, recipe=model.recipe.name, columns=sorted(columns))
    actual, predicted = np.asarray(columns["label"]).astype(np.int64), predictions.labels
    sure = predictions.probabilities[everything, actual]
    order = np.argsort(sure, kind="stable")
    tiles = _Tiles(data, columns.get("image"), actual, predicted, sure, predictions.class_names)
    wrong = np.flatnonzero(actual != predicted)
    pairs, counts = np.unique(actual[wrong] * classes + predicted[wrong], return_counts=True)
    confused = []
    for k in np.argsort(-counts, kind="stable")[:PAIRS]:
        a, p = divmod(int(pairs[k]), classes)
        these = wrong[(actual[wrong] == a) & (predicted[wrong] == p)]
        worst = these[np.argsort(sure[these], kind="stable")][:OF_PAIR]
        names = {"actual": tiles.name(a), "predicted": tiles.name(p)}
        confused.append({**names, "count": int(counts[k]), "tiles": tiles.of(worst)})
    return {
        "steps": model.steps,
        "examples": len(data),
        "accuracy": float(np.mean(actual == predicted)),
        "worst": tiles.of(order[:TILES]),
        "best": tiles.of(order[::-1][:TILES]),
        "confused": confused,
    }


class _Tiles:
    """Makes the tiles of examples."""

    def __init__(self, source, images, actual, predicted, sure, names: Sequence[str]):
        self.images, self.actual, self.predicted, self.sure = images, actual, predicted, sure
        self._names, self._file = names, name_of(source)
        self._range = (0.0, 1.0)  # of floats; of others, from the darkest to the brightest value
        if images is not None and (images.dtype.kind != "f" or images.min() < 0 or images.max() > 1):
            self._range = float(images.min()), float(images.max())

    def name(self, number: int) -> str:
        return one_line(self._names[number]) if self._names else str(number)

    def of(self, indices: np.ndarray) -> list[Mapping[str, Any]]:
        return [
            {
                "index": i,
                "name": one_line(self._file(i)) if self._file is not None else str(i),
                "actual": self.name(int(self.actual[i])),
                "predicted": self.name(int(self.predicted[i])),
                "probability": float(self.sure[i]),
                "image": self._picture(i),
            }
            for i in indices.tolist()
        ]

    def _picture(self, index: int) -> str | None:
        if self.images is None or self.images[index].ndim not in (2, 3):
            return None
        pixels = self.images[index]
        if pixels.dtype == np.uint8 and self._range[1] < 64:  # such as digits of 16 levels
            pixels = pixels.astype(np.float32)
        picture = picture_of(pixels, *self._range)
        picture.thumbnail((96, 96))
        file = io.BytesIO()
        picture.save(file, "PNG")
        return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
