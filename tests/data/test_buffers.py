import os
import threading

import jax
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from chipwise.data.buffers import ALIGNMENT, Buffer, Pool, columns, mapped

SPEC = {
    "image": jax.ShapeDtypeStruct((5, 3), np.uint8),
    "x": jax.ShapeDtypeStruct((), np.float32),
    "none": jax.ShapeDtypeStruct((0,), np.int32),
}


@given(
    n=st.integers(0, 9),
    shapes=st.lists(st.tuples(st.integers(0, 5), st.integers(1, 7)), min_size=1, max_size=4),
    kinds=st.lists(st.sampled_from(["u1", "i2", "f4", "?"]), min_size=4, max_size=4),
)
def test_columns_are_aligned_apart_and_of_the_spec(n, shapes, kinds):
    spec = {
        f"c{i}": jax.ShapeDtypeStruct(s, np.dtype(k))
        for i, (s, k) in enumerate(zip(shapes, kinds, strict=False))
    }
    buffer = Buffer(spec, n)
    made = buffer.columns()
    for number, (name, column) in enumerate(made.items()):
        assert column.shape == (n, *spec[name].shape) and column.dtype == spec[name].dtype
        assert column.flags.c_contiguous and not (column.size and column.ctypes.data % ALIGNMENT)
        column.view(np.uint8)[...] = number
    for number, column in enumerate(made.values()):
        assert (column.view(np.uint8) == number).all()


def test_a_buffer_is_free_when_nothing_refers_to_it():
    buffer = Buffer(SPEC, 4)
    assert buffer.free
    held = buffer.columns()["image"]
    assert not buffer.free
    part = held[1:3]
    del held
    assert not buffer.free
    del part
    assert buffer.free


def test_memory_on_a_device_is_not_written_again():
    """Whether a device's array is a copy or this very memory, it must keep its bytes."""
    pool = Pool(3, lambda: Buffer(SPEC, 64))
    never = threading.Event()
    held = []
    for value in range(40):
        batch = pool.get(never).columns()
        batch["image"][:] = value
        held.append((value, jax.block_until_ready(jax.device_put(batch["image"], jax.devices()[value % 2]))))
        del batch
        held = held[-2:]
        for expected, array in held:
            assert (np.asarray(array) == expected).all()


def test_a_pool_gives_no_more_than_its_count_and_ends_when_closed():
    made = []

    def make():
        made.append(Buffer(SPEC, 1))
        return made[-1]

    pool, closed = Pool(2, make), threading.Event()
    first, second = pool.get(closed).columns(), pool.get(closed).columns()
    threading.Timer(0.05, closed.set).start()
    assert pool.get(closed) is None and len(made) == 2
    del first
    assert pool.get(threading.Event()) is made[0]
    del second


def test_shared_memory_is_the_same_memory():
    buffer = Buffer(SPEC, 3, shared=True)
    with open(buffer.path, "r+b") as file:
        there = columns(mapped(file.fileno()), buffer.start, buffer.layout)
    there["x"][:] = [1, 2, 3]
    assert buffer.columns()["x"].tolist() == [1, 2, 3]
    path = buffer.path
    held = buffer.columns()["x"]
    buffer.close()
    assert held.tolist() == [1, 2, 3]
    assert not os.path.exists(path)
