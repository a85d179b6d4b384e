"""The driver of the step: detect, lay out, feed, state, compile, step, evaluate.

`fit`, `Stepper`, the finders, `bench` and studies are small programs over it:

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

QUEUED_STEPS = 32  # how far the host may run ahead of the device: a stop is answered within these
# ... of several CPU devices. XLA begins a program over devices in its pool of threads, one a device, which
# waits while the device has 32 programs under way. Other threads may wait in a collective for a device that
# then finds none, and all wait for ever. A step is at most five programs a device.
QUEUED_ON_CPUS = 4


class Session:
    """Training `recipe` on the machine's devices, step by step.

    Making one detects the machine, lays the recipe out and checks what can be checked; nothing is read or
    compiled. `begin` places a state, `advance` begins steps, which `compile`s first where nobody did.

    *Arguments:* `steps_per_call`: as in `fit`; `window`: steps of a window, where a program for another
    recipe is to be shared.

    *Fields:* `warnings` (`layout_warnings` are those of the machine) and `start`, facts to show; `machine`,
    `layout`, `placement`; `abstract`, the state as shapes; `resident`, whether data is kept on the devices;
    `step`, the steps begun, of `total`; `watch`, what the device waited for; `programs`.

    Raises `RecipeError`, `DataError` or `DeviceError`.
    """

    def __init__(
        self, recipe: Recipe, on: On = ALL, *, steps_per_call: int | None = 1, window: int | None = None
    ):
        self.recipe, self.on = recipe, on
        self.total, self.step = recipe.clock.total or 0, 0
        self.machine, self.layout, warnings = lay_out(recipe, on)
        self.placement = Placement(self.machine, self.layout.devices, recipe.shards)
        self._compare()
        self.abstract = abstract_state(recipe)
        self.layout_warnings = warnings
        self.warnings: list[Any] = [*warnings, *recipe.warnings()]
        chosen(recipe.task.train, on.workers)  # raises if they cannot be
        memory = self.placement.memory_bytes
        # Not where one host has no room for it
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
        self._steps_per_call, self._window = steps_per_call, window
        self._columns: dict[str, np.ndarray] | None = None
        self._placed: list | None = None
        self._evaluator: Evaluator | None = None
        self._open = contextlib.ExitStack()
        self._queued: deque[Any] = deque()

    def _compare(self) -> None:
        """Raises `DeviceError`, which names the host, where hosts have other recipes, data or chips."""
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
        """The machine, the layout, the precision and the numbers of the model as plain JSON values."""
        update = "flat" if self.recipe.optimizer.elementwise else "whole"
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
        """What a checkpoint holds, as shapes; with groups, as shapes on the devices of the first."""
        return self.abstract if self._groups is None else self._groups.template

    @property
    def saved_axes(self) -> Tree:
        """With groups, the axis along which each array of `snapshot` is cut, -1 for none."""
        return None if self._groups is None else self._groups.functions.saved_axes.without("saved")

    # ---- data and state

    def read(self) -> None:
        """Reads training data that is to live on the devices. Raises `DataError`."""
        task = self.recipe.task
        if self.resident and self._columns is None and self._placed is None:
            self._columns = feed.read(task.train, task.classes, "training")

    def begin(
        self, state: TrainState | None = None, recipe: Recipe | None = None, *, last: int | None = None
    ) -> None:
        """Goes to `state`, of NumPy arrays, or to the recipe's first one, and opens the feed there. With
        groups the arrays may lie on the run's first one, as `GroupPrograms.template` says.

        *Arguments:* `recipe`: another one from here on, with the same programs: of other schedules, another
        seed or duration; `last`, the step to stop at, where that is before the recipe's last.
        """
        self._open.close()
        if recipe is not None:
            if recipe.seed != self.recipe.seed and self._evaluator is not None:
                self._evaluator.close()  # its program holds the seed
                self._evaluator = None
            self.recipe, self.total = recipe, recipe.clock.total or 0
        self.read()
        self._carry: list[TrainState] = []  # the former state makes room
        self._carry = self._placed_state(state)
        self.step = int(self._carry[0].step)
        self._queued.clear()
        if self.step >= (self.total if last is None else last):
            return
        if self._columns is not None:
            self._placed = self.placement.put(feed.flat(self._columns))
            self._columns = None  # the host's copy may go
        self._data: Any
        if self._placed is not None:
            self._data = feed.Resident(self._placed)
        else:
            self._data = feed.Streamed(self.recipe, self.placement, self.step, self.on.workers)
        self._open.callback(self._data.close)
        self._windows = feed.Windows(self.recipe, self.placement, self.step, self._window)
        self._window = self._windows.length  # the program's from now on
        self._open.callback(self._windows.close)
        share = len(self.placement.local) / self.placement.groups
        self.watch = Watch(self.recipe.task.train, self._data.stream, share)

    def _placed_state(self, state: TrainState | None) -> list[TrainState]:
        """`state`, or the first one, on every local group."""

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
        """Where the data is."""
        return self._data.described(self.recipe.task.train)

    def compile(self, *, trial: bool = False) -> Fact | None:
        """Compiles the step, unless it is. *Returns* how many steps a call makes, where that was decided.

        *Arguments:* `trial`: whether several steps a call are worth one, where `steps_per_call` is None.
        """
        if self.programs.compiled:
            return None
        window = self._windows.at(self.step)
        data = self._placed if self._placed is not None else self.programs.data_shapes()
        at_once = 1 if self._steps_per_call is None and not trial else self._steps_per_call
        decided = self.programs.compile(self._carry, window, data, at_once)
        self.placement.all("compiled", True)  # or the first collective would wait for who still compiles
        return decided

    # ---- steps

    @property
    def steps_at_once(self) -> int:
        """The most steps that one call begins."""
        return self.programs.steps_at_once

    def advance(self, steps: int = 1, stopped: Callable[[], bool] = lambda: False) -> bool:
        """Begins `steps` steps. Waits only for data, and when some tens of steps are queued.

        *Returns* whether they were begun; false once `stopped()`.
        """
        self.compile()
        last = self.step + steps
        if last > self.total:
            raise RecipeError("session-ended", total=self.total, step=self.step, steps=steps)
        while self.step < last:
            batch = self._data.at(self.step, lambda: not self._queued or self._queued[-1].is_ready(), stopped)
            if batch is None:
                return False
            now = min(self.steps_at_once, last - self.step, self._windows.left(self.step))
            self._carry, token = self.programs.step(self._carry, self._windows.at(self.step), batch, now)
            self.step += now
            self._queued.append(token)
            if len(self._queued) > self.ahead:
                self._queued.popleft().block_until_ready()
        return True

    @property
    def ahead(self) -> float:
        """How many calls the host may run ahead of the device."""
        several_cpus = self.placement.lead.platform == "cpu" and len(self.placement.devices) > 1
        queued = QUEUED_ON_CPUS if several_cpus else QUEUED_STEPS // self.steps_at_once
        return min(queued, self._data.in_use - 1)

    def drain(self) -> dict[str, Any]:
        """The metric sums of the steps since the last call, on the device."""
        sums, self._carry = self.programs.drain(self._carry)
        return sums

    def wait(self) -> None:
        """Until every step begun is done."""
        jax.block_until_ready(self._carry)
        self._queued.clear()

    # ---- what came of it

    def snapshot(self) -> TrainState:
        """The state as NumPy arrays of one's own. Waits; for all hosts where devices share parts of it. With
        groups the arrays stay on the devices of the first local one."""
        state = self._carry[0]
        if self._groups is not None:
            return self._groups.snapshot(state)
        if self._sharding is not None:
            if state.optimizer is None:  # forgotten
                return self._host(dataclasses.replace(state, ema=self._ema()))
            whole = self._sharding.whole([(one.optimizer, one.ema) for one in self._carry])
            state = dataclasses.replace(state, optimizer=whole[0], ema=whole[1])
        return self._host(state)

    def parameters(self) -> tuple[Tree, Tree]:
        """The parameters, trained and frozen, and the task's state, as arrays of `snapshot`. Waits."""
        if self._groups is not None:
            state = self._groups.snapshot(dataclasses.replace(self._carry[0], optimizer=None, ema=None))
        else:
            state = self._host(dataclasses.replace(self._carry[0], optimizer=None, ema=None, sums={}))
        return whole_params(state.params, state.frozen), state.state

    def _host(self, state: TrainState) -> TrainState:
        # Copied: on the CPU an array taken from the device is its memory, which the next step reuses.
        host = jax.tree.map(np.array, jax.device_get(state))
        return dataclasses.replace(host, params=self._flat.unpack(host.params))

    def held(self) -> tuple[TrainState, Any, Any]:
        """What the first device holds: state, window, and the data or its shapes."""
        window = self._windows.at(max(0, self.step - 1))[0]
        return self._carry[0], window, self._data.held(len(self.placement.local))

    def open_evaluation(self) -> None:
        """Reads evaluation data, checks that the loss can evaluate. Raises `DataError` without data."""
        if self._evaluator is None:
            self._evaluator = Evaluator(self.recipe, self.placement, workers=self.on.workers)

    def evaluate(self) -> dict[str, Any]:
        """Metric name to value over the task's `eval` source, with the averaged parameters if any. Waits."""
        self.open_evaluation()
        assert self._evaluator is not None
        self.wait()
        read = [dataclasses.replace(s, optimizer=None, ema=None, sums={}) for s in self._carry]
        state, average = self.placement.gather(read), self._ema()
        if self._groups is not None:
            vector, averaged = (state.params, False) if average is None else (average, True)
            whole = whole_params(self._groups.unpack(vector, averaged), state.frozen)
            return self._evaluator(whole, state.state)
        unpack, vector = (self._unpack, state.params) if average is None else (self._unpack_average, average)
        return self._evaluator(whole_params(unpack(vector), state.frozen), state.state)

    def forget_optimizer(self) -> None:
        """Gives up the optimizer's state, when no step follows: an evaluation may have its memory."""
        self._carry = [dataclasses.replace(state, optimizer=None) for state in self._carry]

    def _ema(self) -> jax.Array | None:
        """The averaged parameters as one vector over the mesh, if the recipe keeps them."""
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
        """Ends the threads that bring data. The state stays readable."""
        self._open.close()
        if self._evaluator is not None:
            self._evaluator.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: object, error: BaseException | None, where: object) -> None:
        if error is not None:
            self.placement.hosts.failed(error)
        self.close()
