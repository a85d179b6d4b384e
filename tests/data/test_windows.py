"""Windows of one long array, against the slices that they are."""

import tracemalloc

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

import chipwise as cw
from chipwise.base.errors import DataError, RecipeError
from chipwise.data import Windows, materialize, nbytes, take
from chipwise.data.compared import compared
from refusals import refused


def slices(series, length, horizon, stride, start, stop):
    """Every window by its definition."""
    found = []
    for at in range(max(start, length), stop - horizon + 1, stride):
        found.append((series[at - length : at], series[at : at + horizon]))
    return found


@given(
    moments=st.integers(1, 30),
    rest=st.sampled_from([(), (2,), (2, 3)]),
    length=st.integers(1, 6),
    horizon=st.integers(1, 4),
    stride=st.integers(1, 5),
    start=st.integers(0, 12),
    stop=st.none() | st.integers(0, 40),
)
def test_they_are_the_slices(moments, rest, length, horizon, stride, start, stop):
    series = np.random.default_rng(0).normal(size=(moments, *rest)).astype(np.float32)
    last = moments if stop is None else min(stop, moments)
    expected = slices(series, length, horizon, stride, start, last)
    if not expected:
        with refused(DataError, "windows-none", moments=moments):
            Windows(series, length, horizon, stride, start=start, stop=stop)
        return
    windows = Windows(series, length, horizon, stride, start=start, stop=stop)
    assert len(windows) == len(expected)
    whole = materialize(windows)
    for i, (x, y) in enumerate(expected):
        np.testing.assert_array_equal(windows[i]["x"], x)
        np.testing.assert_array_equal(whole["x"][i], x)
        np.testing.assert_array_equal(whole["y"][i], y)
    some = np.arange(len(windows))[::-2]
    np.testing.assert_array_equal(take(windows, some)["y"], whole["y"][some])
    for outside in (-1, len(windows)):
        with pytest.raises(IndexError):
            windows[outside]


def test_nothing_that_is_forecast_in_an_evaluation_is_seen_in_training():
    moments = np.arange(100)
    for edge in (40, 60, 80):
        train = materialize(Windows(moments, 7, 3, stop=edge))
        later = materialize(Windows(moments, 7, 3, start=edge, stop=edge + 20))
        assert max(train["x"].max(), train["y"].max()) < edge == later["y"].min()
        assert later["y"].max() == edge + 19


def test_the_series_is_in_memory_once():
    series = np.zeros((1000, 2), np.float32)
    windows = Windows(series, 100, 10)
    assert windows.series is series and nbytes(windows) == 891 * 110 * 2 * 4
    assert Windows(np.zeros(9), 2, 1).spec["x"].dtype == np.float32


@pytest.mark.parametrize("name", ["length", "horizon", "stride"])
def test_sizes_are_at_least_one(name):
    with refused(RecipeError, "windows-size", name=name, size=0):
        Windows(np.zeros(9), **{"length": 2, "horizon": 1, name: 0})


@pytest.mark.parametrize("name", ["start", "stop"])
def test_a_place_from_the_end_is_refused(name):
    """`start=-3` would be all of the series, not its end."""
    with refused(RecipeError, "windows-negative", name=name, given=-3, back=3):
        Windows(np.zeros(9), 2, 1, **{name: -3})


def test_a_single_value_is_no_series():
    with refused(DataError, "column-single-value"):
        Windows(1.0, 1, 1)


def test_a_run_that_continues_compares_the_series():
    series = np.arange(50, dtype=np.float32)
    same = compared(Windows(series, 5, 2))
    assert same == compared(Windows(series.copy(), 5, 2)) and same.read == len(Windows(series, 5, 2))
    changed = series.copy()
    changed[49] += 1
    others = (
        Windows(changed, 5, 2),
        Windows(series, 5, 2, start=6),
        Windows(series, 4, 3),
    )
    assert all(compared(other).parts != same.parts for other in others)


def test_a_series_is_compared_without_a_copy_of_it():
    series = np.ones((1 << 21, 2), np.float32)[:, 0]
    windows = Windows(series, 5, 2)
    tracemalloc.start()
    try:
        seen = compared(windows)
        assert tracemalloc.get_traced_memory()[1] < series.nbytes
    finally:
        tracemalloc.stop()
    assert seen == compared(Windows(series.copy(), 5, 2)) and seen.whole


def test_of_a_series_too_large_to_hash_some_windows_are_compared(monkeypatch):
    series = np.arange(20_000, dtype=np.float32)
    monkeypatch.setattr("chipwise.data.compared._WHOLE_BYTES", series.nbytes)
    assert compared(Windows(series, 5, 2)).whole
    monkeypatch.setattr("chipwise.data.compared._WHOLE_BYTES", series.nbytes - 1)
    same, changed = compared(Windows(series, 5, 2)), compared(Windows(series + 1, 5, 2))
    assert 0 < same.read < same.examples and same.told("training").code == "data-sampled"
    assert changed.parts["examples/8"] != same.parts["examples/8"]


@pytest.mark.as_users_compile
def test_streamed_and_resident_train_to_the_same_bits():
    windows = Windows(np.sin(np.arange(80) / 5), 6, 2)

    def loss(params, state, batch, key, train):
        error = batch["x"] @ params["w"] - batch["y"]
        return {"loss": cw.Sum.of((error**2).mean(axis=1))}, state

    task = cw.Task(
        init=lambda key: ({"w": np.zeros((6, 2), np.float32)}, {}), loss=loss, train=windows, eval=windows
    )
    recipe = cw.Recipe(task=task, batch=8, duration="9st", optimizer=cw.sgd(lr=0.1), replicas=4)
    feeds = {"device": 1, "host": 3}
    results = [cw.fit(recipe, on=cw.On(feed=f, devices=n), progress="none") for f, n in feeds.items()]
    assert results[0].fingerprint == results[1].fingerprint
    assert results[0].metrics["eval/loss"] == results[1].metrics["eval/loss"]
