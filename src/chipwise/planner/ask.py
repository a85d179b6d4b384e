"""`plan` predicts a recipe on absent chips, from any machine. There is one path:

    asked -> traced -> compiled -> timed -> plan

Each chip's compiler compiles the step's programs. A TPU's compiler states cycles. A GPU's kernels
are timed from their bytes and FLOPs.
"""

from __future__ import annotations

import datetime
import functools
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..base import DeviceError, RecipeError, fact, invalid
from ..base.annotations import as_annotated
from ..base.prediction import Range
from ..chips.catalogue import peak_flops_per_device
from ..chips.live_prices import prices as read_prices
from ..chips.prices import Price
from ..chips.targets import Target, parse
from ..compile.absent_device import available
from ..compile.answers import FAILED_HERE
from ..compile.cache import Progress, cache_folder
from ..compile.exports import forget_traces
from ..compile.hlo.kernel import costliest
from ..machine.limits import usable_cores
from ..machine.plugins import hidden
from ..recipe.precision import TPU_PASSES
from ..recipe.recipe import Recipe
from ..run import feed
from ..step.blueprint import Blueprint, Memory, largest_batch
from ..step.layout import Layout, usable_devices
from ..step.program import tracing
from ..step.state import TrainState, abstract_state
from .compile_step import compile_steps
from .device_memory import TOO_LARGE, lies_on_hosts, too_large
from .plan_advice import advice, decisive, does_not_fit, lacks, room
from .plans import Plan, Plans, costs
from .time_run import (
    HostSpeed,
    compilation,
    evaluations,
    feeding,
    measured,
    run_time,
    training_work,
)
from .time_step import StepTime, absent_step_time, at_least, local_devices
from .tracing import training_step


@as_annotated
@hidden()  # tracing starts JAX
def plan(
    recipe: Recipe,
    on: str | Sequence[str],
    *,
    prices: Sequence[Price] | str | Path | None = None,
    today: datetime.date | None = None,
    exact: bool = True,
    eval_every: str | None = "1ep",
    find_largest_batch: bool = False,
    measure_feed: bool = True,
    host_cores: int | None = None,
    cache: str | os.PathLike | None = None,
    progress: Progress | None = None,
    ready: Callable[[Plan], None] | None = None,
) -> Plans:
    """Predicts memory, speed and cost of `recipe` on each target of `on`.

    Uses no accelerator, and writes only its cache.

    *Arguments:*

    - `on`: targets such as `["v5e-8", "v3-8", "a100:8", "t4"]`, or a text with commas,
      `"v5e-8,t4"`. See `chipwise.chips.targets`.
    - `prices`: a price file, prices, or `"live"` for those of today, with a warning of what is left
      out. By default the bundled snapshot.
    - `today`: the date from which the age of prices counts. By default today.
    - `exact`, `eval_every`: as in `fit`.
    - `find_largest_batch`: search for it on every target, not only if the recipe's batch does not
      fit.
    - `measure_feed`: read examples for half a second, to compare this host's cores with the chips'
      demand, unless the data is made up, absent, or kept on the chips.
    - `host_cores`: the number of cores of each host of the targets, for feeding. By default this
      host's.
    - `cache`: a folder for compiled results. By default in the user's cache folder.
    - `progress`: see `chipwise.compile.cache.Progress`.
    - `ready`: called with each plan as soon as it is ready. Cached ones and those that need no
      compilation come first, then the smallest programs, last those whose largest batch is searched
      for.

    *Returns* a list of `Plan`, in the order of `on`. Raises `DeviceError` for an unknown or
    impossible target, `RecipeError` for a recipe that cannot be traced, `DataError` for prices
    that cannot be read.
    """
    names = [name.strip() for name in on.split(",")] if isinstance(on, str) else on
    targets = list({t.name: t for t in map(parse, names)}.values())
    if not targets:
        raise DeviceError("no-target", "No target: type --on v5e-8,a100,t4, for example.")
    if host_cores is not None and host_cores < 1:
        raise invalid("host-cores", "host_cores", host_cores, "at least 1, or None for this host's")
    if prices is None or isinstance(prices, str | Path):
        read = read_prices(prices)
        prices = read.prices
        for left_out in read.said[1:]:
            warnings.warn(str(left_out), stacklevel=2)
    folder = cache_folder(cache)
    question = PlanRequest(
        recipe=recipe,
        prices=prices,
        today=today or datetime.date.today(),
        cache=folder,
        exact=exact,
        evaluations=evaluations(recipe, eval_every),
        find_largest_batch=find_largest_batch,
        measure_feed=measure_feed,
        host_cores=host_cores,
        progress=progress,
    )
    made: dict[str, Plan] = {}
    try:
        for one in question.plans(targets):
            made[one.target] = one
            if ready is not None:
                ready(one)
    finally:
        forget_traces()
    return Plans(made[target.name] for target in targets)


