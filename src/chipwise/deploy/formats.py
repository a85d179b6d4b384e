"""Export formats: for each one, how to write a model and how to run the file.

Every export takes the data's columns as stored, in batches of any size or of one, and computes in
float32.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..base import DataError, RecipeError, library, near
from ..base.figures import one_line
from ..base.files import system_errors
from ..data.sources import Spec
from ..recipe.source import rows_of
from ..recipe.user_code import any_batch
from ..run.folder.checkpoint import flatten
from ..run.predict import prediction
from .huggingface import folder_files
from .model import Trained
from .peft import adapter_files
from .pretrained import load_arrays, pretrained, safetensors
from .weight_names import NamedArrays, model_tree

Runner = Callable[[NamedArrays], NamedArrays]
PLATFORMS = ("cpu", "cuda", "rocm", "tpu")
_ADAPTERS = "adapter_model.safetensors"


@dataclass(frozen=True)
class Request:
    """What to export."""

    model: Trained
    """The trained model, in float32."""
    inputs: Spec
    """The columns that the model reads."""
    outputs: Mapping[str, str]
    """The name of each output, mapped to its name in the file."""
    batch: int | None = None
    """The number of examples that the file takes. None for any."""

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
    """An export format."""

    suffix: str
    """The suffix of its files or folders."""
    write: Callable[[Request, Path], None]
    """`write(request, path)` writes the file."""
    open: Callable[[Request, Path], Runner | None]
    """`open(request, path)` loads the file with the library that users have. It returns a function
    that runs the file. It returns None if the file holds only weights, after it has compared
    them."""
    runs: str
    """The name of that library."""


# ---- StableHLO: every model, on every chip


def _write_stablehlo(request: Request, path: Path) -> None:
    library("flatbuffers", "export-library", extra="export")
    from jax import export

    function = request.function
    outputs = request.outputs

    def named(inputs: dict[str, jax.Array]) -> dict[str, jax.Array]:
        return {outputs[name]: value for name, value in function(inputs).items()}

    with any_batch("stablehlo", request.batch) as batch:
        shapes = rows_of(request.inputs, batch)
        exported = export.export(jax.jit(named), platforms=PLATFORMS)(shapes)
    path.write_bytes(exported.serialize())


def _open_stablehlo(request: Request, path: Path) -> Runner:
    from jax import export

    run = jax.jit(export.deserialize(bytearray(path.read_bytes())).call)
    return lambda inputs: {name: np.asarray(value) for name, value in run(inputs).items()}


# ---- ONNX


def _write_onnx(request: Request, path: Path) -> None:
    from .onnx import to_onnx

    given = (request.function, request.inputs, request.outputs, request.about)
    model = to_onnx(*given, batch=request.batch)
    import onnx

    if model.ByteSize() >= onnx.checker.MAXIMUM_PROTOBUF:
        raise RecipeError(
            "onnx-too-large", size=model.ByteSize(), limit=onnx.checker.MAXIMUM_PROTOBUF
        )
    onnx.checker.check_model(model)
    path.write_bytes(model.SerializeToString())


def _open_onnx(request: Request, path: Path) -> Runner:
    runtime = library("onnxruntime", "export-library", extra="onnx")
    options = runtime.SessionOptions()
    options.log_severity_level = 4
    session: Any = None

    def run(inputs: NamedArrays) -> NamedArrays:
        nonlocal session
        try:
            session = session or runtime.InferenceSession(
                str(path), options, providers=["CPUExecutionProvider"]
            )
            names = [one.name for one in session.get_outputs()]
            return dict(zip(names, session.run(names, inputs), strict=True))
        except Exception as error:  # its errors have no common base class
            raise RecipeError(
                "export-unrunnable", library="onnxruntime", reason=one_line(error)
            ) from error

    return run


# ---- safetensors: only the weights


def weights_of(model: Trained) -> NamedArrays:
    """Parameters and state by name, such as `params.conv.kernel` and `state.norm.mean`."""
    arrays = flatten(model_tree(model.params, model.state))
    return {name: np.asarray(value, order="C") for name, value in arrays.items()}


def _write_safetensors(request: Request, path: Path) -> None:
    _save(weights_of(request.model), path, {"format": "np", **request.about})


def _save(arrays: NamedArrays, path: Path, about: Mapping[str, str]) -> None:
    """Writes a `.safetensors` file whose bytes depend on its contents alone, with the mode of any
    new file. The library orders `about` by chance, and keeps the file from other users."""
    path.touch()
    mode = path.stat().st_mode
    with system_errors(path):
        safetensors().save_file(arrays, path, dict(about))
    path.chmod(mode)
    with open(path, "r+b") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        file.seek(8)
        file.write(text.ljust(length))


def _open_safetensors(request: Request, path: Path) -> None:
    """Reads the weights back: they must be the same bits."""
    _compare_bits(load_arrays(path), weights_of(request.model))


def _compare_bits(read: NamedArrays, weights: NamedArrays) -> None:
    differ = [
        name
        for name, a in weights.items()
        if name not in read or read[name].tobytes() != a.tobytes()
    ]
    if differ or len(read) != len(weights):
        raise RecipeError("export-weights-differ", names=differ or sorted(read))


# ---- PEFT: only the adapters


def _write_peft(request: Request, path: Path) -> None:
    config, arrays = adapter_files(request.model)
    text = json.dumps(config, indent=2) + "\n"
    _write_folder(request, path, {"adapter_config.json": text.encode()}, _ADAPTERS, arrays)


def _open_peft(request: Request, path: Path) -> None:
    """Like `_open_safetensors`, for a folder of adapters."""
    read = load_arrays(path / _ADAPTERS)
    _compare_bits(read, adapter_files(request.model)[1])


def _write_folder(
    request: Request, path: Path, files: Mapping[str, bytes], name: str, arrays: NamedArrays
) -> None:
    """Writes a folder of `files`, and of `arrays` in the file `name`."""
    path.mkdir()
    for file, content in files.items():
        (path / file).write_bytes(content)
    _save(arrays, path / name, {"format": "pt", **request.about})


# ---- Hugging Face: a folder that transformers loads


def _write_huggingface(request: Request, path: Path) -> None:
    files, arrays = folder_files(request.model)
    _write_folder(request, path, files, "model.safetensors", arrays)


def _open_huggingface(request: Request, path: Path) -> None:
    """Reads the folder like one of transformers. The weights must have the same bits again."""
    weights = {
        n.partition(".")[2]: a.astype(np.float32) for n, a in weights_of(request.model).items()
    }
    _compare_bits(pretrained(path).arrays, weights)


WEIGHTS = ("safetensors", "peft", "huggingface")
FORMATS = {
    "stablehlo": Format(".stablehlo", _write_stablehlo, _open_stablehlo, "jax.export"),
    "onnx": Format(".onnx", _write_onnx, _open_onnx, "onnxruntime"),
    "safetensors": Format(".safetensors", _write_safetensors, _open_safetensors, "safetensors"),
    "peft": Format(".peft", _write_peft, _open_peft, "safetensors"),
    "huggingface": Format(".huggingface", _write_huggingface, _open_huggingface, "safetensors"),
}
"""Its name on the command line to each format."""


def format_named(name: str) -> Format:
    """The format called `name`. Raises `DataError` for an unknown name."""
    if name not in FORMATS:
        raise DataError("export-format", name=name, known=list(FORMATS), near=near(name, FORMATS))
    return FORMATS[name]
