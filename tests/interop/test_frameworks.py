"""One small network with batch norm and dropout through every adapter: what its own framework computes in
float64, and the same fingerprint on 1, 2, 4 and 8 devices."""

import json
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import chipwise as cw
from chipwise.interop.adapter import Data, as_sum, flattened, nested
from chipwise.recipe import freezing
from chipwise.recipe.described import described_rows
from chipwise.recipe.low_rank import Adapter
from chipwise.step.state import abstract_state
from refusals import refused

os.environ.setdefault("KERAS_BACKEND", "jax")
RNG = np.random.default_rng(0)
DATA = cw.Arrays(
    image=RNG.normal(size=(48, 6, 6, 2)).astype(np.float32), label=RNG.integers(0, 3, 48), classes=3
)
METRICS = {"accuracy": cw.losses.correct}
CHANNELS_FIRST = {"inputs": lambda batch: batch["image"].transpose(0, 3, 1, 2)}


def torch_net():
    torch = pytest.importorskip("torch")
    pytest.importorskip("torchax")
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Conv2d(2, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.ReLU(), torch.nn.AdaptiveAvgPool2d(1),
        torch.nn.Flatten(), torch.nn.Dropout(0.5), torch.nn.Linear(4, 3),
    )  # fmt: skip


def torch_task(loss=None, **data):
    loss = loss or sys_torch().nn.CrossEntropyLoss()
    return cw.torch.task(torch_net(), loss, **CHANNELS_FIRST, **data)


def sys_torch():
    return pytest.importorskip("torch")


def keras_net():
    keras = pytest.importorskip("keras")
    keras.utils.set_random_seed(0)
    layers = keras.layers
    return keras.Sequential([
        keras.Input((6, 6, 2)), layers.Conv2D(4, 3), layers.BatchNormalization(momentum=0.9), layers.ReLU(),
        layers.GlobalAveragePooling2D(), layers.Dropout(0.5), layers.Dense(3, kernel_regularizer="l2"),
    ])  # fmt: skip


def keras_task(loss=None, **data):
    model = keras_net()
    keras = pytest.importorskip("keras")
    loss = loss or keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return cw.keras.task(model, loss, **data)


def nnx_task(loss=cw.losses.softmax_cross_entropy, **data):
    from flax import nnx

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.conv = nnx.Conv(2, 4, (3, 3), rngs=rngs)
            self.norm = nnx.BatchNorm(4, momentum=0.9, rngs=rngs)
            self.drop = nnx.Dropout(0.5, rngs=rngs)
            self.head = nnx.Linear(4, 3, rngs=rngs)

        def __call__(self, x):
            return self.head(self.drop(nnx.relu(self.norm(self.conv(x))).mean((1, 2))))

    return cw.nnx.task(lambda rngs: Net(rngs), loss, **data)


def linen_net():
    from flax import linen

    class Net(linen.Module):
        @linen.compact
        def __call__(self, x, train):
            x = linen.Conv(4, (3, 3))(x)
            x = linen.BatchNorm(use_running_average=not train, momentum=0.9)(x)
            x = linen.Dropout(0.5, deterministic=not train)(linen.relu(x).mean((1, 2)))
            return linen.Dense(3)(x)

    return Net()


def linen_task(loss=cw.losses.softmax_cross_entropy, **data):
    return cw.linen.task(linen_net(), loss, **data)


def equinox_net():
    eqx = pytest.importorskip("equinox")

    class Net(eqx.Module):
        conv: eqx.nn.Conv2d
        norm: eqx.nn.BatchNorm
        drop: eqx.nn.Dropout
        head: eqx.nn.Linear

        def __init__(self, key):
            a, b = jax.random.split(key)
            self.conv = eqx.nn.Conv2d(2, 4, 3, key=a)
            self.norm = eqx.nn.BatchNorm(4, "batch", mode="batch", momentum=0.9)
            self.drop = eqx.nn.Dropout(0.5)
            self.head = eqx.nn.Linear(4, 3, key=b)

        def __call__(self, x, state, key):
            x, state = self.norm(self.conv(x.transpose(2, 0, 1)), state)
            return self.head(self.drop(jax.nn.relu(x).mean((1, 2)), key=key)), state

    return Net


def equinox_task(loss=cw.losses.softmax_cross_entropy, **data):
    return cw.equinox.task(equinox_net(), loss, **data)


