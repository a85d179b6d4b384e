"""What the thread pool of XLA's CPU client asks for: one size for all, and not too many programs at once."""

import os
import subprocess
import sys

import chipwise as cw
import tasks
from chipwise.engine.session import Session

PRODUCT = """
import chipwise, hashlib, jax, numpy as np
r = np.random.default_rng(0)
a, b = (jax.numpy.asarray(r.standard_normal((2048, 64)), np.float32) for _ in range(2))
product = jax.jit(lambda a, b: a.T @ b)(a, b)
print(len(jax.devices()), hashlib.sha256(np.asarray(product).tobytes()).hexdigest())
"""


def run(devices):
    environment = {k: v for k, v in os.environ.items() if k != "NPROC"}
    environment |= {"XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}"}
    out = subprocess.run(
        [sys.executable, "-c", PRODUCT], env=environment, capture_output=True, text=True, check=True
    )
    found, digest = out.stdout.split()
    assert int(found) == devices
    return digest


def test_a_long_product_has_the_same_bits_in_processes_with_1_and_8_devices():
    assert run(1) == run(8)


def test_several_cpu_devices_have_fewer_programs_under_way_than_block_the_pool():
    most_in_flight = 32  # a device, of the XLA CPU client: a thread of the pool waits beyond
    programs = 5  # of a step on a device, at most: replica, reduce, square, update, gather
    with Session(tasks.recipe(duration="12st"), cw.On(devices=2)) as session:
        session.begin()
        session.advance(12)
        assert len(session._queued) <= session.ahead and programs * (session.ahead + 1) < most_in_flight
