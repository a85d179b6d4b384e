"""Remembers the programs of a built-in recipe's step, so that a second plan traces nothing.

Tracing a large net takes longer than all the rest of a plan whose programs are compiled already. What a
function will trace cannot be known without tracing it; but a built-in recipe is code of this package, so its
programs follow from the package's sources, the versions of the libraries below it, and the recipe's settings.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..atomic import replace_text
from ..data.sources import spec_of
from ..engine.blueprint import Blueprint, Whole
from ..engine.layout import Layout
from ..machine.host_facts import installed
from ..models.chip_traits import ChipTraits
from ..recipe.recipe import Recipe
from .tracing import Contents, Exported, Traceable, TracedStep

LIBRARIES = ("jax", "jaxlib", "flax", "optax", "numpy", "ml_dtypes")


@dataclasses.dataclass(frozen=True)
class TraceCache:
    """The programs, in `folder`, of the recipe that was made from `origin` (see `recipe.settings.origin`)."""

    folder: Path
    origin: str
    _asked: dict[Path, TracedStep] = dataclasses.field(default_factory=dict)

    def step(
        self, recipe: Recipe, layout: Layout, kept: Sequence[bool | None], make: Callable[[], TracedStep]
    ) -> TracedStep:
        """The programs of `recipe` in `layout`, remembered or from `make`.

        *Arguments:* `kept`: which data is on the device.
        """
        path = self.folder / f"programs-{self._key(recipe, layout, kept)}.json"
        make = functools.cache(make)
        self._asked[path] = _read(path, recipe, layout, make) or make()
        return self._asked[path]

    def write(self) -> None:
        """Writes what has been exported. Raises `DataError` if the folder cannot be written to."""
        for path, step in self._asked.items():
            text = json.dumps(_document(step))
            if not path.exists() or path.read_text(encoding="utf-8") != text:
                replace_text(path, text, "plan-cache-unwritable")

    def _key(self, recipe: Recipe, layout: Layout, kept: Sequence[bool | None]) -> str:
        train = recipe.task.train
        data = {name: [list(spec.shape), str(spec.dtype)] for name, spec in spec_of(train).items()}
        versions = {name: installed(name) for name in LIBRARIES}
        options = {name: value for name, value in os.environ.items() if name.startswith("JAX_")}
        about = [_sources(), versions, options, self.origin, dataclasses.asdict(layout), list(kept)]
        text = json.dumps([*about, data, len(train)], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


@functools.cache
def _sources() -> str:
    """A hash of this package's Python files, and of where they are: `Exported.places` name them."""
    package = Path(__file__).resolve().parents[1]
    whole = hashlib.sha256(str(package).encode())
    for path in sorted(package.rglob("*.py")):
        whole.update(str(path.relative_to(package)).encode())
        whole.update(path.read_bytes())
    return whole.hexdigest()


# ---- the file

_NUMBERS = tuple(field.name for field in dataclasses.fields(Blueprint) if field.type in ("int", "bool"))


def _document(step: TracedStep) -> dict[str, Any]:
    def about(program: Traceable) -> dict[str, Any]:
        exports = [
            [kernels, one.key, one.size, one.places, sorted(one.contents.dtypes), one.contents.operations]
            for kernels, one in sorted(program.exports.items())
        ]
        return {"arguments": program.arguments, "donated": program.donated, "exports": exports}

    numbers = {name: getattr(step, name) for name in _NUMBERS} | {"whole": dataclasses.asdict(step.whole)}
    return numbers | {"programs": {one.name: about(one) for one in step.programs}}


def _read(path: Path, recipe: Recipe, layout: Layout, make: Callable[[], TracedStep]) -> TracedStep | None:
    """The programs in a file; `None` if there is none or it cannot be read, so that they are made again."""
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        fields: dict[str, Any] = {name: stored[name] for name in _NUMBERS}
        programs = tuple(_program(name, one, make) for name, one in stored["programs"].items())
        whole = Whole(**stored["whole"])
        return Blueprint(recipe=recipe, layout=layout, programs=programs, whole=whole, **fields)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def _program(name: str, stored: dict[str, Any], make: Callable[[], TracedStep]) -> Traceable:
    def function_and_specs() -> tuple[Any, Any]:
        (own,) = (one for one in make().programs if one.name == name)
        return own.function, own.specs

    exports = {
        ChipTraits(*kernels): Exported(key, size, tuple(places), Contents(frozenset(dtypes), operations))
        for kernels, key, size, places, dtypes, operations in stored["exports"]
    }
    return Traceable(name, function_and_specs, stored["arguments"], tuple(stored["donated"]), exports)