FRAMEWORKS = {
    "torch": torch_task, "keras": keras_task, "nnx": nnx_task, "linen": linen_task, "equinox": equinox_task
}  # fmt: skip
each = pytest.mark.parametrize("framework", FRAMEWORKS)


def recipe(task, **changes):
    settings = dict(batch=16, replicas=8, duration="6st", optimizer=cw.sgd(lr=0.1), seed=3) | changes
    return cw.Recipe(task=task, **settings)


def fit(task, devices=1, **changes):
    return cw.fit(recipe(task, **changes), on=cw.On(devices=devices), run=None, progress="none")


@pytest.mark.slow
@pytest.mark.drawn(share=0.25)
@each
def test_the_same_bits_on_1_2_4_and_8_devices(framework):
    task = FRAMEWORKS[framework](train=DATA, eval=DATA, metrics=METRICS)
    assert task.has_batch_norm and task.classes == 3
    results = [fit(task, devices) for devices in (1, 2, 4, 8)]
    assert len({r.fingerprint for r in results}) == 1
    losses = [r.metrics["eval/loss"] for r in results]
    np.testing.assert_allclose(losses, losses[0], rtol=1e-6)  # evaluation's batch is as large as fits
    assert set(results[0].metrics) >= {"train/loss", "train/accuracy", "eval/loss", "eval/accuracy"}


def comparing(outputs, target):
    """The losses `(batch,)` of finding each example's own embedding among those of the batch."""
    return cw.losses.softmax_cross_entropy(outputs @ outputs.T, jnp.arange(len(outputs)))


def comparing_in_torch(outputs, target):
    torch = sys_torch()
    return torch.nn.functional.cross_entropy(outputs @ outputs.T, torch.arange(len(outputs)))


@pytest.mark.slow
@pytest.mark.drawn(share=0.25)
@each
def test_a_loss_that_compares_is_evaluated_by_groups(framework):
    """Of 8 examples, the last one of 5; the same bits on 1, 3 and 8 devices."""
    own = comparing_in_torch if framework == "torch" else comparing
    held_out = cw.Arrays(**{name: column[:29] for name, column in DATA.columns.items()})
    task = FRAMEWORKS[framework](loss=own, train=DATA, eval=held_out, eval_group=8)
    results = [fit(task, devices, duration="2st") for devices in (1, 3, 8)]
    losses = [r.metrics["eval/loss"] for r in results]
    assert len(set(losses)) == 1 and len({r.fingerprint for r in results}) == 1
    first, *_ = results
    groups = [{n: jnp.asarray(c[i : i + 8]) for n, c in held_out.columns.items()} for i in range(0, 29, 8)]
    sums = [task.loss(first.params, first.state, group, None, False)[0]["loss"] for group in groups]
    expected = sum(float(one.total) for one in sums) / sum(float(one.count) for one in sums)
    np.testing.assert_allclose(losses[0], expected, rtol=1e-5)
    assert losses[0] > 0.5  # of one example at a time it is 0


@pytest.mark.parametrize(
    "framework", [pytest.param(f, marks=() if f == "keras" else pytest.mark.slow) for f in FRAMEWORKS]
)
def test_modes_keys_and_statistics(framework):
    """Statistics move in training alone; the mask is the key's; evaluation judges each example by itself."""
    task = FRAMEWORKS[framework](train=DATA)
    params, state = task.init(jax.random.key(0))
    batch = {name: jnp.asarray(column[:8]) for name, column in DATA.columns.items()}
    loss = jax.jit(task.loss, static_argnums=4)
    one, moved = loss(params, state, batch, jax.random.key(1), True)
    again, _ = loss(params, state, batch, jax.random.key(1), True)
    other, _ = loss(params, state, batch, jax.random.key(2), True)
    still, same = loss(params, state, batch, jax.random.key(1), False)
    assert one["loss"].total == again["loss"].total != other["loss"].total
    assert one["loss"].count == 8 and still["loss"].total != one["loss"].total
    changed = [np.any(np.asarray(a) != np.asarray(b)) for a, b in zip(
        jax.tree.leaves(moved), jax.tree.leaves(state), strict=True
    )]  # fmt: skip
    assert all(changed)
    jax.tree.map(np.testing.assert_array_equal, same, state)
    alone = [
        loss(params, state, {n: c[i : i + 1] for n, c in batch.items()}, None, False)[0]["loss"].total
        for i in range(8)
    ]
    np.testing.assert_allclose(sum(alone), still["loss"].total, rtol=1e-5)
    outputs = jax.jit(task.predict)(params, state, {"image": batch["image"]})
    assert outputs.shape == (8, 3)


