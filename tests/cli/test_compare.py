"""`chipwise compare` at the command line."""

import json
from pathlib import Path

import chipwise as cw
from chipwise.base.facts import fact
from chipwise.explain.compare.comparison import SCHEMA
from explain.comparisons import record, run


def test_the_result_comes_first_and_what_differs_last(chipwise, tmp_path):
    a, b = run(tmp_path / "a"), run(tmp_path / "b", (0.9, 0.98), seed=1, precision="bf16")
    said = chipwise("compare", a, b, "--html", tmp_path / "page.html")
    assert said.code == 0, said.err
    lines = said.out.splitlines()
    assert "eval/accuracy is 0.98 for b" in lines[0] and "as fast as a" in lines[1]
    titles = ("Result", "Wall time", "What differs", "Where the")
    at = [said.out.index(f"\n{title}") for title in titles]
    assert at == sorted(at)
    assert (tmp_path / "page.html").read_text().startswith("<!DOCTYPE html>")


def test_json_is_one_object(chipwise, tmp_path):
    a, b = record(tmp_path / "a.json"), run(tmp_path / "run")
    said = chipwise("compare", f"mine={a}", b, "--baseline", "run", "--target", "0.95", "--json")
    found = json.loads(said.out)
    assert found["schema"] == SCHEMA and found["baseline"] == "run"
    assert [row["label"] for row in found["rows"]] == ["mine", "run"] and found["target"]["value"] == 0.95


def test_what_is_compared_can_be_named(chipwise, tmp_path):
    a, b = run(tmp_path / "a"), run(tmp_path / "b", seed=1)
    named = json.loads(chipwise("compare", a, b, "--metric", "train/loss", "--json").out)
    assert named["metric"] == "train/loss" == cw.compare(a, b, metric="train/loss")["metric"]
    assert chipwise("compare", a, b, "--metric", "los").refused(2, "study-no-metric", metric="los")


def test_which_way_a_metric_is_better_can_be_typed(chipwise, tmp_path):
    for name, value in (("a", 1.0), ("b", 0.9)):
        row = {"step": 100, "eval/odd": value, "examples_per_second": 1e3}
        run(tmp_path / name, rows=json.dumps(row) + "\n")
    sides = [tmp_path / name for name in "ab"]
    said = chipwise("compare", *sides)
    assert said.code == 0 and "--lower eval/odd" in " ".join(said.out.split())
    for way in ("lower", "higher"):
        found = json.loads(chipwise("compare", *sides, f"--{way}", "eval/odd", "--json").out)
        assert found["better"] == way


def test_markup_in_names_is_text(chipwise, tmp_path):
    record(tmp_path / "[red]a[/red].json"), record(tmp_path / "b.json")
    said = chipwise("compare", f"[bold]x={tmp_path / '[red]a[/red].json'}", tmp_path / "b.json")
    assert said.code == 0 and "[bold]x" in said.out


def test_errors_are_one_line(chipwise, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    record(tmp_path / "a.json"), record(tmp_path / "b.json")
    (tmp_path / "folder").mkdir()
    two = ["a.json", "b.json"]
    unseen = {"metric": "eval/accuracy", "value": 0.9, "seen": []}
    for arguments, exit_code, refusal in (
        (["a.json", "absent.json"], 3, fact("source-missing", path=Path("absent.json"))),
        (["a.json"], 2, fact("compare-alone", labels=["a"])),
        ([*two, "--target", "0.9"], 2, fact("target-not-measured", **unseen)),
        ([*two, "--baseline", "c"], 2, fact("baseline-unknown", label="c", near=None, rows=["a", "b"])),
        (["a.json", "folder"], 5, fact("folder-holds-nothing", folder=Path("folder"))),
    ):
        said = chipwise("compare", *arguments)
        assert said.refused(exit_code, refusal.code, **refusal.numbers)
