"""How many steps of a small net one call runs, and how many the host starts ahead of the device.

Calls of a small net's programs take longer than their work. A device that is the only one may run
many steps in a call (`Step.in_a_row`), with the bits of single ones.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Any

import jax
import jax.numpy as jnp

from ..step.state import fingerprint
from .on import On
from .programs import Carry, Programs

QUEUED_STEPS = 32  # that the host may run ahead of the device; a stop takes effect within these
QUEUED_ON_CPUS = 4
"""The same for several CPU devices. XLA starts a program in a pool with one thread per device. A
thread waits while its device has 32 unfinished programs. Others may wait in a collective for a
device that then has no thread, so that all wait forever. A step has at most seven programs per
device, and more with LAMB, LARS, additions of a cover, or replicas that are compared. With the last
two, half as many steps are queued."""

MANY = 32
"""The steps of a call by default, where it runs many. More save little, and delay a stop."""
SAVED_SECONDS = 50e-6
"""What a call of many steps saves in a step: 44 to 90 microseconds on two cores, for a dense net of
two layers and for `digits`."""
GRAPH_CALLS = 3
"""Calls of a GPU's program until all that runs it has run: XLA starts its kernels one by one at
first, records a CUDA graph in the second call, and changes the graph's addresses in the third."""
LITTLE = 3e7
"""FLOPs of a step that takes some milliseconds, so that its calls hardly matter."""


class Calls:
    """The calls of a session's `programs`. *Fields:* `ahead`: the number of steps that the host may
    run ahead of the device."""

    def __init__(self, on: On, programs: Programs):
        self._asked, self._verifies, self._programs = on.steps_per_call, on.verified, programs
        self.ahead = QUEUED_STEPS
        if programs.placement.lead.platform == "cpu" and len(programs.placement.devices) > 1:
            plain = programs.layout.aligned and not on.verified
            self.ahead = QUEUED_ON_CPUS if plain else QUEUED_ON_CPUS // 2

    @property
    def asked(self) -> int:
        """The most steps of a call that the user asked for. 1 leaves it to chipwise."""
        return 1 if isinstance(self._asked, str) else self._asked

    @property
    def most(self) -> int:
        """The most steps of a call."""
        if "steps" not in self._programs.compiled or self._verifies:
            return 1
        return MANY if isinstance(self._asked, str) else self._asked

    def pay(self, steps: int, compiling: float) -> bool:
        """Whether to compile the program that runs many steps, for a run of `steps`. This takes
        about as many seconds as `compiling` those of a single step."""
        if steps == 1 or self._verifies:
            return False
        if not isinstance(self._asked, str):
            return self._asked > 1
        if self._programs.placement.lead.platform == "gpu":
            return False  # nobody has measured it there
        little = (self._programs.flops_per_step_per_device or 0) <= LITTLE
        return little and steps * SAVED_SECONDS > compiling

    def compare(self, carry: Carry, windows: Any, data: Any, step: int, total: int) -> None:
        """Keeps the program of many steps only if a call of it ends, from `carry` after step
        `step`, with the bits of single steps. Its kernels say as much, and this does not trust
        their text alone."""
        if self.most == 1:
            return
        window = windows.at(step)
        steps = min(self.most, windows.end - step, total - step)
        if steps < 2:
            return
        placed = data.at(step, lambda: True, lambda: False)  # data is resident, so none is taken
        (state,) = carry

        def begun() -> Carry:
            # No step changes what is frozen
            return [jax.tree.map(jnp.copy, state.with_frozen(None)).with_frozen(state.frozen)]

        single = begun()
        for _ in range(steps):
            single, _ = self._programs.step(single, window, placed)
        on_gpu = self._programs.placement.lead.platform == "gpu"
        # Arrays of earlier calls stay, so that each call has its own at other addresses
        ended = [single] + [
            self._programs.steps(begun(), window, placed, steps)[0]
            for _ in range(GRAPH_CALLS if on_gpu else 1)
        ]
        if len({fingerprint(one.with_frozen(None)) for (one,) in ended}) > 1:
            del self._programs.compiled["steps"]

    def count(self, done: int, last: int, *noted: Container[int]) -> int:
        """The number of steps of the call after step `done`, up to step `last`. A step that is
        `noted` computes something besides its result, in a call of its own."""
        last = min(last, done + self.most)
        for step in range(done + 1, last + 1):
            if any(step in some for some in noted):
                return max(1, step - 1 - done)
        return last - done
