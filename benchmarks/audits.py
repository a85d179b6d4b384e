"""Audits of runs that are what they say, and of runs in which one thing was changed.

    python benchmarks/audits.py > benchmarks/audits.md

Runs as they were: digits, 60 steps, resident and streamed, on one, three and four simulated devices, each
with something else that changes no bit: devices that check each other, the noise scale, the best evaluation
kept, a stop and another number of devices, evaluation by groups. Random intervals of each are computed again
on one, three and four devices.

Runs in which one thing was changed: the table of `tests/changed_runs.py`, of a run of 20 steps; and of the
digits, at random places, a byte of a checkpoint, a rate, a label in the data, the seed, a line in the loss, a
metric or a digest of a row.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
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

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import changed_runs
import chipwise as cw
from chipwise.data import order
from chipwise.data.sources import take
from chipwise.machine.compilation_cache import compiled_once
from chipwise.proof.audit import audit
from chipwise.run.folder.run_reader import LEDGER
from chipwise.run.on import On

STEPS, ROWS, SAVES, EACH, INTERVALS = 60, 5, 10, 50, 5


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


HOW = {"progress": "none", "log_every": f"{ROWS}st", "checkpoint_every": f"{SAVES}st", "keep": f"{SAVES}st"}
DEVICES = (1, 3, 4)
HONEST: dict[str, dict] = {
    "plain": {},
    "replicas compared (`--verify 50%`)": {"verify": "50%"},
    "the noise scale (`--noise`)": {"noise": True},
    "the best kept (`--keep-best`)": {"keep_best": "eval/loss"},
    "stopped after 33 steps": {"stop_after": "33st"},
    "evaluated by groups of 16": {"eval_group": 16},
}

HEAD = """# Audits

`python benchmarks/audits.py`: JAX {jax}, simulated CPU devices.

**As they were.** Digits, {steps} steps, a row of the ledger every {rows} and a checkpoint every {saves},
on one, three and four devices. Each run is computed again in {each} intervals, all of it and random ones, on
one, three and four devices in turn. A stopped run continues on another number of devices.

| run | feed | intervals | pass | rows to the bit |
|---|---|---|---|---|
"""

CHANGED = """
**One thing changed.** {count} changes of a run of {steps} steps (`tests/changed_runs.py`), by what they
change. All steps are computed again. Each is told, most with the step, or listed in the answer as not
audited, or leaves nothing false: a file that nothing reads, or one that is gone.

| changed | changes | told with the step | told | listed | nothing false |
|---|---|---|---|---|---|
"""

AT_RANDOM = """
**At a random place** of the digits' run. The step is that of the checkpoint or row that was changed,
otherwise that of the first row after the first step that differs.

| changed | runs | told | with that step |
|---|---|---|---|
"""


def honest(folder: Path, draw) -> bool:
    """Prints a row for each run that is what it says. *Returns* whether all intervals pass."""
    runs = [(name, how, feed) for feed in ("device", "host") for name, how in HONEST.items()]
    whole = True
    for number, (name, how, feed) in enumerate(runs):
        run, how = folder / f"honest-{number}", dict(how)
        task = dataclasses.replace(recipe().task, eval_group=how.pop("eval_group", 1))
        given = dataclasses.replace(recipe(), task=task)
        on = {"feed": feed, "verify": how.pop("verify", "0%"), "noise": how.pop("noise", False)}
        stop = {"stop_after": how.pop("stop_after")} if "stop_after" in how else {}
        for count, more in enumerate([stop, {}] if stop else [{}]):
            devices = DEVICES[(number + count) % 3]
            how |= HOW | {"eval_every": "20st"}
            cw.fit(given, run, on=On(devices=devices, **on), **how, **more)
        passed, rows = 0, 0
        for turn in range(INTERVALS):
            first = int(draw.integers(0, STEPS))
            steps = "0:" if not turn else f"{first}:{int(draw.integers(first + 1, STEPS + 1))}"
            verdict, statement = audit(run, given, steps=steps, on=On(devices=DEVICES[turn % 3]))
            passed, rows = passed + statement["passed"], rows + statement["rows"]
            print(name, feed, steps, verdict, file=sys.stderr, flush=True)
        whole &= passed == INTERVALS
        print(
            f"| {name} | {'resident' if feed == 'device' else 'streamed'} | {INTERVALS} | {passed} | {rows} |"
        )
    return whole


def changed(folder: Path) -> bool:
    """Prints a row for each file that is changed. *Returns* whether every change is told or listed."""
    whole = True

    @functools.cache
    def made(kind: str, seed: int = 3) -> Path:
        return changed_runs.trained(folder / f"{kind}-{seed}", kind, seed=seed)

    others = "a run that ended early, was stopped, has few rows or no evaluation"
    parts = {**changed_runs.CHANGES, others: changed_runs.OF_OTHER_KINDS}
    for part, names in parts.items():
        counts = collections.Counter[str]()
        for number, name in enumerate(names):
            kind, change, expected = changed_runs.ALL[name]
            copy = shutil.copytree(made(kind), folder / f"{part.replace('/', '')}-{number}")
            given = change(copy, functools.partial(made, kind, 4))
            given = given or changed_runs.recipe(**changed_runs.RUNS[kind].changes)
            found, unaudited = changed_runs.told(copy, given)
            if found:
                as_said = expected in found
                counts["step" if any(step is not None for _, step in found) else "told"] += 1
            else:
                as_said = expected is None or any(expected in line for line in unaudited)
                counts["false" if expected is None else "listed"] += 1
            whole &= as_said
            print(part, name, found or expected, "" if as_said else "WRONG", file=sys.stderr, flush=True)
            shutil.rmtree(copy)
        each = " | ".join(str(counts[name]) for name in ("step", "told", "listed", "false"))
        print(f"| {part} | {len(names)} | {each} |")
    return whole


def at_random(folder: Path, draw) -> None:
    """Prints a row for each kind of change at random places."""
    told, same, run = collections.defaultdict(list), 0, folder / "run"
    cw.fit(recipe(), run, on=On(devices=2), eval_every="20st", **HOW)
    for number in range(EACH):
        kind, copy = list(KINDS)[number % len(KINDS)], folder / str(number)
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
    for kind, each in told.items():
        print(f"| {kind} | {len(each)} | {sum(one for one, _ in each)} | {sum(right for _, right in each)} |")
    print(
        f"\nOf the changed bytes, {same} are in parts of the file that nothing reads: the state is the run's."
    )


def main() -> None:
    draw = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder, compiled_once():
        sizes = {"steps": STEPS, "rows": ROWS, "saves": SAVES, "each": INTERVALS}
        print(HEAD.format(jax=jax.__version__, **sizes), end="")
        whole = honest(Path(folder), draw)
        print(CHANGED.format(count=len(changed_runs.ALL), steps=changed_runs.STEPS), end="")
        whole &= changed(Path(folder))
        print(AT_RANDOM, end="")
        at_random(Path(folder), draw)
    sys.exit(0 if whole else 1)


if __name__ == "__main__":
    main()
