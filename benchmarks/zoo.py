"""Which public models train through chipwise's doors: a row each, and one line a cause for what fails.

    pip install --no-deps -c constraints.txt --target build/zoo timm==1.0.31 torchvision==0.28.0
    python -m benchmarks.zoo --draw 100 --seed 1      # a seeded draw of zoo_candidates.csv
    python -m benchmarks.zoo --part 1/2               # all of them, in parts
    python -m benchmarks.zoo --page                   # benchmarks/zoo.md, of the rows that there are

A model runs in a process of its own with a limit of time and of memory, so a hang or a crash is a row.
Rows are appended to zoo.csv as they come; a model that has one is not run again. Devices are simulated.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import csv
import fcntl
import hashlib
import importlib.metadata
import json
import multiprocessing
import os
import random
import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # before JAX is there
    devices = "--xla_force_host_platform_device_count=3"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {devices}"
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("KERAS_BACKEND", "jax")

import psutil

from .zoo_measure import COLUMNS, LEVELS, cause, measured, passed
from .zoo_models import SOURCES, Candidate, load, stored

HERE = Path(__file__).parent
PATIENCE = 8
"""How many seconds a second of a processor may take, on a machine that others use too."""
FIELDS = ("source", "name", "given", "until", "random", *COLUMNS, "off", "seconds", "causes", "commit")
PACKAGES = ("jax", "torch", "torchax", "timm", "torchvision", "transformers", "keras")


# ---- running


@dataclass
class Running:
    """A process that measures a candidate."""

    candidate: Candidate
    process: Any
    rows: Any
    began: float = field(default_factory=time.monotonic)
    row: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    """Of a processor."""
    why: str = ""

    def ended(self, seconds: float, memory: int) -> bool:
        """Whether it is over. Ends it above its limits."""
        while self.rows.poll():
            try:
                self.row = self.rows.recv()
            except EOFError:
                break
        if not self.process.is_alive():
            return True
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(self.process.pid)
            self.seconds = sum(process.cpu_times()[:2])
            if self.seconds > seconds or time.monotonic() - self.began > PATIENCE * seconds:
                self.why = f"more than {seconds:g} s"
            elif process.memory_info().rss > memory << 30:
                self.why = f"more than {memory} GiB"
        if self.why:
            self.process.kill()
            self.process.join()
        return bool(self.why)

    def final(self) -> dict[str, Any]:
        """The row, also of a process that died: with the first column that it did not reach as "no"."""
        unknown = dict.fromkeys(COLUMNS, "") | {"random": "", "off": "", "causes": []}
        row = unknown | {"given": self.candidate.given} | self.row
        row |= {"source": self.candidate.source, "name": self.candidate.name}
        code = self.process.exitcode
        if self.why or code:
            why = self.why or (f"signal {-code}" if code < 0 else "it died")
            order = ["traces", "check", "export", *COLUMNS]
            if row["source"] == "keras":  # whose door compares nothing
                order = ["traces", "outputs", "step", "export", "bits", "back"]
            at = next((c for c in order if not row[c]), COLUMNS[-1])
            row[at] = "no"
            row["causes"] = [*row["causes"], f"{at}: {row.get('error', '') or why}"]
        row["seconds"] = round(self.seconds, 1)
        return row


def child(candidate: Candidate, until: str, rows: Any) -> None:
    row = {}
    try:
        for row in measured(candidate, until):
            rows.send(row)
    except Exception as error:  # of the framework: chipwise's are in the row
        rows.send(row | {"error": cause(error)})
        raise


def begun(candidate: Candidate, until: str) -> Running:
    """Starts the process, a fork of one that has imported the frameworks and computed nothing."""
    fork = multiprocessing.get_context("fork")
    there, here = fork.Pipe(duplex=False)
    process = fork.Process(target=child, args=(candidate, until, here))
    process.start()
    here.close()
    return Running(candidate, process, there)


def run(candidates: list[Candidate], given: argparse.Namespace) -> None:
    waiting, active = collections.deque(candidates), []
    load({candidate.source for candidate in candidates})
    commit = commit_here()
    while waiting or active:
        while waiting and len(active) < given.processes:
            active.append(begun(waiting.popleft(), given.until))
        time.sleep(0.1)
        for running in [r for r in active if r.ended(given.seconds, given.memory)]:
            active.remove(running)
            row = running.final() | {"commit": commit, "until": given.until}
            append(given.rows, row)
            shown = " ".join(f"{c}={row[c] or '-'}" for c in COLUMNS)
            print(f"{running.candidate.key} {shown} {row['seconds']} s {row['causes'][:1]}", flush=True)


def append(file: Path, row: dict[str, Any]) -> None:
    with file.open("a") as opened:
        fcntl.flock(opened, fcntl.LOCK_EX)
        writer = csv.DictWriter(opened, FIELDS, extrasaction="ignore", lineterminator="\n")
        if not opened.tell():
            writer.writeheader()
        writer.writerow(row | {"causes": json.dumps(row["causes"])})


def rows_in(file: Path, commits: Sequence[str] = ()) -> dict[str, dict[str, Any]]:
    """The newest row of each model, by its key. *Arguments:* `commits`: of the package, if the first row
    that each had at one of them is wanted."""
    if not file.exists():
        return {}
    with file.open() as opened:
        rows = [row | {"causes": json.loads(row["causes"])} for row in csv.DictReader(opened)]
    rows = [row for row in reversed(rows) if row["commit"] in commits] if commits else rows
    return {f"{row['source']}:{row['name']}": row for row in rows}


def has(row: dict[str, Any], until: str) -> bool:
    """Whether nothing is left to try of a model `until` there."""
    return row["traces"] == "no" or LEVELS.index(row["until"]) >= LEVELS.index(until)


def drawn(candidates: list[Candidate], count: int, seed: int) -> list[Candidate]:
    return random.Random(seed).sample(candidates, min(count, len(candidates)))


def commit_here() -> str:
    """The commit of the package that is measured."""
    import subprocess

    asked = ["git", "-C", str(HERE), "log", "-1", "--format=%h", "--", "../src"]
    return subprocess.run(asked, capture_output=True, text=True).stdout.strip()


# ---- the page


INTRODUCTION = """# The zoo: public models through chipwise's doors

