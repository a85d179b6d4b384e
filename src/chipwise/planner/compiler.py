"""Compiles programs for absent chips, and caches the results.

A compiler runs in a separate process (`compile_child`), so a plan cannot disturb chips of this machine, and a
crash of the compiler does no harm. Programs are passed as exported modules, so that process does not run the
user's code. The compilers of GPUs and TPUs run at the same time.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from ..atomic import replace_text
from ..words.facts import fact
from .children import Children
from .compiled import Compiled, Request
from .compilers import COMPILERS, Compiler
from .remaining import Progress, Remaining

_FROM_OUTSIDE = ("SIGKILL", "SIGTERM", "SIGINT", "SIGHUP")
"""Signals after which the compiler may answer the next time. Of its own failures it would die again: they are
remembered."""


def default_cache() -> Path:
    """`$XDG_CACHE_HOME/chipwise/plan`, by default below `~/.cache`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "chipwise" / "plan"


def compile_each(
    batches: Iterable[Sequence[Request]],
    *,
    expected: str | None = None,
    cache_dir: Path | None = None,
    progress: Progress | None = None,
) -> Iterator[tuple[int, Compiled]]:
    """Yields the index of each request, among those of all `batches`, with its answer as soon as it is ready:
    of each batch cached ones first, then in order.

    A batch with `urgent` programs is compiled while the next one is made, others when all are made; no two
    may need the same compiler. Until the `urgent` programs are done, their compiler does no others. On few
    cores the next batch is not even made, for at most `HEAD_START` seconds: so the first answer does not wait
    for the slowest chip.

    *Arguments:* `expected`: a platform whose batch takes seconds to make: its compiler starts meanwhile.
    `progress` counts the programs to compile, of the batches that are made.

    Waits while another plan uses the same compiler. Raises `DeviceError` if a compiler is not installed.
    """
    folder = cache_dir if cache_dir is not None else default_cache()
    folder.mkdir(parents=True, exist_ok=True)
    owners: dict[str, list[tuple[int, Request]]] = {}  # by key
    missing: dict[str, Request] = {}
    remaining = Remaining(progress)

    def kept(answers: Iterable[tuple[str, Compiled]]) -> Iterator[tuple[int, Compiled]]:
        for key, answer in answers:
            answer = replace(answer, places=list(missing[key].program.places))
            if not answer.died or answer.problem["signal"] not in _FROM_OUTSIDE:  # type: ignore[index]
                replace_text(folder / f"{key}.json", json.dumps(answer.json()), "plan-cache-unwritable")
            remaining.done(missing[key])
            yield from ((i, _named(answer, request.name)) for i, request in owners[key])

    with contextlib.closing(Children(folder)) as children:
        if expected is not None:
            children.prepare(COMPILERS[expected]())
        index = 0
        later: list[tuple[Compiler, dict[str, Request]]] = []
        for batch in batches:
            compilers = {platform: COMPILERS[platform]() for platform in sorted({r.platform for r in batch})}
            new: dict[str, Request] = {}
            for request in batch:
                key = request.key(compilers[request.platform].versions)
                owners.setdefault(key, []).append((index, request))
                index += 1
                if key in new:
                    continue
                if (known := _load(folder / f"{key}.json")) is None:
                    new[key] = request
                else:
                    yield index - 1, _named(known.at(request.program.places), request.name)
            missing |= new
            remaining.ask(new.values())
            asked = [
                (compiler, {key: request for key, request in new.items() if request.platform == platform})
                for platform, compiler in compilers.items()
            ]
            if any(request.urgent for request in new.values()):
                children.ask(asked)
                yield from kept(children.urgent())
            else:
                later += asked
        children.ask(later)
        remaining.complete()
        yield from kept(children.answers())


def compile_all(
    requests: Sequence[Request], *, cache_dir: Path | None = None, progress: Progress | None = None
) -> list[Compiled]:
    """The answers to `requests` in their order, when all are ready; see `compile_each`."""
    answers = dict(compile_each([requests], cache_dir=cache_dir, progress=progress))
    return [answers[i] for i in range(len(requests))]


def _named(answer: Compiled, name: str) -> Compiled:
    problem = answer.problem and fact(answer.problem.code, **{**answer.problem.numbers, "program": name})
    return replace(answer, name=name, problem=problem)


def _load(path: Path) -> Compiled | None:
    """A cached answer; `None` if there is none or it cannot be read, so that it is compiled again."""
    try:
        return Compiled.from_json(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None
