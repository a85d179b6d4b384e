"""The search for the largest batch, on memory whose form is known."""

import pytest

import chipwise as cw
from chipwise.planner.programs import largest_batch


@pytest.mark.parametrize(
    "fixed, each, available", [(10, 3, 1000), (0, 1, 1000), (990, 1, 1000), (50, 0.01, 1000)]
)
def test_close_to_the_true_one_in_few_tries(fixed, each, available):
    recipe, tries = cw.load("digits"), []

    def fits(tried):
        tries.append(tried.batch)
        needed = fixed + each * tried.batch
        return needed <= available, needed / available

    limit = 4000
    found = largest_batch(recipe, fits, limit)
    true = min(limit, int((available - fixed) / each)) // recipe.replicas * recipe.replicas
    assert found is not None and found <= true
    assert found >= 0.95 * true - recipe.replicas
    assert len(tries) == len(set(tries)) <= 14


def test_none_when_nothing_fits_and_never_past_the_data():
    recipe = cw.load("digits")
    assert largest_batch(recipe, lambda r: (False, 5.0), 1000) is None
    assert largest_batch(recipe, lambda r: (True, 1e-9), 1000) == 1000
