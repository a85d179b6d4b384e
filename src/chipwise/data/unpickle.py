"""Reads pickled dicts of lists and NumPy arrays without executing anything.

`pickle.load` runs whatever functions a file names. Here the file's opcodes are only listed (by
`pickletools.genops`, which parses and never acts) and a small interpreter builds plain data from
them. The names by which NumPy pickles its arrays are symbols compared with a fixed list; no name is
ever looked up or imported, and anything outside the list ends in a `DataError`.

Understood: protocols 2 to 5 as written by Python 2 and 3, of dict, list, tuple, str, bytes, int,
float, bool, None and arrays of integers.
"""

from __future__ import annotations

import math
import pickletools
import struct
from collections.abc import Callable
from typing import Any

import numpy as np

from ..errors import DataError

# CIFAR-100's training batch, the largest file this is for, has 155 MB and 400,000 opcodes.
_MAX_BYTES = 1 << 28
_MAX_OPCODES = 4_000_000
_MAX_STACK = 1_000_000
_INTEGERS = {"u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8"}

_RECONSTRUCT = {f"numpy{core}.multiarray._reconstruct" for core in (".core", "._core")}
_FROMBUFFER = {f"numpy{core}.numeric._frombuffer" for core in (".core", "._core")}
_NDARRAY, _DTYPE, _ENCODE = {"numpy.ndarray"}, {"numpy.dtype"}, {"_codecs.encode"}
_BYTES = {"__builtin__.bytes", "builtins.bytes"}
_KNOWN = _RECONSTRUCT | _FROMBUFFER | _NDARRAY | _DTYPE | _ENCODE | _BYTES

_VALUES = {  # opcodes whose argument is the value itself
    *("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"),
    *("BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"),
    *("BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8"),
}
_PY2_STRINGS = {"BINSTRING", "SHORT_BINSTRING"}
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_EMPTY: dict[str, Callable[[], Any]] = {"EMPTY_DICT": dict, "EMPTY_LIST": list, "EMPTY_TUPLE": tuple}


def unpickle(data: bytes, name: str = "the pickle") -> Any:
    """The value pickled in `data`: plain Python values, and NumPy arrays of integers.

    Strings of Python 2 come as bytes. `name` is how messages call the data.

    Raises `DataError` for anything else: another opcode or global (named), damage, trailing bytes, or
    more than 256 MiB, 4 million opcodes or a million values on the stack.
    """
    if len(data) > _MAX_BYTES:
        raise DataError(f"{name} has {len(data):,} bytes, expected at most {_MAX_BYTES:,}.")
    machine = _Machine(name)
    try:
        for count, (opcode, argument, at) in enumerate(pickletools.genops(data)):
            if count >= _MAX_OPCODES:
                raise DataError(f"{name} has more than {_MAX_OPCODES:,} opcodes: nothing was executed.")
            machine.step(opcode.name, argument, at or 0)
            if opcode.name == "STOP" and (at or 0) + 1 != len(data):
                raise DataError(f"{name} has {len(data) - (at or 0) - 1} bytes after its end.")
        return machine.result()
    except DataError:
        raise
    # What parsing and building plain data can raise on damaged bytes; nothing here calls foreign code.
    except (ValueError, TypeError, IndexError, KeyError, OverflowError, EOFError, struct.error) as error:
        told = " ".join(str(error).split())[:120]
        raise DataError(f"{name} is damaged or not a pickle ({told}): nothing was executed.") from error


class _Symbol:
    """A global's name, compared and never looked up."""

    def __init__(self, name: str):
        self.name = name


class _Dtype:
    """The type of an array: `u1` and the like, and a byte order that comes later."""

    def __init__(self, code: Any):
        code = code.decode("ascii") if isinstance(code, bytes) else code
        if not isinstance(code, str) or code.lstrip("<>|=") not in _INTEGERS:
            raise ValueError("an array that does not hold integers")
        self.code, self.order = code.lstrip("<>|="), "|"

    def build(self, state: Any) -> None:
        order = state[1].decode("ascii") if isinstance(state[1], bytes) else state[1]
        if order not in ("|", "<", ">", "="):
            raise ValueError("unknown byte order")
        self.order = order

    def numpy(self) -> np.dtype:
        return np.dtype(self.order + self.code)


class _Array:
    """An array: shape, type and bytes, which come by one of two ways."""

    values: np.ndarray | None = None

    def fill(self, data: Any, dtype: Any, shape: Any, fortran: Any) -> None:
        if not (
            isinstance(dtype, _Dtype) and isinstance(shape, tuple) and isinstance(data, (bytes, bytearray))
        ):
            raise ValueError("an array of unknown parts")
        if not all(type(n) is int and n >= 0 for n in shape):
            raise ValueError("an array with a negative size")
        kind = dtype.numpy()
        if math.prod(shape) * kind.itemsize != len(data):
            raise ValueError(f"an array of {shape} {kind} in {len(data)} bytes")
        array = np.frombuffer(data, kind).reshape(shape, order="F" if fortran else "C")
        self.values = array.astype(kind.newbyteorder("="), copy=False)


_MARK = object()


