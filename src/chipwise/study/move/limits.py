"""Where the rules are known to fail: what to say beside a transfer that comes near."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...recipe.check import LEAST_FOR_BATCH_NORM
from ...recipe.optimizers import HIGHEST_ADAM, adam, adamw, sgd
from ...words.figures import counted
from .rules import Move
from .values import peak

if TYPE_CHECKING:
    from ...recipe.recipe import Recipe

_LARGEST_LINEAR = 8192  # Goyal et al. 2017, figure 1
_FEWEST_STEPS, _FEWEST_AN_EPOCH = 200, 10


def limits(old: Recipe, new: Recipe, move: Move, by_hand: bool = False) -> list[str]:
    """One sentence for each way in which `new`, the transferred recipe, may differ from `old` after all.

    `by_hand`: the rate was chosen and not the rule's.
    """
    optimizer, clock = new.optimizer, new.clock
    assert clock.total is not None
    found = []
    if move.batch > 1:
        found.append(
            "Above the critical batch size a larger batch wants less than the rule gives. It is not known "
            "for this task, and grows as the loss falls (McCandlish et al. 2018, arXiv:1812.06162): compare "
            "the losses of the first epochs."
        )
    if isinstance(optimizer, sgd) and move.batch > 1:
        if new.batch > _LARGEST_LINEAR:
            found.append(
                f"batch={new.batch}: the linear rule lost accuracy above {_LARGEST_LINEAR} on ImageNet "
                "(Goyal et al. 2017, figure 1)."
            )
        if new.starts_at_its_peak:
            found.append(
                "The first step has the peak rate: at a larger batch the linear rule needs a warm-up "
                '(Goyal et al. 2017, section 2.2): lr=warmup(..., "5%").'
            )
    if isinstance(optimizer, adam | adamw):
        highest, memory = peak(optimizer.lr, clock), peak(optimizer.b1, clock)
        if highest > HIGHEST_ADAM and move.batch > 1:
            found.append(
                f"lr={highest:g}: above {HIGHEST_ADAM} few nets train with Adam, whatever the batch, and the "
                f"rule knows no such cap: try lr={HIGHEST_ADAM}."
            )
        if memory < 0.5 and move.batch > 1:
            found.append(f"b1={memory:g} hardly averages: the batch is larger than the old average was.")
    if move.batch != 1 or move.run != 1:
        an_epoch = clock.examples / new.batch
        if clock.total < _FEWEST_STEPS:
            found.append(
                f"{clock.total} steps are few (expected {_FEWEST_STEPS} or more): the rules compare many "
                "small steps."
            )
        elif move.batch > 1 and an_epoch < _FEWEST_AN_EPOCH:
            found.append(
                f"{an_epoch:.3g} steps an epoch are few (expected {_FEWEST_AN_EPOCH} or more): so large a "
                "share of the data leaves little noise to keep."
            )
    if move.run != 1:
        found.append("Another length keeps an epoch's dynamics, not the result: a shorter run learns less.")
    if by_hand:
        found.append(
            "The decay makes up for a rate chosen by hand only for weights in front of a normalisation "
            "(van Laarhoven 2017, arXiv:1706.05350)."
        )
    before, group = old.batch // old.replicas, new.batch // new.replicas
    if new.task.has_batch_norm:
        return found + _batch_norm(new.batch, before, group, float(move.batch))
    if group < min(8, before):
        found.append(f"{counted(group, 'example')} a replica: few, since a TPU pads its arrays to 8.")
    return found


def _batch_norm(batch: int, before: int, group: int, k: float) -> list[str]:
    found = []
    if group != before:
        same, rest = divmod(batch, before)
        fix = "" if rest else f": replicas={same} keeps {before}"
        found.append(
            f"Batch norm takes its statistics over {group} examples a replica instead of {before}, "
            f"which is another net and another noise{fix}."
        )
    if group < min(LEAST_FOR_BATCH_NORM, before):
        found.append(
            f"{counted(group, 'example')} a replica: few for batch norm (expected {LEAST_FOR_BATCH_NORM} or "
            "more, Wu & He 2018, arXiv:1803.08494, figure 1)."
        )
    if k != 1:
        found.append(
            "Batch norm's running statistics blend once a step, with a momentum that is in the model: to "
            f"average over as many examples, take its power {k:g} (0.9 becomes {0.9**k:.4g}). digits, mnist "
            "and cifar10-davidnet have a setting for it, --set bn_momentum=...; in a recipe of your own, "
            "change it where the model is made."
        )
    return found
