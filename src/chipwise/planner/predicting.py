"""Plans of prediction: the forward program is compiled for each chip, as the step's programs are.

Each device predicts blocks of examples, as in `engine.predict`, so a target's speed is a device's times the
number of devices. The latency of one example is that of the same program with batch 1.
"""

from __future__ import annotations

import dataclasses
import datetime
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from ..chips.catalogue import peak_flops_per_device
from ..chips.prices import Price
from ..chips.targets import Target
from ..engine import keys
from ..engine.blueprint import Memory, tracing
from ..engine.predict import inputs_of, largest_block, prediction, temporary_limit
from ..engine.reduce import Exchange
from ..engine.state import count, nbytes
from ..errors import DeviceError, RecipeError
from ..hlo.kernel import costliest
from ..recipe.precision import TPU_PASSES
from ..recipe.recipe import Recipe
from ..words.facts import Fact, fact
from . import step_time, steps, steps_here, timing
from .advice import lacks
from .compiled import Compiled
from .compiler import Progress
from .feeding import HostSpeed, feeding
from .plans import Plan, Range, costs, unique
from .programs import Traceable, available

BLOCK, ONE = "block", "one"
_IN_FLIGHT = 3  # blocks whose inputs or outputs a device holds: current, previous, next


@dataclass(frozen=True)
class ForwardPrograms:
    """The programs of a device that predicts: the model for `block` examples, and for one. Bytes are of one
    device."""

    recipe: Recipe
    block: int
    programs: tuple[Traceable, Traceable]
    parameters: int  # numbers, not bytes
    parameter_bytes: int
    state_bytes: int
    data_bytes: int
    exact = False  # no sum over devices
    shards = 1

    @property
    def exchanges(self) -> dict[str, Exchange]:
        """None: devices predict their own examples."""
        return {}

    @property
    def arrays(self) -> int:
        """The bytes of a call's arguments."""
        return self.programs[0].arguments

    def memory(self, temporary: float, program: float, target: Target) -> Memory | None:
        """The memory of a device of `target`, with the given bytes of temporary memory and code."""
        limit, source = available(target)
        if limit is None:
            return None
        held = (self.parameter_bytes, 0, self.state_bytes, 0, int(temporary), self.data_bytes, int(program))
        return Memory(*held, available=limit, available_source=source)


def forward_programs(recipe: Recipe, block: int) -> ForwardPrograms:
    """The programs that predict `block` examples, and one example. Reads no data and runs nothing.

    Raises `RecipeError` for a task without `predict`, and for one that cannot be traced.
    """
    inputs = inputs_of(recipe)

    def of(rows: int) -> dict[str, Any]:
        return {n: jax.ShapeDtypeStruct((rows, *s.shape), s.dtype) for n, s in inputs.items()}

    def program(name: str, rows: int) -> Traceable:
        return Traceable.of(name, run, (params, state, of(rows)))

    run = prediction(recipe)
    with tracing(recipe.name):
        params, state = jax.eval_shape(lambda: recipe.task.init(keys.init_key(recipe.seed)))
        outputs = jax.eval_shape(run, params, state, of(block))
    return ForwardPrograms(
        recipe=recipe,
        block=block,
        programs=(program(BLOCK, block), program(ONE, 1)),
        parameters=count(params),
        parameter_bytes=nbytes(params),
        state_bytes=nbytes(state),
        data_bytes=_IN_FLIGHT * (nbytes(of(block)) + nbytes(outputs)),
    )  # fmt: skip


@dataclass(frozen=True)
class _Timed:
    """Seconds of a `block` and of `one` example on one device of a target, or the problem."""

    programs: ForwardPrograms
    method: str
    notes: tuple[Fact, ...]
    block: Range | None = None
    one: Range | None = None
    memory: Memory | None = None
    flops: float = 0.0
    bound: str | None = None
    kernels: tuple[Any, ...] = ()
    problem: Fact | None = None
    compile_seconds: Range | None = None