class _Machine:
    """The pickle machine's stack and memo, with data only."""

    def __init__(self, name: str):
        self.name = name
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def result(self) -> Any:
        """The one value left, its arrays made real."""
        if len(self.stack) != 1:
            raise ValueError(f"{len(self.stack)} values at the end, expected 1")
        value = self.stack[0]
        if isinstance(value, dict):
            return {key: _real(item) for key, item in value.items()}
        return _real(value)

    def refuse(self, what: str, at: int) -> DataError:
        return DataError(
            f"{self.name} holds {what} at byte {at}, which plain data does not need: nothing was executed."
        )

    def since_mark(self) -> list[Any]:
        at = len(self.stack) - 1
        while self.stack[at] is not _MARK:  # IndexError at the bottom
            at -= 1
            if at < 0:
                raise ValueError("no mark on the stack")
        items = self.stack[at + 1 :]
        del self.stack[at:]
        return items

    def pop(self) -> Any:
        value = self.stack.pop()
        if value is _MARK:
            raise ValueError("a mark where a value was expected")
        return value

    def top(self, kind: type) -> Any:
        if type(self.stack[-1]) is not kind:
            raise ValueError(f"expected a {kind.__name__} on the stack")
        return self.stack[-1]

    def step(self, op: str, argument: Any, at: int) -> None:
        """One opcode, at byte `at`."""
        stack = self.stack
        if len(stack) >= _MAX_STACK:
            raise DataError(f"{self.name} needs more than {_MAX_STACK:,} values: nothing was executed.")
        if op in _VALUES:
            stack.append(argument)
        elif op in _PY2_STRINGS:
            stack.append(argument.encode("latin-1"))
        elif op in _CONSTANTS:
            stack.append(_CONSTANTS[op])
        elif op in _EMPTY:
            stack.append(_EMPTY[op]())
        elif op == "MARK":
            stack.append(_MARK)
        elif op in ("TUPLE1", "TUPLE2", "TUPLE3"):
            items = [self.pop() for _ in range(int(op[-1]))]
            stack.append(tuple(reversed(items)))
        elif op == "TUPLE":
            stack.append(tuple(self.since_mark()))
        elif op == "APPEND":
            item = self.pop()
            self.top(list).append(item)
        elif op == "APPENDS":
            items = self.since_mark()
            self.top(list).extend(items)
        elif op == "SETITEM":
            value, key = self.pop(), self.pop()
            self.set_items([key, value])
        elif op == "SETITEMS":
            self.set_items(self.since_mark())
        elif op in ("BINPUT", "LONG_BINPUT"):
            self.memo[argument] = stack[-1]
        elif op == "MEMOIZE":
            self.memo[len(self.memo)] = stack[-1]
        elif op in ("BINGET", "LONG_BINGET"):
            stack.append(self.memo[argument])
        elif op == "GLOBAL":
            stack.append(self.symbol(argument.replace(" ", "."), at))
        elif op == "STACK_GLOBAL":
            attribute, module = self.pop(), self.pop()
            stack.append(self.symbol(f"{module}.{attribute}" if _words(module, attribute) else "?", at))
        elif op == "REDUCE":
            arguments, function = self.pop(), self.pop()
            stack.append(self.reduce(function, arguments, at))
        elif op == "BUILD":
            state = self.pop()
            self.build(state, at)
        elif op not in ("PROTO", "FRAME", "STOP"):
            raise self.refuse(f"the opcode {op}", at)

    def set_items(self, items: list[Any]) -> None:
        target = self.top(dict)
        if len(items) % 2:
            raise ValueError("a key without a value")
        for key, value in zip(items[::2], items[1::2], strict=True):
            # Nested tuples that share their parts take exponential time to hash.
            if not isinstance(key, (str, bytes, int)):
                raise ValueError("a dict key that is not text or a number")
            target[key] = value

    def symbol(self, name: str, at: int) -> _Symbol:
        if name not in _KNOWN:
            raise self.refuse(f"the global {name[:80]!r}", at)
        return _Symbol(name)

    def reduce(self, function: Any, arguments: Any, at: int) -> Any:
        """What NumPy's and Python's own reconstruction calls mean, done here and not called."""
        if not isinstance(function, _Symbol) or not isinstance(arguments, tuple):
            raise self.refuse("a call (REDUCE) of something unknown", at)
        name = function.name
        if name in _RECONSTRUCT and isinstance(arguments[0], _Symbol) and arguments[0].name in _NDARRAY:
            return _Array()
        if name in _FROMBUFFER:
            data, dtype, shape, order = arguments
            array = _Array()
            array.fill(data, dtype, shape, order == "F")
            return array
        if name in _DTYPE:
            return _Dtype(arguments[0])
        if name in _ENCODE and arguments[1:] == ("latin1",):  # how Python 3 writes bytes in protocol 2
            return arguments[0].encode("latin-1") if isinstance(arguments[0], str) else _not_text()
        if name in _BYTES and not arguments:
            return b""
        raise self.refuse(f"an unexpected call of {name!r}", at)

    def build(self, state: Any, at: int) -> None:
        target = self.stack[-1]
        if isinstance(target, _Dtype) and isinstance(state, tuple):
            target.build(state)
        elif isinstance(target, _Array) and isinstance(state, tuple):
            _, shape, dtype, fortran, data = state
            target.fill(data, dtype, shape, fortran)
        else:
            raise self.refuse("a state (BUILD) of something unknown", at)


def _words(*values: Any) -> bool:
    return all(isinstance(value, str) for value in values)


def _not_text() -> bytes:
    raise ValueError("bytes made of something that is not text")


def _real(value: Any) -> Any:
    """Arrays out of their stand-ins, one level deep: batches are dicts of arrays and lists."""
    if isinstance(value, _Array):
        if value.values is None:
            raise ValueError("an array without values")
        return value.values
    if value is _MARK or isinstance(value, (_Symbol, _Dtype)):
        raise ValueError("a name without a use")
    if isinstance(value, (list, tuple)) and any(isinstance(v, (_Array, _Symbol, _Dtype)) for v in value):
        raise ValueError("arrays inside a list")
    return value
