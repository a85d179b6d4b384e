"""`chipwise pack SRC DST`, and `chipwise pack PACK`, which shows what was packed."""

from __future__ import annotations

import itertools
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ..base import RecipeError, Stopped, fact
from ..base.figures import printable
from ..explain.terminal import console, lines
from . import options
from .contents import document, show, summary
from .options import argument, flag, option
from .standard_output import print_json

if TYPE_CHECKING:
    from ..data.pack.pack_settings import TextForm
    from ..data.pack.packing import Packing, Progress as Done

_LINE_SECONDS = 5.0  # between lines without a terminal


@dataclass(frozen=True)
class TextOptions:
    """How text becomes examples."""

    tokens: int | None = option("SRC is text: N tokens in an example. [1025]", "N")
    tokenizer: Path | None = option(
        "Tokenizer of the tokenizers library; without it a byte is a token.", "FILE.json"
    )
    end: str | None = option(
        "The tokenizer's token after a document. [its eos_token, or a usual one]",
        "TOKEN",
        name="--end",
    )

    def form(self) -> TextForm | None:
        """`None` if no option was given."""
        from ..data.pack.pack_settings import TextForm

        settings = {name: value for name, value in vars(self).items() if value is not None}
        return TextForm(**settings) if settings else None


@options.taking
def pack(
    context: typer.Context,
    text: TextOptions,
    src: str = argument(
        "A folder of images by class, or of train/ and test/; a .tar, .tar.gz or .tar.xz "
        "of one; a .csv of "
        "files and labels; Parquet or TFRecord files; text; or the URL of one."
    ),
    dst: str | None = argument(
        "The folder to create; it appears when complete. Without it, SRC is a pack, or a "
        "split, to show.",
        default=None,
    ),
    size: int | None = option("Height and width. [unchanged]", "PIXELS"),
    store: str = option("jpeg is smaller, raw is faster.", "jpeg|raw", default="raw"),
    quality: int = option("Quality of JPEGs that must be encoded.", "1-100", default=90),
    pixels: str | None = option(
        "The values of black and white, such as 0,1, in images that are not uint8.", "BLACK,WHITE"
    ),
    split: float | None = option("Share of each class that goes to eval, such as 0.1.", "SHARE"),
    eval_split: str | None = option(
        "The split to evaluate on, where SRC has several, such as validation.", "NAME"
    ),
    shards: str = option("Files for each column. [1 GiB each]", "auto|N", default="auto"),
    max_skipped: int | None = option("Stop if more cannot be packed. [1 %, at least 10]", "N"),
    workers: int | None = option("Threads. [one per core]", "N"),
    columns: str | None = option(
        "A table's columns: image=img,label=fine_label,text=body,prompt=question.", "ROLE=NAME,..."
    ),
    labels: str | None = option(
        "What the labels of a table are. [what all cells say]", "classes|several|numbers"
    ),
    heading: str | None = option("The columns of a .csv without a heading.", "file,label"),
    verify: bool = flag("Read every byte of a pack, name damaged files (exit code 3)."),
    json_: bool = options.JSON,
) -> None:
    """Pack images, text or tables into a few large files. The same command resumes after a kill.

    \b
    Examples:
      chipwise pack photos photos-224 --size 224
      chipwise pack labels.csv scans --size 512 --store jpeg --split 0.1
      chipwise pack ages.csv faces --size 64 --columns image=photo,label=age --labels numbers
      chipwise pack books tokens --tokens 1025 --tokenizer gpt2.json --split 0.01
      chipwise pack chats.jsonl chats --tokens 1025 --columns prompt=question,text=answer
      chipwise pack photos.parquet photos --size 224 --columns image=photo,label=kind
      chipwise pack photos-224 --verify
    """
    _check_used(options.given(context), dst)
    if dst is None:
        show(src, verify, json_)
        return
    from ..data.pack.packing import Packing

    job = Packing(
        src,
        dst,
        size=size,
        store=store,
        quality=quality,
        pixels=_pixels(pixels),
        split=split,
        eval_split=eval_split,
        shards=shards,
        max_skipped=max_skipped,
        workers=workers,
        text=text.form(),
        columns=_columns(columns),
        labels=labels,
        heading=heading,
    )
    _run(job, json_)


def _check_used(given: dict[str, str], dst: str | None) -> None:
    """Raises `RecipeError` for options that do not apply: `--verify` when packing, options of
    packing when showing a pack."""
    allowed = ("src", "json_", "verify") if dst is None else set(given) - {"verify"}
    if other := [flag for name, flag in given.items() if name not in allowed]:
        text = "{options:and}: --verify is for a pack, without DST; all others need DST."
        raise RecipeError("pack-option-unused", text, options=other)


