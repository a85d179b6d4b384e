"""`drop` asks of each technique of a recipe whether it is worth anything: the recipe without it
against the recipe with all."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from ...base import Fact, RecipeError, Say, fact, silent
from ...base.annotations import as_annotated
from ...recipes.load import switches
from .ruling import Ruling, referee
from .sequential import FEWEST


@as_annotated
def drop(
    recipe: str,
    *,
    set: Sequence[str] = (),
    set_base: Sequence[str] = (),
    spend: float = 1800.0,
    say: Say = silent,
    **options: Any,
) -> dict[str, Ruling]:
    """Compares a recipe with itself less each of its techniques, which share the base's runs.

        found = cw.referee.drop("examples/techniques.py:recipe", margin="10%")
        [name for name, ruling in found.items() if ruling.verdict in ("equal", "same")]

    A technique is "worse" to be without if it carries its weight, "better" if it harms, and "equal"
    or "same" if it does nothing. Each is a try of the book in `run`, so the levels of all keep to
    `error`.

    *Arguments:*

    - `recipe`: a built-in name or `path.py:name`.
    - `set`: settings that drop a technique each, such as `"ema=none"`. By default every parameter
      of the recipe's function that is `True` becomes `False`.
    - `set_base`: settings that all share.
    - `spend`: seconds for all, after which no further pair begins. A technique that has not begun
      by then is "open" without a run.
    - `say`: receives first what all will take.
    - `options`: the other arguments of `referee`.

    *Returns* the rulings by setting, such as `"flip=false"`. Raises `RecipeError` for a recipe
    without such parameters, and what `referee` raises.
    """
    dropped = list(set) or [f"{name}=false" for name in switches(recipe, set_base)]
    if not dropped:
        raise RecipeError("referee-no-techniques", recipe=recipe)
    runs = FEWEST * (1 + len(dropped))
    say(fact("referee-drop", techniques=len(dropped), runs=runs, pairs=FEWEST, seconds=spend))
    until = time.monotonic() + spend
    found: dict[str, Ruling] = {}
    tries: Fact | None = None
    for at, setting in enumerate(dropped):
        left = until - time.monotonic()
        if found and left <= 0:  # the first always has a pair
            found[setting] = Ruling("open", recipe, f"{recipe} {setting}", tries=tries)
            continue
        each = max(left, 0) / (len(dropped) - at)
        found[setting] = referee(
            recipe, set=[setting], set_base=set_base, spend=each, say=say, **options
        )
        tries = found[setting].tries
    return found


def summary(found: dict[str, Ruling]) -> Fact:
    """What the rulings say of the techniques."""
    kinds = {"worse": "carry", "better": "harm", "open": "open"}
    groups: dict[str, list[str]] = {"carry": [], "idle": [], "harm": [], "open": []}
    for setting, ruling in found.items():
        groups[kinds.get(ruling.verdict, "idle")].append(setting.partition("=")[0])
    return fact("referee-dropped", **groups)
