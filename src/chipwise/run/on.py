"""The settings of the machine on which a call runs. Nothing here belongs to a recipe."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..base import RecipeError, invalid
from ..base.annotations import as_annotated


@as_annotated
@dataclass(frozen=True)
class On:
    """The devices that a call uses, and how data gets there. Only `exact=False` and
    `kernels` can change a result.

        cw.fit(recipe, on=cw.On(devices=4))

    *Fields:*

    - `devices`: how many to use. All if None.
    - `platform`: `"cpu"` ignores accelerators. `"gpu"` or `"tpu"` requires one.
    - `exact`: uses one fixed order of additions, so that any number of devices gives the same bits.
    - `shares`: how many of the recipe's blocks each device, or group, computes, such as
      `(3, 3, 2)`. By default, all compute equally many.
    - `feed`: `"device"` keeps the training data in the devices' memory. `"host"` streams it from
      the host. `"auto"` keeps it on the devices if it takes at most a quarter of their memory, and
      half of the host's free memory.
    - `shard_optimizer`: shards the optimizer's state over the devices. By default, this happens if
      each saves 16 MB.
    - `verify`: the share of the replicas that another device computes once more and compares, such
      as `"1%"`.
    - `steps_per_call`: the most steps that one call runs on a CPU or GPU that is the only device,
      so that a small net does not wait for the host. Where something is due after a step, and where
      the kernels differ from those of single steps, a call runs one. `"auto"`: many on a CPU if
      they save more time than the compilation of one more program takes.
    - `noise`: measures at log steps the gradient noise scale of the step's blocks (`run.noise`), as
      `train/noise_scale`.
    - `workers`: threads or processes that read streamed data, such as `4` or `"processes:4"`. If
      None, a measurement decides.
    - `kernels`: `"tuned"` times kernels on the first GPU, once, and keeps them in the run folder
      for every device, host and resume. A path takes those of such a file, with the same bits.
      By default, a GPU takes the first kernel that its libraries propose.
    - `stuck`: the seconds without a move after which `fit` ends with `Stuck`, or three times the
      longest step if that is more. With 0, it never does.

    Raises `RecipeError` for other values.
    """

    devices: int | None = None
    platform: str | None = None
    exact: bool = True
    feed: str = "auto"
    workers: int | str | None = None
    shard_optimizer: bool | None = None
    shares: Sequence[int] = ()
    stuck: float | str = 300.0
    verify: str = "0%"
    noise: bool = False
    steps_per_call: int | str = 1
    kernels: str | Path | None = None

    def __post_init__(self) -> None:
        if self.feed not in ("auto", "device", "host"):
            raise RecipeError(
                "feed-unknown", "feed={feed}: expected auto, device or host.", feed=self.feed
            )
        if not re.fullmatch(r"[0-9]{1,9}(\.[0-9]*)?s?", str(self.stuck)):
            raise RecipeError("stuck-unreadable", stuck=self.stuck)
        if not re.fullmatch(r"(100|[0-9]{1,2}(\.[0-9]+)?)%", self.verify):
            raise RecipeError("verify-share", verify=self.verify)
        most = self.steps_per_call
        if most != "auto" and (isinstance(most, str) or most < 1):
            expected = "a whole number of at least 1, or auto"
            raise invalid("steps-per-call", "steps_per_call", most, expected)
        if self.kernels is not None and not self.exact:
            raise RecipeError("kernels-inexact", kernels=str(self.kernels))

    @property
    def verified(self) -> float:
        """The share of `verify`, from 0 to 1."""
        return float(self.verify[:-1]) / 100

    def json(self) -> dict[str, Any]:
        """The fields as plain values."""
        return asdict(self)


ALL = On()
"""All devices, with the same bits on any number of them."""