@dataclass(frozen=True)
class PlanRequest:
    """The question that every target gets: the arguments of `plan`."""

    recipe: Recipe
    prices: Sequence[Price]
    today: datetime.date
    cache: Path
    exact: bool = True
    evaluations: int = 0
    find_largest_batch: bool = False
    host: HostSpeed | None = None
    measure_feed: bool = False
    host_cores: int | None = None
    progress: Progress | None = None
    # Targets with the same layout share them
    _steps: dict[Any, Blueprint] = field(default_factory=dict)

    def plans(self, targets: Sequence[Target]) -> Iterator[Plan]:
        """Yields each plan as soon as it is ready. Those whose largest batch is searched for come
        last."""
        asked = [(target, self.traced(target)) for target in targets]
        asker = self
        fed = not all(step.resident for _, step in asked)
        if self.host is None and self.measure_feed and fed:
            asker = replace(self, host=measured(self.recipe.task.train, self.recipe.seed))
        searched: list[tuple[Target, Blueprint, StepTime]] = []
        for target, step, time in asker.timed(asked, self.progress):
            if self.searches(time):
                searched.append((target, step, time))
            else:
                yield asker.plan(target, step, time)
        for target, step, time in searched:
            yield asker.searched(target, step, time)

    # ---- traced

    def traced(self, target: Target, recipe: Recipe | None = None) -> Blueprint:
        """The step of the recipe, or of another one, on `target`."""
        tried = self.recipe if recipe is None else recipe
        # at least one group, whether or not the target has so many devices
        whole = max(target.devices // tried.shards * tried.shards, tried.shards)
        layout = Layout.of(tried, usable_devices(tried, whole, self.exact), self.exact)
        limit = available(target)[0]
        resident = feed.resident(tried.task.train, limit)
        kept = None
        if recipe is not None:  # of a search, in which every try would compile the evaluation again
            return training_step(recipe, layout, resident=resident)
        if self.evaluations and tried.task.eval is not None:
            kept = feed.fits(tried.task.eval, limit)

        about = layout, resident, kept
        if about not in self._steps:
            self._steps[about] = training_step(
                tried, layout, resident=resident, state=self.state, keeps_evaluation=kept
            )
        return self._steps[about]

    @functools.cached_property
    def state(self) -> TrainState:
        """The shapes of the state, computed once for all layouts."""
        with tracing(self.recipe.name):
            return abstract_state(self.recipe)

    # ---- compiled and timed

    def timed(
        self, asked: Sequence[tuple[Target, Blueprint]], progress: Progress | None = None
    ) -> Iterator[tuple[Target, Blueprint, StepTime]]:
        """Yields each target and step with its time as soon as it is known."""
        away = []
        for target, step in asked:
            if problem := _impossible(step, target):
                yield target, step, problem
            else:
                away.append((target, step))
        for place, answers in compile_steps(away, cache=self.cache, progress=progress):
            target, step = away[place]
            yield target, step, absent_step_time(step, target, answers)

    def searches(self, time: StepTime) -> bool:
        """Whether to search for the largest batch: if requested, or if the recipe's own does not
        fit. Never for problems that another batch would have too."""
        if time.problem is not None and time.problem.code in _NOWHERE:
            return False
        return self.find_largest_batch or (time.memory is not None and not time.memory.fits)

    def searched(self, target: Target, step: Blueprint, time: StepTime) -> Plan:
        """The plan with its largest batch or, if none fits, with advice."""
        recipe = self.recipe
        held: dict[int, Memory] = {}  # by batch
        failed: list[StepTime] = []

        def fits(tried: Recipe) -> tuple[bool, float]:
            try:
                other = self.traced(target, tried)
            except RecipeError:  # of another batch, so not for the user
                return False, 1.0
            ((_, _, time),) = self.timed([(target, other)])
            if time.problem is not None and time.problem.code in FAILED_HERE:
                failed.append(time)
            if time.memory is None:
                return time.problem is None, 1.0
            held[tried.batch] = time.memory
            return time.memory.fits, time.memory.needed / time.memory.available

        largest = largest_batch(recipe, fits, recipe.clock.examples)
        if failed:  # this machine, at some batch: what fits is not known
            return self.plan(target, step, failed[0])
        plan = self.plan(target, step, time, largest)
        if largest is None and (least := held.get(recipe.least_batch)) is not None:
            extra = room(recipe, target, step, least, self.exact)
            plan = replace(plan, advice=(*extra, *plan.advice))
        return plan

    # ---- the plan

    def plan(
        self, target: Target, step: Blueprint, time: StepTime, largest: int | None = None
    ) -> Plan:
        """The plan of a step that takes `time`. *Arguments:* `largest`: the largest batch, if
        known."""
        recipe = self.recipe
        layout = step.layout
        problem = lacks(target, time.dtypes) or time.problem
        if problem is None and time.memory is not None and not time.memory.fits:
            problem = does_not_fit(time.memory, largest, recipe)
        if problem is None and time.seconds is None:
            problem = fact("step-time-unknown")
        known = {} if problem is not None else self.run(target, step, time)
        known |= {
            "precision": recipe.precision,
            "parameters": step.parameters,
            "problem": problem,
            "memory": time.memory,
            "flops_per_step_per_device": time.flops,
        }
        notes = time.notes if problem is None else ()
        if step.fused and notes:
            notes = (*notes, fact("fused-step"))
        if notes and target.chip.kind == "GPU" and recipe.task.framework == "torch":
            notes = (*notes, fact("not-of-pytorch"))
        fed = None if self.host is None or step.resident else self.host.source
        if notes and fed is not None and fed.code == "feed-unread":
            notes = (*notes, fed)
        one = Plan(
            target=target.name,
            chip=target.chip.name,
            chips=target.chips,
            devices=layout.devices,
            devices_found=target.devices,
            batch=recipe.batch,
            replicas=recipe.replicas,
            replicas_per_device=layout.replicas_per_device,
            largest_batch=largest,
            wire_bytes_per_step_per_device=time.wire_bytes,
            steps=recipe.clock.total,
            evaluations=self.evaluations,
            notes=(*notes, target.note) if target.note else notes,
            **known,
        )
        return replace(
            one,
            decisive=tuple(decisive(recipe, target, one)),
            advice=tuple(advice(recipe, target, step, one, time)),
        )

    def run(self, target: Target, step: Blueprint, time: StepTime) -> dict[str, Any]:
        """The fields of a plan for a recipe that runs on the target."""
        recipe = self.recipe
        seconds = time.seconds
        bound = time.bound
        batch = self.recipe.batch
        assert seconds is not None
        fed = feeding(
            recipe,
            batch / seconds.value,
            resident=step.resident,
            host=self.host,
            cores=target.hosts * (self.host_cores or usable_cores()),
        )
        if fed.input_bound and fed.examples_per_second_per_core is not None:
            bound = "input"
            seconds = at_least(seconds, batch / (fed.examples_per_second_per_core * fed.cores))
        peak = peak_flops_per_device(target.chip, recipe.precision)
        work = training_work(recipe, seconds, self.evaluations, self.evaluation(step, time))
        run = run_time(target, self.compilation(target, step, time), work)
        return {
            "step_seconds": seconds,
            "step_parts": time.parts,
            "kernels": costliest(time.kernels),
            "bound": bound,
            "examples_per_second": seconds.inverse(batch),
            "share_of_peak": None if peak is None else time.flops / seconds.value / peak,
            "feeding": fed,
            "costs": costs(target, self.prices, run["wall_seconds"], self.today),
            **run,
        }

    def evaluation(self, step: Blueprint, time: StepTime) -> Range | None:
        """The time of one evaluation, or `None` if its program was not compiled."""
        if time.evaluation is None or self.recipe.task.eval is None:
            return None
        blocks = -(-len(self.recipe.task.eval) // step.eval_block)
        return time.evaluation.times(-(-blocks // step.layout.devices))

    def compilation(self, target: Target, step: Blueprint, time: StepTime) -> Range:
        """The compilation time on the target's host."""
        kind = target.chip.kind
        passes = TPU_PASSES[self.recipe.precision] if kind == "TPU" else 1
        operations = sum(program.contents(target.chip).operations for program in step.programs)
        return compilation(kind, operations, local_devices(step, target), self.host_cores, passes)


_NOWHERE = (TOO_LARGE, "shards-uneven", "shards-over-hosts")
"""The codes of problems that another batch would have too."""


def _impossible(step: Blueprint, target: Target) -> StepTime | None:
    """A problem that is known before compiling, or `None`: devices that cannot be divided into the
    recipe's groups, or a state that is larger than their memory."""
    shards = step.shards
    if step.layout.devices > target.devices or not lies_on_hosts(shards, target):
        problem = fact("shards-over-hosts", shards=shards, here=target.devices // target.hosts)
        if target.devices % shards:
            problem = fact("shards-uneven", shards=shards, devices=target.devices)
    elif large := too_large(step, target):
        return StepTime(large[0], problem=large[1])
    else:
        return None
    return StepTime(problem=problem)