Written by `python -m benchmarks.zoo --page`. {candidates} candidates, {tried} of them tried, {left} not
yet; {whole} rows are whole.
{versions}. Simulated CPU devices of one machine with 2 cores; the package is that of {commits}.

Candidates are found by `benchmarks/zoo_models.py`: of timm, torchvision and `keras.applications` the smallest
model of each file, of transformers every kind of configuration whose sizes can be cut by their names, and
PyTorch's own idioms of `benchmarks/zoo_idioms.py`. Images are the smallest of 64 pixels or more that a net
takes (of transformers 32), a batch is 6. Dropout and layer drop are on at each model's own rates. timm's drop
path is 0 by default, so its nets get `drop_path_rate=0.1` where their maker takes it. Weights are random, and
those that begin at 0 are drawn too: a zero hides what is behind it.

* **traces**: `cw.torch.task` or `cw.keras.task` makes a task.
* **outputs**, **step**: outputs in evaluation, and the loss and all gradients, against the framework's own.
  PyTorch in float64 on both sides, where the module computes in it. A net that draws is differentiated in
  evaluation mode here; what it draws is in the next column. **off** is the largest relative difference.
  A net that does not compute in float64, or is infinite there, is compared in float32: 100 times as much
  passes for outputs, 200 for a step, and 50 times that for outputs of half precision. Not compared are
  outputs that a model of Hugging Face names in `config.keys_to_ignore_at_inference`, as caches and memories:
  predictions leave them out. What draws in evaluation has no outputs to compare, so idioms draw in training
  alone: `gumbel_softmax` is a softmax in evaluation, which the function itself is not.
