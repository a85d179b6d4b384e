"""A run whose rows go to a service that sleeps, raises, dies or has no space: the run is as without it."""

import json
import os
import shutil
import time

import pytest

import chipwise as cw
import tasks
from chipwise.base.errors import RecipeError, RunError
from chipwise.run import tracking
from chipwise.run.folder.run_reader import read_rows, read_run
from chipwise.run.progress import Reporter
from refusals import refused

pytestmark = pytest.mark.as_users_compile

HOW = {"on": cw.On(devices=1), "log_every": "4st", "eval_every": "10st", "progress": "none"}
SERVICE = '''
"""Stands for the library of a service, in whatever process imports it."""
import errno, json, os, time
from types import SimpleNamespace as Settings

class Run:
    def __init__(self, id):
        self.id, self.summary = id or f"new-{os.getpid()}", {}
    def define_metric(self, *_, **__): pass
    def log(self, row):
        how = os.environ["SERVICE_IS"] if row["step"] > 4 else "well"
        if how == "asleep":
            time.sleep(1000)
        if how == "raising":
            raise RuntimeError("no such project")
        if how == "dying":
            os._exit(7)
        if how == "full":
            raise OSError(errno.ENOSPC, "No space left on device")
        self._write(row)
    def finish(self, exit_code):
        self._write({"end": exit_code, **self.summary})
    def _write(self, row):
        with open(os.environ["SERVICE_HAS"], "a") as file:
            file.write(json.dumps({"id": self.id, **row}) + "\\n")

def init(id, project, **_):
    return Run(id)
'''


@pytest.fixture
def service(tmp_path, monkeypatch):
    """`service()` is what a made-up service has got so far; `service(how)` is how it fares from now on."""
    folder, file = tmp_path / "library", tmp_path / "got"
    folder.mkdir()
    (folder / "wandb.py").write_text(SERVICE)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("PYTHONPATH", f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setenv("SERVICE_HAS", str(file))
    monkeypatch.setenv("SERVICE_IS", "well")

    def call(how=None):
        if how is not None:
            monkeypatch.setenv("SERVICE_IS", how)
        lines = file.read_text().splitlines() if file.exists() else []
        return [json.loads(line) for line in lines]

    return call


@pytest.fixture
def warned(monkeypatch):
    """The facts of which a run has warned, beside those about its recipe."""
    facts = []

    def warn(self, text):
        if text.code != "finding":
            facts.append(text)

    monkeypatch.setattr(Reporter, "warn", warn)
    return facts


@pytest.fixture(scope="module")
def recipe():
    return tasks.quick(task=tasks.quick_task(loss=tasks.plain_loss, augment=None))


@pytest.fixture(scope="module")
def untracked(recipe):
    return cw.fit(recipe, **HOW).fingerprint


def numbers(rows):
    """(step, name) of every number that must arrive, in order."""
    return sorted((row["step"], name) for row in rows for name in row if name.startswith(("train/", "eval/")))


def track(run):
    """`chipwise track` in a process of its own, which imports the made-up library."""
    process = tracking._started(run, "wandb:toy")
    process.stdin.close()
    return process.wait(60)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("raising", "exit code 5"),
        ("asleep", "exit code -9"),
        ("dying", "exit code 7"),
        ("full", "exit code 5"),
    ],
)
def test_a_service_that_fails_changes_nothing_and_gets_the_rest_later(
    how, reason, recipe, untracked, service, warned, tmp_path, monkeypatch
):
    service(how)
    monkeypatch.setattr(tracking, "END_SECONDS", 6.0)
    began, run = time.monotonic(), tmp_path / "run"
    result = cw.fit(recipe, run, track="wandb:toy", **HOW)
    assert result.fingerprint == untracked and result.complete and time.monotonic() - began < 60
    assert result.seconds["total"] < time.monotonic() - began
    (one,) = warned
    assert (one.code, one.numbers["to"], one.numbers["reason"]) == ("track-failed", "wandb:toy", reason)
    assert one.numbers["command"] == f"chipwise track {run} --to wandb:toy"
    service("well")
    assert track(run) == 0
    rows = [row for row in service() if "step" in row]
    assert numbers(rows) == numbers(read_rows(run)[0]) and {row["step"] for row in rows} > {4, 30}
    (end,) = [row for row in service() if "end" in row]
    assert (end["end"], end["how"], end["fingerprint"]) == (0, "finished", untracked)
    assert len({row["id"] for row in service()}) == 1
    assert track(run) == 0 and len(service()) == len(rows) + 1  # it knows all


@pytest.mark.slow
def test_a_resumed_run_goes_on_in_the_service_s_run_and_sends_no_step_twice(
    recipe, untracked, service, warned, tmp_path
):
    run = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        for event in cw.training(recipe, run, checkpoint_every="6st", track=["wandb:toy"], **HOW):
            if event.step == 12:
                raise KeyboardInterrupt
    newest = run / "checkpoints" / str(read_run(run).checkpoints[-1])
    shutil.rmtree(newest)  # as if killed before: the rows of steps 8 to 12 are made again
    assert numbers(read_rows(run)[0])[-1][0] == 12
    result = cw.fit(recipe, run, track=["wandb:toy"], **HOW)
    got = service()
    assert result.fingerprint == untracked and not warned
    assert numbers(row for row in got if "step" in row) == numbers(read_rows(run)[0])
    assert len({row["id"] for row in got}) == 1
    assert [row["how"] for row in got if "end" in row] == ["stopped", "finished"]
    cw.fit(recipe, run, fresh=True, track=["wandb:toy"], **HOW)
    assert len({row["id"] for row in service()}) == 2 and len(service()) == len(got) * 2 - 1


def test_a_process_that_cannot_start_is_told(recipe, untracked, service, warned, tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tracking.subprocess, "Popen", full)
    assert cw.fit(recipe, tmp_path / "run", track="wandb:toy", **HOW).fingerprint == untracked
    assert [one.code for one in warned] == ["track-failed"]


def test_a_host_without_the_folder_starts_nothing(service):
    with tracking.Tracking(["wandb:toy"], "run") as one:
        one.begin(None, Reporter("silent"))
        assert not one._started


@pytest.mark.parametrize(
    "to",
    ["wandb", "wandb:", "csv:a", "wandb:../a", "wandb:a\x1b[2J", "mlflow:a\n", "trackio:" + "a" * 101, 3],
)
def test_no_destination(to, recipe, tmp_path):
    about = {"track": to} if isinstance(to, str) else {"what": "track"}
    with refused(RecipeError, "track-destination" if isinstance(to, str) else "wrong-kind", **about):
        cw.fit(recipe, tmp_path / "run", track=[to], **HOW)
    assert not (tmp_path / "run").exists()


def test_nowhere_and_without_the_library(recipe, service, tmp_path, monkeypatch):
    with refused(RecipeError, "track-nowhere"):
        cw.fit(recipe, track=["wandb:toy"], **HOW)
    monkeypatch.setattr(tracking.importlib.util, "find_spec", lambda name: None)
    with refused(RecipeError, "tracker-missing", service="mlflow"):
        cw.fit(recipe, tmp_path / "run", track=["mlflow:toy"], **HOW)
    assert not (tmp_path / "run").exists()


def test_a_planted_link_is_not_followed(recipe, service, tmp_path):
    run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    run.mkdir()
    elsewhere.mkdir()
    (run / tracking.TRACKED).symlink_to(elsewhere)
    with refused(RunError, "file-not-plain"):
        cw.fit(recipe, run, track=["wandb:toy"], **HOW)
    assert not list(elsewhere.iterdir())
