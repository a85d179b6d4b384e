"""Reads a compiled program from XLA's protobuf messages: computations, instructions, tiled shapes.

`program_bytes` takes the `HloModuleProto` from an executable, and `parse` reads the fields that plans and
profiles need. No installed package has the messages' schema, so fields are read by number, which protobuf
never changes: xla/service/hlo.proto and xla/xla_data.proto of https://github.com/openxla/xla.
"""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any


def program_bytes(compiled: Any) -> bytes:
    """The `HloModuleProto` of an executable from `jax.jit(...).lower(...).compile()`."""
    return compiled.runtime_executable().hlo_modules()[0].as_serialized_hlo_module_proto()


class Message:
    """A protobuf message without its schema; fields are read by number."""

    def __init__(self, data: bytes | memoryview):
        fields: dict[int, list[int | memoryview]] = {}
        data, at, end = memoryview(data), 0, len(data)
        while at < end:
            key, at = _varint(data, at)
            wire = key & 7
            value: int | memoryview
            if wire == 0:
                value, at = _varint(data, at)
            else:
                length, at = _varint(data, at) if wire == 2 else ({1: 8, 5: 4}[wire], at)
                value = data[at : at + length]
                at += length
            fields.setdefault(key >> 3, []).append(value)
        self._fields = fields

    def number(self, field: int) -> int:
        """An integer; 0, the default of protobuf, if it is missing."""
        return next(self.numbers(field), 0)

    def numbers(self, field: int) -> Iterator[int]:
        for value in self._fields.get(field, ()):
            if isinstance(value, int):
                yield _signed(value)
            else:
                at = 0
                while at < len(value):
                    packed, at = _varint(value, at)
                    yield _signed(packed)

    def text(self, field: int) -> str:
        return next((bytes(v).decode() for v in self._fields.get(field, ()) if not isinstance(v, int)), "")

    def parts(self, field: int) -> list[memoryview]:
        return [v for v in self._fields.get(field, ()) if not isinstance(v, int)]

    def messages(self, field: int) -> list[Message]:
        return [Message(v) for v in self.parts(field)]

    def message(self, field: int) -> Message:
        """A message; an empty one if it is missing."""
        return next(iter(self.messages(field)), Message(b""))


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    if (value := data[at]) < 128:  # most of them
        return value, at + 1
    value = shift = 0
    while True:
        byte = data[at]
        value, shift, at = value | (byte & 127) << shift, shift + 7, at + 1
        if byte < 128:
            return value, at


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


NAMES = tomllib.loads(Path(__file__).with_name("names.toml").read_text("utf-8"))
_TYPES = {int(number): (name, bits) for number, (name, bits) in NAMES["types"].items()}
"""Name and bits of XLA's `PrimitiveType`; the others, tokens and opaque values, have no size."""


@dataclass(frozen=True)
class Shape:
    """An array's shape, layout and memory: `bf16[8,100]{1,0:T(8,128)(2,1)S(1)}`. `memory` 0 is HBM, 1
    VMEM."""

    dtype: str
    bits: int  # bits of an element
    dims: tuple[int, ...]
    order: tuple[int, ...]  # dimensions, the fastest one first
    tile: tuple[int, ...]
    memory: int
    dynamic: bool  # `dims` are upper bounds

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"

    @property
    def elements(self) -> int:
        return math.prod(self.dims)

    @property
    def padded_elements(self) -> int:
        """The number of elements with each tiled dimension padded to its tile."""
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


@lru_cache(1000)
def _shapes_of(proto: bytes) -> tuple[Shape, ...]:
    """Once for the many instructions with equal results."""
    return tuple(_shapes(Message(proto)))


def _shapes(proto: Message) -> Iterator[Shape]:
    """All arrays of a `ShapeProto` in order, with tuples flattened."""
    parts = proto.messages(4)
    if parts:
        for part in parts:
            yield from _shapes(part)
    elif proto.number(2) != 13:  # an empty tuple
        layout, dims = proto.message(5), tuple(proto.numbers(3))
        order = tuple(layout.numbers(1))
        if len(order) != len(dims):
            order = tuple(reversed(range(len(dims))))
        name, bits = _TYPES.get(proto.number(2), ("token", 0))
        tile = tuple(layout.message(6).numbers(1))
        yield Shape(name, bits, dims, order, tile, layout.number(8), any(proto.numbers(6)))


