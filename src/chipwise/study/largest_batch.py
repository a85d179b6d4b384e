"""`cw.find_batch(recipe)`: the largest batch that fits a device, and what it would change.

The step's programs are compiled at candidate batches, and the compiler states how much memory each needs. If
the device is present, real steps confirm the result, and are timed in turn with those of the recipe's batch.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from ..engine.blueprint import Memory, largest_batch
from ..engine.layout import Layout
from ..engine.on import ALL, On
from ..engine.placement import lay_out
from ..engine.progress import Reporter
from ..errors import DataError, RecipeError
from ..machine.arithmetic import fixed
from ..machine.compilation_cache import compiled_once
from ..machine.detect import Machine
from ..machine.hosts import hosts
from ..recipe.check import Finding, check
from ..recipe.recipe import Recipe
from ..words.displayed import Displayed
from ..words.facts import Fact, fact, plain
from .stats import Difference, ratio
from .transfer import Transfer, transfer
from .trial import LEAST_STEPS, LONGEST_SECONDS, needed, rounds, try_batch

SCHEMA = "chipwise.find_batch/2"
SAFE_SHARE = 0.5
"""Of the host's free memory, up to which a batch is tried on the CPU: a host that runs out of memory does not
refuse, it kills."""


@dataclass(frozen=True)
class BatchSearch(Displayed):
    """The largest batch of a recipe on this machine.

    *Fields:*

    - `old`: the recipe; `target`: such as "this machine, 1 × cpu"; `devices`: the number used.
    - `batch`: global, or None if not even one example per replica fits; `bound`: a fact, what limits it.
    - `memory`: bytes of one device at that batch, or at the smallest if none fits.
    - `confirmed`: whether real steps ran with it.
    - `examples_per_second`: measured, by global batch, a value for each round.
    - `move`: the transfer to that batch, or None; `findings`: of `cw.check` for it; `notes`: facts.
    """

    old: Recipe
    target: str
    devices: int
    batch: int | None
    memory: Memory
    bound: Fact
    confirmed: bool = False
    examples_per_second: dict[int, tuple[float, ...]] = field(default_factory=dict)
    move: Transfer | None = None
    findings: tuple[Finding, ...] = ()
    notes: tuple[Any, ...] = ()

    @property
    def batch_per_replica(self) -> int | None:
        return None if self.batch is None else self.batch // self.old.replicas

    @property
    def batch_per_device(self) -> int | None:
        return None if self.batch is None else self.batch // self.devices

    @property
    def speedup(self) -> Difference | None:
        """The ratio of examples/s to the recipe's own batch, with its interval and verdict; None if one of
        the two was not measured, or both are the same."""
        speeds, own = self.examples_per_second, self.old.batch
        if self.batch == own or self.batch not in speeds or own not in speeds:
            return None
        return ratio(speeds[self.batch], speeds[own])

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        same = "target devices batch batch_per_replica batch_per_device confirmed bound speedup notes"
        return {
            "schema": SCHEMA,
            "recipe": self.old.describe(),
            **plain({name: getattr(self, name) for name in same.split()}),
            "memory_bytes_per_device": self.memory.json(),
            "examples_per_second": plain(self.examples_per_second),
            "findings": [finding.json() for finding in self.findings],
            "transfer": self.move and self.move.to_json(),
        }


@fixed()
def find_batch(
    recipe: Recipe, *, on: On = ALL, at_most: int | None = None, progress: str = "auto"
) -> BatchSearch:
    """Finds the largest global batch of `recipe` that fits, a multiple of its replicas, to within 1/40.

    It is at most the number of training examples. Larger is not always better: `BatchSearch.move` says what
    it does to training, and `speedup` whether it is faster at all.

    *Arguments:*

    - `on` and `progress`: as in `fit`. For other chips, `cw.plan(recipe, find_largest_batch=True)`.
    - `at_most`: an upper limit of the search.

    Raises `RecipeError` for `at_most` below the replicas or a recipe that cannot be traced, `DeviceError` as
    `fit` does, `DataError` if there are fewer training examples than replicas.
    """
    limit = _limit(recipe, at_most)
    hosts().alone("bench --largest-batch")
    return _here(recipe, on, limit, Reporter(progress))


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


def _here(recipe: Recipe, on: On, limit: int, reporter: Reporter) -> BatchSearch:
    machine, layout, warnings = lay_out(recipe, on)
    notes: list[Any] = list(warnings)
    known: dict[int, Memory] = {}

    def fits(tried: Recipe) -> tuple[bool, float]:
        if tried.batch not in known:
            reporter.say(fact("compiling-batch", batch=tried.batch))
            known[tried.batch] = needed(tried, machine, dataclasses.replace(layout, batch=tried.batch))
        memory = known[tried.batch]
        return memory.fits, memory.needed / max(memory.available, 1)

    def searched(batch: int | None, memory: Memory, bound: Fact, **more: Any) -> BatchSearch:
        target = f"this machine, {layout.devices} × {machine.kind}"
        return BatchSearch(recipe, target, layout.devices, batch, memory, bound, notes=tuple(notes), **more)

    largest = largest_batch(recipe, fits, limit)
    if largest is None:
        fits(least := dataclasses.replace(recipe, batch=recipe.least_batch))
        return searched(None, known[least.batch], fact("bound-nothing-fits"))
    for batch in (recipe.batch, largest):
        fits(dataclasses.replace(recipe, batch=batch))
    with compiled_once():  # one for each batch, for all its rounds
        batch, speeds = _confirmed(recipe, largest, known, machine, layout, notes, reporter)
    if machine.platform == "cpu":
        notes.append(fact("host-memory-filled"))
    fits(dataclasses.replace(recipe, batch=batch))
    bound = _bound(recipe, batch, limit) if batch == largest else fact("bound-refused")
    measured = {n: tuple(values) for n, values in speeds.items()}
    answer = searched(batch, known[batch], bound, confirmed=batch in speeds, examples_per_second=measured)
    return _moved(answer, "cpu" if machine.platform == "cpu" else None)


def _confirmed(
    recipe: Recipe,
    largest: int,
    known: dict[int, Memory],
    machine: Machine,
    layout: Layout,
    notes: list[Any],
    reporter: Reporter,
) -> tuple[int, dict[int, list[float]]]:
    """The batch that real steps ran with, or `largest` if none was tried, and examples/s by batch: of the
    recipe's own and of that one, for as many rounds as there is time."""
    speeds: dict[int, list[float]] = {}
    spent = 0.0

    def refused(batch: int, number: int = 1) -> str:
        nonlocal spent
        reporter.say(fact("trying-batch", batch=batch, number=number))
        on = On(layout.devices, machine.platform, layout.exact)
        trial = try_batch(dataclasses.replace(recipe, batch=batch), on)
        spent += trial.seconds
        if trial.examples_per_second is not None:
            speeds.setdefault(batch, []).append(trial.examples_per_second)
        return trial.refused

    if known[recipe.batch].fits and recipe.batch <= recipe.clock.examples:
        refused(recipe.batch)
    batch = largest
    while batch not in speeds:
        if machine.platform == "cpu" and (doubt := _dared(batch, known.get(batch), recipe.batch, speeds)):
            notes.append(doubt)
            break
        if why := refused(batch):
            smaller = batch * 9 // 10 // recipe.least_batch * recipe.least_batch
            notes.append(fact("batch-refused", batch=batch, reason=why))
            if not smaller:
                break
            batch = smaller
    for number in range(2, rounds(spent) + 1):
        for n in list(speeds):
            if why := refused(n, number):
                notes.append(fact("batch-refused-later", batch=n, rounds=len(speeds[n]), reason=why))
                return batch, speeds
    return batch, speeds


