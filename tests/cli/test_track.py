"""`chipwise track` answers in one line or object, and refuses in one line."""

import json

import pytest

import run_folders
from chipwise.explain.track import sending
from chipwise.explain.track.services import Tracker
from chipwise.run import tracking


def begin(name, title, settings, id):
    """Of a service that takes rows up to step 10."""
    print("Welcome to the service!")

    def row(step, values):
        if step > 10:
            raise RuntimeError("quota\nexceeded at https://me:SECRET@host/a?key=SECRET")

    return Tracker(id or "abc", row, row, row, lambda failed, summary: None)


@pytest.fixture
def service(monkeypatch):
    monkeypatch.setattr(sending, "BEGIN", dict.fromkeys(tracking.SERVICES, begin))
    monkeypatch.setattr(tracking.importlib.util, "find_spec", lambda name: True)


def test_rows_are_sent_once(chipwise, service, tmp_path):
    run = run_folders.write(tmp_path / "run", rows=[run_folders.row(10, train_loss=2.0)])
    said = chipwise("track", run, "--to", "mlflow:toy", "--json")
    assert said.code == 0
    told = {"run": str(run), "to": "mlflow:toy", "id": "abc", "rows": 1, "how": "killed"}
    assert json.loads(said.out) == {"schema": "chipwise.track/1", **told}
    assert chipwise("track", run, "--to", "mlflow:toy").out.startswith("0 rows")


def test_refused(chipwise, service, tmp_path):
    assert chipwise("track", tmp_path, "--to", "wandb:toy").refused(5, "not-a-run")
    run = run_folders.write(tmp_path / "run", rows=[run_folders.row(20, train_loss=2.0)])
    assert chipwise("track", run, "--to", "csv").refused(2, "track-destination", track="csv")
    said = chipwise("track", run, "--to", "wandb:toy")
    assert said.code == 5 and said.error.code == "tracker-raised"
    assert said.error.facts["reason"] == "RuntimeError: quota exceeded at https://host/a"


def test_the_log_of_a_process_that_follows_has_no_password_and_an_end(tmp_path, monkeypatch):
    monkeypatch.setattr(sending.TrackerLog, "MOST", 1000)
    with open(tmp_path / "log.txt", "a") as file:
        log = sending.TrackerLog(file)
        for number in range(100):
            print(f"{number}: https://me:SECRET@host/path refuses", file=log)
    text = (tmp_path / "log.txt").read_text()
    assert "99: https://host/path refuses\n" in text and "SECRET" not in text and len(text) < 1100


def test_a_command_names_trackers_before_anything_is_made(chipwise, tmp_path):
    for command in ("train", "sweep"):
        said = chipwise(command, "digits", "--run", tmp_path / command, "--track", "wandb:", "--quiet")
        assert said.code == 2 and said.error.code == "track-destination"
