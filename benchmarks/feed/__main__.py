"""Measures examples a second from disk to host memory, for several loaders of the same images, in one run.

    python -m benchmarks.feed --cifar DIR           # minutes, from the repository's root

DIR has CIFAR-10 as `train/<class>/*.jpg` and `test/<class>/*.jpg`. The images are first converted to every
format, 4 GB in a scratch folder (`--work`), and kept there. The other loaders are not dependencies of
chipwise; install them separately,

    pip install --target OTHERS --no-deps grain==0.2.18 array-record bagz webdataset braceexpand \\
        etils absl-py cloudpickle dm-tree wrapt attrs portpicker torchvision

and add OTHERS to PYTHONPATH. Missing loaders get a row that says so. FFCV is always missing, since its build
needs the development files of OpenCV and libturbojpeg. Only the compiled library of torchvision is used,
which may need the CUDA libraries it was built with.

Every contender has its own process. A round runs all of them, one at a time, each for a fraction of a second;
figures are medians of the rounds. Writes `results.json`, a record, and from it `feed.md` and `docs/feed.svg`.
Fails if chipwise's batches take more memory than their limit.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

from chipwise.machine.host_facts import installed
from chipwise.machine.record import Record, Series, read

from . import page
from .contenders import CASES, LIMIT_BYTES, Case, Contender
from .data import prepare

RESULTS = Path(__file__).parent / "results.json"
ROOT = Path(__file__).parents[2]
START_SECONDS, TURN_SECONDS = 120, 60  # after which a contender counts as hanging
SLACK_BYTES = 64 << 20  # of chipwise besides its batches, for reading and decoding
PACKAGES = (
    "grain",
    "array_record",
    "bagz",
    "torch",
    "torchvision",
    "webdataset",
    "pillow",
    "simplejpeg",
    "numpy",
)


class Child:
    """A contender's process."""

    def __init__(self, case: Case, contender: Contender, options: argparse.Namespace):
        self.contender = contender
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed with the process)
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "benchmarks.feed.child", str(options.work)]
            + [str(options.photographs), case.name, contender.name],
            cwd=ROOT, env={**os.environ, "JAX_PLATFORMS": "cpu"}, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, start_new_session=True,
        )  # fmt: skip
        self._lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def answer(self, timeout: float) -> dict[str, Any]:
        """Its next line. Raises `RuntimeError` with the last line of its errors if it ended or hangs."""
        try:
            line = self._lines.get(timeout=timeout)
        except queue.Empty:
            raise RuntimeError(f"no answer in {timeout} s") from None
        if not line:
            self._errors.seek(0)
            raise RuntimeError(([line for line in self._errors.read().splitlines() if line] or ["ended"])[-1])
        return json.loads(line)

    def turn(self, seconds: float) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{seconds}\n")
        self._process.stdin.flush()
        return self.answer(TURN_SECONDS)

    def close(self) -> None:
        assert self._process.stdin is not None
        os.killpg(self._process.pid, signal.SIGKILL)  # with its workers, which might stay for ever
        self._process.wait()
        self._process.stdin.close()
        self._errors.close()


def run(case: Case, options: argparse.Namespace) -> dict[str, Any]:
    """Rounds of all contenders: name to its answers, or to the reason for its absence."""
    children: list[Child] = []
    made: dict[str, Any] = {}
    try:
        for contender in case.contenders:
            missing = contender.missing()
            if missing:
                made[contender.name] = f"not installed: {', '.join(missing)}"
            else:
                children.append(Child(case, contender, options))
        for child in list(children):
            try:
                child.answer(START_SECONDS)
                made[child.contender.name] = []
            except RuntimeError as error:
                made[child.contender.name] = f"failed: {error}"
                child.close()
                children.remove(child)
        for number in range(options.rounds):
            turned = number % max(1, len(children))  # so that the order varies
            for child in children[turned:] + children[:turned]:
                made[child.contender.name].append(child.turn(options.seconds))
            print(f"{case.title}: round {number + 1} of {options.rounds}", flush=True)
    finally:
        for child in children:
            child.close()
    return {contender.name: made[contender.name] for contender in case.contenders}


def record(results: dict[str, dict[str, Any]], options: argparse.Namespace) -> Record:
    """The record of a run. In `measured`, `absent` has the absent contenders with reasons, `memory` the peak
    bytes of each, and `grown` the part of it that reading added."""
    ran = {
        f"{case}/{name}": answers
        for case, contenders in results.items()
        for name, answers in contenders.items()
        if isinstance(answers, list)
    }
    absent = {
        f"{case}/{name}": answers
        for case, contenders in results.items()
        for name, answers in contenders.items()
        if isinstance(answers, str)
    }
    return Record.now(
        "feed-comparison",
        "feed",
        measured={
            "rounds": options.rounds,
            "seconds": options.seconds,
            "photographs": options.photographs,
            "limit_bytes": LIMIT_BYTES,
            "slack_bytes": SLACK_BYTES,
            "versions": {name: installed(name) for name in PACKAGES},
            "memory": {name: max(a["memory"] for a in answers) for name, answers in ran.items()},
            "grown": {name: max(a["grown"] for a in answers) for name, answers in ran.items()},
            "absent": absent,
        },
        figures={
            name: Series("examples/s", tuple(a["rate"] for a in answers)) for name, answers in ran.items()
        },
    )


def check_memory(made: Record) -> None:
    """Raises `AssertionError` if chipwise's batches took more than their limit."""
    for name, grown in made.measured["grown"].items():
        if "/chipwise" in name:
            most = made.measured["limit_bytes"] + made.measured["slack_bytes"]
            assert grown <= most, f"{name} took {grown:,} bytes, its limit and slack are {most:,}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cifar", type=Path, required=True, help="CIFAR-10 as folders of JPEGs")
    scratch = Path(tempfile.gettempdir()) / "chipwise-feed"
    parser.add_argument("--work", type=Path, default=scratch, help="scratch folder for the formats")
    parser.add_argument("--photographs", type=int, default=4096, help="crops of 224 × 224 to make")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.6, help="of a turn")
    parser.add_argument(
        "--only", help="of the cases " + ", ".join(c.name for c in CASES) + ": some, nothing is written"
    )
    parser.add_argument("--page", action="store_true", help="draw the last results again, measure nothing")
    options = parser.parse_args()
    if not options.page:
        prepare(options.work, options.cifar, options.photographs)
        cases = [c for c in CASES if options.only is None or c.name in options.only.split(",")]
        made = record({case.name: run(case, options) for case in cases}, options)
        print("\n".join(page.tables(made)))
        check_memory(made)
        if options.only is not None:
            return
        made.write(RESULTS)
    page.write(read(RESULTS), RESULTS.parent / "feed.md", ROOT / "docs" / "feed.svg")


if __name__ == "__main__":
    main()
