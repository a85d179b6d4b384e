import json

import pytest

import chipwise as cw
from chipwise.base.facts import fact


@pytest.mark.slow
def test_a_table_and_the_line_that_trains(chipwise, mine):
    said = chipwise("find-lr", f"{mine}:recipe", "--steps", 12, "--set", "batch=16", "--devices", 1)
    assert said.code == 0 and "step 12/12" in said.err
    assert str(fact("lr-own-peak", peak=0.1)) in said.out and "last stable" in said.out
    typed, _, rate = said.out.splitlines()[-1].rpartition("=")
    assert typed == f"Next: chipwise train {mine}:recipe --set batch=16 --set lr"
    assert str(fact("lr-suggested", settings=f"lr={rate}")) in said.out
    old, found = (cw.load(f"{mine}:recipe", ["batch=16", *more]) for more in ([], [f"lr={rate}"]))
    assert found.optimizer.lr == old.optimizer.lr.with_peak(float(rate))


@pytest.mark.slow
def test_the_line_to_type_has_what_was_given(chipwise, mine):
    said = chipwise(
        "find-lr", f"{mine}:recipe", "--steps", 10, "--devices", 1, "--set", "classes=5", "--synthetic"
    )
    last = said.out.splitlines()[-1]
    assert last.startswith(f"Next: chipwise train {mine}:recipe --set classes=5 --set lr=")
    assert last.endswith(" --synthetic")


def test_json_is_alone_on_standard_output(chipwise, mine):
    said = chipwise("find-lr", f"{mine}:finished", "--steps", 10, "--devices", 1, "--json")
    told = json.loads(said.out)
    assert said.code == 0 and said.err == "" and told["suggestion"] > 0
    assert told["recipe"]["optimizer"] == cw.load(f"{mine}:finished").optimizer.describe()


@pytest.mark.parametrize(
    "arguments, error",
    [
        (("--low", "1", "--high", "0.1"), "rates-out-of-order"),
        (("--steps", "3"), "range-test-steps"),
    ],
)
def test_mistakes_are_one_line_and_leave_nothing(chipwise, mine, tmp_path, monkeypatch, arguments, error):
    monkeypatch.chdir(tmp_path)
    assert chipwise("find-lr", f"{mine}:recipe", *arguments).refused(2, error)
    assert not list(tmp_path.iterdir())
