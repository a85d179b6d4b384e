"""What a row of the ledger costs, and replicas that two devices compute: steps with it by turns with others.

    python benchmarks/ledger.py > benchmarks/ledger.md      # needs chipwise[plan] for chips that are not here

On CPUs, with random examples in the shapes of each recipe; and by the compilers of chips that are not here.
"""

from __future__ import annotations

import itertools
import statistics
import time

import jax
import numpy as np

import chipwise as cw
from chipwise.run.on import On
from chipwise.run.run_schedule import Agenda
from chipwise.run.session import Session
from chipwise.run.state_digest import word_sums
from chipwise.step.layout import Layout
from chipwise.step.step import Step

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


def verified(name: str, steps: int, devices: int, share: float) -> tuple[float, float]:
    """The replicas that were compared, of all, and the time that this added to that of the steps, of it."""
    recipe = cw.load(name, ["duration=48ep"], synthetic=name != "digits")
    with Session(recipe, On(devices=devices, verify="100%")) as session:
        session.begin()
        spent = {0.0: 0.0, share: 0.0}
        for warm in (share, 0.0, 1.0):
            session.verifier.share = warm
            seconds(session, 2, False)
        session.verifier.collect(session.step)
        before = session.verifier.replicas
        for _ in range(2 * TURNS):
            for each in spent:
                session.verifier.share = each
                spent[each] += seconds(session, steps, False)
            session.verifier.share = share
            session.verifier.collect(session.step)
        compared = (session.verifier.replicas - before) / (2 * TURNS * steps * recipe.replicas)
    return compared, spent[share] / spent[0.0] - 1


def compiled(name: str, on: str) -> tuple[float, float, float]:
    """Milliseconds of a step, of a row of the ledger, and of a compared replica's digests, as planned."""
    recipe = cw.load(name, synthetic=True)
    (plan,) = cw.plan(recipe, on=[on])
    specs = Step(recipe, Layout.of(recipe, 1)).specs()
    vector, state = specs["vector"], specs["state"]
    row = jax.tree.leaves((vector, state.params, state.frozen, state.state, state.optimizer, state.ema))

    def milliseconds(arrays: list) -> float:
        starts = jax.ShapeDtypeStruct((len(arrays),), np.uint32)
        return 1e3 * cw.compile.on(on, word_sums, arrays, starts).seconds.value

    return 1e3 * plan.step_seconds.value, milliseconds(row), 2 * milliseconds([vector])


def main() -> None:
    print("# What the ledger costs\n")
    print(f"`python benchmarks/ledger.py`: JAX {jax.__version__}, medians of {TURNS} alternating turns on")
    print("simulated CPU devices of two cores. The default has a")
    print("row when a run logs, evaluates or may save.\n")
    print("| recipe | devices | ms a step | with a row each step | steps with a row by default | default |")
    print("|---|---|---|---|---|---|")
    for (name, steps), devices in itertools.product(RECIPES.items(), (1, 4)):
        without, ratio, share = measured(name, steps, devices)
        each = ratio - 1
        cells = name, devices, f"{1e3 * without:.1f}", f"{each:+.1%}", f"{share:.1%}", f"{each * share:+.2%}"
        print("|", " | ".join(map(str, cells)), "|", flush=True)
    print("\n## Replicas that two devices compute\n")
    print(f"Sums of {2 * TURNS} alternating turns. The draw decides how many replicas are compared; the last")
    print("column is what these cost: the part of a step's time over their part of the replicas.\n")
    print("| recipe | devices | `--verify` | replicas compared | time added | of the share |")
    print("|---|---|---|---|---|---|")
    for (name, steps), devices, share in itertools.product(RECIPES.items(), (2, 4), (0.1, 0.5)):
        compared, added = verified(name, steps, devices, share)
        cells = name, devices, f"{share:.0%}", f"{compared:.1%}", f"{added:+.1%}", f"{added / compared:.2f}"
        print("|", " | ".join(map(str, cells)), "|", flush=True)
    print("\n## By the compilers of chips that are not here\n")
    print("| recipe | on | ms a step | ms a row | a row each step | ms of a replica's two digests |")
    print("|---|---|---|---|---|---|")
    for on in ("a100", "v5e-1"):
        step, row, digests = compiled("gpt2-124m", on)
        cells = "gpt2-124m", on, f"{step:.0f}", f"{row:.1f}", f"{row / step:+.2%}", f"{digests:.1f}"
        print("|", " | ".join(cells), "|", flush=True)


if __name__ == "__main__":
    cw.simulate(4)
    main()
