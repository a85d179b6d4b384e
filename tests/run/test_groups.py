"""Groups: a replica that several devices compute, with the same bits on any number of groups."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import chipwise as cw
import processes
import tasks
from chipwise.base.errors import CheckpointError, DeviceError, RecipeError, RunError
from chipwise.machine.detect import detect
from chipwise.models.large import axes
from chipwise.recipes.load import load
from chipwise.run.evaluate import evaluate
from chipwise.run.placement import Placement, lay_out
from chipwise.run.predict import Predictor
from chipwise.run.session import Session
from chipwise.step.flat import Cut
from chipwise.step.layout import Layout
from refusals import refused

pytestmark = pytest.mark.as_users_compile

PLAIN = tasks.task(loss=tasks.plain_loss, augment=None, eval=None)
CLIPPED = cw.adamw(lr=cw.one_cycle(0.02, warmup="20%"), weight_decay=0.01, clip=0.5, decay="kernels")


def recipe(**changes):
    settings = {"batch": 32, "replicas": 4, "shards": 2, "duration": "4st", "optimizer": CLIPPED, **changes}
    return tasks.recipe(**settings)


def trained(recipe, groups, run=None, **more):
    on = cw.On(devices=groups * recipe.shards, feed=more.pop("feed", "auto"))
    return cw.fit(recipe, run, on=on, log_every="2st", progress="none", **more)


@pytest.mark.slow
def test_the_same_bits_on_any_number_of_groups():
    one, two = (trained(recipe(task=PLAIN, duration="2st"), groups) for groups in (1, 2))
    assert one.fingerprint == two.fingerprint and one.metrics == two.metrics
    assert (two.devices["count"], two.devices["shards"], two.devices["groups"]) == (4, 2, 2)
    for leaf in jax.tree.leaves(two.params):  # of 12 x 16, 16, and 16 x 5
        assert leaf.addressable_shards[0].data.size == leaf.size // 2


@pytest.mark.slow
def test_the_average_is_unpacked_by_one_program(monkeypatch):
    traced, unpack = [], Cut.unpack
    monkeypatch.setattr(Cut, "unpack", lambda self, vector: traced.append(1) or unpack(self, vector))
    with Session(recipe(task=PLAIN, ema=0.9), cw.On(devices=2)) as session:
        session.begin()
        first, _ = session.state_layout.average(session._carry)
        once = len(traced)
        second, _ = session.state_layout.average(session._carry)
    assert once == len(traced) == 1
    jax.tree.map(np.testing.assert_array_equal, first, second)


def test_a_device_has_a_part_of_every_leaf():
    tree = {"a": np.arange(24.0).reshape(2, 4, 3), "b": np.arange(5.0), "c": np.arange(6.0).reshape(6, 1)}
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, np.float32), tree)
    cut = Cut(shapes, {"a": 1, "b": -1, "c": 0}, 2, chunks=4)
    vector = np.asarray(cut.pack(tree))
    assert vector.shape == (cut.size,) and cut.local.used == 12 + 3 + 3 and cut.local.size == 20
    jax.tree.map(np.testing.assert_array_equal, cut.unpack(vector), tree)
    for device, row in enumerate(vector.reshape(2, -1)):
        part = cut.local.unpack(row)
        np.testing.assert_array_equal(part["a"], tree["a"][:, 2 * device : 2 * device + 2])
        np.testing.assert_array_equal(part["c"], tree["c"][3 * device : 3 * device + 3])
        np.testing.assert_array_equal(part["b"], np.pad(tree["b"], (0, 1))[3 * device : 3 * device + 3])


def test_which_axis_is_cut():
    shapes = {
        name: jax.ShapeDtypeStruct(shape, np.float32)
        for name, shape in {"stack": (2, 8, 8), "table": (50, 12), "odd": (5,)}.items()
    }
    assert axes(shapes, 4) == {"stack": 2, "table": 1, "odd": -1}
    assert axes(shapes, 2)["table"] == 0
    by_hand = {"stack": P(None, "shard"), "table": P()}
    assert axes(shapes, 2, by_hand.get) == {"stack": 1, "table": -1, "odd": -1}
    for spec, code in (
        (P("model"), "sharding-names"),
        (P("shard", "shard"), "sharding-names"),
        (P("shard", None), "sharding-indivisible"),
        (P(None, None, None, "shard"), "sharding-indivisible"),
        ("shard", "sharding-answer"),
    ):
        with refused(RecipeError, code, path="stack"):
            axes(shapes, 4, {"stack": spec}.get)
    with refused(RecipeError, "shards-fit-nothing", shards=7):
        axes(shapes, 7)
    assert axes({"odd": shapes["odd"]}, 2, some=False) == {"odd": -1}


def test_what_groups_do_not_fit():
    with refused(RecipeError, "field-not-whole", what="shards"):
        recipe(shards=0)
    with refused(RecipeError, "shards-whole-leaves", shards=2, optimizer="from_optax"):
        import optax

        recipe(optimizer=cw.from_optax(optax.lamb, lr=0.1))
    with refused(RecipeError, "shards-above-batch", shards=16, near=[64]):
        Layout.of(recipe(shards=16), 16)
    with refused(DeviceError, "shards-uneven", shards=2, devices=7):
        lay_out(recipe(), cw.On(devices=7))
    with refused(DeviceError, "shards-uneven", shards=3, devices=8):
        lay_out(recipe(shards=3, batch=36), cw.On())
    with refused(DeviceError, "devices-above-blocks", devices=10, blocks=4, most=8):
        Layout.of(recipe(), 10)
    layout = Layout.of(recipe(shards=2), 4)
    assert (layout.groups, layout.blocks_per_device, layout.group_batch) == (2, 2, 16)
    assert Placement(detect(8), 8, 4).groups == 2 and Placement.of(detect(3), 2).shards == 1


@pytest.mark.slow
@pytest.mark.drawn(share=0.25)
@pytest.mark.parametrize("shards", [2, 4])
@pytest.mark.parametrize(
    "changes", [{"ema": 0.9}, {"blocks": 2, "frozen": ("v",)}, {"optimizer": cw.sgd(lr=0.1, momentum=0.9)}]
)
def test_the_same_bits_of_everything(shards, changes):
    made = recipe(shards=shards, **changes)
    most = min(8 // shards, made.block_count)
    first, *others = (trained(made, groups) for groups in (1, 2, 4) if groups <= most)
    for other in (*others, trained(made, 2, feed="host"), trained(made, 2, feed="device")):
        assert other.fingerprint == first.fingerprint
        for name in ("params", "state"):
            jax.tree.map(np.testing.assert_array_equal, getattr(other, name), getattr(first, name))
        for a, b in zip(first.history, other.history, strict=True):
            assert {k: v for k, v in a.items() if k.startswith("train/")} == {
                k: v for k, v in b.items() if k.startswith("train/")
            }
        assert other.metrics["eval/loss"] == first.metrics["eval/loss"]
    # A replica is what it is without groups: the same batch norm, keys and rows, in other bits
    alone = trained(dataclasses.replace(made, shards=1), 1)
    for a, b in zip(jax.tree.leaves(alone.params), jax.tree.leaves(first.params), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5)
    assert alone.metrics["eval/loss"] == pytest.approx(first.metrics["eval/loss"], rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["f16", "bf16"])
def test_half_precision(precision):
    made = recipe(task=PLAIN, precision=precision)
    assert trained(made, 1).fingerprint == trained(made, 4).fingerprint


@pytest.mark.slow
def test_a_run_goes_on_on_other_groups(tmp_path):
    made = recipe(ema=0.9, duration="6st")
    whole = trained(made, 2)
    for first, then in ((1, 4), (4, 1)):
        run = tmp_path / f"{first}"
        trained(made, first, run, stop_after="3st")
        ended = trained(made, then, run)
        assert ended.fingerprint == whole.fingerprint
        kept = cw.run.restore_run(made, run)
        jax.tree.map(np.testing.assert_array_equal, kept.params, whole.params)
        assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(kept.params))
    again = evaluate(made, kept.params, kept.state, on=cw.On(devices=3))  # without groups
    assert again["loss"] == pytest.approx(whole.metrics["eval/loss"], rel=1e-6)
    for shards in (1, 4):
        other = dataclasses.replace(made, shards=shards)
        with refused(RunError, "run-of-another-recipe"):
            trained(other, 1, run)
        with refused(CheckpointError, "checkpoint-of-other-shards", stored=2, shards=shards):
            cw.run.restore_run(other, run)


@pytest.mark.slow
def test_a_part_of_a_checkpoint_that_changed_is_found(tmp_path):
    made, run = recipe(task=PLAIN, duration="6st"), tmp_path / "run"
    trained(made, 2, run, checkpoint_every="2st", stop_after="4st")
    for path in (run / "checkpoints" / "4" / "state").rglob("*"):
        if path.is_file() and path.parent.name == "d":
            text = bytearray(path.read_bytes())
            text[len(text) // 2] ^= 1
            path.write_bytes(text)
    assert trained(made, 1, run).fingerprint == trained(made, 1).fingerprint


LLAMA = {
    "context": 64,
    "vocabulary": 512,
    "depth": 24,
    "width": 128,
    "heads": 4,
    "kv_heads": 2,
    "hidden": 384,
}
LLAMA |= {"batch": 32, "replicas": 4}


@pytest.mark.slow
def test_the_memory_of_a_device_falls_with_the_devices_of_a_group():
    """By the compiler's figures: what a device holds between programs, and at most beside it in one."""
    peaks = []
    for shards in (1, 2, 4, 8):
        made = load("llama-8b", [f"{k}={v}" for k, v in {**LLAMA, "shards": shards}.items()], None, True)
        with Session(made, cw.On(devices=shards, feed="host")) as session:
            session.begin()
            session.compile()
            replica, update = (
                session.programs.executables[name].memory_analysis() for name in ("replica", "update")
            )
        held = update.argument_size_in_bytes  # state and summed vector
        beside = update.temp_size_in_bytes + update.output_size_in_bytes - update.alias_size_in_bytes
        peaks.append(held + max(replica.temp_size_in_bytes, beside))
        told = (held, replica.temp_size_in_bytes, beside, peaks[-1])
        print(shards, *(f"{n / 1e6:.2f} MB" for n in told), f"1/{peaks[0] / peaks[-1]:.2f}")
    for shards, peak in zip((2, 4, 8), peaks[1:], strict=True):
        assert peaks[0] / shards <= peak < 1.25 * peaks[0] / shards


