"""What a loop that tries edits and keeps the better ones keeps of edits that are worth nothing.

    python benchmarks/null_edits.py --for 20min > benchmarks/null_edits.md

In a git repository, `mine.py` is edited 200 times in ways that make it neither better nor worse, among them
other seeds and salts, and 20 times in ways that do. Each edit is judged as `chipwise referee mine.py:recipe
--here` judges it: the working tree against the last commit, all tries of a kind in one book. An edit is kept
on "better" or "faster". The same command continues where the last one ended; the edits are the same.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import platform
import random
import subprocess
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax

import chipwise as cw
from chipwise.machine.compilation_cache import cached_in
from chipwise.study.referee.sequential import FEWEST, interval

NULLS = 200
SPEND = 20.0  # seconds for an edit; the base's runs are shared
MINE = """import jax
import jax.numpy as jnp

import chipwise as cw

SALT = 0
WIDTH = 32
RATE = 0.05
MOMENTUM = 0.5


def init(key):
    weights = jax.random.uniform(jax.random.fold_in(key, SALT), (74 * WIDTH,), minval=-0.2, maxval=0.2)
    return {"a": weights[: 64 * WIDTH].reshape(64, WIDTH), "b": weights[64 * WIDTH :].reshape(WIDTH, 10)}, {}


def loss(params, state, batch, key, train):
    pixels = batch["image"].reshape(-1, 64).astype(jnp.float32) / 16
    hidden = jax.nn.relu(pixels @ params["a"])
    logits = hidden @ params["b"]
    values = cw.losses.softmax_cross_entropy(logits, batch["label"])
    return {"loss": cw.Sum.of(values)}, state


def recipe(seed: int = 0, batch: int = 64):
    data = cw.datasets.digits()
    task = cw.Task(init=init, loss=loss, train=data.train, eval=data.eval)
    optimizer = cw.sgd(lr=RATE, momentum=MOMENTUM)
    return cw.Recipe(name="mine", task=task, batch=batch, duration="40st", optimizer=optimizer, seed=seed)
