"""The services' own libraries, without a network: what they keep of a run is read back with them.

`make test-slow` installs wandb and mlflow; Trackio 0.43 holds Pillow below the version of constraints.txt, so
its test runs where it is installed.
"""

import json
import struct
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

import run_folders
from chipwise.explain.track.sending import Sending
from chipwise.run.folder import media

pytestmark = pytest.mark.slow

PIXELS = np.arange(4 * 5 * 3, dtype=np.uint8).reshape(4, 5, 3)
ROWS = [
    {"step": 10, "epoch": 0.5, "train/loss": 2.0, "lr": 0.1},
    {"step": 20, "epoch": 1.0, "eval/loss": 1.5},
    {"step": 20, "epoch": 1.0, "train/loss": 1.0, "mine/a:b ü/../c": 3.0},
    {"step": 12, "epoch": 0.6, "mine/late": 7.0, "train/bad": None},
]


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run folder; the services keep what they get below `tmp_path`, and nothing goes out."""
    (tmp_path / "home").mkdir()
    monkeypatch.chdir(tmp_path / "home")
    for name, value in {
        "HOME": tmp_path / "home", "WANDB_MODE": "offline", "WANDB_ERROR_REPORTING": "false",
        "MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path}/mlflow.db", "MLFLOW_DISABLE_TELEMETRY": "true",
        "DO_NOT_TRACK": "true", "TRACKIO_DIR": tmp_path / "trackio",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, str(value))
    processes = [run_folders.started(), run_folders.ended(20, "stopped")]
    folder = run_folders.write(tmp_path / "runs" / "mine", processes=processes)
    shown = [media.row_of(10, "mine/says", "a <b>\n~~~~ c"), media.row_of(10, "mine/sees", PIXELS)]
    (folder / "media.jsonl").write_text("".join(json.dumps(row) + "\n" for row in shown))
    return folder


def sent_twice(run, to):
    """Sends a part of the run, and then the rest of it, each in a process of its own: the run's ids."""
    ids = []
    for rows, result in ((ROWS[:2], None), (ROWS, {"metrics": {"eval/loss": 1.5}, "fingerprint": "f00d"})):
        (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        if result is not None:
            (run / "result.json").write_text(json.dumps(result))
        command = [sys.executable, "-m", "chipwise", "track", str(run), "--to", to]
        done = subprocess.run(command, capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stderr
        sending = Sending(run, to)
        sending.close()
        ids.append(sending.sent.id)
    return ids


def test_mlflow_has_every_number_once_and_the_end(run):
    pytest.importorskip("mlflow")
    one, other = sent_twice(run, "mlflow:my experiment")
    read = """
import json, mlflow
client = mlflow.MlflowClient()
(one,) = client.search_runs([client.get_experiment_by_name("my experiment").experiment_id])
info, data = one.info, one.data
history = {k: client.get_metric_history(info.run_id, k) for k in data.metrics}
history = {k: [(m.step, m.value) for m in some] for k, some in history.items()}
text = mlflow.artifacts.load_text(info.artifact_uri + "/texts/mine/says/10.txt")
kept = [a.path for a in client.list_artifacts(info.run_id, "images")]
files = [client.download_artifacts(info.run_id, path) for path in kept if path.endswith(".png")]
print(json.dumps([info.run_id, info.status, info.run_name, history, data.tags, data.params, text, files]))
"""
    id, status, title, history, tags, params, text, files = answer(read)
    assert text == "a <b>\n~~~~ c" and len(files) == 1
    np.testing.assert_array_equal(np.asarray(Image.open(files[0]).convert("RGB")), PIXELS)
    assert id == one == other and (status, title) == ("FINISHED", "runs-mine")
    assert history["train/loss"] == [[10, 2.0], [20, 1.0]] and history["eval/loss"] == [[20, 1.5]]
    assert history["mine/late"] == [[12, 7.0]] and history["mine/c"] == [[20, 3.0]]
    assert history["epoch"] == [[10, 0.5], [20, 1.0]] and "train/bad" not in history
    assert (tags["how"], tags["fingerprint"]) == ("finished", "f00d")
    assert params["optimizer.momentum"] == "0.9" and params["batch"] == "50"


def test_mlflow_gets_no_row_again_whose_answer_was_lost(run):
    """The service took the last row, and the process ended before it knew that."""
    pytest.importorskip("mlflow")
    sent_twice(run, "mlflow:lost")
    file = run / "tracked" / "mlflow%3Alost" / "sent.json"
    stored = json.loads(file.read_text())
    stored["steps"] = dict.fromkeys(stored["steps"], 10)
    file.write_text(json.dumps(stored))
    command = [sys.executable, "-m", "chipwise", "track", str(run), "--to", "mlflow:lost"]
    assert subprocess.run(command, timeout=200).returncode == 0
    read = """
import json, mlflow
client = mlflow.MlflowClient()
(one,) = client.search_runs([client.get_experiment_by_name("lost").experiment_id])
steps = lambda k: [m.step for m in client.get_metric_history(one.info.run_id, k)]
print(json.dumps({k: steps(k) for k in one.data.metrics}))
"""
    history = answer(read)
    assert history["train/loss"] == [10, 20] and history["eval/loss"] == [20]


def test_trackio_has_every_number_once_and_the_end(run):
    pytest.importorskip("trackio")
    one, other = sent_twice(run, "trackio:mine")
    read = """
import json
from trackio.sqlite_storage import SQLiteStorage as storage
(name,) = storage.get_runs("mine")
print(json.dumps([name, storage.get_logs("mine", name), storage.get_run_config("mine", name)]))
"""
    name, logs, config = answer(read)
    assert name == one == other and config["optimizer.momentum"] == 0.9
    found = [(row["step"], key, row[key]) for row in logs for key in row]
    assert sorted(one for one in found if one[1] in ("train/loss", "mine/late")) == [
        (10, "train/loss", 2.0), (12, "mine/late", 7.0), (20, "train/loss", 1.0),
    ]  # fmt: skip
    assert {"finished", "stopped"} == {row["final/how"] for row in logs if "final/how" in row}
    (says,), (sees,) = ([row[key] for row in logs if key in row] for key in ("mine/says", "mine/sees"))
    assert "a <b>\n~~~~ c" in says["_value"] and sees["_type"] == "trackio.image"


def test_wandb_has_every_number_once_and_the_end(run, tmp_path):
    pytest.importorskip("wandb")
    one, other = sent_twice(run, "wandb:mine")
    assert one == other
    found, summary, shown = [], {}, {}
    for file in sorted((tmp_path / "home").glob("wandb/offline-run-*/*.wandb")):
        for record in records(file.read_bytes()):
            values = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
            media_of = ("mine/says/", "mine/sees/")  # of whose values the paths are those of files
            shown |= {
                n[:9]: json.loads(v) for n, v in values.items() if n in [f"{one}path" for one in media_of]
            }
            numbers = [n for n in values if "/" in n and not n.startswith(media_of)]
            found += [(int(values["step"]), name, float(values[name])) for name in numbers]
            summary |= {item.key: item.value_json for item in record.summary.update}
            if record.HasField("run"):
                of = record.run
                assert (of.run_id, of.project, of.display_name) == (one, "mine", "runs-mine")
    wanted = [(step, key, v) for step, key, v in sorted(found) if key in ("train/loss", "mine/late")]
    assert wanted == [(10, "train/loss", 2.0), (12, "mine/late", 7.0), (20, "train/loss", 1.0)]
    assert summary["fingerprint"] == '"f00d"' and summary["how"] == '"finished"'
    files = {n: next((tmp_path / "home").glob(f"wandb/*/files/{path}")) for n, path in shown.items()}
    assert "<pre>a &lt;b&gt;\n~~~~ c</pre>" in files["mine/says"].read_text()
    np.testing.assert_array_equal(np.asarray(Image.open(files["mine/sees"]).convert("RGB")), PIXELS)


def answer(program):
    """What a program prints as JSON in a process of its own, since the libraries start threads."""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def records(content):
    """The records of W&B's file: those of LevelDB's log, after a header of seven bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    at, parts = 7, b""
    while at + 7 <= len(content):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        length, kind = struct.unpack_from("<4xHB", content, at)
        parts += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield Record.FromString(parts)
            parts = b""
