import contextlib
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

import chipwise as cw
from chipwise.data.sources import take
from chipwise.data.stream import MOST, Stream
from chipwise.data.workers import Workers, chosen
from refusals import refused
from slow_source import Maps, Numbers

N = 50
ARRAYS = cw.Arrays(x=np.arange(N * 6, dtype=np.uint8).reshape(N, 2, 3), label=np.arange(N, dtype=np.int32))


def read(workers, indices, room=None):
    """A batch, copied out of its buffer."""
    buffer = workers.buffer(len(indices) if room is None else room)
    columns = workers.submit(np.asarray(indices), buffer).result()
    return {name: column.copy() for name, column in columns.items()}


@pytest.mark.parametrize(
    "workers,ours,foreign",
    [
        (3, ("threads", 3), ("processes", 3)),
        ("3", ("threads", 3), ("processes", 3)),
        ("threads:2", ("threads", 2), ("threads", 2)),
        ("processes:2", ("processes", 2), ("processes", 2)),
        (None, ("threads", chosen(ARRAYS, None)[1]), ("threads", 1)),
    ],
)
def test_who_reads(workers, ours, foreign):
    assert chosen(ARRAYS, workers) == ours
    assert chosen(Numbers(), workers) == foreign


@pytest.mark.parametrize("workers", [0, -1, "many", "threads:", "fibres:2", "threads:0", "2.5", "²"])
def test_other_words_are_refused(workers):
    with refused(cw.errors.RecipeError, "workers-unknown", workers=str(workers)):
        chosen(ARRAYS, workers)


@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("n", [0, 1, 31, 32, 33, 64, 200])
def test_threads_write_every_row(count, n):
    workers = Workers(ARRAYS, f"threads:{count}")
    indices = np.random.default_rng(n).integers(0, N, n)
    got = read(workers, indices, room=n + 3)
    workers.close()
    for name, column in take(ARRAYS, indices).items():
        np.testing.assert_array_equal(got[name], column)


@pytest.mark.slow
def test_processes_write_every_row_and_tell_their_time(tmp_path, monkeypatch):
    source = Numbers(seconds=0.001)
    (tmp_path / "multiprocessing.py").write_text("")  # in the current folder, perhaps of others: not imported
    monkeypatch.chdir(tmp_path)
    workers = Workers(source, "processes:2")
    try:
        for n in (0, 1, 33):
            indices = np.random.default_rng(n).integers(0, N, n)
            got = read(workers, indices, room=40)
            for name, column in take(source, indices).items():
                np.testing.assert_array_equal(got[name], column)
        assert workers.stages.seconds["decode"] > 0.034
        lazy = cw.data.Lazy(3, cw.Arrays(x=np.zeros(3)).spec, lambda: {"x": np.zeros(3)})
        with refused(cw.errors.DataError, "source-unsendable-ours", source="Lazy"):
            Workers(lazy, "processes:2")
    finally:
        workers.close()


@pytest.mark.slow
def test_a_process_that_fails_or_dies_is_an_error():
    workers = Workers(Numbers(bad=7, dies=8), "processes:1")
    try:
        with pytest.raises(ValueError, match="photo 7 is bad"):
            read(workers, [1, 7])
        assert read(workers, [6])["label"].tolist() == [1]
        with refused(cw.errors.DataError, "reader-died"):
            read(workers, [8])
    finally:
        workers.close()


@pytest.mark.slow
def test_a_process_forgets_the_buffers_of_streams_that_are_over():
    workers = Workers(Maps(), "processes:1")

    def stream():
        return Stream(Maps(), [np.arange(i, i + 10) for i in range(0, 100, 10)], 10, lambda c, _: c, workers)

    def rest(of):
        """The examples that are left, and the most buffers that were known meanwhile."""
        given = []
        with contextlib.suppress(EOFError):
            while True:
                given.append({name: column.copy() for name, column in of.next().items()})
        of.close()
        return np.concatenate([g["index"] for g in given]).tolist(), max(g["maps"].max() for g in given)

    try:
        for _ in range(4):
            index, maps = rest(stream())
            assert index == list(range(100)) and maps <= MOST
        older, newer = stream(), stream()  # at once
        older.next(), newer.next()
        for one in (newer, older, stream()):
            assert rest(one)[0][-90:] == list(range(10, 100))
        assert rest(stream())[1] <= MOST
    finally:
        workers.close()


def test_errors_of_threads_are_raised_and_others_go_on():
    workers = Workers(Numbers(bad=7), "threads:2")
    with pytest.raises(ValueError, match="photo 7"):
        read(workers, np.arange(N))
    assert read(workers, [8])["label"].tolist() == [3]
    workers.close()


def test_small_quick_examples_are_read_by_one_thread(monkeypatch):
    monkeypatch.setattr("chipwise.data.workers.usable_cores", lambda: 4)
    monkeypatch.setattr("chipwise.data.workers._DEAR_SECONDS", 1e9)
    assert str(Workers(ARRAYS)) == "1 thread"
    large = cw.Arrays(x=np.zeros((3, 1 << 14), np.uint8))
    assert str(Workers(large)) == "4 threads"
    monkeypatch.setattr("chipwise.data.workers._DEAR_SECONDS", 0.0)  # each example is worth a thread
    workers = Workers(ARRAYS)
    assert str(workers) == "4 threads"
    assert workers.stages.seconds["read"] == 0
    assert read(workers, [3])["label"].tolist() == [3]


@pytest.mark.slow
def test_processes_end_with_their_parent(tmp_path):
    code = """
import os, signal, sys
from chipwise.data.stream import MOST, Stream
from chipwise.data.workers import Workers
from slow_source import Maps, Numbers
if __name__ == "__main__":
    workers = Workers(Numbers(), "processes:2")
    print(*workers._readers.pool._processes, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""
    (tmp_path / "main.py").write_text(code)
    path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, tmp_path / "main.py"],
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        timeout=120,
    )
    readers = [int(pid) for pid in done.stdout.split()]
    assert done.returncode == -signal.SIGKILL and readers
    deadline = time.monotonic() + 30
    while any(map(psutil.pid_exists, readers)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(map(psutil.pid_exists, readers))


def test_threads_end_with_a_pool_that_nobody_closed():
    before = set(threading.enumerate())
    workers = Workers(ARRAYS, "threads:3")
    assert read(workers, [4])["label"].tolist() == [4]
    mine = set(threading.enumerate()) - before
    assert len(mine) == 3
    del workers
    gc.collect()
    for thread in mine:
        thread.join(10)
    assert not any(thread.is_alive() for thread in mine)
