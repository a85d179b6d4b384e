"""Compares published peaks of training's memory with `chipwise plan` for the same model on the same device.

    python -m benchmarks.plan_accuracy.peaks          # every row without an answer, and the page's section
    python -m benchmarks.plan_accuracy.peaks --page   # ask nothing

Run from the repository's root. `peaks.csv` has the rows: the `model`, a folder of `published_models`
or a built-in recipe; the `rank` of its adapters, empty where all weights are trained; the other arguments of
`chipwise plan`; the `peak` of one device with what was `counted`. `peaks.json` has the answers.
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
from typing import Any

import chipwise as cw
from chipwise.base.files import replace_file
from chipwise.deploy.fine_tuning import fine_tuning
from chipwise.recipes.load import load

from .rows import FOLDER

MODELS = FOLDER.parent / "published_models"
ANSWERS, PAGE = FOLDER / "peaks.json", FOLDER / "plan_accuracy.md"
GB = {"GB": 1.0, "GiB": 1.024**3, "MiB": 1.024**2 / 1000}
MARK, END = "<!-- peaks -->", "<!-- end of peaks -->"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--page", action="store_true", help="ask nothing, write the section")
    options = parser.parse_args()
    answers = json.loads(ANSWERS.read_text(encoding="utf-8")) if ANSWERS.exists() else {}
    for row in [] if options.page else rows():
        if (asked := command(row)) not in answers:
            answers[asked] = needed(row)
            replace_file(ANSWERS, json.dumps(answers, indent=0) + "\n", "pack-unwritable")
            print(asked, answers[asked], flush=True)
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(MARK)
    after = rest.partition(END)[2]
    section = "\n".join([MARK, "", *table(answers), "", END])
    replace_file(PAGE, f"{before}{section}{after}", "pack-unwritable")


def rows() -> list[dict[str, str]]:
    with (FOLDER / "peaks.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def spec(row: dict[str, str]) -> str:
    """The first argument of `chipwise plan`, from the repository's root."""
    known = (MODELS / row["model"]).is_dir()
    return f"benchmarks/published_models/{row['model']}" if known else row["model"]


def command(row: dict[str, str]) -> str:
    settings = "".join(f" --set {setting}" for setting in row["settings"].split())
    adapters = f" --lora {row['rank']}" if row["rank"] else ""
    return f"chipwise plan {spec(row)}{settings}{adapters} --on {row['on']}"


def recipe(row: dict[str, str]) -> cw.Recipe:
    settings, name = row["settings"].split(), row["model"]
    if (MODELS / name).is_dir():
        rank = int(row["rank"]) if row["rank"] else None
        return fine_tuning(str(MODELS / name), settings, rank=rank)
    return load(name, settings)


def needed(row: dict[str, str]) -> dict[str, Any]:
    """What a device needs by the plan, in GB, and why it does not run there, if so."""
    (plan,) = cw.plan(recipe(row), [row["on"]], measure_feed=False)
    told = {"problem": plan.problem and plan.problem.code}
    return told if plan.memory is None else told | {"GB": round(plan.memory.needed / 1e9, 2)}


def table(answers: dict[str, dict[str, Any]]) -> list[str]:
    lines = [
        "| model | trained | measured, GB | planned, GB | planned / measured | counted | note | command |",
        "|---|---|--:|--:|--:|---|---|---|",
    ]
    ratios = []
    for row in rows():
        answer = answers.get(command(row), {})
        measured = float(row["peak"]) * GB[row["unit"]]
        planned, ratio = "-", answer.get("problem") or "not asked"
        if "GB" in answer:
            ratios.append(answer["GB"] / measured)
            beyond = ", does not fit" * (answer.get("problem") == "no-batch-fits")
            planned, ratio = f"{answer['GB']:.1f}", f"{ratios[-1]:.2f}{beyond}"
        trained = f"rank {row['rank']}" if row["rank"] else "all"
        source = f"[{row['model']}]({row['source'].split()[0]})"
        cells = [source, trained, f"{measured:.1f}", planned, ratio, row["counted"], row["note"]]
        lines.append(f"| {' | '.join(cells)} | `{command(row)}` |")
    if ratios:
        near = sum(4 / 5 <= ratio <= 5 / 4 for ratio in ratios)
        commands = len({command(row) for row in rows()})
        lines += [
            "",
            f"{len(ratios)} peaks of {commands} commands: planned / measured is "
            f"{statistics.median(ratios):.2f} in the median, from {min(ratios):.2f} to {max(ratios):.2f}; "
            f"{near} are within a quarter.",
        ]
    return lines


if __name__ == "__main__":
    main()
