"""Plans of four nets on six chips by kind of kernel, before and after they were made to move less memory.

    python benchmarks/net_kernels.py                            # what has no row yet, then the page
    python benchmarks/net_kernels.py --only vit-s16 --on h100,a100
    PYTHONPATH=EARLIER/src python benchmarks/net_kernels.py --form before

Each plan becomes rows of `net_kernels.csv` at once, so that a stopped program continues. A row that
is there is not planned again: delete it for that. `before` are the plans of another checkout.
"""

from __future__ import annotations

import argparse
import collections
import csv
from pathlib import Path

import jax

import chipwise as cw
from chipwise.chips.targets import parse
from chipwise.planner.compile_step import compile_steps
from chipwise.planner.time_step import absent_step_time
from chipwise.planner.tracing import training_step
from chipwise.step.layout import Layout

NETS = {
    "vit-s16": ["batch=256", "magnitude=0", "mixup=0", "precision=bf16"],
    "bert-base": ["batch=64", "precision=bf16"],
    "gpt2-124m": ["batch=16"],
    "imagenet-resnet50": ["batch=256", "precision=bf16"],
}
TARGETS = ("h100", "a100", "l40s", "t4", "v5e-1", "v6e-1")
FORMS = ("before", "after")
KINDS = {
    "products": ("matmul", "convolution"),
    "attention": ("attention",),
    "reductions": ("reduce",),
    "elementwise": ("elementwise",),
    "copies": ("copy",),
}
STEP = "step"
COLUMNS = ["net", "target", "form", "kind", "kernels", "ms", "jax"]
ROWS = Path(__file__).with_suffix(".csv")

ABOUT = """# Kernels of four nets, planned before and after

`python benchmarks/net_kernels.py`: milliseconds of an exact step on one device and the number of its
kernels, by the chips' own compilers ({versions}), without any of these chips. `before` → `after` GELU in
bfloat16 by one quotient, layer norm's gradient in three kernels, queries, keys and values by products of
their own, an odd number of positions padded once, and a last block that computes only the position that
is read. Before is the package of 873831fd. A step is the sum of its kernels' times, without the host's
starting of them. Two replicas on GPUs, eight on TPUs. Nobody measured any of it.

Worse than before are `bert-base` on a v6e, by copies (86.0 → 90.9 ms), and `gpt2-124m` on a T4 (by 0.7 %).
`imagenet-resnet50`, and `gpt2-124m` on TPUs, are the same programs as before.
"""


def planned(net: str, target: str, form: str) -> list[dict[str, object]]:
    """A row for each kind of kernel, and one for the step."""
    place = parse(target)
    replicas = 8 if place.chip.kind == "TPU" else 2
    recipe = cw.load(net, [*NETS[net], f"replicas={replicas}"], synthetic=True)
    step = training_step(recipe, Layout.of(recipe, 1), resident=False)
    (_, answers), *_ = compile_steps([(place, step)])
    time = absent_step_time(step, place, answers)
    if time.problem is not None:
        print(f"{net} on {target}: {time.problem}")
        return []
    found: dict[str, list[float]] = collections.defaultdict(lambda: [0.0, 0.0])
    for kernel in time.kernels:
        kind = next((name for name, of in KINDS.items() if kernel.kind in of), "other")
        for name in (kind, STEP):
            found[name][0] += kernel.count
            found[name][1] += 1e3 * kernel.seconds
    about = {"net": net, "target": target, "form": form, "jax": jax.__version__}
    return [
        about | {"kind": kind, "kernels": round(count), "ms": round(ms, 3)}
        for kind, (count, ms) in found.items()
    ]


def stored() -> list[dict[str, str]]:
    if not ROWS.exists():
        return []
    with ROWS.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def add(rows: list[dict[str, object]]) -> None:
    fresh = not ROWS.exists()
    with ROWS.open("a", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        if fresh:
            writer.writeheader()
        writer.writerows(rows)


def page(rows: list[dict[str, str]]) -> str:
    ms = {(r["net"], r["target"], r["form"], r["kind"]): float(r["ms"]) for r in rows}
    count = {(r["net"], r["target"], r["form"]): r["kernels"] for r in rows if r["kind"] == STEP}
    kinds = [STEP, *KINDS, "other"]
    versions = ", ".join(sorted({f"JAX {r['jax']}" for r in rows}))
    lines = [ABOUT.format(versions=versions)]
    for net in NETS:
        lines += [f"## {net}", "", f"`{' '.join(NETS[net])}`", ""]
        lines += [f"| on | {' | '.join(kinds)} | kernels |", "|---" * (len(kinds) + 2) + "|"]
        for target in TARGETS:
            cells = [
                " → ".join(
                    f"{ms.get((net, target, form, kind), 0.0):.1f}" if (net, target, form) in count else "-"
                    for form in FORMS
                )
                for kind in kinds
            ]
            cells.append(" → ".join(count.get((net, target, form), "-") for form in FORMS))
            lines.append(f"| {target} | {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", default=",".join(NETS), help="These nets.")
    parser.add_argument("--on", default=",".join(TARGETS), help="These targets.")
    parser.add_argument("--form", choices=FORMS, default="after", help="How to name the rows.")
    chosen = parser.parse_args()
    for net in chosen.only.split(","):
        for target in chosen.on.split(","):
            there = {(r["net"], r["target"], r["form"]) for r in stored()}
            if (net, target, chosen.form) not in there:
                add(planned(net, target, chosen.form))
    ROWS.with_suffix(".md").write_text(page(stored()), encoding="utf-8")


if __name__ == "__main__":
    main()
