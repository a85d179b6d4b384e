"""Several processes train one recipe: the same bits, rows and metrics as one process."""

import functools
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import chipwise as cw
import processes
import tasks
from chipwise.data.pack import pack

pytestmark = pytest.mark.as_users_compile

TRAIN = """
import json, sys
import chipwise as cw
import tasks
made, how, run = getattr(tasks, sys.argv[1]), json.loads(sys.argv[2]), (sys.argv[3:] or [None])[0]
result = cw.fit(made(duration="12st"), run, on=cw.On(**how), log_every="3st", progress="none")
said = {"fingerprint": result.fingerprint, "rows": result.history, "devices": result.devices["count"]}
print(json.dumps(said))
"""


def rows(result):
    wanted = ("train/", "eval/", "step")
    return [{k: v for k, v in r.items() if k.startswith(wanted) and k != "steps_per_second"} for r in result]


@pytest.mark.slow
def test_two_processes_train_as_one(tmp_path):
    result = cw.fit(tasks.quick(duration="12st"), on=cw.On(devices=1), log_every="3st", progress="none")
    said = processes.answer(processes.start(TRAIN, 2, [1, 2], "quick", "{}", tmp_path / "run"))
    assert said["devices"] == 3
    assert said["fingerprint"] == result.fingerprint and rows(said["rows"]) == rows(result.history)
    assert (tmp_path / "run" / "result.json").exists()


@pytest.mark.slow
@pytest.mark.drawn(share=0.25)
@pytest.mark.parametrize(
    "devices, how",
    [
        ([1, 3], {"feed": "host", "shard_optimizer": True}),
        ([2, 2], {}),
        ([2, 1], {}),
        ([3, 2, 2], {"feed": "host"}),
        ([1, 4], {"shares": [2, 1, 1, 3, 1]}),
    ],
)
def test_hosts_of_any_devices_train_as_one(devices, how):
    result = cw.fit(tasks.recipe(duration="12st"), on=cw.On(devices=1), log_every="3st", progress="none")
    said = processes.answer(processes.start(TRAIN, len(devices), devices, "recipe", json.dumps(how)))
    assert said["devices"] == sum(devices)
    assert said["fingerprint"] == result.fingerprint and rows(said["rows"]) == rows(result.history)


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

MATRIX = """
import json, sys
import chipwise as cw
from chipwise.recipes.load import load

nets, hows = json.loads(sys.argv[1])
for net, words in nets.items():
    recipe = load(*words)
    for how, fields in hows.items():
        result = cw.fit(recipe, on=cw.On(**fields), eval_every=None, progress="none")
        on = result.devices
        told = [on["count"], on["hosts"], on["update"], result.fingerprint, result.metrics]
        print(json.dumps([net, how, *told]), flush=True)
"""
TASKS = str(Path(__file__).parents[1] / "tasks.py")
HOW = {
    "resident": {"feed": "device", "shard_optimizer": False},
    "streamed": {"feed": "host", "shard_optimizer": False},
    "resident, shared": {"feed": "device", "shard_optimizer": True},
    "streamed, shared": {"feed": "host", "shard_optimizer": True},
}
CUTS = [(1, 8), (2, 4), (4, 2), (8, 1)]  # processes and the devices of each


@pytest.fixture(scope="module")
def nets(tmp_path_factory):
    """What `load` takes for each. The last two have batch norm, dropout, augmentation, 101 examples in
    batches of 24, and AdamW; the last one reads a pack of 101 images of 2 by 2 pixels."""
    home, rng = tmp_path_factory.mktemp("images"), np.random.default_rng(0)
    for i in range(101):
        file = home / "photos" / "abcde"[i % tasks.CLASSES] / f"{i}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (2, 2, 3), np.uint8)).save(file)
    pack(home / "photos", home / "pack", store="raw")
    return {
        "digits": ["digits", ["duration=1ep"]],
        "mnist": ["mnist", ["duration=12st", "batch=16"], None, True],
        "arrays": [f"{TASKS}:recipe"],
        "packed": [f"{TASKS}:packed", [], str(home / "pack")],
    }


def trained(nets, count, devices, hows):
    """Every net fed in every way, one after the other in the same processes: what host 0 says of each."""
    told = processes.ends(processes.start(MATRIX, count, devices, json.dumps([nets, hows])), 600)
    assert [code for code, _, _ in told] == [0] * count, told
    rows = [json.loads(line) for line in told[0][1].splitlines() if line.startswith('["')]  # others print too
    return {(net, how): said for net, how, *said in rows}


@pytest.fixture(scope="module")
def alone(nets):
    """What one process with one device says of a net: its fingerprint and metrics."""

    @functools.cache
    def said(net):
        told = trained({net: nets[net]}, 1, 1, {"resident": {"feed": "device"}})
        *_, fingerprint, metrics = told[net, "resident"]
        return fingerprint, metrics

    return said


@pytest.mark.slow
@pytest.mark.drawn
@pytest.mark.parametrize("net", ["digits", "mnist", "arrays", "packed"])
@pytest.mark.parametrize(("count", "devices"), CUTS)
def test_any_cut_of_eight_devices_into_processes(alone, nets, count, devices, net):
    fingerprint, metrics = alone(net)
    said = trained({net: nets[net]}, count, devices, HOW)
    assert set(said) == {(net, how) for how in HOW}
    for (_, how), (*where, its_fingerprint, its_metrics) in said.items():
        assert where == [8, count, "sharded" if HOW[how]["shard_optimizer"] else "flat"], how
        assert (its_fingerprint, its_metrics["train/loss"]) == (fingerprint, metrics["train/loss"]), how
        assert its_metrics == pytest.approx(metrics, rel=1e-5), how


# ---- an error on one host of programs that are not the command line

GUEST = """
import atexit, os, sys
import chipwise as cw
import tasks

how = sys.argv[1]
atexit.register(lambda: print("said at exit", flush=True))


def fails():
    if how == "its own" and os.environ["CHIPWISE_HOST"] == "1":
        raise ValueError("of the program")
    if how in ("caught", "uncaught"):
        recipe = tasks.quick(duration="12st", task=tasks.quick_task(eval=None))
        cw.fit(recipe, on=cw.On(), progress="none", keep_best="eval/loss")
    cw.fit(tasks.quick(duration="12st"), on=cw.On(), progress="none")


cw.machine.hosts.hosts()
try:
    fails()
except cw.errors.ChipwiseError as error:
    if how == "uncaught":
        raise
    print(error.code)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("how", "host", "code"), [("caught", 0, 0), ("uncaught", 0, 1), ("its own", 1, 1)])
def test_a_program_that_fails_ends_as_it_would(how, host, code):
    """With its own exit code, after what it registered for its exit. The other host may wait in a collective,
    where no exception reaches it, and is ended."""
    found, out, err = processes.ends(processes.start(GUEST, 2, 1, how))[host]
    assert found == code and "said at exit" in out, err
