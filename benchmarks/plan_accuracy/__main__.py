"""Published training throughputs against predictions.

    python -m benchmarks.plan_accuracy                     # both parts, from the repository's root
    python -m benchmarks.plan_accuracy --only gpu          # minutes
    python -m benchmarks.plan_accuracy --only tpu --lines 35,36

Writes `results.json`, and from it `plan_accuracy.md` and `plan_accuracy.svg`, in its own folder. What is
not run keeps its last results. TPU programs are compiled once and kept in plan's cache.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from . import page
from .compare import Prediction, gpu, is_tpu, summary, tpu
from .rows import Row, rows

FOLDER = Path(__file__).parent
RESULTS = FOLDER / "results.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", choices=("tpu", "gpu"))
    parser.add_argument("--lines", help="of published.csv, such as 35,36: these alone")
    parser.add_argument("--cache", type=Path, help="of compiled programs; by default plan's own")
    parser.add_argument("--attention", choices=("kernel", "blocks"), default="kernel", help="see flash.py")
    options = parser.parse_args()
    every = rows(options.attention)
    lines = {int(word) for word in options.lines.split(",")} if options.lines else None
    wanted = [r for r in every if r.usable and (lines is None or r.line in lines)]
    made: list[Prediction] = []
    if options.only != "gpu":
        # A row at a time, so that an interrupted run keeps what it has in the cache and on the page.
        for row in (r for r in wanted if is_tpu(r)):
            made += _shown(row, tpu([row], options.cache))
            save(every, made)
    if options.only != "tpu":
        for row in (r for r in wanted if not is_tpu(r)):
            made += _shown(row, gpu(row))
        save(every, made)
    print(summary(made))


def _shown(row: Row, predictions: list[Prediction]) -> list[Prediction]:
    for p in predictions:
        text = p.problem if p.value is None else f"{p.value:.4g} of {p.measured:.4g}, ratio {p.ratio:.2f}"
        print(f"{row.line:4d} {row.label} on {row.chip}: {text} ({p.how})", flush=True)
    return predictions


def save(every: list[Row], made: list[Prediction]) -> None:
    """Merges predictions into `results.json` and writes the page. Drops rows that have gone or changed."""
    kept = [Prediction(**cells) for cells in json.loads(RESULTS.read_text())] if RESULTS.exists() else []
    usable = {r.line for r in every if r.usable}
    new = {p.line for p in made}
    merged = [p for p in [*kept, *made] if p.line in usable and (p.line not in new or p in made)]
    merged.sort(key=lambda p: (p.line, p.how != "family left out"))
    RESULTS.write_text(
        "[\n" + ",\n".join(json.dumps({"value": None, **p.as_json()}) for p in merged) + "\n]\n",
        encoding="utf-8",
    )
    page.write(FOLDER, every, merged)


if __name__ == "__main__":
    main()
