"""The time of a run from the time of a step, with assumptions about everything else: starting,
compiling, and whether a host can feed the chip."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..base import Fact, fact
from ..base.figures import one_line
from ..base.prediction import Range
from ..chips.targets import Target
from ..data.sources import empty, fill, spec_of
from ..data.synthetic import Absent, Synthetic
from ..data.weighted import by_epoch
from ..recipe.recipe import Recipe
from ..recipe.source import Source, kind_of
from ..step.state import nbytes
from .plans import Feeding

ALLOWANCE = 3.0
"""The factor, down and up, of the interval that should contain the true seconds of an
assumption."""

START_SECONDS = {"TPU": Range.around(10.0, ALLOWANCE), "GPU": Range.around(5.0, ALLOWANCE)}
"""Assumed seconds for imports, devices and data, before the first compilation. Archived notebooks
of 2019 show the TPU's value for a restart. The others, and the factor, are guesses."""

COMPILE_SECONDS = {"TPU": (2.0, 0.006), "GPU": (3.0, 0.002)}
"""Assumed seconds of one core for a step, and for each operation of its programs. They come from a
few compilations here (processor seconds: digits 1 and MNIST 18 for a TPU v5e, ResNet-50 20 to 30
for an A100)."""


def compilation(
    kind: str, operations: int, devices: int, cores: int | None, passes: int = 1
) -> Range:
    """Assumed seconds to compile programs of `operations` operations on the host of a TPU or GPU.

    *Arguments:*

    - `devices`: the number of devices of the host. Programs are compiled for each.
    - `cores`: those that compile in parallel. By default enough for all devices.
    - `passes`: the passes of a product on a TPU, which may take that much longer.
    """
    base, each = COMPILE_SECONDS[kind]
    turns = 1 if cores is None else max(1, -(-devices // cores))
    known = Range.around(base + each * operations * turns, ALLOWANCE)
    return replace(known, high=passes * known.high)


def evaluations(recipe: Recipe, every: str | None) -> int:
    """The number of evaluations of a run: after each of the durations `every`, unless that is None
    or "end", and at the end.

    Raises `RecipeError` for a duration that cannot be understood."""
    total = recipe.clock.total or 0
    if recipe.task.eval is None:
        return 0
    if every in (None, "end") or total == 0:
        return 1
    return min(total, math.ceil(total / recipe.clock.marks(every).length))


def run_time(target: Target, compilation: Range, work: Mapping[str, Range]) -> dict[str, Any]:
    """The fields of a plan about the time of a run that starts, compiles, and then does its `work`,
    by part.

    The rank is by "step" if the time before the first step, which is only assumed, may be longer
    than all the work. Otherwise it is by "run".
    """
    start = START_SECONDS[target.chip.kind]
    before = whole = start.plus(compilation)
    for part in work.values():
        whole = whole.plus(part)
    parts = {"start": start, "compile": compilation, **work}
    return {
        "seconds": {name: part.value for name, part in parts.items()},
        "overhead_seconds": (before.low, before.high),
        "ranked_by": "run" if sum(part.value for part in work.values()) > before.high else "step",
        "wall_seconds": whole,
    }


def training_work(
    recipe: Recipe, step: Range, evaluations: int, evaluation: Range | None
) -> dict[str, Range]:
    """The time of all steps of `recipe`, and of its `evaluations`.

    *Arguments:* `evaluation`: the time of one. If it is unknown, evaluating an example takes a
    third of its training time: a forward pass without the backward pass, which costs twice as much.
    """
    if evaluation is None:
        held = len(recipe.task.eval) if recipe.task.eval is not None else 0
        evaluation = step.times(held / recipe.batch / 3)
    return {"train": step.times(recipe.clock.total or 0), "evaluate": evaluation.times(evaluations)}


# ---- whether the host can feed the chip

_MEASURE_SECONDS = 0.5


@dataclass(frozen=True)
class HostSpeed:
    """What a host delivers."""

    examples_per_second_per_core: float | None
    """Examples that one core reads and decodes. `None` if that is unknown."""
    source: Fact
    """The source of that figure, or why there is none."""


def measured(source: Source, seed: int) -> HostSpeed:
    """The speed at which one core of this host reads `source` as training does, measured for half a
    second. Unknown for data that is made up, absent or not readable here.

    Examples are spread over the source, so that cached ones at its beginning do not bias the
    result.
    """
    if issubclass(kind_of(source), (Synthetic, Absent)):
        return HostSpeed(None, fact("feed-not-measured"))
    source = by_epoch(source, seed)
    places = np.random.default_rng(0).integers(0, min(len(source), 1 << 31), 1 << 14)
    out, done, chunk = empty(spec_of(source), 16), 0, 1  # a single example may take seconds

    def read(first: int, count: int) -> None:
        rows = np.take(places, np.arange(first, first + count), mode="wrap").astype(np.int32)
        fill(source, rows, {name: column[:count] for name, column in out.items()})

    try:
        read(0, 1)  # not counted: some sources load all at the first access
        start = time.perf_counter()
        elapsed = 0.0
        while elapsed < _MEASURE_SECONDS:
            read(done, chunk)
            done = done + chunk
            chunk = min(2 * chunk, 16)
            elapsed = time.perf_counter() - start
    except Exception as error:  # of any kind: the files may be on another machine
        return HostSpeed(None, fact("feed-unread", reason=one_line(error, 200)))
    return HostSpeed(done / elapsed, fact("feed-measured-here"))


def feeding(
    recipe: Recipe,
    examples_per_second: float,
    *,
    resident: bool,
    host: HostSpeed | None,
    cores: int,
) -> Feeding:
    """Compares the demand of `examples_per_second` (global) with the speed of a host.

    *Arguments:* `host` is a host's speed, or `None` if it was not measured. `cores` are those of
    all hosts of the target.
    """
    size = nbytes(spec_of(recipe.task.train))
    per_core = None if host is None else host.examples_per_second_per_core
    source = host.source if host is not None else fact("feed-not-measured")
    return Feeding(
        resident=resident,
        bytes_per_example=size,
        wanted_examples_per_second=examples_per_second,
        wanted_bytes_per_second=examples_per_second * size,
        examples_per_second_per_core=per_core,
        cores_needed=None if per_core is None or resident else examples_per_second / per_core,
        cores=cores,
        measured_on=fact("feed-resident") if resident else source,
    )
