"""The driver of the step: devices, layout, data, state, compilation, steps and evaluation.

`fit`, `Stepper`, the finders, `bench` and studies are small programs that use it:

    with Session(recipe, on) as session:
        session.begin()
        while session.step < session.total:
            session.advance()
        print(session.evaluate())
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections import deque
from collections.abc import Callable, Container
from typing import Any

import jax
import numpy as np

from ..base import Fact, RecipeError
from ..data.compared import Data, compared_data
from ..data.watch import Watch
from ..data.workers import chosen
from ..machine.arithmetic import settings, versions
from ..machine.kernels import stated
from ..recipe.recipe import Recipe
from ..recipe.task import Sum, Tree
from ..step.state import TrainState, count
from ..step.window import flat, window_length
from . import feed
from .alike_hosts import check_alike
from .calls import Calls
from .evaluate import Evaluator
from .folder.checkpoint import initial_train_state
from .indexed import in_training
from .on import ALL, On
from .placement import Placement, describe, lay_out, start_fact
from .programs import Outputs, Programs
from .state_digest import Pending
from .state_layout import StateLayout, drained
from .verify import Verifier


class Session:
    """Trains `recipe` on the machine's devices, step by step.

    The constructor detects the machine, makes the layout and checks the settings. It reads and
    compiles nothing. `begin` places a state, and `advance` starts steps, compiling them first if
    necessary.

    *Fields:* `warnings` and `start`: facts to show. `machine`, `layout`, `placement`. `abstract`:
    the state as shapes. `resident`: whether data stays on the devices. `step`: the number of
    started steps, of `total`. `watch`: measures waits for data. `programs`. `watched`: the steps
    whose summed gradient `digest` includes. `noisy`: those of `Programs.squared`. `verifier`:
    compares replicas. `calls`: how many steps one runs.

    Raises `RecipeError`, `DataError` or `DeviceError`.
    """

    watched: Container[int] = ()
    noisy: Container[int] = ()

    def __init__(self, recipe: Recipe, on: On = ALL):
        self.recipe, self.on = recipe, on
        self.total, self.step = recipe.clock.total or 0, 0
        self.machine, self.layout, warnings = lay_out(recipe, on)
        self.placement = Placement.laid(self.machine, self.layout)
        check_alike(self.placement.hosts, recipe, self.machine.chip, lambda: self.data_compared)
        self.abstract, self._index = in_training(recipe)
        self.warnings: list[Any] = [*warnings, *recipe.warnings()]
        chosen(recipe.task.train, on.workers)  # raises for impossible workers
        fits = feed.resident(recipe.task.train, self.placement.memory_bytes, on.feed)
        # In the memory of every host's devices
        self.resident = self.placement.all("resident", fits)
        about: dict[str, Any] = {"resident": self.resident, "state": self.abstract}
        about |= {"shard_optimizer": on.shard_optimizer, "outputs": Outputs(squares=on.noise)}
        self.programs = Programs(recipe, self.layout, self.placement, kernels=on.kernels, **about)
        self.verifier = Verifier(self.programs, on.verified)
        self.calls = Calls(on, self.programs)
        self._window = window_length(recipe)  # for which the program is compiled
        self._columns: dict[str, np.ndarray] | None = None
        self._placed: list | None = None
        self._carry: list[TrainState] = []
        self._data: Any = None  # `feed.Resident` or `feed.Streamed`, from `begin` on
        self._evaluator: Evaluator | None = None
        self.watch = Watch(recipe.task.train, None, self.placement.share)
        self._open = contextlib.ExitStack()
        self._queued: deque[Any] = deque()

    @functools.cached_property
    def data_compared(self) -> Data:
        """How far the recipe's data is compared. Reads some of it, so it is asked for before the
        feed reads in its threads."""
        return compared_data(self.recipe.task)

    @property
    def start(self) -> Fact:
        """The machine, the layout and the precision."""
        return start_fact(self.machine, self.layout, self.recipe.precision, self.programs.kernels)

    def describe(self) -> dict[str, Any]:
        """The machine, the layout, the precision and the size of the model as plain JSON values."""
        whole = "flat" if self.recipe.optimizer.elementwise else "whole"
        return {
            **describe(self.machine, self.layout, self.programs.kernels),
            "precision": self.recipe.precision,
            "parameters": count((self.abstract.params, self.abstract.frozen)),
            "task_state": count(self.abstract.state),
            "update": "sharded" if self.state_layout.sharded else whole,
        }

    def computed(self) -> dict[str, Any]:
        """What may change a bit besides the recipe, as plain JSON values. Traces the step."""
        layout, names = self.layout, ("together", "shards", "exact")
        return {
            "code": self.programs.digest,
            "layout": [self.machine.kind, *(getattr(layout, name) for name in names)],
            "settings": settings(),
            "versions": versions(),
            **stated(self.programs.kernels),
        }

    def computes(self) -> dict[str, Any]:
        """`computed`, and a digest of what its evaluation computes, once evaluation data is read
        (`read`)."""
        evaluator = self._evaluator
        return {
            **self.computed(),
            "evaluation": None if evaluator is None else evaluator.computes.digest,
        }

    @property
    def state_layout(self) -> StateLayout:
        """The layout of the state on the devices."""
        return self.programs.state_layout

    # ---- data and state

    def read(self, *, evaluation: bool = False) -> dict[str, Sum]:
        """Reads training data, and evaluation data if wanted. *Returns* the shapes of its sums.
        Raises `DataError`."""
        task = self.recipe.task
        if self.resident and self._columns is None and self._placed is None:
            self._columns = self._index.read(task.train, "training")
        wanted = evaluation and task.eval is not None
        return self._opened_evaluator().computes.sums if wanted else {}

    def begin(
        self,
        state: TrainState | None = None,
        recipe: Recipe | None = None,
        *,
        last: int | None = None,
    ) -> None:
        """Continues from `state`, of NumPy arrays, or from the recipe's first state, and starts the
        feed. The arrays may be on devices, as in `StateLayout.template`.

        *Arguments:* `recipe`: the recipe from now on, with the same programs, so that only
        schedules, seed and duration may differ. `last`: the step at which to stop, if it is before
        the recipe's last.
        """
        self._open.close()
        if recipe is not None:
            if recipe.seed != self.recipe.seed and self._evaluator is not None:
                self._evaluator.close()  # its program holds the seed
                self._evaluator = None
            self.recipe, self.total = recipe, recipe.clock.total or 0
        self.read()
        self._carry = []  # frees the previous state's memory
        state = initial_train_state(self.recipe, self.abstract) if state is None else state
        self._carry = (
            self.state_layout.first(self.recipe) if state is None else self.state_layout.put(state)
        )
        self.step = self.placement.hosts.pace.step = int(self._carry[0].step)
        self._queued.clear()
        if self.step >= (self.total if last is None else last):
            return
        if self._columns is not None:
            self._placed = self.placement.put(flat(self._columns))
            self._columns = None  # frees the host's copy
        if self._placed is not None:
            self._data = feed.Resident(self._placed)
        else:
            self._data = feed.Streamed(self.recipe, self.placement, self.step, self._index, self.on)
        self._open.callback(self._data.close)
        self._windows = feed.StepWindows(self.recipe, self.placement, self.step, self._window)
        self._open.callback(self._windows.close)
        self.watch = Watch(self.recipe.task.train, self._data.stream, self.placement.share)

    @property
    def data(self) -> Fact:
        """Whether data is on the devices or streamed, and its size."""
        return self._data.described(self.recipe.task.train)

    def compile(self, steps: int = 1) -> None:
        """Compiles the step, unless that is done. *Arguments:* `steps`: how many will run. If these
        are many, the program that runs many in a call is compiled too."""
        if not self.programs.compiled:
            began = time.perf_counter()
            if self.placement.hosts.count > 1:
                code = {"code (digest of the step's programs)": self.programs.digest}
                self.placement.hosts.compare("programs", {"host-differs": code})
            self.programs.compile()
            # Otherwise collectives wait for hosts that compile
            self.placement.all("compiled", True)
            if self.calls.pay(steps, time.perf_counter() - began):
                self.programs.compile_steps()
                self.calls.compare(self._carry, self._windows, self._data, self.step, self.total)

    # ---- steps

    def advance(self, steps: int = 1, stopped: Callable[[], bool] = lambda: False) -> bool:
        """Starts `steps` steps. Waits only for data, and when some tens of steps are queued.

        *Returns* whether they were started. This is false once `stopped()`.
        """
        last = self.step + steps
        if last > self.total:
            raise RecipeError("session-ended", total=self.total, step=self.step, steps=steps)
        self.compile(steps)
        while self.step < last:
            batch = self._data.at(
                self.step, lambda: not self._queued or self._queued[-1].is_ready(), stopped
            )
            if batch is None:
                return False
            window, noted = self._windows.at(self.step), (self.watched, self.noisy)
            count = self.calls.count(self.step, min(last, self._windows.end), *noted)
            if count > 1:
                self._carry, token = self.programs.steps(self._carry, window, batch, count)
            else:
                outputs = Outputs(*(self.step + 1 in steps for steps in noted))
                rechecks = self.verifier.due(self.recipe.seed, self.step + 1)
                given = self._carry, window, batch, outputs, rechecks
                self._carry, token = self.programs.step(*given)
            self.step += count
            self._queued.extend([token] * count)
            self.placement.hosts.pace.advanced(self.step, self._queued)
            while len(self._queued) > min(self.calls.ahead, self._data.in_use - 1):
                self._queued.popleft().block_until_ready()
        return True

    def drain(self, keep: bool = False) -> dict[str, Any]:
        """Returns the metric sums of the steps since the last `drain`, on the device. With `keep`,
        they stay in the state, and must be read before the next step."""
        sums, empty = drained(self._carry)
        self._carry = self._carry if keep else empty
        return sums

    def wait(self) -> None:
        """Waits until all started steps are done."""
        jax.block_until_ready(self._carry)
        self._queued.clear()

    # ---- state and metrics

    def snapshot(self) -> TrainState:
        """A copy of the state: see `StateLayout.snapshot`."""
        return self.state_layout.snapshot(self._carry)

    def digest(self) -> list[Pending]:
        """Starts digests of the state. See `Programs.digest_of`."""
        return self.programs.digest_of(self._carry)

    def parameters(self) -> tuple[Tree, Tree]:
        """All parameters and the task's state, as arrays like those of `snapshot`. Waits."""
        return self.state_layout.parameters(self._carry)

    def _opened_evaluator(self) -> Evaluator:
        """Reads evaluation data, and checks that the loss can evaluate. Raises `DataError` without
        data."""
        if self._evaluator is None:
            self._evaluator = Evaluator(self.recipe, self.placement, on=self.on)
        return self._evaluator

    def evaluate(self) -> dict[str, Any]:
        """Metric name to value over the task's `eval` source, with averaged parameters if there are
        any. Waits."""
        self.wait()
        return self._opened_evaluator()(*self.state_layout.average(self._carry))

    def forget_optimizer(self) -> None:
        """Frees the memory of the optimizer's state for an evaluation. No step may follow."""
        self._carry = [dataclasses.replace(state, optimizer=None) for state in self._carry]

    def close(self) -> None:
        """Stops the threads that read data. The state stays readable."""
        self._open.close()
        if self._evaluator is not None:
            self._evaluator.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: object, error: BaseException | None, where: object) -> None:
        if error is not None:
            self.placement.hosts.failed(error)
        self.close()
