"""`chipwise inspect PACK`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..errors import DataError
from ..words.facts import Fact, fact
from ..words.figures import byte_size, printable
from . import options

if TYPE_CHECKING:
    from ..data.packed import PackedFolder

_CLASSES = 20  # rows of the table of classes
_SKIPPED = 10


def inspect(
    path: Annotated[
        str, typer.Argument(metavar="PACK", help="A packed folder, or one of its splits; a path or a URL.")
    ],
    verify: Annotated[
        bool, typer.Option("--verify", help="Read every byte and name each damaged record (exit code 3).")
    ] = False,
    sheet: Annotated[
        Path | None,
        typer.Option(metavar="FILE.png", help="Write 100 examples with their classes as a picture."),
    ] = None,
    json_: options.Json = False,
) -> None:
    """Show what a pack holds; check it; look at it.

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
    console = Console(file=sys.stdout, highlight=False, width=None if sys.stdout.isatty() else 120)

    def line(text: object) -> None:
        if not json_:
            console.print(str(text), markup=False, soft_wrap=True)

    if not json_:
        console.print(_contents(splits))
        if any(source.names for source in splits.values()):
            console.print(*_classes(splits), sep="\n")
    for note in _notes(splits):
        line(note)
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
    """Split to its reader; of `path` itself when it is a split. Raises `DataError` when there is none."""
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
    """What is wrong where a pack lacks a split that it was packed with; one split alone may be looked at."""
    from ..data.manifest import MANIFEST

    if not (path / MANIFEST).is_file():
        packed = {name for source in splits.values() for name in source.manifest.get("splits", ())}
        for name in sorted(packed - set(splits)):
            yield DataError("pack-split-missing", path=path / name, splits=list(splits))


def _size(split: Path) -> int | None:
    """What images are shown at where their sizes vary; others have one."""
    from ..data.manifest import read_manifest

    columns = read_manifest(split)["columns"]
    return 224 if columns.get("image", {}).get("shape", ()) is None else None


def _contents(splits: dict[str, PackedFolder]) -> Table:
    table = Table()
    for heading in ("split", "examples", "stored as", "columns", "shards", "bytes", "mean", "std"):
        table.add_column(heading, justify="right" if heading in ("examples", "shards", "bytes") else "left")
    for name, source in splits.items():
        manifest = source.manifest
        files = [file for shard in manifest["shards"] for file in shard["files"].values()]
        columns = "\n".join(f"{column} {_kind(c)}" for column, c in manifest["columns"].items())
        moments = ["\n".join(f"{value:.2f}" for value in values) for values in (source.mean, source.std)]
        table.add_row(
            name, f"{len(source):,}", manifest["store"], escape(columns), str(len(manifest["shards"])),
            byte_size(sum(file["bytes"] for file in files)), *moments,
        )  # fmt: skip
    return table


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
    """Examples by class; of many classes the largest and the smallest, which is where trouble shows."""
    names = next(source.names for source in splits.values() if source.names)
    counts = {split: source.manifest["counts"] or [0] * len(names) for split, source in splits.items()}
    order = sorted(range(len(names)), key=lambda i: -sum(c[i] for c in counts.values()))
    many = len(order) > _CLASSES
    shown = order[: _CLASSES // 2] + order[-_CLASSES // 2 :] if many else list(range(len(names)))
    table = Table()
    table.add_column("class")
    for split in splits:
        table.add_column(split, justify="right")
    for i in shown:
        table.add_row(escape(printable(names[i])), *(f"{c[i]:,}" for c in counts.values()))
    some = fact("pack-classes-some", classes=len(names), shown=_CLASSES // 2)
    return str(some if many else fact("pack-classes", classes=len(names))), table
