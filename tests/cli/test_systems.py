"""Systems that lack what Linux has: Windows' modules and signals, and file systems without locks."""

import os
import subprocess
import sys

import pytest
from PIL import Image

PROGRAM = """
import builtins, os, signal, subprocess, sys, warnings
import asyncio, multiprocessing.popen_spawn_posix, shutil, tempfile

kind, *commands = sys.argv[1:]
if kind == "windows":  # what the package and filelock import; the standard library here is that of Linux
    import_of = builtins.__import__

    def imported(name, globals=None, *rest, **more):
        importer = (globals or {}).get("__name__", "").partition(".")[0]
        if importer in ("chipwise", "filelock") and name in ("fcntl", "resource", "pwd", "termios", "grp"):
            raise ModuleNotFoundError(name)
        return import_of(name, globals, *rest, **more)

    builtins.__import__ = imported
    warnings.filterwarnings("ignore", "only soft file lock is available")
    for name in ("O_NOFOLLOW", "O_NONBLOCK", "O_DIRECTORY", "killpg", "geteuid", "nice", "pread"):
        delattr(os, name)
    for name in ("SIGKILL", "SIGHUP", "SIGUSR1", "SIGPIPE"):
        delattr(signal, name)
    subprocess.Popen.kill = lambda process: process.send_signal(9)
else:
    import errno, fcntl

    def without(*_):
        raise OSError(getattr(errno, kind), os.strerror(getattr(errno, kind)))

    fcntl.flock = without

from chipwise.cli import main

for command in commands:
    code = main(command.split())
    assert code == 0 or (code >= 10 and "referee" in command), (code, command)  # which answers by its code
"""
COMMANDS = (
    "train digits --run run --set duration=20st --stop-after 10st --quiet",
    "train digits --run run --set duration=20st --quiet",
    "predict run --out run.csv",
    "eval run",
    "export run --to safetensors --out run.safetensors",
    "pack photos packed",
    "sweep digits --run sweep --seeds 1 --set duration=2st --quiet",
    "referee digits --set lr=0.1 --run referee --spend 1s --metric eval/loss",
    "plan digits --on v5e-1",
)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["windows", "ENOLCK"])
def test_every_command_that_writes(tmp_path, kind):
    for name in "ab":
        (tmp_path / "photos" / name).mkdir(parents=True)
        for i in range(3):
            Image.new("RGB", (4, 4), (i, 0, 0)).save(tmp_path / "photos" / name / f"{i}.png")
    own = {
        "PYTHONPATH": os.pathsep.join(sys.path),
        "CHIPWISE_CACHE": str(tmp_path / "cache"),
    }
    command = [sys.executable, "-W", "error::ResourceWarning", "-c", PROGRAM, kind, *COMMANDS]
    done = subprocess.run(
        command, env=os.environ | own, cwd=tmp_path, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert not [*tmp_path.rglob("*.held")], "a lock outlives its process"
