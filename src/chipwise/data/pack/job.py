"""From a source to a pack: list, predict, then decode on every core and write in order.

Workers are threads, since both decoders release Python's lock; `benchmarks/packing.md` has the figures beside
processes. Work in flight is bounded, and results are written in the order of the listing, so that neither
workers nor kills change a byte.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import PIL
import simplejpeg
from PIL import Image

from ...errors import DataError, RecipeError
from ...machine.limits import usable_cores
from ...words.figures import few, printable
from ..images import MAX_PIXELS
from ..manifest import MANIFEST
from .entries import Listing, Split, divided
from .images import Form, SizesDiffer, make
from .predict import SAMPLE_SECONDS, Prediction, Sampled, check_disk, sampled
from .sources import listing_of
from .writer import SHARD_BYTES, Writer

# Work for some ms: a piece of one small image would cost its own time again
_PIECE_ENTRIES, _PIECE_BYTES = 64, 1 << 20
_SKIPPED_SHARE, _SKIPPED_LEAST = 0.01, 10


class Progress(NamedTuple):
    """`split`; `done` of its `total` entries, `skipped` of all so far."""

    split: str
    done: int
    total: int
    skipped: int


@dataclass
class Report:
    """What was packed. *Fields:* `path`; `splits`, name to `{"examples", "bytes", "files"}`; `names`, the
    classes; `skipped`, `(split, name, reason)`; `left_out`; `images` settled by this call in `seconds`;
    `enlarged`, of these."""

    path: Path
    splits: dict[str, dict[str, int]] = field(default_factory=dict)
    names: tuple[str, ...] = ()
    skipped: list[tuple[str, str, str]] = field(default_factory=list)
    left_out: tuple[str, ...] = ()
    images: int = 0
    enlarged: int = 0
    seconds: float = 0.0


class _Entry(NamedTuple):
    name: str
    columns: Mapping[str, Any]
    pixels: np.ndarray | None
    enlarged: bool
    reason: str = ""  # why it cannot be packed


class Job:
    """A pack to be made; see `pack` for the arguments. Making it lists the source and writes nothing.

    *Attributes:* `listing`; `form`, how images are stored; `dst`; `partial`, where the pack is while it is
    made; `prediction`, from a few examples that are read when it is first asked for.
    """

    def __init__(
        self,
        src: Any,
        dst: str | Path,
        *,
        size: int | None = None,
        fit: str = "crop",
        store: str = "raw",
        quality: int = 90,
        labels: str | Path = "folders",
        split: float | None = None,
        shards: int | str = "auto",
        strict: bool = False,
        max_skipped: int | None = None,
        workers: int | None = None,
        names: Sequence[str] = (),
    ):
        _check(size, fit, store, quality, shards, max_skipped, workers)
        if "://" in str(dst):
            raise RecipeError(
                f"{dst} is a URL: expected a folder on this machine, to be copied there afterwards."
            )
        self.dst = Path(dst).expanduser()
        self.partial = self.dst.parent / f".{self.dst.name}.partial"
        if self.dst.exists():
            raise DataError(f"{self.dst} exists: remove it, or pack to another folder.")
        self.src = type(src).__name__
        if isinstance(src, (str, os.PathLike)):
            self.src = str(src if Path(src).name not in ("", "..") else Path(src).resolve())
            if Path(src).expanduser().resolve() in self.dst.resolve().parents:
                raise DataError(f"{self.dst} lies inside {src}: pack to a folder beside it.")
        self.form = Form(size, fit == "crop", store, quality)
        self.listing: Listing = listing_of(src, labels, names)
        if split is not None:
            self.listing = divided(self.listing, split)
        for name, entries in self.listing.splits.items():
            if not len(entries):
                raise DataError(f"{self.src} has no examples in {name}: expected at least one.")
        if "train" not in self.listing.splits:
            raise DataError(
                f"{self.src} has examples in {', '.join(self.listing.splits)} alone, so there is nothing to "
                f"train on: send some to train."
            )
        total = sum(map(len, self.listing.splits.values()))
        self.max_skipped = (
            max(_SKIPPED_LEAST, int(total * _SKIPPED_SHARE)) if max_skipped is None else max_skipped
        )
        self.strict = strict
        self.workers = workers or usable_cores()
        self.shards = shards
        self._prediction: Prediction | None = None
        self._name_bytes = {
            name: max(len(os.fsencode(n)) for n in entries.names)
            for name, entries in self.listing.splits.items()
        }

    @property
    def prediction(self) -> Prediction:
        """Sizes and time; raises `DataError` when the sampled examples cannot be packed."""
        if self._prediction is None:

            def one(split: Split, row: int, example: Mapping[str, Any] | None) -> Sampled:
                columns, pixels, enlarged = self._made(
                    split, row, split.read(row) if example is None else example
                )
                values = columns.values()
                count = sum(len(v) if isinstance(v, bytes) else np.asarray(v).nbytes for v in values)
                return Sampled(count, enlarged, None if pixels is None else pixels.shape)

            # Shards by number are cut where the prediction says: what was sampled must not depend on time
            timed = self.shards == "auto" or self.form.store == "raw"
            self._first: tuple[str, tuple[int, ...]] | None = None
            with warnings.catch_warnings():  # `Encoded` has a limit of its own
                warnings.simplefilter("ignore", Image.DecompressionBombWarning)
                self._prediction = sampled(
                    self.listing, self.form, one, self._check_sizes, self._name_bytes, self.workers,
                    SAMPLE_SECONDS if timed else None,
                )  # fmt: skip
        return self._prediction

    @property
    def needed(self) -> int:
        """Bytes still to be written: what was begun is on the disk already."""
        done = sum(f.stat().st_size for f in self.partial.rglob("*") if f.is_file())
        return self.prediction.bytes - done

    def settings(self, split: str) -> dict[str, Any]:
        """What decides a split's bytes, beside its source: for the manifest."""
        sized = self.form.size is not None
        return {
            "size": self.form.size,
            "fit": ("crop" if self.form.crop else "keep-aspect") if sized else None,
            "store": self.form.store,
            "quality": self.form.quality if self.form.store == "jpeg" else None,
            "shard_bytes": self._shard_bytes(split),
            "decoders": f"simplejpeg {simplejpeg.__version__}, Pillow {PIL.__version__}",
        }

    def run(self, progress: Callable[[Progress], None] = lambda _: None) -> Report:
        """Makes the pack, or goes on with one that was begun; it appears at `dst` when it is whole.

        `progress` is called after each piece of work. Raises `DataError`; what was written is kept.
        """
        began = time.perf_counter()
        report = Report(self.dst, names=self.listing.names, left_out=self.listing.left_out)
        check_disk(self.partial, self.needed)
        try:
            self.partial.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DataError(f"Cannot write {self.partial}: {error.strerror or error}.") from error
        self._first = None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            try:
                for name in self.listing.splits:
                    self._split(name, report, progress)
            except SizesDiffer:
                shutil.rmtree(self.partial)  # or it would stand in the way of the settings that are needed
                raise
        self._appear()
        for name in self.listing.splits:
            files = list((self.dst / name).iterdir())
            examples = json.loads((self.dst / name / MANIFEST).read_text())["examples"]
            report.splits[name] = {
                "examples": examples,
                "bytes": sum(path.stat().st_size for path in files),
                "files": len(files),
            }
        report.seconds = time.perf_counter() - began
        return report

    def _appear(self) -> None:
        strange = {path.name for path in self.partial.iterdir()} - set(self.listing.splits)
        if strange:
            raise DataError(
                f"{self.partial} holds {few(sorted(strange))} from another pack: remove it (rm -r) first."
            )
        try:
            os.rename(self.partial, self.dst)
        except OSError as error:
            raise DataError(
                f"{self.partial} is whole, but cannot become {self.dst}: {error.strerror}."
            ) from error

    def _split(self, name: str, report: Report, progress: Callable[[Progress], None]) -> None:
        split = self.listing.splits[name]
        source = {"fingerprint": split.fingerprint(), "examples": len(split)}
        settings = self.settings(name)
        known = [source, settings, self.listing.names, dict(self.listing.below), [*self.listing.splits]]
        told = json.dumps(known, sort_keys=True)
        writer = Writer(
            self.partial / name,
            store=self.form.store,
            names=self.listing.names,
            below=self.listing.below,
            settings=settings,
            identity=hashlib.sha256(told.encode("utf-8", "surrogateescape")).hexdigest(),
            name_bytes=self._name_bytes[name],
            shard_bytes=settings["shard_bytes"],
            total=len(split),
            splits=tuple(self.listing.splits),
        )
        try:
            if self.strict and writer.skipped:  # by an earlier call, which was not
                raise self._stopped(self._refused(writer.skipped[0]["name"], writer.skipped[0]["reason"]))
            begun = writer.consumed
            progress(Progress(name, begun, len(split), len(report.skipped) + len(writer.skipped)))
            if not writer.complete:
                for entries in self._in_order(split, begun):
                    self._write(writer, entries, len(report.skipped))
                    report.enlarged += sum(entry.enlarged for entry in entries)
                    progress(
                        Progress(name, writer.consumed, len(split), len(report.skipped) + len(writer.skipped))
                    )
                writer.finish(source)
            report.images += writer.consumed - begun
            report.skipped += [(name, s["name"], s["reason"]) for s in writer.skipped]
        finally:
            writer.close()

    def _write(self, writer: Writer, entries: Sequence[_Entry], skipped: int) -> None:
        """Hands over a piece of work in order: runs of records at once, and between them what is skipped."""
        run: list[_Entry] = []

        def flush() -> None:
            if run and self.form.store == "raw":
                _check_alike(run)
                columns = {name: np.stack([e.columns[name] for e in run]) for name in run[0].columns}
                writer.add_batch([e.name for e in run], columns)
            else:
                for entry in run:
                    writer.add(entry.name, entry.columns, entry.pixels)
            run.clear()

        for entry in entries:
            if entry.reason:
                flush()
                self._skip(writer, entry, skipped)
                continue
            self._check_sizes(entry.name, None if entry.pixels is None else entry.pixels.shape)
            run.append(entry)
        flush()

    def _skip(self, writer: Writer, entry: _Entry, skipped: int) -> None:
        fault = None
        if self.strict:
            fault = self._refused(entry.name, entry.reason)
        elif skipped + len(writer.skipped) >= self.max_skipped:
            others = few([s["name"] for s in writer.skipped[::-1]])
            before = f"; before it {others}" if others else ""
            fault = (
                f"{self.src}: more than {self.max_skipped} entries cannot be packed, now "
                f"{printable(entry.name)}: {entry.reason}{before}: allow more with --max-skipped N"
            )
        if fault is not None:
            writer.commit()
            raise self._stopped(fault)
        writer.skip(entry.name, entry.reason)

    def _refused(self, name: str, reason: str) -> str:
        return f"{self.src}: {printable(name)}: {reason}: leave out --strict"

    def _stopped(self, fault: str) -> DataError:
        return DataError(
            f"{fault} to go on from there, or repair or remove what is damaged and begin anew "
            f"(rm -r {self.partial})."
        )

    def _check_sizes(self, name: str, shape: tuple[int, ...] | None) -> None:
        """Raw packs hold images of one size."""
        if self.form.store != "raw" or shape is None:
            return
        self._first = self._first or (name, shape)
        if shape != self._first[1]:
            raise SizesDiffer(
                f"Images differ in size: {self._first[0]} is {_told(self._first[1])}, {name} "
                f"{_told(shape)} (height×width): give --size {min(self._first[1][:2])}, or "
                f"--store jpeg to keep sizes as they are."
            )

    def _in_order(self, split: Split, start: int) -> Iterator[list[_Entry]]:
        """The entries from `start` on, made by threads, in pieces and in order."""
        waiting: deque[Future[list[_Entry]]] = deque()
        with ThreadPoolExecutor(self.workers, "chipwise-pack") as pool:
            try:
                for rows in _pieces(split.sizes, start):
                    # A stranger's [i] may not be safe in threads: then this one reads
                    examples = None if split.threads else [_read(split, row) for row in rows]
                    waiting.append(pool.submit(self._piece, split, rows, examples))
                    if len(waiting) > self.workers + 2:
                        yield waiting.popleft().result()
                while waiting:
                    yield waiting.popleft().result()
            finally:
                for future in waiting:
                    future.cancel()

    def _piece(self, split: Split, rows: range, examples: list | None) -> list[_Entry]:
        made = []
        for at, row in enumerate(rows):
            name = split.names[row]
            try:
                example = split.read(row) if examples is None else examples[at]
                if isinstance(example, Exception):
                    raise example
                columns, pixels, enlarged = self._made(split, row, example)
                made.append(_Entry(name, columns, pixels, enlarged))
            except DataError as error:
                made.append(_Entry(name, {}, None, False, str(error)))
            except OSError as error:
                made.append(_Entry(name, {}, None, False, f"cannot be read ({error.strerror or error})"))
        return made

    def _made(self, split: Split, row: int, example: Mapping[str, Any]):
        """(columns as they are stored, pixels, enlarged) of one example."""
        columns = {name: column[row] for name, column in split.labels.items()}
        columns |= {name: value if name == "image" else np.asarray(value) for name, value in example.items()}
        if "image" not in columns:
            if self.form.store == "jpeg" or self.form.size is not None:
                raise DataError(
                    f"no column 'image' ({', '.join(columns)}): leave out --size and --store jpeg"
                )
            return columns, None, False
        made = make(columns.pop("image"), self.form)
        return {"image": made.stored, **columns}, made.pixels, made.enlarged

    def _shard_bytes(self, split: str) -> int:
        if self.shards == "auto":
            return SHARD_BYTES
        share = self.prediction.splits[split]
        return max(1, math.ceil(math.ceil(share.examples / int(self.shards)) * share.record_bytes))


