"""A fault campaign: one flipped bit in what a device holds, once, at a random step. Each is found at the
next row of the ledger, its device is named, and no checkpoint holds it."""

import collections

import jax
import numpy as np
import pytest

import tasks
from chipwise.run.on import On
from chipwise.run.session import Session

DEVICES, FAULTS = 4, 200
PARTS = {"params": "parameters", "state": "state", "optimizer": "optimizer"}


@pytest.fixture(scope="module")
def session():
    with Session(tasks.quick(duration="2000st"), On(devices=DEVICES)) as session:
        session.begin()
        yield session


def flipped(state, part, draw, bit=None):
    """`state` with one bit of one value of `part` flipped, a random one by default."""
    leaves, structure = jax.tree.flatten(getattr(state, part))
    floating = [i for i, leaf in enumerate(leaves) if leaf.dtype == np.float32 and leaf.size > 1]
    place = draw.choice(floating)
    bits = np.array(leaves[place])
    word = bits.reshape(-1).view(np.uint32)
    bit = int(draw.integers(32)) if bit is None else bit
    word[draw.integers(word.size)] ^= np.uint32(1 << bit)
    leaves[place] = jax.device_put(bits, next(iter(leaves[place].devices())))
    return type(state)(**{**vars(state), part: jax.tree.unflatten(structure, leaves)})


def digests(session):
    return session.programs.digests.read(session.digest())


@pytest.mark.slow
def test_every_flipped_bit_is_found_and_its_device_named(session):
    draw, found = np.random.default_rng(0), collections.Counter()
    for _ in range(FAULTS):
        session.advance(int(draw.integers(1, 4)))
        assert not digests(session).unlike
        sound = list(session._carry)
        part, device = draw.choice(list(PARTS)), int(draw.integers(DEVICES))
        session._carry = [*sound[:device], flipped(sound[device], part, draw), *sound[device + 1 :]]
        unlike = digests(session).unlike
        assert unlike == {PARTS[part]: [device]}
        found[part] += 1
        session._carry = sound
    assert found.total() == FAULTS and set(found) == set(PARTS)


@pytest.mark.slow
def test_a_fault_that_steps_carried_on_is_still_named(session):
    """Found at the next row, some steps later: a wrong parameter also reaches the gradient that all share,
    but the device's own copies still differ. A low bit may be rounded away before."""
    draw = np.random.default_rng(1)
    for part in ("params", "optimizer"):
        session.begin()
        session.advance(2)
        session._carry[2] = flipped(session._carry[2], part, draw, bit=22)
        session.advance(3)
        assert set(map(tuple, digests(session).unlike.values())) == {(2,)}


def test_a_wrong_sum_that_all_devices_share_is_not_found(session):
    """What this check cannot find: an error of one device's replicas, before their sum."""
    session.begin()
    step = session.programs.vectors

    def wrong(g, *given):
        vectors = step(g, *given)
        return [vector.at[0].add(1.0) for vector in vectors] if g == 1 else vectors

    session.programs.vectors = wrong
    try:
        session.advance()
        assert not digests(session).unlike
    finally:
        del session.programs.vectors
