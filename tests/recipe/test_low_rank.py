"""LoRA: gradients are those of the merged model, training starts from the base, bits are equal anywhere."""

import dataclasses
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import chipwise as cw
import tasks
from chipwise.base.errors import RecipeError, RunError
from chipwise.deploy.model import trained
from chipwise.recipe import settings
from chipwise.recipe.low_rank import Adapter
from chipwise.step.freeze import split, whole_params
from chipwise.step.state import abstract_state, axes_of, count, first_state
from refusals import refused

pytestmark = pytest.mark.as_users_compile

TASK = tasks.task(
    loss=tasks.plain_loss, augment=None, predict=lambda params, _, inputs: tasks.plain_logits(params, inputs)
)
ONE = {"on": cw.On(devices=1), "progress": "none", "eval_every": None, "log_every": "1st"}
LORA = cw.recipe.lora(rank=2, alpha=3, on=("w", "v"))


def recipe(**changes):
    settings = {"task": TASK, "duration": "4st", "adapters": LORA, "optimizer": cw.adamw(lr=0.02)}
    return tasks.recipe(**settings | changes)


SIDES = {
    "dense/kernel": ((6, 8), (6, 8)),
    "dense/weight": ((6, 8), (8, 6)),
    "query/kernel": ((8, 2, 4), (8, 8)),
    "out/kernel": ((2, 4, 6), (8, 6)),
    "conv/kernel": ((3, 3, 5, 4), (45, 4)),
    "conv/weight": ((4, 5, 3, 3), (45, 4)),
    "thin/kernel": ((3, 3, 32, 2), (288, 2)),
    "stack/dense/kernel": ((3, 6, 8), (6, 8)),
}
"""Of a path: the shape of the array, and its inputs and outputs as a matrix."""


def made(dtype=jnp.float32):
    """Arrays of these shapes and a bias, and both parts of them."""
    key = jax.random.key(1)
    params = {path: jax.random.normal(key, shape, dtype) for path, (shape, _) in SIDES.items()}
    params["dense/bias"] = jnp.ones(8, dtype)
    adapters = cw.recipe.lora(rank=2, alpha=5, on=("*kernel", "*weight"))
    return params, *split(params, ("*",), {}, adapters, key)


@pytest.mark.slow
def test_which_axes_are_inputs_and_which_outputs():
    params, adapters, frozen = jax.jit(made)()
    assert adapters["dense/bias"] is None
    for path, (shape, (inputs, outputs)) in SIDES.items():
        stack = shape[:1] if "stack" in path else ()
        one = jax.tree.map(np.asarray, adapters[path])
        assert one.lora_a.shape == (*stack, inputs, 2) and one.lora_b.shape == (*stack, 2, outputs), path
        assert not one.lora_b.any() and 0 < abs(one.lora_a).max() <= 1 / math.sqrt(inputs)
    jax.tree.map(np.testing.assert_array_equal, jax.jit(whole_params)(adapters, frozen), params)


@jax.jit
def both():
    """The gradients by A and B, and those by the chain rule from the gradient by the merged matrix."""
    params, adapters, frozen = made(jnp.float64)
    adapters = jax.tree.map(lambda x: x + jnp.linspace(-1, 1, x.size).reshape(x.shape), adapters)

    def loss(whole):
        return sum(jnp.sum(jnp.sin(x) * jnp.arange(1.0, x.size + 1).reshape(x.shape)) for x in whole.values())

    wanted = dict.fromkeys(adapters)
    for path, (shape, sides) in SIDES.items():
        one, turned = adapters[path], path.endswith("weight")
        change = one.lora_a @ one.lora_b * 2.5
        merged = params[path] + (change.swapaxes(-1, -2) if turned else change).reshape(shape)
        slope = jax.grad(lambda w, path=path: loss({path: w}))(merged)
        slope = slope.reshape(*shape[: "stack" in path], *(sides[::-1] if turned else sides))
        slope = slope.swapaxes(-1, -2) if turned else slope
        of_a, of_b = slope @ one.lora_b.swapaxes(-1, -2), one.lora_a.swapaxes(-1, -2) @ slope
        wanted[path] = dataclasses.replace(one, lora_a=2.5 * of_a, lora_b=2.5 * of_b)
    return jax.grad(lambda adapters: loss(whole_params(adapters, frozen)))(adapters), wanted


