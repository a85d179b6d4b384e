"""Measures this checkout beside another one, by turns, each time in a process of its own."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

Number = TypeVar("Number")
HERE = Path(__file__).parents[1]


def answer(checkout: Path, program: str, given: Any, **environment: str) -> Any:
    """What `program` answers with the code of `checkout`: the JSON of its line that begins with `answer`.

    The program's only argument is `given`, as JSON.
    """
    variables = os.environ | {"PYTHONPATH": str(checkout / "src"), "JAX_PLATFORMS": "cpu"} | environment
    command = [sys.executable, "-c", program, json.dumps(given)]
    said = subprocess.run(command, env=variables, capture_output=True, text=True)
    line = next((line for line in said.stdout.splitlines() if line.startswith("answer ")), None)
    if line is None:
        raise SystemExit(said.stderr)
    return json.loads(line.removeprefix("answer "))


def by_turns(
    other: Path, times: int, measure: Callable[..., Number], *given: Any
) -> tuple[list[Number], list[Number]]:
    """`measure(checkout, *given)` of `other` and of this checkout, each `times`."""
    before, now = [], []
    for _ in range(times):
        before.append(measure(other, *given))
        now.append(measure(HERE, *given))
    return before, now
