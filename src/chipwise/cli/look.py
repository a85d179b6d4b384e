"""`chipwise inspect PACK`: the content of a packed folder; `chipwise show RECIPE`: images as stored, and as
the model gets them in each epoch."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer
from rich.table import Table
from rich.text import Text

from ..errors import DataError
from ..explain.terminal import console, lines, table
from ..words.facts import Fact, fact
from ..words.figures import byte_size
from . import options
from .options import option

if TYPE_CHECKING:
    import jax
    from PIL import Image

    from ..data.packed import PackedFolder
    from ..recipe.recipe import Recipe

_CLASSES = 20  # rows of the table of classes
_SKIPPED = 10


def inspect(
    path: Annotated[
        str, typer.Argument(metavar="PACK", help="A packed folder, or one of its splits; a path or a URL.")
    ],
    verify: Annotated[
        bool, option("Read every byte and name each damaged record (exit code 3).", name="--verify")
    ] = False,
    sheet: Annotated[
        Path | None, option("Write 100 examples with their classes as a picture.", "FILE.png")
    ] = None,
    json_: options.Json = False,
) -> None:
    """Show and check the content of a packed folder.

    \b
    Examples:
      chipwise inspect photos-224
      chipwise inspect photos-224 --verify
      chipwise inspect photos-224 --sheet photos.png
    """
    from ..data import remote
    from ..data.sheet import sheet as sheet_of
    from ..data.sheet import write_picture

    folder = remote.local(path)
    splits = _splits(folder)
    parts: list[Any] = [] if json_ else [_contents(splits)]
    if any(source.names for source in splits.values()) and not json_:
        parts += _classes(splits)
    to = console()
    for part in parts:
        to.print(part)

    def line(*texts: object) -> None:
        if not json_:
            lines(to, *texts)

    line(*_notes(splits))
    if sheet is not None:
        line(f"written: {write_picture(sheet_of(next(iter(splits.values()))), sheet, '--sheet')}")
    faults: list[DataError] = list(_missing(folder, splits))
    if verify:
        for source in splits.values():
            try:
                source.verify()
            except DataError as error:
                faults.append(error)
    if len(faults) > 1:
        raise DataError("pack-faults", faults=[str(fault) for fault in faults])
    if faults:
        raise faults[0]
    if verify:
        line(fact("pack-verified", records=sum(map(len, splits.values()))))
    if json_:
        answer: dict[str, Any] = {"path": str(path), "verified": True if verify else None}
        print(json.dumps({**answer, "splits": {name: source.manifest for name, source in splits.items()}}))


def _splits(path: Path) -> dict[str, PackedFolder]:
    """Split to its reader; only `path` itself if it is a split. Raises `DataError` if there is none."""
    from ..data.manifest import MANIFEST
    from ..data.packed import PackedFolder

    if (path / MANIFEST).is_file():
        return {path.name: PackedFolder(path, None, size=_size(path))}
    names = sorted(
        (manifest.parent.name for manifest in path.glob(f"*/{MANIFEST}")),
        key=lambda name: (name != "train", name),
    )
    if not names and (path.parent / f".{path.name}.partial").is_dir():
        raise DataError("pack-not-finished", path=path)
    if not names:
        raise DataError("pack-not-found", path=path, manifest=MANIFEST)
    return {name: PackedFolder(path, name, size=_size(path / name)) for name in names}


def _missing(path: Path, splits: dict[str, PackedFolder]) -> Iterator[DataError]:
    """An error for each missing split of a packed folder; none if `path` is a single split."""
    from ..data.manifest import MANIFEST

    if not (path / MANIFEST).is_file():
        packed = {name for source in splits.values() for name in source.manifest.get("splits", ())}
        for name in sorted(packed - set(splits)):
            yield DataError("pack-split-missing", path=path / name, splits=list(splits))


def _size(split: Path) -> int | None:
    """The size at which images are shown if their sizes vary; otherwise None."""
    from ..data.manifest import read_manifest

    columns = read_manifest(split)["columns"]
    return 224 if columns.get("image", {}).get("shape", ()) is None else None


def _contents(splits: dict[str, PackedFolder]) -> Table:
    cells = []
    for name, source in splits.items():
        manifest = source.manifest
        files = [file for shard in manifest["shards"] for file in shard["files"].values()]
        columns_text = "\n".join(f"{column} {_kind(c)}" for column, c in manifest["columns"].items())
        moments = [
            Text("\n".join(f"{value:.2f}" for value in values)) for values in (source.mean, source.std)
        ]
        size = byte_size(sum(file["bytes"] for file in files))
        shards = len(manifest["shards"])
        cells.append(
            [name, f"{len(source):,}", manifest["store"], Text(columns_text), shards, size, *moments]
        )
    columns = ("split", "examples", "stored as", "columns", "shards", "bytes", "mean", "std")
    words = ("split", "stored as", "columns", "mean", "std")
    return table(columns, cells, left=words, fold=words)


def _notes(splits: dict[str, PackedFolder]) -> Iterator[Fact]:
    settings: dict[str, Any] = {}
    for source in splits.values():
        settings |= {key: value for key, value in source.manifest["settings"].items() if value is not None}
    if settings:
        yield fact("pack-settings", settings=[f"{key} {value}" for key, value in settings.items()])
    for name, source in splits.items():
        skipped = source.manifest["source"].get("skipped", [])
        if skipped:
            yield fact("pack-split-skipped", count=len(skipped), split=name)
        for entry in skipped[:_SKIPPED]:
            yield fact("pack-skipped-entry", name=entry["name"], reason=entry["reason"])
        if len(skipped) > _SKIPPED:
            yield fact("pack-skipped-more-json", count=len(skipped) - _SKIPPED)


def _kind(column: dict[str, Any]) -> str:
    shape = "sizes vary" if column["shape"] is None else ", ".join(map(str, column["shape"]))
    return f"{column['dtype']}[{shape}]" + (f" below {column['below']}" if "below" in column else "")


def _classes(splits: dict[str, PackedFolder]) -> tuple[str, Table]:
    """The number of examples by class; of many classes only the largest and the smallest."""
    names = next(source.names for source in splits.values() if source.names)
    counts = {split: source.manifest["counts"] or [0] * len(names) for split, source in splits.items()}
    order = sorted(range(len(names)), key=lambda i: -sum(c[i] for c in counts.values()))
    many = len(order) > _CLASSES
    shown = order[: _CLASSES // 2] + order[-_CLASSES // 2 :] if many else list(range(len(names)))
    cells = [(names[i], *(f"{c[i]:,}" for c in counts.values())) for i in shown]
    listed = table(("class", *splits), cells, left=("class",), fold=("class",))
    title = fact("pack-classes", classes=len(names))
    if many:
        title = fact("pack-classes-some", classes=len(names), shown=_CLASSES // 2)
    return str(title), listed


# ---- the recipe's images


@options.taking
def show(
    recipe: options.Given,
    examples: Annotated[int, option("Rows: training examples.", "N", min=1)] = 8,
    copies: Annotated[int, option("Columns: epochs, from the first.", "N", min=0)] = 8,
    out: Annotated[str | None, option("[NAME.png]", "FILE.png")] = None,
) -> None:
    """Draw a recipe's images as augmented in training, with the same random keys.

    \b
    Examples:
      chipwise show cifar10-davidnet --out cifar.png
      chipwise show vit-s16 --data DIR --examples 4 --set seed=1
    """
    from ..data.sheet import picture_format, write_picture

    loaded = recipe.load()
    path = Path(out or f"{loaded.name}.png")
    picture_format(path, "--out")  # refused before the work
    print(write_picture(gallery(loaded, examples, copies), path, "--out"))


def gallery(recipe: Recipe, examples: int = 8, copies: int = 8) -> Image.Image:
    """A grid with a row for each of `examples` training examples, evenly spaced in the data: in the first
    column as stored, then as augmented in epochs 0 to `copies - 1`, with labels below.

    The random keys are those of training: the copy below "epoch 2" is the example in the third epoch of a run
    with the recipe's seed. A task's `mix` mixes the examples of a column, but in a run those of a replica.

    Raises `DataError` if the examples have no column `image` of `(height, width)` or
    `(height, width, channels)`, or if there are none.
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
    low, high = 0.0, 1.0  # for floats in this range; for others, from the darkest to the brightest value
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
