"""Features: a model's outputs for a data set, computed once to train a head on (a linear probe).

body = cw.nnx.task(body_of, loss, train=images)
body = cw.pretrained("net.pth", names="efficientnet-lite0").start(body)
train = cw.deploy.features(body, images, "features")
head = cw.nnx.task(lambda rngs: nnx.Linear(1280, 10, rngs=rngs), loss, train=train, inputs="feature")
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from ..data.pack.writer import write_packed
from ..data.packed import PackedFolder
from ..data.sources import Arrays
from ..engine import keys
from ..engine.on import ALL, On
from ..engine.placement import Placement
from ..engine.predict import Predictor
from ..engine.state import from_data, replaced
from ..machine.arithmetic import fixed
from ..machine.detect import detect
from ..recipe.optimizers import sgd
from ..recipe.recipe import Recipe
from ..recipe.source import Source
from ..recipe.task import Task


@fixed()
def features(
    task: Task,
    data: Source,
    out: str | Path | None = None,
    *,
    split: str = "train",
    precision: str = "f32",
    seed: int = 0,
    on: On = ALL,
) -> Arrays | PackedFolder:
    """The outputs of `task.predict` for every example of `data`, as a data set to train on.

    The parameters are those with which training starts: of `task.init` and `task.from_data`. The bits are the
    same on any number of devices.

    *Arguments:*

    - `out`: a folder to pack the features into, as its split `split`; by default they stay in memory.
      `cw.PackedFolder(out, split)` reads it again.
    - `precision`: as in `Recipe`; `seed`: of parameters that do not come from a file.

    *Returns* a source with the column `feature` `(values,)` float32, or the columns of the dict that
    `predict` returns, and with the columns of `data` that the model does not read, such as `label`.

    Raises `RecipeError` for a task without `predict`, `DataError` for data that it cannot read, and for a
    folder that exists.
    """
    idle = Recipe(task=task, batch=1, replicas=1, duration="1st", optimizer=sgd(lr=0.0), precision=precision)
    params, state = jax.device_get(jax.jit(task.init)(keys.init_key(seed)))
    params = jax.device_get(replaced(params, from_data(task)))
    classes = getattr(data, "classes", None) or task.classes
    placement = Placement(detect(on.devices, on.platform))
    predictor = Predictor(idle, params, state, data, placement, workers=on.workers)

    def batches() -> Iterator[dict[str, Any]]:
        for beside, outputs in predictor():
            yield {**beside, **{"feature" if name == "outputs" else name: x for name, x in outputs.items()}}

    with contextlib.closing(predictor):
        if out is not None:
            write_packed(out, batches(), classes=classes, split=split)
            return PackedFolder(out, split)
        parts = list(batches())
    return Arrays(classes=classes, **{n: np.concatenate([part[n] for part in parts]) for n in parts[0]})
