"""Training that starts from weights in a file: `cw.pretrained("net.safetensors").start(task)`.

Weights are matched by name. Nothing in a file is executed: pickles are read with PyTorch's
`weights_only`, which refuses code.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..base import ChipwiseError, DataError, RecipeError, fact, library, unreadable
from ..base.annotations import as_annotated
from ..base.figures import one_line
from ..base.files import may_be_whole, open_regular, system_errors
from ..recipe.low_rank import lora
from ..recipe.random_keys import as_keys
from ..recipe.recipe import Recipe
from ..recipe.task import Task, Tree
from ..recipes.load import load
from ..run.folder.checkpoint import Checkpoints, digest, flatten, refuse_hollow
from ..run.folder.run_reader import stored_recipe
from .heads import joined_head
from .huggingface import (
    HUB,
    Config,
    check_config,
    classes_in,
    from_hub,
    names_of,
    read_config,
    read_texts,
    settings_of,
    unread,
    weight_files,
)
from .weight_names import NamedArrays, abstract_arrays, model_tree, translate

_PICKLES = (".pt", ".pth", ".bin", ".ckpt")
_INSIDE = ("state_dict", "model", "params")  # where training scripts put a state dict


@dataclass(frozen=True)
class Match:
    """The match of a task's arrays with the arrays of a file."""

    matched: dict[str, str]
    """The task's names to the file's."""
    fresh: list[str]
    """Names that keep their initial values, as the caller asked."""
    missing: list[str]
    """Names that the file lacks."""
    unused: list[str]
    """Names only in the file."""
    shapes: dict[str, tuple[tuple[int, ...], tuple[int, ...]]]
    """Name to (the file's shape, the task's shape) if they differ."""
    resized: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)
    """The same for matched arrays that are scaled."""

    def __str__(self) -> str:
        rows = [f"{name:<48} {source}" for name, source in self.matched.items()]
        rows += [
            f"{name:<48} scaled from {old} to {new}" for name, (old, new) in self.resized.items()
        ]
        rows += [f"{name:<48} new" for name in self.fresh]
        rows += [f"{name:<48} missing" for name in self.missing]
        rows += [
            f"{name:<48} {old} in the file, {new} here" for name, (old, new) in self.shapes.items()
        ]
        return "\n".join([*rows, *(f"{'-':<48} {name} is not used" for name in self.unused)])


