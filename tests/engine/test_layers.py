"""The vector with a row for each layer, the norms of its layers, and the same bits on any number of
devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import chipwise as cw
import tasks
from chipwise.engine.flat import Flat
from chipwise.engine.layers import Layers, rows_of
from chipwise.engine.on import On
from chipwise.engine.session import Session
from chipwise.engine.state import abstract_state, fingerprint, flat_of
from chipwise.engine.update import Update
from refusals import refused

RATE = cw.one_cycle(0.02, warmup="20%")
HIDDEN = 2501  # layers of many rows, which end within one
OPTIMIZERS = {
    "lamb": cw.recipe.lamb(lr=RATE, clip=0.5, decay="kernels"),
    "lars": cw.recipe.lars(lr=RATE, weight_decay=1e-3, trust=0.1),
    "masked": cw.recipe.lars(lr=RATE, momentum=0, decay=lambda path, leaf: path != "w"),
}


def init(key):
    a, b = jax.random.split(key)
    params = {
        "stack": {"w": 0.3 * jax.random.normal(a, (tasks.FEATURES, HIDDEN), jnp.float32)},
        "v": 0.3 * jax.random.normal(b, (HIDDEN, tasks.CLASSES), jnp.float32),
        "bias": jnp.zeros(tasks.CLASSES),
    }
    return params, {}


def loss(params, state, batch, key, train):
    x = (batch["x"].astype(jnp.float32) / jnp.float32(255)).astype(params["v"].dtype)
    logits = jnp.tanh(0.37 * (x @ params["stack"]["w"])) @ params["v"] + params["bias"][None]
    return {"loss": cw.Sum.of(cw.losses.softmax_cross_entropy(logits, batch["label"]))}, state


def recipe(name="lamb", **changes):
    task = tasks.task(init=init, loss=loss, augment=None)
    return tasks.recipe(**{"task": task, "optimizer": OPTIMIZERS[name], "duration": "6st", **changes})


def bits(recipe, devices, shard, **more):
    """Of the whole state at the end."""
    with Session(recipe, On(devices=devices, shard_optimizer=shard, **more)) as session:
        session.begin()
        session.advance(session.total)
        assert session.describe()["update"] == ("sharded" if shard else "flat")
        state = session.snapshot()
        return [fingerprint(part) for part in (state.params, state.optimizer, state.ema, state.scale)]


CHANGES = {
    "lamb": {"ema": 0.9},
    "lamb, more devices": {"ema": 0.9},
    "lamb, all": {"ema": 0.9},
    "lamb, f16": {"precision": "f16", "ema": 0.9},
    "lamb, frozen": {"frozen": ("v",)},
    "lamb, blocks": {"blocks": 4},
    "lars": {"ema": 0.9},
    "lars, six": {"replicas": 6, "batch": 48},
    "masked": {},
}


@pytest.mark.parametrize(
    "name", ["lamb", *(pytest.param(n, marks=pytest.mark.slow) for n in CHANGES if n != "lamb")]
)
def test_the_bits_are_the_same_on_any_number_of_devices_sharded_or_not(name):
    made = recipe(name.split(",")[0], **CHANGES[name])
    whole = bits(made, 1, None)
    assert bits(made, 2, True, feed="host") == whole
    if name == "lamb":  # the default suite's; the others of its devices are slow
        return
    assert bits(made, 2, False) == whole
    for devices in {6: (2, 6), 4: (2, 4)}.get(made.block_count, (2, 4, 8)):
        assert bits(made, devices, True) == whole


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_run_goes_on_on_other_devices(tmp_path, name):
    made = recipe(name)
    first = cw.fit(made, tmp_path, on=On(devices=4, shard_optimizer=True), progress="none", stop_after="3st")
    assert first.steps == 3
    end = cw.fit(made, tmp_path, on=On(devices=2, shard_optimizer=True), progress="none")
    assert end.fingerprint == cw.fit(made, on=On(devices=1), progress="none").fingerprint


def test_the_vector_s_step_is_the_tree_s():
    """The step of the engine, with its ratios by rows, against the optimizer's own with trees."""
    # Without `eps`, the first step of a value is the sign of its gradient, even of one that is rounding.
    lamb = cw.recipe.lamb(lr=0.02, decay="kernels", eps=1e-3)
    made = recipe(replicas=1, batch=8, duration="1st", optimizer=lamb)
    with Session(made, On(devices=1)) as session:
        session.begin()
        before = session.snapshot()
        batch = first_batch(session)
        gradient = jax.jit(jax.grad(lambda p: loss(p, {}, batch, None, True)[0]["loss"].total / 8))(
            before.params
        )
        session.advance()
        after = session.snapshot()
    optimizer = made.optimizer
    hyper = {name: table[0] for name, table in optimizer.tables(made.clock).items()}
    state = jax.jit(optimizer.init)(before.params)
    moved, _ = jax.jit(optimizer.update)(gradient, state, before.params, hyper)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-4, 1e-6), after.params, moved)


