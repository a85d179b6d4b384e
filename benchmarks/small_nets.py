"""Steps a second of small nets: one and many steps in a call, beside Keras and plain JAX.

    python benchmarks/small_nets.py

A process for each of chipwise, Keras and plain JAX compiles everything first. Then all are timed by turns,
one at a time, each for some thousand steps or fewer. A row has the median of the turns, their range, and
the median of the ratios to chipwise's single steps in the same turn.

chipwise runs `cw.training` between two rows of its log, with metrics. Keras runs an epoch of `fit` with
each of several `steps_per_execution`, and the best counts. The plain loop and the plain `lax.scan` run the
same loss on the whole batch with `optax.adam`, data on the device, and read nothing.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__)
MANY = 32
TURNS = 7
WARM = 2  # turns that do not count


class Net(NamedTuple):
    """A net's batch, its steps in a turn, those of the plain scan, its numbers of replicas and Keras' steps
    per execution."""

    batch: int
    steps: int
    scanned: int
    replicas: tuple[int, ...]
    executions: tuple[int, ...]


NETS = {
    "dense": Net(64, 4096, 4096, (1, 8), (1, 8, 32)),
    "digits": Net(64, 1024, 128, (8,), (1, 8, 32)),
    "mnist": Net(512, 16, 2, (8,), (1, 4)),
}
"""XLA compiles a convolution in a loop otherwise on a CPU, so that few steps in a scan take long."""


# ---- the nets


def dense() -> Any:
    """A net of 64, 32 and 10 values."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    import chipwise as cw

    def init(key: Any) -> Any:
        keys, sizes = jax.random.split(key), ((64, 32), (32, 10))
        return [
            (0.1 * jax.random.normal(k, s), jnp.zeros(s[1])) for k, s in zip(keys, sizes, strict=True)
        ], {}

    def loss(params: Any, state: Any, batch: Any, key: Any, train: bool) -> Any:
        (w, b), (v, c) = params
        logits = jax.nn.relu(batch["x"] @ w + b[None]) @ v + c[None]
        return {"loss": cw.Sum.of(cw.losses.softmax_cross_entropy(logits, batch["label"]))}, state

    rng = np.random.default_rng(0)
    x, label = rng.normal(size=(2048, 64)).astype(np.float32), rng.integers(0, 10, 2048).astype(np.int32)
    task = cw.Task(init=init, loss=loss, train=cw.Arrays(x=x, label=label))
    return cw.Recipe(task=task, batch=64, duration="1ep", optimizer=cw.adam(lr=1e-3))


def recipe(name: str, steps: int, replicas: int) -> Any:
    import dataclasses

    import chipwise as cw

    made = dense() if name == "dense" else cw.load(name, synthetic=name == "mnist")
    task = dataclasses.replace(made.task, eval=None)
    changes = {"task": task, "batch": NETS[name].batch, "replicas": replicas, "duration": f"{steps}st"}
    return dataclasses.replace(made, optimizer=cw.adam(lr=1e-3), **changes)


# ---- a process's ways, each a function that runs a turn's steps and returns how many


Ways = dict[str, Callable[[], int]]


