"""A campaign of faults: a run in which a device flips a bit, once or always, and what `--verify` makes of it.

    python benchmarks/faults.py > benchmarks/faults.md

Digits on four simulated devices, 200 steps, a checkpoint each 40 and a row each 10. All runs share the
compiled programs. A fault is one flipped bit, at a random place, from a random step on, on a random device:

    replica      in the vector that it computes of its replicas, also when it computes another's
    parameters   in its copy, after the step
    optimizer    in its copy of the optimizer's state, after the step
    sum          in its copy of the sum of all replicas
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import itertools
import os
import statistics
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4"
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import chipwise as cw
from chipwise.base.errors import DeviceFault, DivergedError
from chipwise.machine.arithmetic import fixed
from chipwise.run.folder.checkpoint import Checkpoints
from chipwise.run.folder.checkpointing import Saver
from chipwise.run.folder.early_stopping import EarlyStopping
from chipwise.run.folder.ledger import Ledger
from chipwise.run.folder.run_folder import RunFolder
from chipwise.run.log import Log
from chipwise.run.meter import Meter
from chipwise.run.on import On
from chipwise.run.progress import Reporter
from chipwise.run.run_schedule import Agenda
from chipwise.run.session import Session
from chipwise.run.training_loop import _train
from chipwise.run.verify import Verifier

DEVICES, STEPS, SAVES, ROWS = 4, 200, 40, 10
PARTS = ("replica", "parameters", "optimizer", "sum")
SHARES = (1.0, 0.1, 0.01)


@dataclasses.dataclass
class Fault:
    part: str
    always: bool
    device: int
    step: int
    place: float  # in the array, from 0 to 1
    bit: int
    done: bool = False

    def now(self, step: int) -> bool:
        due = step >= self.step if self.always else step == self.step and not self.done
        self.done = self.done or due
        return due


@jax.jit
def _flip(values, place, bit):
    words = lax.bitcast_convert_type(values, jnp.uint32).reshape(-1)
    words = words.at[place].set(words[place] ^ (jnp.uint32(1) << bit))
    return lax.bitcast_convert_type(words.reshape(values.shape), values.dtype)


class Faulty:
    """Makes the devices of a session faulty, as `fault` says."""

    def __init__(self, session: Session):
        self.session, self.fault, programs = session, None, session.programs
        replicas, self._step, self._summed = (
            programs.compiled["replica"],
            programs.step,
            programs.state_layout._summed,
        )
        programs.compiled["replica"] = [self._replica(g, run) for g, run in enumerate(replicas)]
        programs.step, programs.state_layout._summed = self.step, self.summed

    def flipped(self, values):
        place = int(self.fault.place * values.size)
        return _flip(values, np.int32(place), np.uint32(self.fault.bit))

    def _due(self, part: str, step: int) -> bool:
        return self.fault is not None and self.fault.part == part and self.fault.now(step)

    def _replica(self, g, run):
        def computed(*given):
            made = run(*given)
            if (
                self.fault is not None
                and g == self.fault.device
                and self._due("replica", self.session.step + 1)
            ):
                return jax.tree.map(self.flipped, made)
            return made

        return computed

    def summed(self, vectors):
        total = self._summed(vectors)
        if not self._due("sum", self.session.step + 1):
            return total
        parts = self.session.placement.split(total)
        parts[self.fault.device] = self.flipped(parts[self.fault.device])
        return jax.make_array_from_single_device_arrays(total.shape, total.sharding, parts)

    def step(self, carry, *given):
        carry, token = self._step(carry, *given)
        for part, name in (("parameters", "params"), ("optimizer", "optimizer")):
            if self._due(part, self.session.step + 1):
                state = carry[self.fault.device]
                leaves, structure = jax.tree.flatten(getattr(state, name))
                largest = max(range(len(leaves)), key=lambda i: leaves[i].size)
                leaves[largest] = self.flipped(leaves[largest])
                changed = {name: jax.tree.unflatten(structure, leaves)}
                carry[self.fault.device] = dataclasses.replace(state, **changed)
        return carry, token


class Watched(Verifier):
    """A verifier that notes how many steps each going back costs."""

    def __init__(self, session: Session, share: float):
        super().__init__(session.programs, share)
        self.session, self.returns = session, []
        self.saver: Saver

    def go_on(self, before) -> None:
        newest = max(self.saver._checkpoints.steps(), default=0)
        self.returns.append((self.session.step, newest))
        super().go_on(before)


def trained(session: Session, folder: Path, share: float) -> dict:
    """A run as `fit` makes it. *Returns* what became of it."""
    recipe, reporter = session.recipe, Reporter("silent")
    agenda = Agenda.of(recipe.clock, None, f"{ROWS}st", f"{SAVES}st", None, keep=f"{SAVES}st")
    best, meter, stop = (
        EarlyStopping(recipe, "", None),
        Meter(recipe.batch),
        SimpleNamespace(reached=lambda: False, alone=False),
    )
    session.verifier, error = Watched(session, share), None
    with RunFolder.opened(folder, session, False) as run:
        session.verifier.saver = saver = Saver(session, run, meter, agenda, best)
        session.begin(saver.restore(reporter), last=agenda.last)
        session.verifier.returns.clear()
        log = Log(session, meter, reporter, run, Ledger(session, run, saver, agenda))
        try:
            with log.divergence(saver.newest):
                for _ in log.undoing(lambda: _train(session, agenda, log, saver, stop), agenda.last):
                    pass
                saver.save_last()
        except (DeviceFault, DivergedError) as caught:
            error = caught
        saver.close()
    kept = {}
    with contextlib.closing(Checkpoints(folder / "checkpoints", read_only=True)) as checkpoints:
        for step in checkpoints.steps():
            about = checkpoints.about(step)
            kept[step] = about["digest"], about["verified"]["step"]
    return {"error": error, "kept": kept, "at": session.step, "verifier": session.verifier}


def outcome(made: dict, fault: Fault, sound: dict) -> dict:
    """What is counted of a run."""
    error, verifier = made["error"], made["verifier"]
    groups = None if error is None else error.facts.get("groups")
    lost = sum(at - newest for at, newest in verifier.returns)
    if error is not None:
        lost += made["at"] - max(made["kept"], default=0)
    elif verifier.faults:
        groups = verifier.faults[0]["groups"]
    found = verifier.returns[0][0] if verifier.returns else made["at"]
    wrong = [step for step, (digest, _) in made["kept"].items() if digest != sound[step]]
    return {
        "found": groups is not None,
        "named": groups == [fault.device],
        "after": found - fault.step,
        "lost": lost,
        "how": error.code if error is not None else "passed" if groups else "not found",
        "wrong": len(wrong),
        "said": sum(made["kept"][step][1] >= fault.step for step in wrong),
    }


HEAD = """# Flipped bits, and what finds them