def _pixels(text: str | None) -> tuple[float, float] | None:
    if text is None:
        return None
    try:
        black, white = map(float, text.split(","))
    except ValueError as error:
        wrong = "{given}: expected {expected}."
        expected = "the values of black and white, such as 0,1"
        given = f"--pixels {text}"
        raise RecipeError("pack-option", wrong, given=given, expected=expected) from error
    return black, white


def _columns(text: str | None) -> dict[str, str]:
    from ..data.pack.columns import COLUMNS

    pairs = [part.partition("=") for part in (text or "").split(",") if part.strip()]
    roles = {role.strip() for role, _, _ in pairs}
    for role, equals, name in pairs:
        if role.strip() not in COLUMNS or not equals or not name.strip() or len(roles) < len(pairs):
            expected = (
                "--columns {given:plain}: expected pairs such as image=img,label=stars of "
                "{roles:or}."
            )
            raise RecipeError("pack-columns-option", expected, given=text, roles=list(COLUMNS))
    return {role.strip(): name.strip() for role, _, name in pairs}


def _run(job: Packing, json_: bool) -> None:
    """Packs and reports."""
    from ..data.class_names import alike
    from ..data.pack.copies import copies

    to = console(quiet=json_)
    sizes = {name: len(split) for name, split in job.listing.splits.items()}
    lines(to, fact("pack-packing", src=job.src, dst=job.dst, total=sum(sizes.values())))
    if texts := job.listing.texts:
        lines(
            to, fact("pack-documents", begin=" ".join(texts["begin"]) or "none", end=texts["end"])
        )
    lines(to, *job.listing.told, *alike(job.listing.names))
    share = job.options.split
    held = sizes.get("eval", 0) / max(1, sum(sizes.values()))
    if share and not share / 2 <= held <= 2 * share:
        lines(to, fact("pack-split-uneven", share=share, held=held))
    if job.listing.left_out:
        endings = (Path(name).suffix.lower() or name for name in job.listing.left_out)
        counts = [f"{n:,} {ending}" for ending, n in Counter(endings).most_common()]
        lines(to, fact("pack-left-out", counts=counts))
    bar, show_progress = _shown(job, quiet=json_)
    began = time.monotonic()
    with _stoppable(job), bar:
        images = job.run(show_progress)
    seconds = time.monotonic() - began
    lines(to, printable(str(job.dst)))
    splits = summary(job.dst, to)
    pairs = copies(job.dst) if "eval" in splits else []
    if "eval" in splits:
        same = [f"{held} = {there}" for held, there in pairs]
        lines(to, fact("pack-copies" if pairs else "pack-no-copies", count=len(pairs), pairs=same))
    lines(to, fact("pack-done", images=images, seconds=seconds, rate=images / seconds))
    if json_:
        about = {"images": images, "seconds": seconds, "left_out": list(job.listing.left_out)}
        about["copies"] = pairs
        print_json("pack/1", {**document(job.dst, splits), **about})


@contextmanager
def _stoppable(job: Packing) -> Iterator[None]:
    """Turns Ctrl-C and SIGTERM into an error that says how to resume."""

    terminated = []

    def terminate(*_: object) -> None:
        terminated.append(True)
        raise KeyboardInterrupt

    main_thread = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGTERM, terminate) if main_thread else None
    try:
        yield
    except KeyboardInterrupt as error:
        if job.dst.exists():  # only the report is missing
            stopped = Stopped(
                "pack-interrupted-whole", "interrupted, but {dst} is complete.", dst=job.dst
            )
        else:
            text = (
                "interrupted: the same command resumes after the last complete shard in {partial}."
            )
            stopped = Stopped("pack-interrupted", text, partial=job.partial)
        if not terminated:
            stopped.exit_code = 130  # the shell's code for Ctrl-C
        raise stopped from error
    finally:
        if main_thread:
            signal.signal(signal.SIGTERM, before or signal.SIG_DFL)


def _shown(job: Packing, quiet: bool) -> tuple[Progress, Callable[[Done], None]]:
    """A bar with the time left, and the function that moves it. Without a terminal, that function
    prints a line every few seconds."""
    lengths = [len(split) for split in job.listing.splits.values()]
    before = dict(zip(job.listing.splits, [0, *itertools.accumulate(lengths)], strict=False))
    to = Console(stderr=True, highlight=False, quiet=quiet)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    bar = Progress(*columns, console=to, transient=True, disable=quiet or not to.is_terminal)
    task = bar.add_task("packing", total=sum(lengths))
    printed = time.monotonic()

    def show(progress: Done) -> None:
        nonlocal printed
        done = before[progress.split] + progress.done
        what = progress.split + (f", {progress.skipped} skipped" if progress.skipped else "")
        bar.update(task, completed=done, description=what)
        if bar.disable and time.monotonic() - printed >= _LINE_SECONDS:
            printed = time.monotonic()
            to.print(f"{what}: {done:,} of {sum(lengths):,}", soft_wrap=True)

    return bar, show
