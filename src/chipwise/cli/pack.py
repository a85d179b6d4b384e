"""`chipwise pack SRC DST`."""

from __future__ import annotations

import itertools
import json
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from ..errors import Stopped
from ..words.figures import byte_size, few, printable
from . import options

if TYPE_CHECKING:
    from ..data.pack.job import Job, Report
    from ..data.pack.job import Progress as Done

_LINE_SECONDS = 5.0  # between lines where there is no terminal
_SHOWN = 20  # skipped files in the report; the manifest has all


def pack(
    src: Annotated[
        str,
        typer.Argument(
            help="A folder of images by class, or of train/ and test/; a .tar, .tar.gz or .tar.xz of one; "
            "a .csv of files and labels; a folder with MNIST's or CIFAR's files; or the URL of one."
        ),
    ],
    dst: Annotated[str, typer.Argument(help="The folder to make; it appears when it is complete.")],
    size: Annotated[
        int | None, typer.Option(metavar="PIXELS", help="Height and width. [as they are]")
    ] = None,
    keep_aspect: Annotated[
        bool,
        typer.Option(
            "--keep-aspect/--crop",
            help="--crop cuts size × size around the centre; --keep-aspect gives the shorter side the size.",
        ),
    ] = False,
    store: Annotated[str, typer.Option(metavar="jpeg|raw", help="jpeg is smaller, raw is faster.")] = "raw",
    quality: Annotated[int, typer.Option(metavar="1-100", help="Of JPEGs that must be encoded.")] = 90,
    labels: Annotated[
        str,
        typer.Option(
            metavar="folders|FILE.csv|REGEX", help="REGEX: its first group in a file's path is the class."
        ),
    ] = "folders",
    split: Annotated[
        float | None, typer.Option(metavar="SHARE", help="Of each class to eval, such as 0.1.")
    ] = None,
    shards: Annotated[str, typer.Option(metavar="auto|N", help="Files a column. [1 GiB each]")] = "auto",
    strict: Annotated[
        bool, typer.Option("--strict", help="Stop at the first file that cannot be packed.")
    ] = False,
    max_skipped: Annotated[
        int | None, typer.Option(metavar="N", help="Stop beyond so many of them. [1 %, at least 10]")
    ] = None,
    workers: Annotated[int | None, typer.Option(metavar="N", help="Threads. [one a core]")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Predict size and time, and write nothing.")
    ] = False,
    json_: options.Json = False,
) -> None:
    """Resize once and pack into a few large files; the same command goes on after a kill.

    \b
    Examples:
      chipwise pack photos photos-224 --size 224
      chipwise pack photos.tar.xz photos-224 --size 224 --store jpeg --split 0.1
      chipwise pack labels.csv scans --size 512 --keep-aspect --store jpeg --dry-run
    """
    from ..data.pack.job import Job
    from ..data.pack.predict import check_disk

    job = Job(
        src, dst, size=size, fit="keep-aspect" if keep_aspect else "crop", store=store, quality=quality,
        labels=labels, split=split, shards=shards, strict=strict, max_skipped=max_skipped, workers=workers,
    )  # fmt: skip
    free = check_disk(job.partial, 0)
    console = Console(file=sys.stdout, highlight=False, width=None if sys.stdout.isatty() else 120)
    if not json_:
        names = f"{printable(job.src)} to {printable(str(job.dst))}"
        console.print(names, markup=False, soft_wrap=True)
        total = sum(map(len, job.listing.splits.values()))
        console.print(f"predicting size and time from a few of {total:,} examples", soft_wrap=True)
        console.print(_predicted(job))
        for line in _notes(job, free):
            console.print(line, markup=False, soft_wrap=True)
    predicted = {
        "bytes": job.prediction.bytes,
        "seconds": job.prediction.seconds,
        "free_bytes": free,
        "splits": {
            name: {"examples": s.examples, "bytes": s.bytes} for name, s in job.prediction.splits.items()
        },
    }
    if dry_run:
        check_disk(job.partial, job.needed)
        if json_:
            print(json.dumps({"prediction": predicted}))
        return
    shown = _Shown(job, quiet=json_)
    with _stoppable(job), shown.bar:
        report = job.run(shown)
    if json_:
        print(json.dumps({"prediction": predicted, **_answer(report)}))
        return
    _print(report, console)


def _predicted(job: Job) -> Table:
    predicted = job.prediction
    about = "" if predicted.exact else "about "
    table = Table()
    for heading in ("split", "examples", "classes", "stored as", "bytes"):
        table.add_column(heading, justify="left" if heading in ("split", "stored as") else "right")
    shape = "×".join(map(str, predicted.shape)) if predicted.shape else "sizes as they are"
    stored = f"{job.form.store}, {shape}" if job.form.store == "raw" else f"jpeg, {_sized(job)}"
    for name, share in predicted.splits.items():
        classes = str(len(job.listing.names) or "")
        table.add_row(name, f"{share.examples:,}", classes, stored, about + byte_size(share.bytes))
    return table


def _sized(job: Job) -> str:
    if job.form.size is None:
        return "sizes as they are"
    return f"{job.form.size}×{job.form.size}" if job.form.crop else f"shorter side {job.form.size}"


