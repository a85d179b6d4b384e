"""The program that measures small nets: its ways, and the page that it writes. No speed is asserted."""

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[2] / "benchmarks" / "small_nets.py"


def test_a_row_has_the_median_of_the_turns_and_keras_best():
    made = runpy.run_path(str(PROGRAM), run_name="small_nets")
    rates = {
        f"{net}|{way}": [scale * rate for scale in (1.0, 2.0, 4.0)]
        for net in made["NETS"]
        for way, rate in {
            "chipwise, 8 replicas, a step a call": 100.0,
            "chipwise, 8 replicas, 32 steps a call": 400.0,
            "Keras, 1": 50.0,
            "Keras, 8": 150.0,
            "Keras, 32": 120.0,
            "plain jitted loop": 300.0,
        }.items()
    }
    lines = made["page"](rates, 3).splitlines()
    rows = [line for line in lines if line.startswith("| `digits`")]
    assert rows == [
        "| `digits` | chipwise, 8 replicas, a step a call | 200 (100 to 400) | 1.00 |",
        "| `digits` | chipwise, 8 replicas, 32 steps a call | 800 (400 to 1,600) | 4.00 |",
        "| `digits` | Keras, steps_per_execution=8, its best | 300 (150 to 600) | 1.50 |",
        "| `digits` | plain jitted loop | 600 (300 to 1,200) | 3.00 |",
    ]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_way_of_every_net_is_measured(tmp_path):
    page = tmp_path / "page.md"
    command = [sys.executable, PROGRAM, "--turns", "1", "--scale", "64", "--output", page]
    subprocess.run(command, check=True, capture_output=True)
    made = runpy.run_path(str(PROGRAM), run_name="small_nets")
    for name, net in made["NETS"].items():
        rows = [line for line in page.read_text().splitlines() if line.startswith(f"| `{name}` |")]
        assert len(rows) == 2 * len(net.replicas) + 3
