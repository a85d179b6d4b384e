"""Where the recipes of runs come from: a name and settings, or a recipe made in Python."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import RecipeError
from ..recipe.recipe import Recipe
from ..recipe.settings import apply, load


@dataclass(frozen=True)
class Origin:
    """*Fields:* `recipe`: a built-in name, `path.py:name`, or a `Recipe`; `set`: settings such as `"lr=0.2"`
    that all runs share; `data` and `synthetic` as in `cw.load`. Only names take these three."""

    recipe: str | Recipe
    set: tuple[str, ...] = ()
    data: str | None = None
    synthetic: bool = False

    def __post_init__(self):
        if isinstance(self.recipe, Recipe) and (self.set or self.data or self.synthetic):
            raise RecipeError("A finished Recipe takes no set, data or synthetic: give its name instead.")

    @property
    def name(self) -> str:
        """What `recipe.py` files and built-in recipes are called wherever the process stands."""
        assert isinstance(self.recipe, str)
        path, _, name = self.recipe.partition(":")
        return f"{Path(path).absolute()}:{name}" if Path(path).suffix == ".py" else self.recipe

    def make(self, settings: Mapping[str, str] | None = None, seed: int | None = None) -> Recipe:
        """The recipe with further `settings`, and of a `seed`. Raises `RecipeError` where it cannot be."""
        settings = dict(settings or {})
        if isinstance(self.recipe, Recipe):
            made = apply(self.recipe, settings)
            return made if seed is None else dataclasses.replace(made, seed=seed)
        made = load(self.recipe, self._all(settings, seed), self.data, self.synthetic)
        if seed is not None and made.seed != seed:
            raise RecipeError(
                f"{self.recipe} takes a parameter 'seed' and leaves its recipe's seed at {made.seed}: "
                f"pass it on, cw.Recipe(seed=seed, ...)."
            )
        return made

    def source(
        self, settings: Mapping[str, str] | None = None, seed: int | None = None
    ) -> dict[str, Any] | None:
        """How `make` made it, to be stored with a run; `None` of a recipe made in Python."""
        if isinstance(self.recipe, Recipe):
            return None
        made = {
            "recipe": self.name,
            "set": self._all(settings or {}, seed),
            "data": self.data and str(Path(self.data).absolute()),
        }
        return {**made, "synthetic": True} if self.synthetic else made

    def _all(self, settings: Mapping[str, str], seed: int | None) -> list[str]:
        own = [f"{name}={value}" for name, value in settings.items()]
        return [*self.set, *own, *([] if seed is None else [f"seed={seed}"])]
