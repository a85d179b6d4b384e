"""Translates parameters from the names and layouts of other libraries to those of the built-in
models, and back.

`weight_names.toml` has each library's names for the parts of a model and of its blocks. In all
models, PyTorch's kernels are `(out, in, height, width)` and `(out, in)`, here they are
`(height, width, in, out)` and `(in, out)`. Separate arrays for queries, keys and values are joined
to one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from ..base import RecipeError, near
from ..base.files import toml_beside
from ..recipe.random_keys import as_data
from ..recipe.task import Task, Tree
from ..run.folder.checkpoint import flatten

NamedArrays = dict[str, np.ndarray]
"""Arrays by the names that a file has for them."""

_LEAVES = {"bias": "bias", "beta": "bias", "running_mean": "mean", "running_var": "var"}
_WEIGHTS = ("weight", "gamma")
_PARTS = re.compile(r"(.*)\.(query|key|value)\.(kernel|bias)")
_STAGED = re.compile(r"blocks\.(\d+)-(\d+)\.(.*)")
_NUMBERED = re.compile(r"blocks\.(\d+)\.(.*)")


@dataclass(frozen=True)
class WeightNames:
    """A library's names for the parts of a model, as pairs: the library's name and the name here.

    A name here that ends with "embedding" is the name of an array.
    """

    whole: str
    """The parts outside of blocks."""
    block: str
    """A pattern for a block. Its groups are the number of the block, or its stage and its number in
    the stage. Here blocks are numbered over all stages."""
    parts: str
    """The parts of a block."""
    prefix: str = ""
    """An optional prefix of all names."""
    stacked: bool = False
    """Here, arrays of all blocks are stacked along a leading axis."""
    turned: bool = True
    """The library's matrices are `(out, in)`."""

    def find(self, name: str) -> str | None:
        """The name here of a module or an array. Block 1 of stage 2 is `blocks.2-1`."""
        name = name.removeprefix(self.prefix)
        pairs = self.whole
        place = re.match(rf"{self.block}\.", name)
        if place:
            name = name[place.end() :]
            pairs = self.parts
        new = _pairs(pairs).get(name)
        return new if new is None or not place else f"blocks.{'-'.join(place.groups())}.{new}"

    def there(self) -> dict[str, str]:
        """The names there of all modules here: those of a block without its number."""
        return {new: old for old, new in _pairs(f"{self.whole} {self.parts}").items()}

    def begin(self, *place: int) -> str:
        """The beginning of the library's names of a module. *Arguments:* `place`: the block's
        numbers, none for a part of `whole`."""
        block = self.block.replace(r"\.", ".") + "." if place else ""
        for number in place:
            block = block.replace(r"(\d+)", str(number), 1)
        return self.prefix + block


def model_tree(params: Tree, state: Tree) -> Tree:
    """The tree of a model's arrays, which `flatten` names as files do: `params.conv.kernel`. Random
    keys are their words."""
    return as_data({"params": params, "state": state})


def abstract_arrays(task: Task) -> dict[str, Any]:
    """The shapes and types of a task's arrays by name. Computes nothing."""
    return flatten(jax.eval_shape(lambda: model_tree(*task.init(jax.random.key(0)))))


def _pairs(words: str) -> dict[str, str]:
    return dict(zip(words.split()[::2], words.split()[1::2], strict=True))


TABLES = {
    model: tuple(WeightNames(**names) for names in libraries)
    for model, libraries in toml_beside(__file__).items()
}
"""The built-in model to the names that its weights have elsewhere."""


def translate(arrays: NamedArrays, model: str) -> NamedArrays:
    """`arrays` with the names and layouts of the built-in `model`.

    Arrays without a rule keep their names, so that `Weights.match` shows them. PyTorch's counters
    of batches are dropped. Raises `RecipeError` for a model without a table.
    """
    if model not in TABLES:
        raise RecipeError(
            "weights-names", given=model, known=list(TABLES), near=near(model, TABLES)
        )
    libraries = TABLES[model]
    translated = dict(
        _translated(libraries, name, array)
        for name, array in arrays.items()
        if not name.endswith(".num_batches_tracked")
    )
    translated = _counted_through(_joined(translated))
    return _stacked(translated) if libraries[0].stacked else translated


