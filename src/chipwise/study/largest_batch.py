"""`cw.study.find_batch(recipe)`: the largest batch that fits a device.

The step's programs are compiled at candidate batches, and the compiler states how much memory each needs. Two
real steps confirm the result, but not on a CPU: a host that runs out of memory does not refuse, it kills.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax

from ..data.sources import nbytes
from ..engine import feed
from ..engine.blueprint import Memory, largest_batch, tracing
from ..engine.layout import Layout
from ..engine.on import ALL, On
from ..engine.placement import Placement, lay_out
from ..engine.programs import Programs
from ..engine.progress import Reporter
from ..engine.session import Session
from ..errors import DataError, RecipeError
from ..machine.arithmetic import fixed
from ..machine.detect import Machine
from ..machine.hosts import hosts
from ..machine.limits import memory as host_memory
from ..recipe.recipe import Recipe
from ..words.displayed import Displayed
from ..words.facts import Fact, fact, plain
from .find_lr import swept

SCHEMA = "chipwise.find_batch/3"
STEPS = 2
"""That confirm a batch: from the second on, what a step leaves behind is in memory too."""


@dataclass(frozen=True)
class BatchSearch(Displayed):
    """The largest batch of a recipe on this machine.

    *Fields:*

    - `old`: the recipe; `target`: such as "this machine, 1 × cpu"; `devices`: the number used.
    - `batch`: global, or None if not even one example per replica fits; `bound`: a fact, what limits it.
    - `memory`: bytes of one device at that batch, or at the smallest if none fits.
    - `confirmed`: whether real steps ran with it.
    - `notes`: facts.
    """

    old: Recipe
    target: str
    devices: int
    batch: int | None
    memory: Memory
    bound: Fact
    confirmed: bool = False
    notes: tuple[Any, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        same = "target devices batch confirmed bound notes"
        return {
            "schema": SCHEMA,
            "recipe": self.old.describe(),
            **plain({name: getattr(self, name) for name in same.split()}),
            "memory_bytes_per_device": self.memory.json(),
        }


@fixed()
def find_batch(
    recipe: Recipe, *, on: On = ALL, at_most: int | None = None, progress: str = "auto"
) -> BatchSearch:
    """Finds the largest global batch of `recipe` that fits, a multiple of its replicas, to within 1/40.

    It is at most the number of training examples. Larger is not always better: `cw.transfer` says what it
    does to training, and `chipwise bench` whether it is faster at all.

    *Arguments:*

    - `on` and `progress`: as in `fit`. For other chips, `cw.plan(recipe, find_largest_batch=True)`.
    - `at_most`: an upper limit of the search.

    Raises `RecipeError` for `at_most` below the replicas or a recipe that cannot be traced, `DeviceError` as
    `fit` does, `DataError` if there are fewer training examples than replicas.
    """
    limit, reporter = _limit(recipe, at_most), Reporter(progress)
    hosts().alone("bench --largest-batch")
    machine, layout, warnings = lay_out(recipe, on)
    notes: list[Any] = list(warnings)
    known: dict[int, Memory] = {}

    def fits(tried: Recipe) -> tuple[bool, float]:
        if tried.batch not in known:
            reporter.say(fact("compiling-batch", batch=tried.batch))
            known[tried.batch] = needed(tried, machine, dataclasses.replace(layout, batch=tried.batch))
        memory = known[tried.batch]
        return memory.fits, memory.needed / max(memory.available, 1)

    largest = largest_batch(recipe, fits, limit)
    batch, confirmed = largest, machine.platform != "cpu"
    if not confirmed:
        notes.append(fact("host-memory-filled"))
    elif largest is not None:
        batch = _confirmed(recipe, largest, machine, layout, notes, reporter)
    shown = recipe.least_batch if batch is None else batch
    fits(dataclasses.replace(recipe, batch=shown))
    if batch is not None and batch == largest:
        bound = _bound(recipe, batch, limit)
    else:
        bound = fact("bound-nothing-fits" if batch is None else "bound-refused")
    found = batch is not None and confirmed
    target = f"this machine, {layout.devices} × {machine.kind}"
    return BatchSearch(recipe, target, layout.devices, batch, known[shown], bound, found, tuple(notes))


def _limit(recipe: Recipe, at_most: int | None) -> int:
    """The largest batch to try."""
    examples, least = recipe.clock.examples, recipe.least_batch
    if at_most is not None and (isinstance(at_most, bool) or at_most < least):
        raise RecipeError(
            "at-most-below-least",
            "--at-most {at_most}: expected {least} or more, one for each device of each replica, or fewer "
            "--set replicas=...", at_most=at_most, least=least, replicas=recipe.replicas,
        )  # fmt: skip
    if examples < least:
        raise DataError(
            "examples-below-least",
            "{examples} training examples are fewer than {least}, one for each device. Give fewer --set "
            "replicas=...", examples=examples, least=least, replicas=recipe.replicas,
        )  # fmt: skip
    return examples if at_most is None else min(examples, at_most)


def _confirmed(
    recipe: Recipe, batch: int, machine: Machine, layout: Layout, notes: list[Any], reporter: Reporter
) -> int | None:
    """The batch that real steps ran with: `batch`, or a tenth less as often as the device refuses."""
    while batch:
        reporter.say(fact("trying-batch", batch=batch))
        on = On(layout.devices, machine.platform, layout.exact)
        if not (why := refusal(recipe, batch, on)):
            return batch
        notes.append(fact("batch-refused", batch=batch, reason=why))
        batch = batch * 9 // 10 // recipe.least_batch * recipe.least_batch
    return None


@fixed()
def refusal(recipe: Recipe, batch: int, on: On = ALL) -> str:
    """Why the device has too little memory for real steps with fresh parameters, or "". Other errors are
    raised. *Arguments:* `on` as in `fit`."""
    rate = recipe.optimizer.hyper[recipe.optimizer.lr_name].highest(recipe.clock) or 1e-3
    held = swept(recipe, rate, rate, STEPS)  # constants: a schedule may have no such batch
    try:
        with Session(dataclasses.replace(held, batch=batch), on) as session:
            session.begin()
            session.advance(STEPS)
            session.wait()
    except (MemoryError, jax.errors.JaxRuntimeError) as error:
        if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error):
            return " ".join((str(error) or "out of memory").split())[:200]
        raise
    return ""


def _bound(recipe: Recipe, batch: int, limit: int) -> Fact:
    if batch + recipe.least_batch <= limit:
        return fact("bound-memory")
    examples = recipe.clock.examples
    return (
        fact("bound-examples", examples=examples) if limit == examples else fact("bound-asked", limit=limit)
    )


# ---- memory, before any step


def available(machine: Machine, devices: int) -> tuple[int, Fact]:
    """The free bytes of one of `devices` devices, and their source.

    CPU devices share the free memory of the host.
    """
    stats = machine.devices[0].memory_stats() or {}
    if "bytes_limit" in stats:
        free = stats["bytes_limit"] - stats.get("bytes_in_use", 0)
        return free, fact("memory-free-on-device", device=machine.kind)
    source = fact("memory-free-shared", devices=devices) if devices > 1 else fact("memory-free-on-host")
    return host_memory().available_bytes // devices, source


def needed(recipe: Recipe, machine: Machine, layout: Layout) -> Memory:
    """Bytes of one device while `recipe` trains in `layout`, by category. Compiles the programs of the step
    and runs nothing.

    Evaluation counts with the data that it keeps on the device; it fits its batch to what is left.

    Raises `RecipeError` if the recipe's own functions raise an error while they are traced.
    """
    task, limit = recipe.task, (machine.devices[0].memory_stats() or {}).get("bytes_limit")
    resident, placement = feed.resident(task.train, limit), Placement.laid(machine, layout)
    with tracing(recipe.name):
        programs = Programs(recipe, layout, placement, resident=resident)
        made = programs.blueprint
        programs.compile()
    free, source = available(machine, layout.devices)
    known = {name: a for name, one in programs.executables.items() if (a := one.memory_analysis())}
    evaluation = nbytes(task.eval) if task.eval is not None and feed.fits(task.eval, limit) else 0
    temporary = {name: a.temp_size_in_bytes for name, a in known.items()}
    code = sum(a.generated_code_size_in_bytes for a in known.values())
    memory = made.memory(temporary, code, free, source)
    return dataclasses.replace(memory, data=memory.data + evaluation)