class Instruction:
    """An operation of the computation `inside`. `operands` are instructions of the same computation; `called`
    are the computations that it runs: body and condition of a loop, branches of a conditional. `direction`:
    of a comparison, "LT", "GE" and so on; `target`: of a custom call; `channel`: the number that a collective
    has on all devices, 0 if it has none."""

    def __init__(self, proto: Message, inside: Computation):
        self.proto, self.inside = proto, inside
        self.id, self.name, self.opcode = proto.number(35), proto.text(1), proto.text(2)
        self.direction, self.target, self.channel = proto.text(63), proto.text(28), proto.number(26)

    @cached_property
    def operands(self) -> list[Instruction]:
        return [self.inside.instructions[i] for i in self.proto.numbers(36)]

    @property
    def called(self) -> list[Computation]:
        return [self.inside.module.computations[i] for i in self.proto.numbers(38)]

    @cached_property
    def shapes(self) -> tuple[Shape, ...]:
        """The arrays of its result."""
        return _shapes_of(bytes(next(iter(self.proto.parts(3)), b"")))

    @cached_property
    def operand_shapes(self) -> list[Shape]:
        """The operands' arrays in order; for a tuple, all of its arrays."""
        return [shape for operand in self.operands for shape in operand.shapes]

    @property
    def parameter(self) -> int | None:
        """The number of a parameter in its computation."""
        return self.proto.number(9) if self.opcode == "parameter" else None

    @property
    def index(self) -> int | None:
        """The index of a `get-tuple-element` in the tuple."""
        return self.proto.number(13) if self.opcode == "get-tuple-element" else None

    @property
    def value(self) -> int | None:
        """The value of an integer constant with one element."""
        literal = self.proto.message(8) if self.opcode == "constant" else Message(b"")
        values = [value for field in (4, 5, 6, 7) for value in literal.numbers(field)]  # s32, s64, u32, u64
        return values[0] if len(values) == 1 else None

    @property
    def source(self) -> str:
        """JAX's name for it."""
        return self.proto.message(7).text(2)

    @property
    def line(self) -> str:
        """The user's line that it comes from; see `Module.line`."""
        return self.inside.module.line(self.proto.message(7).number(15))

    @cached_property
    def config(self) -> dict[str, Any]:
        """The back end's configuration of an operation."""
        try:
            config = json.loads(self.proto.text(43) or "{}")
        except ValueError:  # of a custom call
            return {}
        return config if isinstance(config, dict) else {}

    @property
    def group_size(self) -> int:
        """The number of devices in a collective."""
        tiled = self.proto.message(92).number(2) or self.proto.message(87).message(2).number(2)
        listed = self.proto.messages(49) or self.proto.message(87).messages(1)
        return tiled or (len(list(listed[0].numbers(1))) if listed else self.inside.module.devices)


class Computation:
    """`instructions` by their numbers: in the order of the schedule, if the module has one."""

    def __init__(self, proto: Message, module: Module):
        self.module, self.id = module, proto.number(5)
        listed = {i.id: i for i in (Instruction(part, self) for part in proto.messages(2))}
        self.instructions = {i: listed[i] for i in module.schedule.get(self.id, listed)}
        self.root = self.instructions[proto.number(6)]


class Module:
    """A program. `devices`: the number that it runs on; `schedule`: by computation, the numbers of its
    instructions in the order in which they run."""

    def __init__(self, proto: Message):
        self.name = proto.text(1)
        assigned = proto.message(15)
        self.devices = max(assigned.number(1), 1) * max(assigned.number(2), 1)
        entries = proto.message(7).messages(1)
        self.schedule = {entry.number(1): list(entry.message(2).numbers(1)) for entry in entries}
        self.computations = {c.id: c for c in (Computation(part, self) for part in proto.messages(3))}
        self.entry = self.computations[proto.number(6)]
        frames = proto.message(17)
        self._files = [bytes(name).decode() for name in frames.parts(1)]
        self._places = [(place.number(1), place.number(3)) for place in frames.messages(3)]
        self._frames = [(frame.number(1), frame.number(2)) for frame in frames.messages(4)]
        self._lines: dict[int, str] = {}

    def line(self, frame: int) -> str:
        """The user's source line for stack frame number `frame`, such as "net.py:38": the innermost line that
        is not in a library or in chipwise's engine; "" if there is none."""
        if frame not in self._lines:
            candidates: dict[int, str] = {}
            at = frame
            while 0 < at <= len(self._frames):
                place, parent = self._frames[at - 1]
                file, number = self._places[place - 1]
                rank = _rank(self._files[file - 1])
                if rank != _EXPORT:
                    candidates.setdefault(rank, f"{self._files[file - 1]}:{number}")
                if rank >= _DRIVER or parent == at:
                    break
                at = parent
            self._lines[frame] = candidates[min(candidates)] if candidates else ""
        return self._lines[frame]


_PACKAGE = f"{Path(__file__).resolve().parents[1]}/"
_USER, _NET, _LIBRARY, _DRIVER, _EXPORT = range(5)


def _rank(file: str) -> int:
    """The rank of a file: the user's, a model or loss of chipwise, a library's, the engine that calls the
    user's functions, or the planner that exports them."""
    if file.startswith(_PACKAGE):
        folder = file.removeprefix(_PACKAGE).split("/")[0]
        if folder == "planner":
            return _EXPORT
        return _NET if folder in ("models", "recipes", "recipe", "data", "interop") else _DRIVER
    return _LIBRARY if "-packages/" in file or "/lib/python" in file else _USER


def parse(program: bytes) -> Module:
    """The module in a serialized `HloModuleProto`. Raises `ValueError` for other bytes."""
    try:
        return Module(Message(program))
    except (KeyError, IndexError) as error:
        raise ValueError(f"no HloModuleProto: {error}") from error
