"""Reads the cycles of JAX's splash attention on TPUs from the code that their compiler schedules.

    python benchmarks/splash.py > benchmarks/splash.md   # also writes src/chipwise/compile/hlo/splash.csv

The compiler states no cycles of Pallas kernels in the program that it returns, but it can dump their code:
instructions in bundles, one bundle a cycle. A kernel is one loop over pairs of a block of queries and a block
of keys, without inner loops: each region of bundles runs in each step of the loop, or only for the pairs that
are visible, or for the first or last pair of a line. Needs chipwise[plan-tpu], and no TPU.
"""

import argparse
import csv
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from chipwise.chips.catalogue import Chip, peak_flops_per_device
from chipwise.chips.targets import parse
from chipwise.compile.absent_device import topologies
from chipwise.compile.hlo.splash import TABLE, Splash, cores
from chipwise.compile.processes import compiler_environment
from chipwise.machine.host_facts import installed
from chipwise.models.attention_fused import PRODUCTS

TARGETS = ("v4-8", "v5e-1", "v5p-8", "v6e-1", "tpu7x-8")
SIZES = (64, 128, 256)  # entries of a head
BLOCKS = (256, 512, 1024)  # positions
MEASURED = {8_192: (24.87, 30.15), 32_768: (30.91, 34.73), 131_072: (34.26, 37.16)}
"""Positions: the share of the peak in per cent, forward and backward, that Google measured on a 7x with 128
entries a head, tuned blocks and a backward pass of one kernel with five products (13 November 2025,
openxla/tokamax@783ea95, `tokamax/_src/ops/experimental/tpu/splash_attention/microbenchmarks.pdf`)."""


def compile_kernels(target: str, size: int, block: int) -> None:
    """Compiles the three kernels for four blocks of positions; in the process that loads the compiler."""
    import jax
    import jax.numpy as jnp
    from jax.experimental import topologies as absent
    from jax.experimental.pallas.ops.tpu import splash_attention as splash
    from jax.sharding import SingleDeviceSharding

    one, _ = topologies(parse(target))
    device = absent.get_topology_desc(platform="tpu", **one).devices[0]
    names = ("block_q", "block_kv", "block_q_dkv", "block_kv_dkv", "block_q_dq", "block_kv_dq")
    masks = splash.MultiHeadMask([splash.CausalMask((4 * block, 4 * block))] * 2)
    blocks = splash.BlockSizes(**dict.fromkeys(names, block))
    kernel = jax.vmap(splash.make_splash_mha(masks, head_shards=1, q_seq_shards=1, block_sizes=blocks))
    shape = jax.ShapeDtypeStruct((2, 2, 4 * block, size), jnp.bfloat16, sharding=SingleDeviceSharding(device))
    total = jax.grad(lambda *qkv: kernel(*qkv).astype(jnp.float32).sum(), (0, 1, 2))
    jax.jit(total).lower(shape, shape, shape).compile()


def cycles(target: str, size: int, block: int) -> dict[str, list[int]]:
    """Kernel to its cycles for each step, line and visible block; empty if its arrays exceed the on-chip
    memory."""
    with tempfile.TemporaryDirectory() as folder:
        dump = f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true"
        environment = compiler_environment("tpu") | {"LIBTPU_INIT_ARGS": dump}
        command = [sys.executable, __file__, "--compile", target, str(size), str(block)]
        run = subprocess.run(command, env=environment, capture_output=True, text=True)
        if run.returncode and "vmem" in run.stderr.lower():
            return {}
        if run.returncode:
            raise SystemExit(run.stderr)
        found = {}
        for kernel in PRODUCTS:
            (path,) = Path(folder).glob(f"*splash_mha_{kernel}_*[0-9]-final_bundles.txt")
            found[kernel] = parts(path.read_text(encoding="utf-8").splitlines())
    for kernel, own in found.items():
        own[2] = max(own[2], round(products(parse(target).chip, kernel, size, block)))
    return found


