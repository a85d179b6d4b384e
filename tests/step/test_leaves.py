"""Optimizers that work by leaf: the same bits whichever device has a leaf, and what shares nothing out."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import chipwise as cw
import processes
import tasks
from chipwise.run.on import On
from chipwise.run.session import Session
from chipwise.step.layout import Layout
from chipwise.step.state import abstract_state, fingerprint
from chipwise.step.step import Step
from chipwise.step.update import Update, shards_optimizer
from refusals import refused

pytestmark = pytest.mark.as_users_compile

RATE = cw.one_cycle(0.02, warmup="20%")
factored = functools.partial(optax.adafactor, min_dim_size_to_factor=8)
OPTIMIZERS = {
    "lamb": cw.recipe.lamb(lr=RATE, clip=0.5, decay="kernels"),
    "lars": cw.recipe.lars(lr=RATE, weight_decay=1e-3, trust=0.1),
    "masked": cw.recipe.lars(lr=RATE, momentum=0, decay=lambda path, leaf: path != "v"),
    "muon": cw.recipe.muon(lr=RATE, weight_decay=0.01, clip=0.5, adam_lr=0.01, adam_only=("v",)),
    "adafactor": cw.from_optax(factored, learning_rate=RATE),
}


def shampoo(learning_rate):
    """Each matrix between the inverse fourth roots of its two second moments (Gupta et al., 2018): what optax
    lacks, and couples all values of a leaf."""

    def moments(leaf):
        return [jnp.eye(n, dtype=leaf.dtype) for n in leaf.shape] if leaf.ndim == 2 else [jnp.ones_like(leaf)]

    def root(moment):
        values, vectors = jnp.linalg.eigh(moment)
        return (vectors * jnp.maximum(values, 1e-6)[None] ** -0.25) @ vectors.T

    def one(update, held):
        if update.ndim != 2:
            return -learning_rate * update * jax.lax.rsqrt(held[0]), [held[0] + update * update]
        left, right = held[0] + update @ update.T, held[1] + update.T @ update
        return -learning_rate * (root(left) @ update @ root(right)), [left, right]

    def update(updates, state, params=None):
        leaves, tree = jax.tree.flatten(updates)
        made = [one(leaf, held) for leaf, held in zip(leaves, tree.flatten_up_to(state), strict=True)]
        return tuple(tree.unflatten(part) for part in zip(*made, strict=True))

    return optax.GradientTransformation(lambda params: jax.tree.map(moments, params), update)


OF_OPTAX = {
    "shampoo": shampoo,
    "galore": functools.partial(optax.contrib.galore, rank=4, update_proj_gap=2),
    "adafactor": factored,
}


def init(key):
    a, b, c = jax.random.split(key, 3)
    params = {
        "stack": {"w": 0.3 * jax.random.normal(a, (3, 17, 17), jnp.float32), "b": jnp.zeros((3, 17))},
        "u": 0.3 * jax.random.normal(b, (tasks.FEATURES, 17), jnp.float32),
        "v": 0.3 * jax.random.normal(c, (17, tasks.CLASSES), jnp.float32),
        "bias": jnp.zeros(tasks.CLASSES),
    }
    return params, {}


def loss(params, state, batch, key, train):
    x = (batch["x"].astype(jnp.float32) / jnp.float32(255)).astype(params["v"].dtype) @ params["u"]
    for w, b in zip(params["stack"]["w"], params["stack"]["b"], strict=True):
        x = jnp.tanh(0.37 * (x @ w) + b[None])
    logits = x @ params["v"] + params["bias"][None]
    return {"loss": cw.Sum.of(cw.losses.softmax_cross_entropy(logits, batch["label"]))}, state


def wide(key):
    """Leaves whose sums and products a device's threads share, and a narrow one."""
    params, state = init(key)
    keys = jax.random.split(key, 2)
    shapes = {"u": (tasks.FEATURES, 310), "between": (310, 17)}
    made = {
        n: jax.random.normal(k, s, jnp.float32) / 9 for (n, s), k in zip(shapes.items(), keys, strict=True)
    }
    return params | made | {"bias": params["bias"].astype(jnp.bfloat16)}, state


def wide_loss(params, state, batch, key, train):
    inner = params | {"u": params["u"] @ params["between"], "bias": params["bias"].astype(jnp.float32)}
    return loss(inner, state, batch, key, train)


def recipe(name="lamb", wide_net=False, **changes):
    about = {"init": wide, "loss": wide_loss} if wide_net else {"init": init, "loss": loss}
    task = tasks.task(augment=None, **about)
    return tasks.recipe(**{"task": task, "optimizer": OPTIMIZERS[name], "duration": "6st", **changes})


def trained(recipe, devices, shard, steps=None, state=None, **more):
    """The whole state after so many steps. *Arguments:* `state`, with which to begin."""
    with Session(recipe, On(devices=devices, shard_optimizer=shard, **more)) as session:
        session.begin(state)
        session.advance((steps or session.total) - session.step)
        assert session.describe()["update"] == ("sharded" if shard else "whole")
        return session.snapshot()


