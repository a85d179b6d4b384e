"""Measures the cost of any number of devices, of several processes, and of sharded optimizer state: ratios of
steps/s on this machine, and the bytes that a device sends.

    python benchmarks/hosts.py                  # writes benchmarks/hosts.md, in about six minutes
    python benchmarks/hosts.py --bytes          # only prints the bytes, of which none depends on the clock

A recipe of 8 replicas, an MLP of 1.9 million parameters with Adam on random data, is trained by 1 process
with 1 to 8 devices and by 2 with 4 each, with whole and with sharded optimizer state. The variants
alternate, ROUNDS times, so that other work on the machine affects all of them. All devices are this machine's
CPU, so the differences are overhead. The bytes are those of the compiled program's collectives, by their
usual algorithms, beside the least that an exact sum needs.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path

from chipwise.machine.cluster import TOLD
from chipwise.machine.fingerprint import this_machine

ROUNDS, SECONDS, WARM = 3, 3.0, 5  # rounds; timed steps in each; steps before them
SHAPES = {f"1 × {n}": (1, n) for n in range(1, 9)} | {"2 × 4": (2, 4)}
WAYS = {"whole": False, "shared": True}
WIDE = 1024


def recipe():
    import jax
    import jax.numpy as jnp
    import numpy as np

    import chipwise as cw

    def init(key):
        a, b, c = jax.random.split(key, 3)
        shapes = {"a": (a, (784, WIDE)), "b": (b, (WIDE, WIDE)), "c": (c, (WIDE, 10))}
        return {name: 0.03 * jax.random.normal(k, shape) for name, (k, shape) in shapes.items()}, {}

    def loss(params, state, batch, key, train):
        x = jax.nn.relu(batch["x"].astype(jnp.float32) / 255 @ params["a"])
        logits = jax.nn.relu(x @ params["b"]) @ params["c"]
        return {"loss": cw.Sum.of(cw.losses.softmax_cross_entropy(logits, batch["label"]))}, state

    rng = np.random.default_rng(0)
    rows = {"x": rng.integers(0, 256, (4096, 784), np.uint8), "label": rng.integers(0, 10, 4096, np.int32)}
    task = cw.Task(init=init, loss=loss, train=cw.Arrays(**rows))
    return cw.Recipe(task=task, batch=256, replicas=8, duration="100000st", optimizer=cw.adam(lr=1e-3))


def measure_here() -> None:
    """Runs in one of the processes: prints the steps/s of each variant as a line of JSON."""
    import chipwise as cw
    from chipwise.run.session import Session

    found = {}
    for name, shared in WAYS.items():
        with Session(recipe(), cw.On(shard_optimizer=shared)) as session:
            session.begin()
            session.advance(WARM)
            session.wait()
            began = time.perf_counter()
            session.advance(WARM)
            session.wait()
            each = session.placement.agree("each", (time.perf_counter() - began) / WARM)
            steps = max(WARM, int(SECONDS / each))
            session.placement.all("ready", True)
            began = time.perf_counter()
            session.advance(steps)
            session.wait()
            found[name] = steps / (time.perf_counter() - began)
    print(json.dumps(found))


def sent() -> list[str]:
    """For each number of devices the vectors of each, and the bytes that it sends in a step, as rows of a
    table."""
    from chipwise.machine.detect import detect, simulate

    simulate(8)
    from chipwise.run.placement import Placement
    from chipwise.run.programs import Programs
    from chipwise.step.layout import Layout

    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    from traffic import least, sent_bytes

    rows = ["| devices | shares | vectors | bytes sent a step | counted |", "|---|---|---|---|---|"]
    for devices in range(2, 9):
        layout = Layout.of(recipe(), devices)
        placement = Placement.laid(detect(), layout)
        exchange = Programs(recipe(), layout, placement, resident=True).blueprint.exchanges["reduce"]
        program = exchange.program(placement.mesh).lower(exchange.specs(placement.mesh)).compile()
        found, shares = sent_bytes(program.as_text(), devices), ", ".join(map(str, layout.shares))
        counted = least(devices, exchange.size, exchange.local, bool(exchange.shares))
        rows.append(f"| {devices} | {shares} | {layout.vectors} | {found:,.0f} | {counted:,} |")
    return rows


def steps_per_second(processes: int, devices: int) -> dict[str, float]:
    """The steps/s of each variant, from host 0 of so many processes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        where = f"127.0.0.1:{free.getsockname()[1]}"
    started = []
    for host in range(processes):
        told = dict(zip(TOLD, (str(processes), str(host), where), strict=True)) if processes > 1 else {}
        told |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices)}
        command = [sys.executable, __file__, "--here"]
        started.append(subprocess.Popen(command, env=os.environ | told, stdout=subprocess.PIPE, text=True))
    said = [one.communicate(timeout=600)[0] for one in started]
    if any(one.returncode for one in started):
        raise SystemExit(f"exit codes {[one.returncode for one in started]}")
    return json.loads(said[0].splitlines()[-1])


def page(found: dict[tuple[str, str], list[float]]) -> str:
    about = f"{this_machine().title}, JAX {this_machine().versions['jax']}, {ROUNDS} alternating rounds"
    lines = ["# Several processes, and sharded optimizer state", ""]
    lines += [
        f"`python benchmarks/hosts.py`: {about}; an MLP of 1.9 million parameters, Adam, 8 replicas.",
        "",
    ]
    lines += ["| processes × devices | optimizer | steps/s | ratio to 1 × 8, whole | spread |"]
    lines += ["|---|---|---|---|---|"]
    first = found["1 × 8", "whole"]
    for (shape, way), speeds in found.items():
        ratios = [a / b for a, b in zip(speeds, first, strict=True)]
        median, spread = statistics.median(ratios), f"{min(ratios):.2f} to {max(ratios):.2f}"
        lines.append(f"| {shape} | {way} | {statistics.median(speeds):.1f} | {median:.2f} | {spread} |")
    lines += ["", "A device sends, in the sum over replicas with whole state:", "", *sent()]
    return "\n".join([*lines, ""])


def main() -> None:
    found: dict[tuple[str, str], list[float]] = {(shape, way): [] for shape in SHAPES for way in WAYS}
    for _ in range(ROUNDS):
        for shape, (processes, devices) in SHAPES.items():
            for way, speed in steps_per_second(processes, devices).items():
                found[shape, way].append(speed)
    (Path(__file__).parent / "hosts.md").write_text(page(found))


if __name__ == "__main__":
    if "--bytes" in sys.argv:
        print("\n".join(sent()))
    else:
        measure_here() if "--here" in sys.argv else main()
