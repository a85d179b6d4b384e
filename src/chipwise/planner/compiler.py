"""Compiles programs for absent chips, and caches the results.

A compiler runs in a separate process (`compile_child`), so a plan cannot disturb chips of this machine, and a
crash of the compiler does no harm. Programs are passed as exported modules, so that process does not run the
user's code. A lock in the cache folder allows one process for each kind of chip; the compilers of GPUs and
TPUs run at the same time.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import queue
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from ..atomic import replace_text
from ..errors import ChipwiseError
from ..words.facts import Fact, fact
from . import hlo, hlo_gpu
from .compilers import COMPILERS, Compiler
from .exporting import Exported, GatherRequest, ReduceRequest
from .kernels import Kernel

SCHEMA = 3
"""Of the cache's entries and of what the child is told; raised when either changes its meaning."""

DIED = ("compiler-killed", "compiler-crashed", "compiler-ended")
_FROM_OUTSIDE = ("SIGKILL", "SIGTERM", "SIGINT", "SIGHUP")
"""Signals after which the compiler may answer the next time. Of its own failures it would die again: they are
remembered."""


@dataclass(frozen=True)
class Request:
    """A program, and the absent chip to compile it for, as keyword arguments of `get_topology_desc`.

    `platform`: "tpu" or "cuda". `donate`: the flat arguments that may be overwritten. `options`: of XLA, as
    in training. `clock_GHz` and `memory_GBps`: of one JAX device of a TPU, for `Compiled.seconds`; `chip`:
    the TPU's name in the catalogue.
    """

    name: str
    topology: dict[str, Any]
    program: Exported | ReduceRequest | GatherRequest
    donate: tuple[int, ...] = ()
    clock_GHz: float | None = None
    memory_GBps: float | None = None
    platform: str = "tpu"
    options: dict[str, Any] | None = None
    chip: str | None = None

    @property
    def size(self) -> int:
        """Roughly proportional to the compilation time."""
        return 50_000 + (self.program.size if isinstance(self.program, Exported) else 0)

    def key(self, versions: str) -> str:
        """The key of the answer in the cache."""
        reader = (hlo_gpu if self.platform == "cuda" else hlo).VERSION
        parts = [SCHEMA, reader, versions, self.topology, self.program.key, self.donate, self.clock_GHz]
        text = json.dumps([*parts, self.memory_GBps, self.platform, self.options], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True)
class Compiled:
    """The figures of a compiled program, for one execution on one device: see `hlo.Reading`. `seconds` need
    the chip's clock; a GPU's compiler states none, and `gpu_timing` times its `kernels`.

    `problem`: why there are no figures: the compiler's refusal (`refusal`), or how its process died.
    """

    name: str
    problem: Fact | None = None
    temp_bytes: int = 0
    code_bytes: int = 0
    seconds: float = 0.0
    seconds_by_kind: dict[str, float] = field(default_factory=dict)
    wire_bytes: float = 0.0
    compile_seconds: float = 0.0
    flops: float = 0.0  # of the products
    optimal_seconds: float | None = None  # XLA's cost analysis; the GPU compiler has none
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

    def json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Compiled:
        problem, notes = value.pop("problem"), [Fact(**note) for note in value.pop("notes")]
        kernels = [Kernel.from_json(kernel) for kernel in value.pop("kernels", ())]
        return cls(**value, problem=problem and Fact(**problem), notes=notes, kernels=kernels)

    @property
    def died(self) -> bool:
        """Whether the compiler's process ended at this program, perhaps for another reason."""
        return self.problem is not None and self.problem.code in DIED


