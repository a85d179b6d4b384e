"""What an optimizer is: a value with settings, and one pure update with its rates as inputs.

    opt_state = optimizer.init(params)
    params, opt_state = optimizer.update(grads, opt_state, params, {"lr": lr, "momentum": m, ...})

Every hyperparameter that may vary is a schedule in `optimizer.hyper`, and its
value of the step is handed to `update` as a () float32 array. A schedule, a
finder or a changed rate therefore never recompiles the step, and the compiled
step of a plan is the step of a run.

`grads` is the MEAN gradient of the loss over the global batch, already summed
over replicas and devices. Clipping and weight decay happen here, once, after
that reduction: a decay added inside each replica and then summed acts
`replicas` times too strongly, and ties a recipe to a core count.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from fractions import Fraction
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ..errors import RecipeError, near
from ..words.facts import Fact
from .duration import Clock
from .schedule import Schedule, callable_name, constant, held, plain

Tree = Any
Scalars = dict[str, Any]


class Optimizer(ABC):
    """What a recipe holds and the step calls. Subclasses are frozen dataclasses."""

    usual_rates: ClassVar[tuple[float, float] | None] = None
    """Between which peak rates most nets train, where that is known."""
    rate_power: ClassVar[float | None] = None
    """The power of the batch that the rate goes with, where that is known."""

    @property
    @abstractmethod
    def hyper(self) -> dict[str, Schedule]:
        """The inputs of `update`, by name, each with its schedule."""

    @property
    def lr_name(self) -> str:
        """The key of `hyper` that is the learning rate."""
        return "lr"

    @property
    @abstractmethod
    def elementwise(self) -> bool:
        """Whether each value of a parameter moves by its own gradient, state, answer of `decay`, and the
        scalars alone (`clip`'s global norm aside), so that parameters may be cut anywhere."""

    @property
    def by_layer(self) -> bool:
        """Whether all but a ratio for each layer is elementwise: see `recipe.trust_ratio`."""
        return False

    @property
    def on_vector(self) -> bool:
        """Whether it updates the flat vector of the parameters; otherwise it needs whole leaves."""
        return self.elementwise or self.by_layer

    @property
    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """What can be set, by name, as it was given: numbers, schedules, words."""

    @abstractmethod
    def _with(self, settings: dict[str, Any]) -> Optimizer:
        """This optimizer with some of its settings replaced."""

    @abstractmethod
    def _about(self) -> dict[str, Any]:
        """The kind of this optimizer as JSON values, with its name as `optimizer`."""

    def rate_factor(self, k: Fraction) -> Fraction | float | None:
        """The factor of the rate at `k` times the batch: `k` for `sgd` (Goyal et al., 2017), its root for
        Adam's kind (Malladi et al., 2022); None without a known rule."""
        if self.rate_power is None:
            return None
        return k if self.rate_power == 1 else math.sqrt(k)

    def replace(self, **settings: Any) -> Optimizer:
        """This optimizer with other `settings`. Raises `RecipeError` for an unknown name."""
        for name in settings:
            if name not in self.settings:
                kind, known = self._about()["optimizer"], list(self.settings)
                raise RecipeError(
                    "no-such-setting", optimizer=kind, name=name, known=known, near=near(name, known)
                )
        return self._with(settings)

    def held(self, clock: Clock) -> Optimizer:
        """This optimizer for a run that continues after the end of `clock`: schedules then keep their last
        value, with the same bits before."""
        varying = {n: held(s, clock) for n, s in self.hyper.items() if not isinstance(s, constant)}
        return self._with(varying)

    def describe(self) -> dict[str, Any]:
        """All settings as JSON values, for the run folder and for comparing runs; schedules as their
        `json()`."""
        return self._about() | {name: plain(value) for name, value in self.settings.items()}

    @abstractmethod
    def _transform(self, hyper: Scalars, decaying: Tree, norm: Any) -> optax.GradientTransformation:
        """The optax chain with `hyper`'s scalars in place; its state's structure never depends on them.

        `decaying`: which values decay, a tree like the parameters or a prefix of it, of bools or arrays of
        them; `norm`, the gradient's global norm, for clipping."""

    def decaying(self, params: Tree) -> Tree:
        """Which leaves of `params` decay, as a tree of bools."""
        return decays(params, getattr(self, "decay", "all"))

    @property
    def patterns(self) -> tuple[str, ...]:
        """Of the paths of parameters with settings of their own; see `grouped`."""
        return ()

    def members(self, params: Tree) -> Tree:
        """Which of `patterns` each leaf of `params` belongs to, -1 for none."""
        from .around import members

        return members(params, self.patterns)

    def init(self, params: Tree) -> Tree:
        """The state before the first step: arrays only, float32 where `params` are narrower."""
        wide, _ = _widen(params)
        hyper = {name: _placeholder(schedule) for name, schedule in self.hyper.items()}
        with _optax_dtypes():
            return self._transform(hyper, True, None).init(wide)

    def update(
        self,
        grads: Tree,
        opt_state: Tree,
        params: Tree,
        hyper: Scalars,
        *,
        decaying: Tree | None = None,
        norm: Any = None,
        members: Any = None,
        ratios: Tree | None = None,
    ) -> tuple[Tree, Tree]:
        """One step: `(new_params, new_opt_state)`, with the structure, shapes and dtypes of the old.

        Arguments: `grads`, the mean gradient, a tree like `params`; `hyper`, a ()
        array or number for each key of `self.hyper`. An elementwise optimizer may
        be given a vector or a part of one in place of the tree; then `decaying`,
        bools of its shape, says which values decay, `norm` `()` is the global norm
        of the whole gradient, and `members`, whole numbers of its shape, which of
        `patterns` each value belongs to. So may one `by_layer`, with each value's
        ratio as `ratios`, which broadcast to its shape.

        Raises `RecipeError` when `hyper` has other keys or a value is not a scalar.
        """
        grads, wide, scalars, decaying, norm = self._prepared(grads, params, hyper, decaying, norm)
        with _optax_dtypes():
            moved, opt_state = self._apply(grads, opt_state, wide, scalars, decaying, norm, members, ratios)
        return _narrowed(moved, params), opt_state

    def _prepared(self, grads: Tree, params: Tree, hyper: Scalars, decaying: Tree | None, norm: Any) -> tuple:
        """The arguments of `update` in one dtype, with those that are left out."""
        wide, dtype = _widen(params)
        grads = jax.tree.map(lambda g: jnp.asarray(g).astype(dtype), grads)
        scalars = self._scalars(hyper, dtype)
        if decaying is None:
            decaying = self.decaying(params)
        if norm is None and "clip" in scalars:
            squares = [jnp.sum(g * g) for g in jax.tree.leaves(grads)]
            norm = jnp.sqrt(sum(squares[1:], start=squares[0]))
        return grads, wide, scalars, decaying, norm

    def _apply(
        self,
        grads: Tree,
        opt_state: Tree,
        params: Tree,
        scalars: Scalars,
        decaying: Tree,
        norm: Any,
        members: Any,
        ratios: Tree | None = None,
    ) -> tuple[Tree, Tree]:
        """`update` of arrays in one dtype."""
        updates, opt_state = self._transform(scalars, decaying, norm).update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    def tables(self, clock: Clock, start: int = 0, stop: int | None = None) -> dict[str, np.ndarray]:
        """`hyper` as tables: for each key, the values of steps `start` to `stop - 1`, float32."""
        return {name: schedule.table(clock, start, stop) for name, schedule in self.hyper.items()}

    def warnings(self, clock: Clock) -> list[Fact]:
        """What is probably not meant on this clock, each with its `setting`."""
        return [fact for name, schedule in self.hyper.items() for fact in schedule.warnings(clock, name)]

    def _scalars(self, hyper: Scalars, dtype: Any) -> Scalars:
        if set(hyper) != set(self.hyper):
            raise RecipeError("hyperparameters-differ", given=sorted(hyper), expected=sorted(self.hyper))
        scalars = {name: jnp.asarray(value).astype(dtype) for name, value in hyper.items()}
        for name, value in scalars.items():
            if value.shape != ():
                raise RecipeError("hyperparameter-shape", name=name, shape=list(value.shape))
        return scalars


def decays(params: Tree, decay: str | Callable[[str, Any], bool]) -> Tree:
    """Which leaves of `params` decay: a tree of bools.

    `decay` is "all"; "kernels", the leaves of 2 or more axes, which leaves out
    biases and normalization; or a function of a leaf's path, such as
    "block1/conv/kernel", and the leaf.

    Raises `RecipeError` when the function gives something else than a bool.
    """

    def chosen(path: Any, leaf: Any) -> bool:
        if decay == "all":
            return True
        if decay == "kernels":
            return jnp.ndim(leaf) >= 2
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        answer = decay(name, leaf)  # type: ignore[operator]
        if not isinstance(answer, bool | np.bool_):
            function = callable_name(decay)  # type: ignore[arg-type]
            raise RecipeError("decay-answer", function=function, path=name, answer=repr(answer))
        return bool(answer)

    return jax.tree_util.tree_map_with_path(chosen, params)


def _optax_dtypes() -> Any:
    # optax's Adam raises its float32 decay to an int32 count, which a program under strict promotion
    # refuses. Everything floating is one dtype by here, so standard promotion cannot change a result.
    return jax.numpy_dtype_promotion("standard")


def _placeholder(schedule: Schedule) -> Any:
    return np.float32(schedule.value if isinstance(schedule, constant) else np.nan)


def _widen(params: Tree) -> tuple[Tree, Any]:
    """`params` in one dtype, float32 or wider, and that dtype; a tree of float32 is not copied."""
    leaves = [jnp.asarray(leaf).dtype for leaf in jax.tree.leaves(params)]
    wrong = [str(dtype) for dtype in leaves if not jnp.issubdtype(dtype, jnp.floating)]
    if wrong:
        raise RecipeError("parameters-without-gradient", dtypes=sorted(set(wrong)))
    dtype = max([jnp.dtype(jnp.float32), *map(_at_least_float32, leaves)], key=lambda d: d.itemsize)
    return jax.tree.map(lambda p: jnp.asarray(p).astype(dtype), params), dtype


def _narrowed(moved: Tree, params: Tree) -> Tree:
    """`moved` in the dtypes of `params`."""
    return jax.tree.map(lambda new, old: new.astype(jnp.asarray(old).dtype), moved, params)


def _at_least_float32(dtype: Any) -> Any:
    if jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4:
        return jnp.dtype(jnp.float32)
    return dtype
