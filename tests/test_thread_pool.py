"""What the thread pool of XLA's CPU client asks for: one size for all, and not too many programs at once."""

import os
import subprocess
import sys

import pytest

import chipwise as cw
import tasks
from chipwise.run.session import Session

GRADIENTS = """
import os, sys
os.cpu_count = lambda: int(sys.argv[1])
import chipwise, hashlib, jax, numpy as np
from chipwise.models.conv import conv
from chipwise.models.conv_first import conv_first
r = np.random.default_rng(0)
def drawn(*shape): return jax.numpy.asarray(r.standard_normal(shape), np.float32)
made = [jax.jit(lambda a, b: a.T @ b)(drawn(2048, 64), drawn(2048, 64))]
for kernel in ((3, 3, 64, 64), (3, 3, 128, 128), (1, 1, 64, 64)):
    images, kernel = drawn(8, 16, 16, kernel[2]), drawn(*kernel)
    made.append(jax.jit(jax.grad(lambda k: (conv(images, k) ** 2).sum()))(kernel))
def squared(x, k):
    return (conv_first(x, k, (1, 1), ((k.shape[2] // 2,) * 2,) * 2) ** 2).sum()
for size, kernel in ((16, 1), (2, 3)):
    images, kernel = drawn(64, 128, size, size), drawn(128, 128, kernel, kernel)
    made += jax.jit(jax.grad(squared, (0, 1)))(images, kernel)
words = b"".join(np.asarray(one).tobytes() for one in made)
print(len(jax.devices()), hashlib.sha256(words).hexdigest())
"""


def started(cores, devices):
    environment = {k: v for k, v in os.environ.items() if k != "NPROC"}
    environment |= {"XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}"}
    command = [sys.executable, "-c", GRADIENTS, str(cores)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_gradients_have_the_same_bits_with_any_number_of_cores_and_devices():
    cases = [(1, 1), (2, 1), (8, 1), (16, 1), (2, 8)]
    told = [child.communicate()[0].split() for child in [started(*case) for case in cases]]
    assert [int(devices) for devices, _ in told] == [devices for _, devices in cases]
    assert len({digest for _, digest in told}) == 1


@pytest.mark.slow
def test_several_cpu_devices_have_fewer_programs_under_way_than_block_the_pool():
    most_in_flight = 32  # a device, of the XLA CPU client: a thread of the pool waits beyond
    programs = 5  # of a step on a device, at most: replica, reduce, square, update, gather
    with Session(tasks.recipe(duration="12st"), cw.On(devices=2)) as session:
        session.begin()
        session.advance(12)
        assert (
            len(session._queued) <= session.calls.ahead
            and programs * (session.calls.ahead + 1) < most_in_flight
        )