def refusal(name: str, message: str, seconds: float = 0.0, platform: str = "tpu") -> Compiled:
    """The compiler's refusal as a fact, with bytes if it was about memory, and its first lines."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    facts = {"program": name, "message": " ".join(lines[:2])[:400]}
    match = next(filter(None, (pattern.search(message) for pattern in _MEMORY)), None)
    if match and "RESOURCE_EXHAUSTED" in message:
        needed, available = (int(float(match[i]) * _UNIT[match[i + 1]]) for i in (1, 3))
        problem = fact("refused-for-memory", needed=needed, available=available, **facts)
    else:
        known = _REFUSALS if platform == "tpu" else _REFUSALS[:1]
        code = next((c for sign, c in known if re.search(rf"\b{sign}\b", message.lower())), "refused")
        problem = fact(code, **facts)
    return Compiled(name, problem, compile_seconds=seconds)


# "Used 20.1G of 15.75G hbm" or, if a bound is enough to refuse, "the total memory required for HLO
# temporaries (60.42G) exceeds available HBM (7.48G)".
_MEMORY = (
    re.compile(r"[Uu]sed ([\d.]+)([KMGT]?) of ([\d.]+)([KMGT]?) hbm"),
    re.compile(r"memory required[^(]*\(([\d.]+)([KMGT]?)\) exceeds available HBM \(([\d.]+)([KMGT]?)\)"),
)
_UNIT = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_REFUSALS = (
    ("lowering platform", "refused-callback"),
    ("f64", "refused-float64"),
    ("f16", "refused-float16"),
    ("dynamic", "refused-dynamic-shape"),
    ("custom call", "refused-custom-call"),
)
"""The compiler has no codes: what its messages contain, and what it means."""


def default_cache() -> Path:
    """`$XDG_CACHE_HOME/chipwise/plan`, by default below `~/.cache`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "chipwise" / "plan"


Progress = Callable[[int, int, str, float | None], None]
"""Called with how many programs are done of how many, what was done last, and the seconds that the rest may
take: `None` before the first."""


def compile_each(
    requests: Sequence[Request], *, cache_dir: Path | None = None, progress: Progress | None = None
) -> Iterator[tuple[int, Compiled]]:
    """Yields the index of each request with its answer as soon as it is ready: cached ones first, then in
    order.

    *Arguments:* `progress` counts the programs to compile.

    Waits while another plan uses the same compiler. Raises `DeviceError` if a compiler is not installed.
    """
    compilers = {platform: COMPILERS[platform]() for platform in {r.platform for r in requests}}
    folder = cache_dir if cache_dir is not None else default_cache()
    folder.mkdir(parents=True, exist_ok=True)
    places: dict[str, list[int]] = {}
    for i, request in enumerate(requests):
        places.setdefault(request.key(compilers[request.platform].versions), []).append(i)
    missing: dict[str, Request] = {}
    for key, owners in places.items():
        answer = _load(folder / f"{key}.json")
        if answer is None:
            missing[key] = requests[owners[0]]
        else:
            yield from ((i, _named(answer.at(requests[i].program.places), requests[i].name)) for i in owners)
    if not missing:
        return
    start, done, whole = time.monotonic(), 0, sum(r.size for r in missing.values())
    if progress is not None:
        progress(0, len(missing), "", None)
    for number, (key, answer) in enumerate(_ask_each(missing, compilers, folder), 1):
        done += missing[key].size
        answer = replace(answer, places=list(missing[key].program.places))
        if not answer.died or answer.problem["signal"] not in _FROM_OUTSIDE:  # type: ignore[index]
            text = json.dumps(answer.json())
            replace_text(folder / f"{key}.json", text, "plan-cache-unwritable")
        if progress is not None:
            left = (time.monotonic() - start) * (whole - done) / done
            progress(number, len(missing), answer.name, left)
        yield from ((i, _named(answer, requests[i].name)) for i in places[key])


def compile_all(
    requests: Sequence[Request], *, cache_dir: Path | None = None, progress: Progress | None = None
) -> list[Compiled]:
    """The answers to `requests` in their order, when all are ready; see `compile_each`."""
    answers = dict(compile_each(requests, cache_dir=cache_dir, progress=progress))
    return [answers[i] for i in range(len(requests))]


def _ask_each(
    requests: dict[str, Request], compilers: dict[str, Compiler], folder: Path
) -> Iterator[tuple[str, Compiled]]:
    """Yields each key with its answer as soon as it is ready; several compilers run at once."""
    events: queue.SimpleQueue = queue.SimpleQueue()
    children: list[subprocess.Popen] = []

    def ask(platform: str, own: dict[str, Request]) -> None:
        try:
            with _alone(folder, platform):
                for pair in _ask(own, compilers[platform], children):
                    events.put(pair)
            events.put(None)
        except BaseException as error:
            events.put(error)

    under_way = 0
    for platform in sorted(compilers):
        own = {key: r for key, r in requests.items() if r.platform == platform}
        if own:
            threading.Thread(target=ask, args=(platform, own), daemon=True).start()
            under_way += 1
    try:
        while under_way:
            event = events.get()
            if isinstance(event, BaseException):
                raise event
            if event is None:
                under_way -= 1
            else:
                yield event
    finally:  # also on Ctrl-C
        for child in list(children):
            child.kill()
            child.wait()


