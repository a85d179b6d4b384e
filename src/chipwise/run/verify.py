"""Devices that check each other: replicas computed once more on another device, and compared.

In a drawn step, every device also computes a replica of another one, with the program that training
runs. Digests of both vectors are read when they are ready. Only rows and checkpoints wait for them.
All devices take part at once. Otherwise the rest would wait for the one that does, and a hundredth
of the replicas would cost several hundredths of the time.

Two vectors that differ do not show which device is wrong, and the step's parameters are gone. So
`fit` goes back to the checkpoint before. When it comes to the step again, every device computes the
replica:

    all agree            it happened once: the run goes on; the first digests tell the device
    a device differs     it computes wrongly: the run ends
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..base import DeviceFault, Say, fact, silent
from .folder.run_reader import number
from .placement import device_names
from .programs import Programs, Recheck
from .state_digest import digest_of

MOST = 5  # times that a process goes back: a device that faults more often is not sound
AHEAD = 64  # steps after which comparisons are read at the latest

Votes = dict[tuple[int, int], dict[int, set[str]]]
"""For each call of a group, the digests that each group computed for it. Groups are numbered among
all."""


class ReplicaDiffers(DeviceFault):
    """Two devices computed different bits for a replica. `Verifier` decides which is wrong when the
    step is computed again."""


class Verifier:
    """Draws the replicas that are computed twice, and compares them.

    *Arguments:* `share`: the share of the replicas, from 0 to 1.

    *Fields:*

    - `step`: the last step whose replicas were compared, and were equal.
    - `replicas`: the number compared so far.
    - `faults`: the faults that happened once.
    - `say`: called for each of these faults.
    """

    def __init__(self, programs: Programs, share: float):
        self.programs, self.placement, self.share = programs, programs.placement, share
        self.step, self.replicas, self.faults = 0, 0, list[dict[str, Any]]()
        self.say: Say = silent
        self._suspects: dict[int, Votes] = {}
        self._returns = 0

    def json(self) -> dict[str, Any]:
        """The entry for a checkpoint and a result."""
        return {name: getattr(self, name) for name in ("share", "step", "replicas", "faults")}

    def go_on(self, before: Any) -> None:
        """Begins after a checkpoint. *Arguments:* `before`: its `json`, which may be damaged."""
        self.programs.compared.clear()
        stated = before if isinstance(before, Mapping) else {}
        self.step, self.replicas = (
            int(number(stated.get(name)) or 0) for name in ("step", "replicas")
        )
        if not self.faults and isinstance(there := stated.get("faults"), list):
            self.faults = there

    def due(self, seed: int, step: int) -> list[Recheck]:
        """Draws what to compute again in `step`, counted from 1, as a function of the seed, the
        step and the layout. Unless the devices have equally many blocks, this is a little more than
        the share."""
        if not self.share:
            return []
        self.collect(step - AHEAD if step % AHEAD == 0 else 0)
        calls = [len(places) for places in self.programs.places]
        if step in self._suspects:
            here = {group.index: g for g, group in enumerate(self.placement.local)}
            asked = [(here[group], call) for group, call in self._suspects[step] if group in here]
            twice = range(max(2, len(calls)))  # on the only device
            return [Recheck(step, call, g, by % len(calls)) for g, call in asked for by in twice]
        draw = np.random.Generator(np.random.Philox(key=[seed, step]))
        shift = min(1 + int(draw.random() * (len(calls) - 1)), len(calls) - 1)
        rounds = np.flatnonzero(draw.random(max(calls)) < self.share)
        each = range(len(calls))
        return [
            Recheck(step, int(i) % calls[g], g, (g + shift) % len(calls))
            for i in rounds
            for g in each
        ]

    def collect(self, upto: int = 0) -> None:
        """Compares the replicas of all steps up to `upto`, for which it waits, and of later ones
        that are ready. Several hosts must call it alike, and wait for each other unless `upto` is
        0.

        Raises `ReplicaDiffers`, and `DeviceFault` if it is decided that a device computes
        wrongly."""
        pending, alone, rows = self.programs.compared, self.placement.hosts.count == 1, list[Any]()
        if not self.share or not (alone or upto):
            return
        while pending and (
            pending[0][0][0].step <= upto
            or (alone and all(sums.is_ready() for _, *both in pending[0] for sums in both))
        ):
            for one, own, again in pending.popleft():
                group, by = (self.placement.local[g].index for g in (one.group, one.by))
                rows.append((one.step, group, one.call, by, digest_of(own), digest_of(again)))
        steps: dict[int, Votes] = {}
        for host in self.placement.hosts.everyone("verified", rows):
            for step, group, call, by, own, again in host:
                made = steps.setdefault(step, {}).setdefault((group, call), {})
                made.setdefault(group, set()).add(own)
                made.setdefault(by, set()).add(again)
        for step in sorted(steps):
            self._compared(step, steps[step])

    def _compared(self, step: int, votes: Votes) -> None:
        differing = {
            call: made for call, made in votes.items() if len(set.union(*made.values())) > 1
        }
        before = self._suspects.pop(step, None)
        if differing and before is None:
            named = self._named({by for made in differing.values() for by in made})
            self._suspects[step] = differing
            self._returns += 1
            kind = ReplicaDiffers if self._returns <= MOST else DeviceFault
            raise kind("replica-differs", step=step, verified=self.step, **named)
        if differing:
            named = self._named({by for made in differing.values() for by in _outvoted(made)})
            raise DeviceFault("device-wrong", step=step, verified=self.step, **named)
        if before is not None:
            once = {
                by for call, made in before.items() for by in made if made[by] != votes[call][by]
            }
            self.faults.append({"step": step, **self._named(once)})
            self.say(fact("device-faulted-once", **self.faults[-1]))
        layout, looped = self.programs.layout, self.programs.blueprint.looped
        self.replicas += sum(
            layout.together * (layout.shares[g] if looped else 1) for g, _ in votes
        )
        self.step = step

    def _named(self, groups: set[int]) -> dict[str, Any]:
        return {"groups": sorted(groups), "devices": device_names(self.placement, sorted(groups))}


def _outvoted(made: dict[int, set[str]]) -> set[int]:
    """Returns the groups that differ from most others, or from themselves. Without a majority,
    returns all groups."""
    steady = Counter(min(digests) for digests in made.values() if len(digests) == 1)
    most = {digest for digest, count in steady.items() if 2 * count > steady.total()}
    return {by for by, digests in made.items() if digests != most}
