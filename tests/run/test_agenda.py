"""The steps after which something is due, asked once a step and in any order."""

from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from chipwise.recipe.duration import Marks
from chipwise.run.run_schedule import AnyOf

LENGTHS = st.lists(st.fractions(Fraction(1, 2), 50), max_size=3)


@given(LENGTHS, st.integers(1, 60), st.integers(0, 70), st.lists(st.integers(1, 70)))
def test_the_next_of_several_marks_is_the_first_of_any(lengths, total, last, asked):
    marks = tuple(Marks(length, total) for length in lengths)
    some = AnyOf(marks, last)
    expected = {last} | {step for one in marks for step in one}
    for step in asked:
        assert some.after(step) == min((mark for mark in expected if mark > step), default=None)
        assert (step in some) == (step in expected)
    assert "3" not in some
