"""Models that came from PyTorch and Keras, in every format."""

import jax
import numpy as np
import pytest

import chipwise as cw
from chipwise.deploy.model import Trained
from refusals import refused

RNG = np.random.default_rng(0)
NEEDS = {"stablehlo": "flatbuffers", "onnx": "onnxruntime", "safetensors": "safetensors"}


def trained(task, seed=0):
    """Weights and statistics that are not those it began with."""
    recipe = cw.Recipe(task=task, batch=8, replicas=2, duration="1st", optimizer=cw.sgd(lr=0.1))
    rng = np.random.default_rng(seed)

    def moved(x):
        return (np.asarray(x) * rng.uniform(0.5, 1.5, x.shape)).astype(x.dtype)

    params, state = task.init(jax.random.key(0))
    return Trained(recipe, jax.tree.map(moved, params), jax.tree.map(moved, state))


@pytest.fixture(scope="module")
def born_in_torch():
    torch = pytest.importorskip("torch")
    pytest.importorskip("torchax")
    nn = torch.nn
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Dropout(0.5),
        nn.Linear(16, 3),
    )  # fmt: skip
    data = cw.Arrays(
        image=RNG.normal(size=(40, 2, 6, 6)).astype(np.float32), label=RNG.integers(0, 3, 40), classes=3
    )
    return net, trained(cw.torch.task(net, nn.CrossEntropyLoss(), train=data, eval=data))


@pytest.mark.parametrize("to", [*NEEDS, "torch"])
def test_a_model_from_pytorch_leaves_in_every_format(tmp_path, born_in_torch, to):
    if to in NEEDS:
        pytest.importorskip(NEEDS[to])
    net, model = born_in_torch
    before = {name: value.clone() for name, value in net.state_dict().items()}
    made = cw.export(model, to, tmp_path / "m", module=net)
    assert made.examples == 40 and made.labels_differ == 0 and made.difference < 1e-4
    assert all(bool((before[name] == value).all()) for name, value in net.state_dict().items())
    if to == "torch":
        import torch

        read = torch.load(made.file, weights_only=True)
        assert list(read) == list(before)
        np.testing.assert_array_equal(read["0.weight"].numpy(), model.params["0"]["weight"])


def test_what_did_not_come_from_there_does_not_go_there(tmp_path, born_in_torch):
    net, model = born_in_torch
    digits = cw.load("digits")
    params, state = jax.jit(digits.task.init)(jax.random.key(0))
    with refused(cw.errors.RecipeError, "export-not-born", format="torch"):
        cw.export(Trained(digits, params, state), "torch", tmp_path / "m", module=net)
    with refused(cw.errors.RecipeError, "export-module", got="NoneType"):
        cw.export(model, "torch", tmp_path / "m")
    assert not list(tmp_path.iterdir())


# Keras 3.15's own variables, which NumPy 2 warns of when `save` reads them.
@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
@pytest.mark.parametrize("to", ["keras", "onnx"])
def test_a_model_from_keras_goes_home(tmp_path, to, monkeypatch):
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    pytest.importorskip("keras")
    if to in NEEDS:
        pytest.importorskip(NEEDS[to])
    from chipwise.interop.keras import keras_library

    keras = keras_library()
    net = keras.Sequential(
        [keras.Input((4,)), keras.layers.Dense(8), keras.layers.BatchNormalization(), keras.layers.ReLU(),
         keras.layers.Dense(3)]
    )  # fmt: skip
    data = cw.Arrays(x=RNG.normal(size=(40, 4)).astype(np.float32), label=RNG.integers(0, 3, 40), classes=3)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model = trained(cw.keras.task(net, loss, train=data, eval=data))
    before = values(net)
    made = cw.export(model, to, tmp_path / "m", module=net)
    assert made.labels_differ == 0 and made.difference < 1e-4
    assert all(np.array_equal(a, b) for a, b in zip(before, values(net), strict=True))


def values(net):
    return [np.asarray(jax.device_get(variable.value)) for variable in net.variables]
