"""Hosts of a run are killed, frozen, cut off or told to stop, and the run goes on, on one to seven hosts, to
the same bits.

`CHIPWISE_CAMPAIGN=100 pytest -m slow tests/run/test_hosts_lost.py -s` prints how many it was.
"""

import collections
import contextlib
import os
import random
import signal
import statistics
import time
from pathlib import Path

import psutil
import pytest

import chipwise as cw
import namespaces
import processes
import tasks
import warm

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SILENCE = float(os.environ.get("CHIPWISE_SILENCE", "8"))
STEPS, LAST = 600, 400  # beyond the last checkpoint that counts, a run may end before it is struck
EACH, EVERY = 5, 20  # strikes a run, steps a checkpoint
IMPORTS = "import chipwise.cli, chipwise.run.fit, jax.experimental.multihost_utils, tasks"
TRAIN = f"""
import sys
how = "--quiet --json --set duration={STEPS}st --checkpoint-every {EVERY}st --log-every 1st".split()
how += ["--eval-every", "end"]
sys.argv = ["chipwise", "train", "{Path(__file__).parents[1] / "tasks.py"}:long", "--run", sys.argv[1], *how]
chipwise.cli.main()
"""
CUT, HEALED = "a link cut", "a link cut that heals"
KINDS = ["SIGKILL", "SIGTERM", "SIGSTOP"] + [CUT, HEALED] * namespaces.possible()
LOST, STOPPED = cw.errors.HostLost.exit_code, cw.errors.Stopped.exit_code


class Ground:
    """Where runs are struck: processes kept warm, on loopback and at either end of a link."""

    def __init__(self, folder, names):
        self.names = names
        self.servers = {name: warm.Server(IMPORTS, TRAIN, folder, name) for name in (None, *(names or ()))}

    def start(self, run, count, devices=1, namespaces=None):
        seats = processes.seats(count, devices, namespaces)
        where = namespaces or [None] * count
        told = {"CHIPWISE_SILENCE": str(SILENCE)}
        return [self.servers[at].start({**seat, **told}, run) for at, seat in zip(where, seats, strict=True)]

    def orphans(self):
        return [c for server in self.servers.values() for c in psutil.Process(server.process.pid).children()]


@pytest.fixture
def ground(tmp_path):
    with contextlib.ExitStack() as open_:
        names = open_.enter_context(namespaces.pair()) if CUT in KINDS else None
        made = Ground(tmp_path, names)
        for server in made.servers.values():
            open_.callback(server.close)
        yield made


def newest(run):
    names = (p.name for p in (run / "checkpoints").glob("*"))
    return max((int(name) for name in names if name.isdigit()), default=-1)


def saving(run):
    return any(not p.name.isdigit() for p in (run / "checkpoints").glob("*"))


def until(true, one, seconds=240):
    limit = time.monotonic() + seconds
    while not true():
        assert one.poll() is None and time.monotonic() < limit, processes.ends([one], 1)
        time.sleep(0.002)


def rows(run):
    file = run / "metrics.jsonl"
    return set(file.read_text().splitlines()) if file.exists() else set()


def strike(ground, started, run, rng, kind, whom):
    """Waits for a moment, in training or in a save, and strikes. *Returns* when, and whether in a save."""
    before, one = newest(run), started[whom]
    until(lambda: newest(run) > before, one)
    if rng.random() < 0.5:
        until(lambda: saving(run), one)
    else:
        time.sleep(rng.uniform(0, 0.5))
    sent, within = time.monotonic(), saving(run)
    if kind in (CUT, HEALED):
        namespaces.link(ground.names, "down")
    else:
        one.send_signal(signal.Signals[kind])
    if kind == HEALED:
        time.sleep(rng.uniform(0.2, 2))
        namespaces.link(ground.names, "up")
        before = newest(run) + EVERY  # what was on its way is no sign of life
        until(lambda: newest(run) > before, one)
        sent = time.monotonic()
        one.send_signal(signal.SIGTERM)
    return sent, within


