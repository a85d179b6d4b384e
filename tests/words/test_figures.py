"""Figures in words."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chipwise.words.figures import (
    byte_size,
    counted,
    digits,
    dollars,
    duration,
    few,
    listed,
    printable,
    sparkline,
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