@pytest.mark.slow
def test_gradients_are_those_of_the_merged_matrix_by_the_chain_rule():
    with jax.enable_x64(True):
        got, wanted = both()
        assert {x.dtype for x in jax.tree.leaves(got)} == {jnp.dtype(jnp.float64)}
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9), got, wanted)


def test_weights_keep_their_dtype_and_only_adapters_have_moments():
    def init(key):
        params, state = tasks.init(key)
        return {**params, "w": params["w"].astype(jnp.bfloat16)}, state

    state = abstract_state(recipe(task=dataclasses.replace(TASK, init=init), precision="bf16"))
    assert state.frozen["w"].dtype == jnp.bfloat16 and state.params["w"].lora_a.dtype == jnp.float32
    whole = jax.eval_shape(whole_params, state.params, state.frozen)
    assert whole["w"].dtype == jnp.bfloat16
    assert count(state.params) == 2 * (12 + 16) + 2 * (16 + 5)
    assert max(x.size for x in jax.tree.leaves(state.optimizer)) == 104  # padded to 8 replicas


def test_a_first_adapter_depends_on_its_path_and_the_key_alone():
    leaves, key = {"w": jnp.ones((4, 3)), "v": jnp.ones((4, 3))}, jax.random.key(1)
    both, one = (dataclasses.replace(LORA, on=on).adapters(leaves, key) for on in (("w", "v"), "w"))
    np.testing.assert_array_equal(both["w"].lora_a, one["w"].lora_a)
    assert not np.array_equal(both["w"].lora_a, both["v"].lora_a)


def test_what_else_is_trained_is_what_the_recipe_does_not_freeze():
    state = abstract_state(recipe(frozen=("*", "!shift"), adapters=dataclasses.replace(LORA, on=("w",))))
    kinds = {name: type(leaf) for name, leaf in state.params.items()}
    assert kinds["w"] is Adapter and kinds["v"] is kinds["scale"] is type(None)
    assert state.params["shift"].shape == (16,) and state.frozen["shift"] is None