@pytest.mark.slow
@pytest.mark.drawn
@each
def test_in_bfloat16_statistics_stay_float32(framework):
    result = fit(FRAMEWORKS[framework](train=DATA, eval=DATA), precision="bf16", duration="2st")
    assert np.isfinite(result.metrics["eval/loss"])
    assert {x.dtype for x in jax.tree.leaves(result.state) if x.dtype.kind == "f"} == {np.dtype("float32")}
    assert {x.dtype for x in jax.tree.leaves(result.params)} == {np.dtype("float32")}


@pytest.mark.slow
@each
def test_adapters_know_the_inputs_of_a_matrix(framework):
    """Of a convolution and a dense layer; and the loss is traced with the sums."""
    on = {"torch": "[06]/weight", "equinox": ("conv/weight", "head/weight")}.get(framework, "*kernel")
    adapted = recipe(FRAMEWORKS[framework](train=DATA), adapters=cw.recipe.lora(2, 4, on))
    leaves = jax.tree.leaves(abstract_state(adapted).params, is_leaf=lambda x: isinstance(x, Adapter))
    assert sorted((one.lora_a.shape[0], one.lora_b.shape[1]) for one in leaves) == [(4, 3), (18, 4)]


@pytest.mark.slow
@pytest.mark.drawn
@each
def test_adapters_have_the_same_bits_on_any_devices(framework):
    task = FRAMEWORKS[framework](train=DATA, eval=DATA)
    on = {"torch": "6/weight", "equinox": "head/weight", "nnx": "head/kernel"}.get(framework, "?ense*/kernel")
    results = [fit(task, devices, adapters=cw.recipe.lora(2, 4, on)) for devices in (1, 2, 3, 8)]
    assert len({r.fingerprint for r in results}) == 1
    state = jax.tree.map(np.asarray, task.init(jax.random.key(0))[1])
    jax.tree.map(np.testing.assert_array_equal, results[0].state, state)  # all else is frozen


@pytest.mark.slow
@each
def test_frozen_statistics_are_used_and_stay(framework):
    """What one example's place in the loss is worth then does not depend on the others."""
    task = FRAMEWORKS[framework](train=DATA)
    params, state = task.init(jax.random.key(0))
    state = jax.tree.map(lambda x: x + 1 if jnp.issubdtype(x.dtype, jnp.floating) else x, state)
    batch = {name: column[:8] for name, column in DATA.columns.items()}
    first, others = [np.concatenate([batch["image"][:1] + i, batch["image"][1:]]) for i in (0, 1)], 3.0
    sides = [(one, np.concatenate([one[:1], others * one[1:]])) for one in first]

    def worth(patterns):
        with freezing.holding(patterns):  # a part of the trace's key: one function serves both
            totals = [
                [loss(params, state, {**batch, "image": x}, jax.random.key(1), True) for x in pair]
                for pair in sides
            ]
        before, after = (a[0]["loss"].total - b[0]["loss"].total for a, b in zip(*totals, strict=True))
        return float(before - after), totals[0][0][1]

    loss = jax.jit(task.loss, static_argnums=4)
    off, moved = worth(())
    held, same = worth(("*mean", "*var*"))
    assert abs(held) < 1e-5 < 1e-3 < abs(off)
    names = [jax.tree_util.keystr(p, simple=True) for p, _ in jax.tree_util.tree_leaves_with_path(state)]
    for name, old, new, own in zip(names, *map(jax.tree.leaves, (state, same, moved)), strict=True):
        if name.rstrip("']").endswith(("mean", "var", "variance")):
            assert np.array_equal(old, new) and not np.array_equal(old, own), name


def test_keras_names_do_not_depend_on_what_a_process_made_before():
    first, second = (keras_task(train=DATA).init(jax.random.key(0)) for _ in range(2))
    assert set(flattened(first[0], "/")) == set(flattened(second[0], "/")) >= {"conv2d/kernel", "dense/bias"}


