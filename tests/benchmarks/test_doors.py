"""The page of doors: its parity, on which docs/models.md stands, and the glue that it counts."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks import doors

PAGE = Path(__file__).parents[2] / "docs" / "models.md"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Keras as it reads its own variables
@pytest.mark.parametrize("door", doors.DOORS)
def test_the_first_step_in_float64_is_the_frameworks_own(door):
    if door in ("torch", "keras", "equinox"):
        pytest.importorskip("torchax" if door == "torch" else door)
    assert doors.parity(door) < 1e-9


@pytest.mark.parametrize("door", doors.DOORS)
def test_the_glue_is_five_lines_and_stands_on_the_page(door):
    assert doors.glue(door) <= 5
    text = (doors.ROOT / f"examples/my_{door}.py").read_text()
    lines = text[text.index("    task = cw.") :].splitlines()[: doors.glue(door)]
    assert "\n".join(line[4:].partition("  # fmt")[0] for line in lines) in PAGE.read_text()
