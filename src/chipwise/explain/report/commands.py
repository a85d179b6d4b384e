"""What to type next: to resume a run, to repeat it, or to try again what diverged."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...engine.stored import number
from .folder import RunFiles
from .words import command, plain


def typed(files: RunFiles, setting: str | None = None) -> str | None:
    """The recipe as one types it after a command, with its settings and data; `None` for a run of a Python
    program. *Arguments:* `setting`: one to add, or to change, such as `lr=0.1`."""
    source = files.source
    if source is None:
        return None
    words = [source["recipe"]]
    for text in _changed(source["set"], setting):
        words += ["--set", text]
    if source.get("data"):
        words += ["--data", source["data"]]
    if source.get("synthetic") is True:
        words.append("--synthetic")
    return command(*words)


def _changed(settings: list[str], setting: str | None) -> list[str]:
    if setting is None:
        return settings
    name = setting.partition("=")[0]
    return [*(text for text in settings if text.partition("=")[0].strip() != name), setting]


def commands(
    files: RunFiles, state: str, devices: Mapping[str, Any], lower: str | None
) -> list[dict[str, str]]:
    """`what` and its `command`, in order. A run that diverged would do so again: it is tried with a `lower`
    rate, such as `lr=0.1`, if one is known."""
    run, again = command(str(files.path)), command(f"{files.path}-again")
    made: list[tuple[str, str]] = []
    recipe = typed(files)
    if recipe is None:
        told = "it was trained by a Python program, whose recipe the folder cannot name"
        if state == "diverged":
            rate = "a lower rate" if lower is None else lower
            return _named([("try again", f"{told}: call cw.fit(recipe, run=...) there, with {rate}")])
        if state not in ("finished", "running"):
            made.append(("resume", f'{told}: call cw.fit(recipe, run="{plain(files.path)}") there'))
        made.append(("repeat", f"{told}: call cw.fit(recipe, run=...) there"))
        return _named(made)
    more = ""
    if devices.get("simulated") is True and number(devices.get("count")):
        more += f" --simulate {devices['count']:g}"
    if devices.get("exact") is False:
        more += " --no-exact"
    if state == "diverged":
        lowered = f"chipwise train {typed(files, lower)}{more} --run {again}"
        made.append(("try again", f"chipwise find-lr {recipe}" if lower is None else lowered))
    else:
        if state in ("unfinished", "empty"):
            made.append(("resume", f"chipwise train {recipe}{more} --run {run}"))
        made.append(("repeat", f"chipwise train {recipe}{more} --run {again}"))
    if files.checkpoints:
        made.append(("evaluate", f"chipwise eval {run}"))
    return _named(made)


def _named(made: list[tuple[str, str]]) -> list[dict[str, str]]:
    return [{"what": what, "command": text} for what, text in made]
