"""The same recipe, and the same computation by its first losses."""

import json

import pytest

from chipwise.explain.compare import agreement as agree
from chipwise.words.facts import fact
from explain import comparisons
from explain.comparisons import (
    LOSSES,
    codes,
    compared,
    record,
    run,
)


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
        assert found["rows"][1]["same_computation"] is False


def test_runs_meet_where_both_logged_the_same_steps(tmp_path):
    a, b = run(tmp_path / "a"), run(tmp_path / "b", accuracies=(0.9, 0.95))
    found = compared(a, b)["agreement"][0]
    assert (found["status"], found["steps"]) == (agree.SAME_BITS, 200)
    other = run(tmp_path / "c", rows=json.dumps({"step": 70, "train/loss": 1.3, "examples_per_second": 9.0}))
    found = compared(a, other)["agreement"][0]
    assert found["status"] == agree.UNKNOWN and codes(found["fact"]["why"]) == ["no-step-in-common"]


def test_a_few_equal_losses_or_another_setting_are_not_the_same_computation(tmp_path):
    one = record(tmp_path / "one.json", losses=LOSSES[:1])
    two = record(tmp_path / "two.json", losses=LOSSES[:1])
    (said,) = compared(one, two)["agreement"]
    assert not said["same"] and said["status"] == agree.SAME_BITS
    rate = {"optimizer": {"optimizer": "adam", "lr": "constant(0.5)"}}
    a = record(tmp_path / "a.json")
    b = record(tmp_path / "b.json", described=comparisons.recipe("mnist", 256, **rate))
    (said,) = compared(a, b)["agreement"]
    assert not said["same"] and said["status"] == agree.SAME_BITS
