"""Plans: whether a recipe runs on a target, whether it fits, its speed and its cost.

A `Plan` has plain values, so that a table, a JSON file and a page show the same. Bytes, FLOPs and
seconds of a step are *per device*. Batch, examples/s and dollars are of the whole target.
"""

from __future__ import annotations

import datetime
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..base import DeviceError, Fact, plain
from ..base.displayed import Displayed
from ..base.prediction import Range
from ..chips.prices import LARGE, OWNED, Price, prices_for
from ..chips.targets import Target
from ..compile.answers import FAILED_HERE
from ..compile.hlo.kernel import Kernel
from ..step.blueprint import Memory

SCHEMA = "chipwise.plan/4"


def unique(facts: Iterable[Fact]) -> tuple[Fact, ...]:
    """The facts in order, without duplicates."""
    kept: list[Fact] = []
    for one in facts:
        if one not in kept:
            kept.append(one)
    return tuple(kept)


@dataclass(frozen=True)
class Cost:
    """Dollars of the whole run at one dated price."""

    cloud: str
    instance: str
    region: str
    usd_per_hour: float
    usd: Range
    spot: bool
    includes: str
    date: str
    source: str
    note: str = ""  # from the price file
    reckoned: tuple[Fact, ...] = ()  # how the price follows from the listed one, if it differs
    machines: int = 1  # if more than one: separate machines, without the plan's links
    market: bool = False  # the lowest offer of a marketplace
    old: bool = False  # read more than `prices.OLD_DAYS` days before the plan

    @property
    def standing(self) -> tuple[bool, bool]:
        """Sort key, lowest first: prices of large clouds and of owned hardware, other lists,
        marketplaces."""
        return self.market, not (self.includes == OWNED or self.cloud.lower() in LARGE)

    @property
    def order(self) -> tuple[bool, int, tuple[bool, bool], float]:
        """Sort key: complete machines first, then by `standing`, then the lowest."""
        return self.includes == "accelerator alone", self.machines, self.standing, self.usd.value


def costs(
    target: Target, prices: Sequence[Price], total: Range, today: datetime.date
) -> tuple[Cost, ...]:
    """The costs of a run of `total` seconds, at each known price of `target`, on demand and
    spot."""
    known = prices_for(target, prices)
    same = (
        "cloud",
        "instance",
        "includes",
        "date",
        "source",
        "note",
        "reckoned",
        "machines",
        "market",
    )
    made = []
    for price, spot in itertools.product(known, (False, True)):
        rate = price.spot_usd_per_hour if spot else price.usd_per_hour
        if rate is not None:
            shared = {name: getattr(price, name) for name in same}
            made.append(
                Cost(
                    usd_per_hour=rate,
                    usd=total.times(rate / 3600),
                    spot=spot,
                    region=(spot and price.spot_region) or price.region,
                    old=not price.owned and price.old(today, spot),
                    **shared,
                )
            )
    return tuple(made)


@dataclass(frozen=True)
class Feeding:
    """The data rate that the chip needs from its host. Rates are global. `None` means unknown."""

    resident: bool  # the training set is on each device, so it needs no feeding
    bytes_per_example: int
    wanted_examples_per_second: float
    wanted_bytes_per_second: float
    examples_per_second_per_core: float | None
    cores_needed: float | None
    cores: int
    measured_on: Fact

    @property
    def input_bound(self) -> bool:
        return (
            not self.resident and self.cores_needed is not None and self.cores_needed > self.cores
        )


@dataclass(frozen=True)
class Plan(Displayed):
    """A prediction for a recipe on a target.

    Bytes, FLOPs and seconds of a step are per device. `batch`, `examples_per_second` and costs are
    global. `problem` is a fact, why the recipe cannot run there, or None. Unknown values are None.
    """

    target: str  # as canonically written, such as "v5e-8"
    chip: str
    chips: int
    devices: int  # JAX devices that the recipe's replicas use
    devices_found: int  # JAX devices of the target
    batch: int
    replicas: int
    replicas_per_device: int
    precision: str
    parameters: int  # numbers, not bytes
    problem: Fact | None = None
    memory: Memory | None = None
    largest_batch: int | None = None  # if requested, or if the recipe's own does not fit
    step_seconds: Range | None = None
    # Seconds: replica, reduce, update, dispatch
    step_parts: dict[str, float] = field(default_factory=dict)
    kernels: tuple[Kernel, ...] = ()  # the costliest of a step on one device, longest first
    bound: str | None = None  # "compute", "memory", "interconnect", "input" or "launch"
    examples_per_second: Range | None = None
    flops_per_step_per_device: float | None = None
    share_of_peak: float | None = None
    wire_bytes_per_step_per_device: float | None = None
    steps: int | None = None
    evaluations: int = 0  # of a run
    seconds: dict[str, float] = field(default_factory=dict)  # start, compile, train, evaluate
    overhead_seconds: tuple[float, float] = (0.0, 0.0)  # low and high of start-up and compilation
    # "step" where training may take less than `overhead_seconds`: compare steps then
    ranked_by: str = "run"
    wall_seconds: Range | None = None
    costs: tuple[Cost, ...] = ()
    feeding: Feeding | None = None
    decisive: tuple[Fact, ...] = ()  # what chip or host lack
    advice: tuple[Fact, ...] = ()  # possible changes; no number depends on them
    notes: tuple[Fact, ...] = ()  # sources of the figures, and what they leave out

    @property
    def runs(self) -> bool:
        return self.problem is None

    def check(self) -> None:
        """Raises `DeviceError` if this machine failed, so that nothing is known of the target."""
        if self.problem is not None and self.problem.code in FAILED_HERE:
            raise DeviceError.of(self.problem)

    def cheapest(self, spot: bool = False) -> Cost | None:
        """The lowest cost of the whole run, on demand or spot. Prices without a host, of separate
        machines, or of others than large clouds count only if there are no others."""
        return min((c for c in self.costs if c.spot is spot), key=lambda c: c.order, default=None)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values, including derived ones (`fits`, `needed`, cheapest prices)."""
        plan = plain(self)
        if self.memory is not None:
            plan["memory"] = self.memory.json()
        if self.feeding is not None:
            plan["feeding"]["input_bound"] = self.feeding.input_bound
        plan["cheapest"], plan["cheapest_spot"] = (
            plain(self.cheapest()),
            plain(self.cheapest(spot=True)),
        )
        return plan


class Plans(Displayed, list[Plan]):
    """Plans of one recipe: a list that is shown as a table, with its verdict."""