def pack(
    src: Any,
    dst: str | Path,
    *,
    size: int | None = None,
    fit: str = "crop",
    store: str = "raw",
    quality: int = 90,
    labels: str | Path = "folders",
    split: float | None = None,
    shards: int | str = "auto",
    strict: bool = False,
    max_skipped: int | None = None,
    workers: int | None = None,
    names: Sequence[str] = (),
    progress: Callable[[Progress], None] | None = None,
) -> Path:
    """Packs `src` to the folder `dst` and returns it. It appears whole, or not at all.

    *Arguments:*

    - `src`: a folder of images with one sub-folder a class, or with `train/` and `test/` (`val/`, ...) of
      them; a `.tar`, `.tar.gz` or `.tar.xz` of one; a `.csv` with files and labels; the files of MNIST or
      CIFAR; a URL, as a string, of any of these but the `.csv`; any object with `len` and `[i]`, whose
      examples are dicts of columns or pairs (image, label), or a dict of those by split.
    - `size`: in pixels; `None` keeps images as they are. `fit="crop"` scales to cover `size` × `size` and
      cuts around the centre; `"keep-aspect"` scales until the shorter side has `size`.
    - `store`: `"raw"` pixels, all of one size, or `"jpeg"`, of `quality` where an image must be encoded;
      JPEGs that need no change are kept byte for byte.
    - `labels`: `"folders"`, the path of a `.csv`, or a regular expression whose first group, in an image's
      path, is the class.
    - `split`: share of each class that goes to `eval`; `shards`: about so many files a column, or `"auto"`: 1
      GiB each.
    - `strict`: the first entry that cannot be packed is an error; else at most `max_skipped` are left out, by
      default 1 % and at least 10, and the manifest names them.
    - `workers`: threads, by default one a core; `names`: classes of objects that do not say.
    - `progress`: called with `Progress` after each piece of work.

    A call that was killed is gone on with by the same call again; the pack is the same, byte for byte. Raises
    `RecipeError` for settings that cannot be, `DataError` for data that cannot be packed and for a full disk.
    """
    job = Job(
        src, dst, size=size, fit=fit, store=store, quality=quality, labels=labels, split=split, shards=shards,
        strict=strict, max_skipped=max_skipped, workers=workers, names=names,
    )  # fmt: skip
    return job.run(progress or (lambda _: None)).path