def bits(state):
    return [fingerprint(part) for part in (state.params, state.optimizer, state.ema, state.scale)]


@pytest.fixture(scope="module")
def whole():
    """The bits of a run on one device, by the name of the optimizer."""
    return functools.cache(lambda name: bits(trained(recipe(name, ema=0.9), 1, None)))


@pytest.mark.slow
@pytest.mark.drawn(share=0.25)
@pytest.mark.parametrize("name", ["lamb", "muon", "adafactor"])
def test_the_bits_are_the_same_where_leaves_are_shared_out_and_on_another_count(name, whole):
    made = recipe(name, ema=0.9)
    half = trained(made, 3, True, steps=3, feed="host")
    assert bits(trained(made, 2, name == "muon", state=half)) == whole(name)


CHANGES = {
    "lamb, f16": {"precision": "f16", "ema": 0.9},
    "lamb, frozen": {"frozen": ("v",)},
    "lamb, blocks": {"blocks": 4},
    "lamb, six": {"replicas": 6, "batch": 48},
    "lamb, wide": {"wide_net": True, "ema": 0.9},
    "lars": {"ema": 0.9},
    "lars, wide": {"wide_net": True},
    "masked": {},
    "muon, f16": {"precision": "f16"},
    "muon, wide": {"wide_net": True, "ema": 0.9},
    "adafactor, wide": {"wide_net": True},
}


@pytest.mark.slow
@pytest.mark.drawn
@pytest.mark.parametrize("name", CHANGES)
def test_the_bits_are_the_same_on_any_number_of_devices(name):
    made = recipe(name.split(",")[0], **CHANGES[name])
    first = bits(trained(made, 1, None))
    assert bits(trained(made, 2, False)) == first
    for devices in {6: (2, 5, 6), 4: (2, 3, 4)}.get(made.block_count, (2, 3, 4, 5, 6, 7, 8)):
        assert bits(trained(made, devices, True)) == first, devices


def flat_init(key):
    params, state = init(key)
    return {**params, "stack": {"w": params["stack"]["w"][0], "b": params["stack"]["b"][0]}}, state


def flat_loss(params, state, batch, key, train):
    stacked = {name: leaf[None] for name, leaf in params["stack"].items()}
    return loss({**params, "stack": stacked}, state, batch, key, train)


@pytest.mark.slow
@pytest.mark.drawn(share=0.25)
@pytest.mark.parametrize("name", OF_OPTAX)
def test_any_optimizer_of_leaves_gives_one_fingerprint(name):
    """Sharded and whole, on 1, 2, 3 and 8 devices: none of them was written for that."""
    optimizer = cw.from_optax(OF_OPTAX[name], learning_rate=RATE)
    task = tasks.task(augment=None, init=flat_init, loss=flat_loss)
    made = tasks.recipe(task=task, optimizer=optimizer, duration="4st")
    first = trained(made, 1, None)
    begun = jax.device_get(task.init(jax.random.key(0))[0])
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(first.params))
    assert fingerprint(begun) != fingerprint(first.params)
    for devices, shard in ((2, False), (8, None), (2, True), (3, True), (8, True)):
        assert bits(trained(made, devices, shard)) == bits(first), (devices, shard)


@pytest.mark.slow
@pytest.mark.drawn(share=0.25)
@pytest.mark.parametrize("name", ["lamb", "muon", "adafactor"])
def test_a_run_goes_on_on_other_devices(tmp_path, name):
    made = recipe(name)
    first = cw.fit(made, tmp_path, on=On(devices=5, shard_optimizer=True), progress="none", stop_after="3st")
    assert first.steps == 3
    end = cw.fit(made, tmp_path, on=On(devices=2, shard_optimizer=True), progress="none")
    assert end.fingerprint == cw.fit(made, on=On(devices=1), progress="none").fingerprint


HOSTS = """
import json, sys
sys.path.insert(0, sys.argv[1])
import chipwise as cw
import test_leaves
result = cw.fit(
    test_leaves.recipe("muon", ema=0.9), sys.argv[2], on=cw.On(shard_optimizer=True), progress="none",
    stop_after=None if len(sys.argv) < 4 else sys.argv[3],
)
said = {"fingerprint": result.fingerprint, "steps": result.steps, "update": result.devices["update"]}
print(json.dumps(said))
"""