def translated_back(arrays: NamedArrays, model: str, depths: Sequence[int] = ()) -> NamedArrays:
    """The inverse of `translate`: all arrays of the built-in `model` with the names and layouts of
    the last of its libraries, Hugging Face's. `depths`: the blocks of each stage, if blocks are not
    stacked."""
    names = TABLES[model][-1]
    modules = names.there()
    back = {new: old for old, new in _LEAVES.items() if old != "beta"}
    places = [(stage, i) for stage, depth in enumerate(depths) for i in range(depth)]
    made = {}
    for name, array in _apart(arrays, modules):
        at = _NUMBERED.fullmatch(name)
        place, own = (
            ((places[int(at[1])] if places else (int(at[1]),)), at[2]) if at else ((), name)
        )
        module, _, leaf = own.rpartition(".")
        if own in modules:  # an array of the model itself, or a table
            there = modules[own] + (".weight" if leaf == "embedding" else "")
        else:
            there = f"{modules[module]}.{back.get(leaf, 'weight')}"
        if leaf == "kernel" and (array.ndim == 4 or names.turned):
            array = array.transpose(3, 2, 0, 1) if array.ndim == 4 else array.T
        begin = "" if there.startswith("classifier") else names.begin(*place)
        made[begin + there] = np.asarray(array, order="C")
        if leaf == "mean":  # which transformers misses otherwise, and says so
            made[f"{begin}{modules[module]}.num_batches_tracked"] = np.zeros((), np.int64)
    return made


def _apart(arrays: NamedArrays, modules: Mapping[str, str]) -> Iterator[tuple[str, np.ndarray]]:
    """The inverse of `_stacked`, then of `_joined`, if queries have a name of their own among
    `modules`."""
    for name, array in arrays.items():
        stack = name.startswith("blocks.stack.")
        for i, layer in enumerate(array) if stack else [(0, array)]:
            one = name.replace(".stack.", f".{i}.", 1) if stack else name
            if ".qkv." in one and "attention.query" in modules:
                for part, own in zip(
                    ("query", "key", "value"), np.split(layer, 3, axis=-1), strict=True
                ):
                    yield one.replace(".qkv.", f".{part}."), own
            else:
                yield one, layer


def _translated(
    libraries: tuple[WeightNames, ...], name: str, array: np.ndarray
) -> tuple[str, np.ndarray]:
    """The name and layout of one array here."""
    module, _, leaf = name.rpartition(".")
    of_module = bool(module) and leaf in {*_WEIGHTS, *_LEAVES}
    whole = module if of_module else name  # else an array of the model itself
    of, new = next(
        ((of, new) for of in libraries if (new := of.find(whole)) is not None), (None, None)
    )
    if of is None or new is None:
        return name, array
    if not of_module or new.endswith(".embedding"):
        return new, array
    if leaf not in _WEIGHTS:
        return f"{new}.{_LEAVES[leaf]}", array
    if array.ndim == 4:
        return f"{new}.kernel", array.transpose(2, 3, 1, 0)
    if array.ndim == 2:
        return f"{new}.kernel", array.T if of.turned else array
    return f"{new}.scale", array


def _joined(arrays: NamedArrays) -> NamedArrays:
    """Joins `attention.query.kernel`, `.key` and `.value` to one `attention.qkv.kernel`."""
    whole: NamedArrays = {}
    for name, array in arrays.items():
        at = _PARTS.fullmatch(name)
        parts = (
            [arrays.get(f"{at[1]}.{part}.{at[3]}") for part in ("query", "key", "value")]
            if at
            else []
        )
        if at and all(part is not None for part in parts):
            whole[f"{at[1]}.qkv.{at[3]}"] = np.concatenate(parts, axis=-1)  # type: ignore[arg-type]
        else:  # if one is missing, the others keep their names
            whole[name] = array
    return whole


def _counted_through(arrays: NamedArrays) -> NamedArrays:
    """Renames `blocks.2-1.conv` to `blocks.4.conv`: blocks are numbered over all stages."""
    staged = {name: at for name in arrays if (at := _STAGED.fullmatch(name))}
    pairs = sorted({(int(at[1]), int(at[2])) for at in staged.values()})
    index = {pair: i for i, pair in enumerate(pairs)}

    def counted(name: str) -> str:
        at = staged.get(name)
        return name if at is None else f"blocks.{index[int(at[1]), int(at[2])]}.{at[3]}"

    return {counted(name): array for name, array in arrays.items()}


def _stacked(arrays: NamedArrays) -> NamedArrays:
    """Stacks `blocks.3.norm.bias` of all blocks to `blocks.stack.norm.bias`, along a leading
    axis."""
    rest = {name: array for name, array in arrays.items() if not _NUMBERED.fullmatch(name)}
    layers: dict[str, dict[int, np.ndarray]] = {}
    for name, array in arrays.items():
        if at := _NUMBERED.fullmatch(name):
            layers.setdefault(at[2], {})[int(at[1])] = array
    for name, one in layers.items():
        if sorted(one) == list(range(len(one))) and len({a.shape for a in one.values()}) == 1:
            rest[f"blocks.stack.{name}"] = np.stack([one[i] for i in range(len(one))])
        else:  # blocks that differ keep their names
            rest |= {f"blocks.{i}.{name}": array for i, array in one.items()}
    return rest
