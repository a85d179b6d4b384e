"""Draws the curves of a learning-rate search as SVG, for light and dark pages."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from ..atomic import replace_text
from ..errors import RecipeError
from ..study.find_lr import MARKS, LrSearch
from .charts import Trace, panel, style_of
from .page import picture


def draw(search: LrSearch, path: str | os.PathLike) -> Path:
    """Writes the curves of `search` to `path`, atomically, and returns it.

    Raw losses are faint and smoothed ones strong. The marks are dots; a dashed line is at
    the recipe's own peak. The background is transparent.

    Raises `RecipeError` for a suffix other than .svg, `DataError` if it cannot be written.
    """
    check_suffix(path)
    curve = search.curve
    start = float(curve.smoothed[0])
    fall = max(start - float(curve.smoothed.min()), 1e-9 * abs(start))
    smoothed = curve.smoothed.clip(max=start + 0.6 * fall)  # a divergence is clipped
    raw, smooth = (list(zip(curve.rates.tolist(), y.tolist(), strict=True)) for y in (curve.losses, smoothed))
    style = style_of(0)
    traces = [Trace("", f"{style} faint", raw, aside=True), Trace("smoothed loss", style, smooth)]
    for k, mark in enumerate(MARKS, 1):
        rate = getattr(curve, mark)
        height = float(np.interp(np.log(rate), np.log(curve.rates), curve.smoothed))
        name = f"{mark.replace('_', ' ')} {rate:.3g}"
        traces.append(Trace(name, style_of(k), [(rate, height)]))
    drawn = panel(
        f"{search.old.name}: one step a rate, batch {search.old.batch}", traces, x="learning rate",
        y="training loss", x_log=True, marks=[search.own_peak],
        mark_words=f"recipe's own peak {search.own_peak:.3g}",
    )  # fmt: skip
    return replace_text(path, picture([drawn]), "picture-unwritable", option="--picture")


def check_suffix(path: str | os.PathLike) -> None:
    """Raises `RecipeError` for a suffix other than .svg."""
    if Path(path).suffix.lower() != ".svg":
        raise RecipeError(
            "picture-not-svg", "--picture {path:plain}: expected a name that ends in .svg.", path=str(path)
        )
