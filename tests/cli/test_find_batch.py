import json

import pytest

from chipwise.study import trial
from chipwise.words.facts import fact


@pytest.mark.slow
def test_a_table_what_it_changes_and_the_line_to_type(chipwise, mine, monkeypatch):
    monkeypatch.setattr(trial, "ROUNDS", 2)
    said = chipwise(
        "bench", f"{mine}:recipe", "--largest-batch", "--devices", 1, "--at-most", 48, "--set", "rate=0.3"
    )
    assert said.code == 0 and str(fact("trying-batch", batch=48, number=2)) in said.err
    assert str(fact("bound-asked", limit=48)) in said.out
    assert str(fact("batch-tried", batch=48)) in said.out and str(fact("largest-is-not-best")) in said.out
    assert "examples/s at batch 48 (" in said.out and "examples/s of 24 (" in said.out
    assert said.out.splitlines()[-3].startswith(
        f"Next: chipwise train {mine}:recipe --set rate=0.3 --set batch=48"
    )
    assert "lr " in said.out and "Goyal" in said.out


def test_one_json_object(chipwise, mine, monkeypatch):
    monkeypatch.setattr("chipwise.study.largest_batch.try_batch", lambda recipe, on: trial.Trial(1000.0))
    said = chipwise("bench", f"{mine}:recipe", "--largest-batch", "--devices", 1, "--at-most", 48, "--json")
    told = json.loads(said.out)
    assert said.code == 0 and said.err == "" and told["schema"] == "chipwise.find_batch/2"
    assert told["batch"] == 48 and told["transfer"]["recipe"]["batch"] == 48
    said = chipwise("bench", f"{mine}:recipe", "--largest-batch", "--devices", 1, "--at-most", 48)
    assert str(fact("at-batch", batch=48)) in said.out and "Next: " in said.out


def test_mistakes_are_one_line(chipwise, mine):
    for code, arguments in ((2, ("--at-most", "2")), (2, ("--set", "btach=3"))):
        said = chipwise("bench", f"{mine}:recipe", "--largest-batch", *arguments)
        assert said.code == code and said.err.count("\n") == 1 and said.out == "", arguments
