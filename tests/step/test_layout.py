import itertools
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

import tasks
from chipwise.base.errors import DeviceError, RecipeError
from chipwise.step.layout import (
    Layout,
    Ranges,
    balanced,
    cover_merges,
    covered_sum,
    merges,
    tree_sum,
    usable_devices,
)
from refusals import refused


def brackets(parts):
    return tree_sum(parts, lambda a, b: f"({a}{b})")


def test_the_tree_halves_the_range_and_the_left_half_takes_the_odd_one():
    assert brackets("01234567") == "(((01)(23))((45)(67)))"
    assert brackets("012345") == "(((01)2)((34)5))"
    assert brackets("0") == "0"


@given(st.integers(1, 64))
def test_the_stack_form_has_the_same_brackets(leaves):
    names = [f"<{i}>" for i in range(leaves)]
    stack = []
    for name, pops in zip(names, merges(leaves), strict=True):
        stack.append(name)
        for _ in range(pops):
            right, left = stack.pop(), stack.pop()
            stack.append(f"({left}{right})")
    assert stack == [brackets(names)]


def exact_counts(blocks):
    """The counts of groups that send one vector each."""
    return [n for n in range(1, blocks + 1) if blocks % n == 0 and (n & (n - 1) == 0 or n == blocks)]


@pytest.mark.slow
def test_equal_ranges_are_nodes_for_powers_of_two_that_divide_and_for_all_blocks():
    for blocks in range(1, 65):
        aligned = [n for n in range(1, blocks + 1) if Layout(blocks, blocks, n).aligned]
        assert aligned == exact_counts(blocks)


def cuts(blocks, groups):
    """Shares of any size."""
    ends = (
        st.sets(st.integers(1, blocks - 1), min_size=groups - 1, max_size=groups - 1) if groups > 1 else None
    )
    return (
        st.just((blocks,))
        if ends is None
        else ends.map(
            lambda chosen: tuple(b - a for a, b in itertools.pairwise([0, *sorted(chosen), blocks]))
        )
    )


@given(st.integers(1, 64), st.data())
def test_any_cut_adds_in_the_order_of_the_tree(blocks, data):
    groups = data.draw(st.integers(1, blocks))
    shares = data.draw(st.one_of(st.just(()), cuts(blocks, groups)))
    layout = Layout(blocks, blocks, groups, shares=shares)
    names = [f"<{i}>" for i in range(blocks)]
    sums = {}
    for first, share, nodes in zip(layout.firsts, layout.shares, layout.covers, strict=True):
        own, stack = names[first : first + share], []
        for name, pops in zip(own, cover_merges(nodes), strict=True):
            stack.append(name)
            for _ in range(pops):
                right, left = stack.pop(), stack.pop()
                stack.append(f"({left}{right})")
        assert len(stack) == len(nodes) <= layout.vectors
        sums |= dict(zip(nodes, stack, strict=True))
    assert covered_sum(sums, blocks, lambda a, b: f"({a}{b})") == brackets(names)


@pytest.mark.slow
def test_every_count_of_up_to_64_blocks_has_a_share_and_no_share_differs_by_two():
    for blocks in range(1, 65):
        for groups in range(1, blocks + 1):
            layout = Layout(blocks, blocks, groups)
            assert sum(layout.shares) == blocks and len(layout.shares) == groups
            assert 0 <= max(layout.shares) - min(layout.shares) <= 1 and min(layout.shares) > 0
            assert layout.vectors <= max(1, 2 * (blocks.bit_length() - 1))
        with refused(DeviceError, "devices-above-blocks", devices=blocks + 1, blocks=blocks, most=blocks):
            Layout(blocks, blocks, blocks + 1)


@pytest.mark.parametrize(
    "blocks, groups, vectors",
    [(8, 3, 2), (8, 5, 1), (12, 3, 3), (12, 5, 2), (64, 3, 5), (64, 5, 5), (6, 4, 1), (12, 8, 1)],
)
def test_a_cut_sends_as_few_vectors_as_equal_shares_can(blocks, groups, vectors):
    assert Layout(blocks, blocks, groups).vectors == vectors


