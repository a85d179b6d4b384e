import dataclasses

import pytest

from chipwise.engine.reduce import Exchange
from chipwise.planner import compile_step
from chipwise.planner.compile_answers import EFFORT, IN_GROUP, CompileRequest
from chipwise.planner.compile_step import TRUSTED
from chipwise.planner.compile_step import _Remaining as Remaining
from chipwise.planner.tracing import Contents, Exported


def request(name, size=0, platform="cuda"):
    exported = Exported(name, bytes(size), (), Contents(frozenset(), 0))
    program = exported if size else Exchange("reduce", 1, 10, 2, True)
    return CompileRequest(name, {}, program, platform=platform)


@pytest.fixture
def clock(monkeypatch):
    """Sets the time."""
    now = [100.0]
    monkeypatch.setattr(compile_step.time, "monotonic", lambda: now[0])

    def at(seconds):
        now[0] = 100.0 + seconds

    return at


@pytest.mark.parametrize("platform", EFFORT)
def test_large_programs_take_longer(platform):
    least, each = EFFORT[platform]
    efforts = [request("a", size, platform).effort for size in (0, 1, 20_000, 20_001, 120_000)]
    assert efforts == pytest.approx([least, least, least, least + each, least + 100_000 * each])
    tpu, gpu = request("a", 120_000, "tpu"), request("a", 120_000, "cuda")
    assert tpu.effort > 3 * gpu.effort
    grouped = [dataclasses.replace(one, shards=8).effort for one in (tpu, gpu)]
    assert grouped == [pytest.approx(1.3 + IN_GROUP * (tpu.effort - 1.3)), gpu.effort]


def test_what_is_left_follows_this_machines_pace(clock):
    seen = []
    left = Remaining(lambda *facts: seen.append(facts))
    left.ask([])
    assert not seen  # all are cached
    small, large = request("small"), request("large", 120_000)
    left.ask([small, large])
    clock(2 * small.effort)
    left.done(small)
    assert seen == [(0, 2, "", None), (1, 2, "small", None)]  # more may come
    other = request("other", 120_000, "tpu")
    left.ask([other])
    left.complete()
    rest = large.effort + other.effort
    pace = (TRUSTED + 2 * small.effort) / (TRUSTED + small.effort)
    assert seen[2:] == [(1, 3, "", None), (1, 3, "", pytest.approx(rest * pace))]
    clock(3 * (small.effort + other.effort))
    left.done(other)
    clock(1000)
    left.done(large)
    assert [done for done, *_ in seen[4:]] == [2, 3] and seen[-1][3] == 0
    assert 2 * large.effort < seen[4][3] < 3 * large.effort


def test_the_first_estimate_needs_nothing_done(clock):
    seen = []
    left = Remaining(lambda *facts: seen.append(facts))
    one = request("one", 120_000)
    left.ask([one])
    left.complete()
    assert seen[-1] == (0, 1, "", pytest.approx(one.effort))


def test_nobody_needs_to_be_told():
    left = Remaining(None)
    left.ask([request("one")])
    left.complete()
    left.done(request("one"))