def first_batch(session):
    return session.recipe.task.train[np.asarray(session._windows.at(0)[0]["rows"]["indices"])[0]]


@pytest.mark.parametrize("chunks", [1, 8])
@pytest.mark.parametrize("row", [1, 128, 1024])
@pytest.mark.parametrize("size", [127, 128, 129])
def test_layers_begin_rows(size, row, chunks):
    tree = {
        "a": jnp.arange(3 * size, dtype=jnp.float32).reshape(3, size) + 1,
        "b": jnp.float32(-7.0),
        "c": jnp.ones((size, 2), jnp.float32),
    }
    flat = Flat(tree, chunks, row=row, layers=[3, 1, 1])
    vector = flat.pack(tree)
    np.testing.assert_array_equal(vector, flat.pack_host(tree))
    assert vector.shape == (flat.size,) and flat.size % (chunks * (1 if row == 1 else 2 * row)) == 0
    for found in (flat.unpack(vector), flat.unpack(np.asarray(vector)), flat.widened().unpack(vector)):
        jax.tree.map(np.testing.assert_array_equal, found, tree)
    bounds = flat.bounds * row
    layers = [*tree["a"], tree["b"].reshape(1), tree["c"].reshape(-1)]
    assert len(bounds) == 6
    for begin, end, layer in zip(bounds[:-1], bounds[1:], layers, strict=True):
        np.testing.assert_array_equal(vector[begin : begin + layer.size], layer)
        assert not np.any(vector[begin + layer.size : end])


@pytest.mark.parametrize("chunks", [1, 2, 4])
def test_norms_and_ratios_of_layers(chunks):
    rng = np.random.default_rng(0)
    tree = {"a": rng.normal(size=(3, 700)).astype(np.float32), "b": rng.normal(size=130).astype(np.float32)}
    flat = Flat(tree, chunks, row=128, layers=[3, 1])
    layers = Layers(flat, {"a": True, "b": False})
    vector = flat.pack(tree)
    lengths = layers.lengths(lambda x, k: (x, k * x), (vector, 2.0), flat.size)
    shapes = layers.shapes(flat.size)
    assert lengths.shape == shapes[0].shape == (2 * flat.size // 128,)

    class Optimizer:
        def ratios(self, params, others, now):
            np.testing.assert_allclose(
                params, [*np.linalg.norm(tree["a"], axis=1), np.linalg.norm(tree["b"])], 1e-6
            )
            return params / others + now["one"]

    ratios = layers.ratios(Optimizer(), {"one": jnp.float32(1)}, lengths)
    assert ratios.shape == shapes[1].shape == (flat.size // 128,)
    expected = np.zeros(ratios.size, np.float32)
    expected[: flat.bounds[-1]] = np.repeat([1.5, 1.5, 1.5, 1.0], np.diff(flat.bounds))
    np.testing.assert_allclose(ratios, expected)
    half = flat.size // 2
    for part in (slice(None), slice(0, half), slice(half, None)):
        moved, count = layers.moved(
            lambda x, k, ratios: (k * x * ratios, k), (vector[part], jnp.float32(2)), by_row(ratios, part)
        )
        np.testing.assert_array_equal(moved, 2 * vector[part] * np.repeat(ratios, 128)[part])
        assert count == 2


def by_row(ratios, part):
    return ratios[slice(*(n and n // 128 for n in (part.start, part.stop)))]


def test_rows_are_longer_in_larger_nets_and_pad_little():
    shapes = {
        "a": jax.ShapeDtypeStruct((300, 10**6), np.float32),
        "b": jax.ShapeDtypeStruct((10**6,), np.float32),
    }
    for optimizer, chunks, row in (
        (cw.recipe.lamb(lr=0.1), 8, 65536), (cw.recipe.lamb(lr=0.1), 2048, 2048), (cw.recipe.lamb(lr=0.1,
        stacked="a"), 8, 16384), (cw.adamw(lr=0.1), 8, 1),
    ):  # fmt: skip
        found, layers = rows_of(optimizer, shapes, chunks)
        flat = Flat(shapes, chunks, row=found, layers=layers)
        assert found == row and flat.size < 301_000_000 * 17 / 16
    small = recipe()
    flat = flat_of(small, abstract_state(small).params)
    assert flat.row == 128 and Update(small, abstract_state(small)).lengths.shape == (2 * flat.size // 128,)


def test_groups_refuse_them():
    with refused(cw.errors.RecipeError, "shards-whole-leaves", shards=2, optimizer="lamb"):
        recipe(shards=2)