@dataclass(frozen=True)
class Weights:
    """Arrays by name, from a file."""

    path: str
    arrays: NamedArrays = field(repr=False)
    digest: str
    """SHA-256 of all arrays."""
    whole: NamedArrays | None = field(default=None, repr=False)
    """The training state of a run by name, if training continues with its optimizer."""
    config: Config = field(default_factory=dict, repr=False)
    """A folder's `config.json`."""
    texts: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """What the folder, or the run's, says of texts: see `Task`."""
    classes: tuple[str, ...] = ()
    """The names of the classes of the head, in its order, or `()` if they are not stated."""

    def match(
        self,
        task: Task,
        fresh: Sequence[str] = (),
        rename: Callable[[str], str | None] = lambda name: name,
        resize: Sequence[str] = (),
    ) -> Match:
        """Matches the arrays by name and shape. Computes nothing. Arguments as in `start`."""
        shapes = {name: tuple(leaf.shape) for name, leaf in abstract_arrays(task).items()}
        files = {new: old for old in self.arrays if (new := rename(old)) is not None}
        if self.config.get("tie_word_embeddings") and "words.embedding" in files:
            files.setdefault("head.embedding", files["words.embedding"])
        match = Match({}, [], [], [], {})
        used = set()
        for name, shape in shapes.items():
            bare = name.partition(".")[2]
            source = files.get(name, files.get(bare))
            if _named(bare, fresh):
                match.fresh.append(name)
            elif source is None:
                match.missing.append(name)
            elif (old := self.arrays[source].shape) == shape:
                match.matched[name] = source
            elif _named(bare, resize) and _places(old, shape) is not None:
                match.matched[name], match.resized[name] = source, (old, shape)
            else:
                match.shapes[name] = (old, shape)
            used.add(source)
        return dataclasses.replace(match, unused=[name for name in self.arrays if name not in used])

    def start(
        self,
        task: Task,
        fresh: Sequence[str] = (),
        rename: Callable[[str], str | None] = lambda name: name,
        resize: Sequence[str] = (),
    ) -> Task:
        """Returns `task` with these weights as its initial values. The run's recipe.json has their
        digest.

        If the weights and the task both state the names of their classes, the slices of a head are
        taken by name. If one of them does not, the run's first lines say that numbers count.

        *Arguments:*

        - `fresh`: patterns of arrays that keep the values of `task.init`, such as
          `("classifier/*",)` for a new head.
        - `rename`: a function from a name in the file to the task's, `params.conv.kernel` or
          `conv.kernel`, or to None to ignore it.
        - `resize`: patterns of a transformer's learned positions `(1, places, width)`, such as
          `("places",)`, whose square grid is scaled to the task's.

        Raises `RecipeError` if any other array is missing or has another shape. `match` shows all
        of them. Raises `RecipeError` for a head of other classes, for quantized arrays, and if the
        built-in model of `task` would use Hugging Face's arrays in another way.
        """
        match = self.match(task, fresh, rename, resize)
        if match.missing or match.shapes:
            facts: dict[str, Any] = {"missing": match.missing, "shapes": list(match.shapes)}
            facts |= {"without": len(match.missing), "other": len(match.shapes)}
            some = [f"{n} {old} for {new}" for n, (old, new) in match.shapes.items()]
            some += match.missing
            facts |= {"matched": len(match.matched), "some": some, "names": list(self.arrays)}
            raise RecipeError("weights-of-another-model", path=self.path, **facts)
        if not match.matched:
            raise RecipeError("weights-all-fresh", path=self.path, fresh=list(fresh))
        if self.whole is not None and (match.fresh or match.resized):
            raise RecipeError("weights-optimizer-of-some", path=self.path)
        check_config(self.path, self.config, task)
        first, arrays = task.init, {new: self.arrays[old] for new, old in match.matched.items()}
        leaves = abstract_arrays(task)
        if wrong := [
            f"{match.matched[name]} {array.dtype} for {leaves[name].dtype}"
            for name, array in arrays.items()
            if not _same_kind(array.dtype, leaves[name].dtype)
        ]:
            raise RecipeError("weights-quantized", path=self.path, some=wrong, count=len(wrong))
        finite = {name: int(np.sum(~np.isfinite(array))) for name, array in arrays.items()}
        if wrong := [f"{match.matched[name]} {count:,}" for name, count in finite.items() if count]:
            raise DataError("weights-not-finite", path=self.path, some=wrong, count=len(wrong))
        arrays |= {
            name: _resized(arrays[name], shape) for name, (_, shape) in match.resized.items()
        }
        rows, reading = joined_head(self.path, self.classes, task, arrays)
        if self.whole is not None and rows:
            raise RecipeError("weights-optimizer-of-some", path=self.path)
        arrays |= {name: np.take(arrays[name], order, axis) for name, (axis, order) in rows.items()}

        def init(key: jax.Array) -> tuple[Tree, Tree]:
            tree = model_tree(*first(key))
            leaves = [
                jnp.asarray(arrays[name], leaf.dtype) if name in arrays else leaf
                for name, leaf in flatten(tree).items()
            ]
            values = as_keys(jax.tree.unflatten(jax.tree.structure(tree), leaves))
            return values["params"], values["state"]

        def from_data(train: Any) -> dict[str, Any]:
            """The values that the task computes from its data, except those in the file."""
            made = {} if task.from_data is None else task.from_data(train)
            return {
                path: a
                for path, a in made.items()
                if f"params/{path}".replace("/", ".") not in arrays
            }

        # A recipe is described by the name of the function that makes the model.
        init.__wrapped__ = getattr(first, "__wrapped__", first)  # type: ignore[attr-defined]
        weights = (*task.weights, self.digest)
        return dataclasses.replace(
            task,
            init=init,
            from_data=task.from_data and from_data,
            weights=weights,
            texts={**task.texts, **self.texts},
            read={**task.read, **unread(self.config, self.texts)},
            weights_read=task.weights_read if reading is None else (*task.weights_read, reading),
            start_state=self.whole,
        )

    def recipe(
        self, data: str | None = None, settings: Sequence[str] = (), fresh: Sequence[str] = ()
    ) -> Recipe:
        """The built-in recipe of a folder of Hugging Face's transformers, with the sizes of its
        `config.json` and these weights.

        *Arguments:* as in `cw.load` and `start`. Raises the same errors, and `DataError` without
        such a file.
        """
        name, own = settings_of(self.path, self.config)
        made = load(name, [*own, *settings], data)
        return dataclasses.replace(made, task=self.start(made.task, fresh))


