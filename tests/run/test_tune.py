"""Runs with tuned kernels: what is stated, refused and sent to hosts. A CPU trains, as if it were tuned."""

import json
import sys
import types
from pathlib import Path

import pytest

import absent_gpu
import chipwise as cw
import tasks
from chipwise.base.errors import DeviceError, RecipeError, RunError
from chipwise.cli import main
from chipwise.explain.report.run_report import report
from chipwise.machine.kernels import FILE, TUNED, Kernels
from chipwise.proof.audit import audit
from chipwise.run import tune
from chipwise.run.folder.run_reader import read_ledger, read_processes
from chipwise.run.on import On
from chipwise.run.session import Session
from refusals import refused

pytestmark = pytest.mark.as_users_compile

ENTRY = absent_gpu.entry("CUDA: 9.0", "f32[2] custom-call(f32[2])", 45, "gemm {\n    }")
GRADIENT = ENTRY.replace("custom-call(f32[2])", "__cudnn$convBackwardFilter")
SOME, OTHERS = Kernels(f"version: 3\n{ENTRY}"), Kernels(f"version: 3\n{ENTRY}{ENTRY}")
HOW = {"progress": "none", "eval_every": None, "checkpoint_every": "7st"}


@pytest.fixture
def timed(monkeypatch):
    """A CPU that takes kernels: those of a file, or `SOME` where it would time some."""

    def take(asked, programs):
        if asked is None:
            return None
        return SOME if asked == TUNED else tune.read(asked)

    for module in ("run.programs", "proof.audit"):
        monkeypatch.setattr(sys.modules[f"chipwise.{module}"], "take", take)


def on(kernels=TUNED):
    return On(devices=1, kernels=kernels)


def file(tmp_path, kernels, name="other.textproto"):
    (tmp_path / name).write_text(kernels.text)
    return tmp_path / name


@pytest.mark.parametrize("kernels", [TUNED, "nowhere.textproto"])
def test_nothing_is_tuned_on_a_cpu(kernels):
    with refused(DeviceError, "kernels-nowhere", platform="CPU", kernels=kernels):
        Session(tasks.quick(), on(kernels))


def test_kernels_are_for_exact_training():
    with refused(RecipeError, "kernels-inexact", kernels="k.textproto"):
        On(exact=False, kernels="k.textproto")


def test_nothing_is_tuned_for_groups():
    placement = types.SimpleNamespace(lead=types.SimpleNamespace(platform="gpu"), shards=2)
    with refused(DeviceError, "kernels-of-groups", shards=2):
        tune.take(TUNED, types.SimpleNamespace(placement=placement))


def test_a_run_states_its_kernels_everywhere(timed, tmp_path):
    run = tmp_path / "run"
    result = cw.fit(tasks.quick(), run, on=on(), **HOW)
    assert (run / FILE).read_text() == SOME.text and len(SOME.digest) == 64
    assert read_ledger(run).heads[0]["computed"]["kernels"] == SOME.digest
    assert read_processes(run)[0]["computed"]["kernels"] == SOME.digest
    assert result.devices["kernels"] == SOME.digest
    assert json.loads((run / "result.json").read_text())["devices"]["kernels"] == SOME.digest
    with Session(tasks.quick(), on()) as session:
        assert SOME.digest[:12] in session.start.numbers["mark"]


def test_the_commands_of_a_report_name_the_kernels(timed, tmp_path):
    run = tmp_path / "run"
    cw.fit(tasks.quick(), run, on=on(), stop_after="9st", **HOW)
    recipe = json.loads((run / "recipe.json").read_text())
    source = {"recipe": "digits", "set": [], "data": None, "synthetic": False}
    (run / "recipe.json").write_text(json.dumps({**recipe, "source": source}))
    said = [one["command"] for one in report(run)["commands"] if "chipwise train" in str(one.get("command"))]
    assert said and all(f"--kernels {run / FILE}" in command for command in said)


@pytest.mark.parametrize("kernels", ["tuned", "nowhere.textproto"])
def test_the_command_line_takes_kernels(tmp_path, kernels, capsys):
    command = ["train", "digits", "--kernels", kernels, "--run", str(tmp_path / "run"), "--quiet"]
    assert main(command) == DeviceError.exit_code
    assert "nothing is tuned on a CPU" in capsys.readouterr().err


def test_a_run_without_kernels_says_nothing_of_them(tmp_path):
    run = tmp_path / "run"
    assert "kernels" not in cw.fit(tasks.quick(), run, on=On(devices=1), **HOW).devices
    assert not (run / FILE).exists()
    assert all('"kernels"' not in file.read_text() for file in run.glob("*.json*"))


def test_a_resume_takes_the_kernels_of_the_folder(timed, tmp_path, monkeypatch):
    run, begun = tmp_path / "run", file(tmp_path, OTHERS)
    cw.fit(tasks.quick(), run, on=on(begun), stop_after="9st", **HOW)
    again = cw.fit(tasks.quick(), run, on=on(), **HOW)  # which would time SOME
    assert again.devices["kernels"] == OTHERS.digest and (run / FILE).read_text() == OTHERS.text
    assert len(read_ledger(run).heads) == 1


