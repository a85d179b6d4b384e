"""What a compiler is asked about a program for an absent chip, and what it answers."""

from __future__ import annotations

import hashlib
import inspect
import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ..engine import layout, reduce
from ..engine.reduce import Exchange
from ..hlo import gpu, tpu
from ..hlo.kernel import Kernel
from ..words.facts import Fact, fact
from .tracing import Exported

SCHEMA = 5
"""The version of the cache's entries and of a process's requests, raised when their meaning changes."""

FAILED_HERE = (
    "compiler-killed", "compiler-crashed", "compiler-ended", "compiler-failed",
    "ptxas-missing", "compilers-in-the-way", "compiler-of-another-jax",
)  # fmt: skip
"""Problems of this machine, which say nothing of the program: never kept, and `chipwise plan` fails."""


_MADE_BY = inspect.getsource(reduce) + inspect.getsource(layout)
"""The code that makes an exchange, in the compiler's process: its key follows from it."""


@dataclass(frozen=True)
class CompileRequest:
    """A program, and the absent chip to compile it for, as keyword arguments of `get_topology_desc`.

    `platform`: "tpu" or "cuda". `donate`: the flat arguments that may be overwritten. `options`: of XLA, as
    in training. `clock_GHz` and `memory_GBps`: of one JAX device of a TPU, for `Compiled.seconds`; `chip`:
    the TPU's name in the catalogue.
    """

    name: str
    topology: dict[str, Any]
    program: Exported | Exchange
    donate: tuple[int, ...] = ()
    clock_GHz: float | None = None
    memory_GBps: float | None = None
    platform: str = "tpu"
    options: dict[str, Any] | None = None
    chip: str | None = None

    @property
    def places(self) -> tuple[str, ...]:
        """The source lines of its program; see `Exported.places`."""
        return self.program.places if isinstance(self.program, Exported) else ()

    def key(self, versions: str) -> str:
        """The key of the answer in the cache."""
        reader = (gpu if self.platform == "cuda" else tpu).VERSION
        program = (
            self.program.key if isinstance(self.program, Exported) else f"{asdict(self.program)} {_MADE_BY}"
        )
        parts = [SCHEMA, reader, versions, self.topology, program, self.donate, self.clock_GHz]
        text = json.dumps([*parts, self.memory_GBps, self.platform, self.options], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True)
class Compiled:
    """The figures of a compiled program, for one execution on one device (see `hlo.reader.ProgramCost`). A
    GPU's compiler states no seconds of its `kernels`; `time_gpu` times them.

    `problem`: why there are no figures: the compiler's refusal (`refusal`), or how this machine failed, which
    the cache does not keep (`FAILED_HERE`).
    """

    name: str
    problem: Fact | None = None
    temp_bytes: int = 0
    code_bytes: int = 0
    wire_bytes: float = 0.0
    flops: float = 0.0  # of the products
    kernels: list[Kernel] = field(default_factory=list)
    notes: list[Fact] = field(default_factory=list)
    places: list[str] = field(default_factory=list)  # `Exported.places` of the program when it was compiled

    def at(self, places: Sequence[str]) -> Compiled:
        """The same figures for a program whose source has moved: kernels get the lines of `places`, or none
        if these do not match what was compiled."""
        if not self.places or list(places) == self.places:
            return self
        same = len(places) == len(self.places)
        moved = dict(zip(self.places, places, strict=True)) if same else dict.fromkeys(self.places, "")
        return replace(self, kernels=[replace(k, line=moved.get(k.line, k.line)) for k in self.kernels])

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Compiled:
        problem, notes = value.pop("problem"), [Fact(**note) for note in value.pop("notes")]
        kernels = [Kernel.from_json(kernel) for kernel in value.pop("kernels", ())]
        return cls(**value, problem=problem and Fact(**problem), notes=notes, kernels=kernels)

    def named(self, name: str) -> Compiled:
        """The same answer for an equal program that has another name."""
        problem = self.problem and fact(self.problem.code, **{**self.problem.numbers, "program": name})
        return replace(self, name=name, problem=problem)


def refusal(name: str, error: Exception, platform: str = "tpu", code: str = "refused") -> Compiled:
    """The compiler's refusal as a fact, with bytes if it was about memory, and its first lines.

    Only what is certainly said of the program is one: a full disk or a lack of memory on this machine comes
    as RESOURCE_EXHAUSTED, OUT_OF_RANGE or INTERNAL, or as an `OSError`, and is "compiler-failed".
    """
    message = str(error)
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    facts = {"program": name, "message": " ".join(lines[:2])[:400]}
    match = next(filter(None, (pattern.search(message) for pattern in _MEMORY)), None)
    if match and "RESOURCE_EXHAUSTED" in message:
        needed, available = (int(float(match[i]) * _UNIT[match[i + 1]]) for i in (1, 3))
        problem = fact("refused-for-memory", needed=needed, available=available, **facts)
    elif not message.startswith(_STATUSES) and not isinstance(
        error, TypeError | ValueError | NotImplementedError
    ):
        problem = fact("compiler-failed", **facts)
    else:
        known = _REFUSALS["any"] | _REFUSALS.get(platform, {})
        signs = (c for sign, c in known.items() if re.search(rf"\b{sign}\b", message.lower()))
        problem = fact(next(signs, code), **facts)
    return Compiled(name, problem)


# "Used 20.1G of 15.75G hbm" or, if a bound is enough to refuse, "the total memory required for HLO
# temporaries (60.42G) exceeds available HBM (7.48G)".
_MEMORY = (
    re.compile(r"[Uu]sed ([\d.]+)([KMGT]?) of ([\d.]+)([KMGT]?) hbm"),
    re.compile(r"memory required[^(]*\(([\d.]+)([KMGT]?)\) exceeds available HBM \(([\d.]+)([KMGT]?)\)"),
)
_STATUSES = ("INVALID_ARGUMENT", "UNIMPLEMENTED")
_UNIT = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_REFUSALS = {
    "any": {"lowering platform": "refused-callback"},
    "tpu": {
        "f64": "refused-float64",
        "f16": "refused-float16",
        "dynamic": "refused-dynamic-shape",
        "custom call": "refused-custom-call",
    },
    "cuda": {"deterministic implementation": "refused-exact", "triton": "refused-triton"},
}
"""By platform, what a refusal's message contains, and its meaning: the compiler has no codes."""
