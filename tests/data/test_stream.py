import gc
import threading

import jax
import numpy as np
import pytest

import chipwise as cw
from chipwise.data.sources import spec_of
from chipwise.data.stream import FEWEST, MOST, Stream, batches_in_memory
from slow_source import Numbers

N = 50
ARRAYS = cw.Arrays(x=np.arange(N * 6, dtype=np.uint8).reshape(N, 2, 3), label=np.arange(N, dtype=np.int32))


def put(columns, indices):
    return jax.device_put(columns)


def threads():
    """The names of threads that read, once those have ended that are about to."""
    gc.collect()
    mine = [t for t in threading.enumerate() if t.name.startswith(("chipwise-read", "chipwise-feed"))]
    for thread in mine:
        thread.join(5)
    return {t.name for t in mine if t.is_alive()}


@pytest.mark.parametrize("batches", [0, 1, 2, 3, 40])
def test_batches_come_in_order_and_whole(batches):
    wanted = [np.random.default_rng(i).integers(0, N, 7 if i % 2 else 4) for i in range(batches)]
    stream = Stream(ARRAYS, wanted, 7, put)
    held = [stream.next() for _ in wanted[: stream.in_use]]
    for i, indices in enumerate(wanted):
        batch = held.pop(0) if held else stream.next()
        np.testing.assert_array_equal(batch["x"], ARRAYS.columns["x"][indices])
        np.testing.assert_array_equal(batch["label"], ARRAYS.columns["label"][indices])
        assert stream.delivered >= sum(map(len, wanted[: i + 1]))
    stream.close()
    assert not threads()


def test_memory_is_bounded():
    """However slowly batches are used, no more are read than may be in memory."""
    asked = []

    def wanted():
        for i in range(100):
            asked.append(i)
            yield np.arange(10)

    class Tall(Numbers):
        def __getitem__(self, index):
            return {"x": np.zeros((1 << 12,), np.uint8)}

    stream = Stream(Tall(), wanted(), 10, put, limit_bytes=1)
    assert stream.batches == FEWEST and stream.batch_bytes == 40_960
    held = [stream.next() for _ in range(stream.in_use)]
    stopped = threading.Event()
    stopped.wait(0.3)
    assert len(asked) <= FEWEST + 1
    del held
    for _ in range(90):
        stream.next()
    stream.close()


@pytest.mark.parametrize(
    "batch,expected", [(1 << 30, FEWEST), (1 << 28, FEWEST), ((1 << 30) // 8, 8), (1 << 20, MOST), (0, MOST)]
)
def test_how_many_batches_are_in_memory(batch, expected):
    assert batches_in_memory(batch) == expected


@pytest.mark.parametrize("workers", [None, "threads:2"])
def test_errors_come_in_their_turn_and_stay(workers):
    stream = Stream(Numbers(bad=7), [np.arange(5), np.arange(5, 9), np.arange(3)], 5, put, workers)
    assert stream.next()["label"].tolist() == [0, 1, 2, 3, 4]
    for _ in range(3):
        with pytest.raises(ValueError, match="photo 7 is bad"):
            stream.next()
    stream.close()
    assert not threads()


def test_after_the_last_batch_and_after_the_end_nothing_hangs():
    stream = Stream(ARRAYS, [np.arange(3)], 3, put)
    stream.next()
    for _ in range(2):
        with pytest.raises(EOFError, match="no batch after the last"):
            stream.next()
    stream.close()
    early = Stream(ARRAYS, [np.arange(3)] * 9, 3, put)
    early.close()
    with pytest.raises(RuntimeError, match="closed"):
        early.next()


def test_a_stop_is_answered_while_a_read_hangs(monkeypatch):
    monkeypatch.setattr("chipwise.data.workers._HANGING_SECONDS", 0.1)
    for_ever = threading.Event()

    class Hanging(Numbers):
        def __getitem__(self, index):
            if index:
                for_ever.wait(60)
            return super().__getitem__(index)

    stream = Stream(Hanging(), [np.arange(4)] * 9, 4, put)
    asked = iter([False, False, True])
    assert stream.next(stopped=lambda: next(asked)) is None
    stream.close()
    assert not any(t.name == "chipwise-feed" for t in threading.enumerate())
    for_ever.set()


def test_closing_does_not_wait_for_the_rest_of_a_batch():
    read = []

    class Slow(Numbers):
        def __getitem__(self, index):
            read.append(index)
            return super().__getitem__(index)

    stream = Stream(Slow(seconds=0.01), [np.arange(50)] * 9, 50, put)
    while len(read) < 3:
        threading.Event().wait(0.01)
    stream.close()
    assert len(read) < 40 and not threads()


def test_closing_early_leaves_nothing_behind():
    stream = Stream(ARRAYS, (np.arange(10) for _ in range(1000)), 10, put)
    stream.next()
    stream.close()
    assert not threads()


def test_waiting_is_counted_only_while_the_device_is_idle():
    wanted = [np.arange(4)] * 8
    idle, busy = (Stream(Numbers(seconds=0.01), wanted, 4, put) for _ in range(2))
    for _ in wanted:
        idle.next(lambda: True)
        busy.next(lambda: False)
    assert idle.waited > 0 == busy.waited
    assert idle.stages.seconds["decode"] >= 8 * 4 * 0.01
    idle.close(), busy.close()


def test_a_source_is_told_in_advance_what_will_be_wanted(monkeypatch):
    told = []

    monkeypatch.setattr("chipwise.data.stream._ANNOUNCED_BYTES", 1)

    class Ahead(Numbers):
        spec = spec_of(Numbers())

        def prefetch(self, indices):
            told.append(indices.tolist())

        def __getitem__(self, index):
            assert index == 0 or any(index in indices for indices in told)  # 0: read for its shapes
            return super().__getitem__(index)

    wanted = [np.arange(i, i + 3) for i in range(0, 30, 3)]
    stream = Stream(Ahead(), wanted, 3, put)
    for indices in wanted:
        assert stream.next()["label"].tolist() == (indices % 5).tolist()
    stream.close()
    assert told == [indices.tolist() for indices in wanted]
