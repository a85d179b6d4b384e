"""Figures in words."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chipwise.base.figures import (
    byte_size,
    counted,
    digits,
    dollars,
    duration,
    few,
    figure,
    interval,
    known,
    listed,
    one_line,
    or_unknown,
    pair,
    price,
    printable,
    share,
    short,
    sparkline,
    spread,
)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (0.01234, "0.0123"),
        (4.564, "4.56"),
        (-45.64, "-45.6"),
        (999.7, "1,000"),
        (1234.5, "1,234"),
        (1e-9, "0.000000"),
        (math.nan, "unknown"),
        (math.inf, "unknown"),
    ],
)
def test_digits(value, text):
    assert digits(value) == text


@given(st.floats(1e-4, 1e15))
def test_three_digits_are_the_value_to_half_a_percent_and_no_exponent(value):
    assert "e" not in digits(value)
    assert float(digits(value).replace(",", "")) == pytest.approx(value, rel=5.1e-3)


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 bytes"),
        (999, "999 bytes"),
        (1000, "1.00 kB"),
        (2_804_000_000, "2.80 GB"),
        (410e6, "410 MB"),
        (3e12, "3.00 TB"),
    ],
)
def test_sizes(nbytes, text):
    assert byte_size(nbytes) == text


@pytest.mark.parametrize(
    "seconds, text",
    [(0.5, "0.5 s"), (59.94, "59.9 s"), (60, "1.0 min"), (3600, "1.0 h"), (172_800, "2.0 d")],
)
def test_durations(seconds, text):
    assert duration(seconds) == text


def test_dollars():
    assert [dollars(x) for x in (0, 0.0012, 0.01, 1234.5)] == ["$0.00", "$0.0012", "$0.01", "$1,234.50"]


def test_counts_and_lists():
    assert [counted(n, "step") for n in (0, 1, 1437)] == ["0 steps", "1 step", "1,437 steps"]
    assert [listed(list("abc"[:n])) for n in range(4)] == ["none", "a", "a and b", "a, b and c"]


@pytest.mark.parametrize(
    ("values", "low", "drawn"),
    [
        ([], None, ""),
        ([1.0], None, "▄"),
        ([1.0], 0.0, "█"),
        ([8.0, 4.0, 0.0], 0.0, "█▅▁"),
        ([3, 2, 1], None, "█▅▁"),
    ],
)
def test_sparklines(values, low, drawn):
    assert sparkline(values, low) == drawn


def test_what_is_printed_stays_on_its_line():
    assert printable("a\x1b[31m\nb\u2028c é") == "a\\x1b[31m\\nb\\u2028c é"


def test_the_first_few_and_how_many_more():
    assert few(["a", "b\n"]) == "a, b\\n" and few("abcde") == "a, b, c and 2 more"


def test_what_is_known():
    assert [known(x) for x in (0, 1.5, True, None, "1", math.nan, math.inf, 10**400)] == [True] * 2 + [
        False
    ] * 6
    assert [or_unknown(digits)(x) for x in (1.5, None, math.nan)] == ["1.50", "unknown", "unknown"]


@pytest.mark.parametrize(
    ("form", "texts"),
    [
        (figure, {0: "0", 0.96942: "0.9694", 38_790.4: "38,790", 1.2e-5: "1.2e-05", 1e12: "1e+12"}),
        (short, {0.1 + 0.2: "0.3", 350: "350", 3000: "3,000", 12_000: "12k", 1.5e6: "1.5M", 2e9: "2G"}),
        (share, {0: "0 %", 5e-4: "< 0.1 %", 0.034: "3.4 %", 0.21: "21 %", 1: "100 %"}),
    ],
)
def test_figures_counts_and_shares(form, texts):
    assert {value: form(value) for value in texts} == texts


def test_intervals():
    span = {"value": 5.1, "low": 4.9, "high": 5.3, "n": 3, "values": [5, 5.1, 5.2]}
    two = {"value": 8.0, "low": None, "high": None, "n": 2, "values": [16.0, 4.0]}
    assert interval(span) == "4.90 to 5.30" and interval(two) == interval(None) == ""
    assert pair(two) == "4.00 and 16.0" and pair(span) == pair(None) == ""
    assert spread(span, duration) == "5.1 s (4.9 s to 5.3 s)" and "4.00 and 16.0" in spread(two)
    assert spread({**two, "n": 1, "values": [8.0]}) == "8.00"


def test_a_price_says_all_that_is_known_of_it():
    cost = {
        "usd_per_hour": 3.6,
        "spot": True,
        "cloud": "there",
        "instance": "one",
        "region": "",
        "date": "2026-01-02",
    }
    assert price(cost) == "$3.60 an hour spot, there one, 2026-01-02, source unknown"
    assert price({}) == "on demand, date unknown, source unknown"


def test_foreign_text_is_one_line_of_some_length():
    assert one_line("a\n\tb \x1b[31m") == "a b \\x1b[31m"
    assert len(one_line(500 * "x")) == 400 and one_line(500 * "x").endswith("…") and one_line(1.5) == "1.5"
