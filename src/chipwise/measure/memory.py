"""What a training step holds in the memory of one device: by category, from its arrays and its compiler."""

from __future__ import annotations

import math
import sys
from typing import Any

from ..engine.programs import Programs, meet_at_once
from ..engine.state import TrainState
from ..planner.programs import nbytes


def by_category(program: Programs, state: TrainState, window: Any, data: Any) -> dict[str, int | None]:
    """Bytes of one device, all of a kind: `state`, `window` and `data` are what it holds.

    *Returns* `parameters` (with their average), `optimizer`, `state`, `data` (examples, and the windows of
    indices and rates, of which there are two), `temporaries` of the hungriest program with the replicas'
    sums, `program` code; and what the device itself says: the most that was ever `peak_measured` in use, and
    `available` in all. `None` is unknown: a CPU keeps no such account.
    """
    known = [a for a in (one.memory_analysis() for one in program.executables) if a is not None]
    stats = program.placement.lead.memory_stats() or {}
    temporaries = max((a.temp_size_in_bytes for a in known), default=None)
    if temporaries is not None and not program.of.fused:
        temporaries += _replica_sums(known[0].output_size_in_bytes, program.of.calls)
    return {
        "parameters": nbytes(state.params) + nbytes(state.ema),
        "optimizer": nbytes(state.optimizer),
        "state": nbytes((state.state, state.sums)),
        "data": nbytes(data) + 2 * nbytes(window),
        "temporaries": temporaries,
        "program": sum(a.generated_code_size_in_bytes for a in known) or None,  # the CPU says 0
        "peak_measured": stats.get("peak_bytes_in_use"),
        "available": stats.get("bytes_limit"),
    }


def _replica_sums(each: int, calls: int) -> int:
    """Bytes of the vectors that a device's calls of the replica program leave, and of their total."""
    held = calls if meet_at_once(calls, each // 4) else 1 + math.ceil(math.log2(calls))
    return each * (held + 1)


def host_peak_bytes() -> int | None:
    """The most memory that this process ever held on the host; `None` where the system does not say."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
