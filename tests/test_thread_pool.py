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


def run(devices, program=PRODUCT):
    environment = {k: v for k, v in os.environ.items() if k != "NPROC"}
    environment |= {"XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}"}
    out = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    found, said = out.stdout.split()
    assert int(found) == devices
    return said


def test_a_long_product_has_the_same_bits_in_processes_with_1_and_8_devices():
    assert run(1) == run(8)


WAITING = """
import chipwise as cw, jax, jax.numpy as jnp, numpy as np

def init(key):
    a, b, c = jax.random.split(key, 3)
    sizes = {"a": (a, (784, 1024)), "b": (b, (1024, 1024)), "c": (c, (1024, 10))}
    return {name: 0.03 * jax.random.normal(k, size) for name, (k, size) in sizes.items()}, {}

def loss(params, state, batch, key, train):
    x = jax.nn.relu(jax.nn.relu(batch["x"] @ params["a"]) @ params["b"]) @ params["c"]
    return {"loss": cw.Sum.of(cw.losses.softmax_cross_entropy(x, batch["label"]))}, state

data = cw.Arrays(x=np.ones((256, 784), np.float32), label=np.zeros(256, np.int32))
task = cw.Task(init=init, loss=loss, train=data)
recipe = cw.Recipe(task=task, batch=256, replicas=8, duration="6st", optimizer=cw.adam(lr=1e-3))
cw.fit(recipe, progress="none")
print(len(jax.devices()), "trained")
"""


def test_devices_that_wait_for_others_leave_a_thread_for_their_products():
    assert run(8, WAITING) == "trained"
