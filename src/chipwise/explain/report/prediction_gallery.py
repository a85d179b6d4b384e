"""Chooses a classifier's predictions to show: the worst, the best, and the classes that it
confuses."""

from __future__ import annotations

import base64
import io
from collections import Counter
from typing import Any

import numpy as np
from PIL import Image

from ...base import RecipeError
from ...base.figures import one_line
from ...data.sources import take
from ...deploy.inputs import name_of
from ...deploy.model import Trained
from ...deploy.predictions import predict
from ...run.folder.run_reader import number
from ...run.on import ALL, On

SIDE = 96  # pixels; smaller images are magnified by an integer
TILES, PAIRS, OF_PAIR = 8, 4, 4
"""Numbers of the worst examples and of the best, of pairs of classes, and of examples of each
pair."""


def gallery(model: Trained, on: On = ALL) -> dict[str, Any]:
    """Predicts the evaluation data of a model and chooses examples, as JSON values.

    *Returns*

    - `steps`, `examples` and `accuracy`.
    - `worst` and `best`: tiles by the probability of their own class, ties in the data's order.
    - `confused`: pairs of classes, the most frequent first. A pair has `actual`, `predicted`, its
      `count` and its worst `tiles`.

    A tile has `index`, `name`, `actual`, `predicted`, the `probability` of the actual class, `None`
    for NaN, and `image`, a PNG as a data URL, or `None`.

    Raises `RecipeError` if the model is no classifier or the data has no labels, and `DataError`.
    """
    data = model.evaluation()
    predictions = predict(model, data, on=on)
    actual = predictions.actual
    names = predictions.class_names
    if actual is None:
        raise RecipeError("gallery-no-classes", recipe=model.recipe.name)
    predicted = predictions.labels
    sure = predictions.probabilities[np.arange(len(data)), actual]
    order = np.argsort(np.nan_to_num(sure, nan=-1.0), kind="stable")  # NaN is the worst
    wrong = [(int(actual[i]), int(predicted[i]), i) for i in order if actual[i] != predicted[i]]
    counts = Counter(pair[:2] for pair in wrong)
    pairs = sorted(counts, key=lambda pair: (-counts[pair], pair))[:PAIRS]
    confused = {pair: [i for *of, i in wrong if tuple(of) == pair][:OF_PAIR] for pair in pairs}
    worst = order[:TILES]
    best = order[::-1][:TILES]
    shown = np.unique([*worst, *best, *(i for of in confused.values() for i in of)])
    pictures = _pictures(take(data, shown).get("image"))
    called = name_of(data) or str

    def name(number: int) -> str:
        return one_line(names[number]) if names else str(number)

    def tiles(indices: Any) -> list[dict[str, Any]]:
        return [
            {
                "index": int(i),
                "name": one_line(called(int(i))),
                "actual": name(int(actual[i])),
                "predicted": name(int(predicted[i])),
                "probability": number(float(sure[i])),
                "image": pictures[int(np.searchsorted(shown, i))] if pictures else None,
            }
            for i in indices
        ]

    return {
        "steps": model.steps,
        "examples": len(data),
        "accuracy": predictions.accuracy,
        "worst": tiles(worst),
        "best": tiles(best),
        "confused": [
            {"actual": name(a), "predicted": name(p), "count": counts[a, p], "tiles": tiles(of)}
            for (a, p), of in confused.items()
        ],
    }


def _pictures(images: np.ndarray | None) -> list[str]:
    """Encodes images `(n, height, width)` or `(n, height, width, channels)` as PNG, scaled from
    their darkest value to their brightest. Returns an empty list for arrays of other shapes."""
    if images is None or images.ndim not in (3, 4):
        return []
    values = images.astype(np.float32)
    values = (values - values.min()) / max(float(np.ptp(values)), 1e-6)
    if values.ndim == 4 and values.shape[3] not in (3, 4):
        values = values[..., 0]
    pngs = []
    for pixels in np.clip(np.nan_to_num(np.rint(values * 255)), 0, 255).astype(np.uint8):
        picture = Image.fromarray(pixels).convert("RGB")
        file = io.BytesIO()
        times = -(-SIDE // max(picture.size))
        picture = picture.resize(
            (picture.width * times, picture.height * times), Image.Resampling.NEAREST
        )
        picture.thumbnail((SIDE, SIDE))
        picture.save(file, "PNG")
        pngs.append(f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}")
    return pngs
