"""What a step of GPT-2 takes on eight GPUs, by kind of kernel: blocks in a loop against blocks unrolled.

    python benchmarks/gpt2_kernels.py             # writes benchmarks/gpt2_kernels.md, in about three minutes

Plans of `gpt2-124m`, by the chips' own compiler. In a loop: the blocks of the transformer and the chunks of
its loss, as on other chips; unrolled: what GPUs run (`models/transformer.py`, `models/tied.py`).
"""

from __future__ import annotations

import collections
import contextlib
import resource
import tempfile
from pathlib import Path
from unittest import mock

import jax

import chipwise as cw
from chipwise.chips.targets import parse
from chipwise.planner.compile_step import compile_steps
from chipwise.planner.time_step import StepTime, absent_step_time
from chipwise.planner.tracing import training_step
from chipwise.step.layout import Layout

TARGETS = ("h100:8", "l40s:8", "a100:8")
FORMS = ("in a loop", "unrolled")
SWITCHES = ("chipwise.models.transformer.on_gpu", "chipwise.models.tied.on_gpu")


def times(form: str) -> tuple[dict[str, StepTime], float]:
    """The step on each target, and the processor seconds of compiling them all."""
    recipe = cw.load("gpt2-124m", synthetic=True)
    targets = [parse(name) for name in TARGETS]
    step = training_step(recipe, Layout.of(recipe, 8), resident=False)
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    with contextlib.ExitStack() as looped, tempfile.TemporaryDirectory() as cache:
        for name in SWITCHES if form == "in a loop" else ():
            looped.enter_context(mock.patch(name, lambda: False))
        answers = dict(compile_steps([(target, step) for target in targets], cache=Path(cache)))
    spent = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before
    return {t.name: absent_step_time(step, t, answers[i]) for i, t in enumerate(targets)}, spent


def by_kind(time: StepTime) -> dict[str, float]:
    """Milliseconds of a step by kind of kernel."""
    kinds: dict[str, float] = collections.defaultdict(float)
    for kernel in time.kernels:
        kinds[kernel.kind] += 1e3 * kernel.seconds
    return kinds


def page(found: dict[str, tuple[dict[str, StepTime], float]]) -> str:
    lines = [
        "# GPT-2's step on eight GPUs, by kernels", "",
        "`python benchmarks/gpt2_kernels.py`: planned milliseconds of a step of `gpt2-124m` on a device of "
        f"eight, by the compiler of JAX {jax.__version__}. In a loop: transformer blocks and chunks of the "
        "loss, as on other chips; unrolled: what GPUs run. Nobody measured either.", "",
    ]  # fmt: skip
    for name in TARGETS:
        each = {form: found[form][0][name] for form in FORMS}
        tables = {form: by_kind(time) for form, time in each.items()}
        lines += [f"## {name}", "", "| kernels | in a loop | unrolled |", "|---|---|---|"]
        for kind in sorted(tables["in a loop"], key=lambda kind: -tables["in a loop"][kind]):
            lines.append(f"| {kind} | {tables[FORMS[0]][kind]:.1f} | {tables[FORMS[1]].get(kind, 0.0):.1f} |")
        seconds, memory = [t.seconds for t in each.values()], [t.memory for t in each.values()]
        assert all(seconds) and all(memory)
        shorter = 1 - seconds[1].value / seconds[0].value
        whole = " | ".join(f"{1e3 * one.value:.1f}" for one in seconds)
        lines += [f"| **step** | {whole} ({shorter:.0%} less) |"]
        lines += ["| memory | " + " | ".join(f"{one.needed / 1e9:.2f} GB" for one in memory) + " |", ""]
    spent = " and ".join(f"{found[form][1]:.0f} ({form})" for form in FORMS)
    return "\n".join([*lines, f"Processor seconds of compiling all three: {spent}.", ""])


if __name__ == "__main__":
    Path(__file__).with_suffix(".md").write_text(
        page({form: times(form) for form in FORMS}), encoding="utf-8"
    )