@pytest.mark.slow
def test_two_hosts_share_leaves_out(tmp_path):
    here = str(processes.__file__).replace("processes.py", "step")
    began = processes.answer(processes.start(HOSTS, 2, [1, 2], here, tmp_path / "run", "3st"))
    assert (began["steps"], began["update"]) == (3, "sharded")
    end = processes.answer(processes.start(HOSTS, 2, [2, 2], here, tmp_path / "run"))
    assert (
        end["fingerprint"] == cw.fit(recipe("muon", ema=0.9), on=On(devices=1), progress="none").fingerprint
    )


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if n in ("masked", "adafactor") else pytest.mark.slow) for n in OPTIMIZERS],
)
def test_the_update_leaf_by_leaf_is_that_of_the_tree(name):
    made = recipe(name)
    state, rng = abstract_state(made), np.random.default_rng(1)
    updates = Update(made, state)
    flat, leaves = updates.flat, updates.leaves
    params, grads = (
        jax.tree.map(lambda x: rng.normal(size=x.shape).astype(np.float32), flat.tree) for _ in range(2)
    )
    optimizer, now = made.optimizer, {key: np.float32(0.1) for key in made.optimizer.hyper}
    norm = np.float32(7.0) if "clip" in now else None
    moments = optimizer.init(params)
    new, after = jax.jit(functools.partial(optimizer.update, norm=norm))(grads, moments, params, now)
    vectors = flat.pack(grads), moments, flat.pack(params)
    found, state = jax.jit(leaves.update)(*vectors, (now, norm), np.int32(0))
    close = functools.partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-5)
    jax.tree.map(close, flat.unpack(found), new)
    jax.tree.map(close, state, after)
    squares = jnp.sum(jax.jit(leaves.squares)(vectors[0]))
    np.testing.assert_allclose(squares, jnp.sum(vectors[0] ** 2), 1e-5)


def test_each_part_of_the_state_belongs_to_the_leaf_that_needs_it():
    made = recipe("adafactor", frozen=("stack*",))
    leaves = Update(made, abstract_state(made)).leaves  # bias, u, v
    assert leaves.apart
    paths, _ = jax.tree_util.tree_flatten_with_path(abstract_state(made).optimizer)
    owners = {
        jax.tree_util.keystr(path): owner for (path, _), owner in zip(paths, leaves.owners, strict=True)
    }
    named = {"'bias'": 0, "'u'": 1, "'v'": 2}
    for path, owner in owners.items():
        assert owner in (None, next((i for name, i in named.items() if name in path), None)), path
    assert sorted({owner for owner in owners.values() if owner is not None}) == [0, 1, 2]
    assert {owner for path, owner in owners.items() if path.endswith("count")} == {None}


@pytest.mark.parametrize(
    "chain",
    [
        pytest.param(
            lambda lr: optax.chain(optax.clip_by_global_norm(1.0), optax.adam(lr)), marks=pytest.mark.slow
        ),
        lambda lr: optax.apply_if_finite(optax.adam(lr), 3),
        lambda lr: optax.MultiSteps(optax.adam(lr), 2).gradient_transformation(),
    ],
)
def test_leaves_that_need_each_other_stay_together(chain):
    made = recipe(optimizer=cw.from_optax(chain, lr=0.1))
    state = abstract_state(made)
    updates = Update(made, state)
    assert not updates.leaves.apart and not shards_optimizer(updates, state, 2, True)
    params = jax.tree.map(lambda x: np.full(x.shape, 0.5, np.float32), updates.flat.tree)
    moments, given = made.optimizer.init(params), ({"lr": np.float32(0.1)}, None)
    vector = updates.flat.pack(params)
    found, _ = jax.jit(updates.leaves.update)(vector, moments, vector, given, np.int32(0))
    new, _ = made.optimizer.update(params, moments, params, given[0])
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), updates.flat.unpack(found), new)


def test_each_leaf_is_on_one_device_and_a_plan_counts_the_one_that_has_most():
    made = dataclasses.replace(recipe("muon"), ema=0.9)
    step = Step(made, Layout.of(made, 5), shard_optimizer=True)
    state = abstract_state(made)
    rows = jax.tree.leaves(jax.eval_shape(lambda tree: step.rowed("optimizer", tree), state.optimizer))
    had = [step.cuts(group)["optimizer"] for group in range(5)]
    for k, leaf in enumerate(rows):
        if leaf.shape:
            owned = [i for cuts in had for i in range(cuts[k].first, cuts[k].after)] if had[0][k] else []
            assert owned == (list(range(leaf.shape[0])) if had[0][k] else [])
    sizes = [b - a for a, b in zip(step.windows[0].bounds, step.windows[0].bounds[1:], strict=False)]
    padding = step.updates.flat.size - step.updates.flat.used  # the last device's
    assert max(sizes) == step.windows[0].part == 17 * 17 + padding == sizes[step.group]
    _, summed, *_ = step.update_specs(step.specs()["window"]["hyper"])
    assert summed.shape == (17 * 17 + padding,)


@pytest.mark.parametrize("name", ["lamb", "muon"])
def test_groups_refuse_them(name):
    with refused(cw.errors.RecipeError, "shards-whole-leaves", shards=2, optimizer=name):
        recipe(name, shards=2)