* **check**: the door's own comparison with eager PyTorch, random layers on. Keras' has none.
* **bits**: two steps with `replicas=3` end with the same parameters on 1 and 3 devices. SGD with a rate of
  0.01 and gradients clipped to a norm of 1: some nets come to a pixel an image, and batch norm over 2 of
  them has gradients of 1e10. Rows up to 0acb76ac: a rate of 1e-4, not clipped.
* **back**: the weights in their module, whose outputs are compared.
* **export**: StableHLO, else ONNX; the file was run. For any batch, and in {fixed} rows, whose last column
  says so, for `batch=6` alone. Rows up to 0acb76ac: for any batch alone.

A column is empty if it was not tried: after a model does not trace, and in rows of `--until traces` or
`doors`. Seconds are those of a processor.
"""


def first_cause(row: dict[str, Any]) -> tuple[str, str]:
    """The first column that fails, and why."""
    pairs = [line.partition(": ")[::2] for line in row["causes"]]
    return min((pair for pair in pairs if pair[0] in COLUMNS), key=lambda pair: COLUMNS.index(pair[0]))


def grouped(rows: list[dict[str, Any]]) -> list[tuple[str, list[dict[str, Any]]]]:
    """The rows by the code of their first cause, the most frequent first."""
    groups: dict[str, list[dict[str, Any]]] = collections.defaultdict(list)
    for row in rows:
        column, text = first_cause(row)
        code = re.match(r"off by|more than|\S+", text)
        groups[f"{column}: {code[0] if code else text}"].append(row)
    return sorted(groups.items(), key=lambda pair: (-len(pair[1]), pair[0]))


def said(marks: Iterable[str]) -> str:
    """How many of a column's marks are "yes", of those that there are."""
    counts = collections.Counter(marks)
    return f"{counts['yes']} of {counts['yes'] + counts['no']}"


def cell(text: str) -> str:
    return re.sub(r"\s+", " ", str(text)).replace("|", "\\|").replace("<", "&lt;")


def version(package: str) -> str:
    from .zoo_models import PACKAGES as BESIDE

    places = [str(BESIDE)] if BESIDE.exists() else []
    found = list(importlib.metadata.distributions(name=package, path=[*places, *os.sys.path]))
    return f"{package} {found[0].version}" if found else f"{package} absent"


def drawn_line(candidates: list[Candidate], file: Path, draw: str) -> str:
    """How a seeded draw did. *Arguments:* `draw`: COUNT:SEED, or COUNT:SEED:COMMIT+COMMIT for the rows of
    these commits of the package: the first try, whatever was mended by what it showed."""
    count, seed, *first = draw.split(":")
    commits = first[0].split("+") if first else []
    rows = rows_in(file, commits)
    own = [rows[c.key] for c in drawn(candidates, int(count), int(seed)) if c.key in rows]
    shares = ", ".join(f"{column} {said(row[column] for row in own)}" for column in COLUMNS)
    of = f" at {' and '.join(commits)}" if commits else ""
    whole = f"{sum(map(passed, own))} of {len(own)} that were tried pass every column; "
    return f"* `--draw {count} --seed {seed}`{of}: {whole if commits else ''}{shares}."


