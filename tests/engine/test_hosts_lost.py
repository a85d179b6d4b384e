"""Hosts of a run are killed, frozen, cut off or told to stop, and the run goes on, on other counts, to the
same bits.

`CHIPWISE_CAMPAIGN=100 pytest -m slow tests/engine/test_hosts_lost.py -s` prints how many it was.
"""

import collections
import contextlib
import os
import random
import signal
import time
from pathlib import Path

import psutil
import pytest

import chipwise as cw
import namespaces
import processes
import tasks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(0)]

ROUNDS = int(os.environ.get("CHIPWISE_CAMPAIGN", "6"))
SILENCE = float(os.environ.get("CHIPWISE_SILENCE", "8"))
STEPS = "600st"
TRAIN = f"""
import sys
from chipwise.cli import main
how = "--quiet --json --set duration={STEPS} --checkpoint-every 10st --eval-every 200st".split()
sys.argv = ["chipwise", "train", "{Path(__file__).parents[1] / "tasks.py"}:long", "--run", sys.argv[1], *how]
main()
"""
CUT = "a link cut"
KINDS = [signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP] + [CUT] * namespaces.possible()
LOST, STOPPED = cw.HostLost.exit_code, cw.Stopped.exit_code


def newest(run):
    names = (p.name for p in (run / "checkpoints").glob("*"))
    return max((int(name) for name in names if name.isdigit()), default=-1)


def saving(run):
    return any(not p.name.isdigit() for p in (run / "checkpoints").glob("*"))


def strike(started, run, rng, kind, whom, names):
    """Waits for a moment, in training or in a save, and strikes. *Returns* when, and whether in a save."""
    before, limit = newest(run), time.monotonic() + 240
    while newest(run) <= before and started[whom].poll() is None and time.monotonic() < limit:
        time.sleep(0.002)
    if rng.random() < 0.5:
        while not saving(run) and started[whom].poll() is None and time.monotonic() < limit:
            time.sleep(0.0005)
    else:
        time.sleep(rng.uniform(0, 0.5))
    sent, within = time.monotonic(), saving(run)
    if kind == CUT:
        namespaces.link(names, "down")
    elif started[whom].poll() is None:
        started[whom].send_signal(kind)
    return sent, within


def left(started, whom, kind, sent):
    """Waits for the others; *returns* how long they took."""
    for index, one in enumerate(started):
        if index != whom or kind in (signal.SIGTERM, CUT):
            one.wait(SILENCE + 10 + 60)
    taken = time.monotonic() - sent
    if kind == signal.SIGSTOP:
        started[whom].kill()
    return taken


def test_a_campaign(tmp_path):
    """Runs are struck again and again, each time on another number of processes, until they end."""
    whole = cw.fit(tasks.long(duration=STEPS), on=cw.On(devices=1), progress="none", eval_every="200st")
    rng, ended, slowest = random.Random(int(os.environ.get("CHIPWISE_SEED", "7"))), 0, 0.0
    struck: collections.Counter = collections.Counter()
    with contextlib.ExitStack() as open_:
        names = open_.enter_context(namespaces.pair()) if CUT in KINDS else None
        while struck.total() < ROUNDS:
            run = tmp_path / f"run{ended}"
            for _ in range(3):
                kind = KINDS[struck.total()] if struck.total() < len(KINDS) else rng.choice(KINDS)
                count = 2 if kind == CUT else rng.choice((2, 4))
                whom = rng.choice((0, rng.randrange(1, count)))
                where = names if kind == CUT else None
                environment = {"CHIPWISE_SILENCE": str(SILENCE)}
                started = processes.start(TRAIN, count, 1, run, namespaces=where, **environment)
                sent, within = strike(started, run, rng, kind, whom, names)
                taken = left(started, whom, kind, sent)
                struck[getattr(kind, "name", kind), "host 0" if whom == 0 else "another", within] += 1
                told = processes.ends(started)
                if kind == CUT:
                    namespaces.link(names, "up")
                assert not psutil.Process().children()
                others = [one for i, one in enumerate(told) if i != whom or kind == CUT]
                codes = [code for code, _, _ in others]
                assert set(codes) <= {STOPPED if kind == signal.SIGTERM else LOST, 0}, (kind, whom, told)
                if codes[0] == LOST:
                    slowest = max(slowest, taken)
                    assert [err.count("error: host") for _, _, err in others] == [1] * len(codes), told
                print(f"{struck.total()}: {kind!r} of {whom} in {count}: {codes}, {taken:.1f} s", flush=True)
            said = processes.answer(processes.start(TRAIN, rng.choice((1, 2)), 2, run), limit=400)
            assert said["fingerprint"] == whole.fingerprint
            assert said["metrics"]["train/loss"] == whole.metrics["train/loss"]
            ended += 1
    assert slowest < SILENCE + 10
    print(f"\n{struck.total()} strikes on {ended} runs, 0 differing bits; others left within {slowest:.1f} s")
    for (kind, whom, within), times in sorted(struck.items()):
        print(f"{times} x {kind}, {whom}{', during a save' if within else ''}")
