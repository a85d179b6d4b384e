"""Compares published training throughputs with `chipwise plan` for the same recipe on the same chips.

    python -m benchmarks.plan_accuracy                        # every row without an answer, and the page
    python -m benchmarks.plan_accuracy --rows 35,36 --again   # these, asked anew
    python -m benchmarks.plan_accuracy --chips TPU --use held-out --family bert
    python -m benchmarks.plan_accuracy --page                 # ask nothing

Run from the repository's root. Each answer is stored in `results.json` at once, so the same command continues
after a stop; compiled programs are in plan's cache. The page and its picture are made from these answers.
"""

from __future__ import annotations

import argparse
import json
import time
from importlib import metadata
from typing import Any

import chipwise as cw
from chipwise.base.errors import ChipwiseError
from chipwise.base.files import replace_file

from . import page
from .rows import FOLDER, Row, rows

RESULTS = FOLDER / "results.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", help="such as 35,36: these alone")
    parser.add_argument("--chips", choices=("TPU", "GPU"))
    parser.add_argument("--use", choices=("held-out", "fit"))
    parser.add_argument("--family", help="of nets, such as resnet")
    parser.add_argument("--again", action="store_true", help="ask also where there is an answer")
    parser.add_argument("--page", action="store_true", help="ask nothing, write the page")
    options = parser.parse_args()
    numbers = {int(word) for word in options.rows.split(",")} if options.rows else None
    answers = stored()
    for row in [] if options.page else rows(options.use, options.chips, unmet=True):
        asked = row.use != "apart" and (numbers is None or row.row in numbers)
        if not asked or options.family not in (None, row.family):
            continue
        if row.row not in answers or options.again:
            same = (
                None
                if options.again
                else next((a for a in answers.values() if a["command"] == row.command), None)
            )
            answers[row.row] = same or ask(row)
            save(answers)
            print(f"{row.row:4d} {row.model} on {row.on}: {shown(row, answers[row.row])}", flush=True)
    page.write(FOLDER, rows(), answers)


def stored() -> dict[int, dict[str, Any]]:
    """The answers by row, without answers to an older version of the row."""
    kept = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    questions = {row.row: row.command for row in rows(unmet=True) if row.use != "apart"}
    return {int(n): a for n, a in kept.items() if questions.get(int(n)) == a["command"]}


def save(answers: dict[int, dict[str, Any]]) -> None:
    lines = (f'"{row}": {json.dumps(answers[row])}' for row in sorted(answers))
    replace_file(RESULTS, "{\n" + ",\n".join(lines) + "\n}\n", "pack-unwritable")


def ask(row: Row) -> dict[str, Any]:
    """The answer of `row.command`: throughputs of all devices; seconds and
    FLOPs of a step on one device; seconds of the parts of the whole `run`."""
    answer: dict[str, Any] = {"command": row.command, "jax": metadata.version("jax")}
    start = time.monotonic()
    try:
        every = row.eval_every or "1ep"
        (plan,) = cw.plan(row.load(), [row.on], exact=row.exact, eval_every=every)
    except ChipwiseError as error:
        return answer | {"problem": error.code, "text": str(error)}
    answer |= {"asked_seconds": round(time.monotonic() - start)}
    answer |= {"flops": plan.flops_per_step_per_device, "devices": plan.devices}
    if plan.memory is not None:
        answer |= {"memory_GB": round(plan.memory.needed / 1e9, 2)}
    if plan.problem is not None or plan.examples_per_second is None:
        return answer | {"problem": plan.problem and plan.problem.code, "text": str(plan.problem)}
    speed = plan.examples_per_second
    numbers = {"value": speed.value, "low": speed.low, "high": speed.high}
    answer |= {name: float(f"{number:.5g}") for name, number in numbers.items()}
    parts = {name: float(f"{seconds:.4g}") for name, seconds in plan.step_parts.items()}
    run = {name: float(f"{seconds:.4g}") for name, seconds in plan.seconds.items()}
    return answer | {"bound": plan.bound, "parts": parts, "run": run}


def shown(row: Row, answer: dict[str, Any]) -> str:
    if "value" not in answer:
        return answer["text"]
    predicted = page.Prediction(row, answer)
    return f"{predicted.throughput[0]:.4g} of {row.measured:.4g} examples/s, ratio {predicted.ratio:.2f}"


if __name__ == "__main__":
    main()
