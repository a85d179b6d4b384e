"""What would make room, what decides, why spot is dearer: advice that changes no number."""

import dataclasses
from types import SimpleNamespace

import pytest

import tasks
from chipwise.chips.catalogue import CHIPS
from chipwise.chips.targets import parse
from chipwise.engine.blueprint import Memory, waiting
from chipwise.engine.layout import Layout
from chipwise.hlo.kernel import Kernel
from chipwise.planner.ask import _about_spot as about_spot
from chipwise.planner.device_memory import available
from chipwise.planner.plan_advice import _idle, decisive, room, saved_products
from chipwise.planner.time_step import StepTime
from chipwise.planner.tracing import training_step
from chipwise.words.facts import fact
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


def test_the_batch_of_more_groups_is_one_that_they_can_share():
    recipe = tasks.recipe(batch=48, replicas=4, shards=4)
    plan = SimpleNamespace(devices=16, devices_found=32)
    numbers = {"replicas": 4, "used": 16, "devices": 32, "better": 8}
    assert _idle(recipe, plan, True) == fact("advice-replicas-and-batch", **numbers, batch=64)
    recipe = dataclasses.replace(recipe, batch=64)
    assert _idle(recipe, plan, True) == fact("advice-replicas", **numbers)


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


def test_products_are_saved_where_they_fit_or_where_fewer_at_a_time_do():
    target = parse("h100:8")
    recipe, _, programs = asked(target, replicas=1, batch=4)
    again = "jit(f)/checkpoint/rematted_computation/dot_general"
    kernels = (
        Kernel("a", "matmul", 10, 1.0, dtype="bf16", shape=(10**6, 1000, 64, 1), source=again),
        Kernel("b", "attention", 5, 1.0, dtype="bf16", shape=(10**5, 10**5, 100, 20), source=again),
        Kernel("c", "matmul", 10, 8.0, dtype="bf16", shape=(10**6, 1000, 64, 1), source="jit(f)/dot_general"),
    )
    more = 20 * GB + 2 * GB

    def told(rest, kernels=kernels):
        time = StepTime("compiled", least(target, rest=rest), kernels=kernels)
        return saved_products(recipe, programs, time)

    limit, _ = available(target)
    assert told(limit - more) == [fact("advice-save-products", share=0.2, more=more, replicas=1)]
    grown = waiting(2, programs.size) - waiting(1, programs.size)
    two = fact("advice-save-products-in-turn", share=0.2, more=more // 2, replicas=2)
    assert told(limit - more + 1) == [two] == told(limit - more // 2 - grown)
    (four,) = told(limit - more // 2 - grown + 1)
    assert (four.code, four["replicas"]) == (two.code, 4)
    assert told(limit) == [] == told(0, kernels[2:])


@pytest.mark.parametrize("needed, name", [(20, "rtx-3090"), (34, "a100"), (60, "a100-80gb"), (200, None)])
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


def test_spot_above_on_demand_is_explained():
    plan = documents.plans()[0]
    demand, spot = plan.costs
    assert about_spot(plan) == ()
    dear = dataclasses.replace(spot, usd_per_hour=20.0, usd=demand.usd.times(2), cloud="aws")
    (told,) = about_spot(dataclasses.replace(plan, costs=(demand, dear)))
    assert (told.code, told["spot_cloud"], told["cloud"]) == ("spot-above-on-demand", "aws", "gcp")
    assert (told["spot"], told["demand"]) == (20.0, 9.6)
