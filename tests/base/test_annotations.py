"""What a user gives a public name is held against its annotation before anything happens."""

import collections.abc
import dataclasses
import datetime
import inspect
import math
import operator
import os
import pickle
import pkgutil
import sys
import types
import typing
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import chipwise as cw
import tasks
from chipwise.base import elsewhere
from chipwise.base.annotations import as_annotated
from chipwise.base.errors import ChipwiseError, RecipeError
from chipwise.data.pack.pack_settings import PackSettings, TextForm
from refusals import refused
from test_public import documented

ANSWERS = """
Compiled Event Export Finding Generated Kernel LrSearch Parting Plan Predictions Result Ruling Study
Transfer Weights
""".split()  # noqa: SIM905
"""What chipwise makes and a user reads."""
FREE = "Sum stage materialize nbytes spec_of wide digits Cached".split()  # noqa: SIM905
"""Called for each step or example, or for anything at all, or without arguments."""
MODELS = "BatchNorm GPT2 ResNet50".split()  # noqa: SIM905
"""Modules of Flax, whose layers take their arguments."""
KINDS = {
    "flag": True,
    "whole": 3,
    "number": 2.2,
    "nan": math.nan,
    "complex": 2j,
    "text": "no",
    "bytes": b"no",
    "none": None,
    "list": [1, "a", None],
    "dict": {3: object()},
    "set": {1},
    "object": object(),
    "class": dict,
    "call": len,
    "path": Path("no"),
    "array": np.zeros((2, 2)),
    "flags": np.zeros(2, bool),
}


def public():
    """The functions and classes that users call, by path: those of the lists of names, and the documented."""
    homes = {"": cw} | {f".{name}": getattr(cw, name) for name in cw._PACKAGES.split()}
    paths = {f"chipwise{home}.{name}" for home, package in homes.items() for name in package.__all__}
    found = {path: pkgutil.resolve_name(path) for path in sorted({*paths, *documented()})}
    called = {
        value: path
        for path, value in found.items()
        if isinstance(value, types.FunctionType) or (isinstance(value, type) and value.__init__ is not object)
    }
    return {
        path.removeprefix("chipwise."): value
        for value, path in called.items()
        if value.__module__.startswith("chipwise.")
        and not (isinstance(value, type) and issubclass(value, Exception))
        and path.rpartition(".")[2] not in {*ANSWERS, *FREE, *MODELS}
    }


def allowed(hint):
    """The KINDS that an annotation does not exclude."""
    kind, inside = typing.get_origin(hint) or hint, typing.get_args(hint)
    if kind in (typing.Union, types.UnionType):
        return set().union(*map(allowed, inside))
    if kind is typing.Annotated:
        return set().union(*(allowed(one) for one in inside if not isinstance(one, str)))
    plain = {bool: {"flag"}, int: {"whole"}, float: {"whole", "number", "nan"}, str: {"text"}}
    plain |= {types.NoneType: {"none"}, Path: {"path"}, os.PathLike: {"path"}, datetime.date: set()}
    if kind in plain:
        return plain[kind]
    protocol = getattr(kind, "_is_protocol", False)
    if kind is collections.abc.Callable or (protocol and "__call__" in vars(kind)):
        return {"call", "class"}
    if kind in (list, tuple, collections.abc.Sequence, collections.abc.Iterable):
        anything = not inside or typing.Any in inside
        numbers = inside and inside[0] is float and len(inside) < 2
        return {"list", "array", "flags"} if anything else {"array"} if numbers else set()
    if kind in (dict, collections.abc.Mapping):
        return {"dict"} if not inside else set()
    own = isinstance(kind, type) and kind.__module__.startswith("chipwise.")
    return set() if own and not protocol else set(KINDS)


def needed(called):
    """Arguments without which a call says what is missing, before it looks at others."""
    recipe = tasks.quick()
    names = ("task", "batch", "duration", "optimizer") if called is cw.Recipe else ()
    return {name: getattr(recipe, name) for name in names}


