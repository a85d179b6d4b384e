"""Measures how long `chipwise plan` takes: to its first answer, to the end, and when it is asked again.

    python benchmarks/plan_speed.py             # writes benchmarks/plan_speed.md, in about twelve minutes

Each run is the command as users type it, in a fresh process, with `pip install 'chipwise[plan]'`. Cold: the
cache of compiled programs is empty. The cases alternate, ROUNDS times.
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

ROUNDS = 3
CASES = {
    "digits": "v2-8,v3-8,v4-8,v5e-8,v5p-8,v6e-8,tpu7x-8,a100,h100,v100,t4,p100,l4,b200,a10g",
    "imagenet-resnet50": "v5e-8,a100,t4",
}


def seconds(net: str, cache: Path) -> tuple[float, float]:
    """Seconds to the first answer, and to the exit."""
    command = [sys.executable, "-m", "chipwise", "plan", net, "--on", CASES[net]]
    environment = os.environ | {"XDG_CACHE_HOME": str(cache), "PYTHONUNBUFFERED": "1", "JAX_PLATFORMS": "cpu"}
    began, first = time.perf_counter(), None
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:  # answers on standard error, or, if all are cached, the verdict
            if first is None and ("examples/s" in line or "predicted to finish" in line):
                first = time.perf_counter() - began
    if process.returncode or first is None:
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode}")
    return first, time.perf_counter() - began


def measure() -> dict[tuple[str, str], list[tuple[float, float]]]:
    found: dict[tuple[str, str], list[tuple[float, float]]] = {}
    with tempfile.TemporaryDirectory() as work:
        for round_ in range(ROUNDS):
            for net in CASES:
                for state in ("cold", "cached"):
                    found.setdefault((net, state), []).append(seconds(net, Path(work) / f"{round_}-{net}"))
                    print(net, state, *found[net, state][-1], flush=True)
    return found


def page(found: dict[tuple[str, str], list[tuple[float, float]]]) -> str:
    machine = this_machine()
    rows = []
    for (net, state), runs in found.items():
        first, whole = zip(*runs, strict=True)
        cells = [f"{statistics.median(of):.1f} ({min(of):.1f} to {max(of):.1f})" for of in (first, whole)]
        rows.append(f"| `{net}` | {len(CASES[net].split(','))} | {state} | {' | '.join(cells)} |")
    return f"""# How long plans take

`python benchmarks/plan_speed.py`: seconds of `chipwise plan`, medians of {ROUNDS} rounds (min to max);
{machine.title}, Python {machine.python}, JAX {machine.versions["jax"]}, {date.today()}.
Cold: nothing is cached. `digits` on {CASES["digits"]}; `imagenet-resnet50` on {CASES["imagenet-resnet50"]}.

| net | targets | cache | first answer | all |
|---|---|---|---|---|
{chr(10).join(rows)}
"""


if __name__ == "__main__":
    text = page(measure())
    Path(__file__).with_suffix(".md").write_text(text)
    print(text)
