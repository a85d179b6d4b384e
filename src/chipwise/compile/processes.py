"""The compilers of absent chips, and the processes that hold them while they compile.

TPUs use libtpu. GPUs use JAX's CUDA plugin with NVIDIA's `ptxas`, which need neither a driver nor
CUDA's libraries. Each kind of chip has one process (`worker`), so a plan cannot disturb the chips
of this machine. If a compiler crashes at a program, another process compiles the rest. A lock in
the cache folder allows one process for each kind of chip on this machine.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..base import ChipwiseError, DeviceError, Fact, fact
from ..base.ending import KILL
from ..base.locks import Lock
from ..machine.host_facts import installed
from ..machine.plugins import COMPILING, LIBTPU
from .answers import Answer, CompileRequest
from .exports import Exported

# ---- which compilers are installed

CUDA = ("13", "12")
"""The CUDA versions of JAX's plugins. If both are installed, JAX takes the first."""

_PTXAS = {"12": ("cuda_nvcc/bin", "nvidia-cuda-nvcc-cu12"), "13": ("cu13/bin", "nvidia-cuda-nvcc")}
"""For each CUDA version, the folder of NVIDIA's assembler below the package `nvidia`, and the
package to install."""


@dataclass(frozen=True)
class Compiler:
    """An installed compiler."""

    platform: str
    """The platform, "tpu" or "cuda"."""
    versions: str
    """The versions on which the compiler's answers depend."""
    path: str | None = None
    """The first folder on the PATH of the compiler's process."""


def tpu_compiler() -> Compiler:
    """Returns the installed libtpu. Raises `DeviceError` if there is none."""
    version = installed("libtpu")
    if version is None:
        raise DeviceError(
            "compiler-missing", chips="TPUs", install="pip install 'chipwise[plan-tpu]'"
        )
    return Compiler("tpu", f"{_jax()} libtpu {version}")


def gpu_compiler() -> Compiler:
    """Returns the CUDA plugin that JAX would load, with the `ptxas` of its CUDA version.

    Raises `DeviceError` if none or two are installed, if its version differs from jaxlib's, or if
    there is no `ptxas`.
    """
    plugins = {cuda: version for cuda in CUDA if (version := installed(f"jax-cuda{cuda}-plugin"))}
    jaxlib = installed("jaxlib")
    install = "pip install 'chipwise[plan-gpu]'"
    if not plugins:
        raise DeviceError("compiler-missing", chips="GPUs", install=install)
    if len(plugins) > 1:
        packages = [f"jax-cuda{cuda}-plugin" for cuda in plugins]
        unwanted = f"pip uninstall jax-cuda{CUDA[-1]}-plugin jax-cuda{CUDA[-1]}-pjrt"
        raise DeviceError("compilers-in-the-way", packages=packages, uninstall=unwanted)
    (cuda, version) = plugins.popitem()
    folder = _ptxas(cuda)
    package = _PTXAS[cuda][1]
    same = f"pip install jax-cuda{cuda}-plugin=={jaxlib} jax-cuda{cuda}-pjrt=={jaxlib}"
    for part in (f"jax-cuda{cuda}-plugin", f"jax-cuda{cuda}-pjrt"):
        if (other := installed(part)) != jaxlib:
            raise DeviceError(
                "compiler-of-another-jax",
                package=part,
                version=other or "no version",
                jaxlib=jaxlib,
                install=same,
            )
    if folder is None:
        raise DeviceError("ptxas-missing", install=f"pip install {package}")
    return Compiler(
        "cuda", f"{_jax()} cuda{cuda} {version} ptxas {installed(package)}", str(folder)
    )


COMPILERS: dict[str, Callable[[], Compiler]] = {"tpu": tpu_compiler, "cuda": gpu_compiler}
"""The compilers by JAX's name for the platform."""


def _jax() -> str:
    return f"jax {installed('jax')} jaxlib {installed('jaxlib')}"


def _ptxas(cuda: str) -> Path | None:
    """The folder of the package's `ptxas`, or else of one on PATH, whose version may not support
    the chip. `None` if there is neither."""
    package = importlib.util.find_spec("nvidia")
    for place in package.submodule_search_locations or [] if package else []:
        if (folder := Path(place) / _PTXAS[cuda][0]).joinpath("ptxas").exists():
            return folder
    on_path = shutil.which("ptxas")
    return Path(on_path).parent if on_path else None


_FOREIGN = ("TPU_", "MEGASCALE_", "CLOUD_TPU_", "LIBTPU_", "PJRT_", "JAX_", "XLA_")


