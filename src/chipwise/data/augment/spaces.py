"""What random policies choose from: the changes and how strong each is at each magnitude.

A space is a function of the image's height and width to `{change: Levels}`. Units: `shear_x` and `shear_y`
slopes, `shift_x` and `shift_y` pixels, `rotate` degrees, `saturation`, `contrast`, `brightness` and
`sharpness` factors, `posterize` bits kept, `solarize` a threshold, `solarize_add` levels added below
128, `cutout` half the side of a square in pixels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

BINS = 31


class Levels(NamedTuple):
    """*Fields:* `values` at each magnitude, `(31,)`; `neutral`, what changes nothing; `signed`, whether half
    of the draws go as far to the other side of `neutral`."""

    values: np.ndarray
    neutral: float
    signed: bool


Space = Callable[[int, int], Mapping[str, Levels]]


def standard(height: int, width: int) -> dict[str, Levels]:
    """torchvision's `RandAugment`: 14 changes, magnitudes 0 to 30."""
    m = np.arange(BINS) / (BINS - 1)
    return {
        **_common(
            shear=0.3 * m,
            right=150 / 331 * width * m,
            down=150 / 331 * height * m,
            turn=30 * m,
            enhance=0.9 * m,
        ),
        **_tones(posterize=8 - np.rint(4 * m), solarize=255 * (1 - m)),
        "identity": _none(m),
    }


def wide(height: int, width: int) -> dict[str, Levels]:
    """TrivialAugment's wide space, as torchvision's `TrivialAugmentWide`: 14 changes, magnitudes 0 to 30."""
    m = np.arange(BINS) / (BINS - 1)
    return {
        **_common(shear=0.99 * m, right=32 * m, down=32 * m, turn=135 * m, enhance=0.99 * m),
        **_tones(posterize=8 - np.rint(6 * m), solarize=255 * (1 - m)),
        "identity": _none(m),
    }


def original(height: int, width: int) -> dict[str, Levels]:
    """The authors' code for ImageNet, which big_vision uses too (`pp/autoaugment.py`): 16 changes, magnitudes
    0 to 10 and beyond. Factors go up with the magnitude and have no sign; at 10 nothing is solarized."""
    m = np.arange(BINS) / 10
    factor = Levels(0.1 + 1.8 * m, 1.0, False)
    return {
        **_common(shear=0.3 * m, right=100 * m, down=100 * m, turn=30 * m, enhance=m),
        **dict.fromkeys(("saturation", "contrast", "brightness", "sharpness"), factor),
        **_tones(posterize=np.minimum(np.floor(4 * m), 8), solarize=np.floor(256 * m)),
        "invert": Levels(np.ones(BINS), 0.0, False),
        "solarize_add": Levels(np.floor(110 * m), 0.0, False),
        "cutout": Levels(np.floor(40 * m), 0.0, False),
    }


SPACES: dict[str, Space] = {"standard": standard, "wide": wide, "original": original}


def _none(m: np.ndarray) -> Levels:
    return Levels(np.zeros_like(m), 0.0, False)


def _common(
    shear: np.ndarray, right: np.ndarray, down: np.ndarray, turn: np.ndarray, enhance: np.ndarray
) -> dict[str, Levels]:
    return {
        "shear_x": Levels(shear, 0.0, True),
        "shear_y": Levels(shear, 0.0, True),
        "shift_x": Levels(right, 0.0, True),
        "shift_y": Levels(down, 0.0, True),
        "rotate": Levels(turn, 0.0, True),
        **dict.fromkeys(
            ("saturation", "contrast", "brightness", "sharpness"), Levels(1 + enhance, 1.0, True)
        ),
    }


def _tones(posterize: np.ndarray, solarize: np.ndarray) -> dict[str, Levels]:
    once = Levels(np.ones(BINS), 0.0, False)
    return {
        "posterize": Levels(posterize, 8.0, False),
        "solarize": Levels(solarize, 256.0, False),
        "autocontrast": once,
        "equalize": once,
    }