def parts(lines: list[str]) -> list[int]:
    """The bundles of a kernel's loop: those of every step, those of a line's first and last step, and those
    of a visible block. The last three are regions, in this order, that a branch skips."""
    begin, skipped, regions, end = 0, {}, [], 0
    for line in lines:
        if not (bundle := re.match(r"\s*(0x[0-9a-f]+|0)\s+([A-Z]{2})?\s*:", line)):
            continue
        at = int(bundle[1], 16)
        if bundle[2] == "LB":
            begin = at
        if bundle[2] == "PF" and (region := re.search(r"region (\d+)", line)) and region[1] in skipped:
            regions.append((skipped[region[1]], at))
        if branch := re.search(r"sbr\.rel .*target = \$region(\d+)", line):
            skipped[branch[1]] = end = at
    first, visible, last = (stop - start for start, stop in sorted(regions)[1:])  # after the one of all
    return [end - begin - first - visible - last, first + last, visible]


def products(chip: Chip, kernel: str, size: int, block: int) -> float:
    """The cycles of a visible block's products at the peak of one core: bundles may wait for them."""
    each = flops_per_cycle(chip) / cores(chip.name)
    return 2 * PRODUCTS[kernel] * block * block * max(size, 128) / each


def flops_per_cycle(chip: Chip) -> float:
    """At the peak of a JAX device."""
    peak = peak_flops_per_device(chip, "bf16")
    assert peak and chip.clock_GHz
    return peak / (1e9 * chip.clock_GHz)


def main() -> None:
    with TABLE.open("w", encoding="utf-8", newline="") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(("chip", "kernel", "size", "block", "step", "line", "visible"))
        for target in TARGETS:
            for size in SIZES:
                for block in BLOCKS:
                    for kernel, found in cycles(target, size, block).items():
                        rows.writerow((parse(target).chip.name, kernel, size, block, *found))
    page()


def page() -> None:
    import jax

    print("# Splash attention on TPUs, by its compiled code\n")
    print(
        "Share of the peak in %: forward pass, and backward pass (two kernels, counted as five products), of"
    )
    print("pairs that are visible, with a causal mask. By blocks of 512 and of 1,024 positions.")
    print(
        f"`python benchmarks/splash.py`, JAX {jax.__version__}, libtpu {installed('libtpu')}; nothing ran.\n"
    )
    print("| chip | entries a head | positions | 512: forward | backward | 1,024: forward | backward |")
    print("|---|---|---|---|---|---|---|")
    for target in TARGETS:
        chip = parse(target).chip
        for size in SIZES:
            for length in (2_048, 8_192, 32_768):
                cells = [cell for block in (512, 1024) for cell in shares(chip, size, block, length)]
                print(
                    f"| {chip.name} | {size} | {length:,} | " + " | ".join(f"{x:.0f}" for x in cells) + " |"
                )
    print("\nGoogle measured on a 7x, 128 entries a head, with tuned blocks and one backward kernel")
    print("(openxla/tokamax@783ea95, `splash_attention/microbenchmarks.pdf`), beside blocks of 1,024 here:\n")
    print("| positions | forward, measured | here | backward, measured | here |")
    print("|---|---|---|---|---|")
    for length, measured in MEASURED.items():
        here = shares(parse("tpu7x-8").chip, 128, 1024, length)
        cells = [f"{x:.0f}" for pair in zip(measured, here, strict=True) for x in pair]
        print(f"| {length:,} | " + " | ".join(cells) + " |")


def shares(chip: Chip, size: int, block: int, length: int) -> tuple[float, float]:
    """Per cent of the peak, forward and backward, of a head with a causal mask."""
    n = length // block
    times = {}
    for kernel in PRODUCTS:
        one = Splash(kernel, 1, length, length, size, (n + 1) / (2 * n), block, n * n)
        times[kernel] = one.cycles(chip.name)
    useful = length * length / 2 * 2 * size / flops_per_cycle(chip)
    return 200 * useful / times["fwd"], 500 * useful / (times["dq"] + times["dkv"])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--compile", nargs=3, metavar=("TARGET", "SIZE", "BLOCK"), help=argparse.SUPPRESS)
    parser.add_argument("--page", action="store_true", help="only the page, from the table")
    options = parser.parse_args()
    if options.compile:
        os.chdir(tempfile.gettempdir())
        compile_kernels(options.compile[0], *map(int, options.compile[1:]))
    elif options.page:
        page()
    else:
        main()
