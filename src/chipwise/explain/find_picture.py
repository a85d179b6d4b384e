"""The curves of a learning-rate search as a picture, SVG or PNG, on light pages and on dark ones."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import numpy as np

from ..atomic import replace_bytes
from ..errors import RecipeError
from ..study.find_lr import LrSearch
from ..study.range_test import RangeCurve

INK, GRID = "#808a94", "#808a9440"  # grey, which can be read on a white page and on a dark one
CURVES = ("#2f7ed8", "#e08214", "#1b9e77", "#b65fcf", "#c9a100", "#d9527a")
SHAPES = {"valley": "v", "steep": "s", "last_stable": "D", "suggestion": "*"}


def draw(search: LrSearch, path: str | os.PathLike) -> Path:
    """Writes the curves of `search` to `path`, whole or not at all, and returns it.

    Raw losses are faint and smoothed ones strong, one colour a sweep, with its marks; a dotted line is at the
    recipe's own peak. The background is clear.

    Raises `RecipeError` for another ending than .svg and .png, `DataError` when it cannot be written.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    to, kind = Path(path), kind_of(path)
    figure = Figure(figsize=(7.2, 4.2), layout="constrained")
    figure.patch.set_alpha(0)
    axes = figure.add_subplot()
    _axes(axes, search)
    colours = [CURVES[i % len(CURVES)] for i in range(len(search.tests))]
    for test, colour in zip(search.tests, colours, strict=True):
        _curve(axes, test.curve, colour, test.name)
    _marks(axes, search.curve, colours[search.chosen])
    axes.axvline(search.own_peak, color=INK, ls=":", lw=1.2, label=f"recipe's own peak {search.own_peak:.3g}")
    axes.legend(fontsize=8, frameon=False, labelcolor=INK)
    buffer = io.BytesIO()
    # Text stays text, and the file the same from one run to the next.
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "chipwise"}):
        figure.savefig(buffer, format=kind, dpi=144, metadata={"Date": None} if kind == "svg" else None)
    return replace_bytes(to, buffer.getvalue(), "the picture", "--picture another place")


def kind_of(path: str | os.PathLike) -> str:
    """ "svg" or "png". Raises `RecipeError` for another ending."""
    kind = Path(path).suffix.removeprefix(".").lower()
    if kind not in ("svg", "png"):
        raise RecipeError(f"{path} is no name of a picture: give --picture one that ends in .svg or .png.")
    return kind


def _axes(axes: Any, search: LrSearch) -> None:
    axes.patch.set_alpha(0)
    axes.set_xscale("log")
    axes.set_xlabel("learning rate", color=INK)
    axes.set_ylabel("training loss", color=INK)
    axes.set_title(f"{search.old.name}: one step a rate, batch {search.old.batch}", color=INK, fontsize=10)
    axes.tick_params(which="both", colors=INK)
    axes.grid(color=GRID, lw=0.6)
    for side in axes.spines.values():
        side.set_color(INK)
    first, lowest = search.curve.smoothed[0], min(test.curve.smoothed.min() for test in search.tests)
    fall = max(float(first - lowest), 1e-9 * max(abs(float(first)), 1e-300))
    axes.set_ylim(lowest - 0.15 * fall, first + 0.6 * fall)  # a divergence leaves the picture upwards


def _curve(axes: Any, curve: RangeCurve, colour: str, name: str) -> None:
    axes.plot(curve.rates, curve.losses, color=colour, alpha=0.35, lw=0.8, label="_")
    axes.plot(curve.rates, curve.smoothed, color=colour, lw=2.0, label=name or "smoothed loss")


def _marks(axes: Any, curve: RangeCurve, colour: str) -> None:
    for mark, shape in SHAPES.items():
        rate = getattr(curve, mark)
        height = np.interp(np.log(rate), np.log(curve.rates), curve.smoothed)
        size = 13 if mark == "suggestion" else 7
        label = f"{mark.replace('_', ' ')} {rate:.3g}"
        axes.plot(
            [rate], [height], shape, color=colour, ms=size, mec=INK, mew=0.8, ls="none", label=label, zorder=9
        )
