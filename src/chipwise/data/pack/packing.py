"""Packs a source: lists it, then decodes on every core and writes in order.

The result does not depend on the number of workers or on kills: records are written in the order of
the listing, and incomplete shards are written again.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import PIL
import simplejpeg
from PIL import Image

from ...base import DataError, RecipeError
from ...base.annotations import as_annotated
from ...base.files import check_inside, fsync_folder, put_inside, to_write
from ...base.locks import Lock
from ...machine.limits import usable_cores
from ..remote import local
from .documents import is_text
from .examples import Entry, pieces_of, records
from .folders import divided
from .hub import on_hub
from .pack_settings import PackSettings, TextForm
from .recognise import has_rows, listing_of
from .tokenise import text_listing
from .writer import SHARD_BYTES, Writer

_SKIPPED_SHARE = 0.01
_SKIPPED_LEAST = 10


class Progress(NamedTuple):
    """The progress of a split."""

    split: str
    done: int
    """The number of entries that are done."""
    total: int
    """The number of all entries."""
    skipped: int
    """The number of entries skipped so far, in all splits."""


class Packing:
    """A source and where it is packed. See `pack`. The constructor lists the source and writes
    nothing.

    *Attributes:* `src`: its name. `dst`: the folder of the pack. `partial`: the temporary folder.
    `options`: the `PackSettings`. `listing`: the entries. `workers` and `max_skipped`: as in
    `PackSettings`, with their defaults replaced.
    """

    def __init__(self, src: Any, dst: str | Path, **options: Any):
        self.options = PackSettings(**options)
        if "://" in str(dst):
            raise RecipeError("pack-to-url", dst=dst)
        self.dst = Path(to_write(dst, "dst")).expanduser()
        self.partial = self.dst.parent / f".{self.dst.name}.partial"
        if self.dst.exists():
            raise DataError("pack-exists", folder=self.dst)
        self.src = type(src).__name__
        if isinstance(src, (str, os.PathLike)):
            self.src = str(src if Path(src).name not in ("", "..") else Path(src).resolve())
            if Path(src).expanduser().resolve() in self.dst.resolve().parents:
                wrong = "{dst} lies inside {src}: pack to a folder beside it."
                raise DataError("pack-inside-source", wrong, dst=self.dst, src=src)
        given = self.options
        path = src if on_hub(src) else None
        if path is None and isinstance(src, (str, os.PathLike)):
            path = local(str(src))
        named = not {"text", "prompt"}.isdisjoint(given.columns or {})
        textual = path is not None and (named or (isinstance(path, Path) and is_text(path)))
        self.text = text = given.text or (TextForm() if textual else None)
        if text is not None and path is None:
            wrong = "text= with a {kind}: expected a path; leave text= out for an object of tokens."
            raise RecipeError("pack-text-of-object", wrong, kind=self.src)
        is_table = not text and str(path).lower().endswith(".csv")
        other = not is_table and (given.heading or (given.labels and (text or not has_rows(src))))
        if other:
            wrong = "--labels is for tables, --heading for a .csv, not for {src:plain}."
            raise RecipeError("pack-table-option", wrong, src=self.src)
        if given.labels == "several" and not is_table:
            wrong = "--labels several is for a .csv, not for {src:plain}: give a list in each row."
            raise RecipeError("pack-labels-several", wrong, src=self.src)
        if text is None or path is None:
            self.listing = listing_of(src, given)
            if given.split is not None:
                self.listing = divided(self.listing, given.split)
        else:
            self.listing = text_listing(path, text, self.dst.parent, given)
        for name, split in self.listing.splits.items():
            if not len(split):
                wrong = "{src} has no examples in {split}: expected at least one."
                raise DataError("pack-split-no-examples", wrong, src=self.src, split=name)
        if "train" not in self.listing.splits:
            raise DataError("pack-no-train", src=self.src, splits=list(self.listing.splits))
        total = sum(map(len, self.listing.splits.values()))
        default = max(_SKIPPED_LEAST, int(total * _SKIPPED_SHARE))
        self.max_skipped = default if given.max_skipped is None else given.max_skipped
        self.workers = given.workers or usable_cores()
        self._first: tuple[str, dict[str, Any]] | None = None  # name and shapes of the first record
        self._skipped = 0  # of the splits that are complete
        self._name_bytes = {
            name: max(len(os.fsencode(n)) for n in split.names)
            for name, split in self.listing.splits.items()
        }

    def settings(self, split: str) -> dict[str, Any]:
        """The settings that determine a split's bytes, for the manifest."""
        given = self.options
        most = None
        if given.shards != "auto":
            most = math.ceil(len(self.listing.splits[split]) / int(given.shards))
        return {
            "size": given.size,
            "fit": None if given.size is None else "crop",
            "store": given.store,
            "quality": given.quality if given.store == "jpeg" else None,
            "shard_bytes": SHARD_BYTES,
            "shard_examples": most,
            **({} if given.pixels is None else {"pixels": list(given.pixels)}),
            "decoders": f"simplejpeg {simplejpeg.__version__}, Pillow {PIL.__version__}",
            **(
                {}
                if self.text is None
                else {
                    "text": {
                        **{k: v and str(v) for k, v in vars(self.text).items()},
                        **self.listing.texts,
                    }
                }
            ),
        }

    def run(self, progress: Callable[[Progress], None] = lambda _: None) -> int:
        """Writes the pack, or resumes one. It appears at `dst` when it is complete.

        `progress` is called after each piece of work. *Returns* the number of entries that this
        call has processed. Raises `DataError`. Complete shards remain.
        """
        check_inside(self.dst.parent, self.partial.name)
        self._first = None
        self._skipped = 0
        with self._alone(), warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            try:
                done = sum(self._split(name, progress) for name in self.listing.splits)
            except DataError as error:
                if error.code == "pack-image-sizes":  # the partial pack cannot be resumed
                    shutil.rmtree(self._place)
                raise
            self._appear()
        return done

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """A context in which no other process has the temporary folder. Raises `DataError`, also if
        the pack has appeared meanwhile."""
        try:
            self.partial.mkdir(parents=True, exist_ok=True)
            self._lock = lock = Lock(self.partial.with_name(f"{self.partial.name}.lock"))
            self._place = lock.folder / self.partial.name
        except BlockingIOError as error:
            raise DataError("pack-in-use", folder=self.partial, lock=error.filename) from error
        except OSError as error:
            raise DataError("pack-unwritable", path=self.partial, reason=error) from error
        try:
            # Of another process, which made it from an earlier temporary folder
            if self.dst.exists():
                with suppress(OSError):  # it is that one, or has something
                    self.partial.rmdir()
                raise DataError("pack-exists", folder=self.dst)
            yield
        finally:
            lock.remove()

    def _appear(self) -> None:
        own = {*self.listing.splits, *self.listing.beside}
        self._lock.check()
        with DataError.of_system("pack-unwritable", path=self.partial):
            for name, content in self.listing.beside.items():
                put_inside(self._place / name, content)
        strange = {path.name for path in self._place.iterdir()} - own
        if strange:
            wrong = "{folder} holds {names:few} from another pack: move that away, and pack again."
            raise DataError(
                "pack-partial-strange", wrong, folder=self.partial, names=sorted(strange)
            )
        wrong = "{folder} is complete, but cannot be renamed to {dst}: {reason}."
        with DataError.of_system("pack-rename", wrong, folder=self.partial, dst=self.dst):
            self._lock.check()
            os.rename(self._place, self._lock.folder / self.dst.name)
            fsync_folder(self._lock.folder)

    def _split(self, name: str, progress: Callable[[Progress], None]) -> int:
        split = self.listing.splits[name]
        source = {"fingerprint": split.fingerprint(), "examples": len(split)}
        settings = self.settings(name)
        decides = [
            source,
            settings,
            self.listing.names,
            dict(self.listing.below),
            [*self.listing.splits],
        ]
        identity = json.dumps(decides, sort_keys=True).encode("utf-8", "surrogateescape")
        writer = Writer(
            self._place / name,
            store=self.options.store,
            names=self.listing.names,
            below=self.listing.below,
            settings=settings,
            read=[one.json() for one in self.listing.told],
            identity=hashlib.sha256(identity).hexdigest(),
            name_bytes=self._name_bytes[name],
            shard_examples=settings["shard_examples"],
            total=len(split),
            splits=tuple(self.listing.splits),
            check=self._lock.check,
        )
        with closing(writer):
            if writer.skipped:  # by an earlier call, which might skip more
                self._check_skipped(writer)
            begun = writer.consumed

            def report_progress() -> None:
                skipped = self._skipped + len(writer.skipped)
                progress(Progress(name, writer.consumed, len(split), skipped))

            report_progress()
            if not writer.complete:
                pieces = pieces_of(split.sizes, begun)
                for piece in records(split, pieces, self.options, self.workers):
                    self._write(writer, piece)
                    report_progress()
                writer.finish(source)
            self._skipped += len(writer.skipped)
            return writer.consumed - begun

    def _write(self, writer: Writer, piece: Sequence[Entry]) -> None:
        """Writes a piece of work in order: runs of records at once, with skipped entries between
        them."""
        for failed, group in itertools.groupby(piece, key=lambda record: record.error is not None):
            run = list(group)
            if failed:
                for record in run:
                    writer.skip(record.name, str(record.error))
                    self._check_skipped(writer)
                continue
            for record in run:
                self._check_alike(record)
            columns: dict[str, Any] = {}
            for column in run[0].columns:
                values = [record.columns[column] for record in run]
                columns[column] = values if isinstance(values[0], bytes) else np.stack(values)
            pixels = [record.pixels for record in run if record.pixels is not None]
            writer.add([record.name for record in run], columns, pixels or None)

    def _check_skipped(self, writer: Writer) -> None:
        """Raises `DataError` if more entries were skipped than may be, including those of other
        splits."""
        if self._skipped + len(writer.skipped) > self.max_skipped:
            names = [entry["name"] for entry in writer.skipped[::-1]]
            raise DataError(
                "pack-skipped-many",
                limit=self.max_skipped,
                names=names,
                src=self.src,
                **writer.skipped[-1],
                partial=self.partial,
            )

    def _check_alike(self, record: Entry) -> None:
        """Raises `DataError` unless a record has the columns and shapes of the first one. Raw packs
        have images of one size."""
        name = record.name
        shapes = {c: () if isinstance(v, bytes) else np.shape(v) for c, v in record.columns.items()}
        first, expected = self._first = self._first or (name, shapes)
        if shapes == expected:
            return
        image = expected.get("image")
        other = shapes.get("image")
        if image and other and image != other:
            raise DataError(
                "pack-image-sizes",
                first=first,
                name=name,
                size=min(image[:2]),
                first_height=image[0],
                first_width=image[1],
                height=other[0],
                width=other[1],
            )
        there, here = ([f"{c} {list(s)}" for c, s in each.items()] for each in (expected, shapes))
        raise DataError("examples-differ", first=first, expected=there, name=name, columns=here)


@as_annotated
def pack(
    src: Any,
    dst: str | Path,
    *,
    progress: Callable[[Progress], None] = lambda _: None,
    **options: Any,
) -> Path:
    """Packs `src` into the folder `dst`, which appears when it is complete, and returns its path.

    *Arguments:*

    - `src`: a folder of images with a sub-folder for each class, or with `train/` and `test/`
      (`val/`, ...) of them, or a `.tar`, `.tar.gz` or `.tar.xz` of one. Or a `.csv` with files and
      labels, Parquet or TFRecord files, text, or the URL of any of these except a `.csv`, as a
      string. Or `hf://datasets/OWNER/NAME`. Or any object with `len` and `[i]` whose examples are
      dicts of columns or pairs (image, label), or a dict of such objects by split.
    - `progress`: called after each piece of work.
    - `**options`: the fields of `PackSettings`, such as `size=224`.

    After a kill the same call resumes after the last complete shard, and the pack has the same
    bytes.

    Raises `RecipeError` for invalid settings, and `DataError` for data that cannot be packed and
    for a full disk.
    """
    job = Packing(src, dst, **options)
    job.run(progress)
    return job.dst
