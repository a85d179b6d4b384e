"""Tests of compilers and of plans share what was compiled, and leave the user's cache alone."""

import subprocess
import sys
import textwrap

import pytest

from chipwise.compile import processes
from chipwise.compile.processes import Compiler


@pytest.fixture(scope="session", autouse=True)
def cache_home(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture
def child(monkeypatch, tmp_path):
    """Puts a script in the compiler's place: `run(code)`. In it, `begin(r)` and `done(r)` are what the child
    says of a request `r` of `requests`. Counts how often it was started."""
    for platform in ("tpu", "cuda"):
        monkeypatch.setitem(
            processes.COMPILERS, platform, lambda platform=platform: Compiler(platform, "0.0")
        )
    starts = tmp_path / "starts"
    starts.write_text("")
    real = subprocess.Popen

    def run(code):
        script = tmp_path / "child.py"
        script.write_text(
            textwrap.dedent(
                f"""
                import json, os, pathlib, signal, sys
                open({str(starts)!r}, "a").write("x")
                input()
                requests = json.loads((pathlib.Path(sys.argv[1]) / "requests.json").read_text())
                def say(r, answer):
                    print(json.dumps(dict(key=r["key"], answer=answer)), flush=True)
                def begin(r): say(r, None)
                def done(r): say(r, dict(name=r["name"], temp_bytes=7, problem=None, notes=[]))
                """
            )
            + textwrap.dedent(code)
        )

        def start(arguments, **options):
            return real([sys.executable, str(script), arguments[-1]], **options)

        monkeypatch.setattr(processes.subprocess, "Popen", start)
        return lambda: len(starts.read_text())

    return run
