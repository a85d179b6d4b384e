"""How a host ends: with a farewell, or with word of what nobody caught."""

import contextlib
import os
import sys
import threading

import pytest

from chipwise.base.errors import DataError
from chipwise.machine import hosts
from chipwise.machine.cluster import Seat
from chipwise.machine.hosts import Hosts


class Channel:
    silence = 20

    def __init__(self):
        self.said = []

    def bye(self):
        self.said.append("bye")

    def fail(self, code, sentence, alike):
        self.said.append((code, alike))
        return True


class Ended(Exception):
    pass


def ended(code):
    raise Ended(code)


@pytest.fixture
def here(monkeypatch):
    monkeypatch.setattr(os, "_exit", ended)
    monkeypatch.setattr(hosts, "_ABORT_SECONDS", 0)
    monkeypatch.delattr(sys, "last_value", raising=False)
    return Hosts(Seat(1, 2, "localhost"), Channel(), ("a", "b"))


def test_an_interactive_process_is_told_of_a_loss_and_kept(monkeypatch, capfd):
    monkeypatch.setattr(os, "_exit", ended)
    monkeypatch.setattr(hosts, "_LEAVING", threading.Lock())
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    hosts._end(76, "Host 1 is lost.")
    assert capfd.readouterr().err == "error: Host 1 is lost.\n"


def test_who_is_done_says_farewell(here):
    here.leave()
    assert here.channel.said == ["bye"]


@pytest.mark.parametrize("own", [True, False], ids=["the command line", "another program"])
@pytest.mark.parametrize("caught", [True, False])
def test_who_failed_says_no_farewell_and_ends_its_own_process_alone(here, monkeypatch, own, caught):
    """A program may have caught the error, and has its own exit code and its own functions at exit."""
    monkeypatch.setattr(hosts.ending, "own", own)
    monkeypatch.setattr(hosts, "_leave_jax", lambda: here.channel.said.append("without JAX"))
    if caught:
        here.failed(DataError("no-evaluation-data"))
    else:
        monkeypatch.setattr(sys, "last_value", ValueError("lost"), raising=False)
    with pytest.raises(Ended) if own else contextlib.nullcontext() as ended:
        here.leave()
    code = DataError.exit_code if caught else 1
    assert here.channel.said == [(code, False), *["without JAX"] * (not own)]
    assert not own or ended.value.args == (code,)


@pytest.mark.parametrize(
    ("error", "waited"),
    [
        (ValueError("UNKNOWN: Gloo all-to-all failed: Connection closed by peer"), [21]),
        (ValueError("lost"), [0]),  # as tests have it
        (DataError("no-evaluation-data"), []),
    ],
)
def test_a_broken_collective_waits_for_word_of_a_lost_host(here, monkeypatch, error, waited):
    slept = []
    monkeypatch.setattr(hosts.time, "sleep", slept.append)
    here.failed(error)
    assert slept == waited and len(here.channel.said) == 1
