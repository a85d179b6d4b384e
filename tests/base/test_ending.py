"""Signals that ask a process to end."""

import signal

from chipwise.base import ending


def test_a_hangup_that_is_ignored_asks_for_nothing():
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        assert ending.requests() == [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        assert ending.requests() == [signal.SIGINT, signal.SIGTERM]
    finally:
        signal.signal(signal.SIGHUP, before)
