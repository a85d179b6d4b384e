"""Asks the TPU's compiler about programs for chips that are not here, and remembers the answers.

The compiler, libtpu, is loaded in a process of its own (`compile_child`), never in this one: so a plan
cannot disturb a TPU that this machine does have, and a compiler that dies takes nothing with it. Programs
reach it as exported modules, so it does not run the user's code. One such process at a time, by a lock in
the cache folder that says who holds it.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
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
from .hlo import VERSION

SCHEMA = 1
"""Of the cache's entries and of what the child is told; raised when either changes its meaning."""

PIP = "pip install 'chipwise[plan]'"
DIED = "the compiler's process died"
KILLED = "killed, most likely for lack of memory"
_LOCK_SECONDS = 1800.0
# Where in the source an operation came from, which changes without the program changing.
_LOCATION = re.compile(r"(?m)^#loc.*\n?|\s*\bloc\((?:[^()]|\([^()]*\))*\)")


@dataclass(frozen=True)
class Exported:
    """A program without its source: `body` as `jax.export` writes it, `key` the hash of what it computes."""

    body: bytes
    key: str


@dataclass(frozen=True)
class ReduceRequest:
    """The sum over replicas of `train.reduce`: `local` vectors of `size` float32 on each of `devices`."""

    devices: int
    local: int
    size: int
    exact: bool

    def text(self) -> str:
        """Names the program: its sizes, and the code that makes it."""
        return f"{asdict(self)} {inspect.getsource(reduce)} {inspect.getsource(replicas)}"


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

    def key(self, versions: str) -> str:
        """Names the answer in the cache."""
        program = self.program.key if isinstance(self.program, Exported) else self.program.text()
        parts = [SCHEMA, VERSION, versions, self.topology, program, self.donate, self.clock_GHz]
        text = json.dumps([*parts, self.memory_GBps], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True)
class Compiled:
    """What compiling a program said, for one execution on one device: see `hlo.Reading`.

    `error`: the compiler's message where it refused, with `bytes_needed` and `bytes_available` where it
    refused for memory.
    """

    name: str
    error: str | None = None
    bytes_needed: int | None = None
    bytes_available: int | None = None
    argument_bytes: int = 0
    output_bytes: int = 0
    alias_bytes: int = 0
    temp_bytes: int = 0
    code_bytes: int = 0
    cycles: float | None = None
    seconds: float | None = None
    seconds_by_kind: dict[str, float] = field(default_factory=dict)
    flops: float = 0.0
    bytes_accessed: float = 0.0
    wire_bytes: float = 0.0
    compile_seconds: float = 0.0
    notes: list[str] = field(default_factory=list)


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
    made = export.export(jax.jit(flat, keep_unused=True), platforms=("tpu",))(*leaves)
    text = _LOCATION.sub("", made.mlir_module())
    return Exported(bytes(made.serialize()), hashlib.sha256(text.encode()).hexdigest())


def flat_positions(specs: Sequence[Any], arguments: Sequence[int]) -> tuple[int, ...]:
    """The places of the leaves of some `arguments` among all leaves of `specs`."""
    counts = [len(jax.tree.leaves(s)) for s in specs]
    return tuple(i for a in arguments for i in range(sum(counts[:a]), sum(counts[: a + 1])))


def default_cache() -> Path:
    """`$XDG_CACHE_HOME/chipwise/plan`, by default below `~/.cache`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "chipwise" / "plan"


def compile_all(
    requests: Sequence[Request],
    *,
    cache_dir: Path | None = None,
    progress: Callable[[int, int, str], None] | None = None,
) -> list[Compiled]:
    """The answers to `requests`, in their order, from the cache where it has them.

    *Arguments:* `progress` is called with (done, total, name) of what had to be compiled.

    Raises `DeviceError` when libtpu is not installed or stays in use by another plan.
    """
    version = libtpu_available()
    if version is None:
        raise DeviceError(f"Compiling for a TPU needs its compiler: {PIP}.")
    versions = f"jax {jax.__version__} jaxlib {metadata.version('jaxlib')} libtpu {version}"
    folder = cache_dir if cache_dir is not None else default_cache()
    folder.mkdir(parents=True, exist_ok=True)
    keys = [r.key(versions) for r in requests]
    known = {key: found for key in set(keys) if (found := _load(folder / f"{key}.json")) is not None}
    wanted = {key: r for key, r in zip(keys, requests, strict=True) if key not in known}
    if wanted:
        total = len(wanted)
        with _alone(folder):
            for done, (key, answer) in enumerate(_ask(wanted), 1):
                known[key] = answer
                if DIED not in (answer.error or "") or "SIGSEGV" in (answer.error or ""):
                    # killed from outside it may answer next time; a crash says the same again
                    _store(folder / f"{key}.json", answer)
                if progress is not None:
                    progress(done, total, answer.name)
    return [_named(known[key], r.name) for key, r in zip(keys, requests, strict=True)]


def _named(answer: Compiled, name: str) -> Compiled:
    return Compiled(**{**asdict(answer), "name": name})


def _load(path: Path) -> Compiled | None:
    """A cached answer; `None` where there is none or it cannot be read, and it is asked for again."""
    try:
        return Compiled(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def _store(path: Path, answer: Compiled) -> None:
    replace_text(path, json.dumps(asdict(answer)), "the plan's cache", "another cache folder")


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Holds the lock, waiting for another plan at most `_LOCK_SECONDS`. It is the operating system's, so it
    goes with its holder, however that ends."""
    import fcntl  # not on Windows, and neither is libtpu

    path = folder / "compiler.lock"
    with open(path, "a+", encoding="utf-8") as file:
        start, told = time.monotonic(), False
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                holder = path.read_text(encoding="utf-8").strip() or "another process"
                if time.monotonic() - start > _LOCK_SECONDS:
                    raise DeviceError(
                        f"The TPU's compiler is in use by {holder}: wait for it, or end it."
                    ) from None
                if not told:
                    print(f"waiting for {holder}, which uses the TPU's compiler", file=sys.stderr)
                    told = True
                time.sleep(0.2)
        command = shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])[:100]
        file.truncate(0)
        file.write(
            f"process {os.getpid()} on {socket.gethostname()} since {time.strftime('%H:%M:%S')} ({command})\n"
        )
        file.flush()
        try:
            yield
        finally:
            file.truncate(0)


