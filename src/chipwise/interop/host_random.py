"""The generators of PyTorch, NumPy and Python on the host.

A function that makes modules uses them, seeded. A traced program must not, since it would repeat
the numbers of its trace in every step.
"""

from __future__ import annotations

import contextlib
import functools
import pickle
import random
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from ..base import RecipeError
from ..recipe.user_code import is_framework, own_line

_LOCK = threading.RLock()
"""The generators are the process' own. So only one function that makes a module runs at a time."""


@contextlib.contextmanager
def seeded(torch: Any, seed: int) -> Iterator[None]:
    """A context with all generators seeded by `seed`, below 2^32, and one thread, since the last
    bits of LAPACK depend on their number. All are restored afterwards."""
    with _LOCK, torch.random.fork_rng(devices=[]):
        threads, before = torch.get_num_threads(), (random.getstate(), np.random.get_state())
        try:
            torch.set_num_threads(1)
            torch.default_generator.manual_seed(seed)  # that of the CPU alone, as is restored
            np.random.seed(seed)
            random.seed(seed)
            yield
        finally:
            torch.set_num_threads(threads)
            random.setstate(before[0])
            np.random.set_state(before[1])


def refuse_draws(torch: Any, module: Any, trace: Callable[[], Any]) -> None:
    """Calls `trace`. Raises `RecipeError` with the line of yours that draws from a generator of the
    host, or of the module. Numbers that the call seeds itself are the same at every call."""
    kinds = (random.Random, np.random.RandomState, np.random.Generator, torch.Generator)
    kept = [x for part in module.modules() for x in vars(part).values() if isinstance(x, kinds)]
    all_kept = [torch.default_generator, *kept]

    def states() -> bytes:
        own = [x.get_state().numpy() if type(x) is torch.Generator else x for x in all_kept]
        return pickle.dumps((random.getstate(), np.random.get_state(), own))

    before = states()
    trace()
    if states() == before:
        return
    # The second begins with other states, so only what it seeds itself is equal in both
    first, second = (_moves(trace, states) for _ in range(2))
    for (where, state), (_, other) in zip(first, second, strict=False):
        if state != other:
            raise RecipeError("torch-draws-once", module=type(module).__name__, where=where)


def _moves(trace: Callable[[], Any], states: Callable[[], bytes]) -> list[tuple[str, bytes]]:
    """The lines after which `states` differ, with the new states, while `trace` runs."""
    moves = [("", states())]
    looked_at = functools.cache(lambda name: not is_framework(name))

    def entered(frame: Any, *_: Any) -> Any:
        here = frame.f_lineno

        def passed(frame: Any, *_: Any) -> Any:
            nonlocal here
            if (now := states()) != moves[-1][1]:
                outer = traceback.walk_stack(frame.f_back)
                places = [(f.f_code.co_filename, line) for f, line in outer]
                name = frame.f_code.co_filename
                where = own_line([(name, here), *places]) or f"{name}:{here}"
                moves.append((where, now))
            here = frame.f_lineno
            return passed

        return passed if looked_at(frame.f_code.co_filename) else None

    before = sys.gettrace()
    sys.settrace(entered)
    try:
        trace()
    finally:
        sys.settrace(before)
    return moves[1:]
