"""`chipwise show RECIPE`: each image as stored, and as the model meets it epoch after epoch."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer

from ..errors import DataError
from . import options

if TYPE_CHECKING:
    import jax
    from PIL import Image

    from ..recipe.recipe import Recipe


def show(
    recipe: Annotated[str, typer.Argument(help="A built-in recipe (digits, mnist, ...) or path.py:name.")],
    examples: Annotated[int, typer.Option(min=1, metavar="N", help="Rows: training examples.")] = 8,
    copies: Annotated[int, typer.Option(min=0, metavar="N", help="Columns: epochs, from the first.")] = 8,
    out: Annotated[str | None, typer.Option(metavar="FILE.png", help="[NAME.png]")] = None,
    data: options.Data = None,
    synthetic: options.Synthetic = False,
    set_: options.Set = None,
) -> None:
    """Draw what a recipe does to its images, with the random keys of training.

    \b
    Examples:
      chipwise show cifar10-davidnet --out cifar.png
      chipwise show vit-s16 --data DIR --examples 4 --set seed=1
    """
    from ..data.sheet import picture_format, write_picture
    from ..recipe.settings import load

    loaded = load(recipe, set_ or (), data, synthetic)
    path = Path(out or f"{loaded.name}.png")
    picture_format(path, "--out")  # before the work, not after it
    print(write_picture(gallery(loaded, examples, copies), path, "--out"))


def gallery(recipe: Recipe, examples: int = 8, copies: int = 8) -> Image.Image:
    """A grid with a row for each of `examples` training examples, evenly spread over the data: in the first
    column as stored, then changed as in epochs 0 to `copies - 1`, labels below.

    The keys are those of training: the copy below "epoch 2" of an example is what it becomes in the third
    epoch of a run with the recipe's seed. A task's `mix` mixes the examples of a column, in a run those that
    the order of the epoch puts into one replica.

    Raises `DataError` for a task whose examples have no column `image` of `(height, width)` or
    `(height, width, channels)`, or that is empty.
    """
    from ..data.sheet import Tile, caption, grid, picture_of
    from ..data.sources import spec_of, take

    source = recipe.task.train
    spec = spec_of(source)
    if "image" not in spec or len(spec["image"].shape) not in (2, 3):
        columns = [f"{name} {struct.dtype}{list(struct.shape)}" for name, struct in spec.items()]
        raise DataError("show-no-images", recipe=recipe.name, columns=columns)
    indices = np.unique(np.linspace(0, len(source) - 1, min(examples, len(source))).astype(np.int32))
    stored = {name: np.asarray(column) for name, column in take(source, indices).items()}
    pixels = stored["image"]
    low, high = 0.0, 1.0  # floats in this range as they are, others from the darkest stored to the lightest
    if pixels.dtype.kind != "f" or pixels.min() < 0 or pixels.max() > 1:
        low, high = float(pixels.min()), float(pixels.max())

    def tiles(batch: Mapping[str, np.ndarray]) -> list[Tile]:
        labels = batch.get("label", [None] * len(indices))
        pairs = zip(batch["image"], labels, strict=True)
        return [Tile(picture_of(image, low, high), caption(label)) for image, label in pairs]

    epochs = [tiles(epoch(recipe, stored, indices, number)) for number in range(copies)]
    return grid([tiles(stored), *epochs], ["stored", *(f"epoch {number}" for number in range(copies))])


def epoch(
    recipe: Recipe, stored: Mapping[str, Any], indices: np.ndarray, number: int
) -> dict[str, np.ndarray]:
    """The examples at `indices`, columns `(n, ...)` as `stored`, as the loss of epoch `number` gets them."""
    assert recipe.clock.examples is not None
    step = number * recipe.clock.examples // recipe.batch
    batch = _changes(recipe)(dict(stored), indices.astype(np.int32), np.int32(number), np.int32(step))
    return {name: np.asarray(column) for name, column in batch.items()}


@functools.lru_cache(maxsize=1)
def _changes(recipe: Recipe) -> Any:
    import jax
    import jax.numpy as jnp

    from ..engine import keys

    task = recipe.task

    def change(batch: dict, indices: jax.Array, number: jax.Array, step: jax.Array) -> dict:
        if task.augment is not None:
            epochs = jnp.broadcast_to(number, indices.shape)
            batch = jax.vmap(task.augment)(batch, keys.augment_keys(recipe.seed, epochs, indices))
        if task.mix is not None:
            _, key = jax.random.split(keys.replica_key(recipe.seed, step, jnp.int32(0)))
            batch = task.mix(batch, key)
        return batch

    return jax.jit(change)