def leave(ground, started, rng, kind, whom, sent):
    """Waits for all to leave. *Returns* codes and errors of those that must say why, and the seconds that
    they took."""
    others = [one for i, one in enumerate(started) if i != whom or kind not in ("SIGKILL", "SIGSTOP")]
    for one in others:
        one.wait(SILENCE + 10 + 60)
    taken = time.monotonic() - sent
    if kind == CUT:
        namespaces.link(ground.names, "up")
    if kind == "SIGSTOP" and rng.random() < 0.5:  # it wakes, and finds that the others went on without it
        started[whom].send_signal(signal.SIGCONT)
        started[whom].wait(SILENCE + 10)
        others = started
    elif kind == "SIGSTOP":
        started[whom].kill()
    said = dict(zip(started, processes.ends(started), strict=True))
    return [(code, err) for code, _, err in (said[one] for one in others)], taken


def test_a_campaign(tmp_path, ground, draw):
    """Runs are struck again and again, each time on another number of processes, until they end."""
    rounds = int(os.environ.get("CHIPWISE_CAMPAIGN", "6" if draw is None else "2"))
    rng = random.Random(os.environ.get("CHIPWISE_SEED", draw or "7"))
    kinds = rng.sample(KINDS, len(KINDS))  # each once, before any comes again
    how = {"progress": "none", "eval_every": None, "log_every": "1st"}
    whole = cw.fit(tasks.long(duration=f"{STEPS}st"), on=cw.On(devices=1), **how)
    ended, slowest, back = 0, 0.0, []
    struck: collections.Counter = collections.Counter()
    while struck.total() < rounds:
        run, killed = tmp_path / f"run{ended}", None
        for _ in range(min(EACH, rounds)):
            if newest(run) > LAST:
                break
            kind = (
                kinds[struck.total()] if struck.total() < len(kinds) else rng.choice([*KINDS, *KINDS[:3] * 2])
            )
            linked = kind in (CUT, HEALED)
            # Nobody would notice that one alone is frozen
            count = 2 if linked else rng.randint(2 if kind == "SIGSTOP" else 1, 7)
            whom, before = rng.choice((0, rng.randrange(count))), rows(run)
            started = ground.start(run, count, 1, ground.names if linked else None)
            if killed is not None:
                until(lambda before=before: rows(run) - before, started[whom])
                back.append(time.monotonic() - killed)
                print(f"{back[-1]:.1f} s from the kill to the next step", flush=True)
            sent, within = strike(ground, started, run, rng, kind, whom)
            told, taken = leave(ground, started, rng, kind, whom, sent)
            codes, stops = [code for code, _ in told], kind in ("SIGTERM", HEALED)
            if stops and not any(codes):  # the step at which all would stop lay beyond the last
                assert newest(run) == STEPS
                break
            struck[kind, "host 0" if whom == 0 else "another", within] += 1
            slowest = max(slowest, 0 if stops else taken)
            sentences = [err.count("error: ") for _, err in told]
            print(f"{struck.total()}: {kind} of {whom} in {count}: {codes}, {taken:.1f} s", flush=True)
            killed = sent if kind == "SIGKILL" else None
            assert not ground.orphans()
            if codes != [STOPPED if stops else LOST] * len(codes):  # pytest would shorten it
                pytest.fail("\n".join(f"{code}: {err}" for code, err in told))
            assert sentences == [1] * len(codes) or (stops and sum(sentences) == 1), told
        said = processes.answer(ground.start(run, rng.randint(1, 4), rng.choice((1, 2))), limit=400)
        assert said["fingerprint"] == whole.fingerprint
        assert said["metrics"]["train/loss"] == whole.metrics["train/loss"]
        ended += 1
    print(f"\n{struck.total()} strikes on {ended} runs, 0 differing bits; others left within {slowest:.1f} s")
    print(f"{len(back)} times from a kill to the next step: median {statistics.median(back or [0]):.1f} s")
    for (kind, whom, within), times in sorted(struck.items()):
        print(f"{times} x {kind}, {whom}{', during a save' if within else ''}")
    assert slowest < SILENCE + 10
