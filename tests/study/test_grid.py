import itertools
import re
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

import chipwise as cw
from chipwise.study import grid
from refusals import refused

NAMES = st.text(string.ascii_lowercase + "_", min_size=1, max_size=8).filter(lambda n: n != "seed")
VALUES = st.one_of(
    st.floats(allow_nan=False, allow_infinity=False).map(repr),
    st.integers().map(str),
    st.sampled_from(["1e-3", 'one_cycle(0.4, warmup="5ep")', "../x", "..", "a b", "[1, 2]", "é", "x" * 300]),
    st.text(min_size=1, max_size=12).map(str.strip).filter(bool),
)
SETTINGS = st.dictionaries(
    NAMES, st.lists(VALUES, min_size=1, max_size=4, unique_by=grid._meaning), max_size=3
)


@given(SETTINGS)
def test_points_are_every_combination_once_in_the_order_given(settings):
    points = grid.points(settings)
    assert [tuple(point.items()) for point in points] == [
        tuple(zip(settings, values, strict=True)) for values in itertools.product(*settings.values())
    ]
    assert len({grid.identity(point) for point in points}) == len(points)


@given(SETTINGS, st.integers(0, 2**32 - 1))
def test_every_run_has_a_folder_of_its_own_that_any_file_system_takes(settings, seed):
    points = grid.points(settings)
    folders = [grid.folder(point, seed) for point in points]
    assert len(set(folders)) == len(folders)
    for point, folder in zip(points, folders, strict=True):
        *own, last = folder.split("/")
        assert last == f"seed-{seed}"
        assert len(own) == bool(point)
        for part in own:
            assert re.fullmatch(r"[A-Za-z0-9_+=][A-Za-z0-9._+=,-]{0,119}", part)


def test_plain_values_are_read_off_the_folder():
    assert grid.folder({"lr": "0.2", "momentum": "0.95"}, 3) == "lr=0.2,momentum=0.95/seed-3"
    assert grid.folder({"lr": "1e-3"}, 0) == "lr=1e-3/seed-0"
    assert grid.folder({}, 7) == "seed-7"


def test_values_that_would_give_one_name_give_two():
    one, two = {"a": "1,b=2"}, {"a": "1", "b": "2"}
    assert grid.folder(one, 0) != grid.folder(two, 0)
    assert grid.folder({"a": "x/y"}, 0) != grid.folder({"a": "x_y"}, 0)


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("0.2", ["0.2"]),
        ("0.2, 0.4", ["0.2", "0.4"]),
        ("(1,2),(3,4)", ["(1,2)", "(3,4)"]),
        ('one_cycle(0.4, warmup="5ep"),0.1', ['one_cycle(0.4, warmup="5ep")', "0.1"]),
        ("'a,b',c", ["'a,b'", "c"]),
        (r"a\,b,c", ["a,b", "c"]),
        ("it's,5", ["it's", "5"]),
    ],
)
def test_commas_separate_values_unless_they_belong_to_one(text, values):
    assert grid.split(text) == values
    assert grid.parse([f"key={text}"]) == {"key": values}


@given(st.lists(st.text(min_size=1).map(str.strip).filter(bool), min_size=1, max_size=4))
def test_any_values_can_be_written_with_backslashes(values):
    if all(not set(value) & set("\\'\"([{)]}") for value in values):
        assert grid.split(",".join(value.replace(",", "\\,") for value in values)) == values


@pytest.mark.parametrize(
    ("texts", "code"),
    [
        (["lr"], "set-not-key-value"),
        (["=1"], "set-not-key-value"),
        (["lr="], "set-not-key-value"),
        (["lr=1,"], "value-missing"),
        (["lr=(1,2"], "bracket-open"),
        (["lr=1", "lr=2"], "set-twice"),
    ],
)
def test_settings_that_cannot_be_read_say_how_to_write_them(texts, code):
    with refused(cw.errors.RecipeError, code) as caught:
        grid.parse(texts)
    assert code != "set-twice" or caught.value.facts["values"] == "1,2"


@pytest.mark.parametrize(
    ("settings", "code", "facts"),
    [
        ({"lr": ["0.2", ".2"]}, "value-twice", {"first": "0.2", "second": ".2"}),
        ({"lr": []}, "setting-without-values", {"name": "lr"}),
        ({"seed": ["1", "2"]}, "seed-is-no-setting", {}),
    ],
)
def test_points_that_would_repeat_a_run_are_refused(settings, code, facts):
    with refused(cw.errors.RecipeError, code, **facts):
        grid.points(settings)


@pytest.mark.parametrize(
    ("given", "seeds"),
    [
        ("1", (0,)),
        ("5", (0, 1, 2, 3, 4)),
        ("0,3,7", (0, 3, 7)),
        ("7,", (7,)),
        (" 3, 1 ", (3, 1)),
        (2, (0, 1)),
        ([9, 4], (9, 4)),
        ([2**32 - 1], (2**32 - 1,)),
    ],
)
def test_seeds_are_a_number_of_them_or_a_list(given, seeds):
    assert grid.seeds(given) == seeds


@pytest.mark.parametrize(
    ("given", "code"),
    [
        *((text, "seeds-unreadable") for text in ("-1", "", ",", "1,,2", "x", "1.5")),
        *((none, "seeds-too-few") for none in ("0", 0, True, [])),
        ([1, 1], "seed-twice"),
        ([-1], "seed-out-of-range"),
        ([2**32], "seed-out-of-range"),
    ],
)
def test_seeds_that_cannot_be_are_refused(given, code):
    with refused(cw.errors.RecipeError, code):
        grid.seeds(given)


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
        ({"lr": "0.2"}, {"lr": ".20"}, True),
        ({"lr": "1e-3", "b": "x"}, {"b": "x", "lr": "0.001"}, True),
        ({"lr": "0.2"}, {"lr": "0.3"}, False),
        ({"flag": "True"}, {"flag": "1"}, False),
        ({"d": "(1, 2)"}, {"d": "(1,2)"}, True),
    ],
)
def test_points_are_the_same_when_they_mean_the_same(a, b, same):
    assert (grid.identity(a) == grid.identity(b)) is same


def test_a_seeds_number_is_not_their_count():
    assert len(grid.seeds(1000)) == 1000
    with refused(cw.errors.RecipeError, "seeds-too-many", given=20240101, most=1000):
        grid.seeds("20240101")
    assert grid.seeds("20240101,") == (20240101,)
