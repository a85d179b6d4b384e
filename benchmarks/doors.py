"""The same small network in each framework, compared with the framework itself: first step, fingerprints,
speed, lines of code.

    python benchmarks/doors.py [parity] [bits] [speed] [--doors torch keras] [--runs 3] [--steps 200]

The networks are those of `examples/my_*.py`, on batches of 64 digits of 8 x 8.

* `parity`: one step of SGD at rate 1 without dropout in float64, by chipwise's task and by the framework
  itself: loss, parameters and statistics afterwards. Plain functions are compared with NNX.
* `bits`: fingerprints of 12 steps on 1, 2, 4 and 8 simulated devices.
* `speed`: steps a second in float32, SGD with momentum; forward, loss, backward and update. chipwise runs 1
  replica, so that both sides compute one batch at once. Compilation and 20 steps are not timed. Every
  measurement has its own process, and the contenders alternate. Run it on an idle machine.

Results are stored in `--keep`; the table is written to `benchmarks/doors.md` and `docs/models.md`.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib
import json
import os
import re
import statistics
import subprocess
import sys
import time
from datetime import date
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "examples"))
os.environ.setdefault("KERAS_BACKEND", "jax")

LIBRARIES = {"torch": "torch", "keras": "keras", "nnx": "flax", "linen": "flax"}
LIBRARIES |= {"equinox": "equinox", "functions": "jax"}
DOORS = tuple(LIBRARIES)
BATCH, WARM = 64, 20


def example(door):
    return importlib.import_module(f"my_{door}")


def digits():
    """The first batch: images `(64, 8, 8)` uint8 and labels `(64,)` int32."""
    import numpy as np

    import chipwise as cw

    return cw.datasets.digits().train.take(np.arange(BATCH))


# ---- parity


def parity(door):
    """The largest difference from the framework's own step; values are around 1."""
    import jax

    from chipwise.interop.door import own_promotion

    with jax.enable_x64(True), own_promotion(), _keras_in_float64(door):
        task = example(door).recipe(dropout=0.0).task
        start = jax.tree.map(_double, task.init(jax.random.key(0)))
        batch = digits()

        @jax.jit
        def step(params, state):
            def mean(params):
                sums, new = task.loss(params, state, batch, jax.random.key(1), True)
                return sums["loss"].total / sums["loss"].count, new

            (loss, new), slopes = jax.value_and_grad(mean, has_aux=True)(params)
            return loss, jax.tree.map(lambda p, slope: p - slope, params, slopes), new

        loss, *end = step(*start)
        theirs = {"torch": _torch, "keras": _keras, "linen": _linen, "equinox": _equinox}.get(door, _nnx)
        expected, pairs = theirs(door, start, end, batch["image"][..., None] / 16.0, batch["label"])
        return max(_apart(one, other) for one, other in [(loss, expected), *pairs])


