"""Detects before the first step whether a loss compares the examples of its batch, as a contrastive
loss does, or sums over them, which is refused: its gradient would depend on the number of replicas.

A loss that compares sees the examples of one replica in training, and one example at a time in
evaluation, unless the task has an `eval_group`. Neither is an error, and both are easily
overlooked.

The loss is computed as evaluation does, so that batch norm's statistics in training do not count. A
batch has two halves: the first is A or B, the second is C or D. If each example has its own loss,
then L(A, C) - L(A, D) - L(B, C) + L(B, D) is 0 up to rounding. Values drawn from the key, such as a
diffusion net's noise, belong to a place in the batch, and cancel as well.

Such a loss is then computed of half a batch. With means times the number of examples, L(A, C) -
L(B, C) is L(A) - L(B). It is twice that if the loss sums.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Literal

from ..base import RecipeError, fact
from ..data.cached import steady
from ..data.sources import Columns, take
from ..models.chip_traits import traced_for
from ..recipe import precision
from ..recipe.random_keys import as_keys
from ..recipe.recipe import Recipe
from ..recipe.task import Tree
from ..recipe.user_code import reason_of
from ..step import keys
from ..step.program_flops import program_flops
from ..step.replica import augmented
from ..step.state import nbytes
from .progress import Reporter

if TYPE_CHECKING:
    from .session import Session

FEW = 8  # examples, of which halves are drawn
HALF = 2
TRIES = 4  # a hinge may be inactive, or no two labels alike, in one of them
TOLERANCE = 1e-4
"""The limit as a share of the loss. A float32 sum of a million values is rounded by less, and
losses that compare examples are rarely below a hundredth (tests/run/test_neighbours.py)."""
MOST_FLOPS = {"cpu": 1e10}
"""The limit for all tries on a chip, a second of a CPU. A net with more is tried less often, or not
at all."""
MOST_FLOPS_OF_OTHERS = 2e12
MOST_BYTES = 1 << 30  # of parameters, which are copied


def few_examples(recipe: Recipe) -> Columns:
    """Reads examples for `tell`, columns `(FEW, ...)`, before a feed reads in its own threads."""
    source = recipe.task.train if recipe.task.eval is None else steady(recipe.task.eval)
    with contextlib.suppress(Exception):  # what cannot be read fails where it is needed
        return take(source, np.arange(min(FEW, len(source))))
    return {}


def tell(session: Session, few: Columns, reporter: Reporter) -> None:
    """Reports how many examples the loss compares, and warns of an evaluation of single examples.
    Changes no bit. Raises `RecipeError` if the loss sums over its examples.

    Runs on the first host alone, and does not try a replica that is spread over several hosts.
    """
    placement, task = session.placement, session.recipe.task
    if session.step or not few or not placement.hosts.first or placement.over_hosts:
        return
    if nbytes((session.abstract.params, session.abstract.frozen)) > MOST_BYTES:
        return
    found: list[bool] = []
    try:
        found.extend(trial(session.recipe, session.parameters(), few, placement.lead))
    except Exception as error:
        # It may refuse so small a batch, or one without `mix`: that is no error of the run
        code = "loss-sum-untried" if found else "loss-untried"
        reporter.say(fact(code, reason=reason_of(error) or type(error).__name__))
        return
    compared, summed = found
    if summed:
        raise RecipeError("loss-summed", replicas=session.recipe.replicas)
    if not compared:
        return
    layout = session.layout
    examples = layout.batch // layout.replicas
    code = "loss-compares" if layout.replicas > 1 else "loss-compares-all"
    reporter.say(fact(code, examples=examples, batch=layout.batch))
    if task.eval is not None and task.eval_group == 1:
        reporter.warn(fact("evaluation-of-single-examples", group=examples))


def trial(
    recipe: Recipe, model: tuple[Tree, Tree], few: Columns, device: jax.Device
) -> Iterator[bool]:
    """Yields whether the loss depends on which examples are together, then whether it sums over
    them: false for a loss that is not finite, and for a net that is too large to try.

    *Arguments:* `model`: its `(params, state)`. `few`: the examples from which batches are drawn.
    """
    task, drawn = recipe.task, np.random.default_rng(0)

    def totals(
        params: Tree, state: Tree, batch: dict[str, jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        """Returns the loss's total and count."""
        params, state = as_keys((params, state))
        # It may make the views that are compared
        if task.eval is None and task.augment is not None:
            places = jnp.arange(len(jax.tree.leaves(batch)[0]), dtype=jnp.int32)
            batch = augmented(task.augment, batch, recipe.seed, 0 * places, places)
        key = keys.eval_keys(recipe.seed, jnp.zeros(1, jnp.int32))[0]
        with precision.products("f32"), traced_for(device):
            loss = task.loss(params, state, batch, key, False)[0]["loss"]
        return jnp.asarray(loss.total, jnp.float32), jnp.asarray(loss.count, jnp.float32)

    def batches() -> list[Columns]:
        """Returns A with C, A with D, B with C, B with D, A, and B. Columns are drawn one by one,
        so that labels are alike now and then."""
        halves = {
            n: column[drawn.integers(len(column), size=(4, HALF))] for n, column in few.items()
        }
        places = ([0, 2], [0, 3], [1, 2], [1, 3], [0], [1])
        return jax.device_put(
            [{n: np.concatenate(h[at]) for n, h in halves.items()} for at in places], device
        )

    def losses(batches: list[Columns]) -> np.ndarray:
        """Total and count of each batch, `(batches, 2)`."""
        return np.asarray([run(*model, batch) for batch in batches], np.float64)

    model = jax.device_put(model, device)
    # Compiled quickly, since it runs a few times
    quick = {"xla_backend_optimization_level": 0} if device.platform == "cpu" else None
    run = jax.jit(totals, compiler_options=quick)
    traced = run.trace(*model, batches()[0])
    most = MOST_FLOPS.get(device.platform, MOST_FLOPS_OF_OTHERS)
    tries = min(TRIES, int(most / (5 * max(1.0, program_flops(traced.jaxpr.jaxpr)))))
    if not tries:
        yield from (False, False)
        return
    tried = [batches() for _ in range(tries)]
    together = np.asarray([losses(batches[:4]) for batches in tried])  # (tries, 4, 2)
    total, count = np.moveaxis(together, 2, 0)
    interactions = np.abs(total @ [1, -1, -1, 1])
    compared = bool((interactions > TOLERANCE * np.abs(total).max(axis=1)).any())
    yield compared
    if compared or _adds_values(traced.jaxpr):
        yield False
        return
    alone = np.asarray([losses(batches[4:]) for batches in tried])  # (tries, 2, 2)
    with np.errstate(all="ignore"):  # a batch may count nothing
        mean = total / count * 2 * HALF
        halves = alone[..., 0] / alone[..., 1] * HALF
    moved, slack = halves @ [1, -1], TOLERANCE * np.abs(mean).max(axis=1)
    # From A to B, beside C and beside D, where C is not like D: halves may count nothing
    twice = np.abs(mean[:, :2] - mean[:, 2:] - 2 * moved[:, None]).max(axis=1) <= slack
    seen = np.minimum(np.abs(moved), np.abs(mean[:, 0] - mean[:, 1])) > 2 * slack
    yield bool(seen.any() and twice[seen].all())


def _adds_values(traced: ClosedJaxpr) -> bool:
    """Whether the program's total is a sum that counts each value once, as `Sum.of` does. It needs
    no further trial, which would compile the loss for another batch."""
    jaxpr = traced.jaxpr
    made = {v: operation for operation in jaxpr.eqns for v in operation.outvars}
    total, count = jaxpr.outvars
    constants = dict(zip(jaxpr.constvars, traced.consts, strict=True))
    known = count.val if isinstance(count, Literal) else constants.get(count)
    last = None if isinstance(total, Literal) else made.get(total)
    if known is None or last is None or last.primitive.name != "reduce_sum":
        return False
    axes, shape = last.params["axes"], jnp.shape(last.invars[0].aval)
    return 0 in axes and known == math.prod(shape[axis] for axis in axes)
