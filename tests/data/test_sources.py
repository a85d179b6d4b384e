"""Sources: the checks, the narrowing of 64-bit columns, and every way to read them gives the same rows."""

import json
import threading

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chipwise.base.errors import DataError
from chipwise.data.sources import Arrays, Lazy, check_labels, fill, materialize, nbytes, spec_of, take
from refusals import refused


def images(n=10, shape=(4, 3)):
    return np.random.default_rng(0).integers(0, 256, (n, *shape), dtype=np.uint8)


def rows(source, indices):
    return [{k: np.asarray(v).tolist() for k, v in source[int(i)].items()} for i in indices]


def test_arrays_read_one_by_one_and_together():
    source = Arrays(image=images(), label=np.arange(10), classes=10)
    assert len(source) == 10 and source.classes == 10
    assert source.spec == {
        "image": jax.ShapeDtypeStruct((4, 3), np.uint8),
        "label": jax.ShapeDtypeStruct((), np.int32),
    }
    got = take(source, [7, 0, 7])
    assert [{k: v[i].tolist() for k, v in got.items()} for i in range(3)] == rows(source, [7, 0, 7])
    assert nbytes(source) == 10 * (12 + 4) == sum(c.nbytes for c in materialize(source).values())


@pytest.mark.parametrize("n", [1, 2, 7, 8, 9])
def test_a_list_of_dicts_is_a_source(n):
    x, y = images(n), list(range(n))
    plain = [{"image": x[i], "label": y[i], "weight": 0.5} for i in range(n)]
    ours = Arrays(image=x, label=y, weight=np.full(n, 0.5))
    assert spec_of(plain) == spec_of(ours) and nbytes(plain) == nbytes(ours)
    for a, b in ((materialize(plain), materialize(ours)), (take(plain, [n - 1, 0]), take(ours, [n - 1, 0]))):
        assert a.keys() == b.keys()
        for name in a:
            assert a[name].dtype == b[name].dtype
            np.testing.assert_array_equal(a[name], b[name])
    assert {k: v.shape for k, v in take(plain, np.zeros(0, int)).items()} == {
        k: v.shape for k, v in take(ours, np.zeros(0, int)).items()
    }


def test_memory_mapped_columns_are_not_copied(tmp_path):
    np.save(tmp_path / "x.npy", images())
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    source = Arrays(image=mapped)
    assert np.shares_memory(source.columns["image"], mapped)
    assert np.shares_memory(materialize(source)["image"], mapped)
    got = take(source, [3])["image"]
    assert type(got) is np.ndarray and (got == images()[[3]]).all()


def test_rows_of_a_view_are_taken_without_copying_all_of_it():
    view = np.broadcast_to(np.arange(4, dtype=np.float32), (1 << 40, 4))  # 16 TB
    source = Arrays(x=view)
    for rows in (source.take(np.array([5, 1 << 39])), take(source, np.array([0, (1 << 40) - 1]))):
        np.testing.assert_array_equal(rows["x"], view[:2])


def test_materialize_makes_columns_contiguous():
    columns = materialize(Arrays(image=images().transpose(0, 2, 1)))
    assert columns["image"].flags.c_contiguous and columns["image"].shape == (10, 3, 4)


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (np.float64, "float32"),
        (np.int64, "int32"),
        (np.uint64, "uint32"),
        (np.complex128, "complex64"),
        (np.longdouble, "float32"),
        (np.clongdouble, "complex64"),
        (np.uint8, "uint8"),
        (np.bool_, "bool"),
        (np.float16, "float16"),
        (jax.numpy.bfloat16, "bfloat16"),
        (">i4", "int32"),
        (">f8", "float32"),
    ],
)
def test_columns_become_types_that_jax_has(given, kept):
    column = Arrays(x=np.array([0, 1, 1]).astype(given)).columns["x"]
    assert column.dtype.name == kept and column.dtype.isnative
    assert column.astype(int).tolist() == [0, 1, 1] if kept != "complex64" else True
    jax.device_put(column)


@given(st.integers(-(2**63), 2**63 - 1))
def test_int64_is_kept_or_refused_never_cut(value):
    column = np.array([0, value])
    if -(2**31) <= value < 2**31:
        assert Arrays(x=column).columns["x"].tolist() == [0, value]
    else:
        with refused(DataError, "column-overflows", column="x", value=value, row=1, dtype="int32"):
            Arrays(x=column)


