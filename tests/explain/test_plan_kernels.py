"""What a chip does in a step: shares, what bounds each kernel, the line, and what would help."""

import dataclasses
import io

import pytest
from rich.console import Console

from chipwise.base.facts import fact
from chipwise.compile.hlo.kernel import Kernel, costliest
from chipwise.explain import plan_kernels
from planner import documents


def kernel(**changes):
    like = Kernel(
        "fusion.1",
        "elementwise",
        8,
        0.01,
        1e6,
        0.0,
        "memory",
        "replica",
        "bf16",
        (),
        "jit(f)/add",
        "net.py:3",
    )
    return dataclasses.replace(like, **changes)


def plan(*kernels, **changes):
    made = documents.plans()[0]
    return dataclasses.replace(made, kernels=kernels, **changes).to_json()


def test_shares_are_of_the_step_on_the_device():
    made = plan(kernel(), kernel(name="dot", kind="matmul", flops=1e12, bound="compute", seconds=0.1))
    first, second = plan_kernels.costliest(made)
    whole = sum(seconds for name, seconds in made["step_parts"].items() if name != "dispatch")
    assert first.share == pytest.approx(0.01 / whole) and second.share == pytest.approx(0.1 / whole)
    assert first.peak is None and second.peak == pytest.approx(8e12 / 0.1 / 197e12)
    assert first.place == "net.py:3"
    assert plan_kernels.costliest(plan(*[kernel()] * 12)) == [first] * 10
    assert plan_kernels.costliest(plan()) == []


@pytest.mark.parametrize(
    "changes, precision, code",
    [
        ({"program": "update"}, "bf16", "kernel-update"),
        ({"program": "reduce"}, "bf16", "kernel-sum"),
        ({"kind": "collective"}, "bf16", "kernel-gathers"),
        ({"bound": "launch"}, "bf16", "kernel-launch"),
        ({"kind": "matmul"}, "bf16", "kernel-product-moves"),
        ({"kind": "matmul", "bound": "compute", "dtype": "f32"}, "f32", "kernel-precision"),
        ({"kind": "matmul", "bound": "compute"}, "bf16", "kernel-computes"),
        ({"kind": "convolution", "bound": "compute", "flops": 1e9}, "bf16", "kernel-shape"),
        ({"kind": "copy"}, "bf16", "kernel-copy"),
        ({"kind": "elementwise", "bound": "compute"}, "bf16", "kernel-arithmetic"),
        ({"dtype": "f32"}, "bf16", "kernel-moves-f32"),
        ({}, "bf16", "kernel-moves"),
    ],
)
def test_what_would_help(changes, precision, code):
    (row,) = plan_kernels.costliest(plan(kernel(**changes), precision=precision))
    assert row.help.code == code


def test_kernels_of_one_line_that_do_the_same_are_one():
    block = [kernel(name=f"fusion.{n}", seconds=0.01 * n, count=n, bytes=10.0 * n) for n in (1, 2)]
    one, other = costliest([*block, kernel(line="net.py:4", seconds=0.02)])
    assert (one.name, one.count, one.seconds) == ("fusion.2", 3, pytest.approx(0.03))
    assert one.bytes == pytest.approx(50 / 3) and other.line == "net.py:4"


def test_lines_are_told_from_the_package_or_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert plan_kernels.short(f"{tmp_path}/net.py:38") == "net.py:38"
    assert plan_kernels.short(f"{plan_kernels._PACKAGE}/models/conv.py:7") == "chipwise/models/conv.py:7"
    assert plan_kernels.short("/elsewhere/net.py:38") == "/elsewhere/net.py:38"
    assert plan_kernels.short("") == ""


def test_the_terminal_has_a_table_a_target_that_runs():
    plans = [plan(kernel(), kernel(kind="copy", name="copy.1", line="")), plan()]
    console = Console(width=120, file=io.StringIO())
    for part in plan_kernels.parts(plans + [documents.plans()[5].to_json()]):
        console.print(part, markup=False)
    out = console.file.getvalue()
    assert "net.py:3" in out and f"1: {fact('kernel-moves')}" in out.replace("\n", " ").replace("  ", " ")
    assert str(fact("kernels-unknown", target="v5e-8")) in out and "t4" not in out


def test_a_step_that_is_bound_by_launches_is_not_told_to_multiply_faster():
    product = kernel(kind="matmul", bound="compute", dtype="tf32", flops=1e9)
    for bound, told in (("compute", True), ("launch", False)):
        (row,) = plan_kernels.costliest(plan(product, precision="tf32", bound=bound))
        assert (row.help.code == "kernel-precision") is told
