"""Hosts of a run are killed, frozen or told to stop, and the run goes on, on other counts, to the same bits.

`CHIPWISE_CAMPAIGN=100 pytest -m slow tests/engine/test_hosts_lost.py -s` prints how many it was.
"""

import os
import random
import signal
import time
from pathlib import Path

import pytest

import chipwise as cw
import processes
import tasks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(0)]

ROUNDS = int(os.environ.get("CHIPWISE_CAMPAIGN", "6"))
SILENCE = 8.0
STEPS = "600st"
TRAIN = f"""
import sys
from chipwise.cli import main
how = "--quiet --json --set duration={STEPS} --checkpoint-every 10st --eval-every 200st".split()
sys.argv = ["chipwise", "train", "{Path(__file__).parents[1] / "tasks.py"}:long", "--run", sys.argv[1], *how]
main()
"""
KINDS = (signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP)
LOST, STOPPED = cw.HostLost.exit_code, cw.Stopped.exit_code


def newest(run):
    names = (p.name for p in (run / "checkpoints").glob("*"))
    return max((int(name) for name in names if name.isdigit()), default=-1)


def saving(run):
    return any(not p.name.isdigit() for p in (run / "checkpoints").glob("*"))


def strike(started, run, rng, kind, whom):
    """Waits for a moment, in training or in a save, and sends the signal. *Returns* when it was sent."""
    before, limit = newest(run), time.monotonic() + 240
    while newest(run) <= before and started[whom].poll() is None and time.monotonic() < limit:
        time.sleep(0.002)
    if rng.random() < 0.5:
        while not saving(run) and started[whom].poll() is None and time.monotonic() < limit:
            time.sleep(0.0005)
    else:
        time.sleep(rng.uniform(0, 0.5))
    sent = time.monotonic()
    if started[whom].poll() is None:
        started[whom].send_signal(kind)
    return sent


def left(started, whom, kind, sent):
    """Waits for the others; *returns* how long they took."""
    for index, one in enumerate(started):
        if index != whom or kind == signal.SIGTERM:
            one.wait(SILENCE + 10 + 60)
    taken = time.monotonic() - sent
    if kind == signal.SIGSTOP:
        started[whom].kill()
    return taken


def test_a_campaign(tmp_path):
    """Runs are struck again and again, each time on another number of processes, until they end."""
    whole = cw.fit(tasks.long(duration=STEPS), on=cw.On(devices=1), progress="none", eval_every="200st")
    rng, struck, ended, slowest = random.Random(int(os.environ.get("CHIPWISE_SEED", "7"))), 0, 0, 0.0
    while struck < ROUNDS:
        run = tmp_path / f"run{ended}"
        for _ in range(3):
            count, kind = rng.choice((2, 4)), rng.choice(KINDS)
            whom = rng.choice((0, rng.randrange(1, count)))
            environment = {"CHIPWISE_SILENCE": str(SILENCE)}
            started = processes.start(TRAIN, count, 1, run, **environment)
            sent = strike(started, run, rng, kind, whom)
            taken = left(started, whom, kind, sent)
            struck += 1
            told = processes.ends(started)
            codes = [code for i, (code, _, _) in enumerate(told) if i != whom]
            expected = {STOPPED, 0} if kind == signal.SIGTERM else {LOST, 0}
            assert set(codes) <= expected, (kind, whom, told)
            if codes[0] == LOST:
                slowest = max(slowest, taken)
                said = [err.count("error: host") for i, (_, _, err) in enumerate(told) if i != whom]
                assert said == [1] * len(said), told
        said = processes.answer(processes.start(TRAIN, rng.choice((1, 2)), 2, run), limit=400)
        assert said["fingerprint"] == whole.fingerprint
        assert said["metrics"]["train/loss"] == whole.metrics["train/loss"]
        ended += 1
    assert slowest < SILENCE + 10
    print(f"\n{struck} strikes on {ended} runs, 0 differing bits; the others left within {slowest:.1f} s")
