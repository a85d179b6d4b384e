"""A picture of what a recipe does to its images: each as stored, and as the net meets it epoch after epoch.

The keys are those of training (`keys`): the copy below "epoch 2" of an example is what it becomes in the
third epoch of a run with the recipe's seed. A task's `mix` mixes the examples of a column, in a run those
that the order of the epoch puts into one replica.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from PIL import Image, ImageDraw, ImageFont

from ...engine import keys
from ...errors import DataError
from ...recipe.recipe import Recipe
from ..sources import spec_of, take

_SIDE = 96  # pixels: smaller images are magnified by a whole number
_GAP, _LINE = 4, 14
_WHITE, _INK = (255, 255, 255), (40, 40, 40)


def gallery(recipe: Recipe, examples: int = 8, copies: int = 8) -> Image.Image:
    """A grid with a row for each of `examples` training examples, evenly spread over the data: in the first
    column as stored, then changed as in epochs 0 to `copies - 1`, labels below.

    Raises `DataError` for a task whose examples have no column `image` of `(height, width)` or
    `(height, width, channels)`, or that is empty.
    """
    source = recipe.task.train
    spec = spec_of(source)
    if "image" not in spec or len(spec["image"].shape) not in (2, 3):
        found = ", ".join(f"{name} {s.dtype}{list(s.shape)}" for name, s in spec.items())
        raise DataError(f"{recipe.name} has {found}: only a column 'image' [h, w] or [h, w, c] can be shown.")
    indices = np.unique(np.linspace(0, len(source) - 1, min(examples, len(source))).astype(np.int32))
    stored = {name: np.asarray(column) for name, column in take(source, indices).items()}
    columns = [stored, *(epoch(recipe, stored, indices, number) for number in range(copies))]
    titles = ["stored", *(f"epoch {number}" for number in range(copies))]
    return _grid([_tiles(column, stored["image"]) for column in columns], titles)


def epoch(
    recipe: Recipe, stored: Mapping[str, Any], indices: np.ndarray, number: int
) -> dict[str, np.ndarray]:
    """The examples at `indices`, columns `(n, ...)` as `stored`, as the loss of epoch `number` gets them."""
    assert recipe.clock.examples is not None
    step = number * recipe.clock.examples // recipe.batch
    made = _changed(recipe)(dict(stored), indices.astype(np.int32), np.int32(number), np.int32(step))
    return {name: np.asarray(column) for name, column in made.items()}


@functools.lru_cache(maxsize=1)
def _changed(recipe: Recipe) -> Any:
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


def _tiles(column: Mapping[str, np.ndarray], stored: np.ndarray) -> list[tuple[Image.Image, str]]:
    """Each example's image, magnified, and what to write below."""
    labels = column.get("label")
    made = []
    for i, pixels in enumerate(column["image"]):
        if pixels.dtype != np.uint8:
            # Floats from 0 to 1 as they are; others from the stored data's darkest to its lightest
            low, high = (0.0, 1.0)
            if stored.dtype.kind != "f" or stored.min() < 0 or stored.max() > 1:
                low, high = float(stored.min()), float(stored.max())
            pixels = np.rint((pixels.astype(np.float32) - low) / max(high - low, 1e-9) * 255)
            pixels = np.clip(np.nan_to_num(pixels), 0, 255).astype(np.uint8)
        if pixels.ndim == 3 and pixels.shape[2] not in (3, 4):
            pixels = pixels[:, :, 0]
        image = Image.fromarray(pixels).convert("RGB")
        times = max(1, -(-_SIDE // max(image.size)))
        image = image.resize((image.width * times, image.height * times), Image.Resampling.NEAREST)
        made.append((image, "" if labels is None else _told(labels[i])))
    return made


def _told(label: np.ndarray) -> str:
    """A class, or the two largest shares of several."""
    if label.ndim == 0:
        return str(label)
    if label.ndim != 1:
        return ""
    shares = [(float(label[c]), int(c)) for c in np.argsort(-label, kind="stable")[:2] if label[c] > 0.005]
    return " + ".join(f"{share:.2f} × {c}" if share < 0.995 else str(c) for share, c in shares)


def _grid(columns: list[list[tuple[Image.Image, str]]], titles: list[str]) -> Image.Image:
    font = ImageFont.load_default(size=11)
    widths = [max(image.width for image, _ in column) + _GAP for column in columns]
    heights = [max(c[row][0].height for c in columns) + _LINE + _GAP for row in range(len(columns[0]))]
    page = Image.new("RGB", (sum(widths) + 3 * _GAP, sum(heights) + _LINE + 2 * _GAP), _WHITE)
    draw = ImageDraw.Draw(page)
    left = _GAP
    for number, (column, title, width) in enumerate(zip(columns, titles, widths, strict=True)):
        draw.text((left, _GAP), title, _INK, font=font)
        top = _GAP + _LINE
        for (image, label), height in zip(column, heights, strict=True):
            page.paste(image, (left, top))
            draw.text((left, top + image.height), label, _INK, font=font)
            top += height
        left += width + (2 * _GAP if number == 0 else 0)  # the stored ones stand apart
    return page
