"""Features: a model's outputs for a data set, computed once to train a head on (a linear probe).

body = cw.nnx.task(body_of, loss, train=images)
body = cw.pretrained("net.pth", names="efficientnet-lite0").start(body)
train = cw.deploy.features(body, images, "features")
head = cw.nnx.task(lambda rngs: nnx.Linear(1280, 10, rngs=rngs), loss, train=train, inputs="feature")
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from ..data.pack.writer import write_packed
from ..data.packed import PackedFolder
from ..data.sources import Arrays, described, example_bytes, take
from ..engine import keys
from ..engine.on import ALL, On
from ..engine.placement import Placement
from ..engine.predict import Predictor
from ..engine.state import fingerprint, from_data, replaced
from ..errors import DataError
from ..machine.detect import detect
from ..recipe.optimizers import sgd
from ..recipe.recipe import Recipe
from ..recipe.source import Source, spec_of
from ..recipe.task import Task


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

    - `out`: a folder to pack the features into, as its split `split`; by default they stay in memory. An
      existing folder is reused if the model's arrays, the precision and every example are the same. This
      reads the examples again, or only the manifest of a packed folder. Other changes, such as to `predict`,
      are not noticed: name another folder.
    - `precision`: as in `Recipe`; `seed`: of parameters that do not come from a file.

    *Returns* a source with the column `feature` `(values,)` float32, or the columns of the dict that
    `predict` returns, and with the columns of `data` that the model does not read, such as `label`.

    Raises `RecipeError` for a task without `predict`, `DataError` for data that it cannot read, for an
    existing folder with other content, and with `out` for a source that gives other examples each time.
    """
    idle = Recipe(task=task, batch=1, replicas=1, duration="1st", optimizer=sgd(lr=0.0), precision=precision)
    params, state = jax.device_get(jax.jit(task.init)(keys.init_key(seed)))
    params = jax.device_get(replaced(params, from_data(task)))
    classes = getattr(data, "classes", None) or task.classes
    of = ""
    if out is not None:
        about = [fingerprint((params, state)), precision, len(data), described(spec_of(data)), _content(data)]
        of = hashlib.sha256(json.dumps(about).encode()).hexdigest()
        if (Path(out) / split).exists():
            return _made_before(Path(out), split, of)
    placement = Placement(detect(on.devices, on.platform))
    predictor = Predictor(idle, params, state, data, placement, workers=on.workers)

    def batches() -> Iterator[dict[str, Any]]:
        for beside, outputs in predictor():
            yield {**beside, **{"feature" if name == "outputs" else name: x for name, x in outputs.items()}}

    with contextlib.closing(predictor):
        if out is not None:
            write_packed(out, batches(), classes=classes, split=split, fingerprint=of)
            return PackedFolder(out, split)
        parts = list(batches())
    return Arrays(classes=classes, **{n: np.concatenate([part[n] for part in parts]) for n in parts[0]})


_PIECE = 1 << 26
"""Bytes of examples that are read at a time."""


def _content(data: Source) -> str:
    """SHA-256 of all examples, or of a packed folder's manifest, which has the digests of its files."""
    if isinstance(data, PackedFolder):
        return data.manifest["sha256"]
    some = np.linspace(0, len(data) - 1, min(8, len(data))).astype(np.int32)
    first, again = (sorted((n, c.tobytes()) for n, c in take(data, some).items()) for _ in range(2))
    if first != again:
        text = (
            "{source} gave other values when read again, so a folder cannot keep its features: leave out "
            "out=."
        )
        raise DataError("features-unsteady", text, source=type(data).__name__)
    digest, rows = hashlib.sha256(), max(1, _PIECE // max(1, example_bytes(spec_of(data))))
    for start in range(0, len(data), rows):
        for name, column in sorted(take(data, np.arange(start, min(start + rows, len(data)))).items()):
            digest.update(name.encode() + np.ascontiguousarray(column).tobytes())
    return digest.hexdigest()


def _made_before(out: Path, split: str, of: str) -> PackedFolder:
    folder = PackedFolder(out, split)
    if folder.manifest["source"].get("fingerprint") != of:
        text = "{folder} has features of another model or data: remove it, or name another folder."
        raise DataError("features-of-others", text, folder=out / split)
    return folder
