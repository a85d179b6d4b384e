"""What differs between rows, and whether their first losses say that they compute the same thing.

Two devices, or two orders of summation, round differently. Their losses differ in the last bits, and training
amplifies that, up to ten times a step early in training with a high rate. A *mistake*, such as another
initial value, rate or decay, is visible at once and far above rounding: the second loss follows a whole
update, the third also its momentum. So the first two losses must agree within rounding. The bound then grows
tenfold a step, up to a maximum. Rows that agree for `KNOWN` steps compute the same thing; if they part later,
rounding was amplified.

Comparing losses before speeds is AlgoPerf's idea (its test `traindiffs`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...words.facts import Fact, fact
from ..row import Repeat, Row

_MODEL = ("recipe", "parameters")  # of another model every loss is another
_STATED = ("recipe", "parameters", "batch", "replicas", "precision", "data", "framework")
_COMMON = (*_STATED, "exact", "machine", "where")
_WORDS = {"batch": "batch (global)", "where": "device"}
SAME_BITS, AGREE, PART, UNKNOWN = "equal to the bit", "agree", "part", "not known"
KNOWN = 4  # steps: by then the loss depends on every part of an update, momentum too
# relative bounds by precision: for the first two losses, and the maximum later
ALLOWED = {"f32": (1e-5, 1e-3), "tf32": (5e-4, 5e-3), "bf16": (5e-3, 2e-2), "f16": (5e-3, 2e-2)}


@dataclass(frozen=True)
class Differing:
    """A setting that differs between the rows that state it: `values` by label; `None` is not set."""

    setting: str
    values: dict[str, Any]


def differing(rows: Sequence[Row]) -> list[Differing]:
    """The differences, most important first. Recipe settings are compared only between rows that store
    them."""
    settings = []
    for name in _COMMON:
        stating = [row for row in rows if name != "where" or row.device is not None]
        values = {row.label: v for row in stating if (v := getattr(row, name)) is not None}
        settings.append(Differing(_WORDS.get(name, name), values))
    stored = [row for row in rows if row.settings]  # a setting that one row lacks differs too
    for part in ("columns", "settings"):
        for name in dict.fromkeys(key for row in stored for key in getattr(row, part)):
            values = {row.label: getattr(row, part).get(name) for row in stored}
            settings.append(Differing(name, values))
    for name in dict.fromkeys(key for row in rows for key in row.versions):
        values = {row.label: row.versions[name] for row in rows if name in row.versions}
        settings.append(Differing(f"version of {name}", values))
    return [d for d in settings if len({str(v) for v in d.values.values()}) > 1]


def same_device(row: Row, other: Row) -> bool:
    """Whether two rows are known to have run on equally many devices of one kind; for CPUs, which
    all have one name, on one kind of machine."""
    if row.device is None or row.where != other.where:
        return False
    cpu = row.simulated or row.device.lower().startswith("cpu")
    return not cpu or (row.machine is not None and row.machine == other.machine)


@dataclass(frozen=True)
class Agreement:
    """The comparison of the losses of `label` with those of `against`.

    *Fields:* `status`: one of the constants; `same`: whether both are known to compute the same thing;
    `steps`: the last step compared; `parts`: the first step above the bound; `fact`: the verdict.
    """

    label: str
    against: str
    status: str
    fact: Fact
    same: bool = False
    steps: int = 0
    parts: int | None = None


def agreement(row: Row, other: Row) -> Agreement:
    """The agreement of two rows, from repeats with the same seed: of the losses, or means of them,
    that both have over the same steps."""
    names: dict[str, Any] = {"label": row.label, "against": other.label}
    pairs = [(a, b) for a in row.repeats for b in other.repeats if a.losses and b.losses]
    a, b = next(((a, b) for a, b in pairs if a.seed == b.seed), pairs[0] if pairs else (None, None))
    why = _otherwise(row, other, a, b)
    unknown = Agreement(**names, status=UNKNOWN, fact=fact("losses-unknown", **names, why=why))
    if a is None or b is None or any(one.numbers.get("name") in _MODEL for one in why):
        return unknown
    if not (met := _met(a, b)):
        return replace(unknown, fact=fact("losses-unknown", **names, why=why or [fact("no-step-in-common")]))
    start, most = max(ALLOWED.get(p or "f32", ALLOWED["bf16"]) for p in (row.precision, other.precision))
    within, parts = 0.0, None
    for step, one, two in met:
        apart = abs(one - two) / (max(abs(one), abs(two)) or 1.0)
        if apart > min(most, start * 10.0 ** min(max(step - 2, 0), 30)):
            parts = step
            break
        within = max(within, apart)
    steps, numbers = met[-1][0], {**names, "within": within}
    found: dict[str, Any] = {**names, "steps": steps, "parts": parts}
    if parts is not None and parts <= max(KNOWN, met[0][0]):
        (one, two) = next((one, two) for step, one, two in met if step == parts)
        if why:
            return replace(unknown, steps=steps, parts=parts)
        return Agreement(**found, status=PART, fact=fact("losses-part", **names, step=parts, a=one, b=two))
    # With a warm-up from 0 the first losses do not depend on the rate; and few steps show little
    found["same"] = steps >= KNOWN and not any(one.code == "other-settings" for one in why)
    if all(one == two for _, one, two in met):
        return Agreement(**found, status=SAME_BITS, fact=fact("losses-equal", **names, steps=steps))
    code = "losses-agree" if parts is None else "losses-agree-then-part"
    verdict = fact(code, **numbers, steps=steps if parts is None else parts - 1)
    return Agreement(**found, status=AGREE, fact=verdict)


def _otherwise(row: Row, other: Row, a: Repeat | None, b: Repeat | None) -> list[Fact]:
    """Why the losses of two rows need not be equal, or are not there."""
    if a is None or b is None:
        silent = [r.label for r in (row, other) if not any(repeat.losses for repeat in r.repeats)]
        return [fact("no-losses", labels=silent)]
    values = [(name, getattr(row, name), getattr(other, name)) for name in _STATED]
    values.append(("seed", a.seed, b.seed))
    why = [fact("another-value", name=n, a=x, b=y) for n, x, y in values if None not in (x, y) and x != y]
    if row.settings and other.settings:
        keys = sorted(row.settings.keys() | other.settings.keys())
        changed = [k for k in keys if str(row.settings.get(k)) != str(other.settings.get(k))]
        why += [fact("other-settings", settings=changed)] if changed else []
    return why


def _met(a: Repeat, b: Repeat) -> list[tuple[int, float, float]]:
    """The last step and both losses of the windows that two repeats share."""
    there = {(w.first, w.last): w.loss for w in b.losses}
    return [(w.last, w.loss, there[w.first, w.last]) for w in a.losses if (w.first, w.last) in there]
