"""Weights that Keras and Orbax wrote begin a task; what is not whole in a file is refused."""

import os

import jax
import numpy as np
import pytest

import chipwise as cw
import tasks
from chipwise.deploy.pretrained import pretrained
from chipwise.engine import checkpoint
from refusals import refused

os.environ.setdefault("KERAS_BACKEND", "jax")
FIRST = jax.tree.map(np.asarray, tasks.init(jax.random.key(7)))


@pytest.mark.parametrize("managed", [False, True])
def test_an_orbax_checkpoint(tmp_path, managed):
    import orbax.checkpoint as ocp

    tree = {"params": FIRST[0], "state": FIRST[1], "step": np.int32(4)}
    if managed:
        with ocp.CheckpointManager(tmp_path / "all") as manager:
            for step in (3, 11):
                manager.save(step, args=ocp.args.StandardSave({**tree, "step": np.int32(step)}))
            manager.wait_until_finished()
    else:
        with ocp.StandardCheckpointer() as writer:
            writer.save(tmp_path / "all", tree)
    weights = pretrained(tmp_path / "all")
    params, state = weights.start(tasks.task()).init(jax.random.key(0))
    assert all(np.array_equal(params[name], value) for name, value in FIRST[0].items())
    assert np.array_equal(state["mean"], FIRST[1]["mean"])
    assert weights.match(tasks.task()).unused == ["step"]
    assert int(weights.arrays["step"]) == (11 if managed else 4)
    small = tmp_path / "all" / ("11/default/_METADATA" if managed else "_CHECKPOINT_METADATA")
    small.unlink()
    small.symlink_to("/dev/zero")
    with refused(cw.errors.RunError, "file-not-plain", kind="a link"):
        pretrained(tmp_path / "all")


def keras_net(own_name):
    keras = pytest.importorskip("keras")
    layers = keras.layers
    named = {"name": "mine"} if own_name else {}
    return keras.Sequential([
        keras.Input((6, 6, 2)), layers.Conv2D(4, 3, **named), layers.BatchNormalization(),
        layers.Conv2D(4, 3), layers.BatchNormalization(), layers.Flatten(), layers.Dense(3),
    ])  # fmt: skip


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Keras as it writes
@pytest.mark.parametrize("own_name", [False, True])
def test_weights_of_keras_by_the_names_of_its_door(tmp_path, own_name):
    pytest.importorskip("h5py")
    keras = pytest.importorskip("keras")
    model, other = keras_net(own_name), keras_net(own_name)
    for variable in model.weights:
        variable.assign(variable.value + np.random.default_rng(1).random(variable.shape, np.float32))
    model.save_weights(tmp_path / "w.weights.h5")
    data = cw.Arrays(image=np.zeros((8, 6, 6, 2), np.float32), label=np.zeros(8, np.int32))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    task = cw.keras.task(other, loss, train=data)
    weights = pretrained(tmp_path / "w.weights.h5")
    found = weights.match(task)
    assert (found.missing, found.unused, found.shapes) == ([], [], {})
    params, state = weights.start(task).init(jax.random.key(0))
    images = np.random.default_rng(9).normal(size=(4, 6, 6, 2)).astype(np.float32)
    ours = task.predict(params, state, {"image": images})
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        np.testing.assert_allclose(ours, np.asarray(model(images)), rtol=1e-5, atol=1e-5)


def test_a_file_that_declares_more_than_it_holds(tmp_path):
    h5py = pytest.importorskip("h5py")
    with h5py.File(tmp_path / "w.weights.h5", "w") as file:
        file.create_dataset("layers/dense/vars/0", (1 << 40,), "f4", chunks=(1 << 10,))
    with refused(cw.errors.DataError, "weights-damaged"):
        pretrained(tmp_path / "w.weights.h5")
    with h5py.File(tmp_path / "l.weights.h5", "w") as file:
        file["layers/dense/vars/0"] = h5py.ExternalLink("/etc/passwd", "x")
    with refused(cw.errors.DataError, "weights-none"):
        pretrained(tmp_path / "l.weights.h5")
    (tmp_path / "cut.weights.h5").write_bytes((tmp_path / "w.weights.h5").read_bytes()[:100])
    with refused(cw.errors.DataError, "weights-damaged"):
        pretrained(tmp_path / "cut.weights.h5")


def test_an_orbax_checkpoint_that_states_more_than_it_holds_is_refused(tmp_path, monkeypatch):
    import orbax.checkpoint as ocp

    with ocp.StandardCheckpointer() as writer:
        writer.save(tmp_path / "all", {"w": np.zeros((1000, 1000), np.float32)})
    monkeypatch.setattr(checkpoint, "_ANYWAY", 0)
    with refused(cw.errors.DataError, "weights-damaged", path=tmp_path / "all"):
        pretrained(tmp_path / "all")
