"""What a row of the ledger costs: steps with the digests of one, by turns with steps without.

    python benchmarks/ledger.py > benchmarks/ledger.md

On CPUs; random examples in the shapes of each recipe.
"""

from __future__ import annotations

import itertools
import statistics
import time

import jax

import chipwise as cw
from chipwise.engine.agenda import Agenda
from chipwise.engine.on import On
from chipwise.engine.session import Session

RECIPES = {"digits": 24, "mnist": 8}
"""Steps of a turn."""
TURNS = 9


def seconds(session: Session, steps: int, rows: bool) -> float:
    """A step's, with the digests of a row after each, or without."""
    session.watched = range(session.step + steps + 1) if rows else ()
    pending, began = None, time.perf_counter()
    for _ in range(steps):
        session.advance()
        if pending is not None:  # read a step late, as `fit` does
            session.programs.digests.read(pending)
        pending = session.digest() if rows else None
    session.wait()
    if pending is not None:
        session.programs.digests.read(pending)
    return (time.perf_counter() - began) / steps


def measured(name: str, steps: int, devices: int) -> tuple[float, float, float]:
    """The median seconds of a step without rows, the ratio of one with a row, and the share of steps that
    have one by default."""
    recipe = cw.load(name, ["duration=24ep"], synthetic=name != "digits")
    agenda = Agenda.of(recipe.clock, "1ep", None, None, None)
    share = sum(step in agenda.ledger for step in range(1, agenda.total + 1)) / agenda.total
    with Session(recipe, On(devices=devices)) as session:
        session.begin()
        for rows in (False, True):
            seconds(session, 2, rows)
        pairs = [[seconds(session, steps, rows) for rows in (False, True)] for _ in range(TURNS)]
    without = statistics.median(pair[0] for pair in pairs)
    return without, statistics.median(pair[1] / pair[0] for pair in pairs), share


def main() -> None:
    print("# What the ledger costs\n")
    print(f"`python benchmarks/ledger.py`: JAX {jax.__version__}, medians of {TURNS} alternating turns on")
    print(
        "simulated CPU devices of two cores that other processes used too: read the ratios. The default has a"
    )
    print("row when a run logs, evaluates or may save.\n")
    print("| recipe | devices | ms a step | with a row each step | steps with a row by default | default |")
    print("|---|---|---|---|---|---|")
    for (name, steps), devices in itertools.product(RECIPES.items(), (1, 4)):
        without, ratio, share = measured(name, steps, devices)
        each = ratio - 1
        cells = name, devices, f"{1e3 * without:.1f}", f"{each:+.1%}", f"{share:.1%}", f"{each * share:+.2%}"
        print("|", " | ".join(map(str, cells)), "|", flush=True)


if __name__ == "__main__":
    main()
