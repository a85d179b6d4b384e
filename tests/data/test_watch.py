"""What a run says of its data, through the public door."""

import json
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import chipwise as cw
from chipwise.data import stage, write_packed
from chipwise.data.packed import PackedFolder
from slow_source import Numbers

pytestmark = pytest.mark.as_users_compile

QUIET = {"progress": "none", "on": cw.On(devices=1, feed="host")}


def task(source, work=1):
    """A linear classifier, repeated `work` times to take a while."""
    spec = cw.Arrays(x=np.asarray(source[0]["x"])[None]).spec["x"]
    features = int(np.prod(spec.shape))

    def init(key):
        return {"w": jax.random.normal(key, (features, 64), jnp.float32) / features, "v": jnp.eye(64)}, {}

    def loss(params, state, batch, key, train):
        x = batch["x"].reshape(len(batch["x"]), -1).astype(jnp.float32) / 255
        h = x @ params["w"]
        for _ in range(work):
            h = jnp.tanh(h @ params["v"])
        values = cw.losses.softmax_cross_entropy(h, batch["label"])
        return {"loss": cw.Sum.of(values)}, state

    return cw.Task(init=init, loss=loss, train=source, classes=5)


def recipe(source, batch=8, steps=6, work=1):
    return cw.Recipe(
        task=task(source, work),
        batch=batch,
        replicas=1,
        duration=f"{steps}st",
        optimizer=cw.sgd(lr=0.01),
        seed=0,
    )


def rows(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def starved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("starved") / "run"
    cw.fit(recipe(Numbers(), steps=2), folder.parent / "first", **QUIET)  # a first save imports for a second
    return cw.fit(recipe(Numbers(seconds=0.008), steps=60), folder, log_every="20st", **QUIET), folder


@pytest.mark.slow
def test_a_slow_source_is_found_out(starved):
    result, _ = starved
    feed = result.feed
    assert feed["data"] == "streamed" and feed["workers"] == "1 thread"
    waited = feed["waited_seconds_by_stage"]
    assert max(waited, key=waited.get) == "decode" and sum(waited.values()) <= 1.001 * feed["waited_seconds"]
    assert feed["host_examples_per_second"] <= 125  # it sleeps 8 ms an example
    assert feed["step_examples_per_second"] > feed["host_examples_per_second"]
    assert feed["cores_needed_by_stage"]["decode"] > 1
    assert feed["code"] == "input-bound" and feed["advice"]["code"].startswith("feed-try-")
    assert feed["verdict"].endswith(feed["advice"]["text"])
    assert result.seconds["wait_data"] == pytest.approx(feed["waited_seconds"], rel=0.01)


@pytest.mark.slow
def test_the_run_folder_says_it_too(starved):
    result, folder = starved
    logged = [row for row in rows(folder) if "train/loss" in row]
    assert all(0.5 < row["wait_data_share"] <= 1 for row in logged[1:])
    assert all(0.5 < row["feed/decode_cores"] <= 1.01 for row in logged[1:])
    assert json.loads((folder / "result.json").read_text())["feed"] == result.feed
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    assert [e.step for e in events.Scalars("wait_data_share")] == [20, 40, 60]
    assert {"feed/read_cores", "feed/decode_cores", "feed/transform_cores"} <= set(events.Tags()["scalars"])


@pytest.mark.slow
def test_half_a_second_an_image_is_nearly_all_waiting():
    class Slow(Numbers):
        def __getitem__(self, index):
            with stage("transform"):
                time.sleep(0.5)
            return super().__getitem__(index)

    slow = Slow()
    feed = cw.fit(recipe(slow, batch=2, steps=8), **QUIET).feed
    assert feed["waited_share"] > 0.9  # the rest is the step, which a busy machine slows
    assert feed["waited_seconds_by_stage"]["transform"] > 0.9 * feed["waited_seconds"]
    assert feed["code"] == "input-bound" and feed["advice"]["code"] == "feed-try-augment"


@pytest.mark.slow
def test_packed_data_keeps_the_device_busy(tmp_path):
    rng = np.random.default_rng(0)
    columns = {
        "x": rng.integers(0, 256, (4096, 32, 32, 3), dtype=np.uint8),
        "label": rng.integers(0, 5, 4096).astype(np.int32),
    }
    write_packed(tmp_path, [columns], classes=5)
    result = cw.fit(recipe(PackedFolder(tmp_path), batch=256, steps=30, work=60), **QUIET)
    assert result.feed["waited_share"] <= 0.02, result.feed
    assert result.feed["code"] == "fed"


@pytest.mark.slow
def test_resident_data_is_not_waited_for(tmp_path):
    result = cw.fit(recipe(cw.data.Cached(Numbers())), tmp_path, **{**QUIET, "on": cw.On(devices=1)})
    assert result.feed["data"] == "on the device" and result.feed["code"] == "data-resident"
    assert {row["wait_data_share"] for row in rows(tmp_path) if "train/loss" in row} == {0}
    again = cw.fit(recipe(Numbers()), tmp_path, **QUIET)
    assert again.feed == {} and again.fingerprint == result.fingerprint


@pytest.mark.parametrize("workers", ["threads:2", pytest.param("processes:2", marks=pytest.mark.slow)])
def test_neither_place_nor_workers_change_a_bit(workers):
    at_home = cw.fit(recipe(Numbers()), **{**QUIET, "on": cw.On(devices=1)})
    streamed = cw.fit(recipe(Numbers()), on=cw.On(1, feed="host", workers=workers), progress="none")
    assert streamed.fingerprint == at_home.fingerprint


@pytest.mark.parametrize("given,code", [({"feed": "disk"}, None), ({"workers": "x"}, "workers-unknown")])
def test_wrong_words_cost_nothing(tmp_path, given, code):
    with pytest.raises(cw.errors.RecipeError) as caught:
        cw.fit(
            recipe(Numbers()),
            tmp_path / "run",
            on=cw.On(1, feed="host", **given) if "feed" not in given else cw.On(**given),
        )
    assert code in (None, caught.value.code)
    assert not (tmp_path / "run").exists()
