"""One thing that stood out in a run, with its evidence and what to try."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Advice:
    """`what` stood out, the `evidence`, and what to `attempt`: commands, settings or a few words. `about` is
    "time", "learning" or "settings"."""

    about: str
    what: str
    evidence: str
    attempt: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        made = asdict(self)
        made["try"] = list(made.pop("attempt"))
        return made
