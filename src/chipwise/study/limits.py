"""Where the rules of a transfer are known to fail: what to say beside one that comes near."""

from __future__ import annotations

from fractions import Fraction

from ..recipe.check import LEAST_FOR_BATCH_NORM
from ..recipe.optimizers import HIGHEST_ADAM
from ..recipe.recipe import Recipe
from ..words.facts import Fact, fact

_LARGEST_LINEAR = 8192  # Goyal et al. 2017, figure 1
_FEWEST_STEPS, _FEWEST_AN_EPOCH = 200, 10
_SUBLANES = 8  # a TPU pads its arrays to so many rows


def limits(old: Recipe, new: Recipe, k: Fraction, run: Fraction, by_hand: bool = False) -> list[Fact]:
    """What may make `new`, the transferred recipe, differ from `old` after all.

    *Arguments:* `k`: new batch over old; `run`: examples of the whole run, new over old; `by_hand`: the rate
    was chosen and is not the rule's.
    """
    facts = _of_the_optimizer(new) if k > 1 else []
    if k != 1 or run != 1:
        steps = new.clock.total or 0
        an_epoch = new.clock.examples / new.batch
        if steps < _FEWEST_STEPS:
            facts.append(fact("limit-few-steps", steps=steps, fewest=_FEWEST_STEPS))
        elif k > 1 and an_epoch < _FEWEST_AN_EPOCH:
            facts.append(fact("limit-few-steps-an-epoch", steps=an_epoch, fewest=_FEWEST_AN_EPOCH))
    if run != 1:
        facts.append(fact("limit-other-length"))
    if by_hand:
        facts.append(fact("limit-rate-by-hand"))
    before, group = old.batch // old.replicas, new.batch // new.replicas
    if new.task.has_batch_norm:
        facts += _of_batch_norm(new.batch, before, group, float(k))
    elif group < min(_SUBLANES, before):
        facts.append(fact("limit-padding", group=group))
    return facts


def _of_the_optimizer(new: Recipe) -> list[Fact]:
    """Of a larger batch."""
    optimizer, clock, facts = new.optimizer, new.clock, [fact("limit-critical-batch")]
    if optimizer.rate_power == 1:
        if new.batch > _LARGEST_LINEAR:
            facts.append(fact("limit-linear-rule", batch=new.batch, largest=_LARGEST_LINEAR))
        if new.starts_at_its_peak:
            facts.append(fact("limit-no-warmup"))
    elif optimizer.rate_power is not None:
        highest, memory = optimizer.hyper["lr"].highest(clock), optimizer.hyper["b1"].highest(clock)
        if highest > HIGHEST_ADAM:
            facts.append(fact("limit-adam-rate", lr=highest, highest=HIGHEST_ADAM))
        if memory < 0.5:
            facts.append(fact("limit-adam-memory", b1=memory))
    return facts


def _of_batch_norm(batch: int, before: int, group: int, k: float) -> list[Fact]:
    facts = []
    if group != before:
        same, rest = divmod(batch, before)
        code = "limit-batch-norm-group" if rest else "limit-batch-norm-group-mended"
        facts.append(fact(code, group=group, before=before, replicas=same))
    if group < min(LEAST_FOR_BATCH_NORM, before):
        facts.append(fact("limit-batch-norm-few", group=group, least=LEAST_FOR_BATCH_NORM))
    if k != 1:
        facts.append(fact("limit-batch-norm-momentum", k=k, example=0.9**k))
    return facts
