"""`chipwise pack PACK`: the contents of a packed folder, and whether it is complete."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..base import DataError, Fact, fact
from ..base.figures import byte_size
from ..explain.terminal import console, lines, table
from .standard_output import print_json

if TYPE_CHECKING:
    from ..data.packed import PackedFolder

    Splits = dict[str, PackedFolder]

_CLASSES = 20  # rows of the table of classes
_SKIPPED = 10


def show(path: str, verify: bool, json_: bool) -> None:
    """Prints the content of the packed folder, or of the one split, at a path or URL.

    Raises `DataError` if it is no pack, if a split is missing, and, with `verify`, which reads
    every byte, for damage.
    """
    from ..data import remote

    folder = remote.local(path)
    to = console(quiet=json_)
    splits = summary(folder, to)
    faults = list(_missing(folder, splits))
    if verify:
        for source in splits.values():
            try:
                source.verify()
            except DataError as error:
                faults.append(error)
    if len(faults) > 1:
        raise DataError(
            "pack-faults", "{faults:sentences}", faults=[str(fault) for fault in faults]
        )
    if faults:
        raise faults[0]
    if verify:
        lines(to, fact("pack-verified", records=sum(map(len, splits.values()))))
    if json_:
        print_json("pack/1", {**document(path, splits), "verified": True if verify else None})


def document(path: str | Path, splits: Splits) -> dict[str, Any]:
    """The `path` of a pack and the manifests of its splits, for JSON."""
    return {"path": str(path), "splits": {name: source.manifest for name, source in splits.items()}}


def summary(folder: Path, to: Console) -> Splits:
    """Prints the contents of a pack or a split: sizes, classes, settings, and what was skipped.
    *Returns* its splits. Raises `DataError` if it is neither."""
    splits = _splits(folder)
    to.print(_contents(splits))
    if any(source.names for source in splits.values()):
        to.print(*_classes(splits), sep="\n")
    lines(to, *_notes(splits))
    return splits


def _splits(path: Path) -> Splits:
    """The reader of each split by name. If `path` itself is a split, only its own. Raises
    `DataError` if there is none."""
    from ..data.manifest import MANIFEST
    from ..data.packed import PackedFolder

    if (path / MANIFEST).is_file():
        return {path.name: PackedFolder(path, None, size=_size(path))}
    found = (manifest.parent.name for manifest in path.glob(f"*/{MANIFEST}"))
    names = sorted(found, key=lambda name: (name != "train", name))
    if not names and (path.parent / f".{path.name}.partial").is_dir():
        raise DataError("pack-not-finished", path=path)
    if not names:
        raise DataError("pack-not-found", path=path, manifest=MANIFEST)
    return {name: PackedFolder(path, name, size=_size(path / name)) for name in names}


def _missing(path: Path, splits: Splits) -> Iterator[DataError]:
    """Yields an error for each missing split of a packed folder, and nothing if `path` is a single
    split."""
    from ..data.manifest import MANIFEST

    if not (path / MANIFEST).is_file():
        packed = {name for source in splits.values() for name in source.manifest.get("splits", ())}
        for name in sorted(packed - set(splits)):
            yield DataError("pack-split-missing", path=path / name, splits=list(splits))


def _size(split: Path) -> int | None:
    """The size at which images are shown if their sizes vary. Otherwise None."""
    from ..data.manifest import read_manifest

    columns = read_manifest(split)["columns"]
    return 224 if columns.get("image", {}).get("shape", ()) is None else None


def _contents(splits: Splits) -> Table:
    cells = []
    for name, source in splits.items():
        manifest = source.manifest
        files = [file for shard in manifest["shards"] for file in shard["files"].values()]
        shapes = "\n".join(f"{column} {_kind(c)}" for column, c in manifest["columns"].items())
        moments = [
            Text("\n".join(f"{value:.2f}" for value in many)) for many in (source.mean, source.std)
        ]
        size = byte_size(sum(file["bytes"] for file in files))
        shards = len(manifest["shards"])
        cells.append(
            [name, f"{len(source):,}", manifest["store"], Text(shapes), shards, size, *moments]
        )
    columns = ("split", "examples", "stored as", "columns", "shards", "bytes", "mean", "std")
    words = ("split", "stored as", "columns", "mean", "std")
    return table(columns, cells, left=words, fold=words)


def _notes(splits: Splits) -> Iterator[Fact]:
    from ..data.readings import packs_read

    settings: dict[str, Any] = {}
    for source in splits.values():
        settings |= {
            key: value
            for key, value in source.manifest["settings"].items()
            if value is not None and key != "read"
        }
    yield from packs_read(splits.values())
    if settings:
        yield fact("pack-settings", settings=[f"{key} {value}" for key, value in settings.items()])
    for name, source in splits.items():
        skipped = source.manifest["source"].get("skipped", [])
        if skipped:
            yield fact("pack-split-skipped", count=len(skipped), split=name)
        for entry in skipped[:_SKIPPED]:
            yield fact("pack-skipped-entry", name=entry["name"], reason=entry["reason"])
        if len(skipped) > _SKIPPED:
            yield fact("pack-skipped-more", count=len(skipped) - _SKIPPED)


def _kind(column: dict[str, Any]) -> str:
    shape = "sizes vary" if column["shape"] is None else ", ".join(map(str, column["shape"]))
    return f"{column['dtype']}[{shape}]" + (
        f" below {column['below']}" if "below" in column else ""
    )


def _classes(splits: Splits) -> tuple[str, Table]:
    """The title and the table of the number of examples by class. With many classes, only the
    largest and the smallest are shown."""
    names = next(source.names for source in splits.values() if source.names)
    counts = {
        split: source.manifest["counts"] or [0] * len(names) for split, source in splits.items()
    }
    order = sorted(range(len(names)), key=lambda i: -sum(c[i] for c in counts.values()))
    many = len(order) > _CLASSES
    shown = order[: _CLASSES // 2] + order[-_CLASSES // 2 :] if many else list(range(len(names)))
    cells = [(names[i], *(f"{c[i]:,}" for c in counts.values())) for i in shown]
    listed = table(("class", *splits), cells, left=("class",), fold=("class",))
    title = fact("pack-classes", classes=len(names))
    if many:
        title = fact("pack-classes-some", classes=len(names), shown=_CLASSES // 2)
    return str(title), listed
