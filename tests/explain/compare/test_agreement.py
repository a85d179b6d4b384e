"""The same recipe, and the same computation by its first losses."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chipwise.errors import RecipeError
from chipwise.explain.compare import agreement as agree
from chipwise.explain.row import Window
from chipwise.words.facts import fact
from explain import comparisons
from explain.comparisons import (
    LOSSES,
    codes,
    compared,
    record,
    run,
    told,
)
from refusals import refused


def losses(*factors):
    return [x * f for x, f in zip(LOSSES, factors, strict=False)]


@pytest.mark.parametrize(
    ("factors", "status", "parts"),
    [
        ([1] * 20, agree.SAME_BITS, None),
        ([1 + 1e-7 * 1.2**k for k in range(20)], agree.AGREE, None),
        ([1 + e for e in (1e-7, 1e-7, 1e-5, 5e-5, 3e-4)], agree.AGREE, None),  # JAX and PyTorch, ResNet-32
        ([1 + min(1e-7 * 10**k, 0.1) for k in range(20)], agree.AGREE, 6),
        ([1, 1 + 1e-4] + [1.01] * 18, agree.PART, 2),  # another rate shows after one update
        ([1, 1, 1 + 1e-3] + [1.01] * 17, agree.PART, 3),  # another momentum after two
        ([1.5] * 20, agree.PART, 1),
    ],
)
def test_first_losses(tmp_path, factors, status, parts):
    made = losses(*factors)
    a = record(tmp_path / "a.json", losses=LOSSES[: len(made)])
    found = compared(a, record(tmp_path / "b.json", losses=made))["agreement"][0]
    assert (found["status"], found["parts"]) == (status, parts)
    assert found["same"] == (status != agree.PART)


def test_losses_that_part_for_a_reason_are_not_compared(tmp_path):
    a = record(tmp_path / "a.json")
    for changes, why in (
        ({"framework": "PyTorch"}, fact("another-value", name="framework", a="PyTorch", b="chipwise")),
        ({"data": "real"}, fact("another-value", name="data", a="real", b="synthetic")),
        ({"described": comparisons.recipe(seed=1)}, fact("another-value", name="seed", a=1, b=0)),
        ({"described": comparisons.recipe(duration="1ep")}, fact("other-settings", settings=["duration"])),
    ):
        found = compared(a, record(tmp_path / "b.json", losses=losses(*[1.1] * 20), **changes))
        assert found["agreement"][0]["status"] == agree.UNKNOWN
        assert found["agreement"][0]["fact"]["why"] == [why.json()]
        assert told(found, "speed", "rows-not-known-to-be-the-same")[0]["labels"] == ["b"]


def test_a_run_meets_a_record_by_the_mean_of_its_losses(tmp_path):
    row = {"step": 10, "train/loss": float(np.mean(LOSSES[:10])), "examples_per_second": 1000.0}
    made = run(tmp_path / "run", rows=json.dumps(row) + "\n")
    found = compared(record(tmp_path / "a.json"), made)["agreement"][0]
    assert found["status"] == agree.AGREE and found["steps"] == 10 and found["first_bits"] is None


def test_losses_first_known_late_cannot_tell(tmp_path):
    a, b = (
        run(tmp_path / "a"),
        run(tmp_path / "b", rows=json.dumps({"step": 100, "train/loss": 1.3, "examples_per_second": 9.0})),
    )
    found = compared(a, b)["agreement"][0]
    assert found["status"] == agree.UNKNOWN and found["fact"]["why"] == [
        fact("first-loss-too-late", step=100).json()
    ]


@given(
    st.lists(st.integers(1, 6), min_size=1, max_size=8), st.lists(st.integers(1, 6), min_size=1, max_size=8)
)
def test_windows_meet_where_both_end(a, b):
    def windows(lengths):
        ends = np.cumsum(lengths)
        return [
            Window(int(e) - n + 1, int(e), (e + (e - n + 1)) / 2) for e, n in zip(ends, lengths, strict=True)
        ]

    met = agree.meet(windows(a), windows(b))  # the loss of step k is k
    assert [m.step for m in met] == sorted({m.step for m in met})
    assert {m.step for m in met} <= set(np.cumsum(a)) & set(np.cumsum(b))
    assert all(m.a == pytest.approx(m.b) for m in met)
    if a == b:
        assert len(met) == len(a)


def test_a_few_equal_losses_or_another_setting_are_not_the_same_computation(tmp_path):
    one = record(tmp_path / "one.json", losses=LOSSES[:1])
    two = record(tmp_path / "two.json", losses=LOSSES[:1])
    (said,) = compared(one, two)["agreement"]
    assert not said["same"] and codes(said["fact"]["but"]) == ["too-few-steps"]
    rate = {"optimizer": {"optimizer": "adam", "lr": "constant(0.5)"}}
    a = record(tmp_path / "a.json")
    b = record(tmp_path / "b.json", described=comparisons.recipe("mnist", 256, **rate))
    (said,) = compared(a, b)["agreement"]
    assert not said["same"] and codes(said["fact"]["but"]) == ["although"]
    assert said["fact"]["but"][0]["why"] == [fact("other-settings", settings=["optimizer.lr"]).json()]


@pytest.mark.parametrize(
    ("changes", "code", "has", "other"),
    [
        ({"name": "digits"}, "another-recipe", "digits", "mnist"),
        ({"parameters": 9}, "another-size", 9, 250_698),
        (
            {"described": comparisons.recipe(task={"train": {"examples": 9, "image": "uint8[32, 32, 3]"}})},
            "another-shape",
            ["image uint8[32, 32, 3]"],
            ["image uint8[28, 28]", "label int32[]"],
        ),
    ],
)
def test_another_recipe_is_refused(tmp_path, changes, code, has, other):
    with refused(RecipeError, code, row="b", other="a", has=has, other_has=other):
        compared(record(tmp_path / "a.json"), record(tmp_path / "b.json", **changes))
