"""The grammar of optimized HLO text, as far as `hlo` needs it: computations, instructions, tiled shapes."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from functools import cached_property

_BITS = {"pred": 8, "c64": 64, "c128": 128}
_SHAPE = re.compile(r"\b([a-z]\w*)\[([\d,<=]*)\](?:\{([^{}]*)\})?")


@dataclass(frozen=True)
class Shape:
    """An array and where it lies: `bf16[8,100]{1,0:T(8,128)(2,1)S(1)}`. `memory` 0 is HBM, 1 VMEM."""

    dtype: str
    dims: tuple[int, ...]
    order: tuple[int, ...]  # dimensions from the one that varies fastest
    tile: tuple[int, ...]
    memory: int
    dynamic: bool

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"

    @property
    def scalar(self) -> bool:
        return not self.dims

    @property
    def elements(self) -> int:
        return math.prod(self.dims)

    @property
    def bits(self) -> int:
        if self.dtype in _BITS:
            return _BITS[self.dtype]
        found = re.match(r"(?:bf|[usf])(\d+)", self.dtype)
        return int(found[1]) if found else 0  # token, opaque

    @property
    def padded_elements(self) -> int:
        """With each tiled dimension filled up to its tile."""
        sizes = [self.dims[i] for i in self.order]
        for at, length in enumerate(reversed(self.tile)):
            if at < len(sizes):
                sizes[at] = -(-sizes[at] // length) * length
        return math.prod(sizes)

    @property
    def nbytes(self) -> int:
        return self.elements * self.bits // 8

    @property
    def padded_bytes(self) -> int:
        return self.padded_elements * self.bits // 8

    @property
    def hbm_bytes(self) -> int:
        return self.padded_bytes if self.memory == 0 else 0


def shapes(text: str) -> tuple[Shape, ...]:
    """Every array in a type, in order, tuples taken apart."""
    found = []
    for dtype, size, layout in _SHAPE.findall(text):
        dims = tuple(int(n.removeprefix("<=")) for n in size.split(",") if n)
        minor, _, rest = layout.partition(":")
        order = tuple(int(n) for n in minor.split(",") if n)
        if len(order) != len(dims):
            order = tuple(reversed(range(len(dims))))
        tile = re.search(r"T\(([\d,]+)\)", rest)
        memory = re.search(r"S\((\d+)\)", rest)
        found.append(
            Shape(
                dtype,
                dims,
                order,
                tuple(int(n) for n in tile[1].split(",")) if tile else (),
                int(memory[1]) if memory else 0,
                "<=" in size,
            )
        )
    return tuple(found)


@dataclass
class Instruction:
    """`%name = type opcode(operands), attributes`. `operand_shapes` are filled in by `parse`."""

    name: str
    type: str
    opcode: str
    text: str  # between the opcode's parentheses
    attributes: str
    operands: tuple[str, ...]
    operand_types: list[str] = field(default_factory=list)

    @cached_property
    def shapes(self) -> tuple[Shape, ...]:
        return shapes(self.type)

    @cached_property
    def operand_shapes(self) -> list[Shape]:
        """The operands' arrays in order; of an operand that is a tuple, all of them."""
        return [s for t in self.operand_types for s in shapes(t)]

    @property
    def parameter(self) -> int | None:
        return int(self.text) if self.opcode == "parameter" else None

    @property
    def index(self) -> int | None:
        found = re.search(r"\bindex=(\d+)", self.attributes)
        return int(found[1]) if found else None

    @property
    def target(self) -> str:
        found = re.search(r'custom_call_target="([^"]*)"', self.attributes)
        return found[1] if found else ""

    @property
    def source(self) -> str:
        """What JAX called it."""
        found = re.search(r'op_name="([^"]*)"', self.attributes)
        return found[1] if found else ""

    @property
    def estimated_cycles(self) -> float | None:
        found = re.search(r'"estimated_cycles":"?(-?\d+)', self.attributes)
        return float(found[1]) if found and int(found[1]) >= 0 else None

    def called(self, attribute: str) -> list[str]:
        """Names of the computations that an attribute lists."""
        found = re.search(rf"\b{attribute}=(?:\{{([^}}]*)\}}|(%?[\w.\-]+))", self.attributes)
        return re.findall(r"%?([\w.\-]+)", found[1] or found[2]) if found else []


@dataclass
class Computation:
    name: str
    instructions: dict[str, Instruction] = field(default_factory=dict)
    root_name: str = ""

    @property
    def root(self) -> Instruction:
        return self.instructions[self.root_name]

    @cached_property
    def _users(self) -> dict[str, list[Instruction]]:
        found: dict[str, list[Instruction]] = {}
        for op in self.instructions.values():
            for name in dict.fromkeys(op.operands):
                found.setdefault(name, []).append(op)
        return found

    def users(self, name: str) -> list[Instruction]:
        return self._users.get(name, [])


@dataclass
class Module:
    computations: dict[str, Computation]
    entry: str
    devices: int  # that the program spans


def element(op: Instruction, index: int, inside: Computation) -> Instruction | None:
    """Element `index` of a tuple instruction; `op` itself where the state is no tuple."""
    if op.opcode != "tuple":
        return None
    return inside.instructions.get(op.operands[index]) if index < len(op.operands) else None


def parse(text: str) -> Module:
    """Raises `ValueError` if there is no entry computation."""
    computations: dict[str, Computation] = {}
    entry, current = "", None
    for line in text.splitlines():
        if current is None:
            head = re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\{\s*$", line)
            if head:
                current = computations[head[2]] = Computation(head[2])
                entry = head[2] if head[1] else entry
        elif line.startswith("}"):
            if not current.root_name and current.instructions:
                current.root_name = next(reversed(current.instructions))
            current = None
        else:
            op = _instruction(line)
            if op is not None:
                current.instructions[op.name] = op
                if line.lstrip().startswith("ROOT "):
                    current.root_name = op.name
    if not entry:
        raise ValueError("this HLO text has no ENTRY computation.")
    for computation in computations.values():
        for op in computation.instructions.values():
            op.operand_types = [
                computation.instructions[n].type for n in op.operands if n in computation.instructions
            ]
    header = text.partition("\n")[0]
    counts = [re.search(rf"\b{key}=(\d+)", header) for key in ("num_partitions", "replica_count")]
    return Module(computations, entry, math.prod(int(c[1]) for c in counts if c))


_HEAD = re.compile(r"\s*(?:ROOT )?%?([\w.\-]+) = ")


def _instruction(line: str) -> Instruction | None:
    head = _HEAD.match(line)
    if head is None:
        return None
    rest = line[head.end() :]
    if rest.startswith("("):
        end = _closing(rest, 0) + 1
    else:
        end = rest.find(" ")
    of_type, rest = rest[:end], rest[end:].lstrip()
    opcode, bracket, _ = rest.partition("(")
    if not bracket:
        return None
    close = _closing(rest, len(opcode))
    inner = rest[len(opcode) + 1 : close]
    operands = tuple(re.findall(r"%([\w.\-]+)", inner)) if opcode != "constant" else ()
    return Instruction(head[1], of_type, opcode, inner, rest[close + 1 :], operands)


def _closing(text: str, start: int) -> int:
    """Where the bracket at `start` closes."""
    depth = 0
    for found in re.finditer(r"[()]", text[start:]):
        depth += 1 if found[0] == "(" else -1
        if depth == 0:
            return start + found.start()
    return len(text)
