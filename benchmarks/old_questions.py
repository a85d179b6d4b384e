"""Questions about chips from 2018 and 2019, answered by plans.

python benchmarks/old_questions.py

Prints and writes `old_questions.md`: what was measured then, what a plan predicts, and which chip is cheaper
at the prices of April 2018. The plans are of chipwise's own recipes on absent chips; nothing is fitted to
these figures.
"""

from __future__ import annotations

import datetime
from pathlib import Path

import chipwise as cw
from chipwise.chips.prices import current, load
from chipwise.planner.ranking import break_even

THEN = datetime.date(2018, 4, 30)


def speeds(name: str, on: str, *settings: str) -> float:
    """Examples/s of a recipe on one target."""
    (plan,) = cw.plan(cw.load(name, [*settings, "duration=1ep"]), on=[on])
    assert plan.examples_per_second is not None, plan.problem
    return plan.examples_per_second.value


def main() -> None:
    alone = ("replicas=1", "batch=128")
    k80 = speeds("cifar10-resnet32", "k80", *alone, "precision=f32")
    v100 = speeds("cifar10-resnet32", "v100", *alone, "precision=f32")
    v2 = speeds("cifar10-resnet32", "v2-1", *alone, "precision=bf16")
    t4 = speeds("cifar10-davidnet", "t4", "batch=512", "replicas=1", "precision=f32")
    board = speeds("cifar10-davidnet", "v2-8", "batch=512", "replicas=8", "precision=bf16")

    prices = {(p.chip, p.chips): p for p in current(load(), on=THEN)}
    tpu, gpu = prices["TPU v2", 4].usd_per_hour, prices["V100-SXM2", 1].usd_per_hour
    assert tpu is not None and gpu is not None
    ratio = break_even(tpu, gpu)

    rows = [
        ("ResNet-32, batch 128: V100 over K80, images/s", "5.6 to 6.3", v100 / k80),
        ("ResNet-32, batch 128: one TPU v2 core over V100", "about 2", v2 / v100),
        ("DavidNet, batch 512: T4 in float32, images/s", "2,230", t4),
        ("DavidNet, batch 512: TPU v2-8, images/s", "40,000", board),
        ("DavidNet: v2-8 over T4", "18", board / t4),
        ("April 2018: TPU v2-8 over V100, $ an hour", f"{tpu:.2f} / {gpu:.2f} = {ratio:.2f}", ratio),
        ("TPU over V100 per dollar, if the TPU is 2.0 times as fast", "0.94", 2.0 / ratio),
        ("TPU v2 (one core) over V100 per dollar, as planned", "0.94", v2 / v100 / ratio),
    ]
    lines = [
        "# Old questions",
        "",
        "`python benchmarks/old_questions.py`. *Measured* was published then: ResNet-32 in TensorFlow, April",
        "2018, read off curves, and Fenwicks' notebooks, 2019. *Planned* is a prediction for chipwise's own",
        "recipe on the same chip; on TPUs in bfloat16, one pass, as in TensorFlow then.",
        "",
        "| question | measured | planned |",
        "|---|---|---|",
        *(f"| {what} | {was} | {_short(now)} |" for what, was, now in rows),
        "",
        f"At {tpu:.2f} against {gpu:.2f} dollars an hour a TPU had to be {ratio:.2f} times faster.",
        "",
        "DavidNet agrees. ResNet-32 of 2018 does not: its V100 and K80 ran untuned TensorFlow with many",
        "small kernels, while a plan is for compiled code. And a K80 is predicted too fast.",
    ]
    print("\n".join(lines))
    (Path(__file__).parent / "old_questions.md").write_text("\n".join(lines) + "\n")


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.2f}"


if __name__ == "__main__":
    main()
