"""One model of the zoo through chipwise's door, beside its own framework.

`measured` yields a row after each column, so that what a process is ended in the middle of is known too.
A column is "yes" or "no", and "" if it was not reached; each "no" has a line among the `causes`.
"""

from __future__ import annotations

import contextlib
import json
import random
import re
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import chipwise as cw
from chipwise.base import ChipwiseError, RecipeError
from chipwise.base.figures import one_line
from chipwise.deploy.model import Trained
from chipwise.interop.adapter import flattened
from chipwise.interop.keras import keras_library, variables_of
from chipwise.machine.compilation_cache import compiled_once

from .zoo_models import BATCH, Candidate, Model, called, made

COLUMNS = ("traces", "outputs", "step", "check", "bits", "back", "export")
"""traces: a `Task` is made. outputs, step: those of evaluation, and the loss and the gradients, are the
framework's own. check: the door's own comparison passes. bits: the same parameters after two steps on 1 and
3 devices. back: in their module the weights give the same outputs. export: a file that runs."""
LEVELS = ("traces", "doors", "all")
"""How much of a row is computed: without comparisons, whether it traces; all but bits, back and ONNX; all."""
OUTPUTS, STEP, FLOAT32 = 1e-5, 1e-4, 1e-3
"""Relative differences in float64, and of what does not compute in it. Modules that cast to float32 inside
come to 1e-6."""
HALF = 50
"""Times as much in float32 where a module computes in half precision, as in the door's own comparison."""
LONGEST = 120

Row = dict[str, Any]


def measured(candidate: Candidate, until: str = "all") -> Iterator[Row]:
    """The row, after each column, `until` one of `LEVELS`."""
    row: Row = {"source": candidate.source, "name": candidate.name, "given": candidate.given}
    row |= dict.fromkeys(COLUMNS, "") | {"random": "", "off": "", "causes": [], "seconds": 0.0}
    began = time.monotonic()
    warnings.simplefilter("ignore")
    ways = (_keras if candidate.source == "keras" else _torch)(candidate, row, until)
    for _ in ways:
        row["seconds"] = round(time.monotonic() - began, 1)
        yield row


def passed(row: Row) -> bool:
    """Whether every column says yes. Keras' door compares nothing when it is called."""
    own = [column for column in COLUMNS if (row["source"], column) != ("keras", "check")]
    return all(row[column] == "yes" for column in own)


def cause(error: Exception) -> str:
    """An error's code and what is special about it, in a line, without a machine's folders."""
    return one_line(re.sub(r"(/[^\s/:]+)+/", "", _told(error)), LONGEST)


def _told(error: Exception) -> str:
    if not isinstance(error, ChipwiseError):
        return f"{type(error).__name__} {error}"
    told = ("where", "operation", "reason", "names", "what", "name", "off")
    known = [name for name in told if name in error.facts]
    facts = known or [name for name in error.facts if name not in ("module", "model", "command")]
    return f"{error.code} " + ", ".join(f"{name}={error.facts[name]}" for name in facts)


@contextlib.contextmanager
def _column(row: Row, name: str) -> Iterator[None]:
    """A context in which `name` is computed: an error is its "no"."""
    row["at"] = name
    try:
        yield
    except Exception as error:
        row[name] = "no"
        row["causes"].append(f"{name}: {cause(error)}")
    else:
        row[name] = row[name] or "yes"
    row.pop("at")


def _off(ours: dict[str, Any], theirs: dict[str, Any]) -> tuple[float, str]:
    """The largest relative difference, and the name of the array that has it. A difference is relative to
    the largest value of its array, at least to a thousandth of that of all."""
    if ours.keys() != theirs.keys():
        return float("inf"), str(sorted(ours.keys() ^ theirs.keys())[:3])
    wide = {name: np.asarray(x, np.float64) for name, x in theirs.items()}
    least = 1e-3 * max((float(np.max(np.abs(x), initial=0)) for x in wide.values()), default=0.0)
    worst, where = 0.0, ""
    for name, x in wide.items():
        scale = max(float(np.max(np.abs(x), initial=0)), least, 1e-12)
        off = float(np.max(np.abs(np.asarray(ours[name], np.float64) - x), initial=0)) / scale
        if not np.isfinite(off):
            return float("inf"), name
        if off > worst:
            worst, where = off, name
    return worst, where


