"""Where a compiled program starts a collective, and where it waits for it.

A compiler's latency-hiding scheduler takes the two apart, and what it puts between them runs meanwhile, so
the schedule itself says what a collective overlaps with. Observed in programs of XLA's GPU compiler in
jaxlib 0.10.2 and of libtpu 0.0.42:

- **GPUs**: `all-gather-start` and `all-gather-done`; other collectives are in a computation that
  `async-start` calls. Where the compiler found nothing to put between them, `is_sync` is true.
- **TPUs**: a fusion with the custom call `AsyncCollectiveStart`, a product's fusion that moves the collective
  on, and one with `AsyncCollectiveDone`. Each of the three repeats the collective, under the same channel;
  it counts at the start.
"""

from __future__ import annotations

from .hlo_operations import COLLECTIVES, parts
from .hlo_proto import Instruction

Flight = tuple[str, int]
"""What a collective on its way is known by: the instruction that starts it, or its channel."""

_START, _DONE = "AsyncCollectiveStart", "AsyncCollectiveDone"


def started(op: Instruction) -> Flight | None:
    """The collective that `op` starts without waiting for it."""
    if op.opcode.endswith("-start"):
        waits = op.config.get("collective_backend_config", {}).get("is_sync", False)
        return None if waits else ("instruction", op.id)
    return _in_fusion(op, _START)


def awaited(op: Instruction) -> Flight | None:
    """The collective that `op` waits for."""
    if op.opcode.endswith("-done"):
        start = op.operands[0]
        while start.opcode.endswith("-update"):
            start = start.operands[0]
        return "instruction", start.id
    return _in_fusion(op, _DONE)


def moved_on(op: Instruction) -> Flight | None:
    """The collective that the fusion `op` may move on."""
    channel = _channel(op) if op.opcode == "fusion" else 0
    return ("channel", channel) if channel else None


def _in_fusion(op: Instruction, target: str) -> Flight | None:
    marked = op.opcode == "fusion" and any(part.target == target for part in parts(op))
    return ("channel", _channel(op)) if marked else None


def _channel(op: Instruction) -> int:
    return next((part.channel for part in parts(op) if part.opcode in COLLECTIVES), 0)
