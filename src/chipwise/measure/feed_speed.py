"""Measures how many examples a second the host delivers to memory: training's own stream, without a device.

The source reports the time of reading, decoding and transforming.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from ..data import order
from ..data.stages import NAMES
from ..data.stream import Stream
from ..data.watch import Watch
from ..data.weighted import by_epoch
from ..errors import DataError, RecipeError
from ..machine.limits import usable_cores
from ..words.facts import Fact, fact

STAGES = NAMES[:3]  # the stages before an example is in memory


@dataclass(frozen=True)
class FeedSpeed:
    """How fast a source is read.

    *Fields:* `workers`: their number and kind; `examples_per_second` of all; `example_bytes`, of one;
    `seconds_per_example` of a worker, by stage; `seconds`: how long it was measured; `findings`: the speed,
    the slowest stage and what would help.
    """

    workers: str
    examples_per_second: float
    example_bytes: int
    seconds_per_example: dict[str, float]
    seconds: float
    findings: tuple[Fact, ...]

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "findings": [finding.json() for finding in self.findings]}


def measure_feed(
    source: Any, batch: int, *, seconds: float = 10.0, workers: int | str | None = None
) -> FeedSpeed:
    """Reads batches of `source` for about `seconds`, after three that are not counted.

    *Arguments:* `batch`: examples of a read, as in training; `workers`: as for training: `None`, a number,
    `"threads:N"` or `"processes:N"`.

    Raises `DataError` for an empty source, errors of reading, and `RecipeError` for invalid arguments.
    """
    if batch < 1 or not 0 < seconds < float("inf"):
        text = "batch={batch}, seconds={seconds:g}: expected a batch of at least 1, and seconds above 0."
        raise RecipeError("feed-nothing-to-time", text, batch=batch, seconds=seconds)
    examples = len(source)
    if not examples:
        raise DataError("feed-source-empty", "The source is empty: give one with examples.")

    def wanted() -> Iterator[Any]:
        for start in itertools.count(0, batch):
            yield order.indices(0, start, start + batch, examples)

    stream = Stream(by_epoch(source, 0), wanted(), batch, lambda columns, indices: None, workers)
    try:
        for _ in range(3):  # files are opened, buffers come into use
            stream.next()
        watch, began = Watch(source, stream), time.perf_counter()
        stream.next()
        while (taken := time.perf_counter() - began) < seconds:
            stream.next()
        each = watch.seconds_per_example(stream)
    finally:
        stream.close()
    rate, size = watch.delivered(stream) / taken, stream.batch_bytes // batch
    slowest = max(STAGES, key=each.__getitem__)
    share = each[slowest] / max(sum(each[stage] for stage in STAGES), 1e-12)
    found = fact(
        "feed-speed", workers=str(stream.workers), examples_per_second=rate, bytes_per_second=rate * size
    )
    advice = watch.advice(slowest, usable_cores())
    return FeedSpeed(
        str(stream.workers), rate, size, {stage: each[stage] for stage in STAGES}, taken,
        (found, fact("feed-slowest", stage=slowest, share=share, advice=advice)),
    )  # fmt: skip