@pytest.mark.parametrize("other", [SOME, None])
@pytest.mark.parametrize(
    "stop, code", [("9st", "run-of-other-programs"), (None, "finished-run-of-other-programs")]
)
def test_a_run_does_not_go_on_with_other_kernels_or_without(timed, tmp_path, other, stop, code):
    run, begun = tmp_path / "run", file(tmp_path, OTHERS)
    cw.fit(tasks.quick(), run, on=on(begun), stop_after=stop, **HOW)
    now = On(devices=1) if other is None else on(file(tmp_path, other, "now.textproto"))
    with refused(RunError, code, changes=[("kernels", OTHERS.digest, other and other.digest)]):
        cw.fit(tasks.quick(), run, on=now, **HOW)
    assert (run / FILE).read_text() == OTHERS.text


def test_a_run_with_changed_code_keeps_its_earlier_kernels(timed, tmp_path):
    run = tmp_path / "run"
    cw.fit(tasks.quick(), run, on=on(file(tmp_path, OTHERS)), stop_after="9st", **HOW)
    now = file(tmp_path, SOME, "now.textproto")
    cw.fit(tasks.quick(), run, on=on(now), changed_code=True, **HOW)
    assert (run / FILE).read_text() == SOME.text
    assert (run / f"kernels-{OTHERS.digest[:12]}.textproto").read_text() == OTHERS.text
    cw.fit(tasks.quick(), run, on=on(now), fresh=True, **HOW)
    assert [kernels.name for kernels in run.glob("kernels*")] == [FILE]


def test_a_run_that_lost_its_kernels_is_not_tuned_again(timed, tmp_path):
    run = tmp_path / "run"
    cw.fit(tasks.quick(), run, on=on(), stop_after="9st", **HOW)
    (run / FILE).unlink()
    with refused(RunError, "kernels-missing", run=str(run), digest=SOME.digest):
        cw.fit(tasks.quick(), run, on=on(), **HOW)
    assert cw.fit(tasks.quick(), run, on=on(), fresh=True, **HOW).devices["kernels"] == SOME.digest


@pytest.mark.slow
@pytest.mark.parametrize("planted", [None, OTHERS.text.encode(), b"", "missing"])
def test_an_audit_finds_a_file_of_other_kernels(timed, tmp_path, planted):
    run = tmp_path / "run"
    cw.fit(tasks.quick(), run, on=on(), **HOW)
    if planted == "missing":
        (run / FILE).unlink()
    elif planted is not None:
        (run / FILE).write_bytes(planted)
    verdict, statement = audit(run, tasks.quick(), on=On(devices=1))
    if planted is None:
        assert verdict.code == "audit-passed" and statement["same_bits"]
        assert not [line for line in statement["unaudited"] if "kernels" in line]
    else:
        assert verdict.code == "audit-other-kernels" and verdict.numbers["stated"] == SOME.digest
        assert not statement["passed"] and not statement["same_bits"]


def test_every_host_loads_the_bytes_of_the_first(monkeypatch, tmp_path):
    sent, taken = [], []
    monkeypatch.setattr(tune, "load", lambda kernels, device, path: taken.append(kernels))

    def host(first):
        def agree(what, value):
            sent.append(value)
            return sent[0]

        place = {"lead": types.SimpleNamespace(platform="gpu"), "shards": 1, "agree": agree}
        placement = types.SimpleNamespace(**place, hosts=types.SimpleNamespace(first=first))
        return types.SimpleNamespace(placement=placement)

    tune.take(file(tmp_path, SOME), host(first=True))
    assert tune.take(tmp_path / "not on this host", host(first=False)) == SOME
    assert taken == [SOME, SOME] and sent[1] is None and json.dumps(sent[0])


def test_the_steps_programs_are_timed_and_gradients_left_out(monkeypatch):
    from jax import export

    asked = []

    def run(command, variables, pace):
        folder = Path(command[-2])
        for one in sorted(folder.glob("*.bin")):
            asked.append(export.deserialize(bytearray(one.read_bytes())))
        (folder / FILE).write_text(f"version: 3\n{GRADIENT}{ENTRY}")
        return 0, ""

    monkeypatch.setattr(tune, "_run", run)
    with Session(tasks.quick(), On(devices=1)) as session:
        assert tune.timed(session.programs) == SOME
        assert len(asked) == 1 + len(session.programs.blueprint.programs)
        assert asked[0].platforms == ("cuda",) and asked[0].in_avals[0].shape == (256, 256)


@pytest.mark.slow
def test_an_xla_that_times_nothing_is_told():
    """The process that times, on a CPU."""
    with Session(tasks.quick(), On(devices=1)) as session, refused(DeviceError, "kernels-not-timed"):
        tune.timed(session.programs)
