"""From the time of a step to the time of a run, with what is assumed about everything around the step."""

from __future__ import annotations

from dataclasses import dataclass

import jax

from ..chips.targets import Target
from ..recipe.recipe import Recipe
from .plans import Memory, Range
from .programs import StepPrograms, Traceable

CALL_SECONDS, ARGUMENT_SECONDS = 5e-6, 0.3e-6
"""Of the host's time to start a program on a device, and for each array it is given: measured with
`benchmarks/dispatch.py`."""

START_SECONDS = {"TPU": Range(10.0, 3.0, 30.0), "GPU": Range(5.0, 2.0, 15.0), "CPU": Range(2.0, 1.0, 6.0)}
"""Before the first compilation: imports, devices, data. The TPU's value is what the archived notebooks of
2019 show for a restart; the other values are allowances. Nobody measured how far they go: the ends are a
third and three times, but never less than importing JAX takes, some seconds."""

ALLOWANCE = 3.0
"""Up and down, of compilation seconds that are an allowance and not measured."""

OTHER_HOST = 2.0
"""Up and down, of compilation seconds that were measured, but on this host and not on the target's."""


@dataclass(frozen=True)
class StepTime:
    """A step on one target, by the compiler or by the model; per device. `seconds` is `None` with a
    `problem`."""

    method: str
    seconds: Range | None
    parts: dict[str, float]
    bound: str | None
    flops: float
    wire_bytes: float
    memory: Memory | None
    compile_seconds: Range
    problem: str | None = None
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    dtypes: frozenset[str] = frozenset()  # that a replica computes in


TPU_FACTORS = (0.88, 1.38)
"""On the compiler's time, between which 30 of the 32 published TPU throughputs in `benchmarks/plan_accuracy`
lie. The time is fitted to nothing; these two numbers were read off those rows. It leaves out whatever a
trainer adds, so the middle is above 1."""


DISPATCH_FACTOR = 2.0
"""Up and down, of what the host's side takes: measured on one machine, and hosts differ."""


def at_least(device: Range, host: float) -> Range:
    """A step that takes `device`, but no less than its host takes, `host` seconds give or take."""
    return Range(
        max(device.value, host),
        max(device.low, host / DISPATCH_FACTOR),
        max(device.high, host * DISPATCH_FACTOR) if host > device.low else device.high,
    )


def interval(around: Range, kind: str) -> Range:
    """`around` widened to hold nine of ten measurements on a chip of `kind` whose compiler was asked."""
    low, high = {"TPU": TPU_FACTORS}[kind]
    return Range(around.value, around.low * low, around.high * high)


def dispatch_seconds(programs: StepPrograms, hosts: int) -> float:
    """The host's time to start a step: each local device's replicas and update, and the reduction."""
    local = -(-programs.layout.devices // max(hosts, 1))

    def call(program: Traceable) -> float:
        return CALL_SECONDS + ARGUMENT_SECONDS * len(jax.tree.leaves(program.specs))

    reduce = CALL_SECONDS + ARGUMENT_SECONDS * local * programs.local_vectors
    return local * (programs.calls * call(programs.replica) + call(programs.update)) + reduce


def evaluations(recipe: Recipe) -> int:
    """How often `fit` evaluates by default: after each epoch, and at the end."""
    if recipe.task.eval is None:
        return 0
    clock = recipe.clock
    return max(1, -(-(clock.total or 0) * clock.batch // clock.examples))


@dataclass(frozen=True)
class RunTime:
    """Seconds of a run: its `parts`, their `total`, and `overhead`, what comes before the first step."""

    parts: dict[str, float]
    total: Range
    overhead: Range

    @property
    def ranked_by(self) -> str:
        """ "step" where what comes before the first step may take longer than all steps: it is not known well
        enough to decide between targets."""
        return "run" if self.parts["train"] + self.parts["evaluate"] > self.overhead.high else "step"


def run_time(recipe: Recipe, target: Target, step: Range, compilation: Range) -> RunTime:
    """The run of `recipe` whose steps take `step`.

    An example is evaluated in a third of its training time: one pass instead of a forward and a backward
    one, which costs twice as much.
    """
    train = step.times(recipe.clock.total or 0)
    held = len(recipe.task.eval) if recipe.task.eval is not None else 0
    evaluate = step.times(evaluations(recipe) * held / recipe.batch / 3)
    start = START_SECONDS[target.chip.kind]
    overhead = start.plus(compilation)
    parts = {"start": start, "compile": compilation, "train": train, "evaluate": evaluate}
    return RunTime({k: v.value for k, v in parts.items()}, overhead.plus(train).plus(evaluate), overhead)