"""


class Edit(NamedTuple):
    """A text of the file, and what replaces it."""

    kind: str
    old: str
    new: str

    def __call__(self, text: str) -> str:
        assert self.old in text, self
        return text.replace(self.old, self.new)


def null_edits(count: int = NULLS) -> Iterator[Edit]:
    """Edits that make nothing better: some compute the same, others draw again or round otherwise."""
    rng = random.Random(4)
    for number in range(count):
        salt, at, scale = rng.randrange(1, 1 << 30), rng.randrange(1, 63), 2 ** rng.randrange(1, 12)
        yield rng.choice(
            [
                Edit("first weights from another key", "SALT = 0", f"SALT = {salt}"),
                Edit(
                    "first weights from another key", "(key, SALT)", f"(jax.random.fold_in(key, {salt}), 1)"
                ),
                Edit("first weights turned round", "weights[: 64", f"jnp.roll(-weights, {salt % 2000})[: 64"),
                Edit("pixels in another order", "/ 16", f"[:, jnp.roll(jnp.arange(64), {at})] / 16"),
                Edit(
                    "a sum in two parts",
                    'pixels @ params["a"]',
                    f'pixels[:, :{at}] @ params["a"][:{at}] + pixels[:, {at}:] @ params["a"][{at}:]',
                ),
                Edit(
                    "a logit less", 'params["b"]\n', f'params["b"]\n    logits -= logits[:, :1] * {at / 8}\n'
                ),
                Edit(
                    "scaled and back", 'hidden @ params["b"]', f'(hidden * {scale}) @ params["b"] / {scale}'
                ),
                Edit("another default seed", "seed: int = 0", f"seed: int = {salt}"),
                Edit("a seed of its own", "seed=seed)", f"seed=seed + {salt % 1000 + 1})"),
                Edit("a comment", "def loss", f"# idea {number}\ndef loss"),
                Edit("a renamed value", "hidden", f"hidden_{number}"),
                Edit(
                    "dead code",
                    "    logits =",
                    f"    unused_{number} = jnp.square(hidden).sum()\n    logits =",
                ),
            ]
        )


def real_edits() -> Iterator[Edit]:
    for rate in ("0.02", "0.03", "0.04", "0.07", "0.1", "0.15"):
        yield Edit("rate", "RATE = 0.05", f"RATE = {rate}")
    for momentum in ("0", "0.3", "0.7", "0.9"):
        yield Edit("momentum", "MOMENTUM = 0.5", f"MOMENTUM = {momentum}")
    for width in (4, 8, 128, 512):
        yield Edit("width", "WIDTH = 32", f"WIDTH = {width}")
    for steps in (20, 30, 60, 80):
        yield Edit("steps", "40st", f"{steps}st")
    for batch in (16, 256):
        yield Edit("batch", "batch: int = 64", f"batch: int = {batch}")


@contextlib.contextmanager
def repository(folder: Path) -> Iterator[None]:
    """In a git repository with `mine.py`, committed."""
    folder.mkdir(parents=True, exist_ok=True)
    before = os.getcwd()
    os.chdir(folder)
    try:
        if not Path(".git").exists():
            Path("mine.py").write_text(MINE)
            who = ["-c", "user.name=a", "-c", "user.email=a@b"]
            for words in (["init", "-q"], ["add", "mine.py"], [*who, "commit", "-qm", "The recipe"]):
                subprocess.run(["git", *words], check=True, capture_output=True)
        yield
    finally:
        os.chdir(before)


def judged(edit: Edit, book: str, spend: float = SPEND) -> dict[str, Any]:
    """What the referee says of the edit, and the values of its pairs. Run it in `repository`."""
    Path("mine.py").write_text(edit(MINE))
    began = time.perf_counter()
    try:
        found = cw.referee.referee(
            "HEAD:mine.py:recipe",
            "mine.py:recipe",
            metric="eval/loss",
            spend=spend,
            run=book,
            on=cw.On(devices=1),
        )
        said = {"verdict": found.verdict, "values": list(found.values), "level": found.level}
        said |= {"predicted": found.predicted, "difference": found.difference}
    except cw.errors.RecipeError as error:
        said = {"verdict": f"refused: {error.code}", "values": []}
    return {**edit._asdict(), **said, "seconds": time.perf_counter() - began}


def could_decide(values: list, level: float) -> bool:
    """Whether the pairs are enough for a finite interval at this level, so that a verdict was possible."""
    return math.isfinite(interval([b - a for a, b in values], level)[1])


def ever_better(values: list, level: float) -> bool:
    """Whether a lone try at this level would have said "better" at any look."""
    differences = [b - a for a, b in values]
    looks = range(FEWEST, len(differences) + 1)
    return any(interval(differences[:n], level)[1] < 0 for n in looks)


def continued(file: Path, edits: list[Edit], book: str, until: float, spend: float) -> list[dict[str, Any]]:
    """The rows in `file`, to which are added those of further edits until the time is over."""
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    assert [row["new"] for row in rows] == [edit.new for edit in edits[: len(rows)]]
    for edit in edits[len(rows) :]:
        if time.monotonic() > until:
            break
        rows.append(judged(edit, book, spend))
        with file.open("a") as out:
            print(json.dumps(rows[-1]), file=out)
        print(len(rows), rows[-1]["kind"], rows[-1]["verdict"], len(rows[-1]["values"]), file=sys.stderr)
    return rows


def write(text: str) -> None:
    """Prints a paragraph."""
    print(textwrap.fill(" ".join(text.split()), 116, break_long_words=False, break_on_hyphens=False) + "\n")


def page(nulls: list[dict[str, Any]], reals: list[dict[str, Any]]) -> None:
    print("# Edits that are worth nothing\n")
    write(f"""`python benchmarks/null_edits.py`: CPU of kind {platform.machine()}, JAX {jax.__version__}. A
        small net on `digits`, 40 steps a run; each edit judged as `chipwise referee mine.py:recipe --here`
        does, all tries in one book, no pair after {SPEND:g} seconds. An edit is kept on "better" or
        "faster".""")
    kept = [row for row in nulls if row["verdict"] in ("better", "faster")]
    drawn = [row for row in nulls if row["values"] and row["difference"]]
    could = sum(could_decide(row["values"], row["level"]) for row in drawn)
    print(
        f"## {len(nulls)} of {NULLS} null edits were run, {len(kept)} kept; {could} could have been better\n"
    )
    distinct = len({(row["old"], row["new"]) for row in nulls})
    write(f"{distinct} of them differ in their text; the others continue an earlier try.")
    print("| kind | edits | kept | verdicts | pairs, most |")
    print("|---|---|---|---|---|")
    for kind in sorted({row["kind"] for row in nulls}):
        own = [row for row in nulls if row["kind"] == kind]
        verdicts = ", ".join(
            f"{n} {name}" for name, n in Counter(row["verdict"] for row in own).most_common()
        )
        most = max(len(row["values"]) for row in own)
        print(f"| {kind} | {len(own)} | {sum(row in kept for row in own)} | {verdicts} | {most} |")
    best = sum(row["values"][0][1] < row["values"][0][0] for row in drawn)
    long = [row for row in drawn if len(row["values"]) >= FEWEST]
    alone = sum(ever_better(row["values"], 0.05) for row in long)
    least = min(row["level"] for row in drawn)
    pairs = next(n for n in range(2, 100) if could_decide([(0, k) for k in range(n)], least))
    bits, refused = (sum(row["verdict"].startswith(kind) for row in nulls) for kind in ("same", "refused"))
    equal = len(nulls) - bits - refused - len(drawn)
    print()
    write(f"""Most could not have been kept: {bits} are the same to the bit, {equal} have equal mean losses,
        and {refused} were refused. Of the {len(drawn)} whose losses differ, {could} had enough pairs for a
        verdict at their level: only for these is it a finding that none was kept. The level falls with each
        try, here to {least:.1e}, at which the interval is infinite below {pairs} pairs, and {SPEND:g}
        seconds are often fewer.""")
    write(f"""At a level of 5 %, with a book for each, {len(long)} had enough pairs, {FEWEST} or more; {alone}
        of these would have been kept at any look.""")
    write(f"""{best} of the {len(drawn)} had the better loss with the first seed, which a loop without a
        referee keeps. All are compared with the same run of the base, whose draw decides how many.""")
    if not reals:
        return
    found = [row for row in reals if row["verdict"] in ("better", "worse")]
    print(f"## {len(reals)} edits that matter\n")
    write(f"In a book of their own, {3 * SPEND:g} seconds for each.")
    print("| edit | verdict | pairs, predicted | spent | difference of the loss | time |")
    print("|---|---|---|---|---|---|")
    for row in reals:
        about = f"| {row['old']} → {row['new']} | {row['verdict']} | {row['predicted'] or '-'} "
        about += f"| {len(row['values'])} | {row['difference']:+.4f} "
        print(f"{about}| {row['seconds']:.1f} s |")
    spent = [len(row["values"]) for row in found]
    print(f"\nFound: {len(found)} of {len(reals)}, with {min(spent)} to {max(spent)} pairs.")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--for", dest="minutes", default="20min", help="no edit begins after this time")
    parser.add_argument("--folder", default="build/null_edits", help="the repository, its runs and results")
    parser.add_argument("--first", choices=("nulls", "reals"), default="nulls", help="which begin")
    given = parser.parse_args()
    until = time.monotonic() + 60 * float(given.minutes.removesuffix("min"))
    with repository(Path(given.folder)), cached_in(Path(given.folder).absolute() / "programs"):
        kinds = {
            "nulls": (list(null_edits()), SPEND),
            "reals": (list(real_edits()), 3 * SPEND),
        }
        rows = {
            name: continued(Path(f"{name}.jsonl"), edits, f"runs/{name}", until, spend)
            for name, (edits, spend) in sorted(kinds.items(), key=lambda item: item[0] != given.first)
        }
    page(rows["nulls"], rows["reals"])
