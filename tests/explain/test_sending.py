"""Rows sent by `chipwise track`, to a service made of lists."""

import json

import numpy as np
import pytest

import run_folders
from chipwise.base.errors import RecipeError, RunError
from chipwise.explain.track import sending
from chipwise.explain.track.sending import Sending
from chipwise.explain.track.services import BEGIN, Tracker
from chipwise.run import tracking
from chipwise.run.folder import media
from refusals import refused

ROWS = [
    run_folders.row(10, train_loss=2.0),
    run_folders.row(10, eval_loss=None),
    run_folders.row(20, train_loss=1.0),
]


@pytest.fixture
def got(monkeypatch):
    """What the service got: (call, ...)."""
    calls = []

    def begin(name, title, settings, id):
        calls.append(("begin", name, title, id, dict(settings)))
        return Tracker(id or f"id-{len(calls)}", row, text, picture, end)

    def row(step, values):
        calls.append(("row", step, dict(values)))

    def text(step, name, text):
        calls.append(("text", step, name, text))

    def picture(step, name, pixels):
        calls.append(("picture", step, name, pixels.tolist()))

    def end(failed, summary):
        calls.append(("end", failed, dict(summary)))

    monkeypatch.setattr(sending, "BEGIN", dict.fromkeys(BEGIN, begin))
    monkeypatch.setattr(tracking.importlib.util, "find_spec", lambda name: True)
    return calls


def send(run, to="wandb:toy", **how):
    one = Sending(run, to)
    try:
        one.end(**how)
    finally:
        one.close()
    return one


def test_every_service_that_a_run_can_name_is_there():
    assert tuple(BEGIN) == tracking.SERVICES


def test_what_is_sent_to_two_services(got, tmp_path):
    start = run_folders.started(devices={"count": 8})
    run = run_folders.write(tmp_path / "lr=1" / "seed-0", rows=ROWS, processes=[start])
    first = send(run)
    (_, name, title, id, settings), one, two, end = got
    assert (name, title, id) == ("toy", "lr=1-seed-0", None)
    assert settings["optimizer.momentum"] == 0.9 and settings["devices.count"] == 8
    assert settings["optimizer.lr"].startswith("one_cycle(")
    assert one == ("row", 10, {"epoch": 0.5, "train/loss": 2.0})
    assert two == ("row", 20, {"epoch": 1.0, "train/loss": 1.0})
    assert end == ("end", False, {"how": "running"}) and first.rows == 2
    got.clear()
    assert send(run).rows == 0 and not got
    assert send(run, "mlflow:other").rows == 2 and got[0][1] == "other"


def test_no_secret_of_an_address_is_sent(got, tmp_path):
    """Those of a run's origin, in texts and lists. What is no address stays."""
    secret = "https://u:pw@host/pack?sig=ABC"
    source = {"recipe": "toy", "set": [f"text={secret}"], "data": secret, "eval_data": secret, "from": secret}
    run = run_folders.write(
        tmp_path / "run", rows=ROWS, source=source, classes=["why?", "a"], readings=[{"text": secret}]
    )
    send(run)
    settings = got[0][4]
    assert settings["source.data"] == settings["source.from"] == "https://host/pack"
    assert settings["source.set"] == ["text=https://host/pack"] and settings["classes"] == ["why?", "a"]
    assert not any(secret in str(settings) for secret in ("u:pw", "ABC"))


@pytest.mark.parametrize(
    ("processes", "over", "how", "failed"),
    [
        ([run_folders.started()], True, "killed", True),
        ([run_folders.started(), run_folders.ended(20)], False, "stopped", False),
        ([run_folders.started(), run_folders.ended(20, "diverged")], True, "diverged", True),
        ([run_folders.started(), run_folders.ended(20, "failed")], True, "failed", True),
    ],
)
def test_how_a_run_ended(processes, over, how, failed, got, tmp_path):
    run = run_folders.write(tmp_path / "run", rows=ROWS, processes=processes)
    send(run, over=over)
    assert got[-1] == ("end", failed, {"how": how})