@pytest.mark.slow
def test_weights_go_back_to_keras():
    model = keras_net()
    keras = pytest.importorskip("keras")
    task = cw.keras.task(model, keras.losses.SparseCategoricalCrossentropy(from_logits=True), train=DATA)
    result = fit(task)
    assert result.to_keras(model) is model
    np.testing.assert_array_equal(
        np.asarray(model.layers[1].moving_mean), result.state["batch_normalization"]["moving_mean"]
    )
    images = DATA.columns["image"]
    ours = task.predict(result.params, result.state, {"image": images})
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        np.testing.assert_allclose(np.asarray(model(images)), ours, rtol=1e-5, atol=1e-6)
        other = keras.Sequential([keras.Input((6, 6, 2)), keras.layers.Flatten(), keras.layers.Dense(2)])
    with refused(cw.errors.RecipeError, "adapter-weight-shape"):
        result.to_keras(other)


@pytest.mark.slow
def test_weights_go_back_to_equinox():
    eqx = pytest.importorskip("equinox")
    result = fit(equinox_task(train=DATA))
    model, state = result.to_equinox(equinox_net())
    np.testing.assert_array_equal(model.conv.weight, result.params["conv"]["weight"])
    np.testing.assert_array_equal(state.get(model.norm.batch_state_index)[0], result.state["norm"]["mean"])
    assert isinstance(model, eqx.Module)


@pytest.mark.slow
def test_a_linen_result_is_what_linen_applies():
    result = fit(linen_task(train=DATA))
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        out = linen_net().apply({"params": result.params, **result.state}, DATA.columns["image"], train=False)
    assert out.shape == (48, 3)


@pytest.mark.parametrize(
    ("make", "code"),
    [
        (lambda: cw.linen.task(object(), len, train=DATA), "adapter-no-model"),
        (lambda: cw.linen.task(linen_net(), len, mode="fit", train=DATA), "mode-unknown"),
        (lambda: cw.nnx.task(3, len, train=DATA), "wrong-kind"),
        (lambda: linen_task(train=DATA, metrics={"loss": len}), "adapter-metrics"),
        (lambda: linen_task(train=DATA, metrics=["accuracy"]), "wrong-kind"),
        (lambda: cw.linen.task(linen_net(), "mse", train=DATA), "wrong-kind"),
        (
            lambda: cw.equinox.task(lambda key: 3, len, train=DATA),
            "adapter-no-model",
        ),
        (
            lambda: cw.keras.task(object(), "mse", train=DATA),
            "adapter-no-model",
        ),
        (
            lambda: cw.keras.task(keras_net(), "crossentropie", train=DATA),
            "keras-loss-unknown",
        ),
        (lambda: cw.keras.task(keras_net(), train=DATA), "keras-no-loss"),
    ],
)
def test_mistakes_are_one_line(make, code):
    for name in {"equinox", "keras"} & set(make.__code__.co_names):
        pytest.importorskip(name)
    with refused(cw.errors.RecipeError, code):
        make()


def test_a_summed_keras_loss_is_refused():
    keras = pytest.importorskip("keras")
    with refused(cw.errors.RecipeError, "keras-loss-summed"):
        cw.keras.task(keras_net(), keras.losses.MeanSquaredError(reduction="sum"), train=DATA)


def test_columns_become_arguments():
    batch = {"a": jnp.ones((2, 3)), "b": jnp.ones(2, jnp.int32), "label": jnp.zeros(2)}
    params = {"w": jnp.ones(1, jnp.bfloat16)}
    args, kwargs = Data(train=DATA).arguments(batch, params)
    assert args == () and kwargs["a"].dtype == jnp.bfloat16 and kwargs["b"].dtype == jnp.int32
    args, kwargs = Data(train=DATA, inputs=("b", "a")).arguments(batch, params)
    assert [x.ndim for x in args] == [1, 2] and kwargs == {}
    args, _ = Data(train=DATA, inputs=lambda batch: batch["b"] / 2).arguments(batch, params)
    assert args[0].dtype == jnp.bfloat16
    assert Data(train=DATA, target=lambda batch: batch["b"]).wanted(batch).dtype == jnp.int32
    for given, code in [
        ({"inputs": "c"}, "adapter-column"),
        ({"inputs": lambda batch: batch["c"]}, "adapter-column"),
        ({"inputs": 3}, "adapter-columns-expected"),
        ({"inputs": ()}, "adapter-no-inputs"),
    ]:
        with refused(cw.errors.RecipeError, code):
            Data(train=DATA, **given).arguments(batch, params)
    with refused(cw.errors.RecipeError, "adapter-column", column="labels", near="label"):
        Data(train=DATA, target="labels").wanted(batch)


