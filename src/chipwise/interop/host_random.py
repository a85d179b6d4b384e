"""The generators of PyTorch, NumPy and Python on the host, which a function that makes modules
uses."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np


@contextlib.contextmanager
def seeded(torch: Any, seed: int) -> Iterator[None]:
    """A context with all generators seeded by `seed`, below 2^32, and one thread, since the last
    bits of LAPACK depend on their number. All are restored afterwards."""
    threads, before = torch.get_num_threads(), (random.getstate(), np.random.get_state())
    with torch.random.fork_rng(devices=[]):
        try:
            torch.set_num_threads(1)
            torch.manual_seed(seed)
            np.random.seed(seed)
            random.seed(seed)
            yield
        finally:
            torch.set_num_threads(threads)
            random.setstate(before[0])
            np.random.set_state(before[1])
