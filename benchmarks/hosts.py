"""What several processes, and the shared optimizer, cost: ratios of steps/s on this machine.

    python benchmarks/hosts.py                  # writes benchmarks/hosts.md

The same eight CPU devices are driven by 1 process, by 2 with 4 each and by 8 with 1 each; and the optimizer's
state is whole or shared out. The variants take turns, ROUNDS times over, so that a machine that grows slower
meets all alike. Ratios to the first are written, with their spread.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from chipwise.machine.fingerprint import this_machine

ROUNDS = 5
RECIPES = {"digits": [], "cifar10-davidnet": ["--synthetic", "--set", "width=16", "--set", "batch=64"]}
MAIN = [sys.executable, "-c", "from chipwise.cli import main; main()"]
VARIANTS = {
    "1 × 8": (1, []),
    "2 × 4": (2, []),
    "8 × 1": (8, []),
    "1 × 8, optimizer shared": (1, ["--shard-optimizer"]),
    "2 × 4, optimizer shared": (2, ["--shard-optimizer"]),
}


def steps_per_second(recipe: str, more: list[str], processes: int, how: list[str], folder: Path) -> float:
    """The median that `chipwise bench` measured."""
    out = folder / "record.json"
    command = ["bench", recipe, *more, *how, "--simulate", str(8 // processes), "--out", str(out), "--json"]
    start = [] if processes == 1 else ["run-local", "--processes", str(processes), "--"]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    subprocess.run([*MAIN, *start, *command], check=True, stdout=subprocess.DEVNULL, env=environment)
    figures = json.loads(out.read_text())["figures"]["steps_per_second"]
    return statistics.median(figures["runs"])


def measure() -> dict[str, dict[str, list[float]]]:
    found: dict[str, dict[str, list[float]]] = {r: {name: [] for name in VARIANTS} for r in RECIPES}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(ROUNDS):
            for recipe, more in RECIPES.items():
                for name, (processes, how) in VARIANTS.items():
                    speed = steps_per_second(recipe, more, processes, how, Path(folder))
                    found[recipe][name].append(speed)
    return found


def page(found: dict[str, dict[str, list[float]]]) -> str:
    lines = ["# Several processes, and the shared optimizer", ""]
    lines += [f"{this_machine().title}, {ROUNDS} rounds in turns.", ""]
    lines += ["| recipe | processes × devices | steps/s | ratio to 1 × 8 | spread |", "|---|---|---|---|---|"]
    for recipe, variants in found.items():
        first = variants["1 × 8"]
        for name, speeds in variants.items():
            ratios = [a / b for a, b in zip(speeds, first, strict=True)]
            lines.append(
                f"| {recipe} | {name} | {statistics.median(speeds):.1f} | {statistics.median(ratios):.2f} "
                f"| {min(ratios):.2f} to {max(ratios):.2f} |"
            )
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    (Path(__file__).parent / "hosts.md").write_text(page(measure()))
