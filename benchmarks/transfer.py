"""Does a transferred recipe learn what the original learns, and one that is not transferred less?

    python benchmarks/transfer.py --data DIR [--seeds 3] [--only mnist]

DIR holds MNIST and CIFAR-10 (the original batches, an image folder, or a pack). Short runs of two recipes:
`mnist` for 6 epochs, from batch 256; and `cifar10-davidnet` at a quarter of its width in float32 for 1.25
epochs, from batch 128. Each at its batch, at a fourth and at four times of it, moved there by `transfer` and
with nothing changed but the batch. A replica has 32 examples throughout, so that batch norm is the same
net everywhere and only the rules are compared; the momentum of its running statistics, which is in the model
and not in reach of `transfer`, is raised to the power that `chipwise transfer` names. The seeds alternate.

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
from chipwise.devices.fingerprint import this_machine
from chipwise.feed.datasets import cifar10

HERE = Path(__file__).parent
GROUP = 32  # examples a replica
T_95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}
ORIGINAL = "original"
RECIPES = {
    "mnist": ([], 256, "6ep", 0.99),
    "cifar10-davidnet": (["width=16", "precision=f32"], 128, "1.25ep", 0.9),
}
"""Name: (settings, the batch to start from, length of a run, momentum of batch norm's running statistics)."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", required=True)
    parser.add_argument("--seeds", type=int, default=3, choices=T_95)
    parser.add_argument("--only", choices=RECIPES)
    parser.add_argument("--duration", help="of every run, for trying out; give --runs and --out with it")
    parser.add_argument("--runs", type=Path, default=Path("runs/transfer"))
    parser.add_argument("--out", type=Path, default=HERE / "transfer.md")
    arguments = parser.parse_args()
    # All batches of a recipe share the program of a replica: compile it once.
    jax.config.update("jax_compilation_cache_dir", str(arguments.runs / "compiled"))
    found: dict[str, dict[str, list[dict]]] = {}
    for name in [arguments.only] if arguments.only else RECIPES:
        duration = arguments.duration or RECIPES[name][2]
        versions = variants(name, duration, arguments.data)
        found[name] = {title: [] for title in versions}
        for seed in range(arguments.seeds):
            for number, (title, recipe) in enumerate(versions.items()):
                run = arguments.runs / f"{name}-{duration}-{number}-seed{seed}"
                result = trained(dataclasses.replace(recipe, seed=seed), run)
                found[name][title].append({**result, "batch": recipe.batch, "shown": shown(recipe)})
                write(found, arguments)


def variants(name: str, duration: str, data: str) -> dict[str, cw.Recipe]:
    """The original of a short run, and it at a fourth and four times its batch, with and without transfer."""
    settings, batch, _, momentum = RECIPES[name]

    def short(k: float) -> cw.Recipe:
        built_in = cw.load(name, [*settings, f"bn_momentum={momentum**k:.6g}"], data)
        return built_in.transfer(batch=batch, replicas=batch // GROUP, duration=duration)

    original = short(1)
    made = {ORIGINAL: original}
    for other in (batch // 4, batch * 4):
        made[f"transferred to {other}"] = short(other / batch).transfer(batch=other, replicas=other // GROUP)
        made[f"only the batch, {other}"] = dataclasses.replace(original, batch=other, replicas=other // GROUP)
    return made


def trained(recipe: cw.Recipe, run: Path) -> dict:
    """What the run came to; one that is there is not repeated."""
    if not (run / "result.json").exists():
        cw.fit(recipe, run, eval_every=None, checkpoint_every="25%", progress="lines")
    return json.loads((run / "result.json").read_text())


def shown(recipe: cw.Recipe) -> str:
    """The numbers that a transfer may change."""
    settings = recipe.optimizer.describe()
    names = [name for name in ("lr", "b1", "b2", "weight_decay") if name in settings]
    return ", ".join(f"{name} {settings[name]}" for name in names)


def write(found: dict[str, dict[str, list[dict]]], arguments: argparse.Namespace) -> None:
    """The tables of what is there so far."""
    here = this_machine()
    lines = [
        "# Transfer: accuracy at a fourth and at four times the batch",
        "",
        f"`python benchmarks/transfer.py`; {here.title}, JAX {jax.__version__}, Python "
        f"{platform.python_version()}, float32. {GROUP} examples a replica everywhere; each run sees as many "
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
            mean, deviation = statistics.mean(values), statistics.stdev(values)
            half = T_95[len(values)] * deviation / len(values) ** 0.5
            away = (
                f"{mean - statistics.mean(base):+.2f}, {verdict(values, base)}" if title != ORIGINAL else ""
            )
            lines.append(
                f"| {title} | {results[0]['batch']} | {results[0]['steps']} | {len(values)} | {mean:.2f} % | "
                f"{mean - half:.2f} to {mean + half:.2f} % | {deviation:.2f} | {away} | "
                f"{', '.join(f'{v:.2f}' for v in values)} |"
            )
        lines += [
            "",
            *(f"* {title}: {results[0]['shown']}" for title, results in versions.items() if results),
        ]
    arguments.out.write_text("\n".join(lines) + "\n")


def accuracies(results: list[dict]) -> list[float]:
    return [100 * result["metrics"]["eval/accuracy"] for result in results]


def verdict(values: list[float], base: list[float]) -> str:
    """Whether the difference of the means is more than chance: a 95 % interval of pairs of the same seed."""
    pairs = [a - b for a, b in zip(values, base, strict=False)]
    half = T_95[len(pairs)] * statistics.stdev(pairs) / len(pairs) ** 0.5
    mean = statistics.mean(pairs)
    return "no difference shown" if abs(mean) <= half else "worse" if mean < 0 else "better"


if __name__ == "__main__":
    sys.exit(main())
