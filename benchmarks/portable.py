"""What portable mode costs: `python benchmarks/portable.py [--recipes digits,mnist] [--turns 7]`.

Times the steps of recipes with `--portable` and without, by turns, each in a process of its own.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from chipwise.machine.fingerprint import this_machine


def seconds(recipe: str, portable: bool, steps: int) -> float:
    """Seconds a step, the median of a record's intervals."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "chipwise", "bench", recipe, "--synthetic", "--devices", "cpu"]
        command += [
            "--steps",
            str(steps),
            "--warmup",
            "20",
            "--out",
            str(Path(folder, "record.json")),
            "--json",
        ]
        command += ["--portable"] * portable
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    return 1 / statistics.median(json.loads(done.stdout)["figures"]["steps_per_second"]["runs"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--recipes", default="digits:2000,mnist:100", help="NAME:STEPS,...")
    parser.add_argument("--turns", type=int, default=7)
    given = parser.parse_args()
    print(this_machine().title)
    print("| recipe | plain, ms a step | portable, ms a step | portable / plain | in turns |")
    print("|---|---|---|---|---|")
    for name, steps in (one.split(":") for one in given.recipes.split(",")):
        pairs = [
            (seconds(name, False, int(steps)), seconds(name, True, int(steps))) for _ in range(given.turns)
        ]
        plain, portable = (statistics.median(times) * 1e3 for times in zip(*pairs, strict=True))
        ratios = sorted(after / before for before, after in pairs)
        middle = statistics.median(ratios)
        print(
            f"| {name} | {plain:.2f} | {portable:.2f} | {middle:.2f} | {ratios[0]:.2f} to {ratios[-1]:.2f} |"
        )


if __name__ == "__main__":
    main()
