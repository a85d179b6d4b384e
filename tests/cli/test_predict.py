import csv
import io
import json

import fsspec
import numpy as np
import pytest
from PIL import Image

import tasks
from chipwise.base.facts import fact
from chipwise.cli import main

pytestmark = pytest.mark.as_users_compile


@pytest.mark.slow
def test_predictions_agree_with_evaluation_on_any_devices(chipwise, digits, tmp_path):
    accuracy = json.loads((digits / "result.json").read_text())["metrics"]["eval/accuracy"]
    files = []
    for number, options in enumerate((["--devices", 1], ["--simulate", 8])):
        files.append(tmp_path / f"{number}.csv")
        said = chipwise("predict", digits, "--out", files[-1], "--json", "--quiet", *options)
        assert said.code == 0, said.err
        shown = json.loads(said.out)
        assert (shown["examples"], shown["steps"], shown["run"]) == (360, 30, str(digits))
        assert shown["accuracy"] == pytest.approx(accuracy, abs=1e-6)
    assert files[0].read_bytes() == files[1].read_bytes()
    rows = list(csv.DictReader(files[0].read_text().splitlines()))
    right = np.mean([row["prediction"] == row["label"] for row in rows])
    assert len(rows) == 360 and right == pytest.approx(accuracy, abs=1e-6)


@pytest.mark.slow
def test_a_report_shows_a_gallery_of_predictions(chipwise, digits, tmp_path):
    accuracy = json.loads((digits / "result.json").read_text())["metrics"]["eval/accuracy"]
    said = chipwise("report", digits, "--predictions", "--html", tmp_path / "report.html", "--json")
    assert said.code == 0, said.err
    found = json.loads(said.out)["predictions"]
    assert (found["steps"], found["examples"]) == (30, 360)
    assert found["accuracy"] == pytest.approx(accuracy, abs=1e-6)
    worst = [tile["probability"] for tile in found["worst"]]
    assert worst == sorted(worst) and worst[-1] < found["best"][-1]["probability"]
    assert (tmp_path / "report.html").read_text(encoding="utf-8").count("<img") >= 16
    assert json.loads(chipwise("report", digits, "--json").out)["predictions"] is None
    said = chipwise("report", digits, "--best")
    said.refused(2, "gallery-option-unused")


def test_a_study_has_no_predictions_of_its_own(chipwise, tmp_path):
    (tmp_path / "study.json").write_text("{}")
    for option in ("--predictions", "--best"):
        chipwise("report", tmp_path, option).refused(2, "gallery-of-study")


@pytest.mark.slow
def test_the_best_checkpoint_predicts_and_is_exported(chipwise, tmp_path):
    run, one = tmp_path / "run", ["--devices", 1, "--quiet"]
    options = ["--set", "duration=8st", "--set", "lr=3", "--eval-every", "2st", "--keep-best", "eval/loss"]
    said = chipwise("train", "digits", "--run", run, *one, *options)
    assert said.code == 0, said.err
    kept = json.loads((run / "result.json").read_text())["best"]
    assert kept["step"] < 8
    said = chipwise("predict", run, "--best", "--out", tmp_path / "p.csv", "--json", *one)
    assert json.loads(said.out)["steps"] == kept["step"]
    said = chipwise("export", run, "--best", "--to", "safetensors", "--out", tmp_path / "best.safetensors")
    assert said.code == 0, said.err
    assert (tmp_path / "best.safetensors").exists()


def test_a_folder_of_images_needs_no_labels(chipwise, digits, tmp_path):
    photos = tmp_path / "photos"
    photos.mkdir()
    for number in range(3):
        Image.fromarray(np.full((20, 24), 5 * number, np.uint8)).save(photos / f"{number}.png")
    out = tmp_path / "labels.jsonl"
    said = chipwise("predict", digits, "--data", photos, "--out", out, "--top", 3, "--devices", 1)
    assert said.code == 0, said.err
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["name"] for row in rows] == ["0.png", "1.png", "2.png"]
    assert {"prediction", "class", "probability", "class_3"} <= rows[0].keys() and "label" not in rows[0]
    assert str(fact("written", path=out)) in said.out


