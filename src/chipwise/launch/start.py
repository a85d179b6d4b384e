"""Checks a job's files with the place's own tool, if installed, and starts the job."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from ..errors import DeviceError, RecipeError
from ..machine.host_facts import installed
from ..words.facts import Fact, fact, texts
from .launch_job import LaunchJob
from .places import Place

SECONDS = 120
# SkyPilot parses the task in a separate process, since it logs and reads the user's configuration.
_SKY = "import sys, sky; sky.Task.from_yaml(sys.argv[1])"


def check(where: Place, folder: Path, files: Sequence[str]) -> list[Fact]:
    """Checks the files with the place's own tools: a fact `launch-checked` for each tool.

    Raises `RecipeError` if a tool refuses a file.
    """
    looked = []
    for name in files:
        command = _check(where.name, name)
        if command is None:
            continue
        tool, words = command
        try:
            done = subprocess.run(words, capture_output=True, text=True, timeout=SECONDS, cwd=folder)
        except (OSError, subprocess.TimeoutExpired):
            continue  # no verdict
        if done.returncode:
            lines = [line for line in (done.stderr + done.stdout).splitlines() if line.strip()]
            text = "{tool} refuses {file}: {reason}"
            reason = (lines or ["?"])[-1][:300]
            raise RecipeError("launch-refused-by-tool", text, tool=tool, file=name, reason=reason)
        looked.append(fact("launch-checked", tool=tool))
    return looked


def _check(place: str, file: str) -> tuple[str, list[str]] | None:
    """The tool that can check a file, and its command; `None` if none is installed."""
    if place == "skypilot" and installed("skypilot"):
        return "SkyPilot", [sys.executable, "-c", _SKY, file]
    if file.endswith(".sbatch") and _slurm_answers():
        return "sbatch --test-only", ["sbatch", "--test-only", file]
    if file.endswith((".sh", ".sbatch")) and shutil.which("bash"):
        return "bash -n", ["bash", "-n", file]
    return None


def _slurm_answers() -> bool:
    """Whether SLURM is installed and its cluster is up; otherwise `sbatch` refuses every file."""
    if not (shutil.which("sbatch") and shutil.which("sinfo")):
        return False
    try:
        return subprocess.run(["sinfo"], capture_output=True, timeout=SECONDS).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def start(where: Place, job: LaunchJob, folder: Path, files: Sequence[str]) -> None:
    """Starts the job with the place's tool, and shows its output.

    Raises `DeviceError` if the tool is missing or fails, `RecipeError` if a person must start the job.
    """
    if where.start is None or where.tool is None:
        text = "{place} is started by hand: upload {file} there. Leave --go out."
        raise RecipeError("launch-by-hand", text, place=where.name, file=folder / files[0])
    if shutil.which(where.tool) is None:
        remedies = texts("launch-tools")
        text = "{tool} is not installed here: {remedy}. Or copy the files to a machine that has it."
        raise DeviceError("launch-tool-missing", text, tool=where.tool, remedy=remedies[where.tool])
    command = where.start(job)
    code = subprocess.run(command, cwd=folder).returncode
    if code:
        text = "{command:list} ended with exit code {exit}. Its own message is above."
        raise DeviceError("launch-start-failed", text, command=command, exit=code)
