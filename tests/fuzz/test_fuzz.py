"""Hundreds of cases of bad input: each ends in a line, within seconds, in bounded memory."""

import contextlib
import json
import os
import random
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fuzz import cases, costly
from fuzz.cases import Case

SECONDS = 20 * float(os.environ.get("CHIPWISE_FUZZ_PATIENCE", "1.5"))  # on a loaded machine
BYTES = 1 << 30  # beyond what the libraries take
LONGEST = 400  # characters of an error's line
EXPECTED = {2, 3, 4, 5}
VERDICTS = {10, 11, 12, 13, 14, 15}  # of referee
PARTS = {**cases.PARTS, **costly.PARTS}  # each takes minutes: pytest -m slow tests/fuzz -k PART
ONLY = os.environ.get("CHIPWISE_FUZZ_ONLY", "")  # a part of what cases are about
SEED = int(os.environ.get("CHIPWISE_FUZZ_SEED", "0"))


class Worker:
    """A process that runs commands, made again when one hangs or grows."""

    def __init__(self, folder: Path):
        self.folder, self.process = folder, None

    def ask(self, case: Case) -> dict:
        if case.environment:
            return self._alone(case)
        if self.process is None or self.process.poll() is not None:
            environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(sys.path)}
            environment["CHIPWISE_CACHE"] = str(self.folder / "cache")
            self.process = subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name("worker.py"))],
                env=environment,
                text=True,
                cwd=self.folder,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
            ready = self._answer(["chips"], 120)  # loads what most commands load
            assert "problem" not in ready, ready
        return self._answer(list(case.arguments), SECONDS)

    def _answer(self, arguments: list[str], seconds: float) -> dict:
        began = time.monotonic()
        self.process.stdin.write(json.dumps(arguments) + "\n")
        self.process.stdin.flush()
        if not select.select([self.process.stdout], [], [], seconds)[0]:
            self.end()
            return {"problem": f"no answer in {seconds} s"}
        line = self.process.stdout.readline()
        if not line:
            return {"problem": f"died with {self.process.wait()}"}
        answer = json.loads(line) | {"seconds": time.monotonic() - began}
        if answer["bytes"] > BYTES:
            self.end()
            return {"problem": f"took {answer['bytes']:,} bytes"}
        return answer

    def _alone(self, case: Case) -> dict:
        """The answer of a process whose environment is the case's. Its memory is not measured."""
        environment = {"PYTHONPATH": os.pathsep.join(sys.path), "JAX_PLATFORMS": "cpu"}
        environment |= {"PATH": os.environ["PATH"], "HOME": str(self.folder / "cache")}
        environment["CHIPWISE_CACHE"] = str(self.folder / "cache")
        limit = case.environment.get("LIMIT_ADDRESSES")  # by a shell: a process with threads should not fork
        limited = ["sh", "-c", f'ulimit -v {int(limit) // 1024} && exec "$@"', "sh"] if limit else []
        try:
            ended = subprocess.run(
                [*limited, sys.executable, "-m", "chipwise", *case.arguments],
                env=environment | case.environment,
                text=True,
                capture_output=True,
                errors="replace",
                cwd=self.folder,
                timeout=4 * SECONDS,  # it imports and compiles
            )
        except subprocess.TimeoutExpired:
            return {"problem": f"no answer in {4 * SECONDS} s"}
        return {"code": ended.returncode, "err": ended.stderr[-4000:]}

    def end(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            for pipe in (self.process.stdin, self.process.stdout):
                with contextlib.suppress(BrokenPipeError):  # what it no longer reads
                    pipe.close()
            self.process = None


def problem(case: Case, answer: dict) -> str | None:
    """What is wrong with how a command ended."""
    if "problem" in answer:
        return answer["problem"]
    if "Traceback" in answer["err"]:
        return "traceback: " + answer["err"][-300:]
    if answer["code"] == 0 or (case.arguments[0] == "referee" and answer["code"] in VERDICTS):
        return None if case.may_succeed else "accepted"
    if "Unknown flag in XLA_FLAGS" in answer["err"]:
        return None  # XLA ends the process, with a line
    if answer["code"] not in EXPECTED:
        return f"exit code {answer['code']}: {answer['err'][-200:]}"
    lines = [line for line in answer["err"].splitlines() if line.startswith("error: ")]
    usage = "Usage:" in answer["err"] or case.arguments[0] == "devices"  # which reports it
    if len(lines) != 1 and not usage:
        return f"{len(lines)} lines of error: {answer['err'][-300:]}"
    if lines and len(lines[0]) > LONGEST:
        return f"a line of {len(lines[0])}: {lines[0][:200]}"
    return None


@pytest.mark.slow
@pytest.mark.drawn
@pytest.mark.timeout(600)
@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.__name__)
def test_bad_input_ends_in_a_line(part, tmp_path):
    files, here = tmp_path / "files", tmp_path / "here"
    files.mkdir(), here.mkdir()
    worker, wrong, count, longest, most = Worker(here), [], 0, 0.0, 0
    told = {"cache", "__pycache__"}  # where files may be made
    try:
        for case in part(files, random.Random(f"{part.__name__} {SEED}")):
            count += 1
            told.update(case.environment.values())
            if count % 100 == 0:  # programs stay in its memory
                worker.end()
            if ONLY not in case.about:
                continue
            answer = worker.ask(case)
            longest, most = max(longest, answer.get("seconds", 0)), max(most, answer.get("bytes", 0))
            found = problem(case, answer)
            if found:
                wrong.append(f"{case.about}\n    {case.arguments[0]}: {found}")
                print(wrong[-1], file=sys.stderr, flush=True)
    finally:
        worker.end()
    used = f"{longest:.1f} s and {most / 2**20:.0f} MB at most"
    print(f"{part.__name__}: {count} cases, {len(wrong)} wrong, {used}")
    assert not wrong, f"{len(wrong)} of {count}:\n" + "\n".join(wrong)
    left = [path for path in here.iterdir() if path.name not in told]
    assert not left and not (files / "never").exists()
    assert count >= PARTS[part]


def test_there_are_cases_enough():
    assert sum(PARTS.values()) >= 1500
