"""Requests to a compiler for an absent chip, and its answers."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..base import Fact, fact
from .exports import Collective, Exported
from .hlo import gpu, tpu
from .hlo.kernel import Kernel

SCHEMA = 5
"""The version of the cache's entries and of a process's requests, raised when their meaning
changes."""

FAILED_HERE = (
    "compiler-killed",
    "compiler-crashed",
    "compiler-ended",
    "compiler-failed",
    "ptxas-missing",
    "compilers-in-the-way",
    "compiler-of-another-jax",
)
"""Problems of this machine, not of the program. The cache never keeps them, and `chipwise plan`
fails."""


@dataclass(frozen=True)
class CompileRequest:
    """A program, and the absent chip to compile it for, as keyword arguments of
    `get_topology_desc`."""

    name: str
    topology: dict[str, Any]
    program: Exported | Collective
    donate: tuple[int, ...] = ()
    """The flat arguments that may be overwritten."""
    clock_GHz: float | None = None
    """The clock of one JAX device of a TPU, for the seconds of its kernels."""
    memory_GBps: float | None = None
    """The memory bandwidth of one JAX device of a TPU, for the seconds of its kernels."""
    platform: str = "tpu"
    """The platform of the compiler, "tpu" or "cuda"."""
    options: dict[str, Any] | None = None
    """XLA's options, as in training."""
    chip: str | None = None
    """The TPU's name in the catalogue."""
    text: bool = False
    """Whether the answer has the optimised HLO."""

    @property
    def places(self) -> tuple[str, ...]:
        """The source lines of the program (see `Exported.places`), or none for a `Collective`."""
        return self.program.places if isinstance(self.program, Exported) else ()

    def key(self, versions: str) -> str:
        """The key of the answer in the cache."""
        reader = (gpu if self.platform == "cuda" else tpu).VERSION
        about = [
            SCHEMA,
            reader,
            versions,
            self.topology,
            self.program.key,
            self.donate,
            self.clock_GHz,
            self.memory_GBps,
            self.platform,
            self.options,
        ]
        about += ["text"] * self.text
        return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class Answer:
    """The figures of a compiled program, for one execution on one device (see
    `hlo.reader.ProgramCost`). A GPU's compiler states no seconds for its `kernels`, so `time_gpu`
    computes them."""

    name: str
    problem: Fact | None = None
    """The reason that there are no figures: the compiler's refusal (`refusal`), or a failure of
    this machine, which the cache does not keep (`FAILED_HERE`)."""
    argument_bytes: int = 0
    output_bytes: int = 0  # without those that overwrite arguments
    temp_bytes: int = 0
    code_bytes: int = 0
    wire_bytes: float = 0.0
    flops: float = 0.0  # of the products
    kernels: list[Kernel] = field(default_factory=list)
    notes: list[Fact] = field(default_factory=list)
    # `Exported.places` of the program when it was compiled
    places: list[str] = field(default_factory=list)
    hlo: str = ""

    def at(self, places: Sequence[str]) -> Answer:
        """Returns the same figures for a program whose source has moved. Kernels get the lines of
        `places`, or no line if the number of `places` differs from that of the compiled program."""
        if not self.places or list(places) == self.places:
            return self
        same = len(places) == len(self.places)
        moved = (
            dict(zip(self.places, places, strict=True)) if same else dict.fromkeys(self.places, "")
        )
        return replace(
            self, kernels=[replace(k, line=moved.get(k.line, k.line)) for k in self.kernels]
        )

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Answer:
        problem = value.pop("problem")
        notes = [Fact(**note) for note in value.pop("notes")]
        kernels = [Kernel.from_json(kernel) for kernel in value.pop("kernels", ())]
        return cls(**value, problem=problem and Fact(**problem), notes=notes, kernels=kernels)

    def named(self, name: str) -> Answer:
        """The same answer for an equal program that has another name."""
        problem = self.problem and fact(
            self.problem.code, **{**self.problem.numbers, "program": name}
        )
        return replace(self, name=name, problem=problem)


def refusal(name: str, error: Exception, platform: str = "tpu", code: str = "refused") -> Answer:
    """Turns a compiler's error into an answer whose problem is a fact with the error's first lines,
    and with bytes if the compiler refused for memory.

    An error is a refusal only if it is certainly about the program. A full disk or a lack of memory
    on this machine comes as RESOURCE_EXHAUSTED, OUT_OF_RANGE or INTERNAL, or as an `OSError`. Such
    an error becomes "compiler-failed".
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
    return Answer(name, problem)


# "Used 20.1G of 15.75G hbm" or, if a bound is enough to refuse, "the total memory required for HLO
# temporaries (60.42G) exceeds available HBM (7.48G)".
_MEMORY = (
    re.compile(r"[Uu]sed ([\d.]+)([KMGT]?) of ([\d.]+)([KMGT]?) hbm"),
    re.compile(
        r"memory required[^(]*\(([\d.]+)([KMGT]?)\) exceeds available HBM \(([\d.]+)([KMGT]?)\)"
    ),
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
"""For each platform, words in a refusal's message and the code for them. The compiler itself has no
codes."""
