"""A whole run by a session alone, and its bits."""

from chipwise.engine.on import On
from chipwise.engine.session import Session
from chipwise.engine.state import fingerprint


def run(recipe, devices, exact=True, feed="auto"):
    """The training state after the whole run, as NumPy arrays."""
    with Session(recipe, On(devices=devices, exact=exact, feed=feed)) as session:
        session.begin()
        session.advance(session.total)
        return session.snapshot()


def bits(state):
    return [fingerprint(part) for part in (state.params, state.state, state.optimizer, state.ema, state.sums)]
