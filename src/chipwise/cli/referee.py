"""`chipwise referee`: what a change really did."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from ..base import RecipeError, fact, invalid, silent
from ..explain.terminal import console, lines
from . import options
from .options import argument, flag, option
from .standard_output import print_json

if TYPE_CHECKING:
    from ..study.referee import Ruling

EXITS = {"better": 0, "same": 10, "faster": 11, "slower": 12, "equal": 13, "worse": 14, "open": 15}
"""The exit code of each verdict: 0 is what a script may commit."""

_OF_ROWS = {"base", "change", "rows", "by", "paired", "metric", "lower", "higher", "margin", "run"}
"""What --rows takes, beside --json."""

_UNITS = {"s": 1.0, "min": 60.0, "h": 3600.0}


@dataclass(frozen=True)
class Foreign:
    """Runs of other programs."""

    rows: bool = flag("BASE and CHANGE are .csv files with a row for each run of any program.")
    by: str | None = option(
        "With --rows and one file, the column and the two values that say the sides.",
        "COLUMN=BASE,CHANGE",
    )
    paired: bool = flag("With --rows, compare runs with the same value in the column seed.")


@options.taking
def referee(
    *,
    context: typer.Context,
    here: options.Here,
    base: str = argument(
        "A recipe: its name, path.py:name, or REVISION:path.py:name of git; with --rows a .csv."
    ),
    change: str | None = argument("What to compare it with. [BASE with --set]", default=None),
    head: bool = flag("BASE as it stands against BASE as it was committed last.", name="--here"),
    set_: list[str] | None = option("Change a setting of CHANGE; may be repeated.", "KEY=VALUE"),
    set_base: list[str] | None = option("Change a setting of BASE; may be repeated.", "KEY=VALUE"),
    metric: str | None = options.METRIC,
    better: options.Better,
    margin: str | None = option(
        "A difference that does not matter: 0.001, or 0.1% of BASE.", "NUMBER|SHARE"
    ),
    spend: str | None = option("Time after which no further pair begins. [30min]", "TIME"),
    drop: bool = flag(
        "Try BASE without each of its techniques: the parameters that are True, or each --set."
    ),
    foreign: Foreign,
    data: str | None = options.DATA,
    run: Path = option(
        "The folder of runs and of the book of tries.", "DIR", default=Path("runs/referee")
    ),
    json_: bool = options.JSON,
) -> None:
    """Measure what a change does: train both sides with the same seeds, in pairs.

    \b
    Examples:
      chipwise referee base.py:recipe changed.py:recipe
      chipwise referee my_task.py:recipe --here --spend 10min
      chipwise referee HEAD~1:my_task.py:recipe my_task.py:recipe
      chipwise referee digits --set lr=0.01 --margin 0.1%
      chipwise referee my_task.py:recipe --drop --margin 1%
      chipwise referee --rows base.csv changed.csv --metric val_loss

    Exit codes: 0 better, 10 the same to the bit, 11 only faster, 12 only slower, 13 equal within
    the margin, 14 worse, 15 not shown. Others are errors. The verdict is checked after each pair.
    All tries in --run together err in at most 5 % of their verdicts.
    """
    shared: dict[str, Any] = {
        "metric": metric,
        "better": better.given,
        "margin": margin,
        "run": run,
    }
    typed = options.given(context)
    if not typed.keys().isdisjoint(("rows", "by", "paired")):
        raise typer.Exit(_of_rows(base, change, foreign, typed, json_, shared))
    shared |= {"set": set_ or (), "set_base": set_base or (), "data": data}
    shared |= {"spend": _seconds(spend or "30min"), "on": here.on()}
    shared["say"] = silent if json_ else options.say
    if drop:
        raise typer.Exit(_dropped(base, typed, json_, shared))
    if head:
        if change is not None:
            text = "--here compares {base} with its last commit: leave {change} out."
            raise RecipeError("referee-here", text, base=base, change=change)
        base, change = f"HEAD:{base}", base
    elif change is None and not set_:
        raise RecipeError("referee-no-change")
    from ..study.referee import referee as judge

    raise typer.Exit(_told(judge(base, change, **shared), json_))


def _of_rows(
    base: str,
    change: str | None,
    foreign: Foreign,
    typed: dict[str, str],
    json_: bool,
    shared: dict[str, Any],
) -> int:
    if not foreign.rows:
        given = [typed[name] for name in ("by", "paired") if name in typed]
        raise RecipeError("referee-rows-missing", given=given)
    if wrong := [flag for name, flag in typed.items() if name not in _OF_ROWS | {"json_"}]:
        raise RecipeError("referee-rows-alone", given=wrong)
    from ..study.referee import rows

    return _told(rows(base, change, by=foreign.by, paired=foreign.paired, **shared), json_)


def _dropped(base: str, typed: dict[str, str], json_: bool, shared: dict[str, Any]) -> int:
    names = {"change": "CHANGE", "head": "--here"}
    if wrong := [said for name, said in names.items() if name in typed]:
        raise RecipeError("referee-drop-alone", base=base, given=wrong)
    from ..study.referee.techniques import drop, summary

    found = drop(base, **shared)
    said = summary(found)
    if json_:
        each = {name: one.to_json() for name, one in found.items()}
        print_json("referee_drop/1", {"techniques": each, "said": said.json()})
    else:
        lines(console(), *(one.fact for one in found.values()), said)
    return EXITS["open"] if said["open"] else 0


def _told(verdict: Ruling, json_: bool) -> int:
    """Prints a verdict. *Returns* its exit code."""
    if json_:
        print_json("referee/1", verdict.to_json())
    else:
        speed = verdict.speed and fact("referee-speed", ratio=verdict.speed[0], span=verdict.speed)
        lines(console(), verdict.fact, *([speed] if speed else []), verdict.tries)
    return EXITS[verdict.verdict]


def _seconds(text: str) -> float:
    found = re.fullmatch(r"(\d{1,6}(?:\.\d*)?)(s|min|h)", text)
    if found is None:
        raise invalid("referee-spend", "--spend", text, "a time such as 90s, 30min or 2h")
    return float(found[1]) * _UNITS[found[2]]
