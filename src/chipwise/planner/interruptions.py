"""Interrupted runs: their expected time and cost, and the best interval between checkpoints.

Interruptions are random, with a given rate per hour. Each loses the steps since the last checkpoint; then the
run waits for a machine, starts and compiles again. The rate comes from `interruptions.csv` or from the user.
The cost and the best interval are those of Daly: "A higher order estimate of the optimum checkpoint interval
for restart dumps", Future Generation Computer Systems 22 (2006), equations 20 and 37.

A checkpoint on the cloud's notice is left out, so the real loss may be smaller.
"""

from __future__ import annotations

import csv
import math
import re
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from .. import chips
from ..chips.targets import Target
from ..errors import DeviceError
from ..words.facts import Fact, fact
from .plans import Interrupted, Plan, Range
from .time_run import ALLOWANCE

WAIT_SECONDS = Range.around(600.0, ALLOWANCE)
"""Assumed seconds until another machine is there. A busy zone may have none for hours."""

SAVE_SECONDS, SAVE_BYTES = 1.0, 1e9
"""Assumed seconds of a checkpoint besides its bytes, and bytes a second, as if steps waited for the disk."""

ENDLESS = 100 * 365 * 86_400.0
"""Seconds: longer expectations are cut to this, so that none is infinite."""

_UNITS = {"h": 1.0, "d": 1 / 24}


@dataclass(frozen=True)
class Rate:
    """Interruptions of a whole target per hour, with the source."""

    per_hour: Range
    source: Fact


def stated(text: str | None) -> Rate | None:
    """Parses a rate such as "0.1/h" or "2/d"; `None` for no text. Raises `DeviceError` for other text."""
    if text is None:
        return None
    match = re.fullmatch(r"(\d*\.?\d+(?:e-?\d+)?)/([hd])", text.strip())
    number = float(match[1]) * _UNITS[match[2]] if match else math.inf
    if not match or not math.isfinite(number):
        raise DeviceError(
            "interruptions-unreadable", "--interruptions {given!r}: type a rate such as 0.1/h.", given=text
        )
    return Rate(Range(number, number, number), fact("interruptions-stated", given=text.strip()))


def known(target: Target, cloud: str, spot: bool) -> Rate | None:
    """The published rate of `target` at `cloud`; `None` if there is none. Each machine may be preempted or
    fail; a TPU slice is preempted as a whole, and fails if one of its machines does."""
    text = files(chips).joinpath("interruptions.csv").read_text(encoding="utf-8")
    for row in csv.DictReader(text.splitlines()):
        if row["kind"] == ("spot" if spot else "failure") and row["cloud"] in ("", cloud):
            machines = 1 if spot and target.chip.kind == "TPU" else target.hosts
            value, low, high = (float(row[name]) for name in ("per_machine_hour", "low", "high"))
            source = fact("interruptions-known", source=row["source"], machines=machines, each=value)
            return Rate(Range(value, low, high).times(machines), source)
    return None


def best_interval(save: float, between: float) -> float:
    """The best interval between checkpoints, in seconds of steps, if a checkpoint takes `save` and the mean
    time between interruptions is `between` seconds (Daly, equation 37)."""
    if save >= 2 * between:
        return between
    part = save / (2 * between)
    return math.sqrt(2 * save * between) * (1 + math.sqrt(part) / 3 + part / 9) - save


def running(steps: float, interval: float, save: float, restart: float, between: float) -> float:
    """Expected seconds on the machine, without waiting, until `steps` seconds of steps are done and saved.

    Each `interval` with its `save`, and the `restart` before the first one of a process, must complete
    without interruption: Daly's equation 20, including the first start and a shorter last interval.
    """
    whole = math.ceil(steps / interval - 1e-9) - 1
    try:
        again = between * math.exp(restart / between)
        each, last = (
            again * math.expm1((stretch + save) / between) for stretch in (interval, steps - whole * interval)
        )
        return between * math.expm1(restart / between) + whole * each + last
    except OverflowError:
        return math.inf


def interrupted(
    plan: Plan, target: Target, state_bytes: int, spot: bool, rate: Rate | None
) -> Interrupted | None:
    """The expected time and cost of `plan` with interruptions, at its cheapest price.

    `None` if it cannot run, has no such price or no known rate, or if neither `spot` nor `rate` is given and
    it has one machine, whose failures hardly matter.

    *Arguments:* `state_bytes`: of a checkpoint; `spot`: use spot machines; `rate`: the user's, instead of the
    published one.
    """
    cost = plan.cheapest(spot)
    if plan.wall_seconds is None or plan.step_seconds is None or (spot and cost is None):
        return None
    if rate is None and not spot and target.hosts == 1:
        return None
    rate = rate or known(target, cost.cloud if cost else "", spot)
    if rate is None or not rate.per_hour.value:
        return None
    save = SAVE_SECONDS + state_bytes / SAVE_BYTES
    steps, usual = plan.seconds["train"] + plan.seconds["evaluate"], plan.wall_seconds
    interval = min(best_interval(save, 3600 / rate.per_hour.value), steps)
    restart = Range(plan.seconds["start"] + plan.seconds["compile"], *plan.overhead_seconds)

    def end(name: str) -> tuple[float, float]:
        """Seconds on the machine, and with waits, at one end of all assumptions together."""
        scale, often = getattr(usual, name) / usual.value, getattr(rate.per_hour, name)
        up = running(steps * scale, interval, save, getattr(restart, name), 3600 / often)
        up = min(up, ENDLESS)
        return up, min(up * (1 + often / 3600 * getattr(WAIT_SECONDS, name)), ENDLESS)

    up, wall = (Range(*ends) for ends in zip(*map(end, ("value", "low", "high")), strict=True))
    usd = None if cost is None else up.times(cost.usd_per_hour / 3600)
    numbers: dict[str, Any] = {
        "cloud": cost.cloud if cost else "",
        "expected": up.value * rate.per_hour.value / 3600,
        "interval_seconds": interval,
        "interval_steps": max(1, round(interval / plan.step_seconds.value)),
    }
    code = "plan-on-spot" if spot else "plan-with-failures" if cost else "plan-with-failures-unpriced"
    code = "plan-never-ends" if wall.value >= ENDLESS else code
    return Interrupted(
        spot=spot,
        per_hour=rate.per_hour,
        source=rate.source,
        save_seconds=save,
        wall_seconds=wall,
        usd=usd,
        told=fact(code, **numbers, per_hour=rate.per_hour.value, wall=vars(wall), usd=usd and vars(usd)),
        **numbers,
    )


def unknown(plan: Plan, spot: bool) -> tuple[Fact, ...]:
    """A fact: `interruptions.csv` has no rate for the machines of the spot price."""
    cost = plan.cheapest(spot=True)
    if not spot or cost is None or plan.interrupted is not None or plan.wall_seconds is None:
        return ()
    return (fact("plan-spot-unknown", cloud=cost.cloud),)
