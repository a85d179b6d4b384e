"""Writes `plan_accuracy.md` and `plan_accuracy.svg` from the rows and the answers."""

from __future__ import annotations

import collections
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chipwise.explain.charts import Panel, Trace
from chipwise.explain.page import picture

from .rows import Row

SHARE = 0.4  # of the peak, in the rule of thumb

INTRODUCTION = """# Plans against published measurements

`python -m benchmarks.plan_accuracy` writes this page. Each row of `published.csv` is a published training
throughput with its source, and a recipe on a target. The prediction comes from the command beside it.
Throughputs are of all chips, in images or sequences a second.

* **Held-out** rows are never used in a fit, neither of efficiencies nor of intervals. **Fit** rows may be.
  All rows of a family of nets from one source are in the same group, which the file states.
* No number of a TPU's step is fitted to a row. Kernels that memory bounds are timed by the copy speeds that
  Google published for a 7x and a v6e, all others by the compiler's cycles. This was introduced, first for
  kernels that only move data and then also for products with few operations for their bytes, because held-out
  rows of v4 were predicted too slow. That a product reaches half of the peak, if memory does not bound it,
  was chosen once.
* Where held-out GPU rows showed errors, the correction is physics or a published figure, fitted to fit rows
  or cited: the rate of products on each chip (a T4's power limit), depthwise convolutions by the rate at
  which a multiprocessor loads operands, cuDNN's Winograd for 3 x 3, NCCL's rings through all cards of a host.
  Chosen, not measured, are tiles, 80 % of the peak on chips without measurements, the factors for launches,
  networks and GPUs without matrix units, and that a row of XLA's own program weighs more in the fit.
* The error of row 168 showed that kernels that convert the parameters and then take a slice counted all of
  them as read, up to a third of the time of a net of many layers in half precision. They count the slice now,
  and the efficiencies are fitted again. Before, with the same recipes, the medians of predicted / measured
  and of the error on held-out rows were 1.09 and 21 %.
* Recipes follow their source as far as it is known. Rows 57 and 154 use its plain attention. BERT and T5 use
  plain attention with separate kernels for queries, keys and values; on TPUs BERT's attention has the form of
  Google's program.
  EfficientNet has SGD, not its sources' RMSprop and average of the weights (an update is 0.1 % of a step),
  and neither dropout nor mixup.
* T5 (rows 151, 152) was changed after its error was seen: its source has AdamW, not Adafactor, layers one
  after another, and logits in float32. Before, the ratios were 0.71 and 0.57. Later it got the source's loss
  with a gradient of its own, accuracy, masks of padding and scaled queries, and in the small net dropout, to
  which almost all of the change is due. Before, the ratios were 1.17 and 0.92.
* BERT on TPUs was changed after its errors were seen: as in Google's program, its layers follow one another,
  a tenth is dropped by the core's generator, and LAMB's state is sharded. Before, the layers were a loop that
  computed much of them again, nothing was dropped, and LAMB ran whole on each TPU. The ratios of rows 174,
  237, 238 and 239 were 0.74, 0.84, 0.76 and 0.58.
* BERT on GPUs was changed in the same way, with the details of each source (`recipes/text.py`, `FORMS`), and
  the efficiencies are fitted again, to the fit rows of that form. Before, the ratios of rows 134, 142, 148,
  149, 150 and 168 were 1.21, 1.36, 1.04, 1.07, 0.88 and 0.93. Row 150 adds up 1,024 micro-batches and is
  planned with 64, since chipwise keeps a sum for each level of the tree. Rows 221 and 223 ran, but do not fit
  as a plan, by 3 and 1 % of the memory; they count in the fit.
* LARS shards its state, like LAMB (`cw.recipe.lars`), as Google's programs do (Xu et al., 2020,
  arXiv:2004.13336). With optax's, whole on each chip, rows 37, 139, 175, 228 to 231, 234 and 235 were at
  1.07, 0.87, 0.89, 1.00, 1.00, 1.04, 0.98, 0.98 and 0.92.
* Row 99 (Llama 3.1 70B on 256 chips of 7x) became a recipe when `cw.models.remat` could keep values by name,
  and was held-out before it was asked.
* Row 138 was predicted at 0.58 and is apart now: its source sorts sequences into buckets of lengths.
* Row 178 (torchtitan) was changed after its error was seen: of a block it saves attention's output and every
  second product, those of queries, values, the gate and the last. Before, it was planned with all saved,
  and the ratio was 1.17.
* Over several hosts of GPUs, and on TPUs where each has one replica, the sums are in any order
  (`--no-exact`), as in the measured programs.
* Rows 228 to 239, from MLPerf 0.6 and 0.7, were added as held-out when the prediction of row 36, the same net
  on the same v3-32, was known. They are all ResNet-50 and BERT runs published there on up to 256 TPUs.
  MLPerf's ResNet-50 on v4 folds 2 x 2 pixels into channels, and so do rows 139, 175 and 235.
* Rows 240 to 249 (TPUs, for the interval) and 250 to 257 (GPUs, held-out) were chosen before one of them was
  planned: what a search found in public that can be written as a recipe. Rows 245 and 246 were first planned
  as `llama-8b` with their sizes, a loop over blocks that saves everything, at 0.33 and 0.52. They are written
  as their source now: blocks one after another, in bfloat16.
* Rows 258 and 259 are the other TPU rows of row 43's table, added before they were planned.
* Rows 245 and 246 showed that splash attention had no time where a net calls it itself, that on TPUs all
  parameters were rounded and reshaped once for each shape before one was sliced, and that a replica's sum was
  copied in a loop. The first was corrected in plans, the others in the programs that train. Before that, rows
  245 and 246 as they are now were at 0.53 and 0.58. Steps of the other TPU rows became 0 to 10 % faster.
* MaxText's decoders make arrays of heads in one product each, as their source does, and so does `llama-8b` on
  TPUs before the 7x. Before, libtpu copied queries, keys and values, and rows 77, 79, 84, 85, 242, 243, 244,
  248 and 249 were at 0.99, 0.88, 0.91, 0.75, 1.16, 1.06, 1.12, 1.23 and 1.09.
* Where the optimizer's state is sharded, plans compiled another sum than the one that training runs: all of
  it on each device. They compile the scatter and the gathering now. libtpu scatters by adding up whole
  arrays, and on large slices gathers so too, so rows 174, 237, 238 and 239 (BERT-Large) fell from 0.89,
  1.08, 0.83 and 0.88, rows 139 and 175 from 0.93 and 0.92, and rows 228 to 231 from 1.08, 1.07, 1.11 and
  1.09. All held-out TPU rows had a median error of 11 % before both changes. Of the GPU rows with several
  devices those over several hosts and nine others were asked again: within a host a throughput changed by
  less than 0.1 %.
* Splash attention took half the speed of a program's other products, an assumption. It takes the cycles of
  the code that libtpu schedules for its kernels (`benchmarks/splash.md`), to which no row was fitted. Where a
  device has one sequence, as in row 248, it had no time at all. Its blocks have 1,024 positions for sequences
  of 4,096 and more now, where they had 512. Before, rows 79, 84, 85, 99 and 132 were at 0.98, 0.95, 0.78,
  0.82 and 1.27, rows 242 to 246, 248 and 249 at 1.24, 1.06, 1.13, 0.63, 0.75, 1.25 and 1.13.
* Rows 251 to 254, 256 and 257 were written again after their errors were seen, from the code of their sources
  (`recipes/alpa.py`, `recipes/vits.py`, form `keras` of BERT). Before, they had chipwise's own blocks in a
  loop, which compute parts again, and rows 256 and 257 no dropout; the ratios were 1.15, 0.79, 0.91, 1.22,
  0.91 and 1.18, and the median error of XLA's own programs was 12 %. Row 257 is far outside now: it is the
  same program as row 256 on a faster card, and its source decodes images on the host's processors. Row 253
  did not fit in this form while plans counted the whole sum.
* **Inside**: the measurement is in the stated 90 % interval. For GPUs that interval comes from nets and
  sources left out of the fit; for new generations of chips, also from generations left out.
* **Rule**: a throughput of 40 % of the chip's peak, for the FLOPs of the same recipe.
* **XLA**: XLA's cost analysis of the same compiled programs (`cost_analysis`), which exists for TPUs and
  counts the body of a loop once.
* **Error** is a factor minus one: 25 % means 1.25 times too fast, or too slow.
* **Clock** is what the measurement covered, and so what is predicted: **steps**; steps and **evaluation**;
  the whole **run** with start-up and compilation. The parts are those of the plan, with evaluations as often
  as the source states (`--eval-every`): every 4 epochs in MLPerf's logs of ResNet-50, at the end alone in
  Haiku's program. Otherwise there is one after each epoch. Before, all rows had that, and were up to 1 %
  slower. **Wall** clocks covered more than steps, but what is not stated: there a correct prediction of
  the steps is above the measurement. Rows whose steps alone were timed have a separate line.
* The kernels of the measured program: **xla** is XLA's own, **library** a framework that calls vendors'
  libraries operation by operation, **kernels** hand-written attention or layers.
* MaxText's decoders of 2023 (rows 77 to 85) are planned as one replica on a group of all chips. On v5p the
  source also cuts products over 4 chips. Rows 80 and 81 ran, but do not fit as a plan: chipwise's program
  gathers a whole block and adds its gradients in float32.
* Rows **apart** are programs that cannot be recipes, or were not written as one. They are not in the
  summaries.
"""


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

    @property
    def xla(self) -> float | None:
        """XLA's own estimate over measured."""
        return self.answer["xla"] / self.row.measured if "xla" in self.answer else None


