"""Steps a second, this checkout beside another one, by turns.

    python benchmarks/steps.py --beside FOLDER [--mnist DIR] >> benchmarks/steps.md

FOLDER is a checkout of an earlier commit, such as one of before a step's examples were picked by a program
of their own (`git worktree add --detach FOLDER 8c6619b5^`). A child trains on one device with resident data
and takes the seconds between rows of the log; the first interval is left out. A row has the median of five
children by turns, the range, and the median of the five ratios.
"""

import argparse
import statistics
from pathlib import Path

from turns import answer, by_turns

TURNS = 5
NETS = {
    "digits": ([], 2000, 8),
    "mnist": ([], 20, 6),
    "cifar10-davidnet": (["width=16", "precision=f32"], 1, 6),
    "gpt2-124m": (["depth=2", "width=128", "heads=4", "context=128", "vocabulary=1000", "batch=64"], 1, 6),
}
"""A net's settings, its steps between two rows, and its rows."""
CHILD = """
import json, sys, tempfile
from pathlib import Path
import chipwise as cw
name, settings, data, every, rows = json.loads(sys.argv[1])
synthetic = data is None and name != "digits"
recipe = cw.load(name, [*settings, f"duration={every * rows}st"], data, synthetic=synthetic)
on = cw.On(devices=1)
with tempfile.TemporaryDirectory() as folder:
    cw.fit(recipe, folder, on=on, progress="none", log_every=f"{every}st")
    rows = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
ends = {}
for row in rows:
    ends.setdefault(row["step"], row["seconds"])
steps = sorted(step for step in ends if step)
rates = [(b - a) / (ends[b] - ends[a]) for a, b in zip(steps[1:], steps[2:], strict=False)]
print("answer", json.dumps(rates))
"""


def rate(checkout: Path, *given: object) -> float:
    return statistics.median(answer(checkout, CHILD, given))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--beside", type=Path, required=True)
    parser.add_argument("--mnist", help="the folder of MNIST's files")
    parser.add_argument("--nets", nargs="+", default=list(NETS))
    given = parser.parse_args()
    print("| recipe | before, steps/s | now, steps/s | median of now / before |\n|---|---|---|---|")
    for name in given.nets:
        settings, every, rows = NETS[name]
        data = given.mnist if name == "mnist" else None
        before, now = by_turns(given.beside, TURNS, rate, name, settings, data, every, rows)
        shown = [f"{statistics.median(v):.4g} ({min(v):.4g} to {max(v):.4g})" for v in (before, now)]
        ratio = statistics.median(b / a for a, b in zip(before, now, strict=True))
        print(f"| `{name}` | {' | '.join(shown)} | {ratio:.2f} |", flush=True)


if __name__ == "__main__":
    main()