def _check(size, fit, store, quality, shards, max_skipped, workers) -> None:
    if store not in ("raw", "jpeg"):
        raise RecipeError(f"--store {store}: expected raw or jpeg.")
    if fit not in ("crop", "keep-aspect"):
        raise RecipeError(f"fit={fit!r}: expected 'crop' or 'keep-aspect'.")
    for option, value in (
        ("--size", size),
        ("--quality", quality),
        ("--max-skipped", max_skipped),
        ("--workers", workers),
    ):
        if value is not None and not isinstance(value, int):
            raise RecipeError(f"{option} {value!r}: expected a whole number, an int.")
    if size is not None and not 1 <= size <= math.isqrt(MAX_PIXELS):
        raise RecipeError(
            f"--size {size}: expected 1 to {math.isqrt(MAX_PIXELS):,} pixels: images of more than "
            f"{MAX_PIXELS:,} are refused."
        )
    if fit == "keep-aspect" and (size is None or store == "raw"):
        raise RecipeError(
            "--keep-aspect scales to --size and leaves images of many sizes, which raw packs cannot hold: "
            "give --size N and --store jpeg, or --crop."
        )
    if not 1 <= quality <= 100:
        raise RecipeError(f"--quality {quality}: expected 1 to 100.")
    if shards != "auto" and (not str(shards).isdecimal() or int(shards) < 1):
        raise RecipeError(f"--shards {shards}: expected auto or a number of at least 1.")
    if max_skipped is not None and max_skipped < 0:
        raise RecipeError(f"--max-skipped {max_skipped}: expected at least 0.")
    if workers is not None and workers < 1:
        raise RecipeError(f"--workers {workers}: expected at least 1.")