def compiler_environment(platform: str, path: str | None = None) -> dict[str, str]:
    """The environment of a process that loads a compiler only to compile.

    It lacks the variables that describe a real TPU VM and its place in a pod, or that configure JAX
    and XLA here, so that answers depend only on the request. The path of another libtpu stays. JAX
    stays on the CPU, so no chip is opened. With `ALLOW_MULTIPLE_LIBTPU_LOAD` libtpu needs no lock,
    which a process with this machine's chips may have. libtpu asks no metadata server and writes no
    log files. The CUDA plugin sees no GPU.
    """
    variables = {k: v for k, v in os.environ.items() if not k.startswith(_FOREIGN)}
    if libtpu := os.environ.get("TPU_LIBRARY_PATH", os.environ.get(LIBTPU)):
        variables["TPU_LIBRARY_PATH"] = libtpu
    here = str(Path(__file__).resolve().parents[2])
    variables["PYTHONPATH"] = os.pathsep.join([here, *filter(None, [variables.get("PYTHONPATH")])])
    variables |= {"JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "3", COMPILING: platform}
    if platform == "cuda":
        folders = [*filter(None, [path, variables.get("PATH")])]
        return variables | {"CUDA_VISIBLE_DEVICES": "-1", "PATH": os.pathsep.join(folders)}
    return variables | {
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_WORKER_ID": "0",
        "TPU_ACCELERATOR_TYPE": "v5litepod-8",
        "TPU_LOG_DIR": "disabled",
        "TPU_MIN_LOG_LEVEL": "3",
        "TPU_STDERR_LOG_LEVEL": "3",
    }


# ---- their processes


class CompilerProcesses:
    """The processes of a plan's compilers. `close` ends them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._events: queue.SimpleQueue[tuple[str, Answer] | BaseException | None] = (
            queue.SimpleQueue()
        )
        self._under_way = 0
        self._running: list[CompilerProcess] = []
        self._ready: dict[str, CompilerProcess] = {}  # by platform
        self._starting = threading.Lock()
        self._closed = False

    def begin(self, compiler: Compiler) -> None:
        """Starts a process that will be asked later, since loading a compiler takes a second."""
        if compiler.platform not in self._ready:
            with _told(compiler):
                self._ready[compiler.platform] = CompilerProcess(compiler)

    def ask(self, compiler: Compiler, requests: dict[str, CompileRequest]) -> None:
        """Starts to compile the `requests`, given by key."""
        if requests:
            self._under_way += 1
            threading.Thread(
                target=self._run,
                args=(compiler, requests),
                daemon=True,
                name=f"compiler-{compiler.platform}",
            ).start()

    def answers(self) -> Iterator[tuple[str, Answer]]:
        """Yields each key with its answer as soon as it is ready."""
        while self._under_way:
            event = self._events.get()
            if isinstance(event, BaseException):
                raise event
            if event is None:
                self._under_way -= 1
            else:
                yield event

    def close(self) -> None:
        """Kills the processes that run."""
        with self._starting:
            self._closed = True
            unasked = [self._ready.popitem()[1] for _ in list(self._ready)]
        for process in unasked:
            process.close()
        for process in list(self._running):
            process.kill()  # its thread closes its files

    def _start(self, compiler: Compiler) -> CompilerProcess:
        with self._starting:
            process = self._ready.pop(compiler.platform, None) or CompilerProcess(compiler)
            self._running.append(process)
            if self._closed:
                process.kill()
            return process

    def _run(self, compiler: Compiler, requests: dict[str, CompileRequest]) -> None:
        try:
            lock = self._folder / f"compiler-{compiler.platform}.lock"
            waits = fact("compiler-waited-for", chips=CHIPS[compiler.platform])
            with _told(compiler), Lock(lock, lambda: print(waits, file=sys.stderr)):
                for pair in self._ask(requests, compiler):
                    self._events.put(pair)
            self._events.put(None)
        except BaseException as error:
            self._events.put(error)

    def _ask(
        self, requests: dict[str, CompileRequest], compiler: Compiler
    ) -> Iterator[tuple[str, Answer]]:
        """Yields each key with its answer.

        If a process dies at a program, its death is the answer for that program, and a new process
        compiles the rest. If the process was compiling several programs, each of them is compiled
        again alone, to find the one that ends it."""
        batches = [dict(requests)]
        while batches and not self._closed:
            left = batches.pop(0)
            under_way = set[str]()
            end = dict[str, Any]()
            process = self._start(compiler)
            with contextlib.closing(process):
                for event in process.compile(left):
                    if "exit_code" in event:
                        end = event
                    elif event["answer"] is None:
                        under_way.add(event["key"])
                    else:
                        under_way.discard(event["key"])
                        del left[event["key"]]
                        yield event["key"], Answer.from_json(event["answer"])
                        if not left:
                            break  # it takes a second to end
            self._running.remove(process)
            if self._closed:
                return
            if left and not under_way:
                text = "The compiler of {chips}s did not start (exit code {exit_code}): {log:plain}"
                raise ChipwiseError(
                    "compiler-not-started", text, chips=CHIPS[compiler.platform], **end
                )
            alone = {key: left.pop(key) for key in under_way}
            if len(alone) == 1:
                ((key, request),) = alone.items()
                yield key, Answer(request.name, _died(request.name, **end))
            else:
                batches += [{key: request} for key, request in alone.items()]
            batches += [left] if left else []


class CompilerProcess:
    """A process that runs `worker`."""

    def __init__(self, compiler: Compiler) -> None:
        with contextlib.ExitStack() as stack:
            place = stack.enter_context(tempfile.TemporaryDirectory(prefix="chipwise-plan-"))
            self._folder = Path(place)
            log = (self._folder / "log").open("w+", encoding="utf-8", errors="replace")
            self._log = stack.enter_context(log)
            process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "chipwise.machine.plugins",
                    "chipwise.compile.worker",
                    place,
                ],
                stdin=subprocess.PIPE,  # closes when this process ends, which ends the process
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=compiler_environment(compiler.platform, compiler.path),
                cwd=place,
                process_group=0,  # Ctrl-C is for this process, which ends the process
            )
            self._process = stack.enter_context(process)
            self._open = stack.pop_all()

    def compile(self, batch: dict[str, CompileRequest]) -> Iterator[dict[str, Any]]:
        """Yields the process's messages while it compiles `batch`, by key.

        A message is a `key` with its `answer`, which is `None` when the process starts that
        program. The last message has the `exit_code` and the reason from the `log`.
        """
        requests = []
        for i, (key, request) in enumerate(batch.items()):
            if isinstance(request.program, Exported):
                (self._folder / f"{i}.bin").write_bytes(request.program.body)
                program = {"file": f"{i}.bin"}
            else:
                program = asdict(request.program)
            requests.append({**vars(request), "program": program, "key": key})
        (self._folder / "requests.json").write_text(json.dumps(requests), encoding="utf-8")
        assert self._process.stdin is not None and self._process.stdout is not None
        # The process may have ended, which its exit code shows
        with contextlib.suppress(BrokenPipeError):
            os.write(self._process.stdin.fileno(), b"begin\n")
        # a process that was killed while it wrote leaves half a line
        whole = (line for line in self._process.stdout if line.endswith("\n"))
        yield from map(json.loads, whole)
        exit_code = self._process.wait()
        self._log.seek(0)
        yield {"exit_code": exit_code, "log": last_words(self._log.read())}

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """Kills the process, and removes its folder."""
        self.kill()
        self._open.close()


@contextlib.contextmanager
def _told(compiler: Compiler) -> Iterator[None]:
    """A context that turns a full disk, or a limit of processes or memory, into a
    `DeviceError`."""
    try:
        yield
    except (OSError, MemoryError) as error:
        raise DeviceError(
            "compiler-cannot-run",
            "This machine cannot run the compiler of {chips}s: {reason:plain}.",
            chips=CHIPS[compiler.platform],
            reason=str(error) or "out of memory",
        ) from None


CHIPS = {"tpu": "TPU", "cuda": "GPU"}


def _died(name: str, exit_code: int, log: str) -> Fact:
    """A fact about how a process died at the program `name`, with its last output."""
    facts = {"program": name, "log": log, "signal": ""}
    if exit_code >= 0:
        return fact("compiler-ended", exit_code=exit_code, **facts)
    code = "compiler-killed" if exit_code == -KILL else "compiler-crashed"
    return fact(code, **{**facts, "signal": signal.Signals(-exit_code).name})


def last_words(log: str) -> str:
    """The reason that a process logged before it died, or else its last line that is not part of a
    stack trace."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    fatal = [line.partition("] ")[2] for line in lines if _FATAL.match(line)]
    candidates = fatal or [line for line in lines if not _STACK.match(line)] or lines
    return candidates[-1][:400] if candidates else ""


_FATAL = re.compile(r"F\d{4} .*\] ")  # the format of a failed check in the compiler's C++
_STACK = re.compile(r"@ |PC: |\*\*\*|#\d+ |0x|File \"|\[address")
