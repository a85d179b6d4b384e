"""`benchmarks/gpu.py` works with tiny nets on a CPU, and its table says what could not be had."""

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import gpu

ONE = {
    "bits": "ab",
    "device": "cpu",
    "batch": 64,
    "precision": "f32",
    "speeds": {"exact": 50.0, "blocks=1": 80.0, "free": 100.0},
}


def cells(line):
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_a_row_has_speeds_bits_the_plan_and_the_other():
    plan, torch = {"seconds": 1.28}, {"speed": 200.0}
    line = gpu.row("net", ONE, {"bits": "ab"}, plan, torch)
    assert cells(line)[2:] == ["50", "80", "100", "+25.0%", "yes", "1.00", "200", "0.50"]
    assert len(cells(line)) == len(cells(gpu.HEAD[0]))
    assert cells(gpu.row("net", ONE, {"bits": "ac"}, plan, torch))[6] == "**no**"


def test_what_could_not_be_had_is_a_dash():
    gone = {"error": "no time left"}
    assert cells(gpu.row("net", ONE, gone, gone, gone))[6:] == ["-", "-", "-", "-"]
    assert cells(gpu.row("net", gone, gone, gone, gone))[1] == "no time left"


def test_no_time_starts_no_process():
    assert gpu.ask(0.0, "chipwise", "vit-s16", "tiny") == {"error": "no time left"}


@pytest.mark.slow
def test_tiny_nets_on_a_cpu(tmp_path):
    out = tmp_path / "gpu.md"
    command = [
        sys.executable,
        gpu.__file__,
        "--tiny",
        "--nets",
        "vit-s16",
        "--minutes",
        "8",
        "--out",
        str(out),
    ]
    subprocess.run(command, check=True, cwd=Path(gpu.__file__).parents[1])
    line = next(line for line in out.read_text().splitlines() if line.startswith("| vit-s16"))
    assert cells(line)[6] == "yes" and float(cells(line)[2].replace(",", "")) > 0
