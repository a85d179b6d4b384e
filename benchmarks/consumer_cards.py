"""Compiles `digits` for the cards that people own, and two larger nets for some of them. Compares the order
of cards in each table of published training throughputs with the order that `chipwise plan` gives.

    python benchmarks/consumer_cards.py            # what has no answer yet, and the page: about an hour
    python benchmarks/consumer_cards.py --page     # ask nothing

Run from the repository's root, with `pip install 'chipwise[plan-gpu]'`. `consumer_cards.csv` has the
published rows, `consumer_cards.json` the answers. Nothing was fitted to these rows.
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
from importlib import metadata
from pathlib import Path
from typing import Any

import chipwise as cw
from chipwise.base.files import replace_file
from chipwise.chips import CHIPS, named
from chipwise.recipes.load import load

FOLDER = Path(__file__).parent
ANSWERS, PAGE = FOLDER / "consumer_cards.json", FOLDER / "consumer_cards.md"
RECIPES = FOLDER / "plan_accuracy" / "recipes"
REFERENCE = "rtx-3090"  # in every table: speeds in terms of it may be compared across tables

GENERATIONS = ("8.6", "8.9", "10.3", "12.0")  # of consumer and workstation cards, and the newest
CARDS = [c.names[0] for c in CHIPS if c.compute_capability in GENERATIONS or c.names[0] in ("a30", "gh200")]
NETS = {  # with a batch that fits 8 GB
    "digits": (),
    "vit-s16": ("batch=64", "replicas=1"),
    "gpt2-124m": ("batch=4", "replicas=1"),
}

SOURCES = {
    "lambda": "https://github.com/lambdal/deeplearning-benchmark, pytorch/results at aa5addb6, the runs "
    "named `*_resnet50_AMP`: NVIDIA's DeepLearningExamples, `train.total_ips`; batches of its configurations",
    "insights": "https://github.com/xiaoran007/GPU-Insights, docs-src/public/data/benchmark-data.json at "
    "f4f228e: a score that is 20 times the images a second, since its launcher runs two epochs",
    "nikolas2022": "timm's benchmark.py by https://github.com/NikolasEnt/NikolasEnt.github.io, "
    "_posts/2022-11-30-Four-gens-of-Nvidia-GPUs-compared.md at 182fbed4",
    "nikolas2025": "the same, _posts/2025-02-17-RTX5090-Benchmark.md at 0c448eda",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--page", action="store_true", help="ask nothing, write the page")
    parser.add_argument("--only", choices=("order", "compile"), help="one half of it")
    options = parser.parse_args()
    answers = json.loads(ANSWERS.read_text("utf-8")) if ANSWERS.exists() else {}
    for spec, settings, cards in () if options.page else asked(options.only):
        missing = [card for card in cards if key(spec, settings, card) not in answers]
        if not missing:
            continue

        def keep(plan: cw.Plan, spec: str = spec, settings: tuple[str, ...] = settings) -> None:
            answers[key(spec, settings, plan.target)] = answer(plan)
            lines = (f"{json.dumps(k)}: {json.dumps(answers[k])}" for k in sorted(answers))
            replace_file(ANSWERS, "{\n" + ",\n".join(lines) + "\n}\n", "pack-unwritable")
            print(key(spec, settings, plan.target), answer(plan), flush=True)

        cw.plan(load(spec, settings), missing, measure_feed=False, ready=keep)
    replace_file(PAGE, page(answers), "pack-unwritable")


def rows() -> list[dict[str, str]]:
    with (FOLDER / "consumer_cards.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def asked(only: str | None) -> list[tuple[str, tuple[str, ...], list[str]]]:
    """Recipes with their settings and cards, each to be planned in one call."""
    order: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for row in rows():
        order.setdefault((spec_of(row), tuple(row["settings"].split())), []).append(row["card"])
    published = [(*question, cards) for question, cards in order.items()]
    compiled = [(net, settings, CARDS) for net, settings in NETS.items()]
    return {"order": published, "compile": compiled}.get(only or "", compiled + published)


def spec_of(row: dict[str, str]) -> str:
    return f"{RECIPES.relative_to(FOLDER.parent)}/{row['recipe']}"


def key(spec: str, settings: tuple[str, ...], card: str) -> str:
    return " ".join((spec, *settings, "on", card))


def answer(plan: cw.Plan) -> dict[str, Any]:
    """Plain values of a plan: examples a second with their interval, or why there are none."""
    told: dict[str, Any] = {"jax": metadata.version("jax"), "problem": plan.problem and plan.problem.code}
    if plan.memory is not None:
        told["memory_GB"] = round(plan.memory.needed / 1e9, 2)
    if plan.examples_per_second is not None:
        speed = plan.examples_per_second
        told |= {n: float(f"{getattr(speed, n):.4g}") for n in ("value", "low", "high")}
    return told


def ranks(values: list[float]) -> list[float]:
    """The ranks from 1, equal values having the mean of theirs."""
    return [sum(other < value for other in values) + (values.count(value) + 1) / 2 for value in values]


def rank_correlation(left: list[float], right: list[float]) -> float:
    """Spearman's: Pearson's of the ranks."""
    return statistics.correlation(ranks(left), ranks(right))


def page(answers: dict[str, dict[str, Any]]) -> str:
    planned = {}
    for row in rows():
        told = answers.get(key(spec_of(row), tuple(row["settings"].split()), row["card"]), {})
        planned[row["table"], row["card"]] = told
    known = [row for row in rows() if "value" in planned[row["table"], row["card"]]]
    parts = [INTRODUCTION, *compiled_lines(answers), "## Order", ""]
    relative: dict[str, tuple[float, float]] = {REFERENCE: (1.0, 1.0)}
    for table in dict.fromkeys(row["table"] for row in rows()):
        some = sorted((r for r in known if r["table"] == table), key=lambda r: -float(r["measured"]))
        parts += [f"### {table}", "", HEAD]
        pairs = []
        for row in some:
            told, measured = planned[table, row["card"]], float(row["measured"])
            pairs.append((measured, told["value"]))
            inside = "yes" if told["low"] <= measured <= told["high"] else "no"
            numbers = f"{measured:,.0f} | {told['value']:,.0f} | {told['value'] / measured:.2f} | {inside}"
            batch = row["settings"].split("batch=")[1].split()[0]
            parts.append(f"| {row['card']} | {batch} | {numbers} | {row['note']} |")
        missing = [row for row in rows() if row["table"] == table and row not in known]
        for row in missing:
            told = planned[table, row["card"]]
            why = told.get("problem", "not asked")
            parts.append(f"| {row['card']} | | {row['measured']} | {why} | | | {row['note']} |")
        if len(pairs) > 2:
            text = f"{rank_correlation(*map(list, zip(*pairs, strict=True))):.2f}"
            parts += ["", f"Rank correlation of {len(pairs)} cards: {text}."]
        used = dict.fromkeys(row["source"].split(" ")[0] for row in rows() if row["table"] == table)
        parts += ["", *(f"Source: {SOURCES[name]}." for name in used), ""]
        base = {row["card"]: pair for row, pair in zip(some, pairs, strict=True)}.get(REFERENCE)
        for row, pair in zip(some, pairs, strict=True) if base else ():
            if "GeForce" in named(row["card"]).device_kinds[0]:
                relative.setdefault(row["card"], (pair[0] / base[0], pair[1] / base[1]))
    return "\n".join([*parts, *together(relative)])


HEAD = """| card | batch | measured | planned | planned / measured | inside the interval | |
|---|--:|--:|--:|--:|---|---|"""

INTRODUCTION = f"""# Cards that people own

