"""The layers of a model: shapes, parameters and operations, as one counts them by hand."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import chipwise as cw
import tasks
from chipwise.explain.model_summary import layers, parts
from chipwise.explain.terminal import console, printed

RESNET32 = str(Path(__file__).parents[2] / "examples" / "cifar10_resnet32.py")


def found(recipe):
    return {layer.name: layer for layer in layers(recipe)}


@pytest.mark.slow
def test_products_convolutions_and_norms_are_counted():
    net = found(cw.load(RESNET32, synthetic=True))
    stem, norm, last = net["stem"], net["units/0/norm1"], net["classifier"]
    assert (stem.arrays, stem.output) == ({"kernel": (3, 3, 3, 16)}, (32, 32, 16))
    assert (stem.parameters, stem.bytes, stem.flops) == (432, 4 * 432, 2 * 32 * 32 * 432)
    assert (norm.output, norm.flops, norm.parameters) == ((32, 32, 16), 0, 32)
    assert (last.output, last.parameters, last.flops) == ((10,), 650, 2 * 640)
    assert sum(layer.parameters for layer in net.values()) == 464_154


def test_a_layer_in_a_loop_counts_each_turn_and_products_of_activations_have_no_layer():
    def init(key):
        return {"stack": {"w": jnp.zeros((3, 12, 12))}, "out": jnp.zeros((12, 5))}, {}

    def predict(params, state, inputs):
        x = inputs["x"].astype(jnp.float32)
        x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params["stack"]["w"])
        return (x @ x.T) @ x @ params["out"]

    net = found(tasks.recipe(task=tasks.task(init=init, predict=predict), replicas=1))
    assert (net["stack"].flops, net["stack"].output) == (3 * 2 * 144, (12,))
    assert (net["out"].flops, net["out"].parameters) == (2 * 60, 60)
    assert net["(without parameters)"].flops == 2 * 12 + 2 * 12


@pytest.mark.parametrize("changes", [{}, {"precision": "bf16"}])
def test_a_task_without_predict_is_traced_by_its_loss(changes):
    net = found(tasks.recipe(task=tasks.task(loss=tasks.plain_loss), **changes))
    assert (net["w"].flops, net["v"].flops, net["w"].output) == (2 * 12 * 16, 2 * 16 * 5, (16,))


def test_it_says_what_an_optimizer_of_two_rules_moves_by_which(capsys):
    recipe = tasks.recipe(task=tasks.task(loss=tasks.plain_loss), optimizer=cw.recipe.muon(lr=0.1))
    net = found(recipe)
    kinds = recipe.optimizer.kinds(jax.eval_shape(recipe.task.init, jax.random.key(0))[0])
    assert {rule for layer in net.values() for rule in layer.rules.values()} == set(jax.tree.leaves(kinds))
    assert "muon" in net["w"].rules.values()
    printed(console(width=100), parts(recipe, list(net.values())))
    assert "moved by" in capsys.readouterr().out
    assert not found(tasks.recipe())["w"].rules


def test_the_command_prints_the_model(capsys):
    from chipwise.cli import main

    assert main(["check", "digits", "--summary", "--synthetic"]) == 0
    assert "3×3×1×8" in capsys.readouterr().out
    assert main(["check", "digits", "--summary", "--synthetic", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert sum(layer["parameters"] for layer in shown["layers"]) == 9048
