"""`make demo`: trains a recipe on 1 and on 8 devices, compares fingerprints, curves and speeds, plans for
absent chips, writes a job for one of them, and reports a run.

Writes to `demo/`: `curves.svg`, the pages `compare.html`, `plan.html` and `report.html`, and
the notebook for a rented chip in `launch/`.
"""

import json
import subprocess
import sys
from pathlib import Path

from chipwise.explain.charts import Trace, panel
from chipwise.explain.page import picture

DEMO = Path("demo")


def chipwise(command: str, **how) -> subprocess.CompletedProcess:
    """Runs a command in a new process, since JAX fixes its devices when it starts."""
    code = "import sys, chipwise.cli; sys.exit(chipwise.cli.main(sys.argv[1:]))"
    return subprocess.run([sys.executable, "-c", code, *command.split()], check=True, **how)


def train(devices: int) -> dict:
    print(f"\n== chipwise train digits --simulate {devices} ==", flush=True)
    command = f"train digits --simulate {devices} --json --fresh --run {DEMO}/devices{devices}"
    return json.loads(chipwise(command, stdout=subprocess.PIPE).stdout)


def shown(command: str) -> None:
    print(f"\n== chipwise {command} ==", flush=True)
    chipwise(command)


def curve(devices: int, name: str) -> list[tuple[float, float]]:
    rows = (DEMO / f"devices{devices}" / "metrics.jsonl").read_text().splitlines()
    return [(row["epoch"], row[name]) for row in map(json.loads, rows) if name in row]


def main() -> int:
    results = {n: train(n) for n in (1, 8)}
    print("\ndevices  test accuracy  seconds  fingerprint (SHA-256 of the parameters)")
    for n, result in results.items():
        accuracy, seconds = result["metrics"]["eval/accuracy"], result["seconds"]["total"]
        print(f"{n:>7}  {accuracy:>13.4f}  {seconds:>7.1f}  {result['fingerprint']}")
    same = len({result["fingerprint"] for result in results.values()}) == 1
    print("The same bits on 1 and on 8 devices." if same else "THE BITS DIFFER.")

    panels = []
    for name in ("train/loss", "eval/accuracy"):
        curves = [
            Trace("1 device", "s0 faint broad", curve(1, name)),
            Trace("8 devices", "s1", curve(8, name)),
        ]
        panels.append(panel(name, curves, x="epoch", y_log="loss" in name))
    title = f"digits: one recipe, 8 replicas, {'the same bits' if same else 'DIFFERENT BITS'}"
    (DEMO / "curves.svg").write_text(picture(panels, columns=2, size="narrow", title=title))
    print(f"\nThe curves: {DEMO}/curves.svg")
    shown(f"compare {DEMO}/devices1 {DEMO}/devices8 --html {DEMO}/compare.html")
    shown(f"plan digits --on v5e-8,t4 --html {DEMO}/plan.html")
    shown(f"launch digits --on t4 --to colab --out {DEMO}/launch")
    shown(f"report {DEMO}/devices8 --html {DEMO}/report.html")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
