"""What is known of a recipe on one target: does it run, does it fit, how fast, at what price.

A `Plan` is plain values, so that a table, a JSON file and a page show the same. Bytes, FLOPs and seconds
of a step are *per device*; batch, examples/s and dollars are of the whole target.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..chips.prices import Price, prices_for
from ..chips.targets import Target
from ..words.facts import Fact, plain
from .kernels import Kernel

SCHEMA = "chipwise.plan/2"


def unique(facts: Iterable[Fact]) -> tuple[Fact, ...]:
    """Each once, in order."""
    kept: list[Fact] = []
    for one in facts:
        if one not in kept:
            kept.append(one)
    return tuple(kept)


@dataclass(frozen=True)
class Range:
    """A prediction and the interval that should hold the measured value nine times out of ten."""

    value: float
    low: float
    high: float

    @classmethod
    def around(cls, value: float, factor: float) -> Range:
        """`value`, and `factor` up and down."""
        return cls(value, value / factor, value * factor)

    def times(self, factor: float) -> Range:
        return Range(self.value * factor, self.low * factor, self.high * factor)

    def plus(self, other: Range) -> Range:
        return Range(self.value + other.value, self.low + other.low, self.high + other.high)

    def inverse(self, numerator: float) -> Range:
        """`numerator / self`, the ends exchanged."""
        return Range(numerator / self.value, numerator / self.high, numerator / self.low)

    def overlaps(self, other: Range) -> bool:
        return self.low <= other.high and other.low <= self.high


@dataclass(frozen=True)
class Memory:
    """Bytes of one device's memory during training, by what they hold."""

    parameters: int  # and their averages, if the recipe keeps any
    optimizer: int
    state: int  # batch-norm statistics and metric sums
    replica_sums: int  # gradients waiting to be added over replicas
    activations: int  # the compiler's temporary memory, at its largest
    data: int  # examples kept on the device, or the batches on their way
    program: int  # the compiled code, and on GPUs the libraries' own share
    available: int
    available_source: Fact

    @property
    def needed(self) -> int:
        parts = (self.parameters, self.optimizer, self.state, self.replica_sums, self.activations)
        return sum(parts) + self.data + self.program

    @property
    def fits(self) -> bool:
        return self.needed <= self.available

    def json(self) -> dict[str, Any]:
        return plain(self) | {"needed": self.needed, "fits": self.fits}


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
    note: str = ""  # of the price's row
    reckoned: tuple[Fact, ...] = ()  # how the price follows from the row, where it is not the row's own
    machines: int = 1  # more: the price of so many separate ones, whose links are not those of the plan
    market: bool = False  # the lowest offer of a marketplace
    old: bool = False  # read more than `prices.OLD_DAYS` before the plan was made

    @property
    def decides(self) -> bool:
        """Whether a verdict may rest on it; where no price does, list prices do whatever their age."""
        return not (self.market or self.old)

    @property
    def order(self) -> tuple[bool, int, bool, bool, float]:
        """What comes first of several: what buys the whole thing, then list prices of these days, then the
        lowest."""
        return (self.includes == "accelerator alone", self.machines, self.market, self.old, self.usd.value)


def costs(target: Target, prices: Sequence[Price], total: Range, today: datetime.date) -> tuple[Cost, ...]:
    """Of a run of `total` seconds, at each of the prices that is known of `target`, on demand and spot."""
    known = prices_for(target, prices)
    # The CPU is this host, measured: what another host of so many cores costs is no price of it.
    if target.chip.kind == "CPU" and not any(price.owned for price in known):
        return ()
    return tuple(cost for price in known for cost in _costs(price, total, today))


def _costs(price: Price, total: Range, today: datetime.date) -> Iterator[Cost]:
    same = ("cloud", "instance", "includes", "date", "source", "note", "reckoned", "machines", "market")
    shared = {name: getattr(price, name) for name in same}
    for rate, spot, region in (
        (price.usd_per_hour, False, price.region),
        (price.spot_usd_per_hour, True, price.spot_region or price.region),
    ):
        if rate is not None:
            usd = total.times(rate / 3600)
            old = not price.owned and price.old(today, spot)
            yield Cost(usd_per_hour=rate, usd=usd, spot=spot, region=region, old=old, **shared)


@dataclass(frozen=True)
class Feeding:
    """What the chip wants of its host. Rates are global; `None` is unknown."""

    resident: bool  # the whole training set lives on each device: nothing to feed
    bytes_per_example: int
    wanted_examples_per_second: float
    wanted_bytes_per_second: float
    examples_per_second_per_core: float | None
    cores_needed: float | None
    cores: int
    measured_on: Fact

    @property
    def input_bound(self) -> bool:
        return not self.resident and self.cores_needed is not None and self.cores_needed > self.cores


