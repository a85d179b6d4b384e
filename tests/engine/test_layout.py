from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

import tasks
from chipwise.engine.layout import Layout, even_counts, exact_counts, merges, tree_sum, usable
from chipwise.errors import DeviceError, RecipeError
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


@given(st.integers(1, 64), st.data())
def test_an_exact_count_only_regroups_whole_nodes(replicas, data):
    devices = data.draw(st.sampled_from(exact_counts(replicas)))
    size = replicas // devices
    names = [f"<{i}>" for i in range(replicas)]
    blocks = [brackets(names[i : i + size]) for i in range(0, replicas, size)]
    assert brackets(blocks) == brackets(names)


@given(st.integers(1, 64))
def test_no_exact_count_is_left_out(replicas):
    names = [f"<{i}>" for i in range(replicas)]
    whole = brackets(names)
    for devices in even_counts(replicas):
        size = replicas // devices
        aligned = all(brackets(names[i : i + size]) in whole for i in range(0, replicas, size))
        assert aligned == (devices in exact_counts(replicas))


@given(st.lists(st.fractions(), min_size=1, max_size=40))
def test_the_tree_adds_everything_once(parts):
    assert tree_sum(parts, lambda a, b: a + b) == sum(parts, Fraction(0))


def test_six_replicas_allow_one_two_and_six_devices():
    assert exact_counts(6) == [1, 2, 6]
    assert usable(6, 8) == 6
    assert usable(6, 5) == 2
    assert usable(6, 5, exact=False) == 3
    with refused(DeviceError, "devices-inexact", counts=[1, 2, 6]):
        Layout(batch=12, replicas=6, devices=3)
    assert Layout(batch=12, replicas=6, devices=3, exact=False).replicas_per_device == 2


def test_errors_name_what_would_work():
    with refused(RecipeError, "batch-indivisible", batch=100, replicas=8, near=[96, 104]):
        Layout.of(tasks.recipe(batch=100), 1)
    with refused(RecipeError, "batch-indivisible", near=[8]):
        Layout.of(tasks.recipe(batch=7), 1)
    with refused(DeviceError, "devices-uneven", devices=3, replicas=8, counts=[1, 2, 4, 8]):
        Layout(batch=64, replicas=8, devices=3)


def test_a_layout_says_each_count_globally_and_per_device():
    layout = Layout(batch=512, replicas=8, devices=4)
    assert (layout.replicas_per_device, layout.replica_batch, layout.group_batch) == (2, 64, 128)
