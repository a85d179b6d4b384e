"""Checks whether rows compute the same thing, before their speeds are compared: their recipe, its settings,
then their first losses.

Two devices, or two orders of summation, round differently. Their losses differ in the last bits, and training
amplifies that, up to ten times a step early in training with a high rate. (JAX against PyTorch, ResNet-32 at
rate 0.1 from the first step on: relative 1e-7, 1e-7, 1e-5, 5e-5, 3e-4.) A *mistake*, such as another initial
value, rate or decay, is visible at once and far above rounding: the second loss follows a whole update, the
third also its momentum. So the first two losses must agree within rounding. The bound then grows tenfold a
step, up to a maximum. Rows that agree for `KNOWN` steps compute the same thing; if they part later, rounding
was amplified.

Comparing losses before speeds is AlgoPerf's idea (its test `traindiffs`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ...errors import RecipeError
from ...words.facts import Fact, fact
from ..row import MEASURED, Row, Window

_COMMON = ("batch", "replicas", "precision", "exact", "data", "framework", "machine", "where")
_WORDS = {"batch": "batch (global)", "where": "device"}
SAME_BITS, AGREE, PART, UNKNOWN = "equal to the bit", "agree", "part", "not known"
KNOWN = 4  # steps: by then the loss depends on every part of an update, momentum too
# relative bounds by precision: for the first two losses, and the maximum later
ALLOWED = {"f32": (1e-5, 1e-3), "tf32": (5e-4, 5e-3), "bf16": (5e-3, 2e-2), "f16": (5e-3, 2e-2)}


# ---- the recipe


@dataclass(frozen=True)
class Differing:
    """A setting that differs between the rows that state it: `values` by label; `None` is not set."""

    setting: str
    values: dict[str, Any]


def check_recipe(rows: Sequence[Row]) -> None:
    """Raises `RecipeError` for rows of two recipes: other names, model sizes or data shapes."""
    checks = (
        ("another-recipe", lambda row: row.recipe),
        ("another-size", lambda row: row.parameters),
        ("another-shape", lambda row: [f"{k} {v}" for k, v in row.columns.items()] or None),
    )
    for code, stated in checks:
        stating = [row for row in rows if stated(row) is not None]
        for row in stating[1:]:
            if stated(row) != (was := stated(stating[0])):
                names = {"row": _called(row), "other": _called(stating[0])}
                raise RecipeError(code, **names, has=stated(row), other_has=was)


def _called(row: Row) -> str:
    """The row's label, with a folder if several runs share it."""
    return f"{row.label} ({row.repeats[0].name})" if row.form == "study" else row.label


def same_device(row: Row, other: Row) -> bool:
    """Whether two measured rows are known to have run on equally many devices of one kind; for CPUs, which
    all have one name, on one kind of machine."""
    if row.device is None or row.kind != MEASURED or other.kind != MEASURED or row.where != other.where:
        return False
    cpu = row.simulated or row.device.lower().startswith("cpu")
    return not cpu or (row.machine is not None and row.machine == other.machine)


def differing(rows: Sequence[Row]) -> list[Differing]:
    """The differences, most important first. Recipe settings are compared only between rows that store
    them."""
    settings = []
    for name in _COMMON:
        stating = [row for row in rows if name != "where" or row.device is not None]
        values = {row.label: v for row in stating if (v := getattr(row, name)) is not None}
        settings.append(Differing(_WORDS.get(name, name), values))
    stored = [row for row in rows if row.settings]  # a setting that one row lacks differs too
    for name in dict.fromkeys(key for row in stored for key in row.settings):
        settings.append(Differing(name, {row.label: row.settings.get(name) for row in stored}))
    for name in dict.fromkeys(key for row in rows for key in row.versions):
        values = {row.label: row.versions[name] for row in rows if name in row.versions}
        settings.append(Differing(f"version of {name}", values))
    return [d for d in settings if len({str(v) for v in d.values.values()}) > 1]


def _changed_settings(row: Row, other: Row) -> list[str]:
    """Names of the recipe settings that differ, if both rows store them."""
    if not row.settings or not other.settings:
        return []
    names = sorted(row.settings.keys() | other.settings.keys())
    return [k for k in names if str(row.settings.get(k)) != str(other.settings.get(k))]


def _computes_otherwise(row: Row, other: Row, seeds: tuple[int | None, int | None]) -> list[Fact]:
    """Why the losses of two rows, from runs with these `seeds`, need not be equal."""
    names = ("batch", "replicas", "precision", "data", "framework")
    pairs = [(name, getattr(row, name), getattr(other, name)) for name in names]
    pairs.append(("seed", *seeds))
    why = [fact("another-value", name=n, a=a, b=b) for n, a, b in pairs if None not in (a, b) and a != b]
    changed = _changed_settings(row, other)
    return why + ([fact("other-settings", settings=changed)] if changed else [])


# ---- the losses


@dataclass(frozen=True)
class Agreement:
    """The comparison of the losses of `label` with those of `against`.

    *Fields:* `status`: one of the constants; `same`: whether both are known to compute the same thing;
    `steps`: the last step compared; `first_bits`: the first step at which bits differ; `parts`: the first
    step above the bound; `within`: the largest relative difference before it; `fact`: the verdict.
    """

    label: str
    against: str
    status: str
    fact: Fact
    same: bool = False
    steps: int = 0
    first_bits: int | None = None
    parts: int | None = None
    within: float | None = None


