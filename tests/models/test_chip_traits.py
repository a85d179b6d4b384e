"""The chip that a program is traced for."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from chipwise.chips.catalogue import named
from chipwise.chips.targets import parse
from chipwise.models import chip_traits as module
from chipwise.models.chip_traits import ChipTraits, by_platform, depends_on_chip, platform, traced_for, traits

CHIPS = {name: named(name) for name in ("a100", "t4", "v5e", "cpu")}


@pytest.fixture(autouse=True)
def nothing_asked(monkeypatch):
    monkeypatch.setattr(module, "_ASKED", set())


def branches():
    """A function of an array by platform, and the names of the branches that were traced."""
    traced = []

    def branch(name, factor):
        def scaled(x):
            traced.append(name)
            return x * factor

        return scaled

    named = {"cpu": branch("cpu", 2.0), "tpu": branch("tpu", 3.0), "default": branch("default", 5.0)}
    return lambda x: by_platform(x, **named), traced


@pytest.mark.parametrize(("chip", "factor"), [("a100", 5.0), ("v5e", 3.0), ("cpu", 2.0)])
def test_only_the_branch_of_a_stated_chip_is_traced(chip, factor):
    function, traced = branches()
    with traced_for(CHIPS[chip]):
        assert jax.jit(function)(jnp.float32(1)) == np.float32(factor)
    assert len(traced) == 1


def test_the_device_selects_where_no_chip_is_stated():
    function, traced = branches()
    assert jax.jit(function)(jnp.float32(1)) == np.float32(2)
    assert sorted(set(traced)) == ["cpu", "default", "tpu"]
    here = lax.platform_dependent(jnp.float32(1), cpu=lambda x: x * 2.0, default=lambda x: x)
    assert here == function(jnp.float32(1))


def test_a_trace_is_for_all_chips_of_a_platform_until_one_asks_for_the_chip():
    with traced_for(CHIPS["t4"]):
        assert platform() == "cuda" and not depends_on_chip("cuda")
        assert traits() == ChipTraits("cuda", fuses=False)
    assert depends_on_chip("cuda") and not depends_on_chip("tpu")


@pytest.mark.parametrize(
    ("name", "expected"),
    [("v3-8", (False, True)), ("v4-8", (True, True)), ("v6e-8", (True, True)), ("tpu7x-8", (True, False))],
)
def test_what_a_tpu_has(name, expected):
    chip = parse(name).chip
    assert ChipTraits.of(chip) == ChipTraits("tpu", *expected)
