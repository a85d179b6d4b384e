"""`diff` names the first step, the cause and the line: a dozen prepared pairs."""

import time

import numpy as np
import pytest

import chipwise as cw
import pairs
import tasks
from chipwise.engine.on import On
from chipwise.engine.stored import read_run
from chipwise.proof.diff import Side, diff
from refusals import refused

ONE = On(devices=1)
FAST = {"half", "label", "schedule"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in FAST else pytest.mark.slow) for name in pairs.PAIRS]
)
def test_the_cause_of_a_pair(name):
    a, b, code, place = pairs.PAIRS[name]
    found = diff(Side("A", a), Side("B", b), on=ONE, steps=20)
    if code is None:
        assert found.step is None and found.compared == 20 and not found.causes
        return
    causes = {cause.code: cause for cause in found.causes}
    assert code in causes and found.step == {"seed": 0, "label": 3, "schedule": 2}.get(name, 1)
    if code in ("diff-seed", "diff-example", "diff-rate"):
        assert found.causes[0].code == code
    if place not in (None, "_"):
        assert any(str(causes[code][side]).endswith(f" at {place}") for side in "ab")
    assert "\n" not in str(found.verdict) and all("\n" not in str(cause) for cause in found.causes)
    assert found.to_json()["verdict"]["code"] in ("diff-step", "diff-start")


def test_the_label_and_the_replica_are_named():
    a, b, *_ = pairs.PAIRS["label"]
    found = diff(Side("A", a), Side("B", b), on=ONE, steps=20)
    assert found.compared == 2 and found.same_program
    assert (found.causes[0]["name"], found.causes[0]["example"]) == ("label", 40)
    assert found.causes[0]["replica"] == found.causes[1]["replica"]


def test_equal_programs_and_inputs_are_the_same_at_once():
    began = time.process_time()
    found = diff(Side("A", tasks.recipe()), Side("B", tasks.recipe()), on=ONE)
    assert found.verdict.code == "diff-same" and found.compared == 0
    assert time.process_time() - began < 20


def test_runs_part_where_their_ledgers_do(tmp_path):
    a, b, *_ = pairs.PAIRS["label"]
    how = {"progress": "none", "on": ONE, "log_every": "1st", "eval_every": None, "checkpoint_every": "1st"}
    for name, recipe in (("a", a), ("b", b)):
        cw.fit(recipe, tmp_path / name, stop_after="4st", keep="2st", **how)
    sides = [Side(n, r, read_run(tmp_path / n)) for n, r in (("a", a), ("b", b))]
    found = diff(*sides, on=ONE)
    assert (found.step, found.compared) == (3, 2) and found.causes[0].code == "diff-example"


def test_groups_are_refused():
    recipe = tasks.recipe(shards=2)
    with refused(cw.errors.RecipeError, "diff-shards", shards=2):
        diff(Side("A", recipe), Side("B", recipe))


def test_the_module_of_pytorch_is_named():
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    data = cw.Arrays(x=rng.normal(size=(32, 4)).astype(np.float32), label=rng.integers(0, 3, 32))

    def side(name, slope):
        def net():
            torch.manual_seed(0)
            body = torch.nn.Sequential(
                torch.nn.Linear(4, 8), torch.nn.LeakyReLU(slope), torch.nn.Linear(8, 3)
            )
            return torch.nn.Sequential(torch.nn.Flatten(), body)

        task = cw.torch.task(net, torch.nn.CrossEntropyLoss(), train=data, inputs="x", target="label")
        return Side(name, tasks.recipe(task=task, batch=16, replicas=2, duration="2st"))

    found = diff(side("A", 0.01), side("B", 0.02), on=ONE, steps=2)
    (cause,) = [one for one in found.causes if one.code == "diff-operation"]
    assert found.step == 1 and " of 1/1/aten::leaky_relu at " in cause["a"]