def agreement(row: Row, other: Row) -> Agreement:
    """The agreement of two measured rows, from repeats with the same seed."""
    rows: dict[str, Any] = {"label": row.label, "against": other.label}

    def unknown(why: Fact) -> Agreement:
        return Agreement(**rows, status=UNKNOWN, fact=fact("losses-unknown", **rows, why=[why]))

    if other_kind := next((r.kind for r in (row, other) if r.kind != MEASURED), None):
        return unknown(fact("kind-without-losses", kind=other_kind))
    pairs = [(a, b) for a in row.repeats for b in other.repeats if a.losses and b.losses]
    if not pairs:
        silent = [r.label for r in (row, other) if not any(m.losses for m in r.repeats)]
        return unknown(fact("no-losses", labels=silent))
    a, b = next(((a, b) for a, b in pairs if a.seed == b.seed), pairs[0])
    met = meet(a.losses, b.losses)
    if not met:
        return unknown(fact("no-step-in-common"))
    why = _computes_otherwise(row, other, (a.seed, b.seed))
    bits = next((m.step for m in met if m.direct and m.a != m.b), None)
    parts, within = parting(met, _allowed(row, other))
    earliest, steps = met[0].step, met[-1].step
    found: dict[str, Any] = {**rows, "steps": steps, "first_bits": bits, "parts": parts, "within": within}
    if parts is not None and parts <= max(KNOWN, earliest):
        m = next(m for m in met if m.step == parts)
        why += [fact("first-loss-too-late", step=earliest)] if earliest > KNOWN else []
        status, code = (UNKNOWN, "losses-not-comparable") if why else (PART, "losses-part")
        verdict = fact(code, **rows, step=parts, a=m.a, b=m.b, before=_before(within), why=why)
        return Agreement(**found, status=status, fact=verdict)
    # With a warm-up from 0 the first losses do not depend on the rate; and few steps show little
    but = [fact("although", why=why)] if why else []
    but += [fact("too-few-steps", least=KNOWN)] if steps < KNOWN else []
    differ = [] if bits is None else [fact("bits-differ-at", step=bits)]
    status = SAME_BITS if all(m.direct and m.a == m.b for m in met) else AGREE
    if status == SAME_BITS:
        verdict = fact("losses-equal", **rows, over=_over(met), but=but)
    elif parts is None:
        verdict = fact("losses-agree", **rows, within=within, over=_over(met), bits=differ, but=but)
    else:
        numbers = {"within": within, "until": parts - 1, "bits": differ, "but": but}
        verdict = fact("losses-agree-then-part", **rows, **numbers)
    same = steps >= KNOWN and not _changed_settings(row, other)
    return Agreement(**found, status=status, same=same, fact=verdict)


@dataclass(frozen=True)
class Met:
    """The losses of two rows at one step, or their means up to it; not `direct` if one was averaged here."""

    step: int
    a: float
    b: float
    direct: bool = True


def meet(a: Sequence[Window], b: Sequence[Window]) -> list[Met]:
    """The steps for which both have a loss, or a mean over the same steps.

    A run that logged every tenth step is compared with a record's means over ten steps.
    """
    meetings: dict[int, Met] = {}
    for wide, fine, turned in ((a, b, False), (b, a, True)):
        by_first = {w.first: w for w in fine}
        for window in wide:
            parts, at = [], window.first
            while at in by_first and by_first[at].last <= window.last:
                parts.append(by_first[at])
                at = parts[-1].last + 1
            if at != window.last + 1:
                continue
            mean = parts[0].loss
            if len(parts) > 1:
                mean = math.fsum(p.loss * (p.last - p.first + 1) for p in parts) / (at - window.first)
            pair = (mean, window.loss) if turned else (window.loss, mean)
            meetings[window.last] = Met(window.last, *pair, direct=len(parts) == 1)
    return [meetings[step] for step in sorted(meetings)]


def parting(met: Sequence[Met], allowed: tuple[float, float]) -> tuple[int | None, float | None]:
    """The first step with a relative difference above the bound, and the largest difference before it."""
    start, most = allowed
    within = None
    for m in met:
        scale = max(abs(m.a), abs(m.b))
        apart = abs(m.a - m.b) / scale if scale else 0.0
        if apart > min(most, start * 10.0 ** min(max(m.step - 2, 0), 30)):
            return m.step, within
        within = max(apart, within or 0.0)
    return None, within


def _allowed(row: Row, other: Row) -> tuple[float, float]:
    """The bounds of the coarser of two precisions; an unknown one counts as half precision."""
    return max(ALLOWED.get(p or "f32", ALLOWED["bf16"]) for p in (row.precision, other.precision))


def _over(met: Sequence[Met]) -> Fact:
    n, last = len(met), met[-1].step
    return fact("first-steps", n=n) if n == last else fact("logged-means", n=n, last=last)


def _before(within: float | None) -> list[Fact]:
    if within is None:
        return []
    return [fact("agree-before", within=within) if within else fact("equal-before")]
