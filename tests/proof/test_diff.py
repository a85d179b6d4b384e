"""`diff` names the first step, the cause and the line: a dozen prepared pairs."""

import dataclasses
import json
import shutil
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import chipwise as cw
import pairs
import tasks
from chipwise.proof.diff import Side, diff
from chipwise.run.folder.run_reader import read_run
from chipwise.run.on import On
from chipwise.run.programs import Programs
from refusals import refused
from run_folders import ended, started, write

ONE = On(devices=1)
FAST = {"schedule"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in FAST else pytest.mark.slow) for name in pairs.PAIRS]
)
@pytest.mark.drawn(share=0.25)
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


@pytest.mark.slow
def test_the_label_and_the_replica_are_named():
    a, b, *_ = pairs.PAIRS["label"]
    found = diff(Side("A", a), Side("B", b), on=ONE, steps=20)
    assert found.compared == 2 and found.same_program
    assert (found.causes[0]["name"], found.causes[0]["example"]) == ("label", 40)
    assert found.causes[0]["replica"] == found.causes[1]["replica"]


@pytest.mark.slow
def test_the_examples_of_a_step_are_those_that_it_trained():
    weights = np.where(np.arange(101) == 40, 9, 1)
    sides = [
        Side(name, tasks.quick(task=tasks.quick_task(train=cw.data.Weighted(source, weights))))
        for name, source in (("A", tasks.data()), ("B", pairs.relabelled()))
    ]
    found = diff(*sides, on=ONE, steps=5)
    assert found.step == 1
    assert [cause.code for cause in found.causes[:2]] == ["diff-example", "diff-replica"]
    assert (found.causes[0]["name"], found.causes[0]["example"]) == ("label", 40)


def test_equal_programs_and_inputs_are_the_same_at_once():
    began = time.process_time()
    found = diff(Side("A", tasks.recipe()), Side("B", tasks.recipe()), on=ONE)
    assert found.verdict.code == "diff-same" and found.compared == 0
    assert time.process_time() - began < 20