def test_a_loss_of_any_kind_is_a_sum():
    assert as_sum(jnp.float32(2.0), 3).value == 2.0 and as_sum(jnp.float32(2.0), 3).count == 3
    values = as_sum(jnp.ones((3, 4)), 3)
    assert (values.total, values.count) == (12, 12)
    assert nested({"a.b": 1, "a.c": 2}, ".") == {"a": {"b": 1, "c": 2}}


EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.slow
@pytest.mark.drawn
@pytest.mark.parametrize("framework", [*FRAMEWORKS, "functions"])
def test_the_example_trains_and_is_planned(framework):
    if framework in ("torch", "keras", "equinox"):
        pytest.importorskip("torchax" if framework == "torch" else framework)
    made = cw.load(f"{EXAMPLES}/my_{framework}.py:recipe", ["duration=20st"])
    result = cw.fit(made, on=cw.On(devices=1), run=None, progress="none", eval_every=None)
    assert result.metrics["train/loss"] < 2.4 and result.metrics["eval/accuracy"] > 0.2
    plans = cw.plan(made, ["v5e-8", "t4"])
    assert [plan.problem for plan in plans] == [None, None]
    assert all(plan.step_seconds.value > 0 for plan in plans)


# ---- whether a model trains is said to it, by an argument with a usual name, or by a declared one

FLAGS = {"train": True, "training": True, "is_training": True, "deterministic": False, "inference": False}
OWN = {"is_train": True, "enable_dropout": True, "frozen": False, "off": False}


def switched(framework, name, default, training):
    """A net of `framework` whose dropout follows an argument of its own, and how it is made a task."""
    rest = f", {name}" + ("" if default is None else f"={default}")
    off = f"not {name}" if training else name
    made = {"linen": _linen, "nnx": _nnx, "equinox": _equinox}[framework](rest, off)
    return lambda **more: getattr(cw, framework).task(made, cw.losses.softmax_cross_entropy, **FLAT, **more)


FLAT = {"train": cw.Arrays(x=RNG.normal(size=(24, 4)).astype(np.float32), label=RNG.integers(0, 3, 24))}


def _written(body, **names):
    exec(body, names)  # the argument's name is the test's
    return names["Net"]


def _linen(rest, off):
    from flax import linen

    body = f"""
class Net(linen.Module):
    @linen.compact
    def __call__(self, x{rest}):
        return linen.Dense(3)(linen.Dropout(0.5, deterministic={off})(x))
"""
    return _written(body, linen=linen, __name__=__name__)()


def _nnx(rest, off):
    from flax import nnx

    body = f"""
class Net(nnx.Module):
    def __init__(self, rngs):
        self.drop, self.head = nnx.Dropout(0.5, rngs=rngs), nnx.Linear(4, 3, rngs=rngs)

    def __call__(self, x{rest}):
        return self.head(self.drop(x, deterministic={off}))
"""
    kind = _written(body, nnx=nnx, __name__=__name__)
    return lambda rngs: kind(rngs)


def _equinox(rest, off):
    eqx = pytest.importorskip("equinox")
    body = f"""
class Net(eqx.Module):
    drop: eqx.nn.Dropout
    head: eqx.nn.Linear

    def __init__(self, key):
        self.drop, self.head = eqx.nn.Dropout(0.5), eqx.nn.Linear(4, 3, key=key)

    def __call__(self, x{rest}, *, key):
        return self.head(self.drop(x, key=key, inference={off}))
"""
    kind = _written(body, eqx=eqx, __name__=__name__)
    return lambda key: kind(key)


def draws(task, train):
    params, state = task.init(jax.random.key(0))
    batch = {name: jnp.asarray(column[:8]) for name, column in FLAT["train"].columns.items()}
    losses = [
        float(task.loss(params, state, batch, jax.random.key(i), train)[0]["loss"].total) for i in (0, 1)
    ]
    return losses[0] != losses[1]


OF_JAX = pytest.mark.parametrize("framework", ["linen", "nnx", "equinox"])


@OF_JAX
@pytest.mark.parametrize("default", [None, True, False])
@pytest.mark.parametrize("name", FLAGS)
def test_an_argument_with_a_usual_name_says_whether_it_trains(framework, name, default):
    task = switched(framework, name, default, FLAGS[name])()
    assert draws(task, True) and not draws(task, False)


