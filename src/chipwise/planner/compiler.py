"""Asks the TPU's compiler about programs for chips that are not here, and remembers the answers.

The compiler, libtpu, is loaded in a process of its own (`compile_child`), never in this one: so a plan
cannot disturb a TPU that this machine does have, and a compiler that dies takes nothing with it. Programs
reach it as exported modules, so it does not run the user's code. One such process at a time, by a lock in
the cache folder.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
from jax import export

from ..atomic import replace_text
from ..engine import layout as replicas
from ..engine import reduce
from ..errors import ChipwiseError, DeviceError
from ..machine.detect import leave_compiler_alone
from ..words.facts import Fact, fact
from .hlo import VERSION
from .kernels import Kernel

SCHEMA = 3
"""Of the cache's entries and of what the child is told; raised when either changes its meaning."""

PIP = "pip install 'chipwise[plan]'"
DIED = ("compiler-killed", "compiler-crashed", "compiler-ended")
_FROM_OUTSIDE = ("SIGKILL", "SIGTERM", "SIGINT", "SIGHUP")
"""Signals after which the compiler may answer the next time. Of its own failures it would die again: they are
remembered."""
# Where in the source an operation came from, which changes without the program changing.
_LOCATION = re.compile(r"(?m)^#loc.*\n?|\s*\bloc\((?:[^()]|\([^()]*\))*\)")


@dataclass(frozen=True)
class Exported:
    """A program without its source: `body` as `jax.export` writes it, `key` the hash of what it computes."""

    body: bytes
    key: str

    def entry(self, folder: Path, name: str) -> dict[str, Any]:
        """How `compile_child` is told of it."""
        (folder / name).write_bytes(self.body)
        return {"file": name}


@dataclass(frozen=True)
class ReduceRequest:
    """The sum over replicas of `engine.reduce`: `local` vectors of `size` float32 on each of `devices`."""

    devices: int
    local: int
    size: int
    exact: bool

    @property
    def key(self) -> str:
        """Names the program: its sizes, and the code that makes it."""
        return f"{asdict(self)} {inspect.getsource(reduce)} {inspect.getsource(replicas)}"

    def entry(self, folder: Path, name: str) -> dict[str, Any]:
        return {"reduce": asdict(self)}


@dataclass(frozen=True)
class Request:
    """A program, and the absent chip to compile it for: keyword arguments of `get_topology_desc`.

    `donate`: which of the program's flat arguments may be overwritten. `clock_GHz` and `memory_GBps` are of
    one JAX device of the chip, for `Compiled.seconds`.
    """

    name: str
    topology: dict[str, Any]
    program: Exported | ReduceRequest
    donate: tuple[int, ...] = ()
    clock_GHz: float | None = None
    memory_GBps: float | None = None

    @property
    def size(self) -> int:
        """About in proportion to the time that its compilation takes."""
        return 50_000 + (len(self.program.body) if isinstance(self.program, Exported) else 0)

    def key(self, versions: str) -> str:
        """Names the answer in the cache."""
        parts = [SCHEMA, VERSION, versions, self.topology, self.program.key, self.donate, self.clock_GHz]
        text = json.dumps([*parts, self.memory_GBps], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True)
class Compiled:
    """What compiling a program said, for one execution on one device: see `hlo.Reading`. Without the chip's
    clock, `seconds` mean nothing.

    `problem`: why there are no figures: what the compiler refused (`refusal`), or how its process died.
    """

    name: str
    problem: Fact | None = None
    temp_bytes: int = 0
    code_bytes: int = 0
    seconds: float = 0.0
    seconds_by_kind: dict[str, float] = field(default_factory=dict)
    wire_bytes: float = 0.0
    compile_seconds: float = 0.0
    flops: float = 0.0  # of its products
    kernels: list[Kernel] = field(default_factory=list)
    notes: list[Fact] = field(default_factory=list)

    def json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Compiled:
        problem, notes = value.pop("problem"), [Fact(**note) for note in value.pop("notes")]
        kernels = [Kernel.from_json(kernel) for kernel in value.pop("kernels", ())]
        return cls(**value, problem=problem and Fact(**problem), notes=notes, kernels=kernels)

    @property
    def died(self) -> bool:
        """Whether the compiler's process ended at this program, which says nothing about the program."""
        return self.problem is not None and self.problem.code in DIED


