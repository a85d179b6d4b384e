"""The costliest kernels of a step: what bounds each, its source line, and what would help.

They come from a plan document, so that terminal and page show the same, or from a `Compiled`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from ..base import Fact, fact
from ..base.figures import digits, known, share
from ..compile.compiled import Compiled
from . import terminal

SHOWN = 10
GOOD_SHARE = 0.4
"""The share of the chip's peak above which a product is about as fast as products get."""
PRODUCTS = ("matmul", "convolution", "attention")


@dataclass(frozen=True)
class KernelRow:
    """A kernel to show."""

    name: str
    kind: str
    what: str  # dtype and program of the step
    count: float
    seconds: float
    share: float
    """The share of the step's time on the device."""
    peak: float | None
    """The share of the chip's peak that its products reach. `None` if it has none or no peak is
    known."""
    bound: str
    place: str
    """The user's line, or JAX's name."""
    help: Fact


def costliest(plan: terminal.Document) -> list[KernelRow]:
    """The costliest kernels of a plan, at most `SHOWN`. The list may be empty."""
    parts = {
        k: v for k, v in (plan.get("step_parts") or {}).items() if k != "dispatch" and known(v)
    }
    kernels = plan.get("kernels") or []
    whole = sum(parts.values()) or sum(k["seconds"] for k in kernels) or 1.0
    # the peak FLOP/s of a device, from the whole step's share of it
    step = (plan.get("step_seconds") or {}).get("value")
    share_of_peak = plan.get("share_of_peak")
    flops = plan.get("flops_per_step_per_device")
    peak = flops / step / share_of_peak if flops and step and share_of_peak else None
    rows = []
    for kernel in kernels[:SHOWN]:
        if not (seconds := kernel["seconds"]):
            continue
        product = kernel["kind"] in PRODUCTS and kernel["flops"] and peak
        reached = kernel["flops"] * kernel["count"] / seconds / peak if product else None
        program = [] if kernel["program"] == "replica" else [kernel["program"]]
        rows.append(
            KernelRow(
                name=kernel["name"],
                kind=kernel["kind"],
                what=" ".join([kernel["dtype"], *program]),
                count=kernel["count"],
                seconds=seconds,
                share=seconds / whole,
                peak=reached,
                bound=kernel["bound"],
                place=short(kernel["line"]) or kernel["source"].rpartition("/")[2],
                help=would_help(
                    kernel,
                    reached,
                    None if plan.get("bound") == "launch" else plan.get("precision"),
                ),
            )
        )
    return rows


def short(line: str) -> str:
    """A path and line, relative to the package or the working directory."""
    path, colon, number = line.rpartition(":")
    for parent in (_PACKAGE.parent, Path.cwd()):
        if colon and Path(path).is_relative_to(parent):
            return f"{Path(path).relative_to(parent)}:{number}"
    return line


_PACKAGE = Path(__file__).resolve().parents[1]


def would_help(kernel: terminal.Document, reached: float | None, precision: Any) -> Fact:
    """Advice that would make a kernel faster."""
    kind = kernel["kind"]
    bound = kernel["bound"]
    if kernel["program"] == "update":
        return fact("kernel-update")
    if kernel["program"] == "replica" and kind == "collective":
        return fact("kernel-gathers")
    if kernel["program"] == "reduce" or kind == "collective":
        return fact("kernel-sum")
    if bound == "launch":
        return fact("kernel-launch")
    if kind in PRODUCTS:
        if bound == "memory":
            return fact("kernel-product-moves")
        if precision in ("f32", "tf32") and kernel["dtype"] not in ("f16", "f64"):
            return fact("kernel-precision", precision=precision)
        if reached is not None and reached < GOOD_SHARE:
            return fact("kernel-heads" if kind == "attention" else "kernel-shape", reached=reached)
        return fact("kernel-computes")
    if kind == "copy":
        return fact("kernel-copy")
    if kind == "elementwise" and bound == "compute":
        return fact("kernel-arithmetic")
    return fact(
        "kernel-moves-f32" if kernel["dtype"] == "f32" and precision == "bf16" else "kernel-moves"
    )


# ---- to show


def parts(plans: Sequence[terminal.Document]) -> Iterator[terminal.Part]:
    """The kernels of each plan that runs."""
    for plan in plans:
        if plan["problem"] is not None:
            continue
        rows = costliest(plan)
        if not rows:
            yield Text(str(fact("kernels-unknown", target=plan["target"])))
            continue
        yield terminal.Title(
            str(
                fact(
                    "kernels-title",
                    target=plan["target"],
                    kernels=len(rows),
                    share=sum(row.share for row in rows),
                )
            )
        )
        yield table(rows, "of a step")
        for advice, numbers in helps(rows):
            yield Text(f"{', '.join(map(str, numbers))}: {advice}")


def compiled(answer: Compiled) -> Iterator[terminal.Part]:
    """What `print` shows of a compiled function: seconds, memory, and the costliest kernels."""
    memory = {"needed": answer.needed_bytes, "available": answer.available_bytes}
    yield Text(str(fact("compiled-time", **vars(answer), **vars(answer.seconds))))
    yield Text(str(fact("compiled-memory", **memory, **answer.memory_bytes)))
    yield ""
    yield table(costliest(answer.to_json()), "of all")
    yield ""
    yield from (Text(str(note)) for note in answer.notes)


def table(rows: Sequence[KernelRow], of: str) -> Table:
    """A line for each kernel. *Arguments:* `of`: the heading of the shares."""
    columns = ("", of, "ms", "times", "kind", "bound by", "of peak", "line, or kernel")
    cells = [
        (
            n,
            share(row.share),
            digits(1e3 * row.seconds),
            f"{row.count:,.0f}",
            f"{row.kind} {row.what}",
            row.bound,
            "-" if row.peak is None else share(row.peak),
            row.place or row.name,
        )
        for n, row in enumerate(rows, 1)
    ]
    words = ("kind", "bound by", "line, or kernel")
    return terminal.table(columns, cells, left=words, fold=("line, or kernel",), padding=(0, 1))


def helps(rows: Sequence[KernelRow]) -> list[tuple[Fact, list[int]]]:
    """Each piece of advice once, with the numbers of its rows."""
    of: dict[str, tuple[Fact, list[int]]] = {}
    for n, row in enumerate(rows, 1):
        of.setdefault(row.help.code, (row.help, []))[1].append(n)
    return list(of.values())
