"""`plan`: predicts a recipe on absent chips, from any machine.

Each chip's compiler compiles the step's programs. A TPU's compiler states cycles; a GPU's kernels are timed
from their bytes and FLOPs. The target `cpu` is this machine, where a few calls are timed.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..chips.catalogue import peak_flops_per_device
from ..chips.market import Market
from ..chips.prices import Price
from ..chips.prices import load as load_prices
from ..chips.targets import Target, parse
from ..engine import feed
from ..engine.blueprint import Memory, largest_batch, tracing
from ..engine.layout import Layout, usable_devices
from ..engine.state import TrainState, abstract_state
from ..errors import ChipwiseError, DeviceError, RecipeError
from ..hlo.kernel import costliest
from ..recipe.precision import TPU_PASSES
from ..recipe.recipe import Recipe
from ..words.facts import Fact, fact
from . import step_time, steps, steps_here
from .advice import advice, decisive, does_not_fit, lacks, room
from .compiler import Progress, default_cache
from .cutting import TOO_LARGE, lies_on_hosts, too_large
from .feeding import HostSpeed, feeding, measured, recorded
from .interruptions import Rate, interrupted, stated, unknown
from .plans import Feeding, Plan, Plans, Range, costs
from .predicting import Predictions
from .programs import StepPrograms, available, step_programs
from .remembered import Remembered
from .timing import StepTime, at_least, compilation, evaluations, run_time


def plan(
    recipe: Recipe,
    on: Sequence[str],
    *,
    prices: Sequence[Price] | str | Path | None = None,
    market: Market | None = None,
    today: datetime.date | None = None,
    exact: bool = True,
    eval_every: str | None = "1ep",
    find_largest_batch: bool = False,
    predict: int | None = None,
    measure_feed: bool = False,
    feed_record: str | os.PathLike | None = None,
    host_cores: int | None = None,
    spot: bool = False,
    interruptions: str | None = None,
    origin: str | None = None,
    cache: str | os.PathLike | None = None,
    progress: Progress | None = None,
    ready: Callable[[Plan], None] | None = None,
) -> Plans:
    """Predicts memory, speed and cost of `recipe` on each target of `on`.

    Uses no accelerator, and writes only its cache.

    *Arguments:*

    - `on`: targets such as `"v5e-8"`, `"v3-8"`, `"a100:8"`, `"t4"`, `"cpu"`; see `chipwise.chips.targets`.
    - `prices`: a price file, or prices; by default the bundled snapshot.
    - `market`: the clouds and regions whose prices count; by default all.
    - `today`: the date from which the age of prices counts; by default today.
    - `exact`, `eval_every`: as in `fit`.
    - `find_largest_batch`: search for it on every target, not only if the recipe's batch does not fit.
    - `predict`: plan the prediction of so many examples instead of training.
    - `measure_feed`: read examples for half a second, to compare this host's cores with the chips' demand.
    - `feed_record`: a record of `chipwise bench-feed`, maybe of another host, instead of that measurement.
    - `host_cores`: of the targets' hosts, for feeding; by default the record's, or this host's.
    - `spot`: use spot machines; `Plan.interrupted` has the expected time and cost.
    - `interruptions`: their rate, such as `"0.1/h"` or `"2/d"`, instead of a published one.
    - `origin`: of a built-in recipe (see `recipe.settings.origin`), whose programs are then traced only once.
    - `cache`: a folder for compiled results; by default in the user's cache folder.
    - `progress`: see `chipwise.planner.compiler.Progress`.
    - `ready`: called with each plan as soon as it is made: first cached ones and those that need no
      compilation, then the smallest programs, last those whose largest batch is searched for.

    *Returns* a list of `Plan`, in the order of `on`. Raises `DeviceError` for an unknown or impossible
    target, `RecipeError` for a recipe that cannot be traced or, with `predict`, has no prediction,
    `DataError` for a `feed_record` that cannot be read or has other examples, and for a cloud or region
    without prices.
    """
    targets = list({t.name: t for t in map(parse, on)}.values())
    if not targets:
        raise DeviceError("no-target")
    host = None if feed_record is None else recorded(feed_record, recipe.task.train)
    table = load_prices(prices) if prices is None or isinstance(prices, str | Path) else prices
    question = _Question(
        recipe, exact, (market or Market()).select(table), today or datetime.date.today(), host, host_cores,
        default_cache() if cache is None else Path(cache), evaluations(recipe, eval_every), spot,
        stated(interruptions),
    )  # fmt: skip
    if origin is not None:
        question = dataclasses.replace(question, remembered=Remembered(question.cache, origin))
    if predict is None:
        plans = _trainings(question, targets, find_largest_batch, measure_feed, progress)
    else:
        if find_largest_batch:
            raise RecipeError("plan-predict-largest")
        if spot or interruptions is not None:
            raise RecipeError("plan-predict-spot")
        if host is None and measure_feed:
            question = dataclasses.replace(question, host=measured(recipe.task.train))
        plans = question.predictions(predict).plans(targets, progress)
    ready_plans: dict[str, Plan] = {}
    for one in plans:
        ready_plans[one.target] = one
        if ready is not None:
            ready(one)
    if question.remembered is not None:
        question.remembered.keep()
    return Plans(ready_plans[target.name] for target in targets)


def _trainings(
    question: _Question,
    targets: Sequence[Target],
    largest: bool,
    measure_feed: bool,
    progress: Progress | None,
) -> Iterator[Plan]:
    """Yields each target's plan as soon as it is ready; last those whose `largest` batch is searched for."""
    recipe = question.recipe
    # ---- each target's layout and programs; targets with the same layout share them
    programs_of: dict[tuple[int, bool], StepPrograms] = {}
    cases: list[tuple[Target, StepPrograms]] = []
    for target in targets:
        devices = _usable(recipe, target, question.exact)
        key = devices, _resident(recipe, target)
        if key not in programs_of:
            programs_of[key] = question.programs(recipe, target)
        if devices > target.devices or not lies_on_hosts(recipe.shards, target):
            yield question.plan(target, programs_of[key], _no_groups(recipe, target))
        else:
            cases.append((target, programs_of[key]))
    if question.host is None and measure_feed and any(not p.resident for _, p in cases):
        question = dataclasses.replace(question, host=measured(recipe.task.train))

    searched: list[tuple[Target, StepPrograms, StepTime]] = []
    for target, programs, step in question.timed(cases, progress):
        above = step.problem is not None and step.problem.code == TOO_LARGE
        if not above and (largest or (step.memory is not None and not step.memory.fits)):
            searched.append((target, programs, step))
        else:
            yield question.plan(target, programs, step)
    for target, programs, step in searched:
        yield question.searched(target, programs, step)