def refusal(name: str, message: str, seconds: float = 0.0) -> Compiled:
    """The compiler's refusal as a code, with the bytes where it was for memory, and its own first lines."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    facts = {"program": name, "message": " ".join(lines[:2])[:400]}
    match = next(filter(None, (pattern.search(message) for pattern in _MEMORY)), None)
    if match and "RESOURCE_EXHAUSTED" in message:
        needed, available = (int(float(match[i]) * _UNIT[match[i + 1]]) for i in (1, 3))
        problem = fact("refused-for-memory", needed=needed, available=available, **facts)
    else:
        code = next((c for sign, c in _REFUSALS if re.search(rf"\b{sign}\b", message.lower())), "refused")
        problem = fact(code, **facts)
    return Compiled(name, problem, compile_seconds=seconds)


# "Used 20.1G of 15.75G hbm", and, where a bound suffices to refuse, "the total memory required for HLO
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


def libtpu_available() -> str | None:
    """The installed libtpu's version, or `None`."""
    try:
        return metadata.version("libtpu")
    except metadata.PackageNotFoundError:
        return None


def export_program(function: Callable[..., Any], specs: Sequence[Any]) -> Exported:
    """`function` of `specs` (trees of shapes) for TPUs, its arguments and results flat. Runs nothing, and
    needs no TPU. Raises what `function` raises while it is traced."""
    leaves, tree = jax.tree.flatten(tuple(specs))

    def flat(*values):
        return tuple(jax.tree.leaves(function(*jax.tree.unflatten(tree, values))))

    leave_compiler_alone()  # exporting starts JAX
    exported = export.export(jax.jit(flat, keep_unused=True), platforms=("tpu",))(*leaves)
    text = _LOCATION.sub("", exported.mlir_module())
    return Exported(bytes(exported.serialize()), hashlib.sha256(text.encode()).hexdigest())


def flat_positions(specs: Sequence[Any], arguments: Sequence[int]) -> tuple[int, ...]:
    """The places of the leaves of some `arguments` among all leaves of `specs`."""
    counts = [len(jax.tree.leaves(s)) for s in specs]
    return tuple(i for a in arguments for i in range(sum(counts[:a]), sum(counts[: a + 1])))