def chipwise_ways(scale: int, turns: int) -> Ways:
    import chipwise as cw

    def run(name: str, replicas: int, most: int) -> Callable[[], int]:
        steps = max(MANY, NETS[name].steps // scale) if name != "mnist" else NETS[name].steps
        made = recipe(name, steps * (turns + WARM + 1), replicas)
        on = cw.On(devices=1, feed="device", stuck=0, steps_per_call=most)
        how = {"on": on, "log_every": f"{steps}st", "eval_every": None, "progress": "none"}
        events = cw.training(made, **how)

        def turn() -> int:
            next(event for event in events if event.kind == "log")
            return steps

        return turn

    return {
        f"{name}|chipwise, {replicas} replica{'s' * (replicas > 1)}, {what}": run(name, replicas, most)
        for name, net in NETS.items()
        for replicas in net.replicas
        for what, most in (("a step a call", 1), (f"{MANY} steps a call", MANY))
    }


def plain_ways(scale: int, turns: int) -> Ways:
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax

    def made(name: str) -> Iterator[tuple[str, Callable[[], int]]]:
        net, one = NETS[name], recipe(name, 1, 1)
        task, optimizer = one.task, optax.adam(1e-3)
        columns = task.train.take(np.arange(min(len(task.train), 1437)))
        data = {column: jnp.asarray(values) for column, values in columns.items()}
        params, state = task.init(jax.random.key(0))
        rows = np.random.default_rng(0).integers(0, len(columns["label"]), (net.steps, net.batch))
        indices = jnp.asarray(rows, jnp.int32)

        def step(carry: Any, index: Any) -> Any:
            params, state, moments, number = carry
            batch = {column: values[index] for column, values in data.items()}

            def mean(params: Any) -> Any:
                sums, after = task.loss(params, state, batch, jax.random.key(number), True)
                return sums["loss"].total / sums["loss"].count, after

            gradient, state = jax.grad(mean, has_aux=True)(params)
            updates, moments = optimizer.update(gradient, moments, params)
            return (optax.apply_updates(params, updates), state, moments, number + 1), None

        single = jax.jit(lambda carry: step(carry, indices[carry[3] % net.steps])[0], donate_argnums=0)
        many = max(1, net.scanned // scale)
        scan = jax.jit(lambda carry: jax.lax.scan(step, carry, indices[:many])[0], donate_argnums=0)
        first = params, state, optimizer.init(params), jnp.int32(0)
        carries = [jax.tree.map(jnp.array, first) for _ in range(2)]
        steps = max(1, net.steps // scale)

        def loop() -> int:
            for _ in range(steps):
                carries[0] = single(carries[0])
            jax.block_until_ready(carries[0])
            return steps

        def scanned() -> int:
            carries[1] = jax.block_until_ready(scan(carries[1]))
            return many

        yield f"{name}|plain jitted loop", loop
        yield f"{name}|plain lax.scan", scanned

    return dict(way for name in NETS for way in made(name))


def keras_ways(scale: int, turns: int) -> Ways:
    import keras
    import numpy as np

    layers = keras.layers

    def normed(layer: Any, *after: Any) -> list[Any]:
        return [layer, layers.BatchNormalization(), layers.ReLU(), *after]

    def convolved(filters: int, size: int, strides: int = 1) -> list[Any]:
        return normed(layers.Conv2D(filters, size, strides=strides, padding="same", use_bias=False))

    shapes = {"dense": (64,), "digits": (8, 8, 1), "mnist": (28, 28, 1)}
    nets: dict[str, Callable[[], list[Any]]] = {
        "dense": lambda: [layers.Dense(32, activation="relu")],
        "digits": lambda: [
            *convolved(8, 3, 2),
            layers.Flatten(),
            *normed(layers.Dense(64, use_bias=False), layers.Dropout(0.2)),
        ],
        "mnist": lambda: [
            *convolved(6, 3),
            *convolved(12, 6, 2),
            *convolved(24, 6, 2),
            layers.Flatten(),
            *normed(layers.Dense(200, use_bias=False), layers.Dropout(0.5)),
        ],
    }

    def fitted(name: str, executed: int) -> Callable[[], int]:
        net, rng = NETS[name], np.random.default_rng(0)
        steps = max(executed, net.steps // scale // executed * executed)
        model = keras.Sequential([keras.Input(shapes[name]), *nets[name](), layers.Dense(10)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(1e-3), loss, steps_per_execution=executed)
        x = rng.random((net.batch * steps, *shapes[name]), np.float32)
        y = rng.integers(0, 10, len(x)).astype(np.int32)

        def turn() -> int:
            model.fit(x, y, batch_size=net.batch, verbose=0)
            return steps

        return turn

    return {f"{name}|Keras, {n}": fitted(name, n) for name, net in NETS.items() for n in net.executions}


WORKERS = {"chipwise": chipwise_ways, "keras": keras_ways, "plain": plain_ways}


def work(worker: str, scale: int, turns: int) -> None:
    """Answers each way's name on standard input with its steps a second."""
    ways = WORKERS[worker](scale, turns)
    print(json.dumps(list(ways)), flush=True)
    for line in sys.stdin:
        way = ways[line.strip()]
        began = time.perf_counter()
        steps = way()
        print(json.dumps(steps / (time.perf_counter() - began)), flush=True)
    os._exit(0)  # runs that are not at their end are no errors here


# ---- all processes, by turns


def measured(turns: int, scale: int) -> dict[str, list[float]]:
    """The steps a second of each way, a value for each turn."""
    environment = os.environ | {"KERAS_BACKEND": "jax", "JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "3"}
    rates: dict[str, list[float]] = {}
    processes, whose = [], {}
    for worker in WORKERS:
        command = [
            sys.executable,
            str(HERE),
            "--worker",
            worker,
            "--scale",
            str(scale),
            "--turns",
            str(turns),
        ]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        process = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL, **pipes)
        processes.append(process)
        for name in answer(process, None):
            whose[name] = process
    for turn in range(WARM + turns):
        for name in sorted(whose, key=list(whose).index, reverse=turn % 2 == 1):
            rate = answer(whose[name], name)
            if turn >= WARM:
                rates.setdefault(name, []).append(rate)
    for process in processes:
        process.stdin.close()
        process.wait()
    return rates


def answer(process: Any, name: str | None) -> Any:
    if name is not None:
        process.stdin.write(name + "\n")
        process.stdin.flush()
    line = process.stdout.readline()
    if not line:
        raise SystemExit(f"{process.args} ended: {process.wait()}")
    return json.loads(line)


def rows(rates: dict[str, list[float]]) -> list[tuple[str, str, list[float], list[float]]]:
    """Net, way, steps a second, and their ratios to chipwise's single steps with the fewest replicas."""
    found = []
    for net in NETS:
        ways = {
            name.partition("|")[2]: values for name, values in rates.items() if name.startswith(f"{net}|")
        }
        keras = {name: values for name, values in ways.items() if name.startswith("Keras")}
        best = max(keras, key=lambda name: statistics.median(keras[name]))
        single = next(values for name, values in ways.items() if name.endswith("a step a call"))
        for name, values in ways.items():
            if name in keras and name != best:
                continue
            told = f"Keras, steps_per_execution={name.split()[-1]}, its best" if name == best else name
            found.append((net, told, values, [a / b for a, b in zip(values, single, strict=True)]))
    return found


def version(package: str) -> str:
    found = list(importlib.metadata.distributions(name=package))
    return f"{package} {found[0].version if found else 'absent'}"


def page(rates: dict[str, list[float]], turns: int) -> str:
    versions = ", ".join(map(version, ("jax", "keras", "optax")))
    lines = [
        "# Small nets: steps a second",
        "",
        f"`python benchmarks/small_nets.py`; {cpu()}, {os.cpu_count()} cores, one device; Python "
        f"{platform.python_version()}, {versions}; {turns} turns, median (min to max).",
        "",
        "`dense` is a net of 64, 32 and 10 values. It and `digits` have batches of 64, `mnist` of "
        "512, all with Adam in float32. chipwise runs `cw.training` with its log; Keras an epoch of "
        "`fit`; the plain loop and scan run the loss on the whole batch, without replicas and "
        f"metrics. The ratio is to the first row of the net, in the same turn. {MANY} steps a call are "
        f"one call of a program where single steps of `dense` and `digits` are {2 * MANY}. `mnist` has "
        "convolutions that XLA compiles otherwise in a loop: it runs one step a call, whatever is "
        "asked for.",
        "",
        "| net | way | steps/s | ratio |",
        "|---|---|---|---|",
    ]
    for net, way, values, ratios in rows(rates):
        spread = f"{statistics.median(values):,.0f} ({min(values):,.0f} to {max(values):,.0f})"
        lines.append(f"| `{net}` | {way} | {spread} | {statistics.median(ratios):.2f} |")
    return "\n".join(lines) + "\n"


def cpu() -> str:
    known = Path("/proc/cpuinfo")
    text = known.read_text() if known.exists() else ""
    named = [line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name")]
    return named[0] if named else platform.machine()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--turns", type=int, default=TURNS)
    parser.add_argument(
        "--scale", type=int, default=1, help="divides the steps of a turn, to try the program"
    )
    parser.add_argument("--output", type=Path, default=HERE.with_suffix(".md"))
    parser.add_argument("--worker", choices=WORKERS, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        work(given.worker, given.scale, given.turns)
    given.output.write_text(page(measured(given.turns, given.scale), given.turns))
    print(given.output.read_text())


if __name__ == "__main__":
    main()
