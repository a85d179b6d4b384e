"""What tests ask of an error: its class, its code and its facts, and that its sentence is one line."""

import contextlib

import pytest


@contextlib.contextmanager
def refused(kind, code, /, **facts):
    """`with refused(RecipeError, "batch-indivisible", batch=100):` facts that are not named may be any."""
    with pytest.raises(kind) as caught:
        yield caught
    error = caught.value
    assert error.code == code, f"{error.code}: {error}"
    assert {name: error.facts[name] for name in facts} == facts
    assert "\n" not in str(error)