def _equal(row: Row, column: str, ours: dict[str, Any], theirs: dict[str, Any], most: float) -> None:
    off, where = _off(ours, theirs)
    row["off"] = f"{max(off, float(row['off'] or 0)):.0e}"
    if not off <= most:
        row[column] = "no"
        row["causes"].append(f"{column}: off by {off:.1e} at {where}"[:LONGEST])


def _quick(function: Callable) -> Any:
    """A program that runs once is sooner done if the compiler leaves it as it is."""
    return jax.jit(function, compiler_options={"xla_backend_optimization_level": 0})


def _slopes(task: cw.Task, params: Any, state: Any, batch: dict[str, Any], train: bool) -> Any:
    """The loss of a step and its gradients, by name."""

    def mean(params: Any) -> Any:
        total = task.loss(params, state, batch, jax.random.key(1), train)[0]["loss"]
        return total.total / total.count.astype(total.total.dtype)

    with jax.default_matmul_precision("highest"):
        value, slopes = _quick(jax.value_and_grad(mean, allow_int=True))(params)
    return value, slopes


def _recipe(task: cw.Task) -> cw.Recipe:
    # Batch norm over 2 examples of a pixel each has gradients of up to 1e10, in PyTorch as well
    optimizer = cw.sgd(lr=0.01, clip=1.0)
    return cw.Recipe(task=task, batch=BATCH, replicas=3, duration="2st", optimizer=optimizer)


def _exported(task: cw.Task, model: Model, row: Row, kinds: tuple[str, ...]) -> Iterator[None]:
    """The column export, of the weights that the model has."""
    with _column(row, "export"), tempfile.TemporaryDirectory() as folder:
        known = Trained(_recipe(task), *jax.device_get(task.init(jax.random.key(0))))
        data = cw.Arrays(**model.columns)

        def written(batch: int | None) -> None:
            errors = []
            for kind in kinds:
                try:
                    cw.export(known, kind, Path(folder) / f"model.{kind}", data=data, batch=batch)
                except Exception as error:
                    errors.append(error)
                else:
                    return
            # One that differs is not excused by one that wants a batch
            wanting = [getattr(error, "code", "") == "export-any-batch" for error in errors]
            raise errors[wanting.index(False) if False in wanting else 0]

        try:
            written(None)
        except RecipeError as error:
            if error.code != "export-any-batch":
                raise
            written(BATCH)
            row["causes"].append(f"batch={BATCH}: {cause(error)}")
    yield


def _trained(
    task: cw.Task, model: Model, row: Row, back: Callable[[Any], dict[str, Any]], half: int = 1
) -> Iterator[None]:
    """The columns bits and back.

    *Arguments:* `back`: the outputs of the framework with the weights of a `Result`.
    """
    results = []
    with _column(row, "bits"), compiled_once():  # the two runs share programs, as a user's do
        for count in (1, 3):
            results.append(cw.fit(_recipe(task), on=cw.On(devices=count), progress="none"))
        if results[0].fingerprint != results[1].fingerprint:
            row["bits"] = "no"
            row["causes"].append("bits: other parameters on 3 devices than on 1")
    yield
    if not results:
        return
    with _column(row, "back"):
        theirs = back(results[0])
        with jax.default_matmul_precision("highest"):
            outputs = _quick(task.predict)(results[0].params, results[0].state, dict(model.columns))
        _equal(row, "back", _named(outputs), theirs, FLOAT32 * half)
    yield


# ---- PyTorch


def _named(outputs: Any) -> dict[str, Any]:
    """The arrays of floating point in what a model returns, by position."""
    import torch

    from chipwise.interop.torch_trace import plain

    leaves = torch.utils._pytree.tree_leaves(plain(outputs))
    arrays = [x.detach().to(torch.float64).numpy() if isinstance(x, torch.Tensor) else x for x in leaves]
    arrays = [np.asarray(x) for x in arrays if hasattr(x, "dtype")]
    return {str(i): x for i, x in enumerate(arrays) if jnp.issubdtype(x.dtype, jnp.floating)}


