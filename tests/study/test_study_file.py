"""`study.json`: read as it was written, and a damaged one says what to do."""

import json

import pytest

import chipwise as cw
from chipwise.study import study_file
from chipwise.study.study_file import Run
from refusals import refused
from studies import study


def test_a_study_is_read_as_it_was_written(tmp_path):
    made = study(("0.1", [1.0, None]), ("0.2", [2.0, 3.0]), folder=tmp_path)
    for point in made.points:
        for seed, run in point.runs.items():
            point.runs[seed] = Run(**{**run.__dict__, "run": f"lr={point.settings['lr']}/seed-{seed}"})
    made.write()
    assert study_file.read(tmp_path) == made
    stored = json.loads((tmp_path / "study.json").read_text())
    assert (stored["schema"], stored["settings"], stored["seeds"]) == (
        "chipwise.study/1",
        {"lr": ["0.1", "0.2"]},
        [0, 1],
    )
    assert stored["points"][1]["runs"][1]["run"] == "lr=0.2/seed-1"


def test_a_study_of_a_later_chipwise_with_more_fields_is_read(tmp_path):
    made = study(("0.1", [1.0]), folder=tmp_path)
    stored = made.to_json()
    stored["points"][0]["runs"][0]["colour"] = "red"
    (tmp_path / "study.json").write_text(json.dumps(stored))
    assert study_file.read(tmp_path).points[0].runs[0].metrics == {"eval/accuracy": 1.0}


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda text: text[:40], "study-damaged"),
        (lambda text: "[]", "study-damaged"),
        (lambda text: text.replace('"points"', '"point"'), "study-damaged"),
        (lambda text: text.replace('"seed": 0', '"seed": "../../x"'), "study-damaged"),
        (lambda text: text.replace("100.0", '"x"'), "study-damaged"),
        (lambda text: text.replace("100.0", "1" + "0" * 400), "study-damaged"),
        (lambda text: text.replace('"recipe": "r"', '"recipe": 1'), "study-damaged"),
        (lambda text: text.replace("study/1", "study/2"), "study-schema"),
    ],
)
def test_a_damaged_study_says_what_to_do(tmp_path, change, code):
    study(("0.1", [1.0]), folder=tmp_path).write()
    file = tmp_path / "study.json"
    file.write_text(change(file.read_text()))
    with refused(cw.errors.RunError, code, file=file):
        study_file.read(tmp_path)


def test_a_folder_without_a_study_is_none(tmp_path):
    assert study_file.read(tmp_path) is None
    assert study_file.read(tmp_path / "not there") is None
