"""A run of which nothing moves any more ends, and says who hangs where."""

import contextlib
import functools
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import multihost_utils

import chipwise as cw
import processes
import tasks
from chipwise.base import ending
from chipwise.base.errors import RecipeError, Stuck
from chipwise.base.locks import FolderHandle
from chipwise.machine.cluster import Seat
from chipwise.machine.hosts import Hosts, hosts
from chipwise.run import watchdog
from refusals import refused

OVER = threading.Event()  # what hangs may go on


@pytest.fixture
def ended(monkeypatch):
    """The errors with which the process, the command line's own, would have ended."""
    monkeypatch.setattr(ending, "own", True)
    errors = []
    OVER.clear()
    monkeypatch.setattr(Hosts, "end", lambda self, error: (errors.append(error), OVER.set()))
    yield errors
    OVER.set()


class Slow:
    """Examples, before each of which `how` is called with the number of examples read."""

    def __init__(self, how):
        self.inner, self.how, self.read = tasks.data(), how, 0

    def __len__(self):
        return len(self.inner)

    def __getitem__(self, i):
        self.read += 1
        self.how(self.read)
        return self.inner[i]


def fit(run, after="1s", **changes):
    task = tasks.quick_task(**{"eval": None, **changes})
    on = cw.On(devices=1, feed="host", workers="threads:1", stuck=after)
    return cw.fit(tasks.quick(task=task), run, on=on, checkpoint_every="5st", progress="none")


def sleeps(read):
    if read == 120:
        OVER.wait(600)


@pytest.mark.slow
def test_a_function_of_the_user_that_sleeps(tmp_path, ended):
    assert fit(tmp_path / "run", train=Slow(sleeps)).steps == 30
    (error,) = ended
    assert isinstance(error, Stuck) and error.exit_code == 77
    assert error.code == "step-stuck" and 1 < error.facts["idle"] < 30
    assert error.facts["doing"].startswith("sleeps (test_watchdog.py:")
    stacks = Path(error.facts["stacks"])
    assert stacks.parent == tmp_path / "run" and " in sleeps\n" in stacks.read_text()


@pytest.mark.slow
def test_a_file_without_bytes_and_no_run_folder(tmp_path, ended, monkeypatch):
    os.mkfifo(tmp_path / "pipe")

    def reads(read):
        assert read != 120 or (tmp_path / "pipe").read_bytes() == b"at last"

    def end(self, error):
        ended.append(error)
        (tmp_path / "pipe").write_bytes(b"at last")

    monkeypatch.setattr(Hosts, "end", end)
    assert fit(None, train=Slow(reads)).steps == 30
    (error,) = ended
    assert error.facts["doing"].startswith("reads (test_watchdog.py:")
    assert " in reads\n" in Path(error.facts["stacks"]).read_text()


@pytest.mark.slow
def test_a_device_that_is_not_ready(ended):
    calls = []

    def hangs(x):
        calls.append(0)
        if len(calls) == 40:  # the first two dozen are trials before the first step
            OVER.wait(60)
        return x

    def loss(params, state, batch, key, train):
        sums, state = tasks.plain_loss(params, state, batch, key, train)
        zero = jax.pure_callback(hangs, jax.ShapeDtypeStruct((), jnp.float32), jnp.float32(0))
        return {"loss": cw.Sum(sums["loss"].total + zero, sums["loss"].count)}, state

    assert fit(None, loss=loss).steps == 30
    (error,) = ended
    assert error.facts["doing"].startswith("hangs (test_watchdog.py:")
    assert 0 < error.facts["step"] < 30 and error.facts["devices"] in (["none"], [str(jax.devices()[0])])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sleeps", "works"])
def test_a_trace_is_stuck_only_if_the_processor_rests(kind, ended):
    def loss(params, state, batch, key, train):
        until = time.monotonic() + 1.3
        while kind == "works" and time.monotonic() < until:
            pass
        if kind == "sleeps":
            OVER.wait(60)
        return tasks.plain_loss(params, state, batch, key, train)

    fit(None, loss=loss)
    assert [error.facts["step"] for error in ended] == [0] * (kind == "sleeps")


@pytest.fixture
def alone_here(monkeypatch):
    """A run on one host, in which nothing moves but what a test does."""
    monkeypatch.setattr(watchdog, "hosts", lambda: Hosts(Seat(0, 1, "localhost")))
    return watchdog.watched


@pytest.mark.slow
def test_what_is_slow_but_moves_is_not_stuck(ended, alone_here, monkeypatch):
    with alone_here("0.8s") as here:
        for step in range(5):
            here.pace.advanced(step + 1, ())
            time.sleep(0.3)
        here.pace.stepping = False
        for _ in range(5):
            here.pace.calls += 1  # a block of an evaluation
            time.sleep(0.3)
        monkeypatch.setattr(watchdog, "_worked", time.monotonic)  # a processor is busy
        time.sleep(1.5)
        assert not ended
        monkeypatch.setattr(watchdog, "_worked", lambda: 7.0)
        assert OVER.wait(20) and ended[0].facts["step"] == 5