def default_cache() -> Path:
    """`$XDG_CACHE_HOME/chipwise/plan`, by default below `~/.cache`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "chipwise" / "plan"


Progress = Callable[[int, int, str, float | None], None]
"""Called with how many programs are done of how many, what was done last, and the seconds that the rest may
take: `None` before the first."""


def compile_each(
    requests: Sequence[Request], *, cache_dir: Path | None = None, progress: Progress | None = None
) -> Iterator[tuple[int, Compiled]]:
    """The place of each request with its answer, as it is known: what the cache has at once, then in their
    order.

    *Arguments:* `progress` counts what had to be compiled.

    Waits while another plan uses the compiler. Raises `DeviceError` when libtpu is not installed.
    """
    version = libtpu_available()
    if version is None:
        raise DeviceError("compiler-missing", install=PIP)
    versions = f"jax {jax.__version__} jaxlib {metadata.version('jaxlib')} libtpu {version}"
    folder = cache_dir if cache_dir is not None else default_cache()
    folder.mkdir(parents=True, exist_ok=True)
    places: dict[str, list[int]] = {}
    for i, request in enumerate(requests):
        places.setdefault(request.key(versions), []).append(i)
    missing: dict[str, Request] = {}
    for key, owners in places.items():
        answer = _load(folder / f"{key}.json")
        if answer is None:
            missing[key] = requests[owners[0]]
        else:
            yield from ((i, _named(answer, requests[i].name)) for i in owners)
    if not missing:
        return
    with _alone(folder):
        start, done, whole = time.monotonic(), 0, sum(r.size for r in missing.values())
        if progress is not None:
            progress(0, len(missing), "", None)
        for number, (key, answer) in enumerate(_ask(missing), 1):
            done += missing[key].size
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
    """The answers to `requests` in their order: `compile_each`, when all are known."""
    answers = dict(compile_each(requests, cache_dir=cache_dir, progress=progress))
    return [answers[i] for i in range(len(requests))]


def _named(answer: Compiled, name: str) -> Compiled:
    problem = answer.problem and fact(answer.problem.code, **{**answer.problem.numbers, "program": name})
    return replace(answer, name=name, problem=problem)


def _load(path: Path) -> Compiled | None:
    """A cached answer; `None` where there is none or it cannot be read, and it is asked for again."""
    try:
        return Compiled.from_json(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Holds the lock, after another plan. It is the operating system's, so it goes with its holder, however
    that ends."""
    import fcntl  # not on Windows, and neither is libtpu

    with open(folder / "compiler.lock", "a", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(fact("compiler-waited-for"), file=sys.stderr)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


_FOREIGN = ("TPU_", "MEGASCALE_", "CLOUD_TPU_", "LIBTPU_", "PJRT_", "JAX_", "XLA_")


def child_environment() -> dict[str, str]:
    """For a process that loads libtpu only to compile.

    What describes a real TPU VM and its place in a pod, or configures JAX and XLA here, is left out, but for
    the path of another libtpu: answers depend on the request alone. JAX itself stays on the CPU, so the TPU's
    back end is never started and no chip opened; `ALLOW_MULTIPLE_LIBTPU_LOAD` spares the lock that a process
    with the chips of this machine holds. It looks for no metadata server and writes no log files.
    """
    kept = {k: v for k, v in os.environ.items() if k == "TPU_LIBRARY_PATH" or not k.startswith(_FOREIGN)}
    here = str(Path(__file__).resolve().parents[2])
    kept["PYTHONPATH"] = os.pathsep.join([here, *filter(None, [kept.get("PYTHONPATH")])])
    return kept | {
        "JAX_PLATFORMS": "cpu",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_WORKER_ID": "0",
        "TPU_ACCELERATOR_TYPE": "v5litepod-8",
        "TPU_LOG_DIR": "disabled",
        "TPU_MIN_LOG_LEVEL": "3",
        "TPU_STDERR_LOG_LEVEL": "3",
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }


def _ask(requests: dict[str, Request]) -> Iterator[tuple[str, Compiled]]:
    """Each key with its answer as it comes. Where a child dies, the program it was at is answered with that
    and the rest go on in a new child; with several under way, each is tried alone to find which."""
    batches = [dict(requests)]
    while batches:
        left, under_way, end = batches.pop(0), set[str](), dict[str, Any]()
        for event in _child(left):
            if "exit_code" in event:
                end = event
            elif event["answer"] is None:
                under_way.add(event["key"])
            else:
                under_way.discard(event["key"])
                del left[event["key"]]
                yield event["key"], Compiled.from_json(event["answer"])
        if left and not under_way:
            raise ChipwiseError("compiler-not-started", **end)
        alone = {key: left.pop(key) for key in under_way}
        if len(alone) == 1:
            for key, request in alone.items():
                yield key, Compiled(request.name, _died(request.name, **end))
        else:
            batches += [{key: request} for key, request in alone.items()]
        batches += [left] if left else []


def _died(name: str, exit_code: int, log: str) -> Fact:
    """How a child ended at the program `name`, with its last words."""
    facts = {"program": name, "log": log, "signal": ""}
    if exit_code >= 0:
        return fact("compiler-ended", exit_code=exit_code, **facts)
    code = "compiler-killed" if exit_code == -signal.SIGKILL else "compiler-crashed"
    return fact(code, **{**facts, "signal": signal.Signals(-exit_code).name})


def last_words(log: str) -> str:
    """Of what a process wrote before it died: why, if it said so, else the last line that is no stack."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    fatal = [line.partition("] ")[2] for line in lines if _FATAL.match(line)]
    told = fatal or [line for line in lines if not _STACK.match(line)] or lines
    return told[-1][:400] if told else ""


_FATAL = re.compile(r"F\d{4} .*\] ")  # as the compiler's C++ logs a check that failed
_STACK = re.compile(r"@ |PC: |\*\*\*|#\d+ |0x|File \"|\[address")


def _child(batch: dict[str, Request]) -> Iterator[dict[str, Any]]:
    """Runs a child over `batch`, and gives what it says.

    A `key` with its `answer`, `None` as it begins that program; at last its `exit_code`, with the last words
    of its `log`.
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
                stdin=subprocess.PIPE,  # its end tells the child that this process is gone
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=child_environment(),
                cwd=place,
            )
            with child:
                try:
                    assert child.stdout is not None
                    yield from map(json.loads, child.stdout)
                    exit_code = child.wait()
                    log.seek(0)
                    yield {"exit_code": exit_code, "log": last_words(log.read())}
                finally:  # also on Ctrl-C
                    child.kill()