@dataclass(frozen=True)
class Interrupted:
    """A run on machines that may be taken away, or fail: expected values, of the whole target."""

    spot: bool
    cloud: str  # whose price and rate it is; "" without a price
    per_hour: Range  # interruptions
    source: Fact  # of that rate
    expected: float  # interruptions of the run
    save_seconds: float  # of a checkpoint
    interval_seconds: float  # of steps between checkpoints, which costs least
    interval_steps: int  # the same in steps
    wall_seconds: Range  # with restarts, lost steps, checkpoints and waits for a machine
    usd: Range | None
    told: Fact  # the same in a sentence


@dataclass(frozen=True)
class Plan:
    """A prediction for a recipe on a target. `problem` says why it cannot run there; then what depends on
    running is `None`."""

    target: str  # as canonically written, such as "v5e-8"
    chip: str
    chips: int
    devices: int  # JAX devices that the recipe's replicas use
    devices_found: int  # JAX devices of the target
    method: str  # "compiled" by the chip's own compiler, or "measured" on this machine
    batch: int
    replicas: int
    replicas_per_device: int
    precision: str
    parameters: int  # numbers, not bytes
    problem: Fact | None = None
    memory: Memory | None = None
    largest_batch: int | None = None  # searched for when asked, or when the recipe's own does not fit
    step_seconds: Range | None = None
    step_parts: dict[str, float] = field(default_factory=dict)  # seconds: replica, reduce, update, dispatch
    kernels: tuple[Kernel, ...] = ()  # the costliest of a step on one device, costliest first
    bound: str | None = None  # "compute", "memory", "interconnect", "input" or "launch"
    examples_per_second: Range | None = None
    flops_per_step_per_device: float | None = None
    share_of_peak: float | None = None
    wire_bytes_per_step_per_device: float | None = None
    xla_seconds: float | None = None  # of a step, by XLA's own cost analysis: for comparison
    steps: int | None = None
    predicts: int | None = None  # so many examples, with no training: a step is a block on every device
    latency_seconds: Range | None = None  # of one example alone, in a plan of predictions
    seconds: dict[str, float] = field(default_factory=dict)  # start, compile, train, evaluate
    overhead_seconds: tuple[float, float] = (0.0, 0.0)  # start-up and compilation, from low to high
    ranked_by: str = "run"  # "step" where training may take less than `overhead_seconds`: compare steps then
    wall_seconds: Range | None = None
    costs: tuple[Cost, ...] = ()
    interrupted: Interrupted | None = None  # where spot was asked for, a rate stated, or there are many hosts
    feeding: Feeding | None = None
    decisive: tuple[Fact, ...] = ()  # what makes it as slow as it is, where that is a fact of chip or host
    advice: tuple[Fact, ...] = ()  # what could be changed; no number above rests on it
    notes: tuple[Fact, ...] = ()  # where the figures come from and what they leave out

    @property
    def runs(self) -> bool:
        return self.problem is None

    def cheapest(self, spot: bool = False) -> Cost | None:
        """The lowest price for the whole run, on demand or spot; without its host, of separate machines, of
        a marketplace or old only where no other is known."""
        return min((c for c in self.costs if c.spot is spot), key=lambda c: c.order, default=None)

    def per_million(self, cost: Cost) -> Range | None:
        """Dollars of a million predictions at one of the prices, without starting and compiling."""
        if self.examples_per_second is None:
            return None
        return self.examples_per_second.inverse(cost.usd_per_hour / 3600 * 1e6)

    def _repr_html_(self) -> str:
        """In a notebook: what `chipwise plan` prints."""
        return Plans([self])._repr_html_()

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values; the derived ones (`fits`, `needed`, cheapest prices) are included."""
        plan = plain(self)
        if self.memory is not None:
            plan["memory"] = self.memory.json()
        if self.feeding is not None:
            plan["feeding"]["input_bound"] = self.feeding.input_bound
        plan["cheapest"], plan["cheapest_spot"] = plain(self.cheapest()), plain(self.cheapest(spot=True))
        if self.predicts is not None:
            each = (self.cheapest(), self.cheapest(spot=True))
            plan["usd_per_million"] = [plain(cost and self.per_million(cost)) for cost in each]
        return plan


class Plans(list[Plan]):
    """Plans of one recipe: a list that shows its verdict and its table in a notebook."""

    def _repr_html_(self) -> str:
        from ..explain.notebook import of_plans

        return of_plans(self)