def cases():
    for path, called in public().items():
        function = called.__init__ if isinstance(called, type) else called
        hints = typing.get_type_hints(function, include_extras=True)
        for name, parameter in inspect.signature(called).parameters.items():
            yield pytest.param(called, parameter, hints.get(name, typing.Any), id=f"{path}-{name}")


@pytest.mark.parametrize(("called", "parameter", "hint"), list(cases()))
def test_what_an_annotation_excludes_is_refused(called, parameter, hint):
    for kind in KINDS.keys() - allowed(hint):
        value = KINDS[kind]
        several = parameter.kind is parameter.VAR_POSITIONAL
        named = needed(called) | ({} if several else {parameter.name: value})
        with refused(RecipeError, "wrong-kind") as caught:
            called(*([value] * several), **named)
        assert caught.value.facts["what"] == parameter.name


@pytest.mark.parametrize("kind", [PackSettings, TextForm])
def test_settings_say_their_types_while_running(kind):
    assert typing.get_type_hints(kind).keys() == {field.name for field in dataclasses.fields(kind)}


def test_most_parameters_say_what_they_take():
    """A parameter of any kind is held by nothing: these are few, and the function's own."""
    said = [bool(KINDS.keys() - allowed(case.values[2])) for case in cases()]
    assert len(said) > 400 and sum(said) > 0.75 * len(said)


