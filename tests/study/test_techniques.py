"""A recipe without each of its techniques: which of them are worth anything."""

from pathlib import Path

import pytest

import chipwise as cw
from chipwise.base import Fact
from chipwise.recipes.load import switches
from chipwise.study.referee import techniques
from chipwise.study.referee.ruling import Ruling
from chipwise.study.referee.techniques import drop, summary
from refusals import refused

SIX = f"{Path(__file__).parents[2]}/examples/techniques.py:recipe"
NAMES = ["scaled", "hidden", "momentum", "schedule", "redrawn", "stabilised"]
BOOK = Fact("tries-so-far")


def test_switches_are_parameters_that_are_true():
    assert switches(SIX) == NAMES
    assert switches(SIX, ["hidden=false", "lr=3"]) == [name for name in NAMES if name != "hidden"]
    assert switches("digits") == []


@pytest.fixture
def judged(monkeypatch):
    """What `referee` was asked, which answers at once."""
    asked = []

    def answer(recipe, *, set, spend, **options):
        asked.append((set[0], options["set_base"], round(spend)))
        verdict = {"scaled": "worse", "hidden": "better", "momentum": "open", "schedule": "equal"}
        kind = verdict.get(set[0].partition("=")[0], "same")
        return Ruling(kind, recipe, set[0], tries=BOOK)

    monkeypatch.setattr(techniques, "referee", answer)
    return asked


def test_each_is_dropped_alone_and_the_cost_is_said_first(judged):
    said = []
    found = drop(SIX, spend=600, set_base=["redrawn=false"], say=said.append)
    assert [setting for setting, _, _ in judged] == [f"{n}=false" for n in NAMES if n != "redrawn"]
    assert {tuple(shared) for _, shared, _ in judged} == {("redrawn=false",)}
    assert [spend for _, _, spend in judged] == [120, 150, 200, 300, 600]  # what is left, shared
    assert said[0].numbers == {"techniques": 5, "runs": 24, "pairs": 4, "seconds": 600}
    groups = {
        "carry": ["scaled"],
        "idle": ["schedule", "stabilised"],
        "harm": ["hidden"],
        "open": ["momentum"],
    }
    assert summary(found).numbers == groups


@pytest.mark.parametrize(("spend", "asked"), [(0, 1), (100, 3)])
def test_what_has_not_begun_in_time_is_open_without_a_run(judged, monkeypatch, spend, asked):
    now = iter([0, 0, 50, 99, 100, 101, 102])
    monkeypatch.setattr(techniques.time, "monotonic", lambda: next(now))
    found = drop(SIX, spend=spend)
    assert [setting for setting, _, _ in judged] == [f"{name}=false" for name in NAMES[:asked]]
    rest = [one for setting, one in found.items() if setting not in {one for one, _, _ in judged}]
    assert [(one.verdict, one.fact.code) for one in rest] == [("open", "referee-open-untried")] * (6 - asked)
    assert {*NAMES[asked:]} <= {*summary(found)["open"]} and all(one.tries == BOOK for one in rest)


def test_settings_that_drop_are_given_where_there_are_no_switches(judged):
    found = drop("digits", set=["ema=none", "bn_momentum=0.5"])
    assert [*found] == [setting for setting, _, _ in judged] == ["ema=none", "bn_momentum=0.5"]
    with refused(cw.errors.RecipeError, "referee-no-techniques", recipe="digits"):
        drop("digits")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_worthless_of_six_are_named(tmp_path):
    on = cw.On(devices=1)
    found = drop(SIX, metric="eval/loss", margin="20%", spend=400, run=tmp_path / "book", on=on)
    assert summary(found).numbers == {
        "carry": ["scaled", "hidden", "momentum", "schedule"],
        "idle": ["redrawn", "stabilised"],
        "harm": [],
        "open": [],
    }
    assert found["stabilised=false"].verdict == "same" and found["redrawn=false"].verdict == "equal"
    levels = [one.level for one in found.values() if one.level]
    assert len(levels) == 5  # one verdict more before each: e-LOND
    assert sum(level / at for at, level in enumerate(levels, 1)) <= 0.05 and levels[0] > levels[4]
    sides = {path.name for path in (tmp_path / "book").iterdir() if path.is_dir()}
    assert len(sides) == 6  # the base once, and five that differ from it
