"""What a step of `examples/gpt2_track3.py` takes, planned for absent GPUs, beside the track's own logs.

    python benchmarks/track3.py        # writes benchmarks/track3.md, in some minutes; needs chipwise[plan]

The published times are those of files of github.com/KellerJordan/modded-nanogpt at f411b3d3,
`records/track_3_optimization/results`: the training time between the logged steps FIRST and the last, over
the steps between them. By their clock validation is left out, and so is most of the compilation, which is in
the first steps.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import jax

import chipwise as cw

EXAMPLE = Path(__file__).parents[1] / "examples" / "gpt2_track3.py"
TARGETS = ("h100", "h100:8", "h200", "h200:8", "a100-80gb", "a100-80gb:8")
FIRST = 125


class Log(NamedTuple):
    target: str
    what: str
    file: str
    steps: int
    at_first: float
    """Seconds of training at the step FIRST."""
    at_last: float
    """The same at the last step."""

    @property
    def milliseconds(self) -> float:
        return 1e3 * (self.at_last - self.at_first) / (self.steps - FIRST)


LOGS = (
    Log("h100:8", "Muon, row 36", "20260610_tuned_baseline_3250/263ea3c4", 3250, 21.243, 503.169),
    Log("h100:8", "Muon, row 12", "1bd8db7a", 3350, 22.870, 492.485),
    Log("h100:8", "Muon, row 6 (CUDA 13)", "51ece938", 3375, 60.070, 494.108),
    Log("h200:8", "NorMuon, row 10", "20260503_normuon/e0d0185f", 3300, 23.180, 475.241),
    Log("h200", "Muon without momentum, row 22", "20260517_ortho/d5098d67", 8500, 137.467, 9085.461),
    Log("a100-80gb:8", "EMA-Nesterov, row 39", "20260522_ema_nesterov_muon/4d9e83d4", 3150, 46.854, 1106.646),
    Log("unknown:8", "AdamW, row 2; its log does not name the GPUs", "a63a68d1", 5625, 20.672, 833.211),
)  # fmt: skip


def main() -> None:
    lines = [
        "# Track 3: a planned step beside published ones",
        "",
        "`python benchmarks/track3.py`: `examples/gpt2_track3.py`, a step of 524,288 tokens in milliseconds, "
        f"planned by the compilers of JAX {jax.__version__} for GPUs that were not there, with the 90 % "
        "interval. No GPU has run this recipe. On several devices each updates a part of the matrices.",
        "",
        "Published: modded-nanogpt's own PyTorch program, by its logs "
        f"(`records/track_3_optimization/results` at f411b3d3) from step {FIRST} to the last, without "
        "validation. Net, data and batch are the same, the optimizers are those of the rows of its table.",
        "",
        "| GPUs | planned, Muon | planned, AdamW | GB of a device | published |",
        "|---|---|---|---|---|",
    ]
    planned = {}
    for optimizer, steps in (("muon", 3250), ("adamw", 5625)):
        recipe = cw.load(f"{EXAMPLE}:recipe", [f"optimizer={optimizer}", f"steps={steps}"])
        planned[optimizer] = cw.plan(recipe, on=TARGETS)
    for target, muon, adamw in zip(TARGETS, planned["muon"], planned["adamw"], strict=True):
        logs = [f"{log.milliseconds:,.0f} ({log.what})" for log in LOGS if log.target == target]
        cells = [
            target,
            *map(interval, (muon, adamw)),
            f"{muon.memory.needed / 1e9:.0f}",
            "; ".join(logs) or "-",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "Logs, by the first letters of their names:", ""]
    lines += [f"* {log.what}: `{log.file}`, {log.steps:,} steps, {log.milliseconds:,.1f} ms" for log in LOGS]
    Path(__file__).with_suffix(".md").write_text("\n".join(lines) + "\n")


def interval(plan) -> str:
    step = plan.step_seconds
    return f"{1e3 * step.value:,.0f} ({1e3 * step.low:,.0f} to {1e3 * step.high:,.0f})"


if __name__ == "__main__":
    main()