def error(ratio: float) -> float:
    return max(ratio, 1 / ratio) - 1


def write(folder: Path, rows: Sequence[Row], answers: dict[int, dict[str, Any]]) -> None:
    """Writes both files."""
    known = [Prediction(r, answers[r.row]) for r in rows if "value" in answers.get(r.row, {})]
    lines = [INTRODUCTION, "## In short", "", *_summaries(known), ""]
    if known:
        lines += ["![predicted against measured](plan_accuracy.svg)", ""]
        scatter(folder / "plan_accuracy.svg", known)
    for use, title in (("held-out", "Held-out rows"), ("fit", "Rows that may be fitted")):
        for chips in ("TPU", "GPU"):
            some = [p for p in known if p.row.use == use and p.row.chips == chips]
            lines += [f"## {title}, {chips}", "", *(_table(some) if some else ["None has run yet."]), ""]
    without = [r for r in rows if r.use != "apart" and "value" not in answers.get(r.row, {})]
    lines += ["## Rows without a prediction", "", *_listed(without, answers), "", *_apart(rows)]
    (folder / "plan_accuracy.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _summaries(known: Sequence[Prediction]) -> list[str]:
    lines = [
        "| rows | number | predicted / measured, median | error, median | error, 90th percentile | inside "
        "| error of the rule, median | 90th percentile | error of XLA, median | 90th percentile |",
        "|---|---|---|---|---|---|---|---|---|---|",
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


def _summary(name: str, some: Sequence[Prediction]) -> list[str]:
    if not some:
        return []
    inside = statistics.mean(p.inside for p in some)
    middle = statistics.median(p.ratio for p in some)
    rules = _errors(p.rule for p in some if p.rule)
    cells = [name, str(len(some)), f"{middle:.2f}", *_errors(p.ratio for p in some), f"{inside:.0%}", *rules]
    cells += _errors(p.xla for p in some if p.xla)
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
        "| rule, XLA / measured | program | clock | command |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for p in some:
        row, (value, low, high) = p.row, p.throughput
        others = ", ".join("-" if ratio is None else f"{ratio:.2f}" for ratio in (p.rule, p.xla))
        lines.append(
            f"| [{row.row}]({_link(row)}) | {row.model} | {row.measured:,.4g} | {value:,.4g} "
            f"| {p.ratio:.2f} | {low:,.4g} to {high:,.4g} "
            f"| {'yes' if p.inside else '**no**'} | {others} | {row.program} | {row.clock} "
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


def scatter(path: Path, known: Sequence[Prediction]) -> None:
    """Draws predicted over measured for each row, and the rule of thumb, over the measured examples/s."""

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
    path.write_text(picture([drawn]), encoding="utf-8")
