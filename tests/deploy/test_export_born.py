"""Models that came from PyTorch and Keras, in every format."""

import jax
import numpy as np
import pytest

import chipwise as cw
from chipwise.deploy.model import Trained

RNG = np.random.default_rng(0)
NEEDS = {"stablehlo": "flatbuffers", "onnx": "jax2onnx"}


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
    return trained(cw.torch.task(net, nn.CrossEntropyLoss(), train=data, eval=data))


@pytest.mark.parametrize("to", ["stablehlo", pytest.param("onnx", marks=pytest.mark.slow)])
def test_a_model_from_pytorch_leaves_in_every_format(tmp_path, born_in_torch, to):
    pytest.importorskip(NEEDS[to])
    made = cw.export(born_in_torch, to, tmp_path / "m")
    assert made.examples == 40 and made.labels_differ == 0 and made.difference < 1e-4


@pytest.mark.slow
def test_a_model_from_keras_leaves(tmp_path, monkeypatch):
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    pytest.importorskip("keras")
    pytest.importorskip("jax2onnx")
    from chipwise.interop.keras import keras_library

    keras = keras_library()
    net = keras.Sequential(
        [keras.Input((4,)), keras.layers.Dense(8), keras.layers.BatchNormalization(), keras.layers.ReLU(),
         keras.layers.Dense(3)]
    )  # fmt: skip
    data = cw.Arrays(x=RNG.normal(size=(40, 4)).astype(np.float32), label=RNG.integers(0, 3, 40), classes=3)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    made = cw.export(trained(cw.keras.task(net, loss, train=data, eval=data)), "onnx", tmp_path / "m")
    assert made.labels_differ == 0 and made.difference < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("scale", [{"scale_factor": 2}, {"scale_factor": 1.5}, {"size": (7, 3)}])
def test_nearest_upsampling_of_pytorch_leaves_too(tmp_path, scale):
    torch = pytest.importorskip("torch")
    pytest.importorskip("torchax")
    pytest.importorskip("jax2onnx")
    net = torch.nn.Sequential(torch.nn.Conv2d(2, 3, 1), torch.nn.Upsample(**scale), torch.nn.Flatten())
    image = RNG.normal(size=(12, 2, 4, 5)).astype(np.float32)
    data = cw.Arrays(image=image, label=1 + np.asarray(net(torch.from_numpy(image)).detach()))
    # The door compares it with eager PyTorch, the export with the door
    model = trained(cw.torch.task(net, torch.nn.MSELoss(), train=data, eval=data))
    assert cw.export(model, "onnx", tmp_path / "m").difference < 1e-5


@pytest.mark.slow
def test_an_equinox_model_leaves(tmp_path):
    eqx = pytest.importorskip("equinox")
    pytest.importorskip("flatbuffers")
    data = cw.Arrays(x=RNG.normal(size=(12, 4)).astype(np.float32), label=RNG.integers(0, 3, 12), classes=3)
    task = cw.equinox.task(
        lambda key: eqx.nn.MLP(4, 3, 8, 1, key=key), cw.losses.softmax_cross_entropy, train=data, eval=data
    )
    assert cw.export(trained(task), "stablehlo", tmp_path / "m").labels_differ == 0
