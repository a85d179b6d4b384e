"""What waits in memory while replicas run; the search for the largest batch, on memory of known form."""

import dataclasses

import pytest

import chipwise as cw
from chipwise.base.facts import fact
from chipwise.step.blueprint import blueprint, largest_batch, waiting
from chipwise.step.layout import Layout, merges
from chipwise.step.step import Step


@pytest.mark.parametrize("calls", [1, 2, 7, 8])
def test_few_small_vectors_wait_for_each_other(calls):
    assert waiting(calls, 10) == 40 * calls


@pytest.mark.parametrize("calls, most", [(9, 4), (12, 4), (16, 5), (17, 5), (128, 8)])
def test_many_are_added_as_they_come_and_counted_as_the_engine_holds_them(calls, most):
    """BERT-Large's 128 replicas on one device: eight gradients of 1.34 GB, not nine."""
    stack, held = [], []
    for i, pops in enumerate(merges(calls)):
        stack.append(i)
        held.append(len(stack))
        del stack[len(stack) - pops :]
    assert len(stack) == 1 and max(held) == most
    assert waiting(calls, 10) == 40 * most
    large = 1 << 28  # too large to wait, however few
    assert waiting(2, large) == 4 * large * 2


@pytest.mark.parametrize("replicas", [4, 8])
def test_the_program_that_needs_most_with_what_waits_beside_it(replicas):
    recipe = dataclasses.replace(cw.load("digits"), replicas=replicas, batch=64)
    whole = blueprint(Step(recipe, Layout.of(recipe, 4)), resident=False, apart=True)
    vectors = replicas // 4
    n, size = 4 * whole.size, whole.size
    assert whole.sums == {"replica": vectors * n, "reduce": (vectors + 1) * n, "update": n, "gather": n}
    assert list(whole.exchanges) == ["reduce"] and whole.exchanges["reduce"].cut == 0
    sharded = dataclasses.replace(whole, cut=size // 8 * 8 - 8)
    part, rest = sharded.cut, 4 * (size - sharded.cut)
    assert sharded.sums == {
        "replica": vectors * n,
        "reduce": vectors * n + part + rest,
        "update": 2 * part + rest,
        "gather": 2 * part + rest + 4 * part,
    }
    assert sharded.exchanges["gather"].size == sharded.exchanges["reduce"].cut == part
    source = fact("memory-of-tpu", gib=1)
    temporary = {"replica": 10, "reduce": 20, "gather": 10 * n}
    memory = sharded.memory(temporary, 0, 1, source)
    assert (memory.replica_sums, memory.activations) == (sharded.sums["gather"], 10 * n)
    memory = sharded.memory(temporary | {"replica": 100 * n}, 0, 1, source)
    assert (memory.replica_sums, memory.activations) == (vectors * n, 100 * n)


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
    assert len(tries) == len(set(tries)) <= 6


def test_found_where_the_compiler_saves_memory_when_it_is_short():
    recipe = cw.load("digits")

    def fits(tried):
        share = min(0.02 * tried.batch, 1.09 + 1e-5 * tried.batch)
        return share <= 1, share

    found = largest_batch(dataclasses.replace(recipe, batch=512), fits, 4000)
    assert found is not None and 44 <= found <= 50


def test_none_when_nothing_fits_and_never_past_the_data():
    recipe = cw.load("digits")
    assert largest_batch(recipe, lambda r: (False, 5.0), 1000) is None
    assert largest_batch(recipe, lambda r: (True, 1e-9), 1000) == 1000


def test_every_batch_asked_of_a_group_gives_each_of_its_devices_as_much():
    recipe = dataclasses.replace(cw.load("digits"), shards=4, replicas=2, batch=64)
    tries = []

    def fits(tried):
        tries.append(tried.batch)
        return tried.batch <= 12, tried.batch / 12

    assert largest_batch(recipe, fits, 1000) == 8
    assert all(batch % 8 == 0 for batch in tries)
