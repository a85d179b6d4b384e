"""How often a loop of optimized HLO runs: from its condition's comparison, its counter's start and its step.

JAX's `scan` and `fori_loop` make `while (i < n) { ...; i += 1 }` with the counter in a tuple. By the time the
compiler is done, comparison and increment may stand in fusions, values may be copied, and constants may be
carried in the tuple: all of that is followed here. What then remains depends on data.
"""

from __future__ import annotations

import math
import re

from .hlo_text import Computation, Instruction, Module, element

_MIRRORED = {"LT": "GT", "GT": "LT", "LE": "GE", "GE": "LE", "NE": "NE"}


def trips(module: Module, loop: Instruction, inside: Computation) -> int | None:
    """Runs of the body of `loop`, an instruction of `inside`; `None` if they depend on data."""
    stated = re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.attributes)
    if stated:
        return int(stated[1])
    body = module.computations[loop.called("body")[0]]
    condition = module.computations[loop.called("condition")[0]]
    start = inside.instructions.get(loop.operands[0])
    test = _comparison(module, condition)
    if test is None or start is None:
        return None
    direction, left, right = test

    def first(index: int) -> int | None:
        return _constant(element(start, index, inside), inside)

    for counter, other, compare in ((left, right, direction), (right, left, _MIRRORED.get(direction))):
        index = _index(counter, condition)
        step = None if index is None else _step(module, body, index)
        if index is None or not step:
            continue
        limit, held = _constant(other, condition), _index(other, condition)
        if limit is None and held is not None and _step(module, body, held) == 0:
            limit = first(held)
        begin = first(index)
        if limit is None or begin is None or compare not in _MIRRORED:
            return None
        end = limit + {"LE": 1, "GE": -1}.get(compare, 0)
        return max(0, math.ceil((end - begin) / step))
    return None


def original(op: Instruction | None, inside: Computation) -> Instruction | None:
    """`op`, or what it is a plain copy of."""
    while op is not None and op.opcode in ("copy", "bitcast") and op.operands:
        op = inside.instructions.get(op.operands[0])
    return op


def _constant(op: Instruction | None, inside: Computation) -> int | None:
    op = original(op, inside)
    if op is None or op.opcode != "constant" or not re.fullmatch(r"-?\d+", op.text):
        return None
    return int(op.text)


def _index(op: Instruction | None, inside: Computation) -> int | None:
    """Which element of the loop's tuple `op` is."""
    op = original(op, inside)
    return op.index if op is not None and op.opcode == "get-tuple-element" else None


def _operands(
    module: Module, op: Instruction | None, inside: Computation, wanted: tuple[str, ...]
) -> tuple[Instruction, list[Instruction | None], Computation] | None:
    """The instruction of one of the opcodes `wanted` that `op` is, or that the fusion `op` consists in, with
    its operands, and where those stand."""
    if op is None:
        return None
    if op.opcode in wanted:
        return op, [inside.instructions.get(n) for n in op.operands], inside
    if op.opcode != "fusion":
        return None
    fused = module.computations[op.called("calls")[0]]
    root = original(fused.root, fused)
    if root is None or root.opcode not in wanted:
        return None
    sides: list[Instruction | None] = []
    for name in root.operands:
        side = original(fused.instructions[name], fused)
        if side is not None and side.parameter is not None:
            side = inside.instructions.get(op.operands[side.parameter])
        sides.append(side)
    return root, sides, inside


def _comparison(module: Module, condition: Computation):
    found = _operands(module, original(condition.root, condition), condition, ("compare",))
    direction = re.search(r"direction=(\w\w)", found[0].attributes) if found else None
    return (direction[1], *found[1]) if found and direction else None


def _step(module: Module, body: Computation, index: int) -> int | None:
    """What the body adds to element `index` of its tuple; 0 if it leaves it alone."""
    after = original(element(body.root, index, body), body)
    if after is None:
        return None
    if after.opcode == "get-tuple-element":
        return 0 if after.index == index else None
    found = _operands(module, after, body, ("add", "subtract"))
    if found is None:
        return None
    root, (left, right), _ = found
    pairs = [(left, right)] if root.opcode == "subtract" else [(left, right), (right, left)]
    for counter, other in pairs:
        if _index(counter, body) == index:
            value = _constant(other, body)
            held = _index(other, body)
            if value is None and held is not None and _step(module, body, held) == 0:
                value = 1  # a constant carried in the tuple: JAX's loops count by ones
            return -value if root.opcode == "subtract" and value is not None else value
    return None
