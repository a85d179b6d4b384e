"""`chipwise find-lr RECIPE`."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from ..errors import RecipeError
from ..words.figures import sparkline
from . import options
from .transfer import train_line

if TYPE_CHECKING:
    import numpy as np

    from ..study.find_lr import LrSearch


def find_lr(
    recipe: Annotated[str, typer.Argument(help="A built-in recipe (digits, mnist, ...) or path.py:name.")],
    low: Annotated[float, typer.Option(help="The first rate of the sweep.")] = 1e-5,
    high: Annotated[float, typer.Option(help="The last one.")] = 10.0,
    steps: Annotated[int, typer.Option(metavar="N", help="Steps of the sweep, one rate each.")] = 100,
    second: Annotated[
        str | None,
        typer.Option(
            metavar="NAME[=V,...]",
            help="Sweep once for each of several values: momentum=0.8,0.9,0.95 (Adam's is b1), weight_decay.",
        ),
    ] = None,
    devices: options.Devices = None,
    simulate: options.Simulate = None,
    data: options.Data = None,
    synthetic: options.Synthetic = False,
    workers: options.Workers = None,
    set_: options.Set = None,
    picture: Annotated[
        Path | None, typer.Option(metavar="FILE.svg", help="Draw the curves; .png works too.")
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE.json", help="Write what --json prints.")] = None,
    apply: Annotated[
        Path | None,
        typer.Option(metavar="FILE.py", help="Write the recipe with the found rate; FILE.py:recipe is it."),
    ] = None,
    json_: options.Json = False,
) -> None:
    """Find a peak learning rate: one short run whose rate grows with every step.

    \b
    Examples:
      chipwise find-lr digits
      chipwise find-lr cifar10-davidnet --second momentum=0.8,0.9,0.95 --picture rates.svg
      chipwise find-lr mnist --second b1
      chipwise find-lr my_task.py:recipe --apply my_found.py
    """
    on = options.on(devices, simulate, workers=workers)
    from ..atomic import replace_text
    from ..explain.find_picture import draw, kind_of
    from ..recipe.recipe_file import new_file, write_recipe
    from ..recipe.settings import load
    from ..study.find_lr import check_peak
    from ..study.find_lr import find_lr as find

    name, values = _axis(second)
    if picture is not None:  # what cannot be written is said before the work
        kind_of(picture)
    if apply is not None:
        new_file(apply)
    settings = set_ or []
    loaded = load(recipe, settings, data, synthetic)
    if apply is not None:
        check_peak(loaded)
    found = find(
        loaded, low=low, high=high, steps=steps, second=name, values=values, on=on,
        progress="none" if json_ else "auto",
    )  # fmt: skip
    text = json.dumps(found.to_json())
    if json_:
        print(text)
    else:
        _print(found)
    written = []
    if out is not None:
        written.append(replace_text(out, text + "\n", "the curve", "--out another place"))
    if picture is not None:
        written.append(draw(found, picture))
    if apply is not None:
        title = f"{loaded.name} with the rate that `chipwise find-lr` suggests at batch {loaded.batch}."
        new = found.recipe
        written.append(write_recipe(apply, old=loaded, new=new, spec=recipe, settings=settings, title=title))
    if json_:
        return
    for path in written:
        print(f"written: {path}")
    if apply is not None:
        print(f"Next: {train_line(apply, data, synthetic)}")
        return
    words = ["chipwise", "train", recipe]
    values_found = [f"{key}={value:g}" for key, value in found.settings.items()]
    words += [word for pair in (*settings, *values_found) for word in ("--set", pair)]
    words += [*(["--data", data] if data else []), *(["--synthetic"] if synthetic else [])]
    print(f"Next: {shlex.join(words)}")


def _axis(text: str | None) -> tuple[str | None, list[float] | None]:
    """`momentum=0.8,0.9` as a name and values; a name alone leaves the values open."""
    if text is None:
        return None, None
    name, equals, listed = text.partition("=")
    try:
        return name.strip(), [float(value) for value in listed.split(",")] if equals else None
    except ValueError:
        raise RecipeError(
            f"--second {text}: expected a name and numbers, such as momentum=0.8,0.9,0.95, or a name alone."
        ) from None


def _print(found: LrSearch) -> None:
    console = Console(file=sys.stdout, highlight=False, width=None if sys.stdout.isatty() else 120)
    recipe, rates = found.old, found.rates
    console.print(
        f"{recipe.name}: batch {recipe.batch}, {len(rates)} steps, rates {rates[0]:.3g} to {rates[-1]:.3g}",
        markup=False,
    )
    console.print(f"{_bars(found.smoothed)}  loss {found.smoothed[0]:.3g} to {found.smoothed.min():.3g}\n")
    table = Table(box=None, pad_edge=False)
    names = list(found.sweep.held)
    for column in (*names, "suggestion", "valley", "steep", "last stable", "lowest loss"):
        table.add_column(column, justify="right")
    for sweep in found.sweeps:
        c = sweep.curve
        cells = [*sweep.held.values(), c.suggestion, c.valley, c.steep, c.last_stable, c.smoothed.min()]
        style = "bold" if sweep is found.sweep and len(found.sweeps) > 1 else None
        table.add_row(*(f"{cell:.3g}" for cell in cells), style=style)
    console.print(table)
    suggested = ", ".join(f"{name}={value:g}" for name, value in found.settings.items())
    console.print(f"\nSuggested: {suggested}", markup=False)
    console.print(f"Why: {found.why}.", markup=False, soft_wrap=True)
    console.print(f"The recipe's own peak is {found.own_peak:.3g}.", markup=False)
    for text in (*found.notes, found.stopped, *found.doubts):
        if text:
            console.print(text, markup=False, soft_wrap=True)


def _bars(smoothed: np.ndarray) -> str:
    """The curve in one line; what lies above its start is as high as that."""
    low, start = float(smoothed.min()), float(smoothed[0])
    share = [min(max((float(x) - low) / (start - low or 1.0), 0.0), 1.0) for x in smoothed]
    step = max(1, -(-len(share) // 80))
    return sparkline(share[::step], 0.0, 1.0)
