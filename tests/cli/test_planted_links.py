"""Folders that somebody else has made: a link at the name of a file there is refused, not followed."""

import json
import os
import shutil

import jax
import numpy as np
import pytest
from PIL import Image

import chipwise as cw
import tasks
from chipwise.base.errors import CheckpointError, RunError
from chipwise.data.pack.packing import Packing
from chipwise.data.pack.writer import Writer
from chipwise.deploy.model import Trained
from chipwise.deploy.pretrained import pretrained
from chipwise.run.folder.checkpoint import restore_run
from chipwise.run.folder.run_reader import read_run
from chipwise.study.sweep import sweep
from refusals import refused

QUIET = {"on": cw.On(devices=1), "progress": "none"}
RUN = ["lock", "recipe.json", "metrics.jsonl", "processes.jsonl", "result.json", "checkpoints", "best"]
SMALL = [f"checkpoints/4/{name}" for name in ("_CHECKPOINT_METADATA", "state/_METADATA", "about/metadata")]
PLAIN = tasks.task(loss=tasks.plain_loss, augment=None)
LINE = json.dumps({"step": 0, "train/loss": "; touch here #"})  # a row that a shell would run


def recipe():
    return tasks.recipe(task=PLAIN, duration="4st")


def model():
    def logits(params, state, inputs):
        return tasks.plain_logits(params, inputs)

    task = tasks.task(predict=logits, loss=tasks.plain_loss, classes=tasks.CLASSES)
    return Trained(tasks.recipe(task=task), *jax.tree.map(np.asarray, tasks.init(jax.random.key(1))))


def writer(folder):
    made = Writer(folder, store="raw", identity="1", name_bytes=8)
    made.add(["a"], {"x": np.zeros((1, 3), np.uint8)})
    made.finish({"fingerprint": None, "examples": 1})


COMMANDS = {
    "fit": (lambda at: cw.fit(recipe(), at / "run", **QUIET), [f"run/{n}" for n in RUN + SMALL]),
    "fresh": (lambda at: cw.fit(recipe(), at / "run", fresh=True, **QUIET), [f"run/{n}" for n in RUN]),
    "read": (lambda at: read_run(at / "run"), [f"run/{n}" for n in RUN[1:5]]),
    "restore": (lambda at: restore_run(recipe(), at / "run"), [f"run/{n}" for n in ("checkpoints", *SMALL)]),
    "weights": (lambda at: pretrained(at / "run"), [f"run/{n}" for n in SMALL]),
    "sweep": (
        lambda at: sweep(recipe(), {"lr": [0.1]}, seeds=1, run=at / "study", **QUIET),
        [f"study/{n}" for n in ("lock", "study.json", "lr=0.1", "lr=0.1/seed-0", "lr=0.1/seed-0/lock")],
    ),
    "predict": (
        lambda at: cw.predict(model(), on=cw.On(devices=1), out=at / "o.csv"),
        [f".o.csv.making{n}" for n in ("", "/lock", "/whole")],
    ),
    "export": (
        lambda at: cw.export(model(), "safetensors", at / "m"),
        [f".m.making{n}" for n in ("", "/lock", "/model.safetensors")],
    ),
    "pack": (
        lambda at: Packing(at / "photos", at / "P", size=8).run(),
        [f".P.partial{n}" for n in ("", "/train", "/train/progress.json", "/train/.progress.json.new")],
    ),
    "write": (
        lambda at: writer(at / "split"),
        [f"split/{n}" for n in ("progress.json", "manifest.json", "x-00000.npy", "record-00000.npy")],
    ),
}


@pytest.fixture(scope="module")
def a_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "run"
    cw.fit(recipe(), folder, stop_after="4st", **QUIET)
    return folder


