"""Where and how a call runs: the machine's side of it. Nothing here belongs to a recipe."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from ..errors import RecipeError


@dataclass(frozen=True)
class On:
    """The devices that a call uses, and how they are fed. Only `exact=False` can change a result.

        cw.fit(recipe, on=cw.On(devices=4))

    *Fields:*

    - `devices`: how many to use; all that are found when None.
    - `platform`: `"cpu"` ignores accelerators; `"gpu"` or `"tpu"` requires one.
    - `exact`: one fixed order of additions, so that 1, 2, 4 and 8 devices give the same bits.
    - `feed`: `"device"` keeps the training data in the devices' memory, `"host"` streams it from there;
      `"auto"` does the first where it takes at most a quarter of that memory.
    - `shard_optimizer`: devices share out the optimizer's state; by default where each saves 16 MB.
    - `workers`: threads or processes that read streamed data, such as `4` or `"processes:4"`; chosen by trial
      when None.

    Raises `RecipeError` for a feed that is none of the three.
    """

    devices: int | None = None
    platform: str | None = None
    exact: bool = True
    feed: str = "auto"
    workers: int | str | None = None
    shard_optimizer: bool | None = None

    def __post_init__(self) -> None:
        if self.feed not in ("auto", "device", "host"):
            raise RecipeError("feed-unknown", feed=self.feed)

    def json(self) -> dict[str, Any]:
        """The fields as plain values."""
        return asdict(self)


ALL = On()
"""Every device that is found, the same bits on any number of them."""