def _notes(job: Job, free: int) -> Iterator[str]:
    workers = f"{job.workers} worker{'s' * (job.workers > 1)}"
    yield f"About {duration(job.prediction.seconds)} with {workers}; {byte_size(free)} free on the disk."
    if job.prediction.enlarged:
        share = f"{job.prediction.enlarged:.0%}"
        yield f"About {share} of the images are smaller than {job.form.size} and will be enlarged."
    if job.listing.left_out:
        yield f"Left out, as they are no images of a split: {few(job.listing.left_out)}."


@contextmanager
def _stoppable(job: Job) -> Iterator[None]:
    """Ctrl-C and SIGTERM end the command with one line that says how to go on."""

    def terminate(*_: object) -> None:
        raise _Terminated

    here = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGTERM, terminate) if here else None
    try:
        yield
    except (KeyboardInterrupt, _Terminated) as error:
        if job.dst.exists():  # all was done but the report
            stopped = Stopped(f"interrupted, but {job.dst} is whole.")
        else:
            stopped = Stopped(f"interrupted: {job.partial} is kept, and the same command goes on from there.")
        if isinstance(error, KeyboardInterrupt):
            stopped.exit_code = 130  # the shell's code for Ctrl-C
        raise stopped from error
    finally:
        if here:
            signal.signal(signal.SIGTERM, before or signal.SIG_DFL)


class _Terminated(BaseException):
    """SIGTERM: like Ctrl-C, nothing on the way may take it for an error of its own."""


class _Shown:
    """Progress with images/s and the time left: a bar on a terminal, else a line now and then."""

    def __init__(self, job: Job, quiet: bool):
        lengths = [len(split) for split in job.listing.splits.values()]
        self._before = dict(zip(job.listing.splits, [0, *itertools.accumulate(lengths)], strict=False))
        self._total, self._quiet = sum(lengths), quiet
        self._console = Console(stderr=True, highlight=False)
        self._begun: tuple[int, float] | None = None  # entries and time of the first call
        self._printed = time.monotonic()
        self.bar = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(),
            TextColumn("{task.fields[speed]}"), TimeRemainingColumn(),
            console=self._console, transient=True, disable=quiet or not self._console.is_terminal,
        )  # fmt: skip
        self._task = self.bar.add_task("packing", total=self._total, speed="")

    def __call__(self, now: Done) -> None:
        done, time_now = self._before[now.split] + now.done, time.monotonic()
        if self._begun is None:  # what an earlier command did is no speed of this one
            self._begun = (done, time_now)
            if done and not self._quiet:
                self._console.print(f"going on after {done:,} of {self._total:,}")
        took = time_now - self._begun[1]
        rate = (done - self._begun[0]) / took if took > 0.5 else 0.0
        told = f"{rate:,.0f} images/s" + (f", {now.skipped} skipped" if now.skipped else "")
        self.bar.update(self._task, completed=done, description=now.split, speed=told)
        if self._quiet or self._console.is_terminal or not rate or time_now - self._printed < _LINE_SECONDS:
            return
        self._printed = time_now
        left = duration((self._total - done) / rate)
        self._console.print(f"{now.split}: {done:,} of {self._total:,}, {told}, {left} left", soft_wrap=True)


def _print(report: Report, console: Console) -> None:
    console.print(printable(str(report.path)), markup=False, soft_wrap=True)
    table = Table()
    for heading in ("split", "examples", "classes", "bytes", "files"):
        table.add_column(heading, justify="left" if heading == "split" else "right")
    for name, made in report.splits.items():
        classes = str(len(report.names) or "")
        table.add_row(name, f"{made['examples']:,}", classes, byte_size(made["bytes"]), str(made["files"]))
    console.print(table)
    rate = f", {report.images / report.seconds:,.0f} images/s" if report.images else ""
    console.print(
        f"{report.images:,} images in {duration(report.seconds)}{rate}", markup=False, soft_wrap=True
    )
    if report.enlarged:
        console.print(
            f"{report.enlarged:,} of them were smaller and have been enlarged", markup=False, soft_wrap=True
        )
    if report.skipped:
        console.print(f"{len(report.skipped)} skipped:", markup=False, soft_wrap=True)
        for split, name, reason in report.skipped[:_SHOWN]:
            console.print(f"  {printable(f'{split}/{name}')}: {reason}", markup=False, soft_wrap=True)
        if len(report.skipped) > _SHOWN:
            console.print(
                f"  and {len(report.skipped) - _SHOWN} more, all named in the manifest",
                markup=False,
                soft_wrap=True,
            )


def _answer(report: Report) -> dict:
    return {
        "path": str(report.path),
        "splits": report.splits,
        "classes": list(report.names),
        "images": report.images,
        "seconds": report.seconds,
        "enlarged": report.enlarged,
        "skipped": [{"split": s, "name": n, "reason": r} for s, n, r in report.skipped],
        "left_out": list(report.left_out),
    }


def duration(seconds: float) -> str:
    """Seconds for people: 2 h 05 min."""
    if seconds < 90:
        return f"{seconds:.3g} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60:02} min"