def _halves(module: Any, model: Model) -> bool:
    """Whether an operation of the module returns numbers of half precision."""
    import torch

    mode: Any = torch.utils._python_dispatch.TorchDispatchMode
    seen = set()

    class Seeing(mode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            seen.update(str(getattr(x, "dtype", "")) for x in torch.utils._pytree.tree_leaves(result))
            return result

    with Seeing():
        _training(module, model, 1)
    return not seen.isdisjoint({"torch.bfloat16", "torch.float16"})


def _answers(module: Any, model: Model) -> dict[str, Any]:
    from chipwise.interop.torch_trace import answers, plain

    return _named(answers(module, plain(called(module, model.columns, False))))


@contextlib.contextmanager
def _buffers_kept(module: Any) -> Iterator[None]:
    """A context after which the buffers are what they were."""
    import torch

    before = {name: buffer.clone() for name, buffer in module.named_buffers()}
    yield
    with torch.no_grad():
        for name, buffer in module.named_buffers():
            buffer.copy_(before[name])


def _training(module: Any, model: Model, seed: int) -> dict[str, Any]:
    import torch

    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)
    with torch.no_grad(), _buffers_kept(module):
        return _named(called(module, model.columns, True))


def _torch(candidate: Candidate, row: Row, until: str) -> Iterator[None]:
    import torch

    torch.set_num_threads(1)
    row["at"] = "traces"
    model = made(candidate)
    other, module = model.make(), model.make()
    drawn = [_training(other, model, seed) for seed in (1, 2, 3)]
    # A layer that is scaled by 1e-6 may be left out
    row["random"] = "yes" if any(_off(drawn[0], other)[0] > 0 for other in drawn[1:]) else ""
    half = HALF if _halves(other, model) else 1
    yield
    task = None
    cached = getattr(getattr(module, "config", None), "use_cache", False)
    if cached:
        row["given"] = json.dumps(candidate.settings | {"use_cache": False})
        _caching(module, False)
    if until != "traces":
        with _column(row, "check"):
            task = cw.torch.task(module, model.loss, train=cw.Arrays(**model.rows()))
    with _column(row, "traces"):
        if task is None:
            task = _unchecked(module, model)
    yield
    if task is None or until == "traces":
        return
    yield from _exported(task, model, row, ("stablehlo", "onnx")[: 1 + (until == "all")])
    yield from _framework_step(model, row, cached, half)
    if cached:
        _as_it_comes(module, model, row)

    def back(result: Any) -> dict[str, Any]:
        fresh = result.to_torch(model.make())
        if cached:
            _caching(fresh, False)
        with torch.no_grad():
            return _answers(fresh, model)

    if until == "all":
        yield from _trained(task, model, row, back, half)


def _unchecked(module: Any, model: Model) -> cw.Task:
    data = cw.Arrays(**model.rows())
    try:
        return cw.torch.task(module, model.loss, train=data, check=False)
    except RecipeError as error:
        # Only a comparison shows that a call forgets its attributes, leaves layers out by chance, and reads
        # no weights of layers that it makes
        if error.code not in ("torch-attribute-moves", "torch-draw-decides", "torch-draws-once"):
            raise
        return cw.torch.task(module, model.loss, train=data)


def _as_it_comes(module: Any, model: Model, row: Row) -> None:
    """A configuration's cache of keys is on by default. Adds a cause if it does not trace."""
    _caching(module, True)
    try:
        _unchecked(module, model)
        given = json.loads(row["given"])
        row["given"] = json.dumps({name: given[name] for name in given if name != "use_cache"})
    except Exception as error:
        row["causes"].append(f"use_cache: {cause(error)}")
    finally:
        _caching(module, False)


def _caching(module: Any, used: bool) -> None:
    for part in module.modules():
        if hasattr(getattr(part, "config", None), "use_cache"):
            part.config.use_cache = used


