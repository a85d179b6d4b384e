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
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from ..data.sources import sample_digest
from ..data.watch import Watch
from ..data.workers import chosen
from ..errors import RecipeError
from ..machine.fingerprint import this_machine
from ..recipe.recipe import Recipe
from ..recipe.task import Tree
from ..words.facts import Fact
from . import feed
from .evaluate import Evaluator
from .flat import Flat
from .freeze import whole_params
from .groups import GroupPrograms
from .on import ALL, On
from .placement import Placement, describe, lay_out, start_fact
from .programs import Programs, check_steps_per_call
from .sharding import Sharding
from .state import TrainState, abstract_state, count, first_maker, first_state

QUEUED_STEPS = 32  # that the host may run ahead of the device; a stop takes effect within these
QUEUED_ON_CPUS = 4
"""The same for several CPU devices. XLA starts a program in a pool with one thread per device. A thread waits
while its device has 32 unfinished programs, and others may wait in a collective for a device that then has no
thread, so that all wait forever. A step has at most seven programs per device, and eleven with LAMB or LARS,
of which half as many are queued."""


class Session:
    """Training `recipe` on the machine's devices, step by step.

    The constructor detects the machine, makes the layout and checks the settings; it reads and compiles
    nothing. `begin` places a state, and `advance` starts steps, compiling them first if necessary.

    *Arguments:* `steps_per_call`: as in `fit`.

    *Fields:* `warnings` and `start`, facts to show; `machine`, `layout`, `placement`; `abstract`, the state
    as shapes; `resident`, whether data is kept on the devices; `step`, the number of started steps, of
    `total`; `watch`, which measures waits for data; `programs`.

    Raises `RecipeError`, `DataError` or `DeviceError`.
    """

    def __init__(self, recipe: Recipe, on: On = ALL, *, steps_per_call: int | None = 1):
        self.recipe, self.on = recipe, on
        self.total, self.step = recipe.clock.total or 0, 0
        self.machine, self.layout, warnings = lay_out(recipe, on)
        self.placement = Placement(self.machine, self.layout.devices, recipe.shards)
        self._compare()
        self.abstract = abstract_state(recipe)
        self.warnings: list[Any] = [*warnings, *recipe.warnings()]
        chosen(recipe.task.train, on.workers)  # raises for impossible workers
        memory = self.placement.memory_bytes
        # Only if every host has enough memory
        self.resident = self.placement.all("resident", feed.resident(recipe.task.train, memory, on.feed))
        if steps_per_call not in (None, 1):
            check_steps_per_call(steps_per_call, self.layout, self.resident)
        step: dict[str, Any] = {"resident": self.resident, "state": self.abstract}
        self._groups: GroupPrograms | None = None
        if recipe.shards > 1:
            self._groups = GroupPrograms(recipe, self.layout, self.placement, **step)
        self.programs: Programs = self._groups or Programs(
            recipe, self.layout, self.placement, **step, shard_optimizer=on.shard_optimizer
        )
        self._steps_per_call = steps_per_call
        self._window = feed.window_length(recipe)  # for which the program is compiled
        self._columns: dict[str, np.ndarray] | None = None
        self._placed: list | None = None
        self._evaluator: Evaluator | None = None
        self._open = contextlib.ExitStack()
        self._queued: deque[Any] = deque()

    def _compare(self) -> None:
        """Raises `DeviceError`, which names the host, if hosts have different recipes, data or chips."""
        here, task = self.placement.hosts, self.recipe.task
        if here.count == 1:
            return
        data = {"training": sample_digest(task.train), "evaluation": sample_digest(task.eval)}
        chip = self.machine.kind if self.machine.platform != "cpu" else this_machine().cpu
        here.compare(
            "recipe",
            {
                "host-differs-recipe": self.recipe.describe(),
                "host-differs-data": data,
                "host-differs": {"chip": chip},
            },
        )

    @property
    def start(self) -> Fact:
        """The machine, the layout and the precision."""
        return start_fact(self.machine, self.layout, self.recipe.precision)

    def describe(self) -> dict[str, Any]:
        """The machine, the layout, the precision and the size of the model as plain JSON values."""
        update = "flat" if self.recipe.optimizer.on_vector else "whole"
        update = update if self._sharding is None and self._groups is None else "sharded"
        return {
            **describe(self.machine, self.layout),
            "precision": self.recipe.precision,
            "parameters": count((self.abstract.params, self.abstract.frozen)),
            "task_state": count(self.abstract.state),
            "update": update,
        }

    @property
    def template(self) -> TrainState:
        """The shapes of a checkpoint's arrays; with groups, with shardings on the first group."""
        return self.abstract if self._groups is None else self._groups.template

    @property
    def saved_axes(self) -> Tree:
        """With groups, the axis along which each array of `snapshot` is cut, or -1; otherwise None."""
        return None if self._groups is None else self._groups.functions.saved_axes.without("saved")

    # ---- data and state

    def read(self, *, evaluation: bool = False) -> None:
        """Reads training data that is kept on the devices, and evaluation data, if there is any and it is
        wanted now. Raises `DataError`."""
        task = self.recipe.task
        if self.resident and self._columns is None and self._placed is None:
            self._columns = feed.read(task.train, task.classes, "training")
        if evaluation and task.eval is not None:
            self._open_evaluation()

    def begin(
        self, state: TrainState | None = None, recipe: Recipe | None = None, *, last: int | None = None
    ) -> None:
        """Continues from `state`, of NumPy arrays, or from the recipe's first state, and starts the feed.
        With groups, the arrays may be on the run's first group, as in `GroupPrograms.template`.

        *Arguments:* `recipe`: the recipe from now on, with the same programs, so that only schedules, seed
        and duration may differ; `last`, the step at which to stop, if it is before the recipe's last.
        """
        self._open.close()
        if recipe is not None:
            if recipe.seed != self.recipe.seed and self._evaluator is not None:
                self._evaluator.close()  # its program holds the seed
                self._evaluator = None
            self.recipe, self.total = recipe, recipe.clock.total or 0
        self.read()
        self._carry: list[TrainState] = []  # frees the previous state's memory
        self._carry = self._placed_state(state)
        self.step = int(self._carry[0].step)
        self._queued.clear()
        if self.step >= (self.total if last is None else last):
            return
        if self._columns is not None:
            self._placed = self.placement.put(feed.flat(self._columns))
            self._columns = None  # frees the host's copy
        self._data: Any
        if self._placed is not None:
            self._data = feed.Resident(self._placed)
        else:
            self._data = feed.Streamed(self.recipe, self.placement, self.step, self.on.workers)
        self._open.callback(self._data.close)
        self._windows = feed.Windows(self.recipe, self.placement, self.step, self._window)
        self._open.callback(self._windows.close)
        share = len(self.placement.local) / self.placement.groups
        self.watch = Watch(self.recipe.task.train, self._data.stream, share)

    def _placed_state(self, state: TrainState | None) -> list[TrainState]:
        """`state`, or by default the first state, on every local group."""

        def alike(tree: Tree) -> Tree:
            return self.placement.broadcast(tree, tree)

        if self._groups is not None:
            if state is None:
                return self._groups.first(self.recipe, self._make_first, alike)
            return self._groups.put(state)
        if state is None:
            with jax.default_device(self.placement.lead):
                state = first_state(self.recipe, self._make_first, alike)
        params = self._flat.pack_host(jax.device_get(state.params))
        put: Callable[[Any], list[Any]] = self.placement.put
        if self._sharding is not None:
            put = self._sharding.put if state.optimizer is not None else self._sharding.first
        return put(dataclasses.replace(state, params=params))

    @property
    def data(self) -> Fact:
        """Whether data is on the devices or streamed, and its size."""
        return self._data.described(self.recipe.task.train)

    def compile(self, *, trial: bool = False) -> Fact | None:
        """Compiles the step, unless that is done. *Returns* the steps per call, if there was a choice.

        *Arguments:* `trial`: whether to measure several steps per call if `steps_per_call` is None.
        """
        if self.programs.compiled:
            return None
        window = self._windows.at(self.step)
        data = self._placed if self._placed is not None else self.programs.data_shapes()
        at_once = 1 if self._steps_per_call is None and not trial else self._steps_per_call
        decided = self.programs.compile(self._carry, window, data, at_once)
        self.placement.all("compiled", True)  # otherwise collectives wait for hosts that compile
        return decided

    # ---- steps

    @property
    def steps_at_once(self) -> int:
        """The largest number of steps in one call."""
        return self.programs.steps_at_once

    def advance(self, steps: int = 1, stopped: Callable[[], bool] = lambda: False) -> bool:
        """Starts `steps` steps. Waits only for data, and when some tens of steps are queued.

        *Returns* whether they were started; false once `stopped()`.
        """
        self.compile()
        last = self.step + steps
        if last > self.total:
            raise RecipeError("session-ended", total=self.total, step=self.step, steps=steps)
        while self.step < last:
            batch = self._data.at(self.step, lambda: not self._queued or self._queued[-1].is_ready(), stopped)
            if batch is None:
                return False
            count = min(self.steps_at_once, last - self.step, self._windows.left(self.step))
            self._carry, token = self.programs.step(self._carry, self._windows.at(self.step), batch, count)
            self.step += count
            self._queued.append(token)
            if len(self._queued) > self.ahead:
                self._queued.popleft().block_until_ready()
        return True

    @property
    def ahead(self) -> float:
        """The number of calls that the host may run ahead of the device."""
        several_cpus = self.placement.lead.platform == "cpu" and len(self.placement.devices) > 1
        queued = QUEUED_ON_CPUS if several_cpus else QUEUED_STEPS // self.steps_at_once
        if several_cpus and self.recipe.optimizer.by_layer:
            queued //= 2
        return min(queued, self._data.in_use - 1)

    def timed(self, steps: int) -> float:
        """Starts `steps` steps and waits until they are done. *Returns* the seconds."""
        began = time.perf_counter()
        self.advance(steps)
        self.wait()
        return time.perf_counter() - began

    def drain(self) -> dict[str, Any]:
        """The metric sums of the steps since the last `drain`, on the device."""
        sums, self._carry = self.programs.drain(self._carry)
        return sums

    def wait(self) -> None:
        """Waits until all started steps are done."""
        jax.block_until_ready(self._carry)
        self._queued.clear()

    # ---- state and metrics

    def snapshot(self) -> TrainState:
        """A copy of the state as NumPy arrays; with groups, as arrays on the first local group. Waits, for
        all hosts if the state is sharded over them."""
        state = self._carry[0]
        if self._groups is not None:
            return self._groups.snapshot(state)
        if self._sharding is not None:
            if state.optimizer is None:  # forgotten
                return self._host(dataclasses.replace(state, ema=self._ema()))
            optimizer, ema = self._sharding.whole([(part.optimizer, part.ema) for part in self._carry])
            state = dataclasses.replace(state, optimizer=optimizer, ema=ema)
        return self._host(state)

    def parameters(self) -> tuple[Tree, Tree]:
        """All parameters and the task's state, as arrays like those of `snapshot`. Waits."""
        if self._groups is not None:
            state = self._groups.snapshot(dataclasses.replace(self._carry[0], optimizer=None, ema=None))
        else:
            state = self._host(dataclasses.replace(self._carry[0], optimizer=None, ema=None, sums={}))
        return whole_params(state.params, state.frozen), state.state

    def _host(self, state: TrainState) -> TrainState:
        # Copied: on the CPU, `device_get` returns a view of memory that the next step reuses.
        host = jax.tree.map(np.array, jax.device_get(state))
        return dataclasses.replace(host, params=self._flat.unpack(host.params))

    def _open_evaluation(self) -> None:
        """Reads evaluation data, and checks that the loss can evaluate. Raises `DataError` without data."""
        if self._evaluator is None:
            self._evaluator = Evaluator(self.recipe, self.placement, workers=self.on.workers)

    def evaluate(self) -> dict[str, Any]:
        """Metric name to value over the task's `eval` source, with averaged parameters if there are any.
        Waits."""
        self._open_evaluation()
        assert self._evaluator is not None
        self.wait()
        states = [dataclasses.replace(s, optimizer=None, ema=None, sums={}) for s in self._carry]
        state, average = self.placement.gather(states), self._ema()
        if self._groups is not None:
            vector, averaged = (state.params, False) if average is None else (average, True)
            params = whole_params(self._groups.unpack(vector, averaged), state.frozen)
            return self._evaluator(params, state.state)
        unpack, vector = (self._unpack, state.params) if average is None else (self._unpack_average, average)
        return self._evaluator(whole_params(unpack(vector), state.frozen), state.state)

    def forget_optimizer(self) -> None:
        """Frees the memory of the optimizer's state for an evaluation; no step may follow."""
        self._carry = [dataclasses.replace(state, optimizer=None) for state in self._carry]

    def _ema(self) -> jax.Array | None:
        """The averaged parameters as one vector over the mesh, if the recipe has an EMA."""
        parts = [state.ema for state in self._carry]
        if parts[0] is None:
            return None
        return self.placement.gather(parts) if self._sharding is None else self._sharding.average(self._carry)

    @property
    def _sharding(self) -> Sharding | None:
        return self.programs.sharding

    @property
    def _flat(self) -> Flat:
        return self.programs.functions.updates.flat  # without groups

    @functools.cached_property
    def _make_first(self) -> Any:
        if self._groups is not None:
            return self._groups.maker(self.recipe)
        return first_maker(self.recipe, moments=self._sharding is None)

    @functools.cached_property
    def _unpack(self) -> Callable[[jax.Array], Tree]:
        return jax.jit(self._flat.unpack)

    @functools.cached_property
    def _unpack_average(self) -> Callable[[jax.Array], Tree]:
        return jax.jit(self._flat.widened().unpack)

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