@pytest.mark.parametrize("dtype", [np.float64, np.longdouble])
def test_what_is_too_large_is_told_as_json(dtype):
    with refused(DataError, "column-overflows") as caught:
        Arrays(x=np.array([0, np.finfo(dtype).max]))
    json.dumps(caught.value.fact.json())


def test_float64_infinity_stays_and_overflow_is_refused():
    kept = Arrays(x=np.array([np.inf, np.nan, 1.0])).columns["x"]
    assert np.isinf(kept[0]) and np.isnan(kept[1])
    with refused(DataError, "column-overflows", value=1e300, row=1, dtype="float32"):
        Arrays(x=np.array([0, 1e300]))


@pytest.mark.parametrize(
    ("columns", "code", "facts"),
    [
        ({}, "no-columns", {}),
        ({"x": np.zeros((0, 2))}, "columns-empty", {"columns": ["x"]}),
        ({"x": np.zeros(3), "y": np.zeros(4)}, "column-lengths", {"lengths": {"x": 3, "y": 4}}),
        ({"x": 3}, "column-single-value", {"column": "x"}),
        ({"x": ["a", "b"]}, "column-not-numbers", {"column": "x"}),
        ({"x": [{}, {}]}, "column-not-numbers", {"dtype": "object"}),
        ({"x": [[1, 2], [3]]}, "column-not-array", {"column": "x"}),
        (
            {"label": np.array([0, 9, 10, 11]), "classes": 10},
            "label-out-of-range",
            {"example": 2, "label": 10, "last": 9},
        ),
        ({"label": np.array([0, -1]), "classes": 10}, "label-out-of-range", {"example": 1, "label": -1}),
        ({"label": np.zeros(2), "classes": 10}, "labels-not-integers", {"dtype": "float32", "last": 9}),
        (
            {"label": np.array([[0, 1], [2, 7]]), "classes": 3},
            "label-out-of-range",
            {"example": 1, "label": 7},
        ),
    ],
)
def test_what_arrays_refuses(columns, code, facts):
    with refused(DataError, code, **facts):
        Arrays(**columns)


MASKED = np.ma.masked_greater(np.arange(10.0), 8)  # the last is 9 below its mask


class Giving:
    """A source that takes several examples at once."""

    spec = {"x": jax.ShapeDtypeStruct((), np.float32)}  # noqa: RUF012

    def __len__(self):
        return 10

    def take(self, indices):
        return {"x": MASKED[indices].astype(np.float32)}


@pytest.mark.parametrize(
    "read",
    [
        lambda: Arrays(x=MASKED),
        lambda: Arrays(x=list(MASKED[:, None])),
        lambda: Arrays(x=[1.0, np.ma.masked]),
        lambda: materialize(Lazy(10, {"x": jax.ShapeDtypeStruct((), np.float32)}, lambda: {"x": MASKED})),
        lambda: take([{"x": row} for row in MASKED[:, None]], [0, 9]),
        lambda: take([{"x": row, "y": 0} for row in MASKED[:, None]], [0, 9]),
        lambda: take(Giving(), [0, 9]),
        lambda: fill(Giving(), np.arange(8, 10), {"x": np.empty(2, np.float32)}),
        lambda: spec_of([{"x": MASKED}]),
    ],
)
def test_masked_values_are_refused_at_every_door(read):
    with refused(DataError, "column-masked", column="x"):
        read()


def test_a_mask_that_masks_nothing_is_an_array():
    np.testing.assert_array_equal(Arrays(x=MASKED[:9]).columns["x"], np.arange(9))
    assert take(Giving(), [0, 8])["x"].tolist() == [0, 8]
    filled = Arrays(x=MASKED.filled(np.nan)).columns["x"]
    assert np.isnan(filled[9]) and type(filled) is np.ndarray


def test_labels_at_both_ends_of_the_range_pass():
    check_labels({"label": np.array([0, 9])}, 10)
    check_labels({"label": np.array([0, 99])}, None)
    with refused(DataError, "label-out-of-range", data="training", example=1, label=9):
        check_labels({"label": np.array([0, 9], np.uint8)}, 9, "training")


