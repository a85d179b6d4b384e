"""Measures the time of `chipwise train digits` to its first evaluation: for the first run and later ones.

    python benchmarks/startup.py                # writes benchmarks/startup.md, in about three minutes

Each run is the command as users type it, in a fresh process. Cold: the cache of compiled programs is empty.
The time goes from the start of the process to its first evaluation, after 22 steps, and to its exit, after
674 steps, a checkpoint and the result. The cases alternate, ROUNDS times.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path

from chipwise.machine.fingerprint import this_machine

ROUNDS = 5
CASES = {"1 device": (), "8 simulated devices": ("--simulate", "8")}


def seconds(case: str, folder: Path, cache: Path) -> tuple[float, float]:
    """Seconds to the first evaluation, and to the exit."""
    command = [sys.executable, "-m", "chipwise", "train", "digits", "--run", str(folder), *CASES[case]]
    environment = os.environ | {"XDG_CACHE_HOME": str(cache), "PYTHONUNBUFFERED": "1", "JAX_PLATFORMS": "cpu"}
    began, first = time.perf_counter(), None
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if first is None and line.startswith("step "):
                first = time.perf_counter() - began
    if process.returncode or first is None:
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode}")
    return first, time.perf_counter() - began


def measure() -> dict[tuple[str, str], list[tuple[float, float]]]:
    found: dict[tuple[str, str], list[tuple[float, float]]] = {}
    with tempfile.TemporaryDirectory() as work:
        for round_ in range(ROUNDS):
            for case in CASES:
                cache = Path(work) / f"cache-{round_}-{case.replace(' ', '-')}"
                for state in ("cold", "cached"):
                    run = Path(work) / f"run-{round_}-{case.replace(' ', '-')}-{state}"
                    found.setdefault((case, state), []).append(seconds(case, run, cache))
    return found


def page(found: dict[tuple[str, str], list[tuple[float, float]]]) -> str:
    machine = this_machine()
    rows = []
    for (case, state), runs in found.items():
        first, whole = zip(*runs, strict=True)
        cells = [f"{statistics.median(of):.1f} ({min(of):.1f} to {max(of):.1f})" for of in (first, whole)]
        rows.append(f"| {case} | {state} | {' | '.join(cells)} |")
    return f"""# Start-up

`python benchmarks/startup.py`: seconds of `chipwise train digits`, medians of {ROUNDS} rounds (min to max);
{machine.title}, Python {machine.python}, JAX {machine.versions["jax"]}, {date.today()}.
Cold: the cache of compiled programs is empty.

| devices | compiled programs | first evaluation, after 22 steps | exit, after 674 steps |
|---|---|---|---|
{chr(10).join(rows)}
"""


if __name__ == "__main__":
    text = page(measure())
    Path(__file__).with_suffix(".md").write_text(text)
    print(text)