TRAIN = """
import json, sys
import chipwise as cw
import tasks
devices, run, stop = json.loads(sys.argv[1])
optimizer = cw.adamw(lr=cw.one_cycle(0.02, warmup="20%"), weight_decay=0.01, clip=0.5, decay="kernels")
recipe = tasks.recipe(batch=32, replicas=4, shards=2, duration="4st", optimizer=optimizer, ema=0.9)
result = cw.fit(recipe, run, on=cw.On(devices=devices), log_every="2st", progress="none", stop_after=stop)
said = {"fingerprint": result.fingerprint, "loss": result.metrics["eval/loss"], "steps": result.steps}
print(json.dumps(said))
"""


def over(count, devices, run=None, stop=None, each=0):
    """What host 0 of `count` processes says, which have so many `devices` in all, or `each` so many."""
    said = json.dumps([devices, run and str(run), stop])
    return processes.answer(processes.start(TRAIN, count, each or devices // count, said))


@pytest.fixture(scope="module")
def whole():
    """A training in this process, on two groups."""
    return trained(recipe(ema=0.9), 2)


@pytest.mark.slow
@pytest.mark.drawn
@pytest.mark.parametrize(
    ("count", "devices", "each"),
    [
        pytest.param(2, 4, 0, id="a group a host"),
        pytest.param(2, 8, 0, id="two groups a host"),
        pytest.param(2, 6, 4, id="a host with two groups and one with one"),
        pytest.param(2, 2, 0, id="a group over two hosts"),
        pytest.param(4, 4, 0, id="two groups over two hosts each"),
    ],
)
def test_the_same_bits_over_processes(whole, count, devices, each):
    said = over(count, devices, each=each)
    assert said["fingerprint"] == whole.fingerprint
    assert said["loss"] == whole.metrics["eval/loss"]


@pytest.mark.slow
@pytest.mark.drawn
@pytest.mark.parametrize(("count", "devices"), [(2, 8), (2, 2)])  # the second is a group over two hosts
def test_what_processes_saved_goes_on_in_one(tmp_path, whole, count, devices):
    assert over(count, devices, tmp_path / "run", "2st")["steps"] == 2
    assert trained(recipe(ema=0.9), 1, tmp_path / "run").fingerprint == whole.fingerprint


@pytest.mark.slow
@pytest.mark.drawn
@pytest.mark.parametrize(("count", "devices"), [(2, 8), (4, 4)])
def test_what_one_process_saved_goes_on_in_several(tmp_path, whole, count, devices):
    """Host 0 alone reads the run folder, and sends the others what is there."""
    trained(recipe(ema=0.9), 2, tmp_path / "run", stop_after="2st")
    assert over(count, devices, tmp_path / "run")["fingerprint"] == whole.fingerprint


@pytest.mark.slow
def test_what_the_first_group_read_is_sent_to_the_others():
    def loss(params, state, batch, key, train):
        return tasks.plain_loss(params, {}, batch, key, train)[0], state

    def init(key):
        state = {"seen": np.array([True, False]), "zero": np.float32([-0.0, np.nan]), "calls": np.int8(-3)}
        return tasks.init(key)[0], jax.tree.map(jax.numpy.asarray, state)

    made = recipe(task=tasks.task(init=init, loss=loss, augment=None, eval=None))
    with Session(made, cw.On(devices=8)) as session:
        session.begin()
        read = session.snapshot()
        sent = jax.tree.map(session.placement.send_cut, read, session.state_layout.step_of.saved_axes)
        for a, b in zip(jax.tree.leaves(read), jax.tree.leaves(sent), strict=True):
            assert a.dtype == b.dtype and np.asarray(a).tobytes() == np.asarray(b).tobytes()


@pytest.mark.slow
def test_predictions_of_a_group():
    def predict(params, state, inputs):
        return tasks.plain_logits(params, inputs)

    task = dataclasses.replace(PLAIN, predict=predict, classes=tasks.CLASSES)
    with Session(recipe(task=task), cw.On(devices=4)) as session:
        session.begin()
        params, state = session.parameters()

    def said(shards, devices, block=None):
        placement = Placement(detect(devices), devices, shards)
        made = Predictor(recipe(task=task), params, state, tasks.data(21, 1), placement, block)
        return np.concatenate([out["outputs"] for _, out in made()])

    alone = said(1, 1)
    np.testing.assert_allclose(said(2, 4), alone, rtol=1e-5, atol=1e-6)
    assert len(said(4, 8)) == 21
    assert np.array_equal(said(2, 4), said(2, 2, 5))
