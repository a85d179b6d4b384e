"""Reads a compiled program from XLA's protobuf messages: computations, instructions, tiled shapes.

`program_bytes` takes the `HloModuleProto` from an executable, and `parse` reads the fields that
plans and profiles need. No installed package has the messages' schema, so `hlo.textproto` states
the schema of these fields.
"""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ...base.protobuf import message_class


def program_bytes(compiled: Any) -> bytes:
    """The `HloModuleProto` of an executable from `jax.jit(...).lower(...).compile()`."""
    return compiled.runtime_executable().hlo_modules()[0].as_serialized_hlo_module_proto()


NAMES = tomllib.loads(Path(__file__).with_name("names.toml").read_text("utf-8"))
_TYPES = {int(number): (name, bits) for number, (name, bits) in NAMES["types"].items()}
"""The name and bits of each `PrimitiveType` of XLA that has a size. The others are tokens and
opaque values."""


@dataclass(frozen=True)
class Shape:
    """An array's shape, layout and memory: `bf16[8,100]{1,0:T(8,128)(2,1)S(1)}`. `memory` 0 is HBM,
    1 VMEM."""

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


def _shapes(proto: Any) -> Iterator[Shape]:
    """All arrays of a `ShapeProto` in order, with tuples flattened."""
    if proto.tuple_shapes:
        for part in proto.tuple_shapes:
            yield from _shapes(part)
    elif proto.element_type != 13:  # an empty tuple
        layout = proto.layout
        dims = tuple(proto.dimensions)
        order = tuple(layout.minor_to_major)
        if len(order) != len(dims):
            order = tuple(reversed(range(len(dims))))
        name, bits = _TYPES.get(proto.element_type, ("token", 0))
        tile = tuple(layout.tiles[0].dimensions) if layout.tiles else ()
        yield Shape(
            name, bits, dims, order, tile, layout.memory_space, any(proto.is_dynamic_dimension)
        )


class Instruction:
    """An operation of the computation `inside`.

    - `operands`: instructions of the same computation.
    - `called`: the computations that it runs, such as body and condition of a loop, or the branches
      of a conditional.
    - `direction`: the direction of a comparison, such as "LT" or "GE".
    - `target`: the target of a custom call.
    - `channel`: the number that a collective has on all devices, or 0 if it has none.
    """

    def __init__(self, proto: Any, inside: Computation):
        self.proto = proto
        self.inside = inside
        self.id = proto.id
        self.name = proto.name
        self.opcode = proto.opcode
        self.direction = proto.comparison_direction
        self.target = proto.custom_call_target
        self.channel = proto.channel_id

    @cached_property
    def operands(self) -> list[Instruction]:
        return [self.inside.instructions[i] for i in self.proto.operand_ids]

    @property
    def called(self) -> list[Computation]:
        return [self.inside.module.computations[i] for i in self.proto.called_computation_ids]

    @cached_property
    def shapes(self) -> tuple[Shape, ...]:
        """The arrays of the operation's result."""
        return tuple(_shapes(self.proto.shape))

    @cached_property
    def operand_shapes(self) -> list[Shape]:
        """The operands' arrays in order. A tuple gives all of its arrays."""
        return [shape for operand in self.operands for shape in operand.shapes]

    @property
    def parameter(self) -> int | None:
        """The number of a parameter in its computation, or `None` for another operation."""
        return self.proto.parameter_number if self.opcode == "parameter" else None

    @property
    def index(self) -> int | None:
        """The index of a `get-tuple-element` in the tuple, or `None` for another operation."""
        return self.proto.tuple_index if self.opcode == "get-tuple-element" else None

    @property
    def value(self) -> int | None:
        """The value of an integer constant with one element, else `None`."""
        literal = self.proto.literal
        values = [*literal.s32s, *literal.s64s, *literal.u32s, *literal.u64s]
        return values[0] if self.opcode == "constant" and len(values) == 1 else None

    @property
    def source(self) -> str:
        """JAX's name for the operation."""
        return self.proto.metadata.op_name

    @property
    def line(self) -> str:
        """The user's source line for the operation. See `Module.line`."""
        return self.inside.module.line(self.proto.metadata.stack_frame_id)

    @cached_property
    def config(self) -> dict[str, Any]:
        """The back end's configuration of the operation. It is empty if it is not a JSON object."""
        try:
            config = json.loads(self.proto.backend_config or "{}")
        except ValueError:  # of a custom call
            return {}
        return config if isinstance(config, dict) else {}

    @property
    def group_size(self) -> int:
        """The number of devices in a collective."""
        listed = self.proto.collective_device_list
        for tiled in (self.proto.iota_replica_group_list, listed.iota_replica_group_list):
            if tiled.num_devices_per_group:
                return tiled.num_devices_per_group
        groups = self.proto.replica_groups or listed.replica_groups
        return len(groups[0].replica_ids) if groups else self.inside.module.devices


