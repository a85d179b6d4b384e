"""Do two rows compute the same thing? Their first losses, before anyone looks at speeds.

Two devices, or two ways of adding up, round differently: their losses differ in the last bits, and training
amplifies that, by ten times a step where the rate is high and the net still wild. (JAX against PyTorch,
ResNet-32 at rate 0.1 from the first step on: relative 1e-7, 1e-7, 1e-5, 5e-5, 3e-4.) A *mistake*, another
initial value, rate or decay, shows at once and far above rounding: the second loss has seen a whole update,
the third one its momentum. So the first two losses must agree as far as rounding goes, what is allowed then
grows tenfold a step, up to what one would still call the same loss. Rows that agree for `KNOWN` steps compute
the same thing; where they part later, rounding has been amplified.

That losses come before speeds is AlgoPerf's idea (its test `traindiffs`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ...words.facts import Fact, fact
from ..rows import MEASURED, Row, Window
from .differences import changed_settings, computes_otherwise

SAME_BITS, AGREE, PART, UNKNOWN = "equal to the bit", "agree", "part", "not known"
KNOWN = 4  # steps: every part of an update has reached the loss by then, momentum too
# by precision, relative: what rounding may do to the first two losses, and what is still the same loss later
ALLOWED = {"f32": (1e-5, 1e-3), "tf32": (5e-4, 5e-3), "bf16": (5e-3, 2e-2)}


@dataclass(frozen=True)
class Agreement:
    """What the losses of `label` say beside those of `against`.

    *Fields:* `status`, one of the constants; `same`, whether both are known to compute the same thing;
    `steps`, the last step compared; `first_bits`, the first step of which the bits differ; `parts`, the first
    step beyond what is allowed; `within`, the largest relative difference before that; `fact`, all that.
    """

    label: str
    against: str
    status: str
    same: bool
    steps: int
    first_bits: int | None
    parts: int | None
    within: float | None
    fact: Fact


def agreement(row: Row, other: Row) -> Agreement:
    """Of two measured rows, by the repeats of one seed."""
    rows = {"label": row.label, "against": other.label}

    def unknown(why: Fact) -> Agreement:
        said = fact("losses-unknown", **rows, why=[why])
        return Agreement(row.label, other.label, UNKNOWN, False, 0, None, None, None, said)

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
    why = computes_otherwise(row, other)
    if a.seed is not None and b.seed is not None and a.seed != b.seed:
        why.append(fact("another-value", name="seed", a=a.seed, b=b.seed))
    bits = next((m.step for m in met if m.direct and m.a != m.b), None)
    parts, within = parting(met, _allowed(row, other))
    earliest, steps = met[0].step, met[-1].step
    first_bits = [] if bits is None else [fact("bits-differ-at", step=bits)]
    facts: dict[str, Any]
    if all(m.direct and m.a == m.b for m in met):
        status, code, facts = SAME_BITS, "losses-equal", {"over": _over(met)}
    elif parts is None:
        status, code, facts = (
            AGREE,
            "losses-agree",
            {"within": within, "over": _over(met), "bits": first_bits},
        )
    elif parts > max(KNOWN, earliest):
        status, code = AGREE, "losses-agree-then-part"
        facts = {"within": within, "until": parts - 1, "bits": first_bits}
    else:
        m = next(m for m in met if m.step == parts)
        facts = {"step": parts, "a": m.a, "b": m.b, "before": _before(within)}
        if earliest > KNOWN:
            why.append(fact("first-loss-too-late", step=earliest))
        status, code = (UNKNOWN, "losses-not-comparable") if why else (PART, "losses-part")
        facts |= {"why": why} if why else {}
    alike = status in (SAME_BITS, AGREE)
    but = [fact("although", why=why)] if alike and why else []
    # With a warm-up from 0 the first losses do not depend on the rate; and few steps show little
    but += [fact("too-few-steps", least=KNOWN)] if alike and steps < KNOWN else []
    facts |= {"but": but} if alike else {}
    same = alike and steps >= KNOWN and not changed_settings(row, other)
    return Agreement(
        row.label, other.label, status, same, steps, bits, parts, within, fact(code, **rows, **facts)
    )


@dataclass(frozen=True)
class Met:
    """The loss of two rows at one step, or the mean up to it; not `direct` where one was averaged here."""

    step: int
    a: float
    b: float
    direct: bool = True


def meet(a: Sequence[Window], b: Sequence[Window]) -> list[Met]:
    """Where both know the mean loss of the same steps.

    A run that logged every tenth step meets a record of every step by the record's mean over ten.
    """
    found: dict[int, Met] = {}
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
            found[window.last] = Met(window.last, *pair, direct=len(parts) == 1)
    return [found[step] for step in sorted(found)]


def parting(met: Sequence[Met], allowed: tuple[float, float]) -> tuple[int | None, float | None]:
    """The first step of which the relative difference is more than allowed, and the largest before it."""
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
    """Of the coarser of two precisions; what has no name here is taken for half precision."""
    return max(ALLOWED.get(p or "f32", ALLOWED["bf16"]) for p in (row.precision, other.precision))


def _over(met: Sequence[Met]) -> Fact:
    n, last = len(met), met[-1].step
    return fact("first-steps", n=n) if n == last else fact("logged-means", n=n, last=last)


def _before(within: float | None) -> list[Fact]:
    if within is None:
        return []
    return [fact("agree-before", within=within) if within else fact("equal-before")]
