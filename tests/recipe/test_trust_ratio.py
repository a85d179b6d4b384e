"""LAMB and LARS against optax's, their papers' rules, and what biases, zeros and stacked layers get."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from chipwise.base.errors import RecipeError
from chipwise.recipe.duration import Clock
from chipwise.recipe.schedules import cosine, warmup
from chipwise.recipe.trust_ratio import lamb, lars
from chipwise.recipe.wrappers import grouped
from refusals import refused

CLOCK = Clock(640, 32, 20)
SHAPES = {"in": {"kernel": (7, 9), "bias": (9,)}, "out": {"kernel": (9, 2), "zero": (3,)}}


def trees(seed=0, count=12):
    rng = np.random.default_rng(seed)

    def made():
        return jax.tree.map(
            lambda s: rng.normal(size=s).astype(np.float32), SHAPES, is_leaf=lambda x: isinstance(x, tuple)
        )

    params = made()
    params["out"]["zero"][:] = 0  # whose norm is 0 in the first step: the ratio is 1
    return params, [made() for _ in range(count)]


def run(optimizer, params, grads):
    params = jax.tree.map(jnp.asarray, params)
    state, tables = optimizer.init(params), optimizer.tables(CLOCK)
    step = jax.jit(optimizer.update)
    for i, grad in enumerate(grads):
        params, state = step(grad, state, params, {k: v[i] for k, v in tables.items()})
    return params


def run_optax(transform, params, grads):
    params = jax.tree.map(jnp.asarray, params)
    state = transform.init(params)

    @jax.jit
    def step(grad, state, params):
        updates, state = transform.update(grad, state, params)
        return optax.apply_updates(params, updates), state

    with jax.numpy_dtype_promotion("standard"):
        for grad in grads:
            params, state = step(grad, state, params)
    return params


def close(ours, theirs, rtol=2e-5):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol, 1e-6), ours, theirs)


def rate(schedule):
    table = jnp.asarray(schedule.table(CLOCK))
    return lambda step: table[step]


@pytest.mark.parametrize("decay", [0.0, 0.01, 0.3])
def test_lamb_is_optax_s(decay):
    params, grads = trees()
    lr = warmup(cosine(0.05), "3st")
    ours = run(lamb(lr, b2=0.99, weight_decay=decay), params, grads)
    close(ours, run_optax(optax.lamb(rate(lr), b2=0.99, weight_decay=decay), params, grads))


@pytest.mark.parametrize("settings", [{}, {"trust": 0.02, "eps": 1e-3}, {"momentum": 0.0}])
def test_lars_is_optax_s_without_decay(settings):
    params, grads = trees(1)
    lr = cosine(3.0)
    names = {"trust_coefficient": "trust", "eps": "eps", "momentum": "momentum"}
    theirs = {name: settings[ours] for name, ours in names.items() if ours in settings}
    close(run(lars(lr, **settings), params, grads), run_optax(optax.lars(rate(lr), **theirs), params, grads))


def test_lars_with_decay_divides_by_both_norms_as_in_its_paper():
    params, grads = trees(2, 3)
    expected, velocity = dict(params["in"]), dict.fromkeys(params["in"], 0.0)
    for grad in grads:
        for name, g in grad["in"].items():
            p = expected[name]
            g, ratio = (g + 0.1 * p, 0.02 * np.linalg.norm(p) / (np.linalg.norm(g) + 0.1 * np.linalg.norm(p)))
            velocity[name] = 0.9 * velocity[name] + 0.5 * ratio * g
            expected[name] = p - velocity[name]
    close(run(lars(0.5, weight_decay=0.1, trust=0.02), params, grads)["in"], expected)


def test_what_does_not_decay_has_no_ratio_either():
    params, grads = trees(3)
    chosen = jax.tree.map(lambda p: p.ndim > 1, params)
    theirs = optax.chain(
        optax.scale_by_adam(eps=1e-6),
        optax.add_decayed_weights(0.1, mask=chosen),
        optax.masked(optax.scale_by_trust_ratio(), chosen),
        optax.scale_by_learning_rate(0.05),
    )
    close(run(lamb(0.05, weight_decay=0.1, decay="kernels"), params, grads), run_optax(theirs, params, grads))
    moved = run(lars(0.05, weight_decay=0.1, decay="kernels"), params, grads[:1])
    np.testing.assert_allclose(
        moved["in"]["bias"], params["in"]["bias"] - 0.05 * grads[0]["in"]["bias"], 1e-6
    )


@pytest.mark.parametrize("make", [lamb, lars])
def test_a_row_of_a_stack_is_a_layer(make):
    params, grads = trees(4)
    optimizer = make(0.05, weight_decay=0.1)

    def stacked(tree):
        return {"blocks": {"stack": {"kernel": tree["in"]["kernel"]}}}

    def apart(tree):
        return {str(i): row for i, row in enumerate(tree["in"]["kernel"])}

    ours = run(optimizer, stacked(params), [stacked(g) for g in grads])["blocks"]["stack"]["kernel"]
    rows = run(optimizer, apart(params), [apart(g) for g in grads])
    close(ours, np.stack([rows[str(i)] for i in range(7)]))
    whole = run(optimizer.replace(stacked=""), stacked(params), [stacked(g) for g in grads])
    close(whole["blocks"]["stack"]["kernel"], run(optimizer, params, grads)["in"]["kernel"])
    assert optimizer.layers(stacked(params)) == [7] and optimizer.layers(params) == [1, 1, 1, 1]


def test_others_cannot_wrap_them():
    with refused(RecipeError, "optimizer-not-elementwise", what="the optimizer in grouped"):
        grouped(lamb(0.1), {"*": {"lr": 2.0}})
