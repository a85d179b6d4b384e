import os
import subprocess
import sys

PRODUCT = """
import chipwise, hashlib, jax, numpy as np
r = np.random.default_rng(0)
a, b = (jax.numpy.asarray(r.standard_normal((2048, 64)), np.float32) for _ in range(2))
product = jax.jit(lambda a, b: a.T @ b)(a, b)
print(len(jax.devices()), hashlib.sha256(np.asarray(product).tobytes()).hexdigest())
"""


def run(devices, **changes):
    environment = {k: v for k, v in os.environ.items() if k != "NPROC"}
    environment |= {"XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}", **changes}
    out = subprocess.run(
        [sys.executable, "-c", PRODUCT], env=environment, capture_output=True, text=True, check=True
    )
    found, bits = out.stdout.split()
    assert int(found) == devices
    return bits


def test_a_long_product_has_the_same_bits_in_processes_with_1_and_8_devices():
    assert run(1) == run(8)
