"""Draws the curves of a learning-rate search as SVG or PNG, for light and dark pages."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import numpy as np

from ..atomic import replace_bytes
from ..errors import RecipeError
from ..study.find_lr import LrSearch

INK = "#808a94"  # grey, readable on white and on dark
CURVES = ("#2f7ed8", "#e08214", "#1b9e77", "#b65fcf", "#c9a100", "#d9527a")
SHAPES = {"valley": "v", "steep": "s", "last_stable": "D", "suggestion": "*"}
_INKED = (
    "text.color",
    "axes.edgecolor",
    "axes.labelcolor",
    "xtick.color",
    "ytick.color",
    "legend.labelcolor",
)
_STYLE: Any = dict.fromkeys(_INKED, INK) | {
    "figure.facecolor": "none", "axes.facecolor": "none", "axes.grid": True, "grid.color": f"{INK}40",
    "grid.linewidth": 0.6, "axes.titlesize": 10, "legend.fontsize": 8, "legend.frameon": False,
    "svg.fonttype": "none", "svg.hashsalt": "chipwise",  # keeps text as text, and the file reproducible
}  # fmt: skip


def draw(search: LrSearch, path: str | os.PathLike) -> Path:
    """Writes the curves of `search` to `path`, atomically, and returns it.

    Raw losses are faint and smoothed ones strong. Each test has a colour and its marks; a dotted line is at
    the recipe's own peak. The background is transparent.

    Raises `RecipeError` for a suffix other than .svg and .png, `DataError` if it cannot be written.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    to, kind, buffer = Path(path), kind_of(path), io.BytesIO()
    with rc_context(_STYLE):
        figure = Figure(figsize=(7.2, 4.2), layout="constrained")
        axes = figure.add_subplot(xscale="log", xlabel="learning rate", ylabel="training loss")
        axes.set_title(f"{search.old.name}: one step a rate, batch {search.old.batch}")
        _curves(axes, search)
        axes.legend()
        figure.savefig(buffer, format=kind, dpi=144, metadata={"Date": None} if kind == "svg" else None)
    return replace_bytes(to, buffer.getvalue(), "picture-unwritable", option="--picture")


def kind_of(path: str | os.PathLike) -> str:
    """ "svg" or "png". Raises `RecipeError` for another suffix."""
    kind = Path(path).suffix.removeprefix(".").lower()
    if kind not in ("svg", "png"):
        raise RecipeError("picture-not-svg-or-png", path=str(path))
    return kind


def _curves(axes: Any, search: LrSearch) -> None:
    for k, test in enumerate(search.tests):
        rates, colour = test.curve.rates, CURVES[k % len(CURVES)]
        axes.plot(rates, test.curve.losses, color=colour, alpha=0.35, lw=0.8, label="_")
        axes.plot(rates, test.curve.smoothed, color=colour, lw=2.0, label=test.name or "smoothed loss")
    curve = search.curve
    for mark, shape in SHAPES.items():
        rate = getattr(curve, mark)
        height = np.interp(np.log(rate), np.log(curve.rates), curve.smoothed)
        look = {"color": CURVES[search.chosen % len(CURVES)], "ms": 13 if mark == "suggestion" else 7}
        label = f"{mark.replace('_', ' ')} {rate:.3g}"
        axes.plot([rate], [height], shape, mec=INK, mew=0.8, ls="none", label=label, zorder=9, **look)
    axes.axvline(search.own_peak, color=INK, ls=":", lw=1.2, label=f"recipe's own peak {search.own_peak:.3g}")
    first, lowest = curve.smoothed[0], min(test.curve.smoothed.min() for test in search.tests)
    fall = max(float(first - lowest), 1e-9 * max(abs(float(first)), 1e-300))
    axes.set_ylim(lowest - 0.15 * fall, first + 0.6 * fall)  # a divergence is clipped