def test_lazy_reads_nothing_until_asked_and_once():
    calls = []

    def load():
        calls.append(1)
        return {"x": np.arange(5)}

    source = Lazy(5, {"x": jax.ShapeDtypeStruct((), np.int32)}, load)
    assert (len(source), nbytes(source), spec_of(source)["x"].dtype, calls) == (5, 20, np.int32, [])
    threads = [threading.Thread(target=source.take, args=([0],)) for _ in range(4)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert source[4]["x"] == 4 and take(source, [4, 1])["x"].tolist() == [4, 1]
    assert materialize(source)["x"].tolist() == list(range(5)) and calls == [1]


def test_lazy_checks_what_was_promised_and_tries_again():
    answers = [np.zeros(4), np.zeros(5), np.zeros(5, np.float32)]
    source = Lazy(5, {"x": jax.ShapeDtypeStruct((), np.uint8)}, lambda: {"x": answers.pop(0)})
    with refused(DataError, "loaded-differs", examples=4, expected_examples=5, columns=["x float32[]"]):
        source[0]
    with refused(DataError, "loaded-differs", columns=["x float32[]"], expected=["x uint8[]"]):
        source[0]
    with refused(DataError, "label-out-of-range", label=3):
        label = {"label": np.array([3])}
        Lazy(1, {"label": jax.ShapeDtypeStruct((), np.int32)}, lambda: label, classes=3)[0]
    with refused(DataError, "length-not-positive", length=0):
        Lazy(0, {}, dict)


def test_examples_that_differ_are_named():
    plain = [{"x": np.zeros((2, 2))}, {"x": np.zeros((2, 2))}, {"x": np.zeros((3, 2))}]
    unlike = {"expected": ["x float32[2, 2]"], "example": 2, "columns": ["x float32[3, 2]"]}
    with refused(DataError, "example-unlike", **unlike):
        materialize(plain)
    with refused(DataError, "example-unlike", expected=["x int32[]"], columns=["x float32[]"]):
        materialize([{"x": 1}, {"x": 1.5}])
    with refused(DataError, "example-unlike", columns=["y int32[]"]):
        materialize([{"x": 1}, {"y": 1}])


def test_other_people_s_mistakes():
    with refused(DataError, "example-kind", example=0, kind="a tuple of 3"):
        spec_of([(np.zeros(3), 1, 2)])
    for read in (spec_of, materialize):
        with refused(DataError, "source-empty"):
            read([])
    with refused(DataError, "indices-not-integers", dtype="float64"):
        take([{"x": 1}], [0.5])
    with pytest.raises(IndexError):
        take(Arrays(x=np.zeros(3)), [3])

    class Short:
        spec = spec_of([{"x": 1}])

        def __len__(self):
            return 3

        def __getitem__(self, i):
            return {"x": 1}

        def take(self, indices):
            return {"x": np.zeros(1)}

    with refused(DataError, "take-wrong-length", source="Short", column="x", shape=(1,), indices=2):
        take(Short(), [0, 1])

    class Labelled(list):
        classes = 3

    with refused(DataError, "label-out-of-range", example=1, label=3):
        materialize(Labelled([{"label": 2}, {"label": 3}]))


def test_a_method_of_a_known_name_is_not_ours_without_a_spec():
    class First(list):
        def take(self, n):
            return First(self[:n])

    np.testing.assert_array_equal(take(First({"x": i} for i in range(9)), [7, 2])["x"], [7, 2])


def test_a_spec_of_64_bits_is_refused_by_name():
    class Wide(list):
        @property
        def spec(self):
            return {"label": jax.ShapeDtypeStruct((), np.dtype(np.int64))}

    with refused(DataError, "spec-64-bit", source="Wide", column="label", dtype="int64", expected="int32"):
        spec_of(Wide([{"label": 1}]))


def test_an_example_that_is_not_as_the_spec_says():
    class Wrong(list):
        @property
        def spec(self):
            return {"x": jax.ShapeDtypeStruct((2,), np.dtype(np.uint8))}

    out = {"x": np.empty((1, 2), np.uint8)}
    with refused(DataError, "example-unlike", example=0, columns=["x uint8[3]"], expected=["x uint8[2]"]):
        fill(Wrong([{"x": np.zeros(3, np.uint8)}]), np.array([0]), out)


def test_labels_are_named_by_example_not_by_row():
    with refused(DataError, "label-out-of-range", data="training", example=37, label=9):
        check_labels({"label": np.array([1, 9])}, 5, "training", np.array([4, 37]))
