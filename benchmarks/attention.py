"""Measures the temporary memory of attention's gradient with each chip's own compiler, without the chip.

    python benchmarks/attention.py > benchmarks/attention.md      # needs chipwise[plan], cuDNN for GPUs
    python benchmarks/attention.py --time                         # adds the CPU's time: on a quiet machine

The attention of three nets, 8 sequences in bfloat16: the implementation that `cw.models.attention` chooses
for the chip, blocks in a loop, which every chip can run, and plain attention, which stores all weights. Then
plans of `gpt2-124m` with each.
"""

import argparse
import contextlib
import functools
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path
from unittest.mock import patch

import jax
import jax.numpy as jnp

import chipwise as cw
from chipwise.chips.targets import parse
from chipwise.compile.absent_device import PLATFORM, topologies
from chipwise.compile.answers import CompileRequest
from chipwise.compile.cache import compile_each
from chipwise.compile.exports import export_program
from chipwise.machine.compiler import compiler_options
from chipwise.models import attention_blocks
from chipwise.models.attention import attention, form_for
from chipwise.models.attention_blocks import blocks
from chipwise.models.attention_mask import Mask
from chipwise.models.chip_traits import ChipTraits, traced_for
from chipwise.recipes.load import load

CHIPS = ("a100", "h100", "t4", "v5e-1", "v3-8")
CASES = {  # length, heads, entries of a head, causal
    "GPT-2 124M, 1,024 tokens": (1024, 12, 64, True),
    "a decoder, 4,096 tokens": (4096, 8, 128, True),
    "ViT-S/16, 197 patches": (197, 6, 64, False),
}
BATCH, TRIALS = 8, 5
MOST_TIMED_BYTES = 4 << 30


def plain(q, k, v, mask):
    scores = jnp.einsum("btnd,bsnd->bnts", q, k).astype(jnp.float32) * q.shape[-1] ** -0.5
    if mask.causal:
        scores = jnp.where(jnp.tri(q.shape[1], dtype=bool)[None, None], scores, -jnp.inf)
    return jnp.einsum("bnts,bsnd->btnd", jax.nn.softmax(scores).astype(v.dtype), v)


def chosen(q, k, v, mask):
    return attention(q, k, v, causal=mask.causal)


FORMS = {"chosen": chosen, "blocks": blocks, "plain": plain}


def gradient(form, mask):
    """The gradient of the sum of squares, with respect to all three arguments."""
    loss = lambda q, k, v: jnp.sum(form(q, k, v, mask).astype(jnp.float32) ** 2)  # noqa: E731
    return jax.grad(loss, (0, 1, 2))


def arguments(case):
    length, heads, d, causal = CASES[case]
    return [jax.ShapeDtypeStruct((BATCH, length, heads, d), jnp.bfloat16)] * 3, Mask(causal)


def compiled(chip):
    """MB by (case, form)."""
    target, requests = parse(chip), {}
    kind, one = PLATFORM[target.chip.kind], topologies(target)[0]
    for case in CASES:
        shapes, mask = arguments(case)
        for name, form in FORMS.items():
            with traced_for(target.chip):
                program = export_program(gradient(form, mask), shapes, kind)
            options = compiler_options(kind, True, target.chip.device_kinds[0])
            requests[case, name] = CompileRequest(
                f"{case} {name}", one, program, platform=kind, options=options
            )
    with tempfile.TemporaryDirectory() as folder:
        answers = dict(compile_each(list(requests.values()), cache_dir=Path(folder)))
    return {
        key: answers[i].problem.code if answers[i].problem else f"{answers[i].temp_bytes / 1e6:,.0f}"
        for i, key in enumerate(requests)
    }


def here(timed):
    """MB, and if `timed` milliseconds, on this CPU in float32."""
    found = {}
    for case in CASES:
        shapes, mask = arguments(case)
        shapes = [jax.ShapeDtypeStruct(s.shape, jnp.float32) for s in shapes]
        programs = {
            name: jax.jit(gradient(form, mask)).lower(*shapes).compile() for name, form in FORMS.items()
        }
        for name, program in programs.items():
            found[case, name] = f"{temporary(program) / 1e6:,.0f}"
        if timed:
            for name in [n for n, program in programs.items() if temporary(program) > MOST_TIMED_BYTES]:
                del programs[name]  # seconds a call, most of them for memory
            given = [jax.random.normal(jax.random.key(i), s.shape) for i, s in enumerate(shapes)]
            for name, milliseconds in alternating(programs, given).items():
                found[case, name] += f" ({milliseconds:,.0f} ms)"
    return found


def temporary(program):
    """Temporary bytes of a program."""
    return program.memory_analysis().temp_size_in_bytes


def alternating(programs, given):
    """Median milliseconds of each program; the programs alternate."""
    times = {name: [] for name in programs}
    for _ in range(TRIALS):
        for name, program in programs.items():
            start = time.perf_counter()
            jax.block_until_ready(program(*given))
            times[name].append(1e3 * (time.perf_counter() - start))
    return {name: statistics.median(all_of_it) for name, all_of_it in times.items()}


@functools.cache
def of(chip, case):
    shapes, mask = arguments(case)
    return form_for(ChipTraits.of(parse(chip).chip), shapes[0], shapes[1], mask)


def planned(target):
    """Rows for `gpt2-124m` on `target`: with the chosen implementation, and with each of the others."""
    for name, form in FORMS.items():
        with contextlib.ExitStack() as changed:
            if name != "chosen":
                changed.enter_context(
                    patch.object(sys.modules[attention.__module__], "form_for", lambda *_: "blocks")
                )
                changed.enter_context(patch.object(attention_blocks, "blocks", form))
            (plan,) = cw.plan(load("gpt2-124m", synthetic=True), on=[target])
        shown = of(target, next(iter(CASES))) if name == "chosen" else name
        memory = "-" if plan.memory is None else f"{plan.memory.needed / 1e9:.1f}"
        step = plan.step_seconds
        told = plan.problem.code if step is None else f"{1e3 * step.value:,.0f}"
        span = "-" if step is None else f"{1e3 * step.low:,.0f} to {1e3 * step.high:,.0f}"
        yield f"| {target} | {shown} | {memory} | {told} | {span} |"


def main():
    reader = argparse.ArgumentParser(description=__doc__)
    reader.add_argument("--time", action="store_true")
    timed = reader.parse_args().time
    print("# Memory of attention\n")
    print(
        f"Temporary memory in MB of the gradient of {BATCH} sequences, bfloat16 (the CPU: float32), as each"
    )
    print("chip's compiler states it. `python benchmarks/attention.py`, JAX", jax.__version__, end="")
    print(f", Python {platform.python_version()}.\n")
    print("| chip | net | chosen | MB | blocks | plain |\n|---|---|---|---|---|---|")
    on_cpu = here(timed)  # first, while no compiler is running
    rows = [(chip, compiled(chip)) for chip in CHIPS]
    for chip, found in [*rows, ("cpu", on_cpu)]:
        for case in CASES:
            form = "blocks" if chip == "cpu" else of(chip, case)
            print("| " + " | ".join([chip, case, form, *(found[case, name] for name in FORMS)]) + " |")
    print("\n`chipwise plan gpt2-124m --synthetic` with each implementation. Splash attention takes the")
    print("cycles of its compiled code (splash.md); cuDNN's uses an efficiency fitted to published rows.\n")
    print("| target | attention | GB a device | ms a step | interval |\n|---|---|---|---|---|")
    for target in ("h100", "v5e-8"):
        for line in planned(target):
            print(line, flush=True)


if __name__ == "__main__":
    main()
