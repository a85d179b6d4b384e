"""The runs of a study: every combination of the values, each with every seed.

    lr=0.2,0.4  momentum=0.9,0.95            4 points
    lr=0.2,momentum=0.9/seed-0               the folder of a run

Values are text, as for `--set`, and become numbers when the recipe is made. A comma separates two
values unless it is in brackets, in quotes or after a backslash.
"""

from __future__ import annotations

import ast
import hashlib
import itertools
import re
from collections.abc import Hashable, Mapping, Sequence

from ..base import RecipeError
from ..base.figures import known

Settings = dict[str, str]  # one point: setting to value
_SEEDS = 2**32
_MOST = 1000  # seeds; a higher count is probably a seed given by mistake
_OPEN = "([{"
_CLOSED = ")]}"
# A quote that is not closed is an apostrophe
_PART = re.compile(r"\\,|'[^']*'|\"[^\"]*\"|.", re.DOTALL)
_LONGEST = 100  # characters of a folder's name; file systems allow 255 bytes
_ODD = re.compile(r"[^A-Za-z0-9._+=,-]")


def parse(texts: Sequence[str]) -> dict[str, list[str]]:
    """Parses `["lr=0.2,0.4"]` to `{"lr": ["0.2", "0.4"]}`. Raises `RecipeError` for other text."""
    settings: dict[str, list[str]] = {}
    for text in texts:
        name, equals, values = (part.strip() for part in text.partition("="))
        if not equals or not name or not values:
            wrong = "--set {text}: expected key=value or key=value,value, such as --set lr=0.2,0.4."
            raise RecipeError("set-not-key-value", wrong, text=text)
        if name in settings:
            wrong = "--set {name} is given twice. Give all values together: --set {name}={values}."
            raise RecipeError(
                "set-twice", wrong, name=name, values=",".join([*settings[name], values])
            )
        settings[name] = split(values)
    return settings


def split(text: str) -> list[str]:
    """The values in `text`, in order. Raises `RecipeError` for an open bracket or an empty
    value."""
    values = [""]
    depth = 0
    for part in _PART.findall(text):
        depth = max(0, depth + (part in _OPEN) - (part in _CLOSED))
        if part == "," and not depth:
            values.append("")
        else:
            values[-1] += "," if part == "\\," else part
    if depth:
        wrong = "{text}: a bracket is not closed. Close it, or put quotes around the value."
        raise RecipeError("bracket-open", wrong, text=text)
    values = [value.strip() for value in values]
    if not all(values):
        wrong = "{text}: a value is missing beside a comma. Write a comma inside a value as \\,."
        raise RecipeError("value-missing", wrong, text=text)
    return values


def points(settings: Mapping[str, Sequence[str]]) -> list[Settings]:
    """All combinations. The last setting changes fastest. Without settings, the only point is the
    unchanged recipe.

    Raises `RecipeError` for a setting without values, for a repeated value, and for `seed`.
    """
    if "seed" in settings:
        raise RecipeError("seed-is-no-setting")
    for name, values in settings.items():
        if not values:
            raise RecipeError("setting-without-values", name=name)
        known: dict[Hashable, str] = {}
        for value in values:
            if (old := known.setdefault(_meaning(value), value)) is not value:
                raise RecipeError("value-twice", name=name, first=old, second=value)
    return [
        dict(zip(settings, values, strict=True)) for values in itertools.product(*settings.values())
    ]


def seeds(given: str | int | Sequence[int]) -> tuple[int, ...]:
    """Parses seeds. `5` or `"5"` means the seeds 0 to 4. `"3,7"` or `[3, 7]` means these two.
    `"7,"` means seed 7 alone.

    Raises `RecipeError` for other text, and for a repeated seed.
    """
    if isinstance(given, str):
        if not re.fullmatch(r"\s*\d+\s*(,\s*\d+\s*)*,?\s*", given):
            raise RecipeError("seeds-unreadable", given=given)
        given = int(given) if "," not in given else [int(n) for n in given.split(",") if n.strip()]
    if isinstance(given, int) and given > _MOST:
        raise RecipeError(
            "seeds-too-many",
            "--seeds {given}: expected at most {most} seeds. Seed {given} alone is --seeds "
            "{given}, with a "
            "comma.",
            given=given,
            most=_MOST,
        )
    if isinstance(given, int):  # True is no number of seeds
        given = range(given) if type(given) is int else ()
    named = tuple(given)
    if not named:
        raise RecipeError(
            "seeds-too-few", "--seeds {given}: expected at least 1 seed.", given=given
        )
    for k, seed in enumerate(named):
        if type(seed) is not int or not 0 <= seed < _SEEDS:
            raise RecipeError("seed-out-of-range", seed=seed, highest=_SEEDS - 1)
        if seed in named[:k]:
            raise RecipeError(
                "seed-twice", "Seed {seed} is given twice. Give each seed once.", seed=seed
            )
    return named


def identity(point: Mapping[str, str]) -> Hashable:
    """An identity that is equal for points with the same meaning. The order of settings and the
    notation of numbers do not matter."""
    return frozenset((name, _meaning(value)) for name, value in point.items())


def name(point: Mapping[str, str]) -> str:
    """The name to show, such as `lr=0.2, momentum=0.9`."""
    return ", ".join(f"{key}={value}" for key, value in point.items()) or "as it is"


def folder(point: Mapping[str, str], seed: int) -> str:
    """The run's folder, relative to the study's, different for every run.

    Characters that are unsafe in a shell, a file system or a URL become `_`. Then, or if it is too
    long, the name ends with a digest of the original.
    """
    exact = ",".join(f"{key}={value}" for key, value in point.items())
    shown = _ODD.sub("_", exact)
    plain = all("," not in key + value and "=" not in key + value for key, value in point.items())
    if shown != exact or not plain or len(exact) > _LONGEST or exact.startswith((".", "-")):
        digest = hashlib.sha256(repr(list(point.items())).encode()).hexdigest()[:8]
        shown = f"{shown.lstrip('.-')[:_LONGEST]}-{digest}"
    return f"{shown}/seed-{seed}" if point else f"seed-{seed}"


def _meaning(value: str) -> Hashable:
    try:
        literal = ast.literal_eval(value)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return value
    return literal if known(literal) else repr(literal)
