"""One fingerprint, wherever the examples come from and whoever reads them."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import chipwise as cw
from chipwise.data import PackedFolder
from chipwise.data.pack import pack
from chipwise.recipe.recipe_file import import_file

pytestmark = pytest.mark.as_users_compile

QUIET = {"progress": "none", "eval_every": None}

RECIPE = """
import jax
import jax.numpy as jnp
import chipwise as cw
from chipwise.data import PackedFolder


def init(key):
    return {"w": 0.01 * jax.random.normal(key, (12 * 12 * 3, 3), jnp.float32)}, {}


def loss(params, state, batch, key, train):
    x = batch["image"].reshape(len(batch["image"]), -1).astype(jnp.float32) / 255
    return {"loss": cw.Sum.of(cw.losses.softmax_cross_entropy(x @ params["w"], batch["label"]))}, state


def of(source, steps=15):
    task = cw.Task(init=init, loss=loss, train=source, augment=cw.augment.reflect_crop(2), classes=3)
    return cw.Recipe(task=task, batch=8, duration=f"{steps}st", optimizer=cw.sgd(lr=0.05), seed=1)


def packed(data: str, steps: int = 15):
    return of(PackedFolder(data), steps)
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """37 loose JPEGs, packs of them, and the recipe as a file and as a module."""
    home = tmp_path_factory.mktemp("same")
    for i in range(37):
        pixels = np.kron(np.random.default_rng(i).integers(0, 256, (4, 4, 3), np.uint8), np.ones((3, 3, 1)))
        file = home / "photos" / "abc"[i % 3] / f"{i}.jpg"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels.astype(np.uint8)).save(file, quality=90)
    (home / "recipe.py").write_text(RECIPE)
    for store in ("raw", "jpeg"):
        pack(home / "photos", home / store, store=store)
    return home


@pytest.fixture(scope="module")
def of(made):
    return import_file("same_bits", str(made / "recipe.py")).of


@pytest.fixture(scope="module")
def loose(made, of):
    """The fingerprint of a run over the loose files, streamed, on one device."""
    return cw.fit(
        of(cw.data.ImageFolder(made / "photos")), on=cw.On(devices=1, feed="host"), **QUIET
    ).fingerprint


@pytest.mark.slow
@pytest.mark.parametrize("store", ["raw", "jpeg"])
@pytest.mark.parametrize("feed", ["host", "device"])
def test_a_pack_is_the_loose_files(made, of, loose, store, feed):
    assert (
        cw.fit(of(PackedFolder(made / store)), on=cw.On(devices=1, feed=feed), **QUIET).fingerprint == loose
    )


@pytest.mark.parametrize(
    "devices,store,feed",
    [
        (2, "raw", "host"),
        *(pytest.param(*n, marks=pytest.mark.slow) for n in ((4, None, "device"), (8, "jpeg", "host"))),
    ],
)
def test_any_number_of_devices(made, of, loose, devices, store, feed):
    source = PackedFolder(made / store) if store else cw.data.ImageFolder(made / "photos")
    result = cw.fit(of(source), on=cw.On(devices=devices, feed=feed, workers=2), **QUIET)
    assert result.devices["count"] == devices and result.fingerprint == loose


@pytest.mark.slow
def test_stopped_in_mid_epoch_and_gone_on_from_elsewhere(made, of, loose, tmp_path):
    cw.fit(
        of(cw.data.ImageFolder(made / "photos")),
        tmp_path,
        on=cw.On(devices=2, feed="host"),
        stop_after="7st",
        **QUIET,
    )
    again = cw.fit(of(PackedFolder(made / "jpeg")), tmp_path, on=cw.On(devices=4, feed="device"), **QUIET)
    assert again.steps == 15 and again.fingerprint == loose


@pytest.mark.slow
def test_killed_in_mid_epoch_and_gone_on(made, of, tmp_path):
    steps = 3000
    expected = cw.fit(
        of(cw.data.ImageFolder(made / "photos"), steps), on=cw.On(devices=1, feed="host"), **QUIET
    ).fingerprint
    run = tmp_path / "run"
    command = [
        sys.executable,
        "-c",
        "from chipwise.cli import main; main()",
        "train",
        f"{made}/recipe.py:packed",
        "--data",
        f"{made}/raw",
    ]
    command += ["--set", f"steps={steps}", "--run", str(run), "--feed", "host", "--simulate", "2"]
    command += ["--checkpoint-every", "101st", "--quiet"]
    for _ in range(3):
        process = subprocess.Popen(command, env={**os.environ, "XLA_FLAGS": ""})
        before, deadline = saved(run), time.monotonic() + 120
        while saved(run) == before and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert 0 < max(saved(run)) < steps
    result = cw.fit(of(PackedFolder(made / "jpeg"), steps), run, on=cw.On(devices=4, feed="host"), **QUIET)
    assert result.fingerprint == expected


def saved(run: Path) -> set[int]:
    return {int(p.name) for p in (run / "checkpoints").glob("*") if p.name.isdigit()}
