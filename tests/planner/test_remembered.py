"""Programs of built-in recipes that are remembered: the same plans, without tracing."""

import json

import pytest

import chipwise as cw
from chipwise.planner import planner, remembered
from chipwise.planner.compiler import Compiled
from chipwise.planner.compilers import installed
from chipwise.planner.planner import plan
from chipwise.recipe.settings import load, origin
from chipwise.words.facts import fact

pytestmark = pytest.mark.skipif(installed("libtpu") is None, reason="needs libtpu")

NET = "digits"


@pytest.fixture
def traced(monkeypatch):
    """The recipes whose programs were made, in order."""
    made = []
    real = planner.step_programs

    def step_programs(recipe, *arguments, **more):
        made.append(recipe.batch)
        return real(recipe, *arguments, **more)

    monkeypatch.setattr(planner, "step_programs", step_programs)
    return made


def planned(folder, *on, settings=(), spec=NET):
    recipe = load(spec, settings)
    return plan(recipe, on, origin=origin(spec, settings), cache=folder, exact=True)


def figures(plans):
    """What does not name source lines, which depend on where a test calls `plan`."""
    return [(one.seconds, one.memory, one.flops_per_step_per_device, one.notes, one.advice) for one in plans]


def files(folder):
    return sorted(folder.glob("programs-*.json"))


def test_the_second_plan_traces_nothing(tmp_path, traced):
    first = planned(tmp_path, "v5e-1", "v5e-8")
    assert len(traced) == 2 == len(files(tmp_path))  # a layout each
    traced.clear()
    assert planned(tmp_path, "v5e-1", "v5e-8") == first
    assert traced == []
    assert figures(cw.plan(load(NET), ["v5e-1", "v5e-8"], cache=tmp_path)) == figures(first)


@pytest.mark.parametrize("settings", [["batch=128"], ["precision=bf16"], ["clip=1.0"]])
def test_other_settings_are_other_programs(tmp_path, traced, settings):
    planned(tmp_path, "v5e-1")
    other = planned(tmp_path, "v5e-1", settings=settings)
    assert len(traced) == 2
    assert figures(other) == figures(cw.plan(load(NET, settings), ["v5e-1"], cache=tmp_path))


@pytest.mark.parametrize("what", ["_sources", "installed"])
def test_other_sources_or_libraries_are_asked_again(tmp_path, traced, monkeypatch, what):
    planned(tmp_path, "v5e-1")
    monkeypatch.setattr(remembered, what, lambda *_: "other")
    planned(tmp_path, "v5e-1")
    assert len(traced) == 2


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"replica": 3}'])
def test_a_file_that_cannot_be_read_is_made_anew(tmp_path, traced, text):
    first = planned(tmp_path, "v5e-1")
    (file,) = files(tmp_path)
    file.write_text(text)
    assert figures(planned(tmp_path, "v5e-1")) == figures(first)
    assert len(traced) == 2
    assert planned(tmp_path, "v5e-1") == planned(tmp_path, "v5e-1") and len(traced) == 2


def test_what_the_compiler_forgot_is_traced_again(tmp_path, traced):
    first = planned(tmp_path, "v5e-1")
    for answer in set(tmp_path.glob("*.json")) - set(files(tmp_path)):
        answer.unlink()
    assert figures(planned(tmp_path, "v5e-1")) == figures(first)  # in float32, which is compiled in one pass
    assert len(traced) == 2
    assert len(list(tmp_path.glob("*.json"))) > len(files(tmp_path))


def test_chips_with_other_kernels_do_not_share_what_is_remembered(tmp_path, monkeypatch):
    tiny = ["depth=1", "width=256", "heads=2", "context=1024", "vocabulary=256", "batch=8", "replicas=8"]
    keys = {}

    def compile_each(requests, **_):
        for i, request in enumerate(requests):
            keys[request.name, request.topology["topology_name"]] = request.program.key
            yield i, Compiled(request.name, fact("refused", program=request.name, message=""))

    monkeypatch.setattr("chipwise.planner.steps.compile_each", compile_each)
    monkeypatch.setattr("chipwise.models.target._ASKED", set())
    planned(tmp_path, "v5e-1", settings=tiny, spec="gpt2-124m")
    (file,) = files(tmp_path)
    assert [
        len(json.loads(file.read_text())["programs"][name]["exports"]) for name in ("replica", "update")
    ] == [1, 1]
    monkeypatch.setattr("chipwise.models.target._ASKED", set())  # as in another process
    planned(tmp_path, "v3-8", settings=tiny, spec="gpt2-124m")
    planned(tmp_path, "v2-8", settings=tiny, spec="gpt2-124m")
    planned(tmp_path, "v5e-8", settings=tiny, spec="gpt2-124m")
    by_chip = {topology: key for (name, topology), key in keys.items() if name == "replica"}
    assert len(by_chip) == 4 and len(set(by_chip.values())) == 3


def test_what_has_an_origin():
    assert origin("mnist", ["lr=1"]) != origin("mnist") != origin("mnist", synthetic=True)
    assert origin("mnist", data="there") is None and origin("net.py:recipe") is None
    assert origin("net.py") is None
