"""Reads weights of Keras (`.weights.h5`) and Orbax as arrays by name. Nothing in a file is executed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jax
import numpy as np

from ..atomic import ORBAX_SMALL, check_inside
from ..engine.checkpoint import flatten, refuse_hollow, stated_bytes
from ..errors import DataError
from .formats import library

_NORM = ("gamma", "beta", "moving_mean", "moving_variance")
_VARIABLES = {"batch_normalization": _NORM, "layer_normalization": _NORM[:2], "embedding": ("embeddings",)}
_KERNEL = ("kernel", "bias")
"""Keras numbers a layer's variables in the order in which it makes them."""


def keras(file: Path) -> dict[str, np.ndarray]:
    """Arrays named as by `cw.keras.task`, such as `conv2d.kernel`: by the layer's given name, or else by its
    kind and number in the file."""
    h5py = library("h5py", "keras")
    arrays: dict[str, np.ndarray] = {}
    with h5py.File(file, "r") as h5:
        groups: dict[str, Any] = {}
        h5.visititems(groups.__setitem__)  # does not follow links out of the file
        named: dict[str, str] = {}
        for name, item in sorted(groups.items(), key=lambda pair: _natural(pair[0])):
            if not isinstance(item, h5py.Dataset):
                continue
            layer, _, index = name.partition("/vars/")
            if layer not in named:
                named[layer] = _layer(layer, str(groups[f"{layer}/vars"].attrs.get("name", "")), named)
            if item.dtype.kind not in "fiub" or item.external or item.id.get_storage_size() < item.nbytes:
                raise DataError("weights-damaged", path=file, reason=f"{name} is not whole in it")
            arrays[f"{named[layer]}.{_variable(layer, index)}"] = item[()]
    return arrays


def _natural(name: str) -> list[Any]:
    return [(int(part), "") if part.isdecimal() else (0, part) for part in re.split(r"(\d+)", name)]


def _layer(path: str, given: str, named: dict[str, str]) -> str:
    """The name of the layer at `layers/conv2d_1`, which the user or Keras's counter called `given`."""
    above = [part for part in path.split("/")[:-1] if part != "layers"]
    kind = _kind(path)
    if given and re.sub(r"_\d+$", "", given) != kind:
        return ".".join([*above, given])
    plain = ".".join([*above, kind])
    number = sum(re.fullmatch(rf"{re.escape(plain)}(_\d+)?", name) is not None for name in named.values())
    return f"{plain}_{number}" if number else plain


def _kind(path: str) -> str:
    return re.sub(r"_\d+$", "", path.rpartition("/")[2])


def _variable(layer: str, index: str) -> str:
    names = _VARIABLES.get(_kind(layer), _KERNEL)
    return names[int(index)] if index.isdecimal() and int(index) < len(names) else index


def is_orbax(folder: Path) -> bool:
    """Whether `folder` is an Orbax checkpoint, or a checkpoint manager's folder."""
    return any((_newest(folder) / name).exists() for name in ("_METADATA", "manifest.ocdbt"))


def orbax(folder: Path) -> dict[str, np.ndarray]:
    """The arrays of a checkpoint, or of a manager's newest one, by their paths in its tree."""
    import orbax.checkpoint as ocp

    newest = _newest(folder).absolute()
    check_inside(newest, *ORBAX_SMALL, f"../{ORBAX_SMALL[0]}")
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
        tree = reader.metadata(newest).item_metadata.tree
        refuse_hollow(stated_bytes(tree), newest)
        host = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree)
        read = reader.restore(newest, args=ocp.args.PyTreeRestore(restore_args=host))
    return {name: np.asarray(leaf) for name, leaf in flatten(read).items() if hasattr(leaf, "dtype")}


def _newest(folder: Path) -> Path:
    steps = [int(one.name) for one in folder.iterdir() if one.is_dir() and one.name.isdecimal()]
    folder = folder / str(max(steps)) if steps else folder
    inside = [folder / name for name in ("default", "params", "state") if (folder / name).is_dir()]
    return inside[0] if inside else folder
