"""Several processes train one recipe: the same bits, rows and metrics as one process."""

import json

import pytest

import chipwise as cw
import processes
import tasks

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


@pytest.fixture(scope="module")
def alone():
    result = cw.fit(tasks.recipe(), on=cw.On(devices=8), log_every="3st", progress="none")
    return {"fingerprint": result.fingerprint, "rows": rows(result.history)}


def same(said, alone):
    return said["fingerprint"] == alone["fingerprint"] and rows(said["rows"]) == alone["rows"]


def test_two_processes_train_as_one(alone, tmp_path):
    said = processes.answer(processes.start(TRAIN, 2, 4, "{}", tmp_path / "run"))
    assert said["devices"] == 8 and same(said, alone)
    assert (tmp_path / "run" / "result.json").exists()


HOW = {"resident": {"feed": "device"}, "streamed": {"feed": "host"}, "shared": {"shard_optimizer": True}}


@pytest.mark.slow
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("count", [2, 4, 8])
def test_any_cut_of_eight_devices_into_processes(alone, count, how):
    said = processes.answer(processes.start(TRAIN, count, 8 // count, json.dumps(HOW[how])))
    assert same(said, alone)
