"""The share of the plan in a report: by the record beside the run, of the same recipe and devices alone."""

import json

import pytest

import run_folders as runs
from chipwise.explain.report.report_parts import _figures
from chipwise.explain.report.run_report import report
from chipwise.machine.record import Record, Series

DEVICES = {"platform": "gpu", "kind": "H100", "count": 1, "batch": 50, "replicas": 5, "exact": True}
OF_RUN = {**DEVICES, "parameters": 7}
PLANNED = {"target": "h100", "step_seconds": {"value": 0.1, "low": 0.08, "high": 0.12}, "bound": "memory"}


def told(tmp_path, **changes):
    """What the report of a run of 250 examples/s at batch 50 says, beside such a record."""
    rows = runs.usual()
    run = runs.write(tmp_path / "run", rows, runs.finished(rows, devices=OF_RUN), [200])
    recipe = json.loads((run / "recipe.json").read_text())
    measured = {
        "devices": DEVICES,
        "recipe": {**recipe, "duration": "1st", "seed": 9, **changes.pop("recipe", {})},
        "precision": recipe.get("precision"),
        "planned": PLANNED,
        "parameters": 7,
        **changes,
    }
    name = measured.pop("name", recipe["name"])
    Record.now("train", name, measured, {"steps_per_second": Series("steps/s", (1.0,))}).write(
        run / "bench.json"
    )
    return run, report(run)["of_plan"]


def test_the_share_is_of_the_run_s_own_speed(tmp_path):
    run, share = told(tmp_path)
    assert (share["code"], share["target"], share["share"]) == ("share-slow", "h100", 0.5)
    assert dict(_figures(report(run)))["of the plan"] == share["text"]
    (run / "bench.json").unlink()
    assert report(run)["of_plan"] is None


@pytest.mark.parametrize(
    "changes, changed",
    [
        ({"devices": {**DEVICES, "kind": "H200"}}, ["kind", "H200", "H100"]),
        ({"devices": {**DEVICES, "batch": 64}}, ["batch", 64, 50]),
        ({"precision": "f8"}, ["precision", "f8", "f32"]),
        ({"name": "another"}, ["name", "another", "toy"]),
        ({"parameters": 8}, ["parameters", 8, 7]),
        ({"devices": {**DEVICES, "shards": 2}}, ["shards", 2, None]),
        ({"devices": {**DEVICES, "hosts": 2}}, ["hosts", 2, None]),
        ({"recipe": {"microbatch": 3}}, ["microbatch", 3, None]),
    ],
)
def test_a_record_of_another_run_says_what_differs(tmp_path, changes, changed):
    _, share = told(tmp_path, **changes)
    assert share["code"] == "share-of-other-bench" and share["changed"] == [changed]


@pytest.mark.parametrize(
    "planned, why",
    [
        (None, ""),
        ({"problem": {"code": "share-of-a-cpu", "text": "a CPU"}}, "a CPU"),
        ({**PLANNED, "step_seconds": {"value": "1"}}, ""),
        ({**PLANNED, "target": None}, ""),
    ],
)
def test_a_record_without_a_plan_says_so(tmp_path, planned, why):
    share = told(tmp_path, planned=planned)[1]
    assert (share["code"], share["why"]) == ("share-not-in-bench", why)


def test_a_damaged_record_is_told(tmp_path):
    run, _ = told(tmp_path)
    (run / "bench.json").write_text("{")
    assert report(run)["of_plan"]["code"] == "record-not-json"