@pytest.fixture
def place(tmp_path, a_run):
    """A folder with photos, and with a run that is not complete."""
    (tmp_path / "at" / "photos" / "a").mkdir(parents=True)
    Image.new("RGB", (9, 9)).save(tmp_path / "at" / "photos" / "a" / "1.png")
    shutil.copytree(a_run, tmp_path / "at" / "run")
    return tmp_path / "at"


@pytest.mark.slow
@pytest.mark.drawn
@pytest.mark.timeout(60)  # of which the first of a command compiles; none waits for a pipe or reads a device
@pytest.mark.parametrize("target", ["file", "folder", "pipe", "/dev/zero"])
@pytest.mark.parametrize("command,name", [(c, name) for c, (_, names) in COMMANDS.items() for name in names])
def test_no_link_is_followed(place, tmp_path, command, name, target):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_text(LINE)
    (outside / "folder").mkdir()
    (outside / "folder" / "lock").write_text("mine")
    os.mkfifo(outside / "pipe")
    path = place / name
    if path.is_dir():
        path.rename(tmp_path / "before")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    path.symlink_to(outside / target)
    with refused(RunError, "file-not-plain", path=str(path), kind="a link"):
        COMMANDS[command][0](place)
    assert path.is_symlink() and (outside / "file").read_text() == LINE
    assert (outside / "folder" / "lock").read_text() == "mine"
    assert sorted(os.listdir(outside)) == ["file", "folder", "pipe"]
    assert os.listdir(outside / "folder") == ["lock"]


@pytest.mark.slow
def test_a_file_that_has_another_name_is_not_written(tmp_path):
    """Such as one of a copy by `cp -al`, which appending would change too."""
    cw.fit(recipe(), tmp_path / "run", stop_after="2st", **QUIET)
    for name in ("lock", "processes.jsonl"):
        before = (tmp_path / "run" / name).read_bytes()
        os.link(tmp_path / "run" / name, tmp_path / "other")
        with refused(RunError, "file-not-plain", path=str(tmp_path / "run" / name), kind="a link"):
            cw.fit(recipe(), tmp_path / "run", **QUIET)
        assert (tmp_path / "other").read_bytes() == before
        (tmp_path / "other").unlink()
    assert cw.fit(recipe(), tmp_path / "run", **QUIET).steps == 4


def test_what_orbax_says_of_a_damaged_file_is_a_line(place):
    for text in ("[]", '{"metrics": 3}', '{"init_timestamp_nsecs": 0.5}'):
        (place / "run" / SMALL[0]).write_text(text)
        with refused(CheckpointError, "checkpoint-metadata"):
            restore_run(recipe(), place / "run")


@pytest.mark.parametrize("name", ["run/lock", "run/metrics.jsonl", SMALL[0]])
def test_no_pipe_is_waited_for(place, name):
    path = place / "run" / name.removeprefix("run/")
    path.unlink()
    os.mkfifo(path)
    with refused(RunError, "file-not-plain", path=str(path), kind="a pipe"):
        cw.fit(recipe(), place / "run", **QUIET)


@pytest.mark.parametrize("name", [SMALL[0], "checkpoints/4/state/manifest.ocdbt"])
def test_small_files_of_a_checkpoint_are_small(place, name):
    path = place / "run" / name
    os.truncate(path, 1 << 34)  # a hole, which takes no space
    with refused(RunError, "file-not-plain", path=str(path), kind="too large"):
        restore_run(recipe(), place / "run")


def test_a_folder_may_be_reached_through_a_link(place):
    (place / "latest").symlink_to("run")
    assert cw.fit(recipe(), place / "latest", **QUIET).steps == 4
    assert read_run(place / "latest").result and restore_run(recipe(), place / "latest").steps == 4


def test_what_killed_writers_left_is_removed(place):
    (place / "run" / ".result.json.01234567.part").write_text("{")
    (place / "run" / ".recipe.json.01234567.part").symlink_to(place / "photos")
    cw.fit(recipe(), place / "run", **QUIET)
    assert not list((place / "run").glob("*.part")) and os.listdir(place / "photos")