@pytest.mark.slow
def test_runs_part_where_their_ledgers_do(tmp_path):
    a, b, *_ = pairs.PAIRS["label"]
    how = {"progress": "none", "on": ONE, "log_every": "1st", "eval_every": None, "checkpoint_every": "1st"}
    for name, recipe in (("a", a), ("b", b)):
        cw.fit(recipe, tmp_path / name, stop_after="4st", keep="2st", **how)
    sides = [Side(n, r, read_run(tmp_path / n)) for n, r in (("a", a), ("b", b))]
    found = diff(*sides, on=ONE)
    assert (found.step, found.compared) == (3, 2) and found.causes[0].code == "diff-example"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run with a row in the ledger for each of its steps."""
    folder = tmp_path_factory.mktemp("run") / "a"
    how = {"log_every": "1st", "eval_every": None, "checkpoint_every": "4st"}
    cw.fit(tasks.recipe(duration="8st"), folder, on=ONE, progress="none", **how)
    return folder


@pytest.mark.parametrize("value", [3, ["a"]])
def test_what_a_foreign_run_says_of_itself_may_be_anything(tmp_path, value):
    begun = started(machine={"title": "a"}, devices=value, computed=value)
    events = [begun, *(ended(4) | {"verified": one} for one in (value, {"faults": value}))]
    run = write(tmp_path / "run", processes=events, result={"feed": value})
    known = Side("A", tasks.quick(), read_run(run)).known()
    assert (known["machine"], known["kind"], known["feed"]) == ("a", None, None)
    assert known["faults"] == (1 if value == ["a"] else 0)


def changed_copy(run, folder, after):
    """A copy of `run` in whose ledger the parameters differ after a step: as if a device had failed."""
    shutil.copytree(run, folder)
    rows = [json.loads(line) for line in (folder / "ledger.jsonl").read_text().splitlines()]
    for row in rows:
        if row.get("step", 0) > after:
            row["parameters"] = row["parameters"][::-1]
    (folder / "ledger.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.mark.slow
@pytest.mark.as_users_compile
def test_runs_of_equal_recipes_that_part_are_told_and_which_is_odd(run, tmp_path):
    recipe, other = tasks.recipe(duration="8st"), changed_copy(run, tmp_path / "b", 2)
    a, b = Side("A", recipe, read_run(run)), Side("B", recipe, read_run(other))
    found = diff(a, b, on=ONE)
    assert (found.verdict.code, found.step, found.runs_part) == ("diff-runs", None, 3)
    assert found.parts == ["parameters"] and found.odd == ["B"] and found.causes[0].code == "diff-odd"
    assert diff(b, a, on=ONE).odd == ["B"]
    assert diff(a, b, steps=2, on=ONE).verdict.code == "diff-not-yet"
    assert diff(a, Side("A again", recipe, read_run(run)), on=ONE).verdict.code == "diff-same"


def trained(folder, **changes):
    """A run as `run` is, of a changed task."""
    recipe = tasks.recipe(duration="8st", task=tasks.task(**changes))
    how = {"log_every": "1st", "eval_every": None, "checkpoint_every": "4st"}
    cw.fit(recipe, folder, on=ONE, progress="none", **how)
    return folder


def relabelled(data):
    columns = {name: np.array(column) for name, column in data.columns.items()}
    columns["label"][7] = (columns["label"][7] + 1) % tasks.CLASSES
    return cw.Arrays(**columns)


def flipping(monkeypatch, part, step):
    """Makes the device flip a bit of a part of its state, after one step."""
    computed, steps = Programs.step, []

    def faulty(self, carry, *given):
        carry, token = computed(self, carry, *given)
        steps.append(len(steps) + 1)
        if steps[-1] == step:
            leaves, structure = jax.tree.flatten(getattr(carry[0], part))
            largest = max(range(len(leaves)), key=lambda i: leaves[i].size)
            words = lax.bitcast_convert_type(leaves[largest], jnp.uint32)
            leaves[largest] = lax.bitcast_convert_type(words.at[5].set(words[5] ^ 1), jnp.float32)
            carry = [dataclasses.replace(carry[0], **{part: jax.tree.unflatten(structure, leaves)})]
        return carry, token

    monkeypatch.setattr(Programs, "step", faulty)


@pytest.mark.slow
@pytest.mark.as_users_compile
@pytest.mark.parametrize(("part", "parts"), [("params", ["parameters"]), ("optimizer", ["optimizer"])])
def test_a_bit_that_a_device_flipped_is_found(run, tmp_path, monkeypatch, part, parts):
    with monkeypatch.context() as patch:
        flipping(patch, part, 6)
        trained(tmp_path / "b")
    recipe = tasks.recipe(duration="8st")
    a, b = Side("A", recipe, read_run(run)), Side("B", recipe, read_run(tmp_path / "b"))
    for sides in ((a, b), (b, a)):
        found = diff(*sides, on=ONE)
        assert (found.verdict.code, found.runs_part, found.parts) == ("diff-runs", 6, parts)
        assert (found.step, found.compared, found.odd) == (None, 6, ["B"])


@pytest.mark.slow
@pytest.mark.as_users_compile
def test_runs_on_other_data_that_is_gone(run, tmp_path):
    """Both recipes read what is there now, but the runs state what they were trained on."""
    recipe = tasks.recipe(duration="8st")
    a, b = Side("A", recipe, read_run(run)), read_run(trained(tmp_path / "b", train=relabelled(tasks.data())))
    found = diff(a, Side("B", recipe, b), on=ONE)
    assert found.verdict.code == "diff-runs" and found.odd == ["B"]
    assert "data.training" in [cause["name"] for cause in found.causes if cause.code == "diff-known"]
    evaluated = relabelled(tasks.data(53, 1))
    found = diff(a, Side("C", recipe, read_run(trained(tmp_path / "c", eval=evaluated))), on=ONE)
    assert (found.verdict.code, found.evaluation) == ("diff-evaluation", ["its data"])


@pytest.mark.slow
def test_evaluations_of_other_values_are_a_difference(run, tmp_path):
    other = shutil.copytree(run, tmp_path / "b")
    rows = [json.loads(line) for line in (other / "metrics.jsonl").read_text().splitlines()]
    (last,) = [row for row in rows if "eval/accuracy" in row]
    last["eval/accuracy"] += 0.5
    (other / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = tasks.recipe(duration="8st")
    found = diff(Side("A", recipe, read_run(run)), Side("B", recipe, read_run(other)), on=ONE)
    assert (found.verdict.code, found.evaluation) == ("diff-evaluation", ["its values after step 8"])


@pytest.mark.slow
def test_runs_without_a_step_in_common_are_not_called_the_same(run, tmp_path):
    sides = []
    for name in (0, 1):
        folder = shutil.copytree(run, tmp_path / str(name))
        head, *rows = (folder / "ledger.jsonl").read_text().splitlines(keepends=True)
        (folder / "ledger.jsonl").write_text("".join([head, *rows[name::2]]))
        sides.append(Side(str(name), tasks.recipe(duration="8st"), read_run(folder)))
    found = diff(*sides, on=ONE)
    assert found.verdict.code == "diff-uncompared" and found.uncompared


@pytest.mark.slow
def test_what_is_known_of_each_run_is_told(run, tmp_path):
    other = changed_copy(run, tmp_path / "b", 2)
    events = [json.loads(line) for line in (other / "processes.jsonl").read_text().splitlines()]
    events[0]["computed"]["versions"]["jaxlib"] = "0.1"
    events[1]["verified"]["faults"] = [{"step": 3}]
    (other / "processes.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    result = json.loads((other / "result.json").read_text())
    result["feed"]["data"] = "streamed"
    (other / "result.json").write_text(json.dumps(result))
    recipe = tasks.recipe(duration="8st")
    found = diff(Side("A", recipe, read_run(run)), Side("B", recipe, read_run(other)), on=ONE)
    known = {cause["name"]: (cause["a"], cause["b"]) for cause in found.causes if cause.code == "diff-known"}
    assert set(known) == {"versions.jaxlib", "faults", "feed"} and known["faults"] == (0, 1)


def another_metric(params, state, batch, key, train):
    made, state = tasks.loss(params, state, batch, key, train)
    return {**made, "twice": made["loss"]} if not train else made, state


def another_value(params, state, batch, key, train):
    made, state = tasks.loss(params, state, batch, key, train)
    if not train:
        made = {**made, "accuracy": cw.Sum(2 * made["accuracy"].total, made["accuracy"].count)}
    return made, state


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"loss": another_metric}, ["its metrics"]),
        ({"loss": another_value}, ["its program"]),
        ({"eval": tasks.data(53, 2)}, ["its data"]),
        ({"eval": None}, ["whether there is evaluation data"]),
    ],
)
def test_another_evaluation_is_a_difference(changes, what):
    b = tasks.recipe(task=tasks.task(**changes))
    found = diff(Side("A", tasks.recipe()), Side("B", b), on=ONE, steps=1)
    assert (found.verdict.code, found.evaluation) == ("diff-evaluation", what)


@pytest.mark.slow
def test_a_run_does_not_go_on_with_another_metric(tmp_path, monkeypatch):
    monkeypatch.setattr(another_value, "__qualname__", "loss")  # as if its code had been edited
    cw.fit(tasks.recipe(duration="4st"), tmp_path, on=ONE, progress="none", stop_after="2st")
    other = tasks.recipe(task=tasks.task(loss=another_value), duration="4st")
    with refused(cw.errors.RunError, "run-of-other-programs") as error:
        cw.fit(other, tmp_path, on=ONE, progress="none")
    assert [name for name, _, _ in error.value.facts["changes"]] == ["evaluation"]


def test_groups_are_refused():
    recipe = tasks.recipe(shards=2)
    with refused(cw.errors.RecipeError, "diff-shards", shards=2):
        diff(Side("A", recipe), Side("B", recipe))


@pytest.mark.slow
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
