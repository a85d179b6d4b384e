"""A whole run by a session alone, and its bits."""

from chipwise.run.on import On
from chipwise.run.session import Session
from chipwise.step.state import fingerprint


def run(recipe, devices, **on):
    """The training state after the whole run, as NumPy arrays. *Arguments:* `on`, other fields of `On`."""
    with Session(recipe, On(devices=devices, **on)) as session:
        session.begin()
        session.advance(session.total)
        return session.snapshot()


def bits(state):
    return [fingerprint(part) for part in (state.params, state.state, state.optimizer, state.ema, state.sums)]