@OF_JAX
@pytest.mark.parametrize("default", [True, False])
@pytest.mark.parametrize("name", OWN)
def test_one_with_a_name_of_its_own_is_asked_for(framework, name, default):
    make = switched(framework, name, default, OWN[name])
    with refused(cw.errors.RecipeError, "mode-unset", argument=name, value=OWN[name]):
        make()
    task = make(mode={name: OWN[name]})
    assert draws(task, True) and not draws(task, False)
    with refused(cw.errors.RecipeError, "mode-without-value"):
        make(mode=name)
    with refused(cw.errors.RecipeError, "mode-unknown", near=name):
        make(mode={f"{name}s": True})


@OF_JAX
def test_one_without_a_default_is_asked_for(framework):
    make = switched(framework, "is_train", None, True)
    with refused(cw.errors.RecipeError, "argument-ungiven", names=["is_train"]):
        make()
    assert draws(make(mode={"is_train": True}), True)


@pytest.mark.parametrize("given", [None, True, False])
@pytest.mark.parametrize("name", ["deterministic", "frozen"])
def test_a_field_of_linen_says_whether_it_trains(name, given):
    from flax import linen

    body = f"""
class Net(linen.Module):
    {name}: bool | None = None

    @linen.compact
    def __call__(self, x):
        return linen.Dense(3)(linen.Dropout(0.5, deterministic=self.{name})(x))
"""
    net = _written(body, linen=linen, __name__=__name__)(**{name: given})
    loss = cw.losses.softmax_cross_entropy
    if name == "frozen" and given:  # an option of the architecture, which stays
        task = cw.linen.task(net, loss, **FLAT)
        assert not draws(task, True) and not draws(task, False)
    if name == "frozen" and given is False:  # it would draw in evaluation
        with refused(cw.errors.RecipeError, "mode-unset", argument=name, value=False, set="{}"):
            cw.linen.task(net, loss, **FLAT)
    task = cw.linen.task(net, loss, mode={name: False}, **FLAT)
    assert draws(task, True) and not draws(task, False)


@OF_JAX
@pytest.mark.parametrize("default", [True, False])
def test_an_option_beside_a_mode_is_no_mode(framework, default):
    """`scaled` decides whether there is dropout at all, and `train` whether it is on."""
    made = {"linen": _linen, "nnx": _nnx, "equinox": _equinox}[framework](
        f", train=False, scaled={default}", "not (train and scaled)"
    )

    def make(**more):
        return getattr(cw, framework).task(made, cw.losses.softmax_cross_entropy, **FLAT, **more)

    if default:
        task = make()
        assert draws(task, True) and not draws(task, False)
    else:  # a net that never draws could with the other value
        facts = {"both": "{'train': True, 'scaled': True}", "set": "{'train': True}"}
        with refused(cw.errors.RecipeError, "mode-unset", argument="scaled", **facts):
            make()
    for mode, on in (
        ({"train": True}, default),
        ("train", default),
        ({"scaled": True}, True),
        ({"train": True, "scaled": True}, True),
        ({}, False),
    ):
        task = make(mode=mode)
        assert draws(task, True) is on and not draws(task, False)


def test_a_field_of_linen_with_a_value_is_an_option():
    from flax import linen

    class Net(linen.Module):
        training: dict
        use_dropout: bool = True

        @linen.compact
        def __call__(self, x, train=False):
            x = linen.BatchNorm(use_running_average=not train)(x)
            if self.use_dropout:
                x = linen.Dropout(0.5, deterministic=not train)(x)
            return linen.Dense(self.training["classes"])(x)

    for used in (True, False):
        task = cw.linen.task(Net({"classes": 3}, used), cw.losses.softmax_cross_entropy, **FLAT)
        assert draws(task, True) is used and not draws(task, False)
        assert task.read["mode"] == "train=True in training" and "statistics" not in task.read


