"""Examples whose recipes are unusual: two networks that train each other, episodes as examples."""

import dataclasses
import runpy
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import chipwise as cw
from chipwise.step.state import abstract_state, count

pytestmark = pytest.mark.as_users_compile

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gan", "actor_critic"])
def test_it_trains_to_the_same_bits_on_three_devices_and_after_a_stop(name, tmp_path):
    recipe = runpy.run_path(str(EXAMPLES / f"{name}.py"))["recipe"]("3st")
    whole = cw.fit(recipe, on=cw.On(devices=1), progress="none")
    cw.fit(recipe, tmp_path, on=cw.On(devices=3), progress="none", stop_after="2st")
    assert cw.fit(recipe, tmp_path, on=cw.On(devices=1), progress="none").fingerprint == whole.fingerprint


@pytest.mark.slow
def test_rates_fall_at_the_same_steps_on_three_devices(tmp_path):
    train = runpy.run_path(str(EXAMPLES / "reduce_on_plateau.py"))["train"]
    made = dataclasses.replace(cw.load("digits"), optimizer=cw.adam(lr=0.1), duration="12ep")
    both = [
        train(made, tmp_path / str(n), patience="1ep", least=1e-3, on=cw.On(devices=n), progress="none")
        for n in (1, 3)
    ]
    steps, again = ([(result.steps, result.fingerprint) for result in results] for results in both)
    assert steps == again and 1 < len(steps) <= 3
    assert sum(step for step, _ in steps) <= made.clock.total
    told = train(made, tmp_path / "1", patience="1ep", least=1e-3, on=cw.On(devices=1), progress="none")
    assert [(result.steps, result.fingerprint) for result in told] == steps  # finished runs are read


@pytest.mark.slow
def test_muon_for_gpt2_moves_matrices_by_an_orthogonal_step_and_words_by_adam(tmp_path):
    settings = ["context=8", "vocabulary=64", "depth=1", "width=16", "heads=2", "batch=8", "replicas=4"]
    made = cw.load(str(EXAMPLES / "gpt2_muon.py"), [*settings, "precision=f32"], synthetic=True)
    token = np.random.default_rng(0).integers(0, 64, (32, 9)).astype(np.uint16)
    task = dataclasses.replace(made.task, train=cw.Arrays(token=token), eval=None)
    made = dataclasses.replace(made, task=task, duration="2st", optimizer=made.optimizer.replace(lr=0.01))
    kinds = made.optimizer.kinds(jax.eval_shape(made.task.init, jax.random.key(0))[0])
    assert kinds["words"]["embedding"] == "adam" and kinds["blocks"]["stack"]["norm1"]["scale"] == "adam"
    assert kinds["blocks"]["stack"]["attention"]["qkv"]["kernel"] == "muon"
    results = [cw.fit(made, on=cw.On(devices=n), eval_every=None, progress="none") for n in (1, 3)]
    assert results[0].fingerprint == results[1].fingerprint


@pytest.mark.slow
def test_the_resnet_of_2018_is_that_of_its_source():
    recipe = cw.load(str(EXAMPLES / "cifar10_resnet32.py"))
    assert count(abstract_state(recipe).params) == 464_154 and recipe.clock.total == 90_000
    assert recipe.warnings() == [] and not cw.check(recipe)


@pytest.mark.slow
def test_each_network_has_the_gradient_of_its_own_loss():
    recipe = runpy.run_path(str(EXAMPLES / "gan.py"))["recipe"]()
    params, state = recipe.task.init(jax.random.key(0))
    batch = {"image": jnp.ones((4, 8, 8), jnp.uint8), "noise": jnp.arange(4)}

    def gradient(name):
        def total(params):
            return recipe.task.loss(params, state, batch, jax.random.key(1), True)[0][name].total

        return jax.jit(jax.grad(total))(params)

    both, one, other = map(gradient, ("loss", "discriminator", "generator"))
    assert not any(map(jnp.any, jax.tree.leaves((one["generator"], other["discriminator"]))))
    for net, alone in (("discriminator", one), ("generator", other)):
        assert all(map(jnp.array_equal, jax.tree.leaves(both[net]), jax.tree.leaves(alone[net])))
