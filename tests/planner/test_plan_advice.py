"""What would make room, what decides, why spot is dearer: advice that changes no number."""

import dataclasses

import pytest

import tasks
from chipwise.base.facts import fact
from chipwise.chips.catalogue import CHIPS
from chipwise.chips.targets import parse
from chipwise.compile.absent_device import available
from chipwise.planner.plan_advice import _smaller_programs, _speed, _uneven, decisive, room
from chipwise.planner.tracing import training_step
from chipwise.step.blueprint import Memory, waiting
from chipwise.step.layout import Layout
from planner import documents

GB = 10**9


def least(target, *, sums=0, activations=0, rest=0):
    """Memory of the smallest batch, on `target`."""
    limit, source = available(target)
    return Memory(rest, 0, 0, sums, activations, 0, 0, limit, source)


def asked(target, replicas=32, **recipe):
    made = tasks.recipe(**{"batch": replicas, "replicas": replicas, **recipe})
    programs = training_step(made, Layout(replicas, replicas, 1), resident=True)
    return made, target, dataclasses.replace(programs, size=GB // 4)  # a gradient of 1 GB


def codes(facts):
    return [told.code for told in facts]


def test_fewer_replicas_hold_fewer_partial_sums():
    t4 = parse("t4")  # 14.4 GB
    recipe, _, programs = asked(t4)
    sums = waiting(32, programs.size)
    assert sums == 6 * GB
    told = room(recipe, t4, programs, least(t4, sums=sums, rest=10 * GB), True)
    first = told[0]
    assert first == fact("room-fewer-replicas", replicas=8, needed=14 * GB)
    assert first["needed"] <= available(t4)[0] < 10 * GB + waiting(16, programs.size)
    told = room(recipe, t4, programs, least(t4, sums=sums, rest=15 * GB), True)
    assert "room-fewer-replicas" not in codes(told)


@pytest.mark.parametrize(
    ("recipe", "told"),
    [
        ({}, ("replicas", 16, 6)),
        ({"blocks": 4}, ("blocks", 8, 12)),
        ({"blocks": 2}, ("blocks", 4, 24)),
        ({"blocks": 8}, None),  # and blocks=8 stay with more replicas
    ],
)
def test_smaller_programs_make_room_for_the_batch(recipe, told):
    """Half of the batch fits; replicas that a program computes together do not make it smaller."""
    recipe = tasks.recipe(**{"batch": 96, "replicas": 8, **recipe})
    plan = dataclasses.replace(documents.plan("t4", "T4", held=None), largest_batch=48)
    found = list(_smaller_programs(recipe, plan))
    if told is None:
        assert found == []
    else:
        name, count, each = told
        assert found == [fact(f"room-more-{name}", batch=96, each=each, **{name: count})]
        assert f"--set {name}={count}" in str(found[0])


def test_what_a_number_of_replicas_costs():
    recipe = tasks.recipe(batch=48, replicas=4, shards=4)
    told = _uneven(recipe, Layout(48, 4, 16, shards=4), 8)  # half of 32 devices would be idle
    better = fact("blocks-cost", name="replicas", count=8, batch=64)
    assert told == fact("advice-uneven", blocks=4, groups=8, most=1, idle=0.5, better=[better])
    told = _uneven(tasks.recipe(blocks=2), Layout(24, 8, 2, blocks=2), 4)
    assert [(one["name"], one["count"]) for one in told["better"]] == [("blocks", 4)]
    assert _uneven(tasks.recipe(blocks=2), Layout(24, 8, 2, blocks=2), 3)["better"] == []
    told = _uneven(tasks.recipe(), Layout(24, 8, 3), 3)
    assert (told["most"], told["idle"]) == (3, pytest.approx(1 / 9))
    assert [(one["count"], one["batch"]) for one in told["better"]] == [(9, 27)]


def test_activations_can_be_computed_again_and_state_can_not():
    a100 = parse("a100")
    recipe, _, programs = asked(a100, replicas=1)
    told = room(recipe, a100, programs, least(a100, activations=50 * GB, rest=GB), True)
    assert codes(told)[:2] == ["room-remat", "room-precision"] and told[0]["activations"] == 50 * GB
    half = dataclasses.replace(recipe, precision="bf16")
    assert "room-precision" not in codes(room(half, a100, programs, least(a100, activations=50 * GB), True))
    eight = parse("a100:8")
    told = room(recipe, eight, programs, least(eight, rest=80 * GB), True)
    assert told[0] == fact("room-whole", without=80 * GB, devices=8)


def test_only_what_is_known_to_fit_is_advised():
    """An L4 was told to compute its 64 replicas at once, which needed 128 GB."""
    l4 = parse("l4")
    recipe, _, programs = asked(l4)
    step = dataclasses.replace(programs, calls=32)
    plan = dataclasses.replace(documents.plans()[0], problem=None, bound="memory", chip="L4")

    def told(activations):
        memory = least(l4, activations=activations, rest=GB)
        return codes(_speed(recipe, step, dataclasses.replace(plan, memory=memory)))

    assert told(GB // 2) == ["advice-blocks-in-turn"] and told(GB) == []
    step = dataclasses.replace(step, layout=dataclasses.replace(step.layout, exact=False))
    assert told(GB // 2) == ["advice-blocks-in-turn-free"]  # bits are equal on no other number of devices


def test_what_is_bound_by_launches_is_not_told_to_multiply_faster():
    v5e = documents.plans()[0]
    recipe, _, step = asked(parse("v5e-8"), replicas=1, precision="f32")
    for bound, expected in (("compute", True), ("launch", False)):
        assert (
            "advice-precision" in codes(_speed(recipe, step, dataclasses.replace(v5e, bound=bound)))
        ) is expected


@pytest.mark.parametrize(
    "needed, name", [(20, "rtx-3090"), (34, "a100"), (60, "a100-80gb"), (200, "b300"), (300, None)]
)
def test_the_smallest_chip_that_would_hold_it(needed, name):
    t4 = parse("t4")
    recipe, _, programs = asked(t4, replicas=1)
    told = room(recipe, t4, programs, least(t4, rest=needed * GB), True)[-1]
    if name is None:
        assert told == fact("room-no-chip", needed=needed * GB)
        return
    assert told.code == "room-chip" and told["available"] >= needed * GB
    gpus = (available(parse(c.names[0]))[0] for c in CHIPS if c.kind == "GPU")
    assert told["available"] == min(held for held in gpus if held >= needed * GB)


@pytest.mark.parametrize(
    "target, precision, told",
    [("t4", "bf16", True), ("v100", "bf16", True), ("t4", "f32", False), ("a100", "bf16", False),
     ("h100-nvl", "bf16", False), ("v2-8", "bf16", False)],
)  # fmt: skip
def test_what_a_chip_lacks_decides(target, precision, told):
    recipe = tasks.recipe(precision=precision)
    (plan, *_) = documents.plans()
    assert codes(decisive(recipe, parse(target), plan)) == ["bf16-emulated"] * told
