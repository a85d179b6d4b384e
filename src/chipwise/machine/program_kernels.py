"""The kernels of a program that is compiled for a CPU or a GPU, read from its text.

Where two programs have the same kernels, in all that rounds, they compute the same bits, whatever
loops these stand in, as far as the text shows it: the layouts of operands are not compared. A run
also compares bits before it relies on them. For a CPU, XLA compiles a loop over less than 1 KiB as
a single kernel: LLVM contracts products and sums there as it does nowhere else.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

Kernel = tuple[tuple[str, str, str], ...]
"""The type, the name and the attributes of each operation of a kernel that rounds, in order."""

_COMPUTATION = re.compile(r"^(?:ENTRY )?%([\w.-]+) .*\{\n((?:  .*\n)*)\}", re.MULTILINE)
_INSTRUCTION = re.compile(r"  (?:ROOT )?%[\w.-]+ = (\(.*?\)|\S+) ([\w-]+)\((.*)")
_NAMES = re.compile(r"(?:control-predecessors|metadata)=\{.*?\}|%[\w.-]+|, (?=control|metadata)")
_CALLED = re.compile(r"=\{?(%[\w.-]+(?:, %[\w.-]+)*)")
_FLOAT = re.compile(r"\b(?:bf16|f8\w*|f16|f32|f64|c64|c128)\[")
_EMITTER = re.compile(r'"\w+_backend_config":\{.*\}')  # how a GPU's fusion becomes code
_LOOPS = ("while", "conditional")  # The operations of their computations are kernels
_NOT_ROUNDING = {
    *("fusion", *_LOOPS, "parameter", "constant", "iota", "tuple", "get-tuple-element"),
    *("copy", "bitcast", "broadcast", "reshape", "transpose", "reverse", "concatenate", "pad"),
    *("slice", "dynamic-slice", "dynamic-update-slice", "gather", "select"),
}


def kernels(text: str) -> Counter[Kernel]:
    """The kernels of a compiled program that round, and how often each is in its `text`."""
    bodies = {name: body.splitlines() for name, body in _COMPUTATION.findall(text)}

    def of(computation: str) -> Iterator[Kernel]:
        for line in bodies[computation]:
            if (found := _INSTRUCTION.match(line)) is None:
                continue
            made, operation, rest = found.groups()
            called = (name[1:] for names in _CALLED.findall(rest) for name in names.split(", "))
            inner = [kernel for name in called if name in bodies for kernel in of(name)]
            attributes = _NAMES.sub("", rest.partition("), ")[2])
            rounds = operation not in _NOT_ROUNDING and _FLOAT.search(made)
            if operation in _LOOPS:
                yield from inner
                continue
            if inner and (emitter := _EMITTER.search(attributes)):
                inner = [*inner, (("", "emitter", emitter[0]),)]
            if kernel := sum(inner, ((made, operation, attributes),) if rounds else ()):
                yield kernel

    entry = re.search(r"^ENTRY %([\w.-]+)", text, re.MULTILINE)
    return Counter() if entry is None else Counter(of(entry[1]))


def same(found: Counter[Kernel], apart: Counter[Kernel], additions: int) -> bool:
    """Whether a program with the kernels `found` computes the bits of programs with those of
    `apart`. It may have this number of `additions` besides, which round alike wherever they are."""
    more = [
        (name, made.partition("[")[0])
        for kernel in (found - apart).elements()
        for made, name, _ in kernel
        if name != "emitter"
    ]
    return bool(found) and not apart - found and more == [("add", "f32")] * additions