def _usable(recipe: Recipe, target: Target, exact: bool) -> int:
    """The devices that the recipe uses on the target, at least one group."""
    whole = target.devices // recipe.shards * recipe.shards
    return usable_devices(recipe, max(whole, recipe.shards), exact)


def _no_groups(recipe: Recipe, target: Target) -> StepTime:
    """The problem of a target whose devices cannot be divided into the recipe's groups."""
    here = target.devices // target.hosts
    problem = fact("shards-uneven", shards=recipe.shards, devices=target.devices)
    if target.devices % recipe.shards == 0:
        problem = fact("shards-over-hosts", shards=recipe.shards, here=here)
    return StepTime("compiled", 0.0, 0.0, None, frozenset(), notes=(), problem=problem)


def _resident(recipe: Recipe, target: Target) -> bool:
    """Whether the data stays on the device, as `fit` decides: JAX states no limit on the CPU."""
    limit = None if target.chip.kind == "CPU" else available(target)[0]
    return feed.fits(recipe.task.train, limit)


@dataclass(frozen=True)
class _Question:
    """The question for every target: the recipe and the arguments of `plan`."""

    recipe: Recipe
    exact: bool
    prices: Sequence[Price]
    today: datetime.date
    host: HostSpeed | None
    host_cores: int | None
    cache: Path
    evaluations: int
    spot: bool = False
    rate: Rate | None = None
    remembered: Remembered | None = None

    def predictions(self, examples: int) -> Predictions:
        known = (self.prices, self.today, self.host, self.host_cores, self.cache)
        return Predictions(self.recipe, examples, *known)

    def programs(self, recipe: Recipe, target: Target) -> StepPrograms:
        layout = Layout.of(recipe, _usable(recipe, target, self.exact), self.exact)
        resident = _resident(recipe, target)
        if recipe is not self.recipe:
            return step_programs(recipe, layout, resident=resident)

        def make() -> StepPrograms:
            return step_programs(recipe, layout, resident=resident, state=self.state)

        if self.remembered is None:
            return make()
        return self.remembered.programs(recipe, layout, resident, make)

    @functools.cached_property
    def state(self) -> TrainState:
        """The shapes of the state, computed once for all layouts."""
        with tracing(self.recipe.name):
            return abstract_state(self.recipe)

    def timed(
        self, cases: Sequence[tuple[Target, StepPrograms]], progress: Progress | None = None
    ) -> Iterator[tuple[Target, StepPrograms, StepTime]]:
        """Yields each case with its step as soon as it is ready."""
        asked = []
        for target, programs in cases:
            if target.chip.kind == "CPU":
                yield target, programs, _timed(target, programs, {})
            elif step := too_large(target, programs):
                yield target, programs, step
            else:
                asked.append((target, programs))
        for place, answers in steps.compile_steps(asked, cache=self.cache, progress=progress):
            target, programs = asked[place]
            yield target, programs, _timed(target, programs, answers)

    def searched(self, target: Target, programs: StepPrograms, step: StepTime) -> Plan:
        """The plan with its largest batch or, if none fits, with advice."""
        recipe = self.recipe
        held: dict[int, Memory] = {}  # by batch

        def fits(tried: Recipe) -> tuple[bool, float]:
            programs = self.programs(tried, target)
            try:
                if target.chip.kind == "CPU":
                    step, _ = steps_here.compiled_here(target, programs)
                else:
                    ((_, _, step),) = self.timed([(target, programs)])
            except ChipwiseError:  # of another batch, so not for the user
                return False, 1.0
            if step.memory is None:
                return step.problem is None, 1.0
            held[tried.batch] = step.memory
            return step.memory.fits, step.memory.needed / step.memory.available

        largest = largest_batch(recipe, fits, recipe.clock.examples)
        plan = self.plan(target, programs, step, largest)
        if largest is None and (least := held.get(recipe.least_batch)) is not None:
            extra = room(recipe, target, programs, least, self.exact)
            plan = dataclasses.replace(plan, advice=(*extra, *plan.advice))
        return plan

    def plan(
        self, target: Target, programs: StepPrograms, step: StepTime, largest: int | None = None
    ) -> Plan:
        recipe, layout = self.recipe, programs.layout
        problem = lacks(target, step.dtypes) or step.problem
        if problem is None and step.memory is not None and not step.memory.fits:
            problem = does_not_fit(step.memory, largest, recipe)
        if problem is None and step.seconds is None:
            problem = fact("step-time-unknown")
        run: dict[str, Any] = {}
        if problem is None:
            run = self.run(target, programs, step)
        one = Plan.at(
            target,
            devices=layout.devices,
            method=step.method,
            batch=recipe.batch,
            replicas=recipe.replicas,
            replicas_per_device=layout.replicas_per_device,
            precision=recipe.precision,
            parameters=programs.parameters,
            problem=problem,
            memory=step.memory,
            largest_batch=largest,
            flops_per_step_per_device=step.flops,
            wire_bytes_per_step_per_device=step.wire_bytes,
            xla_seconds=step.xla_seconds,
            steps=recipe.clock.total,
            evaluations=self.evaluations,
            notes=step.notes if problem is None else (),
            **run,
        )
        expected = interrupted(one, target, programs.checkpoint_bytes, self.spot, self.rate)
        one = dataclasses.replace(one, interrupted=expected)
        return dataclasses.replace(
            one,
            decisive=decisive(recipe, target, one),
            notes=(*one.notes, *about_spot(one)),
            advice=(*unknown(one, self.spot), *advice(recipe, target, programs, one, step)),
        )

    def compilation(self, target: Target, programs: StepPrograms, step: StepTime) -> Range:
        """The compilation time on the target's host; on the CPU it was measured."""
        kind, devices = target.chip.kind, -(-programs.layout.devices // target.hosts)
        if step.compile_seconds is not None:
            return step.compile_seconds
        passes = TPU_PASSES[self.recipe.precision] if kind == "TPU" else 1
        operations = sum(program.contents(target.chip).operations for program in programs.programs)
        return compilation(kind, operations, devices, self.host_cores, passes)

    def run(self, target: Target, programs: StepPrograms, step: StepTime) -> dict[str, Any]:
        """The fields of a plan for a recipe that runs on the target."""
        recipe, seconds, bound = self.recipe, step.seconds, step.bound
        assert seconds is not None
        speed = recipe.batch / seconds.value
        fed: Feeding = feeding(
            recipe, speed, resident=programs.resident, host=self.host, cores=self.host_cores
        )
        if fed.input_bound and fed.examples_per_second_per_core is not None:
            bound = "input"
            seconds = at_least(seconds, recipe.batch / (fed.examples_per_second_per_core * fed.cores))
        peak = peak_flops_per_device(target.chip, recipe.precision)
        run = run_time(recipe, target, seconds, self.compilation(target, programs, step), self.evaluations)
        return {
            "step_seconds": seconds,
            "step_parts": step.parts,
            "kernels": costliest(step.kernels),
            "bound": bound,
            "examples_per_second": seconds.inverse(recipe.batch),
            "share_of_peak": None if peak is None else step.flops / seconds.value / peak,
            "seconds": run.parts,
            "overhead_seconds": (run.overhead.low, run.overhead.high),
            "ranked_by": run.ranked_by,
            "wall_seconds": run.total,
            "feeding": fed,
            "costs": costs(target, self.prices, run.total, self.today),
        }


def _timed(target: Target, programs: StepPrograms, answers: steps.Answers) -> StepTime:
    """The timed step, from the compiler's answers or, on the CPU, measured here."""
    if target.chip.kind == "CPU":
        step = steps_here.timed_here(target, programs)
    else:
        step = step_time.timed_away(target, programs, answers)
    if programs.fused:
        step = dataclasses.replace(step, notes=(*step.notes, fact("fused-step")))
    return step


def about_spot(plan: Plan) -> tuple[Fact, ...]:
    """A fact if the lowest spot price of a plan is above its on-demand price."""
    demand, spot = plan.cheapest(), plan.cheapest(spot=True)
    if demand is None or spot is None or spot.usd_per_hour <= demand.usd_per_hour:
        return ()
    rates = {"spot": spot.usd_per_hour, "demand": demand.usd_per_hour}
    return (fact("spot-above-on-demand", spot_cloud=spot.cloud, cloud=demand.cloud, **rates),)