@dataclass(frozen=True)
class Predictions:
    """The arguments of `planner.plan` for a plan of predictions."""

    recipe: Recipe
    examples: int
    prices: Sequence[Price]
    today: datetime.date
    host: HostSpeed | None = None
    host_cores: int | None = None
    cache: Path | None = None

    def __post_init__(self) -> None:
        if self.examples < 1:
            raise RecipeError("plan-predicts-none", examples=self.examples)

    def plans(self, targets: Sequence[Target], progress: Progress | None = None) -> Iterator[Plan]:
        """Yields the plan of each target as soon as it is ready. A block that needs too much memory is
        halved, as in `engine.predict`."""
        by_block: dict[int, ForwardPrograms] = {}
        asked = [(target, largest_block(self.examples)) for target in targets]
        while asked:
            cases = []
            for target, block in asked:
                if block not in by_block:
                    by_block[block] = forward_programs(self.recipe, block)
                cases.append((target, by_block[block]))
            asked = []
            for target, timed in self._timed(cases, progress):
                if (smaller := _smaller(target, timed)) is not None:
                    asked.append((target, smaller))
                else:
                    yield self._plan(target, timed)

    def _timed(
        self, cases: list[tuple[Target, ForwardPrograms]], progress: Progress | None
    ) -> Iterator[tuple[Target, _Timed]]:
        for target, programs in cases:
            if target.chip.kind == "CPU":
                yield target, _here(target, programs)
        away = [case for case in cases if case[0].chip.kind != "CPU"]
        for place, answers in steps.compile_steps(away, cache=self.cache, progress=progress):
            target, programs = away[place]
            yield target, _away(target, programs, answers)

    def _plan(self, target: Target, timed: _Timed) -> Plan:
        programs, recipe = timed.programs, self.recipe
        rows = target.devices * programs.block
        problem, memory = timed.problem, timed.memory
        if problem is None and memory is not None and not memory.fits:
            problem = fact("prediction-does-not-fit", needed=memory.needed, available=memory.available)
        known: dict[str, Any] = {}
        if problem is None and timed.block is not None:
            known = self._run(target, timed, timed.block)
        return Plan.at(
            target,
            devices=target.devices,
            method=timed.method,
            batch=rows,
            replicas=target.devices,
            replicas_per_device=1,
            precision=recipe.precision,
            parameters=programs.parameters,
            problem=problem,
            memory=memory,
            flops_per_step_per_device=timed.flops,
            steps=-(-self.examples // rows),
            predicts=self.examples,
            notes=(*timed.notes, fact("predicts-in-blocks", block=programs.block)),
            **known,
        )

    def _run(self, target: Target, timed: _Timed, block: Range) -> dict[str, Any]:
        """The fields of a plan for a model that runs on the target."""
        programs, recipe = timed.programs, self.recipe
        rows = target.devices * programs.block
        local = -(-target.devices // target.hosts)
        call = timing.CALL_SECONDS + timing.ARGUMENT_SECONDS * programs.arrays
        bound = "launch" if local * call > block.value else timed.bound
        step = timing.at_least(block, local * call)
        fed = feeding(recipe, rows / step.value, resident=False, host=self.host, cores=self.host_cores)
        if fed.input_bound and fed.examples_per_second_per_core is not None:
            bound = "input"
            step = timing.at_least(step, rows / (fed.examples_per_second_per_core * fed.cores))
        compiling = timed.compile_seconds or timing.compilation(
            target.chip.kind, programs.programs[0].contents(target.chip).operations, local, self.host_cores,
            TPU_PASSES[recipe.precision] if target.chip.kind == "TPU" else 1,
        )  # fmt: skip
        called = Range.around(call, timing.DISPATCH_FACTOR)
        start = timing.START_SECONDS[target.chip.kind]
        overhead, all_of_it = start.plus(compiling), step.times(-(-self.examples // rows))
        wall = overhead.plus(all_of_it)
        peak = peak_flops_per_device(target.chip, recipe.precision)
        return {
            "step_seconds": step,
            "step_parts": {"forward": block.value, "dispatch": local * call},
            "latency_seconds": None if timed.one is None else timed.one.plus(called),
            "kernels": costliest(timed.kernels),
            "bound": bound,
            "examples_per_second": step.inverse(rows),
            "share_of_peak": None if peak is None else timed.flops / step.value / peak,
            "seconds": {"start": start.value, "compile": compiling.value, "predict": all_of_it.value},
            "overhead_seconds": (overhead.low, overhead.high),
            "ranked_by": "run" if all_of_it.value > overhead.high else "step",
            "wall_seconds": wall,
            "feeding": fed,
            "costs": costs(target, self.prices, wall, self.today),
        }


def _smaller(target: Target, timed: _Timed) -> int | None:
    """Programs with a smaller block, if this one needs too much temporary memory."""
    block = timed.programs.block
    refused = timed.problem is not None and timed.problem.code == "refused-for-memory"
    if block == 1 or (timed.memory is None and not refused):
        return None
    limit = temporary_limit(None if target.chip.kind == "CPU" else available(target)[0])
    if refused:
        return block // 2
    assert timed.memory is not None
    over = timed.memory.activations / limit
    return None if over <= 1 else max(1, block >> math.ceil(math.log2(over) or 1))


def _here(target: Target, programs: ForwardPrograms) -> _Timed:
    """The times measured on this machine."""
    compiled, compilation = steps_here.compiled(programs.programs, programs.recipe.name)
    limit, analysis = temporary_limit(None), compiled[0].memory_analysis()
    memory = programs.memory(analysis.temp_size_in_bytes, 0, target)
    known = _Timed(programs, "measured", (fact("measured-here"),), memory=memory, compile_seconds=compilation)
    if programs.block > 1 and analysis.temp_size_in_bytes > limit:
        return known  # it will be halved
    block, one = (Range.around(steps_here.seconds(each), steps_here.AROUND) for each in compiled)
    return dataclasses.replace(
        known, block=block, one=one, flops=steps_here.flops(compiled[0]), bound="compute"
    )


def _away(target: Target, programs: ForwardPrograms, answers: steps.Answers) -> _Timed:
    """The times from the answers of the chip's compiler."""
    recipe, answer, alone = programs.recipe, answers.get(BLOCK), answers.get(ONE)
    notes = [fact("compiled-by-own-compiler" if target.chip.kind == "TPU" else "kernels-timed")]
    if target.chip.kind == "TPU" and (passes := TPU_PASSES[recipe.precision]) > 1:
        notes.append(fact("passes-counted", precision=recipe.precision, passes=passes))
    notes += unique(note for one in answers.values() for note in one.notes)
    if alone is not None and alone.problem is not None:
        notes.append(fact("latency-unknown", problem=alone.problem))
    known = _Timed(programs, "compiled", tuple(notes))
    problem = lacks(target, programs.programs[0].contents(target.chip).dtypes)
    if answer is None or problem is not None or answer.problem is not None:
        failed = next(iter(answers.values())) if answer is None else answer  # or there is no compiler
        return dataclasses.replace(known, problem=problem or failed.problem)
    own = step_time.FRAMEWORK_BYTES if target.chip.kind == "GPU" else 0
    memory = programs.memory(answer.temp_bytes, own + answer.code_bytes, target)
    known = dataclasses.replace(known, memory=memory, flops=answer.flops)
    try:
        block, bound, kernels = _seconds(target, recipe, answer)
        if alone is not None and alone.problem is None:
            known = dataclasses.replace(known, one=_seconds(target, recipe, alone)[0])
    except DeviceError as error:
        return dataclasses.replace(known, problem=fact(error.code, **error.facts))
    return dataclasses.replace(known, block=block, bound=bound, kernels=kernels)


def _seconds(target: Target, recipe: Recipe, answer: Compiled) -> tuple[Range, str, tuple[Any, ...]]:
    """The seconds of a program on one device, with its bound and its kernels."""
    kernels = step_time.timed(target, recipe.precision, answer.kernels)
    seconds, bound = sum(k.seconds for k in kernels), next(iter(step_time.shares(kernels)), "memory")
    low, high = step_time.factors(target, recipe.precision, kernels)
    own = tuple(dataclasses.replace(kernel, program="forward") for kernel in kernels)
    return Range(seconds, low * seconds, high * seconds), bound, own
