"""`cw.find_batch(recipe)`: the largest batch that fits a device, and what moving there would change.

Found without risk: the step's own programs are compiled at candidate batches, and the compiler says what
each needs. Then, where the device is present, confirmed by a real step.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from ..check import Finding, check
from ..devices.detect import Machine, detect
from ..devices.layout import lay_out
from ..devices.replicas import Layout
from ..errors import DataError, RecipeError
from ..plan.largest import largest_batch
from ..plan.planner import plan
from ..plan.plans import Memory
from ..recipe import Recipe
from ..transfer.transfer import Transfer, transfer
from .need import needed
from .trial import STEPS, try_batch

SCHEMA = "chipwise.find_batch/1"
SAFE_SHARE = 0.5
"""Of the host's free memory, up to which a batch is tried on the CPU: a host that runs out of memory does not
refuse, it kills."""
LONGEST_SECONDS = 60.0
"""For which trying a batch on the CPU may last."""


@dataclass(frozen=True)
class BatchSearch:
    """The largest batch of a recipe on one target, and what it means.

    *Fields:* `old`, the recipe; `target`, such as "this machine, 1 × cpu" or "v5e-8"; `devices` used;
    `batch`, global, or None when not even one example a replica fits; `memory`, bytes of one device at that
    batch, or at the smallest when none fits; None when unknown; `bound`, what keeps the batch from being
    larger; `confirmed`, whether a real step was made with it; `examples_per_second`, measured, by global
    batch; `move`, the recipe moved there, or None; `findings`, what `cw.check` says of it there; `notes`,
    sentences.
    """

    old: Recipe
    target: str
    devices: int
    batch: int | None
    memory: Memory | None
    bound: str
    confirmed: bool = False
    examples_per_second: dict[int, float] = field(default_factory=dict)
    move: Transfer | None = None
    findings: tuple[Finding, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def batch_per_replica(self) -> int | None:
        return None if self.batch is None else self.batch // self.old.replicas

    @property
    def batch_per_device(self) -> int | None:
        return None if self.batch is None else self.batch // self.devices

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        held = None
        if self.memory is not None:
            held = dataclasses.asdict(self.memory) | {"needed": self.memory.needed, "fits": self.memory.fits}
        return {
            "recipe": self.old.describe(),
            "target": self.target,
            "devices": self.devices,
            "batch": self.batch,
            "batch_per_replica": self.batch_per_replica,
            "batch_per_device": self.batch_per_device,
            "memory_bytes_per_device": held,
            "bound": self.bound,
            "confirmed": self.confirmed,
            "examples_per_second": {str(batch): speed for batch, speed in self.examples_per_second.items()},
            "transfer": None if self.move is None else self.move.to_json(),
            "findings": [dataclasses.asdict(finding) for finding in self.findings],
            "notes": list(self.notes),
        }


def find_batch(
    recipe: Recipe,
    *,
    on: str | None = None,
    devices: int | None = None,
    platform: str | None = None,
    exact: bool = True,
    at_most: int | None = None,
) -> BatchSearch:
    """The largest global batch of `recipe` that fits, a multiple of its replicas, within a fortieth.

    It is never above the training examples. Larger is not better: see `BatchSearch.move` for what it does
    to the training, and `examples_per_second` for whether it is even faster.

    *Arguments:*

    - `on`: an absent target such as `"v5e-8"` or `"t4"`, asked of its compiler or of the model that `cw.plan`
      has of it. By default the devices of this machine, where a real step confirms what was found.
    - `devices`, `platform`, `exact`: as in `fit`, for this machine; `exact` for any.
    - `at_most`: search no further.

    Raises `RecipeError` for `at_most` below the replicas or a recipe that cannot be traced, `DeviceError` as
    `fit` does and for an unknown target, `DataError` when there are fewer training examples than replicas.
    """
    examples = recipe.clock.examples
    if at_most is not None and (isinstance(at_most, bool) or at_most < recipe.replicas):
        raise RecipeError(
            f"at most {at_most}: a batch holds at least one example for each of {recipe.replicas} replicas; "
            f"give --at-most {recipe.replicas} or more, or fewer --set replicas=..."
        )
    if examples < recipe.replicas:
        raise DataError(
            f"{examples} training examples are too few for a batch with one for each of {recipe.replicas} "
            f"replicas: give --set replicas={examples} or fewer."
        )
    limit = examples if at_most is None else min(examples, at_most)
    if on is not None:
        return _planned(recipe, on, limit, exact)
    return _here(recipe, detect(devices, platform), devices is not None, limit, exact)


def _here(recipe: Recipe, machine: Machine, asked: bool, limit: int, exact: bool) -> BatchSearch:
    layout, said = lay_out(machine, recipe.batch, recipe.replicas, asked=asked, exact=exact)
    notes, known = list(said), dict[int, Memory]()

    def fits(tried: Recipe) -> tuple[bool, float]:
        if tried.batch not in known:
            known[tried.batch] = needed(tried, machine, dataclasses.replace(layout, batch=tried.batch))
        memory = known[tried.batch]
        return memory.fits, memory.needed / max(memory.available, 1)

    target = f"this machine, {layout.devices} × {machine.kind}"
    found = largest_batch(recipe, fits, limit)
    if found is None:
        fits(least := dataclasses.replace(recipe, batch=recipe.replicas))
        memory, bound = known[least.batch], "memory: not even one example a replica fits"
        return BatchSearch(recipe, target, layout.devices, None, memory, bound, notes=tuple(notes))
    for batch in (recipe.batch, found):
        fits(dataclasses.replace(recipe, batch=batch))
    batch, speeds = _confirmed(recipe, found, known, machine, layout, notes)
    if machine.platform == "cpu":
        notes.append(
            "This is the host's memory, and nothing is gained by filling it: look at the examples/s."
        )
    fits(dataclasses.replace(recipe, batch=batch))
    bound = _bound(recipe, batch, limit) if batch == found else "memory: the device refused more"
    answer = BatchSearch(
        recipe,
        target,
        layout.devices,
        batch,
        known[batch],
        bound,
        batch in speeds,
        speeds,
        notes=tuple(notes),
    )
    return _moved(answer, "cpu" if machine.platform == "cpu" else None)


def _confirmed(
    recipe: Recipe, found: int, known: dict[int, Memory], machine: Machine, layout: Layout, notes: list[str]
) -> tuple[int, dict[int, float]]:
    """The batch that a real step ran with, or `found` where none was dared, and examples/s by batch."""
    where = {"devices": layout.devices, "platform": machine.platform, "exact": layout.exact}
    speeds: dict[int, float] = {}
    if known[recipe.batch].fits and recipe.batch <= recipe.clock.examples:
        own = try_batch(recipe, **where)
        if own.examples_per_second is not None:
            speeds[recipe.batch] = own.examples_per_second
    batch = found
    while batch not in speeds:
        if machine.platform == "cpu" and (doubt := _dared(batch, known.get(batch), recipe.batch, speeds)):
            notes.append(f"No step was tried at batch {batch}: {doubt}.")
            return batch, speeds
        trial = try_batch(dataclasses.replace(recipe, batch=batch), **where)
        if trial.examples_per_second is not None:
            speeds[batch] = trial.examples_per_second
            break
        smaller = batch * 9 // 10 // recipe.replicas * recipe.replicas
        notes.append(f"Batch {batch} should fit, but the device refused it: {trial.refused}")
        if not smaller:
            return batch, speeds
        batch = smaller
    return batch, speeds


def _dared(batch: int, memory: Memory | None, own: int, speeds: dict[int, float]) -> str:
    """Why the CPU should not try this batch, or nothing."""
    if memory is not None and memory.needed > SAFE_SHARE * memory.available:
        return f"it needs more than {SAFE_SHARE:.0%} of the host's free memory, and running out of it kills"
    if own in speeds and (STEPS + 1) * batch / speeds[own] > LONGEST_SECONDS:
        return f"at the speed of batch {own} it would take {(STEPS + 1) * batch / speeds[own]:.0f} s"
    return ""


def _planned(recipe: Recipe, on: str, limit: int, exact: bool) -> BatchSearch:
    unit = recipe.replicas

    def at(batch: int) -> Any:
        return plan(dataclasses.replace(recipe, batch=batch), [on], exact=exact)[0]

    made = at(limit // unit * unit)
    batch: int | None = limit // unit * unit
    if made.memory is None or not made.memory.fits:
        asked = plan(recipe, [on], exact=exact, find_largest_batch=made.memory is not None)[0]
        batch = min(asked.largest_batch, limit // unit * unit) if asked.largest_batch else None
        made = at(batch or unit)
    notes = [f"{made.target} is {made.method}, not tried: a step there may still be refused."]
    if made.problem is not None:
        notes.append(f"{made.target}: {made.problem}.")
    if batch is None:
        unknown = made.memory is None
        bound = "unknown: so is its memory" if unknown else "memory: not even one example a replica fits"
        return BatchSearch(recipe, made.target, made.devices, None, made.memory, bound, notes=tuple(notes))
    bound = _bound(recipe, batch, limit)
    answer = BatchSearch(recipe, made.target, made.devices, batch, made.memory, bound, notes=tuple(notes))
    return _moved(answer, on)


def _bound(recipe: Recipe, batch: int, limit: int) -> str:
    if batch + recipe.replicas <= limit:
        return "memory"
    examples = recipe.clock.examples
    return f"the training set of {examples:,} examples" if limit == examples else f"at most {limit} asked for"


def _moved(found: BatchSearch, on: str | None) -> BatchSearch:
    """`found` with what moving to its batch does."""
    recipe, move, notes = found.old, None, list(found.notes)
    assert found.batch is not None
    there = dataclasses.replace(recipe, batch=found.batch)
    if found.batch != recipe.batch:
        try:
            move = transfer(recipe, batch=found.batch)
            there = move.recipe
        except RecipeError as error:  # an optimizer that no rule covers
            notes.append(str(error))
    return dataclasses.replace(found, move=move, findings=tuple(check(there, on)), notes=tuple(notes))