def test_the_stacks_are_written_into_the_folder_that_the_run_locked(tmp_path):
    """Somebody moves it meanwhile, and another one takes its place."""
    here, path, moved = Hosts(Seat(0, 1, "localhost")), tmp_path / "run", tmp_path / "moved"
    path.mkdir()
    with contextlib.closing(FolderHandle(path)) as handle:
        here.pace.folder = handle.path
        path.rename(moved)
        path.mkdir()
        written = Path(watchdog._Watch(here, 1.0)._written({0: [0, 3, 3, 1000]}, {0: {"text": "here"}}))
    assert written.parent == moved and "here" in written.read_text() and not list(path.iterdir())


def test_the_devices_that_are_not_ready_are_named(ended, alone_here):
    def shown(device, ready):
        return SimpleNamespace(device=device, data=SimpleNamespace(is_ready=lambda: ready))

    def token(*shards):
        return SimpleNamespace(is_ready=lambda: False, addressable_shards=shards)

    with alone_here("0.3s") as here:  # the second step waits for the first
        here.pace.advanced(
            7, [token(shown("TPU 2", True), shown("TPU 3", False)), token(shown("TPU 4", False))]
        )
        assert OVER.wait(20)
    assert (ended[0].code, ended[0].facts["devices"], ended[0].facts["step"]) == ("step-stuck", ["TPU 3"], 5)


def test_reading_and_writing_is_work(tmp_path):
    before, processor, clock = watchdog._worked(), time.process_time(), time.monotonic()
    (tmp_path / "file").write_bytes(bytes(500_000))
    worked = watchdog._worked() - before
    assert 1 <= worked < 2 + time.process_time() - processor + time.monotonic() - clock


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system places its processes itself")
def test_to_wait_for_a_processor_is_work():
    cores = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(cores)})  # the busy processes inherit it
        others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(7)]
        before, begin = watchdog._worked(), time.monotonic()
        while time.monotonic() < begin + 0.5:
            pass
        spent = time.monotonic() - begin
        worked = watchdog._worked() - before
    finally:
        os.sched_setaffinity(0, cores)
        for other in others:
            other.kill()
            other.wait()
    assert worked > 0.8 * spent


@pytest.mark.slow
def test_three_times_the_longest_step_is_not_stuck(ended, alone_here):
    with alone_here("0.5s") as here:
        for step, seconds in enumerate((0.1, 0.1, 0.4, 0.8, 1.2)):
            here.pace.advanced(step + 1, ())
            time.sleep(seconds)
        assert not ended
        assert OVER.wait(20) and ended[0].facts["idle"] > 3 * 0.6


def test_a_debugger_is_not_stuck(ended, alone_here, tmp_path):
    code = compile("def interaction():\n    time.sleep(2)\ninteraction()", str(tmp_path / "pdb.py"), "exec")
    with alone_here("0.5s"):
        exec(code, {"time": time})
        assert not ended


def test_nothing_is_watched_without_seconds():
    before = set(threading.enumerate())
    fit(None, 0)
    assert not [one for one in set(threading.enumerate()) - before if one.name == "chipwise-stuck"]


@pytest.mark.parametrize("given", ["soon", "-1", "inf", "", "5m", None])
def test_seconds_that_are_none(given):
    with refused(RecipeError, "stuck-unreadable" if given is not None else "wrong-kind", stuck=given):
        cw.On(stuck=given)


def naps(until, read):
    """Sleeps before example 400 until the file `until` is there: a busy machine is found stuck late."""
    while read == 400 and not until.exists():
        time.sleep(0.1)


@pytest.mark.slow
def test_a_process_that_reads_prints_where_it_is(tmp_path, ended, capfd, monkeypatch):
    until = tmp_path / "found stuck"
    monkeypatch.setattr(Hosts, "end", lambda self, error: (ended.append(error), until.touch()))
    # A process imports PyTorch first, which takes a busy machine more than five seconds
    on = cw.On(devices=1, feed="host", workers="processes:1", stuck="30s")
    task = tasks.quick_task(train=Slow(functools.partial(naps, until)), eval=None)
    assert cw.fit(tasks.quick(task=task), on=on, progress="none").steps == 30
    assert [error.facts["doing"].split(" (")[1][:9] for error in ended] == ["stream.py"]
    assert " in naps\n" in capfd.readouterr().err


def test_a_process_of_the_users_own_gets_no_signal():
    theirs = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(600,))
    theirs.start()
    try:
        watchdog._Watch(Hosts(Seat(0, 1, "localhost")), 1.0).stack()
    finally:
        theirs.terminate()
        theirs.join()
    assert theirs.exitcode == -signal.SIGTERM  # of two signals the system gives SIGUSR1 first


# ---- another program's process