def _pieces(sizes: np.ndarray, start: int) -> Iterator[range]:
    """The rows from `start` on in pieces of so many entries and bytes at most."""
    first, held = start, 0
    for row in range(start, len(sizes)):
        held += int(sizes[row])
        if row + 1 - first == _PIECE_ENTRIES or held >= _PIECE_BYTES:
            yield range(first, row + 1)
            first, held = row + 1, 0
    if first < len(sizes):
        yield range(first, len(sizes))


def _read(split: Split, row: int) -> Mapping[str, Any] | Exception:
    """An example, or why there is none, to be raised where it counts as skipped."""
    try:
        return split.read(row)
    except (DataError, OSError) as error:
        return error


def _check_alike(run: Sequence[_Entry]) -> None:
    """Records of a raw pack have the same columns, each of one shape."""
    shapes = {name: np.shape(value) for name, value in run[0].columns.items()}
    for entry in run:
        found = {name: np.shape(value) for name, value in entry.columns.items()}
        if found != shapes:
            raise DataError(
                f"Examples must be alike: {printable(run[0].name)} has {_listed(shapes)}, "
                f"{printable(entry.name)} {_listed(found)}: give all the same columns."
            )


def _listed(shapes: Mapping[str, tuple[int, ...]]) -> str:
    return ", ".join(f"{name} {list(shape)}" for name, shape in shapes.items())


def _told(shape: tuple[int, ...]) -> str:
    return "×".join(map(str, shape[:2]))
