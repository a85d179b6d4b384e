"""Audits of runs that are what they say, and of runs in which one thing was changed.

    python benchmarks/audits.py > benchmarks/audits.md

Digits, 60 steps on two simulated devices, a row of the ledger every 5 steps and a checkpoint every 10;
audited on one to four devices. A changed thing is a byte of a checkpoint, a rate, a label in the data, the
seed, a line in the loss, a metric or a digest of a row, each at a random place.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4"
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np

import chipwise as cw
from chipwise.data import order
from chipwise.data.sources import take
from chipwise.machine.compilation_cache import compiled_once
from chipwise.proof.audit import audit
from chipwise.run.folder.run_reader import LEDGER
from chipwise.run.on import On

STEPS, ROWS, SAVES, EACH = 60, 5, 10, 50


def recipe(*settings: str) -> cw.Recipe:
    return cw.load("digits", [f"duration={STEPS}st", *settings])


def relabelled(draw) -> tuple[cw.Recipe, int]:
    """One label of an example that is read, changed; and the step that reads it first."""
    whole = recipe()
    columns = {k: np.array(v) for k, v in take(whole.task.train, np.arange(len(whole.task.train))).items()}
    read = order.indices(whole.seed, 0, STEPS * whole.batch, len(whole.task.train))
    place = int(draw.integers(len(read)))
    example = int(read[place])
    columns["label"][example] = (columns["label"][example] + 1) % 10
    task = dataclasses.replace(whole.task, train=cw.Arrays(**columns))
    return dataclasses.replace(whole, task=task), int(np.flatnonzero(read == example)[0]) // whole.batch + 1


def with_a_line(draw) -> tuple[cw.Recipe, int]:
    whole, factor = recipe(), 1 + 10.0 ** -int(draw.integers(1, 5))

    def loss(*given):
        sums, state = whole.task.loss(*given)
        return {**sums, "loss": dataclasses.replace(sums["loss"], total=sums["loss"].total * factor)}, state

    return dataclasses.replace(whole, task=dataclasses.replace(whole.task, loss=loss)), 1


def byte_of_a_checkpoint(run: Path, draw) -> int:
    step = int(draw.integers(1, STEPS // SAVES + 1)) * SAVES
    file = max((run / "checkpoints" / str(step)).rglob("d/*"), key=lambda path: path.stat().st_size)
    content = bytearray(file.read_bytes())
    content[int(draw.integers(len(content)))] ^= 1 << int(draw.integers(8))
    file.write_bytes(content)
    return step


def changed_row(run: Path, name: str, draw) -> int:
    lines = (run / name).read_text().splitlines()
    rows = [i for i, line in enumerate(lines) if json.loads(line).get("step", 0) > 0]
    at = rows[int(draw.integers(len(rows)))]
    row = json.loads(lines[at])
    if name == LEDGER:
        part = str(draw.choice([key for key in row if key != "step"]))
        row[part] = f"{int(row[part], 16) ^ 1 << int(draw.integers(64)):016x}"
    else:
        part = str(draw.choice([key for key in row if key.startswith(("train/", "eval/"))]))
        row[part] = float(np.nextafter(row[part], np.inf))
    lines[at] = json.dumps(row)
    (run / name).write_text("\n".join(lines) + "\n")
    return int(row["step"])


KINDS = {
    "a byte of a checkpoint": byte_of_a_checkpoint,
    "the rate": lambda draw: (recipe(f"lr={0.003 * (1 + 10.0 ** -int(draw.integers(1, 5)))}"), 2),
    "a label": relabelled,
    "the seed": lambda draw: (recipe(f"seed={draw.integers(1, 1000)}"), 1),
    "a line in the loss": with_a_line,
    "a metric of a row": lambda run, draw: changed_row(run, "metrics.jsonl", draw),
    "a digest of a row": lambda run, draw: changed_row(run, LEDGER, draw),
}
IN_THE_FOLDER = ("a byte of a checkpoint", "a metric of a row", "a digest of a row")


HEAD = """# Audits

`python benchmarks/audits.py`: JAX {jax}, digits, {steps} steps on two simulated CPU devices, a row of the
ledger every {rows} and a checkpoint every {saves}.

**As it was.** {passed} of {each} random intervals pass on one to four devices: {compared} rows to the bit.

**One thing changed.** The step is that of the checkpoint or row that was changed, otherwise that of the first
row after the first step that differs.
"""


def main() -> None:
    draw, told = np.random.default_rng(0), collections.defaultdict(list)
    how = {
        "progress": "none",
        "log_every": f"{ROWS}st",
        "checkpoint_every": f"{SAVES}st",
        "keep": f"{SAVES}st",
    }
    passed, rows, same = 0, 0, 0
    with tempfile.TemporaryDirectory() as folder, compiled_once():
        run = Path(folder, "run")
        cw.fit(recipe(), run, on=On(devices=2), eval_every="20st", **how)
        for number in range(EACH):
            first = int(draw.integers(0, STEPS))
            steps = f"{first}:{int(draw.integers(first + 1, STEPS + 1))}"
            verdict, statement = audit(run, recipe(), steps=steps, on=On(devices=1 + number % 4))
            passed, rows = passed + statement["passed"], rows + statement["rows"]
            print(number, steps, verdict, file=sys.stderr, flush=True)
        for number in range(EACH):
            kind, copy = list(KINDS)[number % len(KINDS)], Path(folder, str(number))
            shutil.copytree(run, copy)
            if kind in IN_THE_FOLDER:
                given, step = recipe(), KINDS[kind](copy, draw)
            else:
                given, step = KINDS[kind](draw)
            verdict, statement = audit(copy, given, steps=None if "byte" in kind else "0:", on=On(devices=1))
            at = verdict["step"] if not statement["passed"] else None
            # The row after the change, or the checkpoint or row that was changed
            due = step if kind in IN_THE_FOLDER else -(-step // ROWS) * ROWS
            told[kind].append((not statement["passed"], at == due))
            same += "byte" in kind and statement["passed"]
            print(number, kind, step, at, verdict, file=sys.stderr, flush=True)
            shutil.rmtree(copy)
    about = {"jax": jax.__version__, "steps": STEPS, "rows": ROWS, "saves": SAVES, "each": EACH}
    print(HEAD.format(**about, passed=passed, compared=rows))
    print("| changed | runs | told | with that step |\n|---|---|---|---|")
    for kind, each in told.items():
        print(f"| {kind} | {len(each)} | {sum(one for one, _ in each)} | {sum(right for _, right in each)} |")
    print(
        f"\nOf the changed bytes, {same} are in parts of the file that nothing reads: the state is the run's."
    )


if __name__ == "__main__":
    main()
