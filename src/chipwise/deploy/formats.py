"""Export formats: for each one, how to write a model and how to run the file.

Every export takes the data's columns as stored, in batches of any size, and computes in float32.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..data.sources import Spec
from ..engine.checkpoint import flatten
from ..engine.predict import prediction
from ..errors import DataError, RecipeError, near
from ..words.figures import one_line
from .model import Trained

Arrays = dict[str, np.ndarray]
Runner = Callable[[Arrays], Arrays]
PLATFORMS = ("cpu", "cuda", "rocm", "tpu")


@dataclass(frozen=True)
class Request:
    """What to export.

    *Fields:* `model`, in float32; `inputs`; `outputs`, mapped to their names in the file; `module`: the
    module of another framework that the model came from, if any.
    """

    model: Trained
    inputs: Spec
    outputs: Mapping[str, str]
    module: Any = None

    @property
    def function(self) -> Callable:
        """`inputs -> outputs`, with the trained weights as constants."""
        run = prediction(self.model.recipe)
        params, state = jax.tree.map(jnp.asarray, (self.model.params, self.model.state))
        return lambda inputs: run(params, state, inputs)

    @property
    def about(self) -> dict[str, str]:
        """Short texts to store with a model."""
        names = {"classes": "\n".join(self.model.class_names)} if self.model.class_names else {}
        about = {"recipe": self.model.recipe.name, "steps": str(self.model.steps)}
        return {**about, "fingerprint": self.model.fingerprint, **names}


@dataclass(frozen=True)
class Format:
    """*Fields:* `suffix` of its files; `write(request, path)`; `open(request, path)`, which loads the file
    with the library that users have, and returns a function that runs it; `runs`: that library's name."""

    suffix: str
    write: Callable[[Request, Path], None]
    open: Callable[[Request, Path], Runner]
    runs: str


def library(name: str, extra: str = "export") -> Any:
    """Imports an optional library. Raises `RecipeError` with the pip line if it is missing."""
    try:
        return import_module(name)
    except ImportError as error:
        text = "{library} is not installed: pip install 'chipwise[{extra}]'"
        raise RecipeError("export-library", text, library=name.partition(".")[0], extra=extra) from error


# ---- StableHLO: every model, on every chip


def _write_stablehlo(request: Request, path: Path) -> None:
    library("flatbuffers")
    from jax import export

    (batch,) = export.symbolic_shape("batch")
    shapes = {n: jax.ShapeDtypeStruct((batch, *s.shape), s.dtype) for n, s in request.inputs.items()}
    function, outputs = request.function, request.outputs

    def named(inputs: dict[str, jax.Array]) -> dict[str, jax.Array]:
        return {outputs[name]: value for name, value in function(inputs).items()}

    path.write_bytes(export.export(jax.jit(named), platforms=PLATFORMS)(shapes).serialize())


def _open_stablehlo(request: Request, path: Path) -> Runner:
    from jax import export

    run = jax.jit(export.deserialize(bytearray(path.read_bytes())).call)
    return lambda inputs: {name: np.asarray(value) for name, value in run(inputs).items()}


# ---- ONNX


def _write_onnx(request: Request, path: Path) -> None:
    onnx = library("onnx")
    from .onnx import to_onnx

    model = to_onnx(request.function, request.inputs, request.outputs, request.about)
    if model.ByteSize() >= onnx.checker.MAXIMUM_PROTOBUF:
        text = (
            "An ONNX file holds at most {limit:bytes}; this model has {size:bytes}. Export it to stablehlo."
        )
        raise RecipeError("onnx-too-large", text, size=model.ByteSize(), limit=onnx.checker.MAXIMUM_PROTOBUF)
    onnx.checker.check_model(model)
    path.write_bytes(model.SerializeToString())


def _open_onnx(request: Request, path: Path) -> Runner:
    runtime = library("onnxruntime")
    options = runtime.SessionOptions()
    options.log_severity_level = 3
    try:
        session = runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # its errors have no common base class
        text = "{library} cannot run the exported model: {reason}"
        reason = one_line(error)
        raise RecipeError("export-unrunnable", text, library="onnxruntime", reason=reason) from error
    names = [one.name for one in session.get_outputs()]
    return lambda inputs: dict(zip(names, session.run(names, inputs), strict=True))


# ---- safetensors: only the weights


def weights_of(model: Trained) -> Arrays:
    """Parameters and state by name, such as `params.conv.kernel` and `state.norm.mean`."""
    tree = {"params": model.params, "state": model.state}
    return {name: np.asarray(value, order="C") for name, value in flatten(tree).items()}