def _same_kind(given: Any, expected: Any) -> bool:
    """Whether numbers become those of a parameter or a count without another meaning: floats of 16
    bits or more become floats, whole numbers whole numbers, and flags flags."""
    if jnp.issubdtype(expected, jnp.floating):
        return jnp.issubdtype(given, jnp.floating) and given.itemsize > 1
    kinds = (jnp.integer, jnp.bool_, jnp.complexfloating)
    return any(jnp.issubdtype(expected, kind) and jnp.issubdtype(given, kind) for kind in kinds)


@as_annotated
def pretrained(
    path: str | Path | Mapping[str, Any],
    names: str | None = None,
    *,
    optimizer: bool = False,
    classes: Sequence[str] = (),
) -> Weights:
    """Reads weights from a file or folder, to start training from them.

    *Arguments:*

    - `path`: a `.safetensors` file or a folder of them, a PyTorch state dict (`.pt`, `.pth`,
      `.bin`, `.ckpt`), or a run folder of chipwise, whose newest checkpoint is read, without
      averages, with adapters merged. Also a folder that Hugging Face's transformers saved, or
      `hf://OWNER/NAME` of its Hub. Also arrays that another library has read: nested dictionaries,
      such as Orbax restores.
    - `names`: a built-in model, "resnet50", "efficientnet-lite0", "vit", "bert", "gpt2" or "llama",
      if the file has the names of torchvision, timm, Hugging Face or efficientnet-lite-pytorch.
      They are translated to the built-in model's names and layouts. By default a folder's
      `config.json` decides.
    - `optimizer`: also read the optimizer's state and the averages of a run folder. Training
      continues with them, at step 0 of another rate or length. Its recipe needs the same optimizer
      and number of replicas.
    - `classes`: the names of the classes of the head, in its order. By default those that a run
      folder, a `config.json` or a `.safetensors` file of `cw.export` states.

    Raises `DataError` if the file is missing, damaged or has no weights, `RecipeError` for unknown
    `names`. Nothing in the file is executed.
    """
    if isinstance(path, Mapping):
        arrays = {
            name: np.asarray(a) for name, a in flatten(dict(path)).items() if hasattr(a, "dtype")
        }
        return _named_as(names, "arrays", arrays, classes=tuple(classes))
    path = from_hub(path) if isinstance(path, str) and path.startswith(HUB) else Path(path)
    found: dict[str, Any] = {}  # the other fields of `Weights`
    if not path.exists():
        raise DataError("weights-absent", path=path)
    try:
        if (path / "checkpoints").is_dir():
            arrays, whole, found = _run(path)
            if optimizer:
                found["whole"] = whole
        elif optimizer:
            raise DataError("weights-without-optimizer", path=path)
        elif path.is_dir():
            config = read_config(path)
            found = {"config": config, "texts": read_texts(path)}
            if not classes:
                found["classes"] = classes_in(config)
            names = names_of(path, config) if names is None and config else names
            arrays = _folder_arrays(path)
        elif path.suffix == ".safetensors":
            arrays = load_arrays(path)
            with library("safetensors", "export-library").safe_open(path, "numpy") as opened:
                stated = (opened.metadata() or {}).get("classes")
            found["classes"] = tuple(stated.split("\n")) if stated else ()
        elif path.suffix in _PICKLES:
            arrays = _state_dict(path)
        else:
            raise DataError("weights-format", path=path, known=[".safetensors", *_PICKLES])
    except ChipwiseError:
        raise
    except Exception as error:  # readers of damaged files raise all kinds of exceptions
        if may_be_whole(error):
            raise unreadable(path, error) from error
        raise DataError("weights-damaged", path=path, reason=one_line(error, 160)) from error
    if classes:
        found["classes"] = tuple(classes)
    return _named_as(names, str(path), arrays, **found)


def _named_as(names: str | None, path: str, arrays: NamedArrays, **found: Any) -> Weights:
    if not arrays:
        raise DataError("weights-none", "{path} holds no weights.", path=path)
    if names is not None:
        arrays = translate(arrays, names)
    return Weights(path, arrays, digest(dict(found.get("whole", arrays))), **found)