def test_rows_that_come_later_and_the_result(got, tmp_path):
    run = run_folders.write(tmp_path / "run", rows=ROWS)
    id = send(run).sent.id
    got.clear()
    rows = [*ROWS, run_folders.row(15, **{"mine/bleu": 0.5}), run_folders.row(20, eval_loss=3.0)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 30, "tr')
    (run / "result.json").write_text(json.dumps(run_folders.finished(ROWS)))
    assert send(run).sent.id == id
    assert got[1:3] == [("row", 15, {"mine/bleu": 0.5}), ("row", 20, {"eval/loss": 3.0})]
    assert got[0][3] == id and got[3] == (
        "end", False, {"how": "finished", "train/loss": 1.0, "fingerprint": "ab" * 32}
    )  # fmt: skip


def test_a_run_without_rows_begins_nothing(got, tmp_path):
    assert send(run_folders.write(tmp_path / "run")).sent.id is None and not got


def test_folders_that_cannot_be_sent(got, tmp_path):
    with refused(RunError, "not-a-run"):
        Sending(tmp_path, "wandb:toy")
    run = run_folders.write(tmp_path / "run", rows=ROWS)
    with refused(RecipeError, "track-destination"):
        Sending(run, "wandb:../toy")
    held = Sending(run, "wandb:toy")
    with refused(RunError, "folder-in-use"):
        Sending(run, "wandb:toy")
    Sending(run, "wandb:toy-2").close()
    held.close()
    file = run / "tracked" / "wandb%3Atoy" / "sent.json"
    for content in ("[]", '{"id": 3}', "{", "[" * 100_000):
        file.write_text(content)
        with refused(RunError, "sent-damaged", path=str(file)):
            Sending(run, "wandb:toy")
    file.unlink()
    file.symlink_to(tmp_path / "elsewhere")
    with refused(RunError, "file-not-plain"):
        Sending(run, "wandb:toy")
    assert not got and not (tmp_path / "elsewhere").exists()


def test_hostile_texts_are_sent_as_texts(got, tmp_path):
    rows = [
        run_folders.row(1, **{run_folders.HOSTILE: 1.0}),
        {"step": 2, "a/b": "text", "a/c": [1], "a/d": True},
    ]
    send(run_folders.write(tmp_path / "run", rows=rows, name=run_folders.HOSTILE))
    assert got[1][2][run_folders.HOSTILE] == 1.0 and got[-1][0] == "end" and len(got) == 3


def test_texts_and_pictures_are_sent_once(got, tmp_path):
    pixels = np.arange(12, dtype=np.uint8).reshape(2, 2, 3)
    sound = [
        media.row_of(10, "mine/a", "one"),
        media.row_of(10, "mine/a", pixels),
        media.row_of(20, "mine/a", "two"),
    ]
    damaged = [
        {"step": 1, "name": "x/y", "png": "!"}, {"step": 1, "name": "x/y", "png": "aGk="},
        {"step": 1, "name": 1}, {"step": 1, "name": "x/y"}, {"step": 1, "name": "x/y", "text": 1},
        {"name": "x/y", "text": "a"}, [],
    ]  # fmt: skip
    run = run_folders.write(tmp_path / "run", rows=ROWS, processes=[run_folders.started()])
    file = run / "media.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in [*damaged, *sound[:2]]) + '{"step": 3, "na')
    assert send(run).rows == 4
    assert [one for one in got if one[0] in ("text", "picture")] == [
        ("text", 10, "mine/a", "one"), ("picture", 10, "mine/a", pixels.tolist()),
    ]  # fmt: skip
    got.clear()
    file.write_text("".join(json.dumps(row) + "\n" for row in sound))
    assert send(run).rows == 1 and got[1] == ("text", 20, "mine/a", "two")
    assert send(run).rows == 0