def _double(x):
    import jax.numpy as jnp

    return jnp.asarray(x, jnp.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x


def _apart(one, other):
    import numpy as np

    one, other = np.asarray(one, np.float64), np.asarray(other, np.float64)
    if one.shape != other.shape:
        raise SystemExit(f"{one.shape} beside {other.shape}")
    return float(np.max(np.abs(one - other)))


@contextlib.contextmanager
def _keras_in_float64(door):
    if door != "keras":
        yield
        return
    import keras

    before = keras.config.floatx(), keras.config.dtype_policy()
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    try:
        yield
    finally:
        keras.config.set_floatx(before[0])
        keras.config.set_dtype_policy(before[1])


def _torch(door, start, end, images, labels):
    import torch

    from chipwise.interop.torch import to_module

    def module(trees):
        return to_module(example(door).net(0.0).double(), *trees)

    own, ours = module(start).train(), module(end)
    x = torch.from_numpy(images).permute(0, 3, 1, 2)
    loss = torch.nn.functional.cross_entropy(own(x), torch.from_numpy(labels).long())
    loss.backward()
    torch.optim.SGD(own.parameters(), lr=1.0).step()
    return loss.detach(), zip(ours.state_dict().values(), own.state_dict().values(), strict=True)


def _keras(door, start, end, images, labels):
    import keras

    from chipwise.interop.keras import to_model

    own, ours = (to_model(example(door).net(0.0), *trees) for trees in (start, end))
    own.compile(keras.optimizers.SGD(1.0), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    loss = own.train_on_batch(images, labels)
    return loss, [(a.value, b.value) for a, b in zip(ours.weights, own.weights, strict=True)]


def _linen(door, start, end, images, labels):
    import jax
    import optax

    net, (params, state) = example(door).Net(0.0), start

    def mean(params):
        logits, new = net.apply({"params": params, **state}, images, True, mutable=["batch_stats"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean(), new

    (loss, new), slopes = jax.value_and_grad(mean, has_aux=True)(params)
    return loss, _zipped(end, [jax.tree.map(lambda p, slope: p - slope, params, slopes), new])


def _equinox(door, start, end, images, labels):
    import equinox as eqx
    import jax
    import optax

    from chipwise.interop.equinox import to_model

    def make(key):
        return example(door).Net(key, 0.0)

    model, state = to_model(make, *start)

    def mean(model):
        call = jax.vmap(model, axis_name="batch", in_axes=(0, None, None), out_axes=(0, None))
        logits, new = call(images.transpose(0, 3, 1, 2), state, jax.random.key(0))
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean(), new

    (loss, new), slopes = eqx.filter_value_and_grad(mean, has_aux=True)(model)
    after = eqx.apply_updates(model, jax.tree.map(lambda slope: -slope, slopes))
    return loss, _zipped(
        eqx.filter(to_model(make, *end), eqx.is_array), eqx.filter((after, new), eqx.is_array)
    )


def _nnx(door, start, end, images, labels):
    """NNX's own step; plain functions have the same arrays, with additional axes of length 1."""
    import my_nnx
    import optax
    from flax import nnx

    model = my_nnx.Net(nnx.Rngs(0), 0.0)
    model.train()
    kinds = (nnx.Param, nnx.BatchStat)
    for kind, tree in zip(kinds, start, strict=True):
        own = nnx.state(model, kind)
        flat = [(path, v.replace(_at(tree, path).reshape(v.shape))) for path, v in nnx.to_flat_state(own)]
        nnx.update(model, nnx.from_flat_state(flat))

    def mean(model):
        return optax.softmax_cross_entropy_with_integer_labels(model(images), labels).mean()

    optimizer = nnx.Optimizer(model, optax.sgd(1.0), wrt=nnx.Param)
    loss, slopes = nnx.value_and_grad(mean)(model)
    optimizer.update(model, slopes)
    own = [nnx.to_flat_state(nnx.state(model, kind)) for kind in kinds]
    return loss, [
        (_at(tree, path).reshape(v.shape), v[...])
        for tree, flat in zip(end, own, strict=True)
        for path, v in flat
    ]


def _at(tree, path):
    for name in path:
        tree = tree[str(name)]
    return tree


def _zipped(ours, theirs):
    import jax

    return list(zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True))


# ---- bits


def bits(door):
    """Fingerprints on 1, 2, 4 and 8 devices."""
    import chipwise as cw

    cw.simulate(8)
    recipe = cw.load(f"{ROOT}/examples/my_{door}.py:recipe", ["duration=12st"])
    return [
        cw.fit(recipe, on=cw.On(devices=n), run=None, progress="none", eval_every=None).fingerprint
        for n in (1, 2, 4, 8)
    ]


# ---- speed


def ours(door, steps):
    """Steps a second of chipwise's own loop."""
    import chipwise as cw

    settings = [f"duration={WARM + steps}st", "replicas=1"]
    recipe = cw.load(f"{ROOT}/examples/my_{door}.py:recipe", settings)
    with cw.Stepper(recipe, on=cw.On(devices=1)) as stepper:

        def run(n):
            for _ in range(n):
                stepper.step()
            stepper.metrics()  # waits for the last

        return rate(run, steps)


def theirs(door, steps):
    """Steps a second of PyTorch's and Keras's usual loop; for the others, of a plain jitted loop."""
    import numpy as np

    batch = digits()
    images, labels = (batch["image"][..., None] / 16).astype(np.float32), batch["label"]
    return rate({"torch": torch_loop, "keras": keras_loop}.get(door, jax_loop)(door, images, labels), steps)


def rate(run, steps):
    run(WARM)
    begin = time.perf_counter()
    run(steps)
    return steps / (time.perf_counter() - begin)


def torch_loop(door, images, labels):
    import torch

    module = example(door).net().train()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    x, y = torch.from_numpy(images).permute(0, 3, 1, 2).contiguous(), torch.from_numpy(labels).long()

    def run(steps):
        for _ in range(steps):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(module(x), y).backward()
            optimizer.step()

    return run


def keras_loop(door, images, labels):
    import keras

    model = example(door).net()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9, weight_decay=5e-4), loss=loss)

    def run(steps):
        for _ in range(steps):
            model.train_on_batch(images, labels)

    return run


def jax_loop(door, images, labels):
    """A loop with jit, grad and optax, as in the examples of Flax and Equinox."""
    import jax
    import jax.numpy as jnp
    import optax

    task = example(door).recipe().task
    optimizer = optax.chain(optax.add_decayed_weights(5e-4), optax.sgd(0.1, momentum=0.9))
    batch = {"image": jnp.asarray(images[..., 0] * 16), "label": jnp.asarray(labels)}
    params, state = task.init(jax.random.key(0))
    held = [params, state, optimizer.init(params), jax.random.key(1)]

    @jax.jit
    def step(params, state, moments, key):
        key, own = jax.random.split(key)

        def mean(params):
            sums, new = task.loss(params, state, batch, own, True)
            return sums["loss"].total / sums["loss"].count, new

        grads, state_after = jax.grad(mean, has_aux=True)(params)
        updates, moments = optimizer.update(grads, moments, params)
        return optax.apply_updates(params, updates), state_after, moments, key

    def run(steps):
        for _ in range(steps):
            held[:] = step(*held)
        jax.block_until_ready(held[0])

    return run


# ---- lines of code, and the page


def glue(door):
    """The number of lines of the statement that makes the task."""
    tree = ast.parse((ROOT / f"examples/my_{door}.py").read_text())
    made = [node for node in ast.walk(tree) if isinstance(node, ast.Assign)]
    (task,) = (node for node in made if ast.unparse(node.targets[0]) == "task")
    return task.end_lineno - task.lineno + 1


NOT_YET = "not measured"


def table(found):
    """The table of all frameworks, as Markdown."""
    lines = [
        "| framework | lines of code | first step, float64: off by | fingerprints | steps/s | own loop "
        "| ratio |",
        "|---|---|---|---|---|---|---|",
    ]
    for door in DOORS:
        one = found.get(door, {})
        off = f"{one['parity']:.0e}" if "parity" in one else NOT_YET
        same = ("equal" if len(set(one["bits"])) == 1 else "differ") if "bits" in one else NOT_YET
        speeds = [NOT_YET, NOT_YET, ""]
        if "speed" in one:
            runs = [one["speed"]["ours"], one["speed"]["theirs"]]
            speeds = [f"{statistics.median(v):.0f} ({min(v):.0f} to {max(v):.0f})" for v in runs]
            speeds.append(f"{statistics.median(runs[0]) / statistics.median(runs[1]):.2f}")
        name = f"[{door}](../examples/my_{door}.py), {LIBRARIES[door]} {one.get('version', '')}"
        lines.append(f"| {' | '.join([name, str(glue(door)), off, same, *speeds])} |")
    return "\n".join(lines)


def write(found, given):
    """Writes the table to its own page and to docs/models.md."""
    from chipwise.machine.fingerprint import this_machine

    cpu = this_machine().cpu
    page = f"""# The same network in each framework

`python benchmarks/doors.py`; its docstring says how each column is measured. {cpu}, {date.today()}.
The first step is compared with the framework's own, fingerprints on 1, 2, 4 and 8 devices. Steps a second
are the median of {given.runs} processes of {given.steps} steps each, with their range.

{table(found)}
"""
    (ROOT / "benchmarks" / "doors.md").write_text(page)
    docs = ROOT / "docs" / "models.md"
    text, old = docs.read_text(), r"\| framework \| lines of code .*?\n\n"
    docs.write_text(re.sub(old, lambda _: f"{table(found)}\n\n", text, flags=re.DOTALL))


def apart(kind, door, steps):
    """What `--one kind door` prints, in a process of its own."""
    command = [sys.executable, __file__, "--one", kind, door, "--steps", str(steps)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    if done.returncode:
        raise SystemExit(done.stderr[-3000:])
    return json.loads(done.stdout.splitlines()[-1])


def measured(part, door, given):
    if part != "speed":
        return apart(part, door, given.steps)
    runs = {"ours": [], "theirs": []}
    for _ in range(given.runs):
        for kind, values in runs.items():
            values.append(apart(kind, door, given.steps))
    return runs


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parts = ("parity", "bits", "speed")
    parser.add_argument("parts", nargs="*", default=list(parts), metavar="|".join(parts))
    parser.add_argument("--doors", nargs="+", default=list(DOORS), choices=DOORS)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--keep", type=Path, default=ROOT / "runs" / "doors.json")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        kind, door = given.one
        functions = {"parity": parity, "bits": bits, "ours": ours, "theirs": theirs}
        print(json.dumps(functions[kind](door, *([given.steps] if kind in ("ours", "theirs") else []))))
        return
    found = json.loads(given.keep.read_text()) if given.keep.exists() else {}
    for door in given.doors:
        one = found.setdefault(door, {})
        one["version"] = version(LIBRARIES[door])
        for part in given.parts:
            one[part] = measured(part, door, given)
            print(door, part, one[part], flush=True)
            given.keep.parent.mkdir(parents=True, exist_ok=True)
            given.keep.write_text(json.dumps(found))
    write(found, given)


if __name__ == "__main__":
    main()
