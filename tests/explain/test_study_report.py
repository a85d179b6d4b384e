import json

import pytest
from rich.console import Console

import chipwise as cw
from chipwise.explain import study_report as table
from chipwise.words.facts import fact
from refusals import refused
from studies import study


def shown(made, metric=None):
    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    with console.file:
        points = [row.to_json() for row in table.rows(made, metric)]
        console.print(table.render(points, metric or table.main_metric(made)))
    return console.export_text()


def test_a_row_has_the_spread_and_the_difference_by_pairs():
    rows = table.rows(study(("0.1", [1.0, 2.0, 3.0]), ("0.2", [1.5, 2.5, 3.5]), ("0.4", [9.0, 0.0, 2.0])))
    first, second, third = rows
    assert (first.name, first.spread.n, first.spread.mean, first.spread.deviation) == ("lr=0.1", 3, 2.0, 1.0)
    # Student's t of 2 degrees of freedom at 97.5 %: 4.3027; times 1 / sqrt(3)
    assert (first.spread.low, first.spread.high) == pytest.approx((2 - 2.48414, 2 + 2.48414), rel=1e-5)
    assert first.difference is None
    # Apart the two overlap widely; every pair differs by the same.
    assert (second.difference.value, second.difference.verdict) == (0.5, "higher")
    assert third.difference.verdict == "difference-not-shown"
    assert first.examples_per_second == 101.0


def test_pairs_are_those_of_seeds_that_both_finished():
    rows = table.rows(study(("0.1", [1.0, None, 3.0]), ("0.2", [0.0, 5.0, 1.9]), ("0.4", [None, 7.0, None])))
    assert rows[1].difference.value == pytest.approx(-1.05)
    assert rows[2].difference is None
    assert rows[0].values == {0: 1.0, 2: 3.0}
    assert list(rows[0].diverged) == [1]
    text = shown(study(("0.1", [1.0, None, 3.0]), ("0.2", [None, None, None])))
    assert "0: 1, 1: diverged, 2: 3" in text
    assert "no seed in common" in text


def test_of_one_seed_no_interval_is_made_up():
    made = study(("0.1", [1.0]), ("0.2", [2.0]))
    row = table.rows(made)[1]
    assert (row.spread.low, row.spread.deviation, row.difference.verdict) == (None, None, "one-run-each")
    assert [note.code for note in table.notes(made)] == ["few-seeds"]
    assert json.loads(json.dumps(row.to_json()))["difference"]["value"] == 1.0


def test_a_share_stays_between_0_and_1():
    (row,) = table.rows(study(("0.1", [1.0, 0.4, 1.0])))
    assert 0 <= row.spread.low < 0.8 < row.spread.high == 1
    assert table.rows(study(("0.1", [1.0, 0.4, 1.0]), metric="eval/loss"))[0].spread.high > 1


def test_two_pairs_that_differ_alike_are_no_higher():
    row = table.rows(study(("0.1", [0.9, 0.7]), ("0.2", [1.0, 0.8])))[1]
    assert (row.difference.low, row.difference.verdict) == (None, "two-alike")
    assert str(fact("two-alike")) in shown(study(("0.1", [0.9, 0.7]), ("0.2", [1.0, 0.8]))).replace("\n", " ")


def test_the_notes_warn_of_few_seeds_of_many_comparisons_and_name_the_diverged():
    assert table.notes(study(("0.1", [1.0, 2.0, 3.0]))) == []
    assert [note.code for note in table.notes(study(("0.1", [1.0, 2.0])))] == ["few-seeds"]
    [many] = table.notes(study(*((str(i), [1.0, 2.0, 2.0 + i]) for i in range(4))))
    assert (many.code, many["n"]) == ("many-comparisons", 3) and many["chance"] == pytest.approx(
        0.1426, abs=1e-4
    )
    [diverged] = table.notes(study(("9", [None, 1.0, 1.0, 1.0])))
    assert (diverged.code, diverged["point"], diverged["seed"]) == ("seed-diverged", "lr=9", 0)
    assert diverged["when"] == str(fact("diverged-between", first=3, last=4))


def test_the_main_metric_is_the_first_there_is_and_another_can_be_named():
    made = study(("0.1", [1.0, 2.0]), metric="train/loss")
    assert table.main_metric(made) == "train/loss"
    assert "mean train/loss" in shown(made)
    with refused(cw.errors.RecipeError, "study-no-metric", metric="eval/f1", metrics=["train/loss"]):
        table.rows(made, "eval/f1")
    assert table.rows(study(("0.1", [None])))[0].spread is None  # nothing to choose from yet
    assert table.rows(study(("0.1", [None])), "eval/f1")[0].values == {}


def test_settings_are_printed_as_they_are():
    assert "lr=[red]x[/red]" in shown(study(("[red]x[/red]", [1.0])))


def test_what_a_study_says_cannot_move_the_cursor():
    assert "\x1b" not in shown(study(("\x1b[31mred", [0.5, 0.6])))


def test_few_seeds_are_said_though_another_point_has_none():
    made = study(("0.1", [0.5, 0.6]), ("9", [None, None]))
    assert "few-seeds" in [note.code for note in table.notes(made)]


def test_a_huge_metric_is_left_out():
    assert table.rows(study(("0.1", [10**400, 0.5])), "eval/accuracy")[0].values == {1: 0.5}