@pytest.mark.slow
def test_a_file_that_a_run_names_is_not_executed_unasked(chipwise, mine, tmp_path):
    run = tmp_path / "run"
    options = ["--devices", "1", "--eval-every", "end", "--quiet"]
    assert main(["train", f"{mine}:recipe", "--run", str(run), "--set", "rate=0.2", *options]) == 0
    said = chipwise("predict", run, "--out", tmp_path / "p.csv")
    assert said.refused(5, "run-recipe-in-file", recipe=f"{mine}:recipe")
    said = chipwise("predict", run, "--recipe", f"{mine}:recipe", "--out", tmp_path / "p.csv", "--devices", 1)
    assert said.refused(2, "task-without-predict")


OWN = """
import numpy as np
import chipwise as cw
import tasks
from chipwise.data.remote import local


def recipe(data=None):
    columns = dict(np.load(local(data))) if data else tasks.data(7).columns
    task = tasks.task(loss=tasks.plain_loss, augment=None, eval=cw.Arrays(**columns),
                      predict=lambda params, state, batch: tasks.plain_logits(params, batch))
    return cw.Recipe(task=task, batch=24, duration="1st", optimizer=cw.sgd(lr=0.1))
"""


@pytest.mark.slow
def test_the_data_of_a_run_is_found_with_a_recipe_file_too(chipwise, tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    np.savez(tmp_path / "data.npz", **tasks.data(53, 1).columns)
    named = ["--data", str(tmp_path / "data.npz"), "--run", str(tmp_path / "run"), "--devices", "1"]
    assert main(["train", f"{tmp_path / 'own.py'}:recipe", *named, "--quiet"]) == 0
    options = ["--recipe", f"{tmp_path / 'own.py'}:recipe", "--out", tmp_path / "p.csv", "--devices", 1]
    said = chipwise("predict", tmp_path / "run", *options, "--json", "--quiet")
    assert json.loads(said.out)["examples"] == 53, said.err


@pytest.mark.slow
def test_a_url_that_only_a_run_names_is_not_fetched(chipwise, tmp_path, monkeypatch):
    monkeypatch.setenv("CHIPWISE_CACHE", str(tmp_path / "mine"))
    (tmp_path / "own.py").write_text(OWN)
    np.savez(file := io.BytesIO(), **tasks.data(53, 1).columns)
    url, own, run = "memory://place/data.npz", f"{tmp_path / 'own.py'}:recipe", tmp_path / "run"
    fsspec.filesystem("memory").pipe("/place/data.npz", file.getvalue())
    quiet = ["--run", str(run), "--devices", "1", "--eval-every", "end", "--quiet"]
    assert main(["train", own, "--data", url, *quiet]) == 0
    options = [run, "--recipe", own, "--devices", 1, "--json"]
    assert chipwise("eval", *options).code == 0  # fetched here before, by its owner
    monkeypatch.setenv("CHIPWISE_CACHE", str(tmp_path / "other"))
    for command in (["eval"], ["predict", "--out", tmp_path / "p.csv"]):
        said = chipwise(command[0], *options, *command[1:])
        said.refused(3, "run-data-at-url", run=str(run), url=url)
    assert not (tmp_path / "other").exists()
    assert chipwise("eval", *options, "--data", url).code == 0


@pytest.mark.slow
def test_bad_input_is_one_line(chipwise, digits, tmp_path):
    out = tmp_path / "p.csv"
    assert chipwise("predict", tmp_path, "--out", out).refused(5, "not-a-run")
    assert chipwise("predict", digits, "--data", tmp_path / "no", "--out", out).refused(3, "data-absent")
    (tmp_path / "empty").mkdir()
    assert chipwise("predict", digits, "--data", tmp_path / "empty", "--out", out).refused(3, "no-images")
    assert chipwise("predict", digits, "--out", tmp_path / "p.xls").refused(3, "predictions-format")
    assert not out.exists()