@pytest.mark.slow
@pytest.mark.parametrize("where", ["reading", "thread", "tracing", "body"])
def test_another_program_catches_what_hangs_and_goes_on(tmp_path, ended, monkeypatch, where):
    def loss(*given):
        OVER.wait(60)
        return tasks.plain_loss(*given)

    monkeypatch.setattr(ending, "own", False)
    changes = {
        "reading": {"train": Slow(sleeps)},  # the main thread, before the first step
        "thread": {"train": Slow(lambda read: read == 400 and OVER.wait(600))},
        "tracing": {"loss": loss},
        "body": {},
    }
    with pytest.raises(Stuck) as caught:
        if where == "body":
            on = cw.On(devices=1, stuck="3s")
            for _ in cw.training(tasks.quick(), tmp_path / "run", on=on, progress="none"):
                OVER.wait(60)
        fit(tmp_path / "run", "3s", **changes[where])
    OVER.set()
    assert not ended and caught.value.code == "step-stuck"
    doing = {"reading": "sleeps (test", "thread": "<lambda> (test", "tracing": "loss (test"}
    assert doing.get(where, "") in caught.value.facts["doing"]
    assert signal.getsignal(signal.SIGURG) is signal.SIG_DFL
    assert fit(tmp_path / "other", 0).steps == 30  # the process goes on


@pytest.mark.parametrize("why", ["unheard", "device"])
def test_another_program_that_no_exception_reaches_is_ended(ended, alone_here, monkeypatch, why, capsys):
    monkeypatch.setattr(ending, "own", False)
    monkeypatch.setattr(watchdog, "_BACK_SECONDS", 0.5 if why == "unheard" else 600.0)
    token = SimpleNamespace(is_ready=lambda: False, addressable_shards=[])
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGURG})  # as in code that never returns
    try:
        with alone_here("0.3s") as here:
            here.pace.advanced(1, [token] if why == "device" else ())
            assert OVER.wait(20) and ended[0].code == "step-stuck"
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGURG})
    assert ("Stuck was raised" in capsys.readouterr().err) == (why == "unheard")


# ---- of several hosts, one is behind


def reads(read):
    if read == 120:
        Path("pipe").read_bytes()


def alone(read):
    if read == 1:  # the main thread compares the data of the hosts
        multihost_utils.sync_global_devices("alone")  # in which the others do not join


def hang(kind, host, seconds, run):
    """Trains on the hosts of the environment, of which one hangs."""
    here = hosts()
    train = Slow({"sleeps": sleeps, "reads": reads, "alone": alone}[kind])
    train.how = train.how if here.index == int(host) else lambda read: None
    on = cw.On(feed="host", workers="threads:1", stuck=seconds)
    recipe = tasks.quick(task=tasks.quick_task(train=train, eval=None))
    cw.fit(recipe, run, on=on, checkpoint_every="5st", progress="none")


HANG = "import sys, test_watchdog\ntest_watchdog.hang(*sys.argv[1:])"
PATH = os.pathsep.join([str(Path(__file__).parent), processes.search()])


def check(kind, host, count, folder, seconds="3s"):
    """*Returns* the seconds that it took, with the start, until all had said that `host` hangs, and where."""
    folder.mkdir(exist_ok=True)
    os.mkfifo(folder / "pipe")
    began, how = time.monotonic(), f"import os\nos.chdir({str(folder)!r})\n{HANG}"
    started = processes.start(how, count, 1, kind, host, seconds, folder / "run", PYTHONPATH=PATH)
    told, taken = processes.ends(started), time.monotonic() - began
    assert [code for code, _, _ in told] == [77] * count, told
    assert [err.count("error: ") for _, _, err in told] == [1] + [0] * (count - 1), told
    line = next(line for line in told[0][2].splitlines() if line.startswith("error: "))
    assert f"Host {host} (" in line and f" {kind} (test_watchdog.py:" in line, line
    (stacks,) = (word for word in line.split() if Path(word).name.startswith("stuck-"))
    text = Path(stacks.removesuffix(".")).read_text()
    assert f" in {kind}\n" in text and text.count("main thread") == count
    print(f"{kind}, host {host} of {count}: {taken:.1f} s\n{line}", flush=True)
    return taken


@pytest.mark.slow
def test_the_host_that_waits_in_a_collective_alone_is_named(tmp_path):
    check("alone", 1, 2, tmp_path / "run")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_campaign_of_stuck_hosts(tmp_path, draw):
    """`CHIPWISE_CAMPAIGN=20 pytest -m slow tests/run/test_watchdog.py -s` prints each."""
    rng = random.Random(os.environ.get("CHIPWISE_SEED", draw or "7"))
    kinds = rng.sample(["sleeps", "reads", "alone"], 3)
    for i in range(int(os.environ.get("CHIPWISE_CAMPAIGN", "6" if draw is None else "1"))):
        count = rng.randint(2, 4)
        check(kinds[i % 3], rng.randrange(count), count, tmp_path / str(i))
