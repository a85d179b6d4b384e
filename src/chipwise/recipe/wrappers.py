"""An optimizer around another: groups of parameters with their own rates.

It is elementwise, as the wrapped optimizer must be, so it works on the flat vector of parameters.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import optax
from jax.flatten_util import ravel_pytree

from ..base import RecipeError, invalid, unknown
from ..base.annotations import as_annotated
from .duration import Clock, Duration
from .optimizers import Optimizer, Scalars, Tree
from .schedules import Schedule, as_schedule, constant, held, piecewise


@as_annotated
@dataclass(frozen=True)
class grouped(Optimizer):
    """`inner` with factors on its settings for some parameters.

        grouped(sgd(lr=0.1, weight_decay=5e-4), {"*norm/bias": {"lr": 64, "weight_decay": 1 / 64}})

    *Arguments:* `inner`: an elementwise optimizer without groups. `groups`: a dict from patterns to
    factors by the name of a setting. The patterns match paths (with `fnmatch`), or rows of stacked
    arrays, such as `"blocks/stack/*#3"` for the fourth block. A factor is a number or a schedule:
    `{"whiten/bias": {"lr": piecewise({"0st": 1, "3ep": 0})}}` trains a bias for three epochs. A
    parameter belongs to the first pattern that matches its path.

    Raises `RecipeError` for settings that `inner` does not vary and, in use, for a pattern without
    matches.
    """

    inner: Annotated[Optimizer, "an optimizer such as cw.sgd(lr=0.1)"]
    groups: Any  # given as mappings; kept as tuples of pairs, which are frozen and hashable

    def __post_init__(self) -> None:
        if not self.inner.elementwise:
            expected = "an elementwise one, such as cw.sgd or cw.adamw"
            raise invalid(
                "optimizer-not-elementwise", "the optimizer in grouped", self.inner, expected
            )
        if self.inner.patterns:
            raise RecipeError("groups-in-groups", patterns=self.inner.patterns)
        try:
            pairs = tuple(
                (str(pattern), _pairs(factors)) for pattern, factors in _pairs(self.groups)
            )
        except (TypeError, ValueError):
            pairs = ()
        if not pairs or not all(factors for _, factors in pairs):
            expected = "patterns with factors, such as {'*/bias': {'lr': 2.0}}"
            raise invalid("groups-expected", "groups", self.groups, expected)
        known = list(self.inner.hyper)
        for pattern, factors in pairs:
            for name, factor in factors:
                if name not in known:
                    raise unknown("group-setting", f"setting of the group {pattern}", name, known)
                value = as_schedule(factor, f"{name} of {pattern}")
                if isinstance(value, constant) and value.value < 0:
                    expected = "a factor of at least 0"
                    raise invalid("group-factor", f"{name} of {pattern}", value.value, expected)
        object.__setattr__(self, "groups", pairs)

    @property
    def usual_rates(self) -> tuple[float, float] | None:  # type: ignore[override]
        return self.inner.usual_rates

    @property
    def held_values(self) -> int | None:  # type: ignore[override]
        return self.inner.held_values

    @property
    def rate_power(self) -> float | None:  # type: ignore[override]
        return self.inner.rate_power

    @property
    def elementwise(self) -> bool:
        return True

    @property
    def lr_name(self) -> str:
        return self.inner.lr_name

    @property
    def patterns(self) -> tuple[str, ...]:
        return tuple(pattern for pattern, _ in self.groups)

    @property
    def hyper(self) -> dict[str, Schedule]:
        return self.inner.hyper | {
            name: as_schedule(factor, name) for name, factor in self._factors()
        }

    @property
    def settings(self) -> dict[str, Any]:
        return self.inner.settings | dict(self._factors())

    def _with(self, settings: dict[str, Any]) -> Optimizer:
        groups = tuple(
            (p, tuple((name, settings.get(f"{name} of {p}", value)) for name, value in factors))
            for p, factors in self.groups
        )
        rest = {name: value for name, value in settings.items() if name in self.inner.settings}
        return replace(
            self, inner=self.inner.replace(**rest) if rest else self.inner, groups=groups
        )

    def held(self, clock: Clock) -> Optimizer:
        def last(value: Any) -> Any:
            return held(value, clock) if isinstance(value, Schedule) else value

        groups = tuple(
            (p, tuple((name, last(value)) for name, value in pairs)) for p, pairs in self.groups
        )
        return replace(self, inner=self.inner.held(clock), groups=groups)

    def _factors(self) -> list[tuple[str, Any]]:
        return [
            (f"{name} of {pattern}", factor)
            for pattern, factors in self.groups
            for name, factor in factors
        ]

    def decaying(self, params: Tree) -> Tree:
        return self.inner.decaying(params)

    def _about(self) -> dict[str, Any]:
        inner = self.inner._about()
        return {**inner, "optimizer": f"grouped({inner['optimizer']})"}

    def _transform(self, hyper: Scalars, decaying: Tree, norm: Any) -> optax.GradientTransformation:
        raise NotImplementedError  # `_apply` calls the inner one's

    def init(self, params: Tree, varied: Iterable[str] = ()) -> Tree:
        varied = {name for _, factors in self.groups for name, _ in factors}
        return self.inner.init(ravel_pytree(params)[0], varied)

    def _apply(self, grads, opt_state, params, scalars, decaying, norm, members):
        if members is None:  # trees, not the vector of a step
            number = self.members(params)
            spread = (
                jax.tree.map(lambda x, p: jnp.full(p.shape, x), t, params)
                for t in (number, decaying)
            )
            (vector, back), members, decaying = (
                ravel_pytree(params),
                *(ravel_pytree(t)[0] for t in spread),
            )
            moved, state = self._apply(
                ravel_pytree(grads)[0], opt_state, vector, scalars, decaying, norm, members
            )
            return back(moved), state
        values = {name: scalars[name] for name in self.inner.hyper}
        for i, (pattern, factors) in enumerate(self.groups):
            for name, _ in factors:
                factor = scalars[f"{name} of {pattern}"]
                values[name] = jnp.where(members == i, scalars[name] * factor, values[name])
        return self.inner._apply(grads, opt_state, params, values, decaying, norm, None)


@as_annotated
def layerwise(
    inner: Optimizer,
    layers: Sequence[str | Sequence[str]],
    factor: float = 1.0,
    unfreeze: str | None = None,
) -> grouped:
    """`inner` with lower rates for lower layers, which may also start one after another.

        blocks = (f"blocks/{i}/*" for i in range(16))
        layerwise(sgd(lr=0.01), ["stem/*", *blocks], 0.8, unfreeze="1ep")

    *Arguments:*

    - `inner`: an elementwise optimizer without groups.
    - `layers`: the layers from the input up, each a pattern or several (see `grouped`). Parameters
      in none of them, such as a new head, have `inner`'s rate.
    - `factor`: a layer has `factor` times the rate of the next above.
    - `unfreeze`: a duration. The uppermost of `layers` starts after it, and the next below after
      each further one. Until then a layer's gradient and moments are computed, but the layer is not
      updated. (Parameters in `Recipe(frozen=...)` have no gradient at all.)

    Sources: Howard & Ruder, 2018 (arXiv:1801.06146) for both, and Bao et al., 2022
    (arXiv:2106.08254). Raises `RecipeError` for no layers, a `factor` that is not above 0, and a
    duration of 0.
    """
    groups = [(layer,) if isinstance(layer, str) else tuple(layer) for layer in layers]
    right = groups and all(groups) and 0 < factor < math.inf
    if not right or len(groups) * math.log10(factor) > 300:  # no float has such a factor
        expected = "patterns such as ['stem/*', 'blocks/*'], and above 0"
        raise invalid(
            "layerwise-layers", "layerwise's layers and factor", (len(groups), factor), expected
        )
    each = None if unfreeze is None else Duration.parse(unfreeze)
    if each is not None and not each:
        expected = "a duration above 0, such as '1ep', or None"
        raise invalid("layerwise-unfreeze", "unfreeze", str(unfreeze), expected)
    settings: dict[str, Any] = {}
    for below, layer in enumerate(reversed(groups), 1):
        rate: Any = factor**below
        if each is not None:
            rate = piecewise({"0st": 0.0, f"{float(each.value * below):.12g}{each.unit}": rate})
        settings |= {pattern: {"lr": rate} for pattern in layer}
    return grouped(inner, settings)


def _pairs(given: Any) -> tuple[tuple[str, Any], ...]:
    given = given.items() if isinstance(given, Mapping) else given
    return tuple((str(name), value) for name, value in given)
