"""`chipwise find-lr` and `chipwise find-batch`: a peak learning rate, and the largest batch, by short
trials."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from ..explain.terminal import console, lines, table
from ..machine.hosts import hosts
from ..words.facts import Fact, fact
from ..words.figures import byte_size, sparkline
from . import options
from .advise import next_line
from .options import option

if TYPE_CHECKING:
    import numpy as np

    from ..study.find_batch import BatchSearch
    from ..study.find_lr import LrSearch


@options.taking
def find_lr(
    recipe: options.Given,
    here: options.Here,
    low: float = option("The first rate.", default=1e-5),
    high: float = option("The last rate.", default=10.0),
    steps: int = option("Steps, one rate each.", "N", default=100),
    workers: str | None = options.WORKERS,
    picture: Path | None = option("Draw the curves.", "FILE.svg"),
    json_: bool = options.JSON,
) -> None:
    """Find a peak learning rate: one short run whose rate grows with every step.

    \b
    Examples:
      chipwise find-lr digits
      chipwise find-lr cifar10-davidnet --picture rates.svg
    """
    on = here.on(workers=workers)
    from ..explain.find_picture import check_suffix, draw
    from ..study.find_lr import find_lr as find

    if picture is not None:  # unwritable files are refused before the work
        check_suffix(picture)
    loaded = recipe.load()
    progress = "none" if json_ else "auto"
    search = find(loaded, low=low, high=high, steps=steps, on=on, progress=progress)
    first = hosts().first  # host 0 writes
    written = draw(search, picture) if picture is not None and first else None
    if json_:
        print(json.dumps(search.to_json()))
        return
    _print(search)
    if not first:
        return
    if written is not None:
        print(fact("written", path=written))
    settings = [f"{key}={value:g}" for key, value in search.settings.items()]
    print(fact("next", command=recipe.train_line(settings)))


def _print(search: LrSearch) -> None:
    to, recipe, rates, curve = console(), search.old, search.curve.rates, search.curve.smoothed
    numbers = {"steps": len(rates), "low": rates[0], "high": rates[-1]}
    lines(to, fact("lr-sweep", recipe=recipe.name, batch=recipe.batch, **numbers))
    lines(to, f"{_bars(curve)}  {fact('lr-losses', first=curve[0], lowest=curve.min())}\n")
    marks = (search.suggestion, search.valley, search.steep, search.last_stable, curve.min())
    columns = ("suggestion", "valley", "steep", "last stable", "lowest loss")
    to.print(table(columns, [[f"{mark:.3g}" for mark in marks]]))
    suggested = ", ".join(f"{name}={value:g}" for name, value in search.settings.items())
    lines(to, "", fact("lr-suggested", settings=suggested))
    lines(to, fact("lr-own-peak", peak=search.own_peak))
    lines(to, *(text for text in (*search.notes, search.stopped, *search.curve.doubts) if text))


def _bars(smoothed: np.ndarray) -> str:
    """The curve in one line, cut off at its first value."""
    low, start = float(smoothed.min()), float(smoothed[0])
    share = [min(max((float(x) - low) / (start - low or 1.0), 0.0), 1.0) for x in smoothed]
    step = max(1, -(-len(share) // 80))
    return sparkline(share[::step], 0.0, 1.0)


@options.taking
def find_batch(
    recipe: options.Given,
    here: options.Here,
    at_most: int | None = option("Search no further than this batch.", "N"),
    exact: bool = options.EXACT,
    json_: bool = options.JSON,
) -> None:
    """Find the largest batch that fits in memory, and show what would change in training.

    \b
    Examples:
      chipwise find-batch digits
      chipwise find-batch cifar10-davidnet --at-most 4096
      chipwise find-batch mnist --json

    Of chips that are not here: chipwise plan RECIPE --on v5e-8 --largest-batch.
    """
    from ..study.find_batch import find_batch as find

    where = here.on(exact=exact)
    search = find(recipe.load(), on=where, at_most=at_most, progress="none" if json_ else "auto")
    if json_:
        print(json.dumps(search.to_json()))
        return
    counts = (search.batch, search.batch_per_replica, search.batch_per_device)
    sizes = (byte_size(search.memory.needed), byte_size(search.memory.available))
    cells = [search.target, *("-" if n is None else f"{n:,}" for n in counts), *sizes, search.bound]
    columns = ("target", "batch", "a replica", "a device", "needs", "has", "bound by")
    to = console()
    to.print(table(columns, [cells], left=("target", "bound by"), fold=columns))
    lines(to, "", *(f"- {note}" for note in (*_facts(search), *search.notes)))
    if search.move is not None:
        lines(to, "", fact("at-batch", batch=search.batch), "", search.move)
    lines(to, *(f"\nwarning: {finding}" for finding in search.findings))
    if search.move is not None:
        lines(to, "", next_line(recipe, search.move, batch=search.batch))
    lines(to, "", fact("largest-is-not-best"))


def _facts(search: BatchSearch) -> Iterator[Fact]:
    """The source of the memory, whether the batch was tried, and the speed of each batch."""
    yield fact("memory-of-a-device", source=search.memory.available_source)
    if search.batch is not None:
        yield fact("batch-tried" if search.confirmed else "batch-not-tried", batch=search.batch)
    own = search.old.batch
    for batch, speeds in search.examples_per_second.items():
        code = "batch-speed" if len(speeds) == 1 else "batch-speed-rounds"
        mean = statistics.geometric_mean(speeds)
        low, high = min(speeds), max(speeds)
        yield fact(code, mean=mean, batch=batch, own=own, low=low, high=high, rounds=len(speeds))
    gain = search.speedup
    if gain is not None and (gain.low is None or gain.high is None):
        yield fact("batch-gain-once", batch=search.batch, gain=gain.value, own=own)
    elif gain is not None:
        unclear = (gain.low or 0) <= 1 <= (gain.high or 0)
        code = "batch-gain-unclear" if unclear else "batch-gain"
        yield fact(code, batch=search.batch, gain=gain.value, own=own, low=gain.low, high=gain.high)
