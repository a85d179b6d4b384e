"""`chipwise inspect PACK`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..errors import DataError
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
    from ..data.pack.contact import write_sheet

    folder = remote.local(path)
    splits = _splits(folder)
    console = Console(file=sys.stdout, highlight=False, width=None if sys.stdout.isatty() else 120)
    if not json_:
        _print(splits, console)
    if sheet is not None:
        write_sheet(next(iter(splits.values())), sheet)
        if not json_:
            console.print(f"written: {sheet}", markup=False, soft_wrap=True)
    faults = _missing(folder, splits)
    if verify:
        for source in splits.values():
            try:
                source.verify()
            except DataError as error:
                faults.append(str(error))
    if faults:
        raise DataError(" ".join(faults))
    if verify and not json_:
        total = sum(map(len, splits.values()))
        console.print(
            f"verified: {total:,} records, every byte as it was packed", markup=False, soft_wrap=True
        )
    if json_:
        answer: dict[str, Any] = {"path": str(path), "verified": True if verify else None}
        print(json.dumps({**answer, "splits": {name: source.manifest for name, source in splits.items()}}))


def _splits(path: Path) -> dict[str, PackedFolder]:
    """Split to its reader; of `path` itself when it is a split. Raises `DataError` when there is none."""
    from ..data.manifest import MANIFEST
    from ..data.packed import PackedFolder

    if (path / MANIFEST).is_file():
        return {path.name: PackedFolder(path, None, size=_size(path))}
    found = sorted(
        (p.parent.name for p in path.glob(f"*/{MANIFEST}")), key=lambda name: (name != "train", name)
    )
    if not found:
        partial = path.parent / f".{path.name}.partial"
        begun = " It was begun: run the same `chipwise pack` again to go on." if partial.is_dir() else ""
        raise DataError(
            f"{path} is no pack: expected a folder with train/{MANIFEST}, made by chipwise pack.{begun}"
        )
    return {name: PackedFolder(path, name, size=_size(path / name)) for name in found}


def _missing(path: Path, splits: dict[str, PackedFolder]) -> list[str]:
    """What is wrong where a pack lacks a split that it was packed with; one split alone may be looked at."""
    from ..data.manifest import MANIFEST

    if (path / MANIFEST).is_file():
        return []
    told = {name for source in splits.values() for name in source.manifest.get("splits", ())}
    return [
        f"{path / name} is missing, though it was packed with {', '.join(splits)}: copy the folder again."
        for name in sorted(told - set(splits))
    ]


def _size(split: Path) -> int | None:
    """What images are shown at where their sizes vary; others have one."""
    from ..data.manifest import read_manifest

    columns = read_manifest(split)["columns"]
    return 224 if columns.get("image", {}).get("shape", ()) is None else None


def _print(splits: dict[str, PackedFolder], console: Console) -> None:
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
    console.print(table)
    if any(source.names for source in splits.values()):
        _print_classes(splits, console)
    settings: dict[str, Any] = {}
    for source in splits.values():
        settings |= {key: value for key, value in source.manifest["settings"].items() if value is not None}
    if settings:
        console.print(
            f"packed with {', '.join(f'{key} {value}' for key, value in settings.items())}",
            markup=False,
            soft_wrap=True,
        )
    for name, source in splits.items():
        skipped = source.manifest["source"].get("skipped", [])
        if skipped:
            console.print(f"{len(skipped)} skipped of {name}:", markup=False, soft_wrap=True)
        for entry in skipped[:_SKIPPED]:
            console.print(f"  {printable(entry['name'])}: {entry['reason']}", markup=False, soft_wrap=True)
        if len(skipped) > _SKIPPED:
            console.print(f"  and {len(skipped) - _SKIPPED} more: see --json", markup=False, soft_wrap=True)


def _kind(column: dict[str, Any]) -> str:
    shape = "sizes vary" if column["shape"] is None else ", ".join(map(str, column["shape"]))
    return f"{column['dtype']}[{shape}]" + (f" below {column['below']}" if "below" in column else "")


def _print_classes(splits: dict[str, PackedFolder], console: Console) -> None:
    """Examples by class; of many classes the largest and the smallest, which is where trouble shows."""
    names = next(source.names for source in splits.values() if source.names)
    counts = {split: source.manifest["counts"] or [0] * len(names) for split, source in splits.items()}
    order = sorted(range(len(names)), key=lambda i: -sum(c[i] for c in counts.values()))
    many = len(order) > _CLASSES
    shown = order[: _CLASSES // 2] + order[-_CLASSES // 2 :] if many else list(range(len(names)))
    console.print(f"classes: {len(names)}" + (f", the {_CLASSES // 2} largest and smallest" if many else ""))
    table = Table()
    table.add_column("class")
    for split in splits:
        table.add_column(split, justify="right")
    for i in shown:
        table.add_row(escape(printable(names[i])), *(f"{c[i]:,}" for c in counts.values()))
    console.print(table)