`python benchmarks/faults.py`: JAX {jax}, digits on {devices} simulated CPU devices, {steps} steps,
a checkpoint every {saves} and a row of the ledger every {rows}. {total} runs, each with one fault: a bit of
what a device holds is flipped, at a random place, in a random step, or in every step from there on.

Wrong checkpoints are those that a run left whose bytes are not those of a run without faults; the last column
counts those of them that state that they are verified up to the faulty step.

| `--verify` | in | when | faults | found | device named | after steps | lost | wrong saves | "verified" |
|---|---|---|---|---|---|---|---|---|---|"""

TAIL = """
**What was not found, and why.**

* At 100 %: a bit that rounding or a larger number swallowed before it changed anything; no checkpoint is
  wrong.
* A replica that is computed wrongly once is found if it was drawn: `--verify 10%` finds one in ten. A
  device that computes wrongly each time is found at every share, and the run goes back to before it did.
* A wrong bit in one device's parameters also makes its gradient wrong, which all devices then add. If the
  bit itself is gone again at the next row (rounded away, or flipped back by the next flip), the devices
  agree, on wrong bits: only a comparison of replicas in between finds it.
* A flipped exponent can make the loss NaN before the next row, and the parameters of all devices with it:
  the run ends as one that diverged (`loss-not-finite`), and no device is named.
* With a sharded optimizer, a device's part of the sum and of the optimizer's state is on no other device:
  not in this campaign, and not found.
"""


def table(found: dict) -> None:
    about = {"devices": DEVICES, "steps": STEPS, "saves": SAVES, "rows": ROWS, "jax": jax.__version__}
    print(HEAD.format(total=sum(map(len, found.values())), **about))
    order = sorted(found, key=lambda one: (-one[0], PARTS.index(one[1]), one[2]))
    for (share, part, always), all_of in ((one, found[one]) for one in order):
        seen = [one for one in all_of if one["found"]]

        def median(name: str, seen: list = seen) -> str:
            return f"{statistics.median(one[name] for one in seen):g}" if seen else "-"

        cells = f"{share:.0%}", part, "always" if always else "once", len(all_of), len(seen)
        cells += sum(one["named"] for one in seen), median("after"), median("lost")
        cells += sum(one["wrong"] for one in all_of), sum(one["said"] for one in all_of)
        print("|", " | ".join(map(str, cells)), "|")
    how = collections.Counter(
        (f"{share:.0%}", one["how"]) for (share, *_), ones in found.items() for one in ones
    )
    print("\n| --verify | what became of the run | runs |\n|---|---|---|")
    for (share, code), count in sorted(how.items(), key=lambda one: (-float(one[0][0][:-1]), -one[1])):
        print(f"| {share} | {code} | {count} |")
    print(TAIL, end="")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--each", type=int, default=25, help="faults of each kind at each share")
    each, draw = parser.parse_args().each, np.random.default_rng(0)
    found = collections.defaultdict(list)
    recipe = cw.load("digits", [f"duration={STEPS}st"])
    with Session(recipe, On(devices=DEVICES)) as session, tempfile.TemporaryDirectory() as folder, fixed():
        session.compile()
        sound = {
            step: digest for step, (digest, _) in trained(session, Path(folder, "sound"), 0.0)["kept"].items()
        }
        faulty = Faulty(session)
        kinds = list(itertools.product(PARTS, (False, True), SHARES)) * each
        with contextlib.suppress(KeyboardInterrupt):  # then those so far
            for number, (part, always, share) in enumerate(kinds):
                device, step, bit = (int(draw.integers(n)) for n in (DEVICES, STEPS * 3 // 4, 32))
                faulty.fault = Fault(part, always, device, step + 1, float(draw.random()), bit)
                one = outcome(trained(session, Path(folder, str(number)), share), faulty.fault, sound)
                found[share, part, always].append(one)
                print(number, share, faulty.fault, one, file=sys.stderr, flush=True)
    table(found)


if __name__ == "__main__":
    main()
