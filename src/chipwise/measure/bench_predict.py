"""Measures how fast a recipe's model predicts here: examples a second, fed from its data, and the latency of
one.

The weights are the initial ones, since the speed does not depend on them.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np

from ..data.sources import Columns, Source, fill, has, take
from ..engine import keys
from ..engine.on import ALL, On
from ..engine.placement import Placement
from ..engine.predict import Predictor
from ..errors import RecipeError
from ..machine.arithmetic import fixed
from ..machine.detect import detect
from ..machine.record import Record, Series
from ..recipe.recipe import Recipe
from ..recipe.source import spec_of
from .timing import INTERVALS, SECONDS, subject

LENGTH = 1 << 30  # examples: more than any benchmark reads
WARMUP = 4  # untimed calls
ALONE = 200  # at most; examples predicted one at a time


class _Endless:
    """A source, repeated. It is read as the source is, so it has only the optional methods that the source
    has."""

    fill: Any
    take: Any

    def __init__(self, source: Source):
        self.source, self.spec, self._examples = source, spec_of(source), len(source)
        if has(source, "fill"):
            self.fill = self._fill
        elif has(source, "take"):
            self.take = self._take
        elif hasattr(source, "__getitems__"):
            self.__getitems__ = self._several

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        return self.source[index % self._examples]

    def _fill(self, indices: np.ndarray, out: Columns) -> None:
        fill(self.source, np.asarray(indices) % self._examples, out)

    def _take(self, indices: np.ndarray) -> Columns:
        return take(self.source, np.asarray(indices) % self._examples)

    def _several(self, indices: list[int]) -> Any:
        return self.source.__getitems__([i % self._examples for i in indices])  # type: ignore[attr-defined]


@fixed()
def measure_predict(
    recipe: Recipe, *, seconds: float = SECONDS, on: On = ALL, described: Mapping[str, Any] | None = None
) -> Record:
    """Measures how fast the model of `recipe` predicts its training data on the devices of `on`, read and
    decoded as by `cw.predict`, and the latency of single examples on one device, from the host and back; on a
    group of devices, that of as many examples as it has devices.

    *Arguments:* `seconds`: of all timed intervals. `described`: more for the record, plain JSON values.

    *Returns* a record of the kind "predict": `examples_per_second` (global), a value for each interval, and
    `latency_seconds`, a value for each example.

    Raises `RecipeError` for a task without `predict`, `DataError` or `DeviceError`.
    """
    if not 0 < seconds < math.inf:
        raise RecipeError("bench-nothing-to-time", steps=None, seconds=seconds, warmup=WARMUP)
    machine = detect(on.devices, on.platform)
    params, state = jax.device_get(jax.jit(recipe.task.init)(keys.init_key(recipe.seed)))
    source = recipe.task.train
    spent: dict[str, float] = {}
    began = time.perf_counter()
    placement = Placement.of(machine, recipe.shards)
    predictor = Predictor(recipe, params, state, _Endless(source), placement, None, on.workers)
    spent["compile"] = time.perf_counter() - began
    with contextlib.closing(predictor):
        stream = predictor()
        for _ in range(WARMUP):
            next(stream)
        began = time.perf_counter()
        speeds = tuple(_speeds(stream, seconds))
        spent["timed"] = time.perf_counter() - began
        del stream  # ends its threads
    single = Placement.of(machine, recipe.shards, most=1)
    alone = Predictor(recipe, params, state, _Endless(source), single, None, on.workers, block=single.shards)
    example = take(source, np.zeros(single.shards, np.int32))  # a group shares out no fewer
    with contextlib.closing(alone):
        taken = [_seconds(alone, example) for _ in range(WARMUP + ALONE)][WARMUP:]
    measured = {
        **subject(recipe, described),
        "block": predictor.block,
        "devices": {
            "platform": machine.platform,
            "kind": machine.kind,
            "count": len(machine.devices),
            "simulated": machine.simulated,
        },
        "seconds": {name: round(value, 6) for name, value in spent.items()},
    }
    figures = {
        "examples_per_second": Series("examples/s", speeds),
        "latency_seconds": Series("s", tuple(taken)),
    }
    return Record.now("predict", recipe.name, measured, figures, machine.devices)


def _speeds(stream: Iterator[tuple[Columns, dict[str, np.ndarray]]], seconds: float) -> Iterator[float]:
    """Examples/s of at least `INTERVALS` intervals, which together take about `seconds`."""
    for _ in range(INTERVALS):
        began, examples = time.perf_counter(), 0
        for _, outputs in stream:
            examples += len(next(iter(outputs.values())))
            if (taken := time.perf_counter() - began) >= seconds / INTERVALS:
                break
        yield examples / taken


def _seconds(predictor: Predictor, example: Columns) -> float:
    """The seconds from an example on the host to its prediction on the host."""
    began = time.perf_counter()
    predictor.now(example)
    return time.perf_counter() - began
