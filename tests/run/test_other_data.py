"""A run that goes on, or is over, with other data than it began with; and what its first lines say."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

import chipwise as cw
from chipwise.data import compared
from chipwise.run.folder.run_reader import LEDGER
from refusals import refused

HOW = {"progress": "none", "on": cw.On(devices=1), "eval_every": None}


def init(key):
    return {"w": jnp.zeros(2)}, {}


def loss(params, state, batch, key, train):
    x = batch["x" if "x" in batch else "image"].reshape(len(batch["label"]), -1)[:, :2].astype(jnp.float32)
    return {"loss": cw.Sum.of((x @ params["w"] - batch["label"].astype(jnp.float32)) ** 2)}, state


def fit(source, run, held_out=None, **how):
    task = cw.Task(init=init, loss=loss, train=source, eval=held_out)
    recipe = cw.Recipe(task=task, batch=4, replicas=1, duration="4st", optimizer=cw.sgd(lr=1e-6))
    return cw.fit(recipe, run, **{**HOW, **how})


class Own:
    """8 examples, or `n`."""

    def __init__(self, label=0, n=8):
        self.label, self.n = label, n

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        return {"x": np.full(2, i, np.float32), "label": np.int32(self.label if i == 3 else 0)}


def photos(folder):
    for name in "ab":
        (folder / name).mkdir(parents=True)
        for i in range(8):
            Image.new("RGB", (4, 4), (i, ord(name), 0)).save(folder / name / f"{i}.bmp")
    return folder


def swapped(folder):
    for i in (1, 2, 4):
        one, other = (folder / name / f"{i}.bmp" for name in "ab")
        contents = one.read_bytes(), other.read_bytes()
        one.write_bytes(contents[1])
        other.write_bytes(contents[0])


@pytest.mark.slow
@pytest.mark.parametrize("over", [False, True])
def test_a_folder_with_swapped_labels_is_refused(tmp_path, over):
    folder, run = photos(tmp_path / "photos"), tmp_path / "run"
    read = lambda: cw.data.ImageFolder(folder, size=4)  # noqa: E731
    fit(read(), run, stop_after=None if over else "2st")
    swapped(folder)
    with refused(cw.errors.RunError, "ledger-of-other-data", name="training", what=["contents"]) as error:
        fit(read(), run)
    assert "contents" in str(error.value) and "--changed-code" in str(error.value)


@pytest.mark.slow
def test_a_source_of_ones_own_with_another_label_is_refused(tmp_path):
    fit(Own(), tmp_path, stop_after="2st")
    with refused(cw.errors.RunError, "ledger-of-other-data", name="training", what=["labels"]):
        fit(Own(1), tmp_path)
    assert fit(Own(), tmp_path).steps == 4


@pytest.mark.slow
@pytest.mark.parametrize("over", [False, True])
def test_another_label_of_the_evaluation_is_refused(tmp_path, over):
    fit(Own(), tmp_path, Own(), stop_after=None if over else "2st")
    with refused(cw.errors.RunError, "ledger-of-other-data", name="evaluation", what=["labels"]):
        fit(Own(), tmp_path, Own(1))


@pytest.mark.slow
def test_a_run_of_an_earlier_version_goes_on(tmp_path):
    """It kept nothing of such a source."""
    fit(Own(), tmp_path, stop_after="2st")
    head, *rows = (tmp_path / LEDGER).read_text().splitlines()
    head = json.dumps(json.loads(head) | {"data": {"training": None, "evaluation": None}})
    (tmp_path / LEDGER).write_text("\n".join([head, *rows, ""]))
    assert fit(Own(1), tmp_path).steps == 4


@pytest.mark.slow
@pytest.mark.parametrize("n, said", [(8, False), (600, True)])
def test_the_first_lines_say_how_little_is_compared(tmp_path, capsys, monkeypatch, n, said):
    monkeypatch.setattr(compared, "_READ", 512)
    monkeypatch.setattr(compared, "_SECONDS", 1e9)
    fit(Own(n=n), tmp_path, progress="lines", stop_after="1st")
    assert ("compares 512 of 600 examples of the" in capsys.readouterr().err) == said