def _named(answer: Compiled, name: str) -> Compiled:
    problem = answer.problem and fact(answer.problem.code, **{**answer.problem.numbers, "program": name})
    return replace(answer, name=name, problem=problem)


def _load(path: Path) -> Compiled | None:
    """A cached answer; `None` if there is none or it cannot be read, so that it is compiled again."""
    try:
        return Compiled.from_json(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


@contextlib.contextmanager
def _alone(folder: Path, platform: str) -> Iterator[None]:
    """Waits for a compiler's lock and holds it. The operating system releases it when the process ends."""
    import fcntl  # Windows lacks it, and the compilers too

    with open(folder / f"compiler-{platform}.lock", "a", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(fact("compiler-waited-for", chips=CHIPS[platform]), file=sys.stderr)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


CHIPS = {"tpu": "TPU", "cuda": "GPU"}


def _ask(
    requests: dict[str, Request], compiler: Compiler, children: list[subprocess.Popen]
) -> Iterator[tuple[str, Compiled]]:
    """Yields each key with its answer as soon as it is ready. If a child dies, that is the answer for its
    current program, and a new child does the rest; if it had several, each is tried alone to find which
    one."""
    batches = [dict(requests)]
    while batches:
        left, under_way, end = batches.pop(0), set[str](), dict[str, Any]()
        for event in _child(left, compiler, children):
            if "exit_code" in event:
                end = event
            elif event["answer"] is None:
                under_way.add(event["key"])
            else:
                under_way.discard(event["key"])
                del left[event["key"]]
                yield event["key"], Compiled.from_json(event["answer"])
        if left and not under_way:
            raise ChipwiseError("compiler-not-started", chips=CHIPS[compiler.platform], **end)
        alone = {key: left.pop(key) for key in under_way}
        if len(alone) == 1:
            for key, request in alone.items():
                yield key, Compiled(request.name, _died(request.name, **end))
        else:
            batches += [{key: request} for key, request in alone.items()]
        batches += [left] if left else []


def _died(name: str, exit_code: int, log: str) -> Fact:
    """A fact: how a child died at the program `name`, with its last output."""
    facts = {"program": name, "log": log, "signal": ""}
    if exit_code >= 0:
        return fact("compiler-ended", exit_code=exit_code, **facts)
    code = "compiler-killed" if exit_code == -signal.SIGKILL else "compiler-crashed"
    return fact(code, **{**facts, "signal": signal.Signals(-exit_code).name})


def last_words(log: str) -> str:
    """The reason that a process logged before it died, else the last line that is not a stack trace."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    fatal = [line.partition("] ")[2] for line in lines if _FATAL.match(line)]
    candidates = fatal or [line for line in lines if not _STACK.match(line)] or lines
    return candidates[-1][:400] if candidates else ""


_FATAL = re.compile(r"F\d{4} .*\] ")  # the format of a failed check in the compiler's C++
_STACK = re.compile(r"@ |PC: |\*\*\*|#\d+ |0x|File \"|\[address")


def _child(
    batch: dict[str, Request], compiler: Compiler, children: list[subprocess.Popen]
) -> Iterator[dict[str, Any]]:
    """Runs a child over `batch` and yields its messages; `children` holds it until it ends.

    A message is a `key` with its `answer`, `None` when it starts that program; the last one has its
    `exit_code` and the end of its `log`.
    """
    with tempfile.TemporaryDirectory(prefix="chipwise-plan-") as place:
        folder, requests = Path(place), []
        for i, (key, request) in enumerate(batch.items()):
            program = request.program.entry(folder, f"{i}.bin")
            requests.append({**vars(request), "program": program, "key": key})
        (folder / "requests.json").write_text(json.dumps(requests), encoding="utf-8")
        with open(folder / "log", "w+", encoding="utf-8", errors="replace") as log:
            child = subprocess.Popen(
                [sys.executable, "-m", "chipwise.planner.compile_child", place],
                stdin=subprocess.PIPE,  # closes when this process ends, which ends the child
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=compiler.environment(),
                cwd=place,
            )
            children.append(child)
            with child:
                try:
                    assert child.stdout is not None
                    whole = (line for line in child.stdout if line.endswith("\n"))  # killed while it wrote
                    yield from map(json.loads, whole)
                    exit_code = child.wait()
                    log.seek(0)
                    yield {"exit_code": exit_code, "log": last_words(log.read())}
                finally:
                    child.kill()
                    children.remove(child)
