"""A study's story: a row a point, each seed, the curves over each other."""

import html
import json
import re

import pytest

import chipwise as cw
import run_folders as runs
from chipwise.explain.report import report_page
from chipwise.explain.report.run_report import report
from pages import browse, framed, needs_browser


@pytest.fixture
def study(tmp_path):
    """Two points of three seeds; of the second one run diverged and one has not begun."""
    folder, points = tmp_path / "study", []
    for lr, shift in (("0.2", 0.0), ("0.4", 0.1)):
        own = []
        for seed in range(3):
            name = f"lr={lr}/seed-{seed}"
            told = {"seed": seed, "run": name, "done": False}
            rows = [row | {"eval/accuracy": 0.8 + shift + seed / 100} for row in runs.usual()]
            if lr == "0.2" or seed == 0:
                result = runs.finished(rows)
                runs.write(folder / name, rows, result, seed=seed)
                told |= {"done": True, "metrics": result["metrics"], "steps": 200, "seconds": 100.0}
                told |= {"fingerprint": "ab" * 32, "examples_per_second": 250.0}
            elif seed == 1:
                runs.write(folder / name, runs.usual(80), seed=seed)
                told["diverged"] = {"code": "loss-not-finite", "first": 81, "last": 90, "value": "nan"}
            own.append(told)
        points.append({"set": {"lr": lr}, "runs": own})
    made = {"schema": "chipwise.study/1", "recipe": "toy", "source": None,
            "settings": {"lr": ["0.2", "0.4"]}, "seeds": [0, 1, 2], "points": points}  # fmt: skip
    (folder / "study.json").write_text(json.dumps(made))
    return folder


def test_each_point_and_each_seed(study):
    document = report(study)
    json.dumps(document, allow_nan=False)
    assert document["kind"] == "study" and document["metric"] == "eval/accuracy"
    first, second = document["points"]
    assert first["values"] == pytest.approx({"0": 0.8, "1": 0.81, "2": 0.82})
    assert first["spread"]["mean"] == pytest.approx(0.81) and first["spread"]["low"] < 0.8
    assert first["batch"] == 50 and first["replicas"] == 5
    assert second["spread"]["n"] == 1 and second["spread"]["low"] is None
    assert second["difference"]["value"] == pytest.approx(0.1)
    assert [run["state"] for run in second["runs"]] == ["finished", "diverged", "not begun"]
    lines = document["curves"]["train/loss"]
    assert [(line["point"], line["seed"]) for line in lines] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)]
    assert len(lines[-1]["points"]) == 8


def test_its_page(study):
    made = report_page.render(report(study))
    for words in ("2 settings, 3 seeds each", "lr=0.2", "lr=0.4", "between steps 81 and 90", "not begun",
                  "250 examples/s", "batch 50, 5 replicas", "Spread over seeds", "one run each",
                  "<code>lr=0.4/seed-2</code>", 'data-label="95 % interval"'):  # fmt: skip
        assert words in made, words
    assert made.count('class="line s0 dash0') >= 3 * 2  # three seeds in both sizes


MEASURE = """
<script>
addEventListener("load", function () {
  var found = [];
  document.querySelectorAll("iframe").forEach(function (frame) {
    var boxes = [frame.contentDocument.documentElement, ...frame.contentDocument.querySelectorAll(".box")];
    found.push(boxes.map(function (box) { return box.scrollWidth - box.clientWidth; }));
  });
  document.body.textContent = "FOUND" + JSON.stringify(found) + "END";
});
</script>
"""


@needs_browser
def test_no_table_is_cut_off(study, tmp_path):
    document = report(study)
    document["points"][1]["diverged"]["1"] = "for the longest of reasons " * 9 + "between steps 81 and 90"
    made = report_page.render(document)
    frames = "".join(framed(made, width, 900) for width in (1280, 768, 390))
    seen = browse(tmp_path, f"<!DOCTYPE html><body>{frames}{MEASURE}", "--window-size=1300,900", "--dump-dom")
    found = json.loads(html.unescape(re.search("FOUND(.*)END", seen)[1]))
    assert found == [[0, 0, 0]] * 3


def test_before_any_run_is_done(study):
    file = study / "study.json"
    stored = json.loads(file.read_text())
    for point in stored["points"]:
        point["runs"] = [{"seed": run["seed"], "run": run["run"]} for run in point["runs"]]
    file.write_text(json.dumps(stored))
    document = report(study)
    assert document["metric"] is None and "No run is done yet" in report_page.render(document)


@pytest.mark.parametrize("text", ["{", '{"schema": "chipwise.study/9"}', "[]"])
def test_a_damaged_study(study, text):
    (study / "study.json").write_text(text)
    with pytest.raises(cw.errors.RunError, match=r"study\.json"):
        report(study)


def test_markup_in_a_study(study):
    file = study / "study.json"
    file.write_text(file.read_text().replace("between steps", "<img src=x>").replace('"toy"', '"<script>"'))
    made = report_page.render(report(study))
    assert "<img" not in made and "<script>:" not in made