@given(st.integers(1, 64), st.data())
def test_windows_have_every_chunk_and_equally_many(chunks, data):
    groups = data.draw(st.integers(1, chunks))
    windows = Ranges.even(chunks, groups)
    starts = [windows.start(group) for group in range(groups)]
    assert {first + i for first in starts for i in range(windows.part)} == set(range(chunks))
    assert windows.part == -(-chunks // groups) and starts == sorted(starts)
    owned = [(s + a, s + b) for s, (a, b) in zip(starts, map(windows.own, range(groups)), strict=True)]
    assert [i for first, after in owned for i in range(first, after)] == list(range(chunks))


@pytest.mark.slow
@given(st.lists(st.integers(0, 9), max_size=9), st.integers(1, 9))
def test_the_largest_of_balanced_ranges_is_as_small_as_can_be(sizes, groups):
    bounds = balanced(sizes, groups)
    assert len(bounds) == groups + 1 and list(bounds) == sorted(bounds)
    assert (bounds[0], bounds[-1]) == (0, len(sizes))
    cuts = itertools.combinations_with_replacement(range(len(sizes) + 1), groups - 1)
    every = (itertools.pairwise((0, *inner, len(sizes))) for inner in cuts)
    most = [max(sum(sizes[a:b]) for a, b in pairs) for pairs in every]
    assert max(sum(sizes[a:b]) for a, b in itertools.pairwise(bounds)) == min(most)


@given(st.lists(st.fractions(), min_size=1, max_size=40))
def test_the_tree_adds_everything_once(parts):
    assert tree_sum(parts, lambda a, b: a + b) == sum(parts, Fraction(0))


def test_shares_are_of_these_groups_and_blocks():
    assert Layout(16, 8, 3, shares=(2, 2, 4)).covers == [((0, 2),), ((2, 4),), ((4, 8),)]
    assert not Layout(16, 8, 3, shares=(2, 2, 4)).aligned
    assert Layout(16, 8, 6, shards=2, shares=(2, 2, 4)).groups == 3
    for shares in ((3, 3, 3), (3, 3, 1), (9, -2, 1), (8, 0, 0), (4, 4), (2, 2, 2, 2)):
        with refused(DeviceError, "shares-unlike", shares=list(shares), blocks=8, groups=3):
            Layout(16, 8, 3, shares=shares)


def test_without_exact_blocks_are_cut_for_more_groups():
    def found(replicas, devices, **more):
        layout = Layout(replicas, replicas, devices, exact=False, **more)
        assert layout.vectors == 1 and sum(layout.shares) * layout.together == replicas
        return layout.together, layout.shares

    assert found(8, 2) == (1, (4, 4)) and found(8, 3) == (1, (3, 3, 2))
    assert found(8, 1, blocks=2) == (4, (2,)) and found(8, 3, blocks=2) == (2, (2, 1, 1))
    assert found(8, 8, blocks=2)[0] == 1 and found(8, 4, blocks=1) == (2, (1, 1, 1, 1))
    assert found(8, 3, shares=(4, 2, 2)) == (1, (4, 2, 2))
    with refused(DeviceError, "devices-above-blocks", devices=9, most=8):
        Layout(8, 8, 9, exact=False, blocks=2)


def test_errors_name_what_would_work():
    with refused(RecipeError, "batch-indivisible", batch=100, replicas=8, near=[96, 104]):
        Layout.of(tasks.recipe(batch=100), 1)
    with refused(RecipeError, "batch-indivisible", near=[8]):
        Layout.of(tasks.recipe(batch=7), 1)
    with refused(DeviceError, "devices-above-blocks", devices=9, replicas=8, blocks=8, most=8):
        Layout(batch=64, replicas=8, devices=9)
    with refused(DeviceError, "devices-above-blocks", devices=3, replicas=8, blocks=2, most=2):
        Layout(batch=64, replicas=8, devices=3, blocks=2)


def test_a_layout_says_each_count_globally_and_per_device():
    layout = Layout(batch=512, replicas=8, devices=4)
    assert (layout.replicas_per_device, layout.replica_batch, layout.group_batch) == (2, 64, 128)
    layout = Layout(batch=512, replicas=8, devices=3)
    assert (layout.replicas_per_device, layout.replica_batch, layout.group_batch) == (3, 64, 192)
    assert (layout.shares, layout.firsts) == ((3, 3, 2), (0, 3, 6))


def test_devices_beyond_the_blocks_stay_idle():
    assert [usable_devices(tasks.recipe(), n) for n in (1, 3, 7, 8, 9)] == [1, 3, 7, 8, 8]
    assert usable_devices(tasks.recipe(blocks=2), 7) == 2
    assert usable_devices(tasks.recipe(replicas=3, shards=2), 10) == 6
    with refused(DeviceError, "shards-uneven", shards=2, devices=5):
        usable_devices(tasks.recipe(replicas=3, shards=2), 5)
