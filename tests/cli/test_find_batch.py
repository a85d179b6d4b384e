import json

import pytest

from chipwise.study import trial
from chipwise.words.facts import fact
from compilers import no_gpu_compiler as no_gpu_compiler


@pytest.mark.slow
def test_a_table_what_it_changes_and_the_line_to_type(chipwise, mine, monkeypatch):
    monkeypatch.setattr(trial, "ROUNDS", 2)
    said = chipwise("find-batch", f"{mine}:recipe", "--devices", 1, "--at-most", 48, "--set", "rate=0.3")
    assert said.code == 0 and str(fact("trying-batch", batch=48, number=2)) in said.err
    assert str(fact("bound-asked", limit=48)) in said.out
    assert str(fact("batch-tried", batch=48)) in said.out and str(fact("largest-is-not-best")) in said.out
    assert "examples/s at batch 48 (" in said.out and "examples/s of 24 (" in said.out
    assert said.out.splitlines()[-3].startswith(
        f"Next: chipwise train {mine}:recipe --set rate=0.3 --set batch=48"
    )
    assert "lr " in said.out and "Goyal" in said.out


def test_absent_chips_as_json(chipwise, mine):
    said = chipwise("find-batch", f"{mine}:recipe", "--on", "t4,v100", "--at-most", 24, "--json")
    told = json.loads(said.out)
    assert said.code == 0 and said.err == "" and told["schema"] == "chipwise.find_batch/1"
    assert [(s["target"], s["batch"], s["transfer"]) for s in told["searches"]] == [
        ("t4", 24, None),
        ("v100", 24, None),
    ]


def test_targets_of_one_batch_share_the_move(chipwise, mine):
    said = chipwise("find-batch", f"{mine}:recipe", "--on", "t4,v100", "--at-most", 48)
    assert said.code == 0 and str(fact("planning-batch", target="v100", batch=48)) in said.err
    assert said.out.count("\nlr ") == 1
    assert str(fact("at-batch", batch=48, targets=["t4", "v100"])) in said.out
    assert said.out.count("Next: ") == 1
    assert said.out.count("Predicted: ") == 4 and said.out.count("at batch 24 (") == 2
    lines = said.out.splitlines()
    assert len([x for x in lines if x.startswith("warning: ")]) == len(
        {x for x in lines if x.startswith("warning: ")}
    )


def test_mistakes_are_one_line(chipwise, mine):
    said = chipwise("find-batch", f"{mine}:recipe", "--on", "t4", "--devices", "1")
    assert said.refused(4, "absent-and-here")
    for code, arguments in ((2, ("--at-most", "2")), (4, ("--on", "t4,t5")), (2, ("--set", "btach=3"))):
        said = chipwise("find-batch", f"{mine}:recipe", *arguments)
        assert said.code == code and said.err.count("\n") == 1 and said.out == "", arguments
