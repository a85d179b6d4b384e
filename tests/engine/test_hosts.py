"""Several processes train one recipe: the same bits, rows and metrics as one process."""

import uuid
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import chipwise as cw
import processes
import tasks
from chipwise.data.pack import pack

TRAIN = """
import json, sys
import chipwise as cw
import tasks
on, run = cw.On(**json.loads(sys.argv[1])), (sys.argv[2:] or [None])[0]
result = cw.fit(tasks.recipe(), run, on=on, log_every="3st", progress="none")
said = {"fingerprint": result.fingerprint, "rows": result.history, "devices": result.devices["count"]}
print(json.dumps(said))
"""


def rows(result):
    wanted = ("train/", "eval/", "step")
    return [{k: v for k, v in r.items() if k.startswith(wanted) and k != "steps_per_second"} for r in result]


def test_two_processes_train_as_one(tmp_path):
    result = cw.fit(tasks.recipe(), on=cw.On(devices=8), log_every="3st", progress="none")
    said = processes.answer(processes.start(TRAIN, 2, 4, "{}", tmp_path / "run"))
    assert said["devices"] == 8
    assert said["fingerprint"] == result.fingerprint and rows(said["rows"]) == rows(result.history)
    assert (tmp_path / "run" / "result.json").exists()


ROUNDED = """
import os
import numpy as np
import chipwise as cw
import tasks


def rounded(source):  # as another processor would: otherwise on each host
    kernel = np.random.default_rng(1).normal(size=(tasks.FEATURES, 16)).astype(np.float32)
    return {"w": kernel + np.float32(1e-6) * int(os.environ.get("CHIPWISE_HOST", 0))}


result = cw.fit(tasks.recipe(task=tasks.task(from_data=rounded)), on=cw.On(), progress="none")
print('{"fingerprint": "' + result.fingerprint + '"}')
"""


@pytest.mark.slow
def test_parameters_made_from_the_data_are_those_of_host_0():
    one, two = (processes.answer(processes.start(ROUNDED, n, 2 // n)) for n in (1, 2))
    assert one == two


# ---- every cut of eight devices into processes, however fed, with and without the shared optimizer

MAIN = "from chipwise.cli import main; main()"
TASKS = Path(__file__).parents[1] / "tasks.py"
NETS = {  # the last two have batch norm, dropout, augmentation, 101 examples in batches of 24, and AdamW
    "digits": ["digits", "--set", "duration=5ep"],
    "mnist": ["mnist", "--synthetic", "--set", "duration=200st", "--set", "batch=16"],
    "arrays": [f"{TASKS}:recipe"],
    "packed": [f"{TASKS}:packed"],
}
HOW = {
    "resident": ["--feed", "device"],
    "streamed": ["--feed", "host"],
    "shared": ["--feed", "device", "--shard-optimizer"],
    "streamed, shared": ["--feed", "host", "--shard-optimizer"],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Of runs, with a pack of 101 images of 2 by 2 pixels."""
    home, rng = tmp_path_factory.mktemp("images"), np.random.default_rng(0)
    for i in range(101):
        file = home / "photos" / "abcde"[i % tasks.CLASSES] / f"{i}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (2, 2, 3), np.uint8)).save(file)
    pack(home / "photos", home / "pack", store="raw")
    return home


@pytest.fixture(scope="module")
def alone(folder):
    """What one process with one device says of a net."""
    found = {}

    def of(net):
        if net not in found:
            found[net] = train(net, folder, 1, 1, HOW["resident"])
        return found[net]

    return of


def train(net, folder, count, devices, how):
    words = ["train", *NETS[net], *(["--data", folder / "pack"] if net == "packed" else []), *how]
    words += ["--eval-every", "end", "--quiet", "--json", "--run", folder / "runs" / uuid.uuid4().hex]
    return processes.answer(processes.start(MAIN, count, devices, *words), limit=1200)


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("count", [1, 2, 4, 8])
def test_any_cut_of_eight_devices_into_processes(alone, folder, count, how, net):
    said = train(net, folder, count, 8 // count, HOW[how])
    assert (said["devices"]["count"], said["devices"]["hosts"]) == (8, count)
    assert said["devices"]["update"] == ("sharded" if "shared" in how else "flat")
    assert said["fingerprint"] == alone(net)["fingerprint"]
    assert said["metrics"]["train/loss"] == alone(net)["metrics"]["train/loss"]
