"""Writes the summary and the rows of `plan_accuracy.md`, and `plan_accuracy.svg`, from the answers."""

from __future__ import annotations

import collections
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chipwise.explain.charts import Panel, Trace
from chipwise.explain.page import picture

from .rows import Row

SHARE = 0.4  # of the peak, in the rule of thumb
PROGRAMS = {
    "xla": "XLA's own kernels",
    "library": "a framework that calls vendors' libraries",
    "kernels": "hand-written attention or layers",
}


@dataclass(frozen=True)
class Prediction:
    """A row and the answer to it."""

    row: Row
    answer: dict[str, Any]

    @property
    def training(self) -> float:
        """The share of the steps in what the clock covered, by the plan of the run."""
        run = self.answer["run"]
        return run["train"] / sum(run[part] for part in self.row.covered)

    @property
    def throughput(self) -> tuple[float, float, float]:
        """What the clock would show, and the ends of its interval: examples a second of all chips."""
        value, low, high = (self.answer[name] * self.training for name in ("value", "low", "high"))
        return value, low, high

    @property
    def ratio(self) -> float:
        """Predicted over measured."""
        return self.throughput[0] / self.row.measured

    @property
    def inside(self) -> bool:
        _, low, high = self.throughput
        return low <= self.row.measured <= high

    @property
    def rule(self) -> float | None:
        """The rule of thumb over measured, if the chip has a stated peak for the precision."""
        chip = self.row.target.chip
        tflops = {
            "bf16": chip.bf16_dense_tflops,
            "f16": chip.fp16_dense_tflops,
            "tf32": chip.tf32_dense_tflops or chip.fp32_tflops,
            "f32": chip.fp32_tflops,
        }[self.row.values["precision"]]
        if not tflops:
            return None
        step = self.answer["flops"] / (SHARE * tflops * 1e12 / chip.jax_devices_per_chip)
        return self.row.seconds / step


def error(ratio: float) -> float:
    return max(ratio, 1 / ratio) - 1


def predictions(rows: Sequence[Row], answers: dict[int, dict[str, Any]]) -> list[Prediction]:
    """Of the rows that have one."""
    return [Prediction(row, answers[row.row]) for row in rows if "value" in answers.get(row.row, {})]


def write(folder: Path, rows: Sequence[Row], answers: dict[int, dict[str, Any]]) -> None:
    """Draws the picture, and writes the page's summary and rows anew, between the marks; the rest stays."""
    known = predictions(rows, answers)
    if known:
        (folder / "plan_accuracy.svg").write_text(scatter(known), encoding="utf-8")
    lines = []
    for use, title in (("held-out", "Held-out rows"), ("fit", "Rows that may be fitted")):
        for chips in ("TPU", "GPU"):
            some = [p for p in known if p.row.use == use and p.row.chips == chips]
            lines += [f"## {title}, {chips}", "", *(_table(some) if some else ["None has run yet."]), ""]
    without = [r for r in rows if r.use != "apart" and "value" not in answers.get(r.row, {})]
    lines += ["## Rows without a prediction", "", *_listed(without, answers), "", *_apart(rows)]
    page = folder / "plan_accuracy.md"
    text = page.read_text(encoding="utf-8")
    for mark, part in (("summary", _summaries(known)), ("rows", lines)):
        before, _, rest = text.partition(f"<!-- {mark} -->")
        text = "\n".join([f"{before}<!-- {mark} -->", "", *part, "", f"<!-- end of {mark} -->"])
        text += rest.partition(f"<!-- end of {mark} -->")[2]
    page.write_text(text, encoding="utf-8")


