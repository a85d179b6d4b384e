"""`report STUDY`: the comparison of its points, also of a study with one point."""

import json

import pytest

from chipwise.base.errors import RecipeError
from chipwise.cli import main
from explain.comparisons import compared, headline, record, study
from refusals import refused


def test_a_study_of_several_points_is_compared(tmp_path, capsys):
    made = study(tmp_path / "study")
    assert main(["report", str(made), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["schema"] == "chipwise.comparison/7"
    assert [row["label"] for row in found["rows"]] == ["lr=0.1", "lr=0.2"]
    assert main(["report", str(made), "--html", str(tmp_path / "page.html")]) == 0
    assert (tmp_path / "page.html").exists()


def test_one_point_of_several_seeds_says_its_spread(tmp_path, capsys):
    made = study(tmp_path / "study", rates=("0.1",))
    found = compared(made)
    assert headline(found) == ["final"] and found["rows"][0]["metric"]["n"] == 3
    assert main(["report", str(made)]) == 0
    assert "3 runs" in capsys.readouterr().out
    with refused(RecipeError, "compare-alone", labels=["a"]):
        compared(record(tmp_path / "a.json"))


@pytest.mark.parametrize("text", ["{", "[]"])
def test_a_damaged_study(tmp_path, capsys, text):
    made = study(tmp_path / "study")
    (made / "study.json").write_text(text)
    assert main(["report", str(made)]) == 5 and "study.json" in capsys.readouterr().err
