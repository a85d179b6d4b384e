"""The process of one contender: `python -m benchmarks.feed.child WORK PHOTOGRAPHS CASE CONTENDER`.

For each line on standard input, a number of seconds, it reads for that long and answers with a line of JSON.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from .contenders import CASES, Contender
from .data import Images, sets

DRAINED = 8  # at most; batches that were ready before a turn, not timed
WARM_SECONDS = 1.0


def own_memory() -> int:
    """The anonymous and shared memory of this process and its children in bytes, without mapped files; shared
    memory counts once."""
    total = 0
    for process in (psutil.Process(), *psutil.Process().children(recursive=True)):
        try:
            lines = Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()
        except (FileNotFoundError, ProcessLookupError):  # it ended meanwhile
            continue
        sizes = {line.split()[0]: int(line.split()[1]) << 10 for line in lines[1:]}
        total += sizes["Pss_Anon:"] + sizes["Pss_Shmem:"]
    return total


class Turns:
    """A contender being measured."""

    def __init__(self, images: Images, store: str, contender: Contender):
        self._images = images
        self._made: Any = contender.read(images, store, **contender.options)
        if not callable(self._made):
            image, label = next(self._made)
            wanted = (images.batch, images.side, images.side, 3)
            assert image.shape == wanted and image.dtype == np.uint8, (image.shape, image.dtype)
            assert label.shape == wanted[:1] and np.isin(label, range(len(images.classes))).all(), label

    def turn(self, seconds: float) -> float:
        """Examples a second over about `seconds`, after batches that were read before are used up."""
        if callable(self._made):
            return self._made(seconds)
        # A slow contender has fewer ready, and must not take minutes
        began, drained = time.perf_counter(), 0
        while drained < DRAINED and time.perf_counter() - began < 2 * seconds:
            next(self._made)
            drained += 1
        examples, began = 0, time.perf_counter()
        while True:
            image, _ = next(self._made)
            examples += len(image)
            taken = time.perf_counter() - began
            if taken >= seconds:
                return examples / taken


def main() -> None:
    work, photographs, case_name, contender_name = sys.argv[1:]
    case = next(c for c in CASES if c.name == case_name)
    contender = next(c for c in case.contenders if c.name == contender_name)
    for module in contender.needs:
        if module != "torchvision":  # whose compiled library alone is used
            importlib.import_module(module)
    before = own_memory()
    turns = Turns(sets(Path(work), int(photographs))[case.images], case.store, contender)
    turns.turn(WARM_SECONDS)
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        rate = turns.turn(float(line))
        memory = own_memory()
        print(json.dumps({"rate": rate, "memory": memory, "grown": memory - before}), flush=True)


if __name__ == "__main__":
    main()
