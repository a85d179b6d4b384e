"""Ledgers: equal on any devices and after any stop; devices that differ; files that anybody may have made."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import chipwise as cw
import processes
import tasks
from chipwise.data import compared
from chipwise.explain.report.run_report import report as run_report
from chipwise.proof.audit import audit
from chipwise.run.folder import run_reader
from chipwise.run.folder.run_reader import DIGESTS, LEDGER, read_ledger
from chipwise.run.on import On
from chipwise.run.session import Session
from refusals import refused

pytestmark = pytest.mark.as_users_compile

HOW = {"progress": "none", "log_every": "4st", "eval_every": None, "checkpoint_every": "7st"}
STEPS = [4, 7, 8, 12, 14, 16, 20, 21, 24, 28, 30]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run on one device: its folder, result and ledger."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    result = cw.fit(tasks.quick(), folder, on=On(devices=1), **HOW)
    return folder, result, read_ledger(folder)


def test_a_ledger_has_a_head_and_a_row_at_each_log_evaluation_and_save(whole):
    folder, result, ledger = whole
    (head,) = ledger.heads
    assert head["from"] == 0 and head["data"]["training"].startswith("examples:")
    assert list(ledger.rows) == STEPS
    assert all(set(row) == set(DIGESTS) for row in ledger.rows.values())
    assert len({row["parameters"] for row in ledger.rows.values()}) == len(STEPS)
    assert result.ledger == ledger.digest == json.loads((folder / "result.json").read_text())["ledger"]


@pytest.mark.parametrize(
    "devices, shard",
    [(3, True), *(pytest.param(*n, marks=pytest.mark.slow) for n in ((3, False), (5, True), (8, True)))],
)
def test_rows_are_equal_on_other_devices_also_after_a_stop(whole, tmp_path, devices, shard):
    run, recipe = tmp_path / "run", tasks.quick()
    first = On(devices=devices, shard_optimizer=shard)
    stopped = cw.fit(recipe, run, on=first, stop_after="13st", **HOW)
    assert list(stopped.history) and list(read_ledger(run).rows) == STEPS[:4]
    result = cw.fit(recipe, run, on=On(devices=1), **HOW)
    assert read_ledger(run).rows == whole[2].rows and result.ledger == whole[1].ledger
    assert len(read_ledger(run).heads) == 1


HOSTS = """
import json, sys
import numpy as np
import chipwise as cw
import jax
import tasks
from chipwise.run.programs import Programs
from chipwise.machine.hosts import hosts

run, verify, faulty = json.loads(sys.argv[1])
compiled = Programs.compile

def compile(self):  # the second host's first device computes step 10 wrongly, once
    compiled(self)
    replica, left = self.compiled["replica"][0], [faulty and hosts().index == 1]
    def computed(inputs, *calls):
        made = replica(inputs, *calls)
        if left[0] and int(inputs.step) == 9:
            left[0] = False
            bits = np.array(made)
            bits.view(np.uint32)[3] ^= np.uint32(1)
            made = jax.device_put(bits, made.sharding)
        return made
    self.compiled["replica"][0] = computed