@OF_JAX
def test_an_argument_that_moves_the_statistics_is_asked_for(framework):
    """Batch norm alone, which draws nothing."""
    from flax import linen, nnx

    class OfLinen(linen.Module):
        @linen.compact
        def __call__(self, x, fit=False, scaled: bool = True):
            return linen.Dense(3)(linen.BatchNorm(use_running_average=not fit)(x) * (2 if scaled else 1))

    class OfNNX(nnx.Module):
        def __init__(self, rngs):
            self.norm, self.head = nnx.BatchNorm(4, rngs=rngs), nnx.Linear(4, 3, rngs=rngs)

        def __call__(self, x, fit=False, scaled: bool = True):
            return self.head(self.norm(x, use_running_average=not fit) * (2 if scaled else 1))

    def of_equinox(key):
        eqx = pytest.importorskip("equinox")

        class OfEquinox(eqx.Module):
            norm: eqx.nn.BatchNorm
            head: eqx.nn.Linear

            def __call__(self, x, state, fit=False, scaled: bool = True):
                x, state = self.norm(x, state, inference=not fit)
                return self.head(x * (2 if scaled else 1)), state

        return OfEquinox(eqx.nn.BatchNorm(4, "batch", mode="batch"), eqx.nn.Linear(4, 3, key=key))

    made = {"linen": OfLinen(), "nnx": lambda rngs: OfNNX(rngs), "equinox": of_equinox}[framework]
    make = getattr(cw, framework).task
    with refused(cw.errors.RecipeError, "mode-unset", argument="fit", value=True):
        make(made, cw.losses.softmax_cross_entropy, **FLAT)
    task = make(made, cw.losses.softmax_cross_entropy, mode={"fit": True}, **FLAT)
    params, state = task.init(jax.random.key(0))
    batch = {name: jnp.asarray(column[:8]) for name, column in FLAT["train"].columns.items()}
    moved, same = (task.loss(params, state, batch, jax.random.key(0), train)[1] for train in (True, False))
    pairs = zip(*map(jax.tree.leaves, (state, moved, same)), strict=True)
    kept = [(np.array_equal(old, new), np.array_equal(old, again)) for old, new, again in pairs]
    assert not all(one for one, _ in kept) and all(again for _, again in kept)


# ---- what was read of a model is shown in a run's first lines, and stored

READ = {
    "torch": {"model": "Sequential of torch", "inputs": "by <lambda>", "loss": "CrossEntropyLoss"},
    "keras": {
        "model": "Sequential of keras",
        "inputs": "image",
        "mode": "training=True in training",
        "loss": "SparseCategoricalCrossentropy(from_logits=True)",
        "added losses": "in training alone",
    },
    "nnx": {"model": "Net of nnx", "inputs": "image", "loss": "softmax_cross_entropy"},
    "linen": {
        "model": "Net of linen",
        "inputs": "image",
        "mode": "train=True in training",
        "loss": "softmax_cross_entropy",
    },
    "equinox": {"model": "Net of equinox", "inputs": "image", "loss": "softmax_cross_entropy"},
}


@pytest.mark.parametrize(
    "framework", [pytest.param(f, marks=() if f == "linen" else pytest.mark.slow) for f in FRAMEWORKS]
)
def test_what_was_read_is_shown_and_stored(framework, tmp_path, capsys):
    task = FRAMEWORKS[framework](train=DATA, metrics=METRICS)
    expected = {**READ[framework], "target": "label", "metrics": "accuracy", "outputs": "logits"}
    assert task.read == expected
    how = {"on": cw.On(devices=1), "run": tmp_path / "run", "progress": "lines"}
    cw.fit(recipe(task, duration="1st"), **how)
    shown = capsys.readouterr().err.splitlines()[:3]
    assert str(task.shown) in shown and task.shown.code == "model-read"
    stored = json.loads((tmp_path / "run" / "recipe.json").read_text())
    assert stored["read"] == expected
    rows = dict(described_rows(stored, None))
    assert rows.items() >= expected.items()
    del stored["read"]  # a run of an earlier version goes on
    (tmp_path / "run" / "recipe.json").write_text(json.dumps(stored))
    assert cw.fit(recipe(task, duration="1st"), **how).steps == 1


def test_what_a_keras_model_was_compiled_with_is_shown():
    keras = pytest.importorskip("keras")
    model = keras_net()
    model.compile(loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["acc", "mse"])
    read = cw.keras.task(model, train=DATA).read
    assert read["loss"] == "SparseCategoricalCrossentropy(from_logits=True), as compiled"
    assert read["metrics"] == "acc (sparse_categorical_accuracy), mse"


