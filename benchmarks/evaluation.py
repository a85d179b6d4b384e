"""Seconds of an evaluation, this checkout beside another one, by turns.

    python benchmarks/evaluation.py --beside FOLDER [--mnist DIR] > benchmarks/evaluation.md

FOLDER is a checkout of an earlier commit, such as one of before evaluation ran in blocks of the recipe's own
(`git worktree add --detach FOLDER 80f8224d^`). A child evaluates after each of eight steps; the first one
compiles and is left out. A row has the median of the others, of three children by turns, and their range.
"""

import argparse
import statistics
from pathlib import Path

from turns import answer, by_turns

NETS = {
    "digits": [],
    "mnist": [],
    "cifar10-davidnet": ["width=16", "precision=f32"],
}
EXAMPLES = {"cifar10-davidnet": 2000}  # of the evaluation, made up
CHILD = """
import dataclasses, json, sys, tempfile
from pathlib import Path
import chipwise as cw
from chipwise.data.synthetic import Synthetic, like
name, settings, data, devices, examples = json.loads(sys.argv[1])
made = cw.load(name, [*settings, "duration=8st"], data, synthetic=data is None and name != "digits")
if examples:
    source = made.task.eval
    source = Synthetic(examples, source.spec, source.below, 1)
    train = Synthetic(4 * made.batch, made.task.train.spec, made.task.train.below, 2)
    made = dataclasses.replace(made, task=dataclasses.replace(made.task, eval=source, train=train))
with tempfile.TemporaryDirectory() as folder:
    cw.fit(made, folder, on=cw.On(devices=devices), progress="none", eval_every="1st", log_every="1st")
    rows = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
ends = {row["step"]: [] for row in rows}
for row in rows:
    ends[row["step"]].append(row["seconds"])
print("answer", json.dumps([max(both) - min(both) for both in ends.values()][1:]))
"""


def milliseconds(checkout: Path, *given: object) -> float:
    return 1e3 * statistics.median(answer(checkout, CHILD, given, JAX_NUM_CPU_DEVICES="8"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--beside", type=Path, required=True)
    parser.add_argument("--mnist")
    given = parser.parse_args()
    print("| recipe | devices | before, ms | now, ms | before / now |\n|---|---|---|---|---|")
    for name, settings in NETS.items():
        for devices in (1, 8):
            data = given.mnist if name == "mnist" else None
            child = (name, settings, data, devices, EXAMPLES.get(name))
            sides = by_turns(given.beside, 3, milliseconds, *child)
            shown = [f"{statistics.median(v):.1f} ({min(v):.1f} to {max(v):.1f})" for v in sides]
            before, now = map(statistics.median, sides)
            print(f"| `{name}` | {devices} | {' | '.join(shown)} | {before / now:.2f} |", flush=True)


if __name__ == "__main__":
    main()
