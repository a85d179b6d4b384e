"""Does a transferred recipe learn as well as the original, and an untransferred one less?

    python benchmarks/transfer.py --data DIR [--seeds 3] [--only mnist]

DIR has MNIST and CIFAR-10 (the original batches, an image folder, or a pack). It makes short runs of two
recipes: `mnist` for 6 epochs, from batch 256, and `cifar10-davidnet` at a quarter of its width in float32 for
1.25 epochs, from batch 128. Each runs at its batch, and at a fourth and four times of it, with `transfer` and
with only the batch changed. A replica always has 32 examples, so batch norm is the same and only the rules
are compared. The momentum of running statistics, which is in the model and which `transfer` cannot change, is
raised to the power that `chipwise transfer` names. The seeds alternate.

About 45 minutes on two idle CPU cores: 15 runs of some 90 s for each recipe (4,400 and 700 examples/s).
Runs are kept in `runs/transfer` and not repeated; one that was stopped is resumed. Writes `transfer.md`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import platform
import statistics
import sys
from pathlib import Path

import jax

import chipwise as cw
from chipwise.base.facts import fact
from chipwise.data.datasets import cifar10
from chipwise.machine.fingerprint import this_machine
from chipwise.study.stats import HIGHER, LOWER, Spread, paired

HERE = Path(__file__).parent
GROUP = 32  # examples per replica
ORIGINAL = "original"
VERDICTS = {HIGHER: "better", LOWER: "worse"}
RECIPES = {
    "mnist": ([], 256, "6ep", 0.99),
    "cifar10-davidnet": (["width=16", "precision=f32"], 128, "1.25ep", 0.9),
}
"""Name: (settings, the batch to start from, length of a run, momentum of batch norm's running statistics)."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", required=True)
    parser.add_argument("--seeds", type=int, default=3, choices=range(2, 11))
    parser.add_argument("--only", choices=RECIPES)
    parser.add_argument("--duration", help="of every run, for trying out; give --runs and --out with it")
    parser.add_argument("--runs", type=Path, default=Path("runs/transfer"))
    parser.add_argument("--out", type=Path, default=HERE / "transfer.md")
    arguments = parser.parse_args()
    # All batches of a recipe share the program of a replica, so it is compiled once.
    jax.config.update("jax_compilation_cache_dir", str(arguments.runs / "compiled"))
    found: dict[str, dict[str, list[dict]]] = {}
    for name in [arguments.only] if arguments.only else RECIPES:
        duration = arguments.duration or RECIPES[name][2]
        versions = variants(name, duration, arguments.data)
        found[name] = {title: [] for title in versions}
        for seed in range(arguments.seeds):
            for number, (title, (recipe, doubts)) in enumerate(versions.items()):
                run = arguments.runs / f"{name}-{duration}-{number}-seed{seed}"
                result = trained(dataclasses.replace(recipe, seed=seed), run)
                about = {"batch": recipe.batch, "shown": shown(recipe), "doubts": doubts}
                found[name][title].append({**result, **about})
                write(found, arguments)


def variants(name: str, duration: str, data: str) -> dict[str, tuple[cw.Recipe, tuple[str, ...]]]:
    """The original of a short run, and the same at a fourth and four times its batch, with and without
    transfer; and the limits that `transfer` names."""
    settings, batch, _, momentum = RECIPES[name]

    def short(k: float) -> cw.Recipe:
        built_in = cw.load(name, [*settings, f"bn_momentum={momentum**k:.6g}"], data)
        return cw.transfer(built_in, batch=batch, replicas=batch // GROUP, duration=duration).recipe

    original = short(1)
    made: dict[str, tuple[cw.Recipe, tuple[str, ...]]] = {ORIGINAL: (original, ())}
    for other in (batch // 4, batch * 4):
        moved = cw.transfer(short(other / batch), batch=other, replicas=other // GROUP)
        made[f"transferred to {other}"] = moved.recipe, tuple(moved.limits)
        alone = dataclasses.replace(original, batch=other, replicas=other // GROUP)
        made[f"only the batch, {other}"] = alone, ()
    return made


def trained(recipe: cw.Recipe, run: Path) -> dict:
    """The result of the run; finished runs are not repeated."""
    if not (run / "result.json").exists():
        cw.fit(recipe, run, eval_every=None, checkpoint_every="25%", progress="lines")
    return json.loads((run / "result.json").read_text())


def shown(recipe: cw.Recipe) -> str:
    """The numbers that a transfer may change, as text."""
    settings = recipe.optimizer.describe()
    names = [name for name in ("lr", "b1", "b2", "weight_decay") if name in settings]
    return ", ".join(f"{name} {settings[name]}" for name in names)


def write(found: dict[str, dict[str, list[dict]]], arguments: argparse.Namespace) -> None:
    """Writes the tables of the results so far."""
    here = this_machine()
    lines = [
        "# Transfer: accuracy at a fourth and at four times the batch",
        "",
        f"`python benchmarks/transfer.py`; {here.title}, JAX {jax.__version__}, Python "
        f"{platform.python_version()}, float32. {GROUP} examples per replica; all runs see equally many "
        "examples. Interval: 95 %, Student's t. To the original: in points, by pairs of one seed.",
    ]
    for name, versions in found.items():
        settings, _, duration, _ = RECIPES[name]
        seconds = [r["seconds"]["train"] for results in versions.values() for r in results]
        note = cifar10(arguments.data).note if name.startswith("cifar10") else ""
        lines += [
            "",
            f"## {' '.join([name, *settings])}, {arguments.duration or duration}",
            "",
            f"{note and note + '. '}{len(seconds)} runs, {statistics.median(seconds):.0f} s of training each "
            "(median).",
            "",
            "| | batch | steps | seeds | mean | interval | deviation | to the original | each |",
            "|---|---|---|---|---|---|---|---|---|",
        ]
        base = accuracies(versions[ORIGINAL])
        for title, results in versions.items():
            values = accuracies(results)
            if len(values) < 2:
                continue
            spread = Spread.of(values)
            low, high = max(spread.low, 0.0), min(spread.high, 100.0)
            away = ""
            if title != ORIGINAL:
                gap = paired(values, base[: len(values)])
                away = f"{gap.value:+.2f}, {VERDICTS.get(gap.verdict) or fact(gap.verdict)}"
            lines.append(
                f"| {title} | {results[0]['batch']} | {results[0]['steps']} | {len(values)} | "
                f"{spread.mean:.2f} % | {low:.2f} to {high:.2f} % | {spread.deviation:.2f} | {away} | "
                f"{', '.join(f'{v:.2f}' for v in values)} |"
            )
        lines += [
            "",
            *(f"* {title}: {results[0]['shown']}" for title, results in versions.items() if results),
            "",
            "Limits that `chipwise transfer` names:",
            "",
            *(
                f"* {title}: {doubt}"
                for title, results in versions.items()
                for doubt in (results[0]["doubts"] if results else ())
                if "running statistics" not in doubt  # that is done here
            ),
        ]
    arguments.out.write_text("\n".join(lines) + "\n")


def accuracies(results: list[dict]) -> list[float]:
    return [100 * result["metrics"]["eval/accuracy"] for result in results]


if __name__ == "__main__":
    sys.exit(main())
