"""`chipwise check RECIPE --images FILE`: images as stored, and as the model gets them in each epoch."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import DataError

if TYPE_CHECKING:
    import jax
    from PIL import Image

    from ..recipe.recipe import Recipe


def gallery(recipe: Recipe, examples: int = 8, epochs: int = 8) -> Image.Image:
    """A grid with a row for each of `examples` training examples, evenly spaced in the data: in the first
    column as stored, then as augmented in epochs 0 to `epochs - 1`, with labels below.

    The random keys are those of training: the copy below "epoch 2" is the example in the third epoch of a run
    with the recipe's seed. A task's `mix` mixes the examples of a column, but in a run those of a replica.

    Raises `DataError` if the examples have no column `image` of `(height, width)` or
    `(height, width, channels)`, or if there are none.
    """
    from ..data.draws import Drawn
    from ..data.sheet import Tile, caption, grid, picture_of
    from ..data.sources import spec_of, take
    from ..data.weighted import Weighted, by_epoch

    source = recipe.task.train
    source = source.source if isinstance(source, Weighted) else source
    spec = spec_of(source)
    if "image" not in spec or len(spec["image"].shape) not in (2, 3):
        columns = [f"{name} {struct.dtype}{list(struct.shape)}" for name, struct in spec.items()]
        text = "{recipe} has {columns:list}: only a column 'image' [h, w] or [h, w, c] can be drawn."
        raise DataError("show-no-images", text, recipe=recipe.name, columns=columns)
    indices = np.unique(np.linspace(0, len(source) - 1, min(examples, len(source))).astype(np.int32))
    anew = by_epoch(source, recipe.seed)
    stored = take(anew, indices)
    pixels = stored["image"]
    low, high = 0.0, 1.0  # for floats in this range; for others, from the darkest to the brightest value
    if pixels.dtype.kind != "f" or pixels.min() < 0 or pixels.max() > 1:
        low, high = float(pixels.min()), float(pixels.max())

    def tiles(batch: Mapping[str, np.ndarray]) -> list[Tile]:
        labels = batch.get("label", [None] * len(indices))
        pairs = zip(batch["image"], labels, strict=True)
        return [Tile(picture_of(image, low, high), caption(label)) for image, label in pairs]

    def read(number: int) -> Mapping[str, np.ndarray]:
        return take(anew, indices + number * len(source)) if isinstance(anew, Drawn) else stored

    later = [tiles(epoch(recipe, read(number), indices, number)) for number in range(epochs)]
    return grid([tiles(stored), *later], ["stored", *(f"epoch {number}" for number in range(epochs))])


def epoch(
    recipe: Recipe, stored: Mapping[str, Any], indices: np.ndarray, number: int
) -> dict[str, np.ndarray]:
    """The examples at `indices`, columns `(n, ...)`, as the loss gets them in epoch `number`.

    *Arguments:* `stored`, the columns before augmentation.
    """
    assert recipe.clock.examples is not None
    step = number * recipe.clock.examples // recipe.batch
    batch = _changes(recipe)(dict(stored), indices.astype(np.int32), np.int32(number), np.int32(step))
    return {name: np.asarray(column) for name, column in batch.items()}


@functools.lru_cache(maxsize=1)
def _changes(recipe: Recipe) -> Any:
    import jax
    import jax.numpy as jnp

    from ..engine import keys
    from ..engine.replica import augmented

    task = recipe.task

    def change(batch: dict, indices: jax.Array, number: jax.Array, step: jax.Array) -> dict:
        if task.augment is not None:
            epochs = jnp.broadcast_to(number, indices.shape)
            batch = augmented(task.augment, batch, recipe.seed, epochs, indices)
        if task.mix is not None:
            _, key = jax.random.split(keys.replica_key(recipe.seed, step, jnp.int32(0)))
            batch = task.mix(batch, key)
        return batch

    return jax.jit(change)
