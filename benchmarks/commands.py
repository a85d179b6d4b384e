"""Seconds of commands as users type them, this checkout beside another one, by turns.

    python benchmarks/commands.py --beside FOLDER > benchmarks/commands.md

FOLDER is a checkout of an earlier commit, such as one of before the package was laid out in rooms
(`git worktree add --detach FOLDER 8c6619b5^`). Each run is a fresh process. Cold: nothing is cached; cached:
the same command again, into another run folder. A row has medians of ROUNDS turns, their range, and the
median of the turns' ratios.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parents[1]
ROUNDS = 5
TRAIN, PLAN = ["-m", "chipwise", "train"], ["-m", "chipwise", "plan", "digits", "--on"]
ROWS = {
    "`import jax, chipwise`": ["-c", "import jax, chipwise"],
    "`chipwise train digits`": [*TRAIN, "digits", "--run", "RUN"],
    "`chipwise train digits --simulate 8`": [*TRAIN, "digits", "--run", "RUN", "--simulate", "8"],
    "`chipwise plan digits --on v5e-8,t4`": [*PLAN, "v5e-8,t4"],
}


def seconds(checkout: Path, line: list[str], cache: Path, run: Path) -> float:
    environment = os.environ | {"XDG_CACHE_HOME": str(cache), "PYTHONPATH": str(checkout / "src")}
    environment |= {"JAX_PLATFORMS": "cpu"}
    command = [sys.executable, *(str(run) if part == "RUN" else part for part in line)]
    began = time.perf_counter()
    subprocess.run(command, env=environment, capture_output=True, check=True)
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--beside", type=Path, required=True)
    given = parser.parse_args()
    checkouts = {"before": given.beside, "now": HERE}
    print("| command | cache | before, s | now, s | median of before / now |\n|---|---|---|---|---|")
    for name, line in ROWS.items():
        states = ("cached",) if line[0] == "-c" else ("cold", "cached")
        found = {(state, side): [] for state in states for side in checkouts}
        with tempfile.TemporaryDirectory() as work:
            for turn in range(ROUNDS):
                for side, checkout in checkouts.items():
                    cache = Path(work) / f"cache-{turn}-{side}"
                    for state in states:
                        run = Path(work) / f"run-{turn}-{side}-{state}"
                        found[state, side].append(seconds(checkout, line, cache, run))
        for state in states:
            before, now = found[state, "before"], found[state, "now"]
            shown = [f"{statistics.median(v):.2f} ({min(v):.2f} to {max(v):.2f})" for v in (before, now)]
            ratio = statistics.median(a / b for a, b in zip(before, now, strict=True))
            print(f"| {name} | {state} | {' | '.join(shown)} | {ratio:.2f} |", flush=True)


if __name__ == "__main__":
    main()
