"""Programs of built-in recipes that are remembered: the same requests to the compiler, without tracing."""

import dataclasses
import itertools
import json

import jax
import pytest

from chipwise.engine.layout import Layout
from chipwise.planner import ask, compile_step, trace_cache, tracing
from chipwise.planner.ask import plan
from chipwise.planner.compile_answers import Compiled
from chipwise.planner.compile_processes import installed
from chipwise.planner.tracing import Exported, training_step
from chipwise.recipe.settings import load, origin
from chipwise.words.facts import fact

pytestmark = pytest.mark.skipif(installed("libtpu") is None, reason="needs libtpu")

NET = "digits"


@pytest.fixture(autouse=True)
def asked(monkeypatch):
    """The requests, in order: nothing is compiled."""
    requests = []

    def compile_each(batches, **_):
        for i, request in enumerate(itertools.chain.from_iterable(batches)):
            requests.append(request)
            yield i, Compiled(request.name, fact("refused", program=request.name, message=""))

    monkeypatch.setattr(compile_step, "compile_each", compile_each)
    return requests


@pytest.fixture
def traced(monkeypatch):
    """The batches of the recipes whose programs were made, in order."""
    made = []
    real = ask.training_step

    def counted(recipe, *arguments, **more):
        made.append(recipe.batch)
        return real(recipe, *arguments, **more)

    monkeypatch.setattr(ask, "training_step", counted)
    return made


def planned(folder, *on, settings=(), spec=NET):
    return plan(load(spec, settings), on, origin=origin(spec, settings), cache=folder)


def drained(asked):
    """What the compiler was asked since the last time, as keys of its cache."""
    keys = [request.key("") for request in asked]
    asked.clear()
    return keys


def files(folder):
    return sorted(folder.glob("programs-*.json"))


def test_the_second_plan_traces_nothing(tmp_path, traced, asked):
    first, keys = planned(tmp_path, "v5e-1", "v5e-8"), drained(asked)
    assert len(traced) == 2 == len(files(tmp_path))  # a layout each
    assert planned(tmp_path, "v5e-1", "v5e-8") == first and drained(asked) == keys
    assert len(traced) == 2
    plan(load(NET), ["v5e-1", "v5e-8"], cache=tmp_path)  # of a recipe without an origin
    assert drained(asked) == keys and len(traced) == 4


def test_a_compiler_starts_early_only_for_programs_to_be_traced(tmp_path, asked, monkeypatch):
    expected = []
    real = compile_step.compile_each

    def compile_each(batches, **options):
        expected.append(options["expected"])
        return real(batches)

    monkeypatch.setattr(compile_step, "compile_each", compile_each)
    monkeypatch.setitem(compile_step.COMPILERS, "cuda", lambda: None)
    for targets in (["v5e-1"], ["v5e-1"], ["v5e-1", "a100"], ["v5e-1", "a100"]):
        planned(tmp_path, *targets)
    assert expected == ["tpu", None, "cuda", None]
    tpu_first, gpu_first = [request.platform for request in asked[8:16]], [r.platform for r in asked[16:]]
    assert tpu_first == ["tpu"] * 4 + ["cuda"] * 4 and gpu_first == tpu_first[::-1]


def test_no_number_of_the_programs_is_forgotten(tmp_path):
    recipe = load(NET)
    made = training_step(recipe, Layout.of(recipe, 4), resident=False)
    changed = dataclasses.replace(made, cut=made.size - 8, gathered=5)
    file = tmp_path / "it.json"
    file.write_text(json.dumps(trace_cache._document(changed)))
    read = trace_cache._read(file, recipe, changed.layout, lambda: changed)
    assert read.exchanges == changed.exchanges and read.sums == changed.sums
    numbers = {f.name for f in dataclasses.fields(made) if isinstance(getattr(made, f.name), int)}
    assert {name: getattr(read, name) for name in numbers} == {n: getattr(changed, n) for n in numbers}


@pytest.mark.parametrize("settings", [["batch=128"], ["precision=bf16"], ["lr=0.02", "clip=1.0"]])
def test_other_settings_are_other_programs(tmp_path, traced, asked, settings):
    planned(tmp_path, "v5e-1")
    keys = drained(asked)
    planned(tmp_path, "v5e-1", settings=settings)
    assert len(traced) == 2 and set(drained(asked)) - set(keys)


@pytest.mark.parametrize("what", ["_sources", "installed"])
def test_other_sources_or_libraries_are_asked_again(tmp_path, traced, monkeypatch, what):
    planned(tmp_path, "v5e-1")
    monkeypatch.setattr(trace_cache, what, lambda *_: "other")
    planned(tmp_path, "v5e-1")
    assert len(traced) == 2


def test_a_file_that_cannot_be_read_is_made_anew(tmp_path, traced, asked):
    planned(tmp_path, "v5e-1")
    keys, (file,) = drained(asked), files(tmp_path)
    for times, text in enumerate(["", "[]", '{"programs": 3}'], 2):
        file.write_text(text)
        for _ in range(2):
            planned(tmp_path, "v5e-1")
            assert drained(asked) == keys and len(traced) == times


@pytest.mark.parametrize("precision", ["f32", "bf16"])  # f32 is compiled in one pass
def test_a_program_that_must_be_compiled_again_is_traced_again(tmp_path, traced, asked, precision):
    bodies = []
    for _ in range(2):
        planned(tmp_path, "v5e-1", settings=[f"precision={precision}"])
        programs = [request.program for request in asked if isinstance(request.program, Exported)]
        written = (jax.export.deserialize(bytearray(p.body)).mlir_module() for p in programs)
        bodies.append([tracing._LOCATION.sub("", text) for text in written])
        asked.clear()
    assert len(traced) == 2 and bodies[0] == bodies[1] and bodies[0]


def test_chips_with_other_kernels_do_not_share_what_is_remembered(tmp_path, asked, monkeypatch):
    tiny = ["depth=1", "width=256", "heads=2", "context=1024", "vocabulary=256", "batch=8", "replicas=8"]

    def key(chip):
        monkeypatch.setattr("chipwise.models.chip_traits._ASKED", set())  # as in another process
        planned(tmp_path, chip, settings=tiny, spec="gpt2-124m")
        (replica,) = [request.program.key for request in asked if request.name == "replica"]
        asked.clear()
        return replica

    assert key("v5e-8") == key("v6e-8")  # the same kernels in the same layout
    (file,) = files(tmp_path)
    assert len(json.loads(file.read_text())["programs"]["replica"]["exports"]) == 1
    assert key("v3-8") == key("v2-8") != key("v5e-8")
    assert len(json.loads(file.read_text())["programs"]["replica"]["exports"]) == 2


def test_what_has_an_origin():
    assert origin("mnist", ["lr=1"]) != origin("mnist") != origin("mnist", synthetic=True)
    assert origin("mnist", data="there") is None and origin("net.py:recipe") is None
    assert origin("net.py") is None