Programs.compile = compile
how = {"progress": "none", "log_every": "4st", "eval_every": None, "checkpoint_every": "7st"}
result = cw.fit(tasks.quick(), run, on=cw.On(verify=verify), **how)
print(json.dumps({"ledger": result.ledger, "verified": result.verified}))
"""


@pytest.mark.slow
@pytest.mark.drawn(share=0.25)
@pytest.mark.parametrize("verify, faulty", [("0%", False), ("30%", False), ("100%", True)])
def test_rows_are_equal_over_two_hosts_also_if_they_compare_replicas(whole, tmp_path, verify, faulty):
    run = tmp_path / "run"
    said = processes.answer(processes.start(HOSTS, 2, 4, json.dumps([str(run), verify, faulty])))
    assert read_ledger(run).rows == whole[2].rows and said["ledger"] == whole[1].ledger
    assert (said["verified"]["replicas"] > 0) == (verify != "0%")
    faults = [(one["step"], one["groups"]) for one in said["verified"]["faults"]]
    assert faults == [(10, [4])] * faulty


@pytest.mark.slow
def test_rows_are_equal_on_any_number_of_groups(tmp_path):
    recipe, rows = tasks.quick(shards=2, batch=32), []
    for devices in (2, 4, 8):
        run = tmp_path / str(devices)
        cw.fit(recipe, run, on=On(devices=devices), **HOW)
        rows.append(read_ledger(run).rows)
    assert list(rows[0]) == STEPS and rows[0] == rows[1] == rows[2]


@pytest.mark.slow
def test_every_step_may_have_a_row(whole, tmp_path):
    cw.fit(tasks.quick(), tmp_path / "run", on=On(devices=1), ledger="1st", **HOW)
    rows = read_ledger(tmp_path / "run").rows
    assert list(rows) == list(range(1, 31))
    assert {step: rows[step] for step in STEPS} == whole[2].rows


@pytest.mark.slow
def test_checkpoints_that_are_kept(tmp_path):
    for keep, steps in (("10st", [10, 20, 21, 28, 30]), (2, [28, 30])):
        run = tmp_path / str(keep)
        cw.fit(tasks.quick(), run, on=On(devices=1), keep=keep, **HOW)
        assert sorted(int(p.name) for p in (run / "checkpoints").iterdir()) == steps
    with refused(cw.errors.RecipeError, "keep-range", keep="0"):
        cw.fit(tasks.quick(), tmp_path / "none", on=On(devices=1), keep="0", **HOW)


def changed_row(run, step, name):
    """Changes a digit of the ledger."""
    lines = (run / LEDGER).read_text().splitlines()
    for i, row in enumerate(map(json.loads, lines)):
        if row.get("step") == step:
            lines[i] = json.dumps(row | {name: f"{int(row[name], 16) ^ 1:016x}"})
    (run / LEDGER).write_text("\n".join(lines) + "\n")


@pytest.mark.slow
def test_rows_that_are_made_again_are_compared(tmp_path):
    run, recipe = tmp_path / "run", tasks.quick()
    cw.fit(recipe, run, on=On(devices=1), stop_after="24st", **HOW)
    for step in (24, 21):  # the run goes on from step 14
        (run / "checkpoints" / str(step)).rename(tmp_path / str(step))
    changed_row(run, 21, "gradient")
    with refused(cw.errors.DeviceFault, "ledger-differs", step=21, what=["gradient"]):
        cw.fit(recipe, run, on=On(devices=1), **HOW)


def listed():
    columns = tasks.data().columns
    return [{name: column[i] for name, column in columns.items()} for i in range(101)]


def fewer_portions(run):
    """The ledger of a process whose disk was slow, and what its head states of the training data."""
    head, *rows = (run / LEDGER).read_text().splitlines()
    head = json.loads(head)
    parts = head["data"]["training"].split()
    assert [part.partition(":")[0] for part in parts] == [
        f"{name}/{read}" for read in (8, 32, 101) for name in ("labels", "examples")
    ]
    head["data"]["training"] = " ".join(parts[:-2])
    (run / LEDGER).write_text("\n".join([json.dumps(head), *rows]) + "\n")
    return head["data"]["training"]


def test_a_digest_does_not_depend_on_how_much_of_the_data_was_compared(tmp_path, monkeypatch):
    monkeypatch.setattr(compared, "_SECONDS", 1e9)
    run, recipe = tmp_path / "run", tasks.quick(task=tasks.quick_task(train=listed()))
    cw.fit(recipe, run, on=On(devices=1), stop_after="13st", **HOW)
    before = read_ledger(run)
    earlier = run_reader.sha_of([[before.heads[0][n] for n in ("recipe", "data")], [*before.rows.items()]])
    assert before.digest != earlier and before.was(before.digest) and before.was(earlier)
    stated = fewer_portions(run)
    after = read_ledger(run)
    assert after.digest == before.digest and not after.was(earlier) and not after.was(None)
    shutil.rmtree(run / "checkpoints" / "13")
    cw.fit(recipe, run, on=On(devices=1), stop_after="14st", **HOW)
    (head,) = read_ledger(run).heads
    assert head["data"]["training"] == stated and list(read_ledger(run).rows) == [4, 7, 8, 12, 14]


class Noisy(list):
    """Examples that differ at each reading."""

    def __getitem__(self, i):
        one = super().__getitem__(i)
        return one | {"x": one["x"] ^ np.random.default_rng().integers(0, 256, one["x"].shape, np.uint8)}


def test_rows_that_need_not_be_equal_are_not_compared(tmp_path):
    run, recipe = tmp_path / "run", tasks.quick(task=tasks.quick_task(train=Noisy(listed())))
    how = {**HOW, "on": On(devices=1, exact=False)}
    cw.fit(recipe, run, stop_after="13st", **how)
    before = read_ledger(run).rows
    shutil.rmtree(run / "checkpoints" / "13")
    cw.fit(recipe, run, **how)
    after = read_ledger(run)
    assert len(after.heads) == 1 and list(after.rows) == STEPS
    assert after.rows[7] == before[7] and after.rows[12] != before[12]


def test_rows_of_other_programs_are_not_compared_if_these_wrote_none(tmp_path):
    run, recipe = tmp_path / "run", tasks.quick()
    other = tasks.quick(task=tasks.quick_task(loss=tasks.edited_loss))
    how = {**HOW, "on": On(devices=1), "ledger": "10st", "checkpoint_every": "5st", "changed_code": True}
    cw.fit(recipe, run, stop_after="20st", **how)
    shutil.rmtree(run / "checkpoints" / "20")
    cw.fit(other, run, stop_after="17st", **how)
    cw.fit(recipe, run, **how)
    ledger = read_ledger(run)
    assert [head["from"] for head in ledger.heads] == [0, 15, 17] and list(ledger.rows) == [10, 20, 30]
    codes = [head["computed"]["code"] for head in ledger.heads]
    assert codes[0] == codes[2] != codes[1]


@pytest.mark.slow
def test_a_run_does_not_go_on_with_other_data(tmp_path):
    run, recipe = tmp_path / "run", tasks.quick()
    cw.fit(recipe, run, on=On(devices=1), stop_after="7st", **HOW)
    data = tasks.data()
    data.columns["label"][17] ^= 1
    other = tasks.quick(task=tasks.quick_task(train=data))
    with refused(cw.errors.RunError, "ledger-of-other-data", name="training"):
        cw.fit(other, run, on=On(devices=1), **HOW)
    cw.fit(other, run, on=On(devices=1), changed_code=True, **HOW)
    assert [head["from"] for head in read_ledger(run).heads] == [0, 7]


@pytest.fixture(scope="module")
def session():
    with Session(tasks.quick(), On(devices=4)) as session:
        session.begin()
        session.advance()
        yield session


@pytest.mark.parametrize("flipped, named", [([2], [2]), ([0], [0]), ([1, 3], [0, 1, 2, 3])])
@pytest.mark.parametrize("part", ["params", "state", "optimizer"])
def test_the_device_with_other_bits_is_named(session, flipped, named, part):
    carry = list(session._carry)
    for group in flipped:
        carry[group] = with_a_flipped_bit(carry[group], part)
    found = session.programs.digests.read(session.programs.digest_of(carry)).unlike
    name = {"params": "parameters"}.get(part, part)
    assert found == ({name: named} if flipped != [1, 3] else {name: found[name]})
    if flipped == [1, 3]:  # two of four with the same flip: nobody can say which
        assert found[name] == named


def with_a_flipped_bit(state, part):
    leaves, structure = jax.tree.flatten(getattr(state, part))
    place = next(i for i, leaf in enumerate(leaves) if leaf.size > 8)
    bits = np.array(leaves[place])
    bits.view(np.uint32).reshape(-1)[3] ^= np.uint32(1)
    leaves[place] = jax.device_put(jnp.asarray(bits), next(iter(leaves[place].devices())))
    return type(state)(**{**vars(state), part: jax.tree.unflatten(structure, leaves)})


def test_nothing_is_saved_from_devices_that_differ(tmp_path, monkeypatch):
    from chipwise.run import programs

    step = programs.Programs.step

    def faulty(self, carry, *given):
        carry, token = step(self, carry, *given)
        if int(carry[0].step) == 9:
            carry[3] = with_a_flipped_bit(carry[3], "params")
        return carry, token

    monkeypatch.setattr(programs.Programs, "step", faulty)
    run = tmp_path / "run"
    with refused(cw.errors.DeviceFault, "devices-unlike", step=12, groups=[3]):
        cw.fit(tasks.quick(), run, on=On(devices=4), **HOW)
    assert sorted(p.name for p in (run / "checkpoints").iterdir()) == ["7"]
    assert json.loads((run / "processes.jsonl").read_text().splitlines()[-1])["code"] == "devices-unlike"


BAD = {
    "ledger-damaged": [
        lambda text: text.replace('"gradient"', '"gradiant"', 1),
        lambda text: text.replace('"step": 7', '"step": 4', 1),
        lambda text: text.replace('"step": 7', '"step": -7', 1),
        lambda text: "\n".join(text.splitlines()[1:]) + "\n",
        lambda text: text.replace("\n", "\nnot a row\n", 1),
        lambda text: text.replace("\n", "\n" + "[" * 100_000 + "\n", 1),
        lambda text: text.replace('"data": {', '"data": 3, "more": {', 1),
        lambda text: text.replace('"training": "', '"training": 3, "more": "', 1),
    ],
    "ledger-version": [lambda text: text.replace('"ledger": 1', '"ledger": 2', 1)],
}


@pytest.mark.parametrize("code, number", [(code, i) for code, each in BAD.items() for i in range(len(each))])
def test_a_ledger_that_was_edited_is_refused_in_a_line(whole, tmp_path, code, number):
    (tmp_path / LEDGER).write_text(BAD[code][number]((whole[0] / LEDGER).read_text()))
    with refused(cw.errors.RunError, code):
        read_ledger(tmp_path)


def test_what_a_killed_process_leaves_is_read(whole, tmp_path):
    text = (whole[0] / LEDGER).read_text()
    (tmp_path / LEDGER).write_text(text[:-9])
    assert list(read_ledger(tmp_path).rows) == STEPS[:-1]
    (tmp_path / LEDGER).write_text("")
    assert read_ledger(tmp_path) is None


def without(lines):
    """A ledger without the row of step 16."""
    return [line for line in lines if '"step": 16,' not in line]


def zeroed(lines):
    """As a power cut leaves it: a page of zeros from the middle of a row to the middle of another."""
    at = next(i for i, line in enumerate(lines) if '"step": 16,' in line)
    return [*lines[:at], lines[at][:30] + "\0" * 300 + lines[at + 1][50:], *lines[at + 2 :]]


def cut(lines):
    """Without what follows step 14, of which only zeros are left."""
    at = next(i for i, line in enumerate(lines) if '"step": 16,' in line)
    return [*lines[:at], "\0" * 99]


HOLES = [(without, [16], []), (zeroed, [20], [7]), (cut, [21, 28, 30], [7])]


@pytest.mark.parametrize(("damage", "steps", "lines"), HOLES)
def test_a_hole_in_a_ledger_is_told_by_resume_report_and_audit(whole, tmp_path, capsys, damage, steps, lines):
    run = shutil.copytree(whole[0], tmp_path / "run")
    text = (run / LEDGER).read_text()
    damaged = "\n".join(damage(text.splitlines()))
    (run / LEDGER).write_text(damaged + ("" if damage is cut else "\n"))
    found = {fact.code: fact for fact in run_reader.holes(run, read_ledger(run))}
    assert found["ledger-rows-missing"]["steps"] == steps
    assert ("ledger-zeros" in found) == bool(lines)
    if lines:
        assert found["ledger-zeros"]["lines"] == lines
    told = {one["code"] for one in run_report(run)["about"]}
    assert set(found) <= told
    statement = audit(run, tasks.quick(), steps="0:4", on=On(devices=1))[1]
    assert set(found) <= {fact["code"] for fact in statement["found"]}
    for step in (21, 28, 30):
        shutil.rmtree(run / "checkpoints" / str(step))
    (run / "result.json").unlink()
    shutil.copytree(whole[0] / "checkpoints" / "21", run / "checkpoints" / "21")
    again = cw.fit(tasks.quick(), run, on=On(devices=1), **HOW)
    assert "ledger.jsonl" in capsys.readouterr().err
    assert again.fingerprint == whole[1].fingerprint


def test_rows_that_a_power_cut_took_after_the_checkpoint_are_made_again(whole, tmp_path):
    run = tmp_path / "run"
    cw.fit(tasks.quick(), run, on=On(devices=1), stop_after="13st", **HOW)
    text = (run / LEDGER).read_text()
    shutil.rmtree(run / "checkpoints" / "13")
    at = text.index('{"step": 12')
    (run / LEDGER).write_text(text[:at] + "\0" * (len(text) - at))
    result = cw.fit(tasks.quick(), run, on=On(devices=1), **HOW)
    assert read_ledger(run).rows == whole[2].rows and result.ledger == whole[1].ledger
    assert not list(run_reader.holes(run, read_ledger(run)))
