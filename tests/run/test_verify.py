"""Replicas that two devices compute: equal bits, faults that happen once, devices that compute wrongly."""

import contextlib
import json

import jax
import numpy as np
import pytest

import chipwise as cw
import tasks
from chipwise.run.folder.checkpoint import Checkpoints
from chipwise.run.folder.run_reader import read_ledger
from chipwise.run.on import On
from chipwise.run.programs import Programs
from chipwise.run.session import Session
from chipwise.run.verify import MOST
from chipwise.step import blueprint
from refusals import refused

pytestmark = pytest.mark.as_users_compile

HOW = {"progress": "none", "log_every": "4st", "eval_every": None, "checkpoint_every": "7st"}
ALL = {"devices": 4, "verify": "100%"}


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """A run without comparisons: its folder and result."""
    folder = tmp_path_factory.mktemp("sound") / "run"
    return folder, cw.fit(tasks.quick(), folder, on=On(devices=1), **HOW)


def flipped(made, bit):
    """What a call of "replica" returned, with one bit of its first vector flipped."""
    leaves, structure = jax.tree.flatten(made)
    bits = np.array(leaves[0])
    bits.view(np.uint32).reshape(-1)[5] ^= np.uint32(1 << bit)
    leaves[0] = jax.device_put(bits, leaves[0].sharding)
    return jax.tree.unflatten(structure, leaves)


@pytest.fixture
def faulty(monkeypatch):
    """A function that makes devices, by number, compute wrongly where `wrong(step)`, counted from 1."""
    compiled = Programs.compile

    def fault(wrong, *devices, bit=12):
        def compile(self):
            compiled(self)
            for device in devices:
                run = self.compiled["replica"][device]

                def computed(inputs, *calls, run=run):
                    made = run(inputs, *calls)
                    return flipped(made, bit) if wrong(int(inputs.step) + 1) else made

                self.compiled["replica"][device] = computed

        monkeypatch.setattr(Programs, "compile", compile)

    return fault


def once(step):
    """Whether this is the first computation of `step`."""
    left = [step]
    return lambda at: at == step and bool(left) and bool(left.pop())


def checkpoints(run):
    return sorted(int(path.name) for path in (run / "checkpoints").iterdir())


@pytest.mark.slow
@pytest.mark.parametrize(
    "on",
    [
        ALL,
        {**ALL, "devices": 3, "feed": "host"},
        {**ALL, "devices": 8, "shard_optimizer": True},
    ],
    ids=["equal", "uneven-streamed", "sharded"],
)
def test_comparing_changes_no_bit(sound, tmp_path, on):
    result = cw.fit(tasks.quick(), tmp_path / "run", on=On(**on), **HOW)
    assert result.fingerprint == sound[1].fingerprint and result.ledger == sound[1].ledger
    assert result.verified == {"share": 1.0, "step": 30, "replicas": 240, "faults": []}
    stated = json.loads((tmp_path / "run" / "result.json").read_text())
    assert stated["verified"] == result.verified


@pytest.mark.slow
def test_replicas_that_are_called_one_by_one(sound, monkeypatch):
    monkeypatch.setattr(blueprint, "LOOP_BYTES", 0)
    result = cw.fit(tasks.quick(), on=On(devices=3, verify="30%"), **HOW)
    assert result.fingerprint == sound[1].fingerprint
    assert 0 < result.verified["replicas"] < 140 and not result.verified["faults"]


@pytest.mark.slow
@pytest.mark.parametrize("step, back", [(5, 0), (17, 14)])
def test_a_fault_that_happens_once_is_undone(sound, tmp_path, faulty, step, back, capsys):
    faulty(once(step), 2)
    result = cw.fit(tasks.quick(), tmp_path / "run", on=On(**ALL), **HOW)
    (fault,) = result.verified["faults"]
    assert (fault["step"], fault["groups"]) == (step, [2]) and "CPU 2" in fault["devices"][0].upper()
    assert "warning:" in capsys.readouterr().err
    assert result.fingerprint == sound[1].fingerprint and result.ledger == sound[1].ledger
    assert [row["step"] for row in result.history] == [row["step"] for row in sound[1].history]
    if back:  # it went back to it, and what was saved says so
        with contextlib.closing(Checkpoints(tmp_path / "run" / "checkpoints", read_only=True)) as kept:
            assert kept.about(21)["verified"]["faults"] == result.verified["faults"]
            assert kept.about(28)["verified"] == {
                **result.verified,
                "step": 28,
                "replicas": 224 - 6,
            }  # of step 17, one device's again


