"""Examples whose recipes are unusual: two networks that train each other, episodes as examples."""

import runpy
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import chipwise as cw
from chipwise.engine.state import abstract_state, count

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize("name", ["gan", "actor_critic"])
def test_it_trains_to_the_same_bits_on_three_devices_and_after_a_stop(name, tmp_path):
    recipe = runpy.run_path(str(EXAMPLES / f"{name}.py"))["recipe"]("3st")
    whole = cw.fit(recipe, on=cw.On(devices=1), progress="none")
    cw.fit(recipe, tmp_path, on=cw.On(devices=3), progress="none", stop_after="2st")
    assert cw.fit(recipe, tmp_path, on=cw.On(devices=1), progress="none").fingerprint == whole.fingerprint


def test_the_resnet_of_2018_is_that_of_its_source():
    recipe = cw.load(str(EXAMPLES / "cifar10_resnet32.py"))
    assert count(abstract_state(recipe).params) == 464_154 and recipe.clock.total == 90_000
    assert recipe.warnings() == [] and not cw.check(recipe)


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