def _dared(batch: int, memory: Memory | None, own: int, speeds: dict[int, list[float]]) -> Fact | None:
    """Why this batch should not be tried on a CPU, or None."""
    if memory is not None and memory.needed > SAFE_SHARE * memory.available:
        return fact("batch-risky", batch=batch, share=SAFE_SHARE)
    if own in speeds and (seconds := LEAST_STEPS * batch / speeds[own][0]) > LONGEST_SECONDS:
        return fact("batch-slow", batch=batch, own=own, seconds=seconds)
    return None


def _bound(recipe: Recipe, batch: int, limit: int) -> Fact:
    if batch + recipe.least_batch <= limit:
        return fact("bound-memory")
    examples = recipe.clock.examples
    return (
        fact("bound-examples", examples=examples) if limit == examples else fact("bound-asked", limit=limit)
    )


def _moved(search: BatchSearch, on: str | None) -> BatchSearch:
    """`search` with the transfer to its batch, and its findings."""
    recipe, move, notes = search.old, None, list(search.notes)
    assert search.batch is not None
    there = dataclasses.replace(recipe, batch=search.batch)
    if search.batch != recipe.batch:
        try:
            move = transfer(recipe, batch=search.batch)
            there = move.recipe
        except RecipeError as error:  # an optimizer without a rule
            notes.append(error.fact)
    return dataclasses.replace(search, move=move, findings=tuple(check(there, on)), notes=tuple(notes))