Written by `python benchmarks/consumer_cards.py` with jax {metadata.version("jax")}. Speeds are examples a
second of training; nothing was fitted to these rows. timm's own tables of training have one card of this
kind, the RTX 3090; its program was run on three by others. No table found has eight GeForce cards, so three
are joined below by the RTX 3090, which all have.
"""

COMPILED = """## Compiled

Examples a second and the memory of one device, by the card's own compiler; no GPU was there. The larger nets
were compiled for some cards only: not for those that say "not asked".
"""

TOGETHER = """### GeForce cards of all tables

Times the RTX 3090 of the same table; of a card in two tables, the first.

| card | measured | planned | ratio |
|---|--:|--:|--:|"""


def compiled_lines(answers: dict[str, dict[str, Any]]) -> list[str]:
    """Each net on each card: examples a second, or why it does not run."""
    head = [f"{net} {' '.join(settings)}".strip() for net, settings in NETS.items()]
    lines = [COMPILED, f"| card | {' | '.join(head)} |", "|---" + "|--:" * len(head) + "|"]
    for card in CARDS:
        cells = []
        for net, settings in NETS.items():
            told = answers.get(key(net, settings, card), {"problem": "not asked"})
            cell = told["problem"] or f"{told['value']:,.0f} ({told['memory_GB']:.1f} GB)"
            cells.append(cell)
        lines.append(f"| {card} | {' | '.join(cells)} |")
    done = (f"`{net}` for {fine} of {asked}" for net, (fine, asked) in counts(answers).items())
    return [*lines, "", f"Compiled, and fit: {', '.join(done)} cards asked, of {len(CARDS)} here.", ""]


def counts(answers: dict[str, dict[str, Any]]) -> dict[str, tuple[int, int]]:
    """For how many cards each net was compiled and fits, and of how many that was asked."""
    found = {}
    for net, settings in NETS.items():
        keys = (key(net, settings, card) for card in CARDS)
        problems = [answers[one]["problem"] for one in keys if one in answers]
        found[net] = problems.count(None), len(problems)
    return found


def together(relative: dict[str, tuple[float, float]]) -> list[str]:
    """The GeForce cards of all tables, each against the RTX 3090 of its own table."""
    order = sorted(relative, key=lambda card: -relative[card][0])
    measured, planned = map(list, zip(*(relative[card] for card in order), strict=True))
    lines = [TOGETHER]
    for card, one, other in zip(order, measured, planned, strict=True):
        lines.append(f"| {card} | {one:.2f} | {other:.2f} | {other / one:.2f} |")
    agreed = rank_correlation(measured, planned) if len(order) > 2 else float("nan")
    return [*lines, "", f"Rank correlation of {len(order)} cards: {agreed:.2f}.", ""]


if __name__ == "__main__":
    main()