class Computation:
    """A computation of a program. `instructions` has its operations by their numbers, in the order
    of the schedule if the module has one."""

    def __init__(self, proto: Any, module: Module):
        self.module = module
        self.id = proto.id
        listed = {i.id: i for i in (Instruction(part, self) for part in proto.instructions)}
        self.instructions = {i: listed[i] for i in module.schedule.get(self.id, listed)}
        self.root = self.instructions[proto.root_id]


class Module:
    """A program. `devices` is the number of devices that it runs on. `schedule` has, for each
    computation, the numbers of its instructions in the order in which they run."""

    def __init__(self, proto: Any):
        self.name = proto.name
        assigned = proto.device_assignment
        self.devices = max(assigned.replica_count, 1) * max(assigned.computation_count, 1)
        entries = proto.schedule.sequences
        self.schedule = {entry.key: entry.value.instruction_ids for entry in entries}
        self.computations = {
            c.id: c for c in (Computation(part, self) for part in proto.computations)
        }
        self.entry = self.computations[proto.entry_computation_id]
        self._sources = proto.stack_frame_index
        self._lines: dict[int, str] = {}

    def line(self, frame: int) -> str:
        """The user's source line for stack frame number `frame`, such as "net.py:38".

        The search runs outwards from `frame` and ends at chipwise's engine. It returns the
        innermost line of the first rank in `rank_of` that has one, apart from the planner, or "" if
        there is none."""
        if frame not in self._lines:
            candidates: dict[int, str] = {}
            at = frame
            while 0 < at <= len(self._sources.stack_frames):
                called = self._sources.stack_frames[at - 1]
                place = self._sources.file_locations[called.file_location_id - 1]
                file = self._sources.file_names[place.file_name_id - 1]
                rank = rank_of(file)
                if rank != _EXPORT:
                    candidates.setdefault(rank, f"{file}:{place.line}")
                if rank >= _DRIVER or called.parent_frame_id == at:
                    break
                at = called.parent_frame_id
            self._lines[frame] = candidates[min(candidates)] if candidates else ""
        return self._lines[frame]


_PACKAGE = f"{Path(__file__).resolve().parents[2]}/"
_USER, _NET, _LIBRARY, _DRIVER, _EXPORT = range(5)


def rank_of(file: str) -> int:
    """The rank of a file: the user's, a model or loss of chipwise, a library's, the engine that
    calls the user's functions, or the planner that exports them."""
    if file.startswith(_PACKAGE):
        folder = file.removeprefix(_PACKAGE).split("/")[0]
        if folder in ("planner", "compile"):
            return _EXPORT
        return (
            _NET
            if folder in ("models", "recipes", "recipe", "augment", "data", "interop")
            else _DRIVER
        )
    return _LIBRARY if "-packages/" in file or "/lib/python" in file else _USER


def parse(program: bytes) -> Module:
    """The module in a serialized `HloModuleProto`. Raises `ValueError` for other bytes."""
    from google.protobuf.message import DecodeError

    try:
        return Module(
            message_class(__package__, "hlo.textproto", "hlo.HloModuleProto").FromString(program)
        )
    except (DecodeError, KeyError, IndexError) as error:
        raise ValueError(f"no HloModuleProto: {error}") from error
