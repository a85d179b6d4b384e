"""Are several seeds at once faster than one at a time, and what does one compilation for all save?

    python benchmarks/seeds_at_once.py --data DIR [--repeats 3]

Trains studies of 8 seeds of `digits` and of a short `mnist` with `--at-once 1` and `--at-once 2`,
alternating, each in a fresh folder, and writes `seeds_at_once.md`. It has processor time and wall time; on a
busy machine only the first is meaningful. If the fingerprints differ, it stops.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jax

HERE = Path(__file__).parent
CASES = {"digits": [], "mnist": ["--set", "duration=200st"]}


def train(recipe: list[str], at_once: int, folder: Path, seeds: int) -> tuple[float, float, list[dict]]:
    """Wall and processor seconds of the whole command, and the results by seed."""
    command = [sys.executable, "-c", "from chipwise.cli import main; main()", "train", *recipe]
    command += ["--seeds", str(seeds), "--at-once", str(at_once), "--run", str(folder)]
    command += ["--eval-every", "end", "--devices", "1", "--quiet"]
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env={**os.environ, "JAX_PLATFORMS": "cpu"})
    wall, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return wall, spent, [json.loads((folder / f"seed-{k}/result.json").read_text()) for k in range(seeds)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seeds", type=int, default=8)
    arguments = parser.parse_args()
    data = ["--data", arguments.data] if arguments.data else []
    lines = [
        "# Seeds side by side",
        "",
        f"`python benchmarks/seeds_at_once.py --repeats {arguments.repeats} --seeds {arguments.seeds}`; "
        f"{platform.machine()} CPU, {os.cpu_count()} cores, load average {os.getloadavg()[0]:.1f} at the "
        f"start, JAX {jax.__version__}. Medians of {arguments.repeats} studies, alternating; whole commands, "
        f"start-up included. Every run has the same fingerprint in all of them.",
        "",
        "| recipe | at once | wall s | lowest to highest | processor s | compile s, first run | later runs |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, settings in CASES.items():
        found: dict[int, list] = {1: [], 2: []}
        for _ in range(arguments.repeats):
            for at_once in found:
                with tempfile.TemporaryDirectory() as folder:
                    recipe = [name, *settings, *(data if name == "mnist" else [])]
                    found[at_once].append(train(recipe, at_once, Path(folder) / "s", arguments.seeds))
        prints = {tuple(r["fingerprint"] for r in results) for runs in found.values() for *_, results in runs}
        if len(prints) != 1:
            raise SystemExit(f"{name}: the fingerprints differ: {prints}")
        for at_once, runs in found.items():
            walls, spent = [w for w, _, _ in runs], statistics.median(s for _, s, _ in runs)
            compiled = [[r["seconds"]["compile"] for r in results] for *_, results in runs]
            first = statistics.median(c for each in compiled for c in each[:at_once])
            later = statistics.median(c for each in compiled for c in each[at_once:])
            shown = " ".join([name, *settings])
            lines.append(
                f"| {shown} | {at_once} | {statistics.median(walls):.1f} "
                f"| {min(walls):.1f} to {max(walls):.1f} | {spent:.1f} | {first:.2f} | {later:.2f} |"
            )
            print(lines[-1], flush=True)
    (HERE / "seeds_at_once.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