def page(candidates: list[Candidate], file: Path, draws: list[str]) -> str:
    rows = rows_in(file)
    known = [c.key for c in candidates]
    tried = [rows[key] for key in known if key in rows]
    versions = ", ".join(version(p) for p in PACKAGES)
    commits = sorted({row["commit"] for row in tried if row["commit"]})
    whole = sum(has(row, "all") for row in tried)
    fixed = sum(line.startswith("batch=") for row in tried for line in row["causes"])
    counts = {
        "whole": whole,
        "fixed": fixed,
        "candidates": len(known),
        "tried": len(tried),
        "left": len(known) - len(tried),
    }
    lines = [INTRODUCTION.format(**counts, versions=versions, commits=", ".join(commits))]
    lines += ["| source | candidates | tried | all columns | " + " | ".join(COLUMNS) + " |"]
    lines += ["|---" * (4 + len(COLUMNS)) + "|"]
    for source in (*SOURCES, "all"):
        of = [c for c in candidates if source in (c.source, "all")]
        own = [rows[c.key] for c in of if c.key in rows]
        whole = sum(map(passed, own))
        counts = [said(row[column] for row in own) for column in COLUMNS]
        lines.append(f"| {source} | {len(of)} | {len(own)} | **{whole}** | {' | '.join(map(str, counts))} |")
    lines += ["", "In the columns: how many say yes, of the models for which they were computed.", ""]
    lines += ["Seeded draws, each a sample of all candidates:", ""]
    lines += [drawn_line(candidates, file, draw) for draw in draws]
    failed = [row for row in tried if "no" in [row[column] for column in COLUMNS]]
    lines += [
        "",
        "## Causes",
        "",
        "By the first column that fails: how many models, and the one with the shortest name.",
        "",
    ]
    lines += ["| models | column: code | example | said |", "|---|---|---|---|"]
    for code, own in grouped(failed):
        first = min(own, key=lambda row: (len(row["name"]), row["name"]))
        text = first_cause(first)[1]
        lines.append(f"| {len(own)} | {cell(code)} | {first['source']}:`{first['name']}` | {cell(text)} |")
    for source in SOURCES:
        own = [row for row in tried if row["source"] == source]
        if not own:
            continue
        lines += ["", f"## {source}", ""]
        lines += ["| model | given | random | " + " | ".join(COLUMNS) + " | off | s | what fails |"]
        lines += ["|---" * (6 + len(COLUMNS)) + "|"]
        for row in sorted(own, key=lambda row: row["name"]):
            marks = [{"no": "**no**"}.get(row[column], row[column]) for column in COLUMNS]
            given = "" if row["given"] == "{}" else f"`{row['given'].strip('{}')}`"
            cells = [
                f"`{row['name']}`",
                given,
                row["random"],
                *marks,
                row["off"],
                f"{float(row['seconds']):.0f}",
            ]
            lines.append(f"| {' | '.join(map(cell, cells))} | {cell('; '.join(row['causes']))} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--draw", type=int, help="run a sample of this many candidates")
    parser.add_argument("--seed", type=int, default=1, help="of the sample")
    parser.add_argument(
        "--part", default="1/1", metavar="I/N", help="run each N-th candidate, from the I-th on"
    )
    parser.add_argument("--sources", nargs="+", choices=SOURCES, default=SOURCES, help="run those of these")
    parser.add_argument("--only", nargs="+", default=[], metavar="SOURCE:NAME", help="run these again")
    parser.add_argument("--rows", type=Path, default=HERE / "zoo.csv")
    parser.add_argument("--seconds", type=float, default=240, help="limit of a model, of a processor")
    parser.add_argument("--memory", type=int, default=7, help="limit of a model, GiB")
    parser.add_argument("--until", choices=LEVELS, default="all", help="how much of a row is computed")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--page", action="store_true", help="write zoo.md and run nothing")
    parser.add_argument(
        "--draws",
        default="100:1,100:2:286c076b+0acb76ac",
        help="the draws that the page tells of: COUNT:SEED, or COUNT:SEED:COMMIT for a first try",
    )
    given = parser.parse_args()
    candidates = stored()
    if given.page:
        (HERE / "zoo.md").write_text(page(candidates, given.rows, given.draws.split(",")))
        return
    if given.draw:
        chosen = drawn(candidates, given.draw, given.seed)
    else:  # in an order of no meaning, so that what there is of the rows is a sample too
        chosen = sorted(candidates, key=lambda c: hashlib.sha256(c.key.encode()).digest())
    chosen = [c for c in chosen if c.source in given.sources]
    if given.only:
        run([c for c in chosen if c.key in given.only], given)
        return
    part, parts = map(int, given.part.split("/"))
    done = {key for key, row in rows_in(given.rows).items() if has(row, given.until)}
    run([c for c in chosen[part - 1 :: parts] if c.key not in done], given)


if __name__ == "__main__":
    main()
