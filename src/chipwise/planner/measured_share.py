"""A measured speed beside the plan for the chip that it was measured on: is it as fast as it
should be?"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..base import ChipwiseError, DeviceError, Fact, fact, plain
from ..base.annotations import as_annotated
from ..base.prediction import Range
from ..chips.catalogue import named
from ..chips.targets import Target, parse, sizes
from ..compile.cache import Progress
from ..machine.record import Record
from ..recipe.recipe import Recipe
from .ask import plan

_WAITED = 0.05  # of the time, for data


@dataclass(frozen=True)
class MeasuredShare:
    """A measured step beside the planned one.

    *Fields:* `target`: the plan's. `step_seconds`: planned. `measured_seconds`: of a step. `share`:
    planned over measured: 1 is as fast as planned, 0.5 half as fast. `bound`: the plan's.
    """

    target: str
    step_seconds: Range
    measured_seconds: float
    bound: str | None

    @property
    def share(self) -> Range:
        return self.step_seconds.times(1 / self.measured_seconds)

    @property
    def slow(self) -> bool:
        """Whether it is slower than nine of ten plans allow."""
        return self.share.high < 1

    @property
    def fact(self) -> Fact:
        """The share in a line."""
        share = self.share
        facts = {"share": share.value, "low": share.low, "high": share.high, "target": self.target}
        return fact("share-slow" if self.slow else "share-as-planned", **facts)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values, derived ones too."""
        return plain({**vars(self), "share": self.share, "slow": self.slow, "fact": self.fact})


def here(chip: str | None, devices: int) -> Target | None:
    """The target that has `devices` JAX devices of this chip of the catalogue, or `None`."""
    listed = None if chip is None else named(chip)
    if listed is None:
        return None
    if listed.kind == "GPU":
        return parse(f"{listed.names[0]}:{devices}")
    return next((one for one in sizes(listed) if one.devices == devices), None)


def target_of(record: Record) -> Target | Fact:
    """The target that `record` was measured on, or why there is none."""
    devices = record.measured["devices"]
    if devices["platform"] == "cpu":
        return fact("share-of-a-cpu")
    try:
        target = here(record.measured["chip"], devices["count"])
    except ChipwiseError as error:
        return error.fact
    return target or fact("share-of-no-target", kind=devices["kind"], count=devices["count"])


def accuracy_row(
    recipe: str, settings: Sequence[str], shape: str, record: Record, source: str
) -> dict[str, str]:
    """The cells of a measurement in `benchmarks/plan_accuracy/published.csv`, by column.

    *Arguments:* `recipe` and `settings` as they were typed. `shape`: of an example. `source`: where
    the record is.

    Raises `DeviceError` where nothing can be planned for the machine.
    """
    target = target_of(record)
    if isinstance(target, Fact):
        raise DeviceError("bench-no-row", problem=target)
    measured = record.measured
    stated = {name: str(measured[name]) for name in ("batch", "replicas", "precision")}
    stated |= dict(setting.split("=", 1) for setting in settings)
    versions = {name: record.machine.versions[name] for name in ("chipwise", "jax")}
    said = [
        record.machine.title,
        "exact",
        *(f"{name} {version}" for name, version in versions.items()),
    ]
    return {
        "row": "",
        "use": "held-out",
        "family": record.name,
        "program": "xla",
        "clock": "steps",
        "recipe": recipe,
        "settings": " ".join(f"{name}={value}" for name, value in stated.items()),
        "eval_every": "",
        "on": target.name,
        "model": f"{record.name} (chipwise)",
        "dataset_input_shape": f"{measured['data']}: {shape}",
        "global_batch": str(measured["batch"]),
        "precision": measured["precision"],
        "device": measured["devices"]["kind"],
        "n_chips": str(target.chips),
        "throughput": f"{record.figures['examples_per_second'].median:.6g}",
        "unit": "examples/s",
        "kind": "measured",
        "source": source,
        "note": "; ".join(said),
        "apart": "",
    }


@as_annotated
def measured_share(
    recipe: Recipe,
    record: Record,
    *,
    cache: str | os.PathLike | None = None,
    progress: Progress | None = None,
) -> MeasuredShare | Fact:
    """The speed of `record`, which `study.bench.measure_train` made of `recipe`, beside the plan.

    *Arguments:* `cache`, `progress`: as in `plan`.

    *Returns* the fact why there is no plan, otherwise: on a CPU, on a chip that the catalogue
    lacks, or where the recipe cannot be planned.
    """
    target = target_of(record)
    if isinstance(target, Fact):
        return target
    try:
        (planned,) = plan(
            recipe,
            [target.name],
            exact=record.measured["exact"],
            measure_feed=False,
            cache=cache,
            progress=progress,
        )
    except ChipwiseError as error:  # the measurement stands without its plan
        return error.fact
    if planned.problem is not None or planned.step_seconds is None:
        return planned.problem or fact("share-of-no-plan", target=target.name)
    seconds = 1 / record.figures["steps_per_second"].median
    return MeasuredShare(target.name, planned.step_seconds, seconds, planned.bound)


def causes(share: MeasuredShare, record: Record) -> list[Fact]:
    """What was found that may explain a slow measurement, besides the state of the GPUs."""
    found = []
    if (waited := record.measured["wait_data_share"]) > _WAITED:
        found.append(fact("share-waited", waited=waited))
    if share.bound == "launch":
        found.append(fact("share-launches", seconds=share.step_seconds.value))
    return found
