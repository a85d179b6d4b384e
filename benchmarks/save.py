"""Seconds of a save, this checkout beside another one, by turns.

    python benchmarks/save.py --beside FOLDER [--on DISK] >> benchmarks/save.md

FOLDER is a checkout of an earlier commit, such as one of before a save waited for the disk
(`git worktree add --detach FOLDER e693914c^`). A child writes a state again and again to a folder
on DISK and waits until it is complete: that of `digits`, and 500 MB in 16 arrays. The first save is
left out. A row has the median of the others, of three children by turns, and their range.
"""

import argparse
import statistics
import tempfile
from pathlib import Path

from turns import answer, by_turns

SAVES = {"`digits`": 6, "500 MB": 3}
CHILD = """
import json, sys, time
from pathlib import Path
import jax, numpy as np
import chipwise as cw
from chipwise.run.folder.checkpoint import Checkpoints
from chipwise.step.state import abstract_state

name, saves, folder = json.loads(sys.argv[1])
if name == "500 MB":
    rng = np.random.default_rng(0)
    state = {f"a{i}": rng.standard_normal(500_000_000 // 16 // 4, np.float32) for i in range(16)}
else:
    shapes = abstract_state(cw.load("digits")).without("saved")
    state = jax.tree.map(lambda s: np.ones(s.shape, s.dtype), shapes)
checkpoints, seconds = Checkpoints(Path(folder) / "checkpoints"), []
for step in range(1, saves + 2):
    began = time.perf_counter()
    checkpoints.save(step, state, {"step": step, "recipe": {}})
    started = time.perf_counter()
    checkpoints.wait()
    seconds.append((started - began, time.perf_counter() - began))
checkpoints.close()
print("answer", json.dumps(seconds[1:]))
"""


def seconds(checkout: Path, name: str, disk: Path) -> tuple[float, float]:
    """Until the loop goes on, and until the checkpoint is complete."""
    with tempfile.TemporaryDirectory(dir=disk) as folder:
        saves = answer(checkout, CHILD, [name, SAVES[name], folder])
    waited, whole = zip(*saves, strict=True)
    return statistics.median(waited), statistics.median(whole)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--beside", type=Path, required=True)
    parser.add_argument("--on", type=Path, default=Path(tempfile.gettempdir()))
    given = parser.parse_args()
    print("| state | seconds | before | now | now / before |\n|---|---|---|---|---|")
    for name in SAVES:
        sides = by_turns(given.beside, 3, seconds, name, given.on)
        for i, what in enumerate(("the training waits", "until it is complete")):
            each = [[pair[i] for pair in found] for found in sides]
            shown = [f"{statistics.median(v):.3f} ({min(v):.3f} to {max(v):.3f})" for v in each]
            before, now = map(statistics.median, each)
            print(f"| {name} | {what} | {' | '.join(shown)} | {now / before:.2f} |", flush=True)


if __name__ == "__main__":
    main()