def test_the_sharding_of_a_task_is_not_asked_about_adapters():
    task = dataclasses.replace(TASK, sharding={"w": P(None, "shard"), "v": P("shard")}.__getitem__)
    one = recipe(task=task, shards=2, adapters=dataclasses.replace(LORA, on=("w",)))
    axes = axes_of(one, abstract_state(one).params)["w"]
    assert (axes.lora_a, axes.lora_b) == (0, 1)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run with adapters: on one device for two steps, then on three, streamed."""
    folder = tmp_path_factory.mktemp("lora") / "run"
    cw.fit(recipe(), folder, stop_after="2st", **ONE)
    return folder, cw.fit(recipe(), folder, **{**ONE, "on": cw.On(devices=3, feed="host")})


@pytest.mark.slow
def test_the_same_bits_on_8_devices_and_a_first_loss_of_the_base(run):
    _, result = run
    other = cw.fit(recipe(), **{**ONE, "on": cw.On(devices=8)})
    assert other.fingerprint == result.fingerprint and other.metrics == result.metrics
    for name in ("scale", "shift"):
        np.testing.assert_array_equal(result.params[name], tasks.init(jax.random.key(0))[0][name])
    base = cw.fit(recipe(adapters=None, duration="1st"), **ONE)
    losses = [row["train/loss"] for row in result.history if "train/loss" in row]
    assert losses[0] == base.history[0]["train/loss"] and len(set(losses)) == 4
    assert result.fingerprint != base.fingerprint


@pytest.mark.slow
def test_the_same_bits_on_any_number_of_groups():
    one = recipe(shards=2, duration="1st", batch=32, replicas=2, ema=0.9)
    first, second = (cw.fit(one, **{**ONE, "on": cw.On(devices=n)}) for n in (2, 4))
    assert first.fingerprint == second.fingerprint and first.metrics == second.metrics
    whole = first.params["w"]
    assert whole.addressable_shards[0].data.size == whole.size // 2


@pytest.mark.slow
def test_whoever_reads_a_run_gets_merged_weights(run, tmp_path):
    folder, result = run
    model = trained(folder, recipe())
    jax.tree.map(np.testing.assert_array_equal, model.params, result.params)
    assert cw.evaluate(folder, recipe=recipe(), on=cw.On(devices=1))["loss"] == result.metrics["eval/loss"]
    weights = cw.pretrained(folder)
    assert set(weights.arrays) == {f"params.{n}" for n in ("w", "v", "scale", "shift")} | {
        f"state.{n}" for n in ("mean", "var", "calls")
    }
    np.testing.assert_array_equal(weights.arrays["params.w"], result.params["w"])
    begun = first_state(recipe(task=weights.start(TASK)))
    np.testing.assert_array_equal(begun.frozen["w"], result.params["w"])
    pytest.importorskip("safetensors")
    file = cw.export(folder, "safetensors", tmp_path / "w.safetensors", recipe=recipe()).file
    alone = first_state(recipe(task=cw.pretrained(file).start(TASK), adapters=None))
    merged = dataclasses.replace(model, params=alone.params, recipe=recipe(adapters=None))
    (a, b) = (cw.predict(one, on=cw.On(devices=1)).outputs for one in (model, merged))
    np.testing.assert_array_equal(a, b)


@pytest.mark.slow
def test_a_run_goes_on_with_its_own_adapters_only(run):
    folder, _ = run
    stored = json.loads((folder / "recipe.json").read_text())["adapters"]
    assert stored == {"rank": 2, "alpha": 3, "on": ["w", "v"], "stacked": "*stack/*"}
    assert recipe(adapters=stored) == recipe()
    for other in (None, dataclasses.replace(LORA, alpha=6)):
        with refused(RunError, "run-of-another-recipe"):
            cw.fit(recipe(adapters=other), folder, **ONE)
    on = recipe(task=cw.pretrained(folder, optimizer=True).start(TASK))
    with cw.Stepper(on, cw.On(devices=1)) as stepper:
        now = stepper._session.snapshot()
    assert now.params["w"].lora_b.any()
    np.testing.assert_array_equal(now.frozen["w"], first_state(recipe()).frozen["w"])


def test_mistakes_are_one_line():
    for code, given in (
        ("lora-rank", {"rank": 0}),
        ("wrong-kind", {"rank": True}),
        ("lora-alpha", {"alpha": -1}),
        ("lora-on", {"on": ()}),
    ):
        with refused(RecipeError, code, **given):
            cw.recipe.lora(**{"rank": 2, "alpha": 4, "on": "w"} | given)
    typed = "adapters={'rank': 2, 'alpha': 3, 'on': ('w', 'v')}"
    assert settings.apply(recipe(adapters=None), dict([typed.split("=", 1)])) == recipe()
    for wrong in ("lora", {"rank": 2}):
        with refused(RecipeError, "wrong-kind", what="adapters"):
            recipe(adapters=wrong)
    with refused(RecipeError, "adapters-match-nothing", pattern="shif", near="shift"):
        first_state(recipe(adapters=cw.recipe.lora(2, 4, ("w", "shif"))))
    with refused(RecipeError, "adapter-without-matrix", path="scale", shape=[16]):
        first_state(recipe(adapters=cw.recipe.lora(2, 4, "*")))
    with refused(RecipeError, "adapter-rank", path="v", rank=6, sides=[16, 5], most=5):
        first_state(recipe(adapters=cw.recipe.lora(6, 4, "v")))
