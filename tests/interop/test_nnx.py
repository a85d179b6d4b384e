"""`functional`: an NNX module as pure `init` and `apply`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from chipwise.base.errors import RecipeError
from chipwise.data.sources import Arrays
from chipwise.interop.nnx import functional, task
from chipwise.models.conv_layers import BatchNorm
from chipwise.models.large import axes
from chipwise.recipe.losses import softmax_cross_entropy
from refusals import refused


class Net(nnx.Module):
    """A list of layers, batch norm and two dropouts of one shape."""

    def __init__(self, *, rngs):
        self.layers = nnx.List([nnx.Linear(6, 6, rngs=rngs), nnx.Linear(6, 6, rngs=rngs)])
        self.norm = BatchNorm(6)
        self.drop = nnx.List([nnx.Dropout(0.5, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)])

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        x = self.norm(x)
        ones = jnp.ones_like(x)
        return x, self.drop[0](ones), self.drop[1](ones)


@pytest.fixture
def net():
    init, apply = functional(lambda rngs: Net(rngs=rngs))
    return *init(jax.random.key(0)), jax.jit(apply, static_argnames="train")


X = np.arange(48, dtype=np.float32).reshape(8, 6)


def test_init_gives_plain_trees_by_key():
    init, _ = functional(lambda rngs: Net(rngs=rngs))
    params, state = init(jax.random.key(0))
    assert sorted(params["layers"]) == ["0", "1"]
    assert set(state) == {"norm"} and set(state["norm"]) == {"mean", "var"}
    again, other = jax.jit(init)(jax.random.key(0))[0], init(jax.random.key(1))[0]
    np.testing.assert_allclose(params["layers"]["0"]["kernel"], again["layers"]["0"]["kernel"], rtol=1e-6)
    assert (params["layers"]["0"]["kernel"] != other["layers"]["0"]["kernel"]).any()


def test_no_other_variables_is_an_empty_state():
    init, apply = functional(lambda rngs: nnx.Linear(6, 2, rngs=rngs))
    params, state = init(jax.random.key(0))
    assert state == {}
    outputs, new = apply(params, state, X, None, True)
    assert outputs.shape == (8, 2) and new == {}


def test_running_statistics_change_in_training_only(net):
    params, state, apply = net
    _, new = apply(params, state, X, jax.random.key(1), train=True)
    assert (new["norm"]["mean"] != state["norm"]["mean"]).all()
    trained, same = apply(params, new, X, None, train=False)
    np.testing.assert_array_equal(same["norm"]["mean"], new["norm"]["mean"])
    untrained, _ = apply(params, state, X, None, train=False)
    assert (trained[0] != untrained[0]).any()


def test_dropout_is_a_function_of_the_key_and_differs_by_layer(net):
    params, state, apply = net
    (_, a, b), _ = apply(params, state, X, jax.random.key(1), train=True)
    (_, again, _), _ = apply(params, state, X, jax.random.key(1), train=True)
    (_, other, _), _ = apply(params, state, X, jax.random.key(2), train=True)
    (_, off, _), _ = apply(params, state, X, jax.random.key(1), train=False)
    np.testing.assert_array_equal(a, again)
    assert (a != b).any() and (a != other).any()
    np.testing.assert_array_equal(off, np.ones_like(X))


@pytest.mark.slow
def test_grad_and_vmap(net):
    params, state, apply = net

    def loss(params, key):
        (y, mask, _), new = apply(params, state, X, key, train=True)
        return jnp.sum((y * mask) ** 2), new

    keys = jax.random.split(jax.random.key(3), 4)
    grads, new = jax.vmap(jax.grad(loss, has_aux=True), in_axes=(None, 0))(params, keys)
    assert grads["layers"]["1"]["kernel"].shape == (4, 6, 6)
    assert new["norm"]["mean"].shape == (4, 6)


@pytest.mark.parametrize(
    "given, code", [(None, "wrong-kind"), (nnx.Linear(2, 2, rngs=nnx.Rngs(0)), "adapter-no-model")]
)
def test_a_model_instead_of_its_maker(given, code):
    with refused(RecipeError, code):
        functional(given)


def test_how_parameters_lie_is_read():
    def make(rngs):
        kernel = nnx.with_partitioning(nnx.initializers.lecun_normal(), (None, "shard"))
        bias = nnx.with_partitioning(nnx.initializers.zeros_init(), ("model",))
        return nnx.Linear(4, 2, kernel_init=kernel, bias_init=bias, rngs=rngs)

    data = Arrays(x=np.ones((3, 4), np.float32), label=np.zeros(3, np.int32))
    made = task(make, softmax_cross_entropy, train=data)
    params, _ = made.init(jax.random.key(0))
    assert made.sharding("kernel") == P(None, "shard") and made.sharding("bias") is None
    assert axes(params, 2, made.sharding) == {"kernel": 1, "bias": 0}
    assert axes(params, 2) == {"kernel": 0, "bias": 0}
    assert made.loss(params, {}, data.columns, jax.random.key(0), True)[0]["loss"].total.shape == ()


def test_a_maker_that_returns_no_module():
    with refused(RecipeError, "adapter-no-model", framework="nnx"):
        functional(lambda rngs: 3)


def test_apply_says_what_is_wrong(net):
    params, state, _ = net
    _, apply = functional(lambda rngs: Net(rngs=rngs))
    key = jax.random.key(0)
    with refused(RecipeError, "nnx-train-no-bool", train=1):
        apply(params, state, X, key, 1)
    with refused(RecipeError, "nnx-key-missing"):
        apply(params, state, X, None, True)
    with refused(RecipeError, "adapter-weight-missing", what="state", name="norm/mean"):
        apply(params, {}, X, key, True)
    with refused(RecipeError, "adapter-weight-unknown", what="params", names=["extra"]):
        apply(params | {"extra": X}, state, X, key, True)
    wrong = {"norm": {"mean": jnp.zeros(5), "var": jnp.zeros(5)}}
    with refused(RecipeError, "adapter-weight-shape", shape=(5,), expected=(6,)):
        apply(params, wrong, X, key, True)
