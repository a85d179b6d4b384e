"""Asks the compilers about programs, and caches their answers.

A compiler runs in a separate process (`processes`). Programs are passed as exported modules, so
that process does not run the user's code. The compilers of GPUs and TPUs run at the same time.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ..base import DataError
from ..base.files import home, read_regular, replace_file
from .answers import FAILED_HERE, Answer, CompileRequest
from .processes import COMPILERS, CompilerProcesses

Progress = Callable[[int, int], None]
"""Called with the number of compiled programs, and the number of programs known to be missing."""


def cache_folder(given: str | os.PathLike | None) -> Path:
    """The folder `given`, or `plan` in the user's cache. Creates it. Raises `DataError` if files
    cannot be written there."""
    folder = home() / "plan" if given is None else Path(given)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise DataError("plan-cache-unwritable", path=folder, reason=error) from error
    return folder


def compile_each(
    requests: Sequence[CompileRequest],
    *,
    cache_dir: Path | None = None,
    progress: Progress | None = None,
    processes: CompilerProcesses | None = None,
) -> Iterator[tuple[int, Answer]]:
    """Yields the index of each request with its answer as soon as it is ready: cached ones first,
    then in order, on all compilers at once. `progress` counts the programs to compile. `processes`
    may have begun: they are closed by the caller.

    Waits while another plan uses the same compiler. Raises `DeviceError` if a compiler is not
    installed, or its process cannot be started, and `DataError` if the cache cannot be written to.
    """
    folder = cache_folder(cache_dir)
    compilers = {
        platform: COMPILERS[platform]() for platform in sorted({r.platform for r in requests})
    }
    owners: dict[str, list[int]] = {}  # by key
    missing: dict[str, CompileRequest] = {}
    for i, request in enumerate(requests):
        key = request.key(compilers[request.platform].versions)
        owners.setdefault(key, []).append(i)
        if key not in missing and (known := _load(folder / f"{key}.json")) is not None:
            yield i, known.at(request.places).named(request.name)
        else:
            missing[key] = request
    if not missing:
        return
    with contextlib.ExitStack() as stack:
        if processes is None:
            processes = stack.enter_context(contextlib.closing(CompilerProcesses(folder)))
        for platform, compiler in compilers.items():
            processes.ask(
                compiler, {key: r for key, r in missing.items() if r.platform == platform}
            )
        tell = progress or (lambda done, total: None)
        tell(0, len(missing))
        for done, (key, answer) in enumerate(processes.answers(), 1):
            answer = replace(answer, places=list(missing[key].places))
            if answer.problem is None or answer.problem.code not in FAILED_HERE:
                value = asdict(answer)
                text = json.dumps({**value, "seal": _seal(key, value)})
                replace_file(folder / f"{key}.json", text, "plan-cache-unwritable")
            tell(done, len(missing))
            yield from ((i, answer.named(requests[i].name)) for i in owners[key])


def begin_if_missing(request: CompileRequest, processes: CompilerProcesses, folder: Path) -> None:
    """Starts the process of the request's compiler if the cache `folder` has no answer. Raises as
    `compile_each` does."""
    compiler = COMPILERS[request.platform]()
    if _load(folder / f"{request.key(compiler.versions)}.json") is None:
        processes.begin(compiler)


def _load(path: Path) -> Answer | None:
    """A cached answer. `None` if there is none, or if it was changed, so that it is compiled
    again."""
    try:
        value = json.loads(read_regular(path))
        seal = value.pop("seal", None)
        if seal not in (None, _seal(path.stem, value)):  # entries of earlier versions have none
            return None
        return Answer.from_json(value)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def _seal(key: str, value: dict[str, Any]) -> str:
    return hashlib.sha256(f"{key}{json.dumps(value)}".encode()).hexdigest()