def safetensors() -> Any:
    """`safetensors.numpy`. Raises `RecipeError` if it is not installed."""
    return library("safetensors.numpy", "export-library", extra="export")


def load_arrays(file: Path) -> NamedArrays:
    """The arrays of a `.safetensors` file. Raises `OSError`, also for a pipe or a device."""
    open_regular(file).close()
    with system_errors(file):
        return safetensors().load_file(file)


def _folder_arrays(folder: Path) -> NamedArrays:
    """The arrays of a folder's files by name, as its index says. Warns of those that the index does
    not name. Raises `DataError` for a name that two files have."""
    arrays: NamedArrays = {}
    unnamed = []
    for file, names in weight_files(folder):
        for name, array in load_arrays(file).items():
            if names is not None and name not in names:
                unnamed.append(f"{name} in {file.name}")
            elif name in arrays:
                raise DataError("weights-twice", path=folder, name=name, file=file.name)
            else:
                arrays[name] = array
    if unnamed:
        told = fact("weights-unnamed", path=folder, some=unnamed, count=len(unnamed))
        warnings.warn(str(told), stacklevel=3)
    return arrays


def _state_dict(file: Path) -> NamedArrays:
    torch = library("torch", "export-library", extra="torch")
    with open_regular(file) as opened:
        read = torch.load(opened, map_location="cpu", weights_only=True)
    while isinstance(read, dict) and (
        inner := next((k for k in _INSIDE if isinstance(read.get(k), dict)), None)
    ):
        read = read[inner]
    tensors = (
        {n: t for n, t in read.items() if isinstance(t, torch.Tensor)}
        if isinstance(read, dict)
        else {}
    )
    refuse_hollow(sum(t.nbytes for t in tensors.values()), file)  # a view may repeat one value
    wide = {
        n: t.float() if t.dtype in (torch.bfloat16, torch.float16) else t
        for n, t in tensors.items()
    }
    return {str(n).removeprefix("module."): t.detach().numpy() for n, t in wide.items()}


def _run(folder: Path) -> tuple[NamedArrays, NamedArrays, dict[str, Any]]:
    """The parameters and the state of a run's newest checkpoint, all arrays of it, and what the run
    says of its classes and, from its own weights, of texts."""
    checkpoints = Checkpoints(folder / "checkpoints", read_only=True)
    try:
        steps = checkpoints.steps()
        flat = checkpoints.arrays(steps[-1]) if steps else {}
    finally:
        checkpoints.close()
    names = {n: n.replace("frozen.", "params.", 1) if n.startswith("frozen.") else n for n in flat}
    arrays = {new: flat[old] for old, new in names.items() if new.startswith(("params.", "state."))}
    stored = stored_recipe(folder)
    if (adapters := stored.get("adapters")) is not None:
        arrays = lora(**adapters).merged(arrays)
    texts = dict(stored.get("texts", {}))
    # Documents begin and end as in the data of the new run
    texts = {name: texts[name] for name in texts if name not in ("begin", "end")}
    classes = tuple(map(str, stored.get("classes") or ()))
    return arrays, flat, {"texts": texts, "classes": classes}


def _named(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name.replace(".", "/"), pattern) for pattern in patterns)


def _places(old: tuple[int, ...], new: tuple[int, ...]) -> tuple[int, int, int] | None:
    """The number of tokens before the grid, and the sides of the old and the new grid. None if they
    are not square grids."""
    if len(old) != 3 or len(new) != 3 or old[0] != new[0] or old[2] != new[2]:
        return None
    for tokens in (1, 0):
        sides = [math.isqrt(max(n - tokens, 0)) for n in (old[1], new[1])]
        if all(s and s * s == n - tokens for s, n in zip(sides, (old[1], new[1]), strict=True)):
            return tokens, sides[0], sides[1]
    return None


def _resized(array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Positions for another grid: cubic, antialiased if it shrinks, like timm's
    `resample_abs_pos_embed`."""
    sides = _places(array.shape, shape)
    assert sides is not None, (array.shape, shape)  # `match` asked
    tokens, old, new = sides
    grid = array[:, tokens:].astype(np.float32).reshape(-1, old, old, array.shape[2])
    scaled = jax.image.resize(grid, (len(grid), new, new, array.shape[2]), "cubic", antialias=True)
    return np.concatenate(
        [array[:, :tokens], np.asarray(scaled).reshape(len(grid), new * new, -1)], axis=1
    )
