"""`chipwise compare` at the command line."""

import json

import pytest

from explain.comparisons import plan, record, run


def test_who_is_faster_comes_first_and_what_was_measured_next(chipwise, tmp_path):
    a, b = record(tmp_path / "a.json", 1000), record(tmp_path / "b.json", 3000, seed=1)
    said = chipwise(
        "compare", a, b, plan(tmp_path / "plan.json"), "published", "--html", tmp_path / "page.html"
    )
    assert said.code == 0, said.err
    lines = said.out.splitlines()
    assert "as fast as a" in lines[0] and lines[1].startswith("Measured: a and b. Predicted: v5e-8, t4")
    at = [said.out.index(title) for title in ("What differs", "The same computation?", "Speed", "Money")]
    assert at == sorted(at)
    assert (tmp_path / "page.html").read_text().startswith("<!DOCTYPE html>")


def test_json_is_one_object(chipwise, tmp_path):
    a, b = record(tmp_path / "a.json"), run(tmp_path / "run")
    said = chipwise("compare", f"mine={a}", b, "--baseline", "run", "--target", "0.95", "--json")
    found = json.loads(said.out)
    assert found["schema"] == "chipwise.comparison/1" and found["baseline"] == "run"
    assert [row["label"] for row in found["rows"]] == ["mine", "run"] and found["target"]["value"] == 0.95


def test_markup_in_names_is_text(chipwise, tmp_path):
    record(tmp_path / "[red]a[/red].json"), record(tmp_path / "b.json")
    said = chipwise("compare", f"[bold]x={tmp_path / '[red]a[/red].json'}", tmp_path / "b.json")
    assert said.code == 0 and "[bold]x" in said.out


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["a.json", "absent.json"], 3, "does not exist"),
        (["a.json"], 2, "alone"),
        (["a.json", "other.json"], 2, "say nothing about each other"),
        (["a.json", "b.json", "--target", "0.9"], 2, "no row has eval/accuracy"),
        (["a.json", "b.json", "--baseline", "c"], 2, "no such row"),
        (["a.json", "folder"], 5, "holds no run"),
        (["a.json", "published:abacus"], 2, "matches 'abacus': published lists all 2, published:t4 fewer."),
        (["other.json", "published"], 2, "Nobody published figures of digits"),
        (["a.json", "b.json", "--prices", "absent.csv"], 3, "no such file of prices"),
    ],
)
def test_errors_are_one_line(chipwise, tmp_path, monkeypatch, arguments, code, words):
    monkeypatch.chdir(tmp_path)
    record(tmp_path / "a.json"), record(tmp_path / "b.json"), record(tmp_path / "other.json", name="digits")
    (tmp_path / "folder").mkdir()
    said = chipwise("compare", *arguments)
    assert said.code == code and words in said.err and said.err.count("\n") == 1 and not said.out
