"""`chipwise referee`: the verdict, its exit code and its JSON."""

import json

import pytest


@pytest.mark.slow
def test_the_same_to_the_bit_is_told_at_once(chipwise, mine, tmp_path):
    run = ["--run", tmp_path / "referee", "--devices", 1]
    said = chipwise("referee", f"{mine}:recipe", f"{mine}:recipe", *run)
    assert said.code == 10 and said.out.startswith("the same to the bit")
    said = chipwise("referee", f"{mine}:recipe", "--set", "rate=0.10", *run, "--json")
    found = json.loads(said.out)
    assert said.code == 10 and (found["schema"], found["verdict"]) == ("chipwise.referee/1", "same")
    assert found["tries"]["tries"] == 1


@pytest.mark.slow
def test_a_verdict_has_its_exit_code(chipwise, mine, tmp_path):
    words = ["--set", "lr=0.1001", "--set-base", "duration=2st", "--margin", "50%", "--run", tmp_path]
    said = chipwise("referee", f"{mine}:recipe", *words, "--devices", 1, "--json")
    found = json.loads(said.out)
    assert (said.code, found["verdict"]) == (13, "equal") and found["pairs"] >= 4
    said = chipwise(
        "referee", f"{mine}:recipe", "--set", "lr=0.2", *words[2:4], "--run", tmp_path, "--spend", "1s"
    )
    assert said.code in (14, 15, 0) and "tries" in said.out


def test_what_cannot_be_asked(chipwise, mine, tmp_path):
    name = f"{mine}:recipe"
    assert chipwise("referee", name).refused(2, "referee-no-change")
    assert chipwise("referee", name, name, "--here").refused(2, "referee-here")
    assert chipwise("referee", name, name, "--spend", "long").refused(2, "referee-spend")
    assert chipwise("referee", name, "--rows", "--set", "lr=1").refused(
        2, "referee-rows-alone", given=["--set"]
    )
    here = ("--devices", 4, "--host", 0, "--spend", "1s", "--no-cache")
    given = ["--spend", "--devices", "--host", "--no-cache"]
    said = chipwise("referee", "--rows", "a.csv", "b.csv", *here)
    assert said.refused(2, "referee-rows-alone") and {*said.error.facts["given"]} == {*given}
    for more, given in ((["--paired"], ["--paired"]), (["--by", "net=a,b"], ["--by"])):
        assert chipwise("referee", "a.csv", "b.csv", *more).refused(2, "referee-rows-missing", given=given)


def test_what_cannot_be_dropped(chipwise, mine):
    name = f"{mine}:recipe"
    assert chipwise("referee", name, name, "--drop").refused(2, "referee-drop-alone", given=["CHANGE"])
    assert chipwise("referee", name, "--drop").refused(2, "referee-no-techniques", recipe=name)
    assert chipwise("referee", name, "--drop", "--rows").refused(2, "referee-rows-alone", given=["--drop"])


@pytest.mark.slow
def test_a_setting_that_is_dropped_has_its_verdict(chipwise, mine, tmp_path):
    words = ["--drop", "--set", "ema=none", "--set-base", "duration=2st", "--run", tmp_path, "--devices", 1]
    said = chipwise("referee", f"{mine}:recipe", *words, "--json")
    found = json.loads(said.out)
    assert said.code == 0 and found["said"]["idle"] == ["ema"]
    assert found["techniques"]["ema=none"]["verdict"] == "same"
    said = chipwise("referee", f"{mine}:recipe", *words)
    assert said.code == 0 and "do nothing: ema" in said.out and "1 technique" in said.err


def test_rows_of_another_program_have_the_same_answers(chipwise, tmp_path):
    base, change = tmp_path / "a.csv", tmp_path / "b.csv"
    base.write_text("seed,val_loss\n" + "".join(f"{i},{3.28 + i % 3 / 1000}\n" for i in range(9)))
    change.write_text("seed,val_loss\n" + "".join(f"{i},{3.27 + i % 2 / 1000}\n" for i in range(9)))
    run = ["--run", tmp_path / "referee"]
    for options, rows in (([], [9, 9]), (["--paired"], None)):
        said = chipwise("referee", "--rows", base, change, *run, *options, "--json")
        found = json.loads(said.out)
        assert (said.code, found["verdict"], found["better"]) == (0, "better", "lower")
        assert found["rows"] == rows and found["pairs"] == 9 and found["said"]["code"] == "referee-better"
    said = chipwise("referee", "--rows", change, base, *run)
    assert said.code == 14 and "9 and 9 runs" in said.out and "2 of 3 tries" in said.out
    assert chipwise("referee", "--rows", base, base, *run).code == 15
    base.write_text("val_loss\n3.28\nnan\n")
    assert chipwise("referee", "--rows", base, change, *run).refused(3, "table-row", line=3, given="nan")