def test_a_device_that_computes_wrongly_is_named_and_nothing_of_it_kept(sound, tmp_path, faulty):
    faulty(lambda at: at >= 17, 1)
    run = tmp_path / "run"
    with refused(cw.errors.DeviceFault, "device-wrong", step=17, groups=[1], verified=16):
        cw.fit(tasks.quick(), run, on=On(**ALL), **HOW)
    assert checkpoints(run) == [7, 14]
    assert max(read_ledger(run).rows) <= 16
    assert json.loads((run / "processes.jsonl").read_text().splitlines()[-1])["code"] == "device-wrong"
    faulty(lambda at: False)
    again = cw.fit(tasks.quick(), run, on=On(devices=2), **HOW)
    assert again.fingerprint == sound[1].fingerprint and again.ledger == sound[1].ledger


@pytest.mark.parametrize("devices, groups", [(2, [0, 1]), pytest.param(3, [1], marks=pytest.mark.slow)])
def test_of_two_devices_nobody_can_say_which_is_wrong(faulty, devices, groups):
    faulty(lambda at: at >= 3, 1)
    with refused(cw.errors.DeviceFault, "device-wrong", step=3, groups=groups, verified=2):
        cw.fit(tasks.quick(), on=On(devices=devices, verify="100%"), **HOW)


@pytest.mark.slow
def test_on_one_device_only_what_passes_is_found(sound, faulty, capsys):
    faulty(once(9), 0)
    result = cw.fit(tasks.quick(), on=On(devices=1, verify="100%"), **HOW)
    assert "A fault that repeats is not found there" in capsys.readouterr().err
    assert [fault["step"] for fault in result.verified["faults"]] == [9]
    assert result.fingerprint == sound[1].fingerprint
    faulty(lambda at: True, 0)
    assert not cw.fit(tasks.quick(), on=On(devices=1, verify="100%"), **HOW).verified["faults"]


@pytest.mark.slow
def test_a_device_that_faults_again_and_again_is_not_sound(faulty):
    steps = iter(range(4, 30, 2))
    due = [next(steps)]

    def wrong(at):
        if at == due[0]:
            due[0] = next(steps)
            return True
        return False

    faulty(wrong, 2)
    with refused(cw.errors.DeviceFault, "replica-differs", step=4 + 2 * MOST):
        cw.fit(tasks.quick(), on=On(**ALL), **HOW)


@pytest.mark.slow
def test_a_wrong_parameter_is_told_from_a_wrong_replica(monkeypatch):
    """The device computes another replica too, but by what it holds."""
    step = Programs.step

    def faulty(self, carry, *given):
        carry, token = step(self, carry, *given)
        if int(carry[0].step) == 9:
            carry[3] = flipped_params(carry[3])
        return carry, token

    def flipped_params(state):
        return type(state)(**{**vars(state), "params": flipped(state.params, 22)})

    monkeypatch.setattr(Programs, "step", faulty)
    with refused(cw.errors.DeviceFault, "devices-unlike", groups=[3]) as caught:
        cw.fit(tasks.recipe(), on=On(**ALL), **HOW)
    assert caught.value.facts["step"] in (10, 11, 12)  # found by the next replica, or one later
    assert caught.value.exit_code == 7


@pytest.fixture(scope="module")
def session():
    with Session(tasks.quick(duration="4000st"), On(devices=4, verify="10%")) as session:
        session.begin()
        session.compile()
        yield session


@pytest.mark.slow
def test_the_draw_is_a_function_of_seed_and_step(session):
    drawn = [session.verifier.due(3, step) for step in range(1, 4001)]
    assert drawn == [session.verifier.due(3, step) for step in range(1, 4001)]
    assert drawn != [session.verifier.due(4, step) for step in range(1, 4001)]
    some = [each for each in drawn if each]
    assert 340 < len(some) < 460
    for each in some:  # all devices take part, none on itself
        assert sorted(one.group for one in each) == sorted(one.by for one in each) == [0, 1, 2, 3]
        assert all(one.group != one.by for one in each)
    assert len({(one.group, one.by) for each in some for one in each}) == 12


@pytest.mark.parametrize("verify", ["1", "-1%", "101%", "nan%", "%", "1 %%", "1e1%"])
def test_a_part_that_cannot_be_read(verify):
    with refused(cw.errors.RecipeError, "verify-share", verify=verify):
        On(verify=verify)


def test_a_step_that_is_one_program_has_nothing_to_compare():
    with refused(cw.errors.RecipeError, "verify-one-block", verify="1%"):
        cw.fit(tasks.quick(replicas=1), on=On(devices=1, verify="1%"), **HOW)


@pytest.mark.slow
def test_groups_compare_their_replicas(faulty):
    recipe = tasks.quick(shards=2, batch=32)
    sound = cw.fit(recipe, on=On(devices=2), **HOW)
    faulty(once(5), 1)
    result = cw.fit(recipe, on=On(devices=8, verify="100%"), **HOW)
    assert result.fingerprint == sound.fingerprint
    assert [(fault["step"], fault["groups"]) for fault in result.verified["faults"]] == [(5, [1])]
