"""The book of tries holds the error over all of them, and is read with care."""

import json
import math

import numpy as np
import pytest

import chipwise as cw
from chipwise.study.referee.tries import FILE, Tries
from refusals import refused


def row(number, verdict, level=0.01, pairs=5):
    about = {"base": "a", "change": str(number), "metric": "eval/loss", "margin": None}
    return {**about, "verdict": verdict, "level": level, "pairs": pairs}


def key(number):
    return {name: row(number, "")[name] for name in ("base", "change", "metric", "margin")}


def again(tries):
    """The book as the next one reads it."""
    tries.close()
    return Tries(tries.folder, tries.error)


def test_one_process_at_a_time_has_the_book(tmp_path):
    tries = Tries(tmp_path, 0.05)
    with refused(cw.errors.RunError, "folder-in-use", path=str(tmp_path)):
        Tries(tmp_path, 0.05)
    again(tries).close()


def test_levels_fall_with_tries_and_rise_with_verdicts(tmp_path):
    tries = Tries(tmp_path, 0.05)
    first = tries.level(key(0))
    assert first == pytest.approx(0.05 * 6 / math.pi**2)
    tries.write(row(0, "open", first))
    assert tries.level(key(1)) == pytest.approx(first / 4)
    tries.write(row(1, "better", first / 4))
    tries = again(tries)
    assert tries.level(key(2)) == pytest.approx(2 * first / 9)
    tries.write(row(2, "same", None, 0))  # bits need no error
    tries = again(tries)
    assert tries.level(key(3)) == pytest.approx(2 * first / 9)
    tries.close()


def test_no_row_gives_more_than_the_first_try_has(tmp_path):
    (tmp_path / FILE).write_text(stored(level=0.99))
    tries = Tries(tmp_path, 0.05)
    assert tries.level(key(1)) == pytest.approx(0.05 * 6 / math.pi**2)
    tries.close()


def test_a_try_that_goes_on_keeps_its_level_and_its_row(tmp_path):
    tries = Tries(tmp_path, 0.05)
    for number in range(3):
        tries.write(row(number, "open", 0.01 * (number + 1)))
    assert tries.level(key(1)) == 0.02
    tries.write(row(1, "better", 0.02))
    tries = again(tries)
    assert [one["verdict"] for one in tries.rows] == ["open", "open", "better"]
    tries.close()
    assert tries.summary().numbers == {"tries": 3, "better": 1, "worse": 0, "equal": 0, "error": 0.05}


def stored(**changes):
    return json.dumps({**row(1, "better"), **changes}) + "\n"


LEVELS = [2.0, 1, 0, -0.1, math.nan, math.inf, "x", "0.01", True, None, [0.1], 10**400]
ODD = [*(stored(level=level) for level in LEVELS), *(stored(pairs=pairs) for pairs in (-1, 2.5, "3", True))]


@pytest.mark.parametrize("text", ["{", "[]\n", '{"verdict": 3}\n', "\xff", *ODD])
def test_a_damaged_book_is_told_and_kept(tmp_path, text):
    (tmp_path / FILE).write_bytes(text.encode("latin-1"))
    with refused(cw.errors.RunError, "tries-damaged", file=tmp_path / FILE):
        Tries(tmp_path, 0.05)
    assert (tmp_path / FILE).read_bytes() == text.encode("latin-1")


def test_few_of_the_verdicts_are_wrong():
    """A reduced `benchmarks/referee.py`: sequences of 45 nulls and 5 effects, by their e-values."""
    rng, shares = np.random.default_rng(0), []
    for _ in range(100):
        effect = rng.permutation(50) < 5
        tries, wrong = Tries.__new__(Tries), 0
        tries.rows, tries.error = [], 0.05
        for number, real in enumerate(effect):
            level = tries.level(key(number))
            reached = rng.uniform() < (0.9 if real else level)  # Ville's bound, reached
            wrong += reached and not real
            tries.rows.append(row(number, "better" if reached else "open", level))
        shares.append(wrong / max(1, sum(one["verdict"] == "better" for one in tries.rows)))
    assert np.mean(shares) <= 0.05
