"""Measures how much longer `import chipwise` takes than `import jax`, and the cost of a first use.

    python benchmarks/import_time.py            # writes benchmarks/import_time.md

Each line of code runs in a fresh process, timed from start to exit by its parent. The lines alternate, ROUNDS
times, so that other work on the machine affects all of them. The first round warms the page cache and does
not count. The page has medians and spread, in seconds.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from chipwise.machine.fingerprint import this_machine

ROUNDS = 5
MOST = 1.0  # seconds that `import chipwise` may take beyond `import jax`
LINES = {
    "import jax": "what every program pays",
    "import jax, chipwise": "names load when they are first used",
    "import jax, chipwise as cw; cw.fit, cw.Recipe, cw.one_cycle": "what a training program uses",
    "from chipwise.cli import app; app()": "the command line, before a command runs",
}


def seconds(line: str) -> float:
    """Wall time of a fresh Python that runs `line`."""
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", line], check=True, env={**os.environ, "JAX_PLATFORMS": "cpu"})
    return time.perf_counter() - began


def measure() -> dict[str, list[float]]:
    times: dict[str, list[float]] = {line: [] for line in LINES}
    for round_ in range(ROUNDS + 1):
        for line in LINES:
            taken = seconds(line)
            if round_:
                times[line].append(taken)
    return times


def page(times: dict[str, list[float]]) -> str:
    base = statistics.median(times["import jax"])
    machine = this_machine()
    rows = [
        f"| `{line}` | {statistics.median(runs):.2f} | {min(runs):.2f} to {max(runs):.2f} "
        f"| {statistics.median(runs) - base:+.2f} | {LINES[line]} |"
        for line, runs in times.items()
    ]
    more = statistics.median(times["import jax, chipwise"]) - base
    return "\n".join(
        [
            "# Import time",
            "",
            f"Seconds of a fresh process, medians of {ROUNDS} rounds; `python benchmarks/import_time.py`; "
            f"{machine.title}, Python {machine.python}, JAX {machine.versions['jax']}.",
            "",
            "| code | median | all | beyond `import jax` | |",
            "|---|---|---|---|---|",
            *rows,
            "",
            f"`import chipwise` may take {MOST:.1f} s beyond `import jax`: it takes {more:.2f} s.",
            "",
        ]
    )


if __name__ == "__main__":
    text = page(measure())
    Path(__file__).with_suffix(".md").write_text(text)
    print(text)