TABLE = np.arange(12.0).reshape(6, 2).astype(np.float32)
ROWS = cw.Arrays(x=TABLE, label=np.arange(6, dtype=np.int32) % 2)
LOGITS = jnp.asarray(TABLE), jnp.asarray(ROWS.columns["label"])
SPEC = {"x": jax.ShapeDtypeStruct((2,), np.float32)}
INNER = cw.sgd(lr=0.1)
MADE = {
    cw.On: {},
    cw.Recipe: {},
    cw.Task: {"init": len, "loss": len, "train": ROWS},
    cw.recipe.Validated: {"source": "a page"},
    cw.sgd: {"lr": 0.1},
    cw.adam: {"lr": 0.1},
    cw.adamw: {"lr": 0.1},
    cw.recipe.lamb: {"lr": 0.1},
    cw.recipe.lars: {"lr": 0.1},
    cw.recipe.muon: {"lr": 0.1},
    cw.recipe.grouped: {"inner": INNER, "groups": {"a/*": {"lr": 2}}},
    cw.recipe.layerwise: {"inner": INNER, "layers": ["a/*", "b/*"]},
    cw.recipe.lora: {"rank": 2, "alpha": 4, "on": "w"},
    cw.from_optax: {"make": optax.lion, "learning_rate": 0.1},
    cw.schedules.constant: {"value": 0.1},
    cw.schedules.linear: {"start": 0.1, "end": 0},
    cw.schedules.cosine: {"peak": 0.1},
    cw.schedules.one_cycle: {"peak": 0.1},
    cw.schedules.exponential: {"init": 0.1, "decay_rate": 0.5, "decay": "10st"},
    cw.schedules.piecewise: {"pieces": {"0st": 0.1}},
    cw.schedules.tabulated: {"values": [1, 2]},
    cw.schedules.warmup: {"schedule": 0.1, "length": "5st"},
    cw.augment.cutout: {},
    cw.augment.flip: {},
    cw.augment.reflect_crop: {},
    cw.augment.resized_crop: {"size": 8},
    cw.augment.mixup: {"classes": 3},
    cw.augment.cifar: {"mean": 0.5},
    cw.augment.imagenet: {},
    cw.augment.rand_augment: {},
    cw.data.Arrays: {"x": TABLE},
    cw.data.Cached: {"source": ROWS},
    cw.data.Lazy: {"length": 3, "spec": SPEC, "load": dict},
    cw.data.Padded: {"source": [{"x": TABLE[:3]}], "length": 8},
    cw.data.Renamed: {"source": ROWS, "names": ["a", "b"]},
    cw.data.Synthetic: {"length": 3, "spec": SPEC},
    cw.data.Weighted: {"source": ROWS, "weights": np.ones(6)},
    cw.data.Windows: {"series": TABLE, "length": 2, "horizon": 1},
    cw.data.take: {"source": ROWS, "indices": [0]},
    cw.data.spec_of: {"source": ROWS},
    cw.losses.softmax_cross_entropy: dict(zip(("logits", "labels"), LOGITS, strict=True)),
    cw.losses.squared_error: {"predictions": LOGITS[0], "targets": LOGITS[0]},
    cw.losses.correct: dict(zip(("logits", "labels"), LOGITS, strict=True)),
    cw.metrics.accuracy: dict(zip(("logits", "labels"), LOGITS, strict=True)),
    cw.metrics.f1: dict(zip(("logits", "labels"), LOGITS, strict=True)),
    cw.metrics.roc_auc: dict(zip(("logits", "labels"), LOGITS, strict=True)),
    cw.metrics.r2: {"predictions": LOGITS[0], "targets": LOGITS[0]},
    cw.models.remat: {"function": len},
    cw.plan: {"recipe": None, "on": "v5e-8"},
    cw.transfer: {"recipe": None, "batch": 64},
    cw.check: {"recipe": None},
    cw.load: {"spec": "digits", "synthetic": True},
    cw.compare: {},
    cw.report: {"run": "none"},
    cw.result: {"run": "none"},
    cw.pretrained: {"path": "none"},
    cw.predict: {"model": "none"},
    cw.evaluate: {"model": "none"},
    cw.export: {"model": "none", "to": "weights"},
    cw.deploy.generate: {"model": "none", "prompts": "a"},
}
"""Names that start nothing long, with arguments that they need."""
ODD = {
    "zero": 0,
    "minus": -1,
    "large": 2**70,
    "larger": -(10**400),
    "low": -0.5,
    "tiny": 1e-320,
    "high": 1e308,
    "infinite": math.inf,
    "nothing": "",
    "space": " \n",
    "null": "a\0b",
    "lone": "\ud800",
    "long": "a" * 5000,
    "digits": "9" * 5000,
    "other digits": "\u0663ep",
    "empty": [],
    "empty dict": {},
    "texts": ["", "a\0b"],
    "numbers": [math.nan, 1e308, -1],
    "deep": [[[[]]]],
    "pair": (0, -1),
    "lone keys": {"\ud800": "\ud800"},
    "odd dict": {"a": math.nan},
    "null path": Path("a\0b"),
    "narrow": np.float32(math.nan),
    "scalar": np.int64(-(2**63)),
    "strings": np.array(["a", "b"]),
    "none there": np.zeros((0, 3)),
    "objects": np.array([None, object()]),
    "short": type("Short", (), {"__len__": lambda self: 3, "__getitem__": lambda self, i: [0, 1][i]})(),
}


def odd_cases():
    for called, given in MADE.items():
        for name, parameter in inspect.signature(called).parameters.items():
            if parameter.kind is not parameter.VAR_POSITIONAL:
                slow = [pytest.mark.slow] if called is cw.plan else []  # compiles
                yield pytest.param(called, given, name, marks=slow, id=f"{called.__qualname__}-{name}")


@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")
@pytest.mark.parametrize(("called", "given", "name"), list(odd_cases()))
def test_whatever_is_given_is_taken_or_refused(called, given, name, tmp_path, monkeypatch):
    """By name, and never by an error of Python alone."""
    monkeypatch.chdir(tmp_path)
    recipe = tasks.quick()
    given = {key: recipe if (key, value) == ("recipe", None) else value for key, value in given.items()}
    for kind, value in {**KINDS, **ODD}.items():
        if kind in ("call", "class") and name in ("progress", "ready", "say", "show"):
            continue  # functions that are called, whose errors are their own
        try:
            called(**needed(called) | given | {name: value})
        except ChipwiseError as error:
            assert len(str(error)) < 2000 and "\n" not in str(error)
    assert name == "cache" or not list(tmp_path.iterdir())