def of_one_mode(framework):
    """Nets whose dropout draws, and whose batch norm stays, in training and evaluation: their own code says
    it, or an attribute that no framework sets."""
    from flax import linen, nnx

    class OfLinen(linen.Module):
        @linen.compact
        def __call__(self, x):
            return linen.Dense(3)(linen.BatchNorm(use_running_average=True)(x))

    class OfNNX(nnx.Module):
        def __init__(self, rngs):
            self.norm, self.head = nnx.BatchNorm(4, rngs=rngs), nnx.Linear(4, 3, rngs=rngs)
            self.drop, self.trains = nnx.Dropout(0.5, rngs=rngs), True

        def __call__(self, x):
            x = self.norm(x, use_running_average=True)
            return self.head(self.drop(x, deterministic=not self.trains))

    def of_equinox(key):
        eqx = pytest.importorskip("equinox")

        class OfEquinox(eqx.Module):
            norm: eqx.nn.BatchNorm
            head: eqx.nn.Linear
            drop: eqx.nn.Dropout

            def __call__(self, x, state, key):
                x, state = self.norm(x, state, inference=True)
                return self.head(self.drop(x, key=key, inference=False)), state

        norm = eqx.nn.BatchNorm(4, "batch", mode="batch")
        return OfEquinox(norm, eqx.nn.Linear(4, 3, key=key), eqx.nn.Dropout(0.5))

    made = {"linen": OfLinen(), "nnx": lambda rngs: OfNNX(rngs), "equinox": of_equinox}[framework]
    return getattr(cw, framework).task(made, cw.losses.softmax_cross_entropy, **FLAT)


@OF_JAX
def test_a_net_that_stays_in_one_mode_is_told(framework):
    said = {"draws": "in evaluation too", "statistics": "not moved in training"}
    if framework == "linen":  # it refuses to draw without a key, as predictions are made
        del said["draws"]
    assert of_one_mode(framework).read.items() >= said.items()
    usual = FRAMEWORKS[framework](train=DATA).read
    assert not {"draws", "statistics"} & usual.keys()


def of_two_layers(framework, held):
    """Two dropouts and two batch norms. Those in `held` were made for evaluation."""
    if framework == "torch":
        torch = sys_torch()
        pytest.importorskip("torchax")
        nn = torch.nn
        parts = {"drop": nn.Dropout(), "norm": nn.BatchNorm1d(4), "head": nn.Linear(4, 3)}
        net = nn.Sequential(*parts.values())
        for name in held:
            parts[name].eval()
        return lambda: cw.torch.task(net, nn.CrossEntropyLoss(), check=False, **FLAT)
    if framework == "nnx":
        from flax import nnx

        class Net(nnx.Module):
            def __init__(self, rngs):
                self.drop = nnx.Dropout(0.5, deterministic="drop" in held, rngs=rngs)
                self.norm = nnx.BatchNorm(4, use_running_average="norm" in held, rngs=rngs)
                self.head = nnx.Linear(4, 3, rngs=rngs)

            def __call__(self, x):
                return self.head(self.norm(self.drop(x)))

        return lambda: cw.nnx.task(lambda rngs: Net(rngs), cw.losses.softmax_cross_entropy, **FLAT)
    eqx = pytest.importorskip("equinox")

    class OfEquinox(eqx.Module):
        drop: eqx.nn.Dropout
        norm: eqx.nn.BatchNorm
        head: eqx.nn.Linear

        def __call__(self, x, state, key):
            x, state = self.norm(self.drop(x, key=key), state)
            return self.head(x), state

    def make(key):
        norm = eqx.nn.BatchNorm(4, "batch", mode="batch", inference="norm" in held)
        return OfEquinox(eqx.nn.Dropout(0.5, inference="drop" in held), norm, eqx.nn.Linear(4, 3, key=key))

    return lambda: cw.equinox.task(make, cw.losses.softmax_cross_entropy, **FLAT)


@pytest.mark.parametrize("framework", ["torch", "nnx", "equinox"])
@pytest.mark.parametrize("held", [(), ("drop",), ("norm",), ("drop", "norm")], ids=str)
def test_layers_that_alone_were_put_in_evaluation_are_named(framework, held):
    make = of_two_layers(framework, held)
    if len(held) == 1 or (held and framework == "torch"):  # there `head` trains
        numbers = {"drop": "0", "norm": "1"}
        names = [numbers[one] if framework == "torch" else one for one in held]
        with refused(cw.errors.RecipeError, "mode-of-some", names=names):
            make()
    else:
        assert make().framework == framework


def test_a_module_that_keeps_parts_in_evaluation_by_its_own_train_does_so():
    torch = sys_torch()
    pytest.importorskip("torchax")
    nn = torch.nn

    class Net(nn.Sequential):
        def train(self, mode=True):
            super().train(mode)
            self[1].eval()
            return self

    net = Net(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)).train()
    task = cw.torch.task(net, nn.CrossEntropyLoss(), check=False, **FLAT)
    assert not jax.tree.leaves(task.init(jax.random.key(0))[1])  # no statistics move