def _summaries(known: Sequence[Prediction]) -> list[str]:
    held_out = [p for p in known if p.row.use == "held-out"]
    inside = sum(p.inside for p in held_out)
    lines = [
        f"**{inside} of {len(held_out)} held-out measurements are inside the 90 % interval of their plan. "
        f"The median error is {_errors(p.ratio for p in held_out)[0]}.** 25 % means 1.25 times too fast or "
        "too slow.",
        "",
        *_grouped("chip", known, lambda p: p.row.target.chip.name),
        *_grouped("kind of program", known, lambda p: PROGRAMS[p.row.program]),
        *_grouped("kind of net", known, lambda p: p.row.family),
        "### Beside a rule of thumb",
        "",
        "| rows | number | predicted / measured, median | error, median | error, 90th percentile | inside "
        "| error of the rule, median | 90th percentile |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for use in ("held-out", "fit"):
        for chips in ("TPU", "GPU"):
            some = [p for p in known if p.row.use == use and p.row.chips == chips]
            lines += _summary(f"**{use}, {chips}**", some)
            clocked = [p for p in some if p.row.clock == "steps"]
            if 0 < len(clocked) < len(some):
                lines += _summary(f"{use}, {chips}, steps alone timed", clocked)
            for program in ("xla", "library", "kernels"):
                part = [p for p in some if p.row.program == program]
                if 0 < len(part) < len(some):
                    lines += _summary(f"{use}, {chips}, {program}", part)
    return lines


def _grouped(title: str, known: Sequence[Prediction], key: Callable[[Prediction], str]) -> list[str]:
    """A table: for each group its held-out rows, then those that may be fitted."""
    each = "rows | predicted / measured, median | error, median | inside"
    lines = [f"| {title} | held-out {each} | fit {each} |", f"|---{'|---' * 8}|"]
    groups: dict[str, dict[str, list[Prediction]]] = {}
    for p in known:
        groups.setdefault(key(p), {"held-out": [], "fit": []})[p.row.use].append(p)
    for name, uses in sorted(groups.items(), key=lambda group: -len(group[1]["held-out"])):
        lines.append("| " + " | ".join([name, *_brief(uses["held-out"]), *_brief(uses["fit"])]) + " |")
    return [*lines, ""]


def _brief(some: Sequence[Prediction]) -> list[str]:
    if not some:
        return ["0", "-", "-", "-"]
    middle = statistics.median(p.ratio for p in some)
    inside = sum(p.inside for p in some)
    return [str(len(some)), f"{middle:.2f}", _errors(p.ratio for p in some)[0], f"{inside} of {len(some)}"]


def _summary(name: str, some: Sequence[Prediction]) -> list[str]:
    if not some:
        return []
    inside = statistics.mean(p.inside for p in some)
    middle = statistics.median(p.ratio for p in some)
    rules = _errors(p.rule for p in some if p.rule)
    cells = [name, str(len(some)), f"{middle:.2f}", *_errors(p.ratio for p in some), f"{inside:.0%}", *rules]
    return ["| " + " | ".join(cells) + " |"]


def _errors(ratios: Iterable[float]) -> tuple[str, str]:
    """Their median and 90th percentile."""
    off = sorted(map(error, ratios))
    if not off:
        return "-", "-"
    return f"{statistics.median(off):.0%}", f"{off[min(len(off) - 1, int(0.9 * len(off)))]:.0%}"


def _table(some: Sequence[Prediction]) -> list[str]:
    lines = [
        "| row | net | measured | predicted | predicted / measured | interval | inside "
        "| rule / measured | program | clock | command |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for p in some:
        row, (value, low, high) = p.row, p.throughput
        rule = "-" if p.rule is None else f"{p.rule:.2f}"
        lines.append(
            f"| [{row.row}]({_link(row)}) | {row.model} | {row.measured:,.4g} | {value:,.4g} "
            f"| {p.ratio:.2f} | {low:,.4g} to {high:,.4g} "
            f"| {'yes' if p.inside else '**no**'} | {rule} | {row.program} | {row.clock} "
            f"| `{row.command}` |"
        )
    return lines


def _link(row: Row) -> str:
    return row.source.split()[0].split("@")[0]


def _listed(rows: Sequence[Row], answers: dict[int, dict[str, Any]]) -> list[str]:
    if not rows:
        return ["Every row has one."]
    lines = ["| row | net | use | why | command |", "|---|---|---|---|---|"]
    for r in rows:
        why = answers.get(r.row, {}).get("text", "not run yet")
        lines.append(f"| {r.row} | {r.model} | {r.use} | {why} | `{r.command}` |")
    return lines


def _apart(rows: Sequence[Row]) -> list[str]:
    reasons = collections.defaultdict(list)
    for row in rows:
        if row.use == "apart":
            reasons[row.apart].append(f"{row.row} ({row.model}, {row.device})")
    lines = ["## Rows apart", "", "| reason | rows |", "|---|---|"]
    return lines + [f"| {reason} | {'; '.join(some)} |" for reason, some in reasons.items()]


def scatter(known: Sequence[Prediction]) -> str:
    """An SVG of predicted over measured for each row, and the rule of thumb, over the measured examples/s."""

    def dots(name: str, style: str, points: Iterable[tuple[float, float]]) -> Trace:
        return Trace(name, f"{style} dots", sorted(points))

    kinds = [("GPU", "fit", "s3"), ("TPU", "fit", "s2"), ("GPU", "held-out", "s1"), ("TPU", "held-out", "s0")]
    curves = [dots("40 % of the peak", "s5", [(p.row.measured, p.rule) for p in known if p.rule])]
    for chips, use, style in kinds:
        some = [p for p in known if (p.row.chips, p.row.use) == (chips, use)]
        curves.append(dots(f"{chips}, {use}", style, [(p.row.measured, p.ratio) for p in some]))
    drawn = Panel(
        "predicted / measured", curves, x="measured examples/s", x_log=True, y_log=True, level=1.0,
        level_words="equal",
    )  # fmt: skip
    return picture(drawn, (560, 300))