def _write_safetensors(request: Request, path: Path) -> None:
    numpy = library("safetensors.numpy")
    numpy.save_file(weights_of(request.model), str(path), {"format": "np", **request.about})


def _open_safetensors(request: Request, path: Path) -> Runner:
    numpy = library("safetensors.numpy")
    read = numpy.load_file(str(path))
    tree = {"params": request.model.params, "state": request.model.state}
    restored = jax.tree.unflatten(jax.tree.structure(tree), [read[name] for name in flatten(tree)])
    run = jax.jit(prediction(request.model.recipe))

    def runner(inputs: Arrays) -> Arrays:
        outputs = run(restored["params"], restored["state"], inputs)
        return {request.outputs[name]: np.asarray(value) for name, value in outputs.items()}

    return runner


# ---- PyTorch and Keras, for models that came from there


def _born(request: Request, framework: str, kind: type) -> Any:
    """The framework's module that gets the weights. Raises `RecipeError` if there is none."""
    module = request.module
    if module is not None and not isinstance(module, kind) and callable(module):
        module = module()  # a function that makes a module, as `cw.torch.task` takes too
    task = request.model.recipe.task
    if task.origin is None or task.origin.framework != framework:
        text = "{format}: this model did not come from there. Export it to onnx, stablehlo or safetensors."
        raise RecipeError("export-not-born", text, format=framework)
    if not isinstance(module, kind):
        text = "{format}: give the task's own model, module= or --module FILE.py:NAME; got {got}."
        raise RecipeError("export-module", text, format=framework, got=type(module).__name__)
    return module


def _arguments(request: Request, inputs: Arrays) -> tuple[tuple, dict[str, Any]]:
    """The module's arguments, as writable NumPy copies."""
    origin = request.model.recipe.task.origin
    assert origin is not None  # as `_born` has seen
    given = origin.arguments({n: jnp.asarray(c) for n, c in inputs.items()}, request.model.params)
    return jax.tree.map(np.array, given)


def _named_outputs(request: Request, result: Any) -> Arrays:
    outputs = result if isinstance(result, dict) else {"outputs": result}
    return {request.outputs[name]: np.asarray(value) for name, value in outputs.items()}


def _write_torch(request: Request, path: Path) -> None:
    torch = library("torch", "torch")
    from ..interop.torch import to_module

    module = copy.deepcopy(_born(request, "torch", torch.nn.Module))
    torch.save(to_module(module, request.model.params, request.model.state).state_dict(), path)


def _open_torch(request: Request, path: Path) -> Runner:
    torch = library("torch", "torch")
    module = copy.deepcopy(_born(request, "torch", torch.nn.Module))
    module.load_state_dict(torch.load(path, weights_only=True))
    module.eval()

    def runner(inputs: Arrays) -> Arrays:
        args, kwargs = jax.tree.map(torch.from_numpy, _arguments(request, inputs))
        with torch.no_grad():
            outputs = module(*args, **kwargs)
        return _named_outputs(request, jax.tree.map(lambda t: t.numpy(), outputs))

    return runner


def _write_keras(request: Request, path: Path) -> None:
    from ..interop.keras import keras_library, to_model

    keras = keras_library()
    model = _born(request, "keras", keras.Model)
    before = [(variable, np.asarray(jax.device_get(variable.value))) for variable in model.variables]
    try:
        to_model(model, request.model.params, request.model.state).save(path)
    finally:
        for variable, value in before:
            variable.assign(value)


def _open_keras(request: Request, path: Path) -> Runner:
    from ..interop.adapter import own_promotion
    from ..interop.keras import keras_library

    model = keras_library().saving.load_model(path, compile=False)  # its safe mode runs no code of the file

    def runner(inputs: Arrays) -> Arrays:
        args, kwargs = _arguments(request, inputs)
        with own_promotion():
            return _named_outputs(request, model(*args, **kwargs, training=False))

    return runner


FORMATS = {
    "stablehlo": Format(".stablehlo", _write_stablehlo, _open_stablehlo, "jax.export"),
    "onnx": Format(".onnx", _write_onnx, _open_onnx, "onnxruntime"),
    "safetensors": Format(".safetensors", _write_safetensors, _open_safetensors, "safetensors"),
    "torch": Format(".pt", _write_torch, _open_torch, "PyTorch"),
    "keras": Format(".keras", _write_keras, _open_keras, "Keras"),
}
"""Its name on the command line to each format."""


def format_named(name: str) -> Format:
    """The format called `name`. Raises `DataError` for an unknown name."""
    if name not in FORMATS:
        text = "No format {name!r}: expected {known:or}.{near:near}"
        raise DataError("export-format", text, name=name, known=list(FORMATS), near=near(name, FORMATS))
    return FORMATS[name]
