"""`make demo` shows the whole way in about a minute.

It trains a recipe on 1 and on 8 simulated devices, compares the runs, plans for chips that are not
here, writes a job for one of them, and reports a run.

Writes to `demo/`: the pages `compare.html`, `plan.html` and `report.html`, and the notebook for a
rented chip in `launch/`.
"""

import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

DEMO = Path("demo")
RUNS = {1: DEMO / "devices1", 8: DEMO / "devices8"}
TRAIN = {n: f"train digits --simulate {n} --json --fresh --run {run}" for n, run in RUNS.items()}
PLAN = f"plan digits --on v5e-8,t4 --html {DEMO}/plan.html"
LAUNCH = f"launch digits --on t4 --to colab --out {DEMO}/launch"  # by the plan above, which is kept
COMPARE = f"compare {RUNS[1]} {RUNS[8]} --html {DEMO}/compare.html"
REPORT = f"report {RUNS[8]} --html {DEMO}/report.html"


def chipwise(command: str) -> str:
    """Runs a command in a process of its own, since JAX fixes its devices when it starts; its output."""
    program = [sys.executable, "-m", "chipwise", *command.split()]
    columns = str(shutil.get_terminal_size().columns)
    done = subprocess.run(program, stdout=subprocess.PIPE, text=True, env=os.environ | {"COLUMNS": columns})
    if done.returncode:
        raise SystemExit(f"chipwise {command}: exit code {done.returncode}\n{done.stdout}")
    return done.stdout


def title(command: str) -> None:
    print(f"\n== chipwise {command} ==", flush=True)


def show(command: str, answer: Future[str] | None = None) -> None:
    """A command and what it prints; `answer` is that of one that is already running."""
    title(command)
    print(answer.result() if answer else chipwise(command), flush=True)


def main() -> int:
    with ThreadPoolExecutor(max_workers=2) as pool:  # two at a time: the demo is made for two cores
        trainings = {n: pool.submit(chipwise, command) for n, command in TRAIN.items()}
        plan = pool.submit(chipwise, PLAN)
        results = {}
        for n, training in trainings.items():
            title(TRAIN[n])
            results[n] = json.loads(training.result())
            print(f"seconds: {results[n]['seconds']['total']:.1f}")

        print("\ndevices  test accuracy  fingerprint (SHA-256 of the parameters)")
        for n, result in results.items():
            print(f"{n:>7}  {result['metrics']['eval/accuracy']:>13.4f}  {result['fingerprint']}")
        same = results[1]["fingerprint"] == results[8]["fingerprint"]
        print("The same bits on 1 and on 8 devices." if same else "THE BITS DIFFER.")

        show(COMPARE)
        show(PLAN, plan)
        show(LAUNCH)
        show(REPORT)
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
