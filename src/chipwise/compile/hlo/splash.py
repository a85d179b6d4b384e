"""The work and the time of JAX's splash attention in a compiled program for TPUs.

It is a Pallas kernel, and the compiler states no cycles for it in the program. `splash.csv` has the
cycles of the code that the compiler schedules for the kernel (`benchmarks/splash.py`), by chip,
entries of a head and positions of a block. They are the cycles of one core for each step of the
kernel's loop over pairs of blocks, plus those for each line of blocks and for each visible pair. On
a 7x Google measured 0.77 to 0.95 of that, with tuned blocks (`benchmarks/splash.md`).
"""

from __future__ import annotations

import csv
import math
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from ...chips import CHIPS
from ...models.attention import flops
from ...models.attention_fused import PRODUCTS, block_of
from .proto import Instruction

TABLE = Path(__file__).with_name("splash.csv")

_FLOATS = ("bf16", "f16", "f32")


@dataclass(frozen=True)
class Splash:
    """One of splash attention's three kernels, on a device: the forward pass ("fwd"), or the
    gradient of the queries ("dq") or of keys and values ("dkv"). The gradients compute the weights
    again."""

    kernel: str
    heads: int
    """The batch times the heads of the queries."""
    queries: int
    """The number of positions of the queries."""
    keys: int
    """The number of positions of the keys."""
    size: int
    """The entries of a head."""
    share: float
    """The share of the pairs of blocks that the kernel visits."""
    block: int
    """The positions of a block."""
    steps: int
    """The pairs of blocks of a head that the kernel's loop runs over."""

    @classmethod
    def of(cls, op: Instruction) -> Splash | None:
        """The kernel that an operation calls, or `None` for another operation."""
        match = (
            re.search(r"/splash_m\wa_(fwd|dq|dkv)", op.source)
            if op.opcode == "custom-call"
            else None
        )
        if match is None:
            return None
        arrays = [s.dims for s in op.operand_shapes if s.dtype in _FLOATS and len(s.dims) > 1]
        if len(arrays) < 2:
            return None
        *heads, queries, size = arrays[0]
        keys = arrays[1][-2]
        # With a mask, the first operand has an entry for each pair of blocks of the loop.
        first = op.operand_shapes[0]
        last = op.operand_shapes[-1]
        table = first.dims[-2:] if first.dtype not in _FLOATS and len(first.dims) == 3 else None
        block = max(queries, keys) // max(table) if table else block_of(queries, size)
        lines = math.ceil(queries / block)
        columns = math.ceil(keys / block)
        if own := re.search(r"attention\[([\d.]+)\]", op.source):
            share = float(own[1])
        elif table and len(last.dims) == 2:
            # Called without `attention`: a mask that is computed in the kernel has positions, its
            # last operand, and is taken for a causal one.
            share = (min(table) + 1) / (2 * min(table))
        else:
            share = 1.0
        steps = math.prod(table) if table else lines * columns
        return cls(match[1], math.prod(heads), queries, keys, size, share, block, steps)

    @property
    def flops(self) -> float:
        return flops(
            self.heads, self.queries, self.keys, self.size, self.share, PRODUCTS[self.kernel]
        )

    def cycles(self, chip: str) -> float:
        """The cycles of a device of `chip`, a name in the catalogue. Between two sizes of heads the
        larger one counts, since heads are padded. Raises `KeyError` if the table lacks the chip."""
        sizes = _table()[chip][self.kernel]
        size = min((n for n in sizes if n >= self.size), default=max(sizes))
        block = min(sizes[size], key=lambda n: abs(math.log(n / self.block)))
        step, line, visible = sizes[size][block]
        wider = max(1.0, self.size / size)
        larger = self.block / block
        queries = math.ceil(self.queries / self.block)
        keys = math.ceil(self.keys / self.block)
        each = self.steps * step + (keys if self.kernel == "dkv" else queries) * larger * line
        return (
            self.heads
            * (each + self.share * queries * keys * larger**2 * wider * visible)
            / cores(chip)
        )


@cache
def _table() -> dict[str, dict[str, dict[int, dict[int, tuple[int, int, int]]]]]:
    """The cycles of a step, a line and a visible pair, by chip, kernel, entries of a head and
    positions of a block."""
    table: dict = {}
    with TABLE.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            blocks = table.setdefault(row["chip"], {}).setdefault(row["kernel"], {})
            cycles = tuple(int(row[name]) for name in ("step", "line", "visible"))
            blocks.setdefault(int(row["size"]), {})[int(row["block"])] = cycles
    return table


@cache
def cores(chip: str) -> int:
    """The number of cores of a JAX device, which share the loop."""
    (found,) = [one for one in CHIPS if one.name == chip]
    return (found.tensorcores or 1) // found.jax_devices_per_chip