_FOREIGN = ("TPU_", "MEGASCALE_", "CLOUD_TPU_", "LIBTPU_", "PJRT_", "JAX_", "XLA_")


def child_environment() -> dict[str, str]:
    """For a process that loads libtpu only to compile.

    What describes a real TPU VM and its place in a pod, or configures JAX and XLA here, is left out, but for
    the path of another libtpu: answers depend on the request alone. JAX itself stays on the CPU, so the TPU's
    back end is never started and no chip opened; `ALLOW_MULTIPLE_LIBTPU_LOAD` spares the lock that a process
    with the chips of this machine holds. It looks for no metadata server and writes no log files.
    """
    made = {k: v for k, v in os.environ.items() if k == "TPU_LIBRARY_PATH" or not k.startswith(_FOREIGN)}
    here = str(Path(__file__).resolve().parents[2])
    made["PYTHONPATH"] = os.pathsep.join([here, *filter(None, [made.get("PYTHONPATH")])])
    return made | {
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


def _ask(wanted: dict[str, Request]) -> Iterator[tuple[str, Compiled]]:
    """Each key with its answer as it comes. Where a child dies, the program it was at is answered with an
    error and the rest go on in a new child; with several under way, each is tried alone to find which."""
    left, suspects = dict(wanted), list[str]()
    while left:
        batch = {key: left[key] for key in suspects[:1]} or dict(left)
        under_way: set[str] = set()
        death = None
        for key, answer in _child(batch):
            if key is None:
                death = answer
            elif answer is None:
                under_way.add(key)
            else:
                under_way.discard(key)
                del left[key]
                yield key, answer
        suspects = [key for key in suspects[1:] if key in left]
        if len(under_way) > 1:
            suspects = [key for key in left if key in under_way]
        for key in under_way if len(under_way) == 1 else ():
            yield key, Compiled(left.pop(key).name, error=f"{DIED}: {death}")
        if death is not None and not under_way and not left.keys().isdisjoint(batch):
            raise ChipwiseError(f"The TPU's compiler could not be started: {death}")


def _child(batch: dict[str, Request]) -> Iterator[tuple[Any, Any]]:
    """Runs a child over `batch`. Gives (key, `None`) when it begins a program, (key, answer) when it is done
    with it, and (`None`, reason) if it dies."""
    with tempfile.TemporaryDirectory(prefix="chipwise-plan-") as place:
        folder, listed = Path(place), []
        for i, (key, request) in enumerate(batch.items()):
            entry = {k: v for k, v in vars(request).items() if k != "program"} | {"key": key}
            if isinstance(request.program, Exported):
                (folder / f"{i}.bin").write_bytes(request.program.body)
                listed.append({**entry, "file": f"{i}.bin"})
            else:
                listed.append({**entry, "reduce": asdict(request.program)})
        (folder / "requests.json").write_text(json.dumps(listed), encoding="utf-8")
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
            try:
                assert child.stdout is not None
                for line in child.stdout:
                    told = json.loads(line)
                    yield told["key"], told["answer"] and Compiled(**told["answer"])
                code = child.wait()
                if code:
                    log.seek(0)
                    yield None, _reason(code, log.read())
            finally:  # also on Ctrl-C
                child.kill()
                child.wait()
                for pipe in (child.stdin, child.stdout):
                    if pipe is not None:
                        pipe.close()


def _reason(code: int, log: str) -> str:
    """What a child that left with `code` died of, for people."""
    if code == -signal.SIGKILL:
        return KILLED
    if code < 0:
        return f"it crashed ({signal.Signals(-code).name})"
    return ([line for line in log.splitlines() if line.strip()][-1:] or [f"exit code {code}"])[0]