@as_annotated
def function(a: int, *more: float, flag: bool = False, names: "tuple[str, ...]" = (), **others: str):
    return a, more, flag, names, others


@as_annotated
@dataclass(frozen=True)
class Settings:
    share: float
    pair: tuple[int, int] = (1, 2)
    path: str | Path | None = None
    way: typing.Annotated[str, Path, "a way such as 'up'"] = "up"


@pytest.mark.parametrize("number", [np.int64(3), np.uint8(3), np.array(3), jnp.int32(3)])
def test_whole_numbers_of_any_library_are_numbers_of_python(number):
    assert type(function(number)[0]) is int and type(Settings(number).share) is int


@pytest.mark.parametrize("number", [np.float32(0.5), np.array(0.5), jnp.bfloat16(0.5), 0.5])
def test_numbers_of_any_library_are_numbers_of_python(number):
    assert type(Settings(number).share) is float
    for other in (lambda: function(number), lambda: Settings(0, pair=(1, number))):
        with refused(RecipeError, "wrong-kind"):
            other()


@pytest.mark.parametrize("flag", [True, np.bool_(True), np.array(True), jnp.bool_(True)])
def test_a_flag_is_no_number_and_a_number_no_flag(flag):
    assert function(1, flag=flag)[2] is True
    with refused(RecipeError, "wrong-kind", what="a"):
        function(flag)
    with refused(RecipeError, "wrong-kind", flag=1):
        function(1, flag=1)


class Foreign:
    """A tensor whose kind of numbers is no dtype of NumPy, as in PyTorch and TensorFlow."""

    dtype = object()

    def __init__(self, value, shape=()):
        self.value, self.shape, self.ndim = value, shape, len(shape)

    def item(self):
        return self.value

    def __index__(self):
        return operator.index(self.value)


class WithoutItem(Foreign):
    item = property()


def tensor(value, **how):
    return pytest.importorskip("torch").tensor(value, **how)


@pytest.mark.parametrize("made", [Foreign, tensor])
def test_a_tensor_of_one_number_is_a_number_of_python(made):
    assert type(Settings(made(0.5)).share) is float and Settings(made(0.5)).share == 0.5
    assert type(function(made(3))[0]) is int and function(1, flag=made(True))[2] is True
    for other in (lambda: function(made(0.5)), lambda: function(made(True)), lambda: Settings(made(2j))):
        with refused(RecipeError, "wrong-kind"):
            other()


@pytest.mark.parametrize(
    "made",
    [lambda: Foreign(1, (1,)), lambda: WithoutItem(1), lambda: tensor([1]), lambda: tensor(1, device="meta")],
    ids=["shaped", "without item", "shaped tensor", "tensor without value"],
)
def test_another_tensor_is_no_number(made):
    value = made()
    for other in (lambda: function(value), lambda: Settings(value), lambda: function(1, flag=value)):
        with refused(RecipeError, "wrong-kind"):
            other()


def test_a_traced_number_stays_traced():
    traced = jax.jit(lambda x: Settings(x).share * 2)
    assert traced(jnp.float32(3)) == 6


def test_a_traced_key_is_no_number():
    with refused(RecipeError, "wrong-kind", what="share"):
        jax.jit(lambda key: Settings(key).share)(jax.random.key(0))


def test_lists_tuples_and_arrays_stand_for_each_other_but_no_text_does():
    assert function(1, names=["a"])[3] == ["a"] and Settings(1, [3, 4]).pair == [3, 4]
    assert Settings(1, np.array([3, 4])).pair[1] == 4
    for wrong in ("ab", ["a", 1], {"a": 1}, iter("a")):
        with refused(RecipeError, "wrong-kind", what="names"):
            function(1, names=wrong)
    for wrong in ((1,), (1, 2, 3), (1, "2"), 3):
        with refused(RecipeError, "wrong-kind", what="pair"):
            Settings(1, wrong)


