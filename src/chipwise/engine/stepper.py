"""The step for loops of one's own: what `fit` does around a step is left to the caller."""

from __future__ import annotations

import contextlib
import warnings
from collections import deque
from typing import Any

import jax
import numpy as np

from ..data.workers import chosen as readers
from ..errors import RecipeError
from ..machine.detect import detect
from ..recipe.recipe import Recipe
from ..recipe.task import Tree
from . import loader
from .evaluate import Evaluator
from .finish import finished
from .on import ALL, On
from .placement import lay_out
from .program import QUEUED_STEPS, Program
from .state import fingerprint
from .step import first_state


class Stepper:
    """The step of `recipe`, compiled for the devices at hand, and the state that it moves on.

        with cw.Stepper(recipe) as stepper:
            while stepper.done < stepper.total:
                stepper.step()
            print(stepper.metrics(), stepper.evaluate(), stepper.fingerprint())

    is what `cw.fit(recipe)` computes, to the bit. No run folder, no checkpoints, no signals, and no stop
    when the loss is NaN: those are the loop's.

    *Arguments:* `on` as in `fit`.

    *Fields:* `total`, the recipe's steps; `done`, the steps begun.

    Raises `RecipeError`, `DataError` or `DeviceError` before anything is compiled, as `fit` does.
    """

    def __init__(
        self,
        recipe: Recipe,
        on: On = ALL,
    ):
        clock, task = recipe.clock, recipe.task
        machine = detect(on.devices, on.platform)
        layout, said = lay_out(
            machine, recipe.batch, recipe.replicas, asked=on.devices is not None, exact=on.exact
        )
        for text in [*said, *map(str, recipe.warnings())]:
            warnings.warn(text, stacklevel=2)
        readers(task.train, on.workers)
        resident = loader.resident(task.train, machine.devices[0], on.feed)
        columns = loader.read(task.train, task.classes, "training") if resident else None
        program = Program(recipe, layout, machine.devices[: layout.devices], resident=resident)
        self.recipe, self.program = recipe, program
        self.total, self.done = clock.total or 0, 0
        self._workers = on.workers
        self._evaluator: Evaluator | None = None
        self._queued: deque[Any] = deque()
        with jax.default_device(machine.devices[0]):
            self._carry = program.put_all(first_state(recipe))
        if not self.total:
            return
        with contextlib.ExitStack() as closing:
            self._data: Any
            if columns is not None:
                self._data = loader.Resident(program.put_all(loader.flat(columns)))
            else:
                self._data = loader.Streamed(recipe, program.put_cut, 0, on.workers)
            closing.callback(self._data.close)
            self._windows = loader.Windows(recipe, program.put_window, 0)
            closing.callback(self._windows.close)
            shapes = self._data.placed if resident else program.data_shapes()
            program.compile(self._carry, self._windows.at(0), shapes)
            self._closing = closing.pop_all()

    def step(self) -> None:
        """Begins the next step. Waits for the device only when some tens of steps are queued.

        Raises `RecipeError` after the recipe's last step, beyond which its schedules say nothing.
        """
        if self.done == self.total:
            raise RecipeError(
                f"Stepper.step() after the last of {self.total} steps: give the recipe a longer duration "
                f'than "{self.recipe.duration}".'
            )
        queued, data = self._queued, self._data
        batch = data.at(self.done, lambda: not queued or queued[-1].is_ready())
        self._carry, token = self.program.step(self._carry, self._windows.at(self.done), batch)
        self.done += 1
        queued.append(token)
        if len(queued) > min(QUEUED_STEPS, data.in_use - 1):
            queued.popleft().block_until_ready()

    def metrics(self) -> dict[str, Any]:
        """Training metrics of the steps since the last call, name to value; none without steps. Waits."""
        sums, self._carry = self.program.drain(self._carry)
        return finished({name: s for name, s in jax.device_get(sums).items() if np.all(s.count)})

    def evaluate(self) -> dict[str, Any]:
        """Metric name to value over the task's `eval` source, with the averaged parameters if there are any.
        Waits. Raises `DataError` when the task has no evaluation data."""
        if self._evaluator is None:
            self._evaluator = Evaluator(self.recipe, self.program.mesh, workers=self._workers)
        whole = self.program.whole(self._carry)
        return self._evaluator(whole.ema if self.recipe.ema is not None else whole.params, whole.state)

    def state(self) -> tuple[Tree, Tree]:
        """The parameters (not their average) and the task's state, as NumPy arrays of one's own. Waits."""
        whole = self.program.whole(self._carry)
        # Copied: on the CPU an array taken from the device is its memory, which the next step reuses.
        params, state = jax.tree.map(np.array, jax.device_get((whole.params, whole.state)))
        return params, state

    def fingerprint(self) -> str:
        """SHA-256 of the parameters' bytes: `Result.fingerprint`. Waits."""
        return fingerprint(self.state()[0])

    def close(self) -> None:
        """Ends the threads that bring data. The state stays readable."""
        if self._evaluator is not None:
            self._evaluator.close()
        if self.total:
            self._closing.close()

    def __enter__(self) -> Stepper:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