def _framework_step(model: Model, row: Row, cached: bool, half: int) -> Iterator[None]:
    """The columns outputs and step, in float64 if the module computes in it. A module that draws is
    differentiated in evaluation mode."""
    train = not row["random"]
    exact, most = True, (OUTPUTS, STEP)
    wide = model.make().double()
    if cached:
        _caching(wide, False)
    try:
        theirs = _eager_step(wide, model, train)
        if not np.isfinite(theirs[2]):
            raise RuntimeError("float64's least number is -inf in float32")
    except RuntimeError:  # it computes in float32 by itself
        exact, most, wide = False, (FLOAT32, 20 * FLOAT32), wide.float()
        theirs = _eager_step(wide, model, train)
    task: Any = None
    with jax.enable_x64(exact):
        with _column(row, "outputs"):
            task = _unchecked(wide, model)
            params, state = task.init(jax.random.key(0))
            with jax.default_matmul_precision("highest"):
                outputs = _quick(task.predict)(params, state, dict(model.columns))
            _equal(row, "outputs", _named(outputs), theirs[0], most[0] * (1 if exact else half))
        yield
        if task is None:
            return
        with _column(row, "step"):
            value, slopes = _slopes(task, params, state, model.rows(), train)
            ours = {n: x for n, x in flattened(slopes, ".").items() if n in theirs[1]}
            _equal(row, "step", ours | {"loss": value}, theirs[1] | {"loss": theirs[2]}, most[1])
    yield


def _eager_step(module: Any, model: Model, train: bool) -> tuple[dict, dict, float]:
    """The outputs in evaluation, the gradients and the loss of eager PyTorch."""
    import torch

    with torch.no_grad():
        outputs = _answers(module, model)
    label = torch.from_numpy(model.label).long()
    with _buffers_kept(module):
        loss = model.loss(called(module, model.columns, train), label)
        trained = {n: p for n, p in module.named_parameters() if p.requires_grad}
        slopes = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
    pairs = zip(trained.items(), slopes, strict=True)
    named = {name: torch.zeros_like(p) if slope is None else slope for (name, p), slope in pairs}
    return outputs, {name: slope.double().numpy() for name, slope in named.items()}, float(loss.detach())


# ---- Keras


def _keras(candidate: Candidate, row: Row, until: str) -> Iterator[None]:
    keras = keras_library()
    row["at"] = "traces"
    model = made(candidate)
    net = model.make()
    drawing = [
        one for one in net._flatten_layers() if getattr(one, "rate", 0) or getattr(one, "drop_path_rate", 0)
    ]
    row["random"] = "yes" if drawing else ""
    data, task = cw.Arrays(**model.rows()), None
    with _column(row, "traces"):
        task = cw.keras.task(net, model.loss, train=data)
    yield
    if task is None or until == "traces":
        return
    params, state = task.init(jax.random.key(0))
    with _column(row, "outputs"):
        theirs = np.asarray(net(model.columns["image"], training=False))
        outputs = _quick(task.predict)(params, state, dict(model.columns))
        _equal(row, "outputs", {"0": np.asarray(outputs)}, {"0": theirs}, FLOAT32)
    yield
    with _column(row, "step"):
        still = model.make()
        for one in still._flatten_layers():
            for name in ("rate", "drop_path_rate"):
                if getattr(one, name, 0):
                    setattr(one, name, 0.0)
        quiet = cw.keras.task(still, model.loss, train=data)
        slopes = _slopes(quiet, *quiet.init(jax.random.key(0)), model.rows(), True)[1]
        own = variables_of(still)[0]
        before = {name: np.array(v.value) for name, v in own.items()}
        still.compile(keras.optimizers.SGD(1.0), model.loss)
        still.train_on_batch(model.columns["image"], model.label)
        theirs = {name: before[name] - np.asarray(v.value) for name, v in own.items()}
        ours = {n: np.asarray(x) for n, x in flattened(slopes, "/").items()}
        _equal(row, "step", ours, theirs, 20 * FLOAT32)
    yield

    def back(result: Any) -> dict[str, Any]:
        fresh = result.to_keras(model.make())
        return {"0": np.asarray(fresh(model.columns["image"], training=False))}

    yield from _exported(task, model, row, ("stablehlo", "onnx"))
    if until == "all":
        yield from _trained(task, model, row, back)