def test_the_error_says_what_was_given_and_what_to_type():
    with refused(
        RecipeError, "wrong-kind", what="flag", value="no", expected="True or False", of="function"
    ) as e:
        function(1, flag="no")
    assert str(e.value) == "flag is 'no': expected True or False."
    with refused(RecipeError, "wrong-kind", expected="a text, a path or None", of="Settings"):
        Settings(1, path=3)
    with refused(RecipeError, "wrong-kind", expected="a way such as 'up'"):
        Settings(1, way=3)
    with refused(RecipeError, "wrong-kind", what="x", value=3):
        function(1, x=3)
    with refused(RecipeError, "wrong-kind", what="more", value="b"):
        function(1, 0.5, "b")
    with refused(RecipeError, "wrong-kind") as long:
        function(np.zeros((100, 100)))
    assert len(str(long.value)) < 500


@pytest.mark.parametrize(
    ("platform", "name", "unit"),
    [
        ("linux", "a" * 255, "255 bytes"),
        ("darwin", "\u6f22" * 255, "255 characters"),
        ("win32", "a" * 300, None),
    ],
)
def test_a_name_is_as_long_as_the_system_says(platform, name, unit, monkeypatch):
    monkeypatch.setattr(sys, "platform", platform)
    if unit:
        monkeypatch.setattr(os, "pathconf", lambda *_: 255, raising=False)
    else:
        monkeypatch.delattr(os, "pathconf", raising=False)
    path = Path("b" * 200, name, "c" * 200)
    assert Settings(1, path=path).path == path and Settings(1, path="").path == ""
    if unit:
        with refused(RecipeError, "path-impossible", expected=f"a path of names of at most {unit}"):
            Settings(1, path=path.with_name(f"{name}a"))
    with refused(RecipeError, "path-impossible", expected="a path without NUL and lone surrogates"):
        Settings(1, path="a\0b")


def test_an_argument_too_many_is_python_s_error():
    for wrong in (lambda: function(), lambda: Settings(1, sahre=2)):
        with pytest.raises(TypeError):
            wrong()


def test_a_class_stays_itself():
    on = cw.On(devices=3)
    assert pickle.loads(pickle.dumps(on)) == on and type(on) is cw.On
    assert list(inspect.signature(cw.fit).parameters)[:2] == ["recipe", "run"]


DOORS = {
    "fit": lambda **more: cw.fit(tasks.quick(), **more),
    "training": lambda **more: cw.training(tasks.quick(), **more),
    "Recipe": lambda **more: cw.Recipe(task=tasks.quick().task, **more),
    "Task": lambda **more: cw.Task(init=len, loss=len, train=[], **more),
    **{
        f"{name}.task": lambda name=name, **more: getattr(cw, name).task(object(), len, train=[], **more)
        for name in ("torch", "keras", "nnx", "linen", "equinox")
    },
}


@pytest.mark.parametrize(
    ("function", "given", "own"),
    [
        (cw.predict, "batch_size", "batch="),
        (cw.evaluate, "batch_size", "batch="),
        (cw.find_lr, "steps_per_epoch", "steps="),
        (cw.predict, "epochs", elsewhere.HERE["epochs"]),
    ],
)
def test_a_function_s_own_name_for_an_argument_comes_first(function, given, own):
    with refused(RecipeError, "argument-elsewhere", name=given, here=own):
        function("run", **{given: 2})


@pytest.mark.parametrize("given", elsewhere.HERE)
@pytest.mark.parametrize("door", DOORS)
def test_what_other_frameworks_call_an_argument_is_told_by_name(door, given):
    with refused(RecipeError, "argument-elsewhere", name=given, here=elsewhere.HERE[given]):
        DOORS[door](**{given: [object()]})
