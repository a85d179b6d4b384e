"""TensorFlow's SavedModel through `jax2tf`: the program as StableHLO, the weights as variables."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import jax
import numpy as np

from ..data.sources import Spec
from ..errors import RecipeError
from .formats import PLATFORMS, Arrays, Request, Runner, library

SIGNATURE = "serving_default"


def _tensorflow() -> tuple[Any, Any]:
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # or TensorFlow logs its start
    tensorflow = library("tensorflow", "tensorflow")
    try:
        from jax.experimental import jax2tf
    except ImportError as error:
        text = "JAX {jax} has no jax2tf, which writes a SavedModel: export to stablehlo or onnx."
        raise RecipeError("export-without-bridge", text, jax=jax.__version__) from error
    return tensorflow, jax2tf


def _shape(spec: Any) -> str:
    return ", ".join(["batch", *map(str, spec.shape)])


def write(request: Request, path: Path) -> None:
    """Writes the folder `path`. Raises `RecipeError` without TensorFlow."""
    tensorflow, jax2tf = _tensorflow()
    function, weights = request.split
    inputs: Spec = request.inputs
    converted = jax2tf.convert(
        function,
        polymorphic_shapes=[None, {name: f"({_shape(spec)})" for name, spec in inputs.items()}],
        native_serialization_platforms=PLATFORMS,
        with_gradient=False,
    )
    module = tensorflow.Module()
    module.weights = [tensorflow.Variable(leaf, trainable=False) for leaf in weights]

    def serve(**columns: Any) -> Any:
        return converted([variable.value() for variable in module.weights], columns)

    traced = tensorflow.function(serve, autograph=False)
    specs = {
        name: tensorflow.TensorSpec((None, *spec.shape), spec.dtype, name) for name, spec in inputs.items()
    }
    concrete = traced.get_concrete_function(**specs)
    module.serve = traced
    tensorflow.saved_model.save(module, str(path), signatures={SIGNATURE: concrete})


def open_again(request: Request, path: Path) -> Runner:
    """A function that runs the folder `path` in TensorFlow."""
    tensorflow, _ = _tensorflow()
    loaded = tensorflow.saved_model.load(str(path))
    run = loaded.signatures[SIGNATURE]

    def runner(inputs: Arrays) -> Arrays:
        outputs = run(**{name: tensorflow.constant(column) for name, column in inputs.items()})
        return {name: np.asarray(value) for name, value in outputs.items()}

    runner.model = loaded  # type: ignore[attr-defined]  # whose variables go with it
    return runner
