"""Verdicts on numbers that other programs made: unpaired, paired by seed, of files and of lists."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

import chipwise as cw
from chipwise.study.referee.ruling import grain_of
from chipwise.study.referee.sequential import FEWEST, interval, runs_needed, unpaired
from chipwise.study.referee.tries import FILE
from refusals import refused

BASE = [3.279, 3.277, 3.278, 3.28, 3.2785]
LESS = [3.272, 3.274, 3.271, 3.273, 3.2725, 3.2735]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def table(name, **values):
    """A file with these columns of values."""
    heading = [*values]
    rows = zip(*values.values(), strict=True)
    with open(name, "w") as file:
        print(*heading, sep=",", file=file)
        for row in rows:
            print(*row, sep=",", file=file)
    return name


def test_two_files_are_judged_and_later_rows_continue_the_try():
    base, change = table("a.csv", val_loss=BASE), table("b.csv", val_loss=LESS[:5])
    first = cw.referee.rows(base, change)
    assert (first.verdict, first.metric, first.better) == ("better", "val_loss", "lower")
    assert first.low < first.difference < first.high < 0 and first.rows == (5, 5)
    table("b.csv", val_loss=LESS)
    again = cw.referee.rows(base, change)
    assert again.level == first.level and again.digests == first.digests and again.tries["tries"] == 1
    assert again.values[-1] == (None, 3.2735) and again.fact["spent"].numbers == {"base": 5, "change": 6}
    table("b.csv", val_loss=[3.2721, *LESS[1:]])  # another experiment under the same name
    other = cw.referee.rows(base, change)
    assert other.level < first.level and other.tries["tries"] == 2
    json.dumps(other.to_json())


def test_a_run_dropped_or_drawn_again_is_another_try():
    levels = []
    for values in (LESS, LESS[1:], LESS[:2] + LESS[:2], LESS[:3]):
        levels.append(cw.referee.rows(BASE, values, metric="loss").level)
    assert len(set(levels)) == 4


def test_pairs_of_a_seed_are_those_of_the_referee():
    seeds = [4, 0, 2, 7, 1, 3, 6, 5]
    before = {seed: round(0.5 + 0.05 * seed, 3) for seed in seeds}
    after = {seed: round(before[seed] + 0.02 + 0.001 * (seed % 3), 3) for seed in range(8)}
    base = table("a.csv", seed=before, accuracy=before.values())
    change = table("b.csv", seed=after, accuracy=after.values())
    found = cw.referee.rows(base, change, paired=True)
    assert (found.verdict, found.rows, found.values[0]) == ("better", None, (0.7, 0.721))
    differences = [b - a for a, b in found.values]
    grain = grain_of(differences, found.values)
    assert (found.low, found.high) == interval(differences, found.level, grain) and grain > 0
    apart = cw.referee.rows(base, change)
    assert apart.verdict == "open" and apart.needed > 100 and apart.fact.code == "referee-open"
    again = cw.referee.rows(before, after, metric="accuracy", paired=True)
    assert again.values == found.values and again.tries["tries"] == 2


def test_one_file_with_a_column_of_sides():
    optimizer = ["muon"] * 5 + ["soap"] * 6 + ["adam"]
    file = table("all.csv", optimizer=optimizer, loss=[*BASE, *LESS, 4], steps=range(12))
    found = cw.referee.rows(file, by="optimizer=muon,soap", metric="loss")
    assert (found.verdict, found.base, found.change, found.rows) == ("better", "muon", "soap", (5, 6))
    turned = cw.referee.rows(file, by="optimizer=soap,muon", metric="loss", better={"loss": "higher"})
    assert (turned.verdict, turned.better) == ("better", "higher")
    seeds = [0, 1, 2, 3, 4, 4, 3, 2, 1, 0]
    losses = [*BASE, *(value - 0.005 for value in reversed(BASE))]
    file = table("paired.csv", seed=seeds, optimizer=["a"] * 5 + ["b"] * 5, loss=losses)
    found = cw.referee.rows(file, by="optimizer=a,b", paired=True)
    assert found.rows is None and [round(b - a, 6) for a, b in found.values] == [-0.005] * 5


def test_rows_that_do_not_tell_what_they_take_ask_for_rows():
    found = cw.referee.rows([1.0, 2.0], [2.0, 1.0], metric="loss")
    assert (found.verdict, found.fact.code) == ("open", "referee-open-unknown-rows")
    found = cw.referee.rows([1.0, 2.0], [2.0, 1.0], metric="loss", paired=True)
    assert (found.verdict, found.fact.code) == ("open", "referee-open-unknown")


def test_a_margin_says_equal():
    base, change = (list(np.random.default_rng(seed).normal(1, 0.01, 40)) for seed in (0, 1))
    assert cw.referee.rows(base, change, metric="loss", margin="2%").verdict == "equal"
    assert cw.referee.rows(base, change, metric="loss").verdict == "open"


@pytest.mark.parametrize("paired", [True, False])
def test_values_that_are_all_alike_show_nothing(paired):
    """The step of the metric, by which they may differ, is not known."""
    both = cw.referee.rows([1.0] * 9, [1.0] * 9, metric="accuracy", margin=0.001, paired=paired)
    assert (both.verdict, both.low, both.high, both.needed) == ("open", None, None, None)
    other = cw.referee.rows([1.0] * 9, [0.999] * 9, metric="accuracy", margin=0.01, paired=paired)
    assert other.verdict == "equal" and other.low < other.difference < other.high


def bad(name, text):
    with open(name, "w") as file:
        file.write(text)
    return name


DATA, RECIPE = cw.errors.DataError, cw.errors.RecipeError
REFUSED = {
    "NaN": (DATA, "table-row", "loss\n3.1\nnan\n3\n", {}, {"line": 3, "given": "nan"}),
    "infinite": (DATA, "table-row", "loss\n3.1\n-inf\n", {}, {"line": 3, "given": "-inf"}),
    "text": (DATA, "table-row", "loss\n3.1\ndiverged\n", {}, {"line": 3, "given": "diverged"}),
    "other digits": (DATA, "table-row", "loss\n3.1\n٣.٢\n", {}, {"line": 3}),
    "empty cell": (DATA, "table-row", "loss,seed\n3.1,0\n,1\n", {}, {"line": 3, "given": ""}),
    "ragged": (DATA, "table-row", "loss,seed\n3.1,0\n3.2\n", {}, {"line": 3}),
    "one row": (DATA, "rows-few", "loss\n3.1\n", {}, {"name": "bad.csv", "rows": 1}),
    "no row": (DATA, "rows-few", "loss\n", {}, {"rows": 0}),
    "empty": (RECIPE, "rows-metrics", "", {}, {}),
    "two metrics": (RECIPE, "rows-metrics", "loss,acc\n1,2\n3,4\n", {}, {"columns": ["loss", "acc"]}),
    "another metric": (RECIPE, "rows-metric", "loss\n1\n2\n", {"metric": "los"}, {"near": "loss"}),
    "no direction": (RECIPE, "direction-unknown", "score\n1\n2\n", {}, {"metric": "score"}),
    "a seed twice": (DATA, "table-row", "seed,loss\n0,1\n1,2\n0,1\n", {}, {"line": 4, "given": "0"}),
    "a column twice": (DATA, "table-row", "loss,loss\n1,2\n1,3\n", {}, {"line": 1}),
    "no seeds": (DATA, "rows-no-seeds", "loss\n1\n2\n", {"paired": True}, {"name": "bad.csv"}),
    "no such column": (RECIPE, "rows-column", "loss\n1\n2\n", {"by": "net=a,b"}, {"name": "net"}),
    "no such side": (RECIPE, "rows-side", "net,loss\na,1\na,2\n", {"by": "net=a,b"}, {"name": "b"}),
    "one side twice": (RECIPE, "rows-by", "net,loss\na,1\na,2\n", {"by": "net=a,a"}, {}),
    "not UTF-8": (DATA, "table-no-text", "loss\n1\n\udcff\n", {}, {}),
    "margin": (RECIPE, "referee-margin", "loss\n1\n2\n", {"margin": "wide"}, {}),
    "error": (RECIPE, "referee-error", "loss\n1\n2\n", {"error": 1.0}, {"error": 1.0}),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_rows_are_refused(case, tmp_path):
    kind, code, text, options, facts = REFUSED[case]
    with open("bad.csv", "wb") as file:
        file.write(text.encode("utf-8", "surrogateescape"))
    with refused(kind, code, **facts):
        cw.referee.rows("bad.csv", None if "by" in options else "bad.csv", **options)
    assert not (tmp_path / "runs" / "referee" / FILE).exists()


def test_bad_numbers_and_sides_are_refused():
    with refused(RECIPE, "rows-number", row="1"):
        cw.referee.rows([1.0, math.nan], [1.0, 2.0], metric="loss")
    for large in (1e200, -1e39, np.float64(3.5e38)):
        for paired in (False, True):
            with refused(RECIPE, "rows-number", row="1"):
                numbers = [1.0, large, 1e38]
                cw.referee.rows(numbers, [1.0, 2.0, 3.0], metric="loss", paired=paired)
    with refused(RECIPE, "rows-one-side", base="a.csv"):
        cw.referee.rows("a.csv")
    with refused(DATA, "unreadable", path=Path("a.csv")):
        cw.referee.rows("a.csv", "b.csv")
    with refused(DATA, "rows-other-seeds", only_base=["2"], only_change=[]) as found:
        cw.referee.rows([1.0, 2.0, 3.0], [1.0, 2.0], metric="loss", paired=True)
    assert [dict(one.numbers) for one in found.value.facts["alone"]] == [{"side": "base", "seeds": ["2"]}]
    base = table("a.csv", seed=[0, 1], loss=[1, 2])
    with refused(DATA, "rows-other-seeds", only_base=["0"], only_change=["7"]) as found:
        cw.referee.rows(base, table("b.csv", seed=[7, 1], loss=[1, 2]), paired=True)
    assert [one["side"] for one in found.value.facts["alone"]] == ["a.csv", "b.csv"]
    with refused(RECIPE, "rows-metric", name="loss"):
        cw.referee.rows(base, table("c.csv", accuracy=[0.5, 0.6]))


@pytest.mark.parametrize("looks", [3, [1], ["a", ["b"]], [None, {}], {"a": 1, "b": 2}])
def test_strange_looks_in_a_book_continue_nothing(looks, tmp_path):
    cw.referee.rows(BASE, LESS, metric="loss")
    book = tmp_path / "runs" / "referee" / FILE
    row = json.loads(book.read_text())
    book.write_text(json.dumps({**row, "change": "other", "looks": looks}) + "\n")
    assert cw.referee.rows(BASE, LESS, metric="loss").tries["tries"] == 2


@pytest.mark.parametrize("wide", [0.2, 1, 5])
@pytest.mark.parametrize("ahead", [lambda n: n, lambda n: 20, lambda n: 3 * n])
@pytest.mark.parametrize("error", [0.05, 0.005])
def test_nulls_of_other_deviations_are_refuted_rarely(wide, ahead, error):
    """A reduced `benchmarks/records.py`."""
    rng, wrong = np.random.default_rng(int(wide * 10)), 0
    for _ in range(60):
        base, change = rng.normal(0, 1, 120), rng.normal(0, wide, 40)
        intervals = (unpaired(base[: ahead(n)], change[:n], error) for n in range(FEWEST, 41, 3))
        wrong += any(low > 0 or high < 0 for low, high in intervals)
    assert wrong <= math.ceil(error * 60)


def test_the_evidence_of_two_samples_expects_at_most_one():
    """Of any sizes and deviations, at one look: the share refuted is below the error by Markov, and here the
    mean of the evidence itself is taken, cut at 1,000, which only lowers it a little."""
    rng = np.random.default_rng(3)
    for n, m, wide in ((4, 30, 1.0), (4, 30, 5.0), (30, 4, 3.0), (6, 6, 1.0), (5, 12, 0.2)):
        a, b = rng.normal(0, 1, (4000, n)), rng.normal(0, wide, (4000, m))
        square = a.var(1, ddof=1) / n + b.var(1, ddof=1) / m
        t, f = (a.mean(1) - b.mean(1)) ** 2 / square, min(n, m) - 1
        g = 8 / (1 / n + 1 / m)
        evidence = ((1 + t / f) / (1 + t / f / (1 + g))) ** ((f + 1) / 2) / math.sqrt(1 + g)
        assert np.minimum(evidence, 1000).mean() < 1.25
        at = evidence.argmax()
        low, high = unpaired(a[at], b[at], 1 / evidence[at])
        assert min(abs(low), abs(high)) == pytest.approx(0, abs=1e-9)  # the edge is where it is 1 / error


def test_what_a_verdict_takes():
    base, change = [0.0, 1.0, 2.0, 1.0], [1.0, 2.0, 3.0, 2.0]
    needed = runs_needed(base, change, None, 0.05)
    assert 10 < needed < 60
    more = [np.tile(side, 20)[:needed] * math.sqrt(4 / 3) for side in (base, change)]
    low, high = unpaired(*more, 0.05)
    assert 0.9 < (high - low) / 2 < 1.1
    assert runs_needed([0.0, 1.0] * 40, change, None, 0.05) < needed
    assert runs_needed(base, [1.0], None, 0.05) is runs_needed(base, base, None, 0.05) is None
    assert unpaired(base, [1.0], 0.05) == (-math.inf, math.inf)
