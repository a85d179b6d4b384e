"""Converts settings written for other frameworks: `cw.read.fenwicks(batch=512, ...)`.

Here the batch is global, the loss is a mean over it, weight decay acts once after the gradients are summed,
and a schedule has a value for each step. In other frameworks each of these may be per device. Each function
takes the settings as written and returns a `Reading`: the values that took effect, with a note for each
number that means something else here. Sources are in the notes and in `docs/transfer.md`.

    >>> reading = fenwicks(batch=512, lr=0.4, weight_decay=1.25e-4, cores=8)
    >>> reading.weight_decay
    0.001
    >>> reading.settings
    ['batch=512', 'replicas=8', 'lr=0.4', 'weight_decay=0.001']
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from ..errors import RecipeError
from ..recipe.schedule import rounded
from ..recipe.schedules import Schedule, exponential, linear, one_cycle
from ..words.facts import Fact, fact


@dataclass(frozen=True)
class Reading:
    """The settings that took effect, in this library's terms.

    `batch` and `replicas` are global; `lr` is a number or a schedule on the mean gradient; `weight_decay`
    acts once a step; `duration` is the run's length and `schedule` the length after which the written
    schedule ends, both None if unknown. `notes`: what differs from the numbers as written.
    """

    framework: str
    batch: int
    replicas: int
    lr: float | Schedule
    weight_decay: float | None = None
    duration: str | None = None
    schedule: str | None = None
    notes: tuple[Fact, ...] = ()

    @property
    def settings(self) -> list[str]:
        """All known numbers, for `cw.load(recipe, settings)` or `--set`. A schedule is left out."""
        names = ("batch", "replicas", "lr", "weight_decay", "duration")
        values = {name: getattr(self, name) for name in names}
        return [f"{k}={v}" for k, v in values.items() if v is not None and not isinstance(v, Schedule)]

    def __str__(self) -> str:
        return "\n".join([f"{self.framework}: {' '.join(self.settings)}", *map(str, self.notes)])


def fenwicks(
    *, batch: int, lr: float, weight_decay: float = 0.0, cores: int = 8, optimizer: str = "sgd",
    summed_loss: bool = False, epochs: float | None = None, examples: int | None = None,
    base_lr: float | None = None, decay_steps: int | None = None,
) -> Reading:  # fmt: skip
    """Settings of Fenwicks (2019) on a TPU of `cores` cores; `cores=1` on a GPU.

    *Arguments*: `batch`: global, as there; `lr`: the peak, or with `base_lr` and `decay_steps` the `init_lr`
    of `exp_decay_lr`; `weight_decay`: as passed to `sgd_optimizer` or, with `optimizer="adam"`, to
    `adam_optimizer`; `summed_loss`: the loss was a sum over the batch; `lr` and `weight_decay` are the values
    that were passed, `lr / batch` and `weight_decay * batch` as in its CIFAR-10 tutorial; `epochs` of
    `examples`, of which it drops the last, incomplete batch.

    Raises `RecipeError` for counts below 1 and other optimizers.
    """
    _counts(batch=batch, cores=cores)
    _one_of("optimizer", optimizer, ("sgd", "adam"))
    notes, rate, decay, duration = [], lr, weight_decay, None
    if summed_loss:
        rate, decay = rounded(lr * batch), rounded(weight_decay / batch)
        notes.append(fact("read-loss-summed", lr=lr, means=rate, decay=weight_decay, decay_means=decay))
    if decay and optimizer == "adam":
        notes.append(fact("read-decay-lost", decay=decay))
        decay = 0.0
    elif decay and cores > 1:
        acts = rounded(decay * cores)
        notes.append(fact("read-decay-each-core", decay=decay, means=acts, cores=cores))
        decay = acts
    peak: float | Schedule = rate
    if decay_steps is not None:
        floor = base_lr or 0.0
        notes.append(fact("read-peak-is-sum", lr=rate, base=floor, means=rate + floor))
        peak = exponential(rate, 1 / math.e, decay=f"{decay_steps}st", floor=floor)
    if cores > 1:
        notes.append(fact("read-batch-norm", parts=cores, replicas=cores, examples=batch // cores))
    if epochs is not None:
        if examples is None:
            raise RecipeError("read-examples-missing", epochs=epochs)
        steps, exact = int(epochs * (examples // batch)), math.floor(epochs * examples / batch + 0.5)
        duration = f"{steps}st"
        if exact != steps:
            notes.append(fact("read-batch-dropped", epochs=epochs, means=steps, exact=exact))
    return Reading("fenwicks", batch, cores, peak, decay, duration, None, tuple(notes))


def pytorch_ddp(
    *, batch: int, world: int, lr: float, weight_decay: float = 0.0, epochs: float | None = None,
    examples: int | None = None, summed_loss: bool = False, sync_batch_norm: bool = False,
) -> Reading:  # fmt: skip
    """Settings of PyTorch's DistributedDataParallel, on `world` processes of one device each.

    *Arguments*: `batch`: of each process's DataLoader; `lr`, `weight_decay`: of the optimizer; `summed_loss`:
    the loss is a sum over the process's batch; `epochs` of `examples`; `sync_batch_norm`: statistics over all
    processes.
    """
    _counts(batch=batch, world=world)
    total, replicas = batch * world, 1 if sync_batch_norm else world
    notes, rate, decay = [fact("read-batch-each", batch=batch, means=total, parts=world)], lr, weight_decay
    if summed_loss:
        rate, decay = rounded(lr * batch), rounded(weight_decay / batch)
        facts = {"lr": lr, "means": rate, "decay": weight_decay, "decay_means": decay}
        notes.append(fact("read-loss-summed-and-averaged", **facts))
    if decay:
        notes.append(fact("read-decay-once", decay=decay))
    notes.append(fact("read-batch-norm", parts=world, replicas=replicas, examples=total // replicas))
    if epochs is not None and examples is not None and examples % world:
        notes.append(fact("read-examples-repeated", repeated=-examples % world))
    return Reading("pytorch_ddp", total, replicas, rate, decay, _epochs(epochs), None, tuple(notes))


def lightning(
    *, batch: int, devices: int, lr: float, weight_decay: float = 0.0, nodes: int = 1,
    accumulate_grad_batches: int = 1, epochs: float | None = None, examples: int | None = None,
    schedule_length: int | None = None, interval: str = "epoch",
) -> Reading:  # fmt: skip
    """Settings of Lightning's Trainer.

    *Arguments*: `batch`: of each device's DataLoader; `devices`: of each of `nodes`; `schedule_length`: the
    scheduler's length (`T_max`, `total_steps`); `interval`: how often it is stepped, `"epoch"` (Lightning's
    default) or `"step"` (an optimizer step); `epochs` of `examples`.
    """
    _counts(batch=batch, devices=devices, nodes=nodes, accumulate_grad_batches=accumulate_grad_batches)
    _one_of("interval", interval, ("epoch", "step"))
    replicas = devices * nodes * accumulate_grad_batches
    total, schedule = batch * replicas, None
    notes = [
        fact("read-batch-each", batch=batch, means=total, parts=replicas),
        fact("read-rate-as-written", lr=lr),
        fact("read-batch-norm", parts=devices * nodes, replicas=replicas, examples=batch),
    ]
    if schedule_length is not None:
        schedule = f"{schedule_length}{'ep' if interval == 'epoch' else 'st'}"
        notes.append(fact(f"read-schedule-by-{interval}", length=schedule_length, means=schedule))
        notes += _ends(schedule_length, epochs if interval == "epoch" else _steps(epochs, examples, total))
    length = _epochs(epochs)
    return Reading("lightning", total, replicas, lr, weight_decay, length, schedule, tuple(notes))


def accelerate(
    *, batch: int, processes: int, lr: float, weight_decay: float = 0.0, split_batches: bool = False,
    gradient_accumulation_steps: int = 1, epochs: float | None = None, examples: int | None = None,
    schedule_length: int | None = None,
) -> Reading:  # fmt: skip
    """Settings of Hugging Face Accelerate with a prepared scheduler.

    *Arguments*: `batch`: of each process's DataLoader, or of all with `split_batches`; `schedule_length`: the
    scheduler's length in steps; `epochs` of `examples`.
    """
    _counts(batch=batch, processes=processes, gradient_accumulation_steps=gradient_accumulation_steps)
    if split_batches and batch % processes:
        raise RecipeError("read-batch-unsplit", batch=batch, processes=processes)
    replicas, schedule = processes * gradient_accumulation_steps, None
    each = batch // processes if split_batches else batch
    total = each * replicas
    notes = [
        fact("read-batch-each", batch=each, means=total, parts=replicas),
        fact("read-rate-as-written", lr=lr),
        fact("read-batch-norm", parts=processes, replicas=replicas, examples=each),
    ]
    if schedule_length is not None:
        pace = 1 if split_batches else processes
        steps = max(math.floor(Fraction(schedule_length, pace) + Fraction(1, 2)), 1)
        schedule = f"{steps}st"
        notes.append(fact("read-schedule-paced", length=schedule_length, means=schedule, pace=pace))
        notes += _ends(steps, _steps(epochs, examples, total))
    length = _epochs(epochs)
    return Reading("accelerate", total, replicas, lr, weight_decay, length, schedule, tuple(notes))


def tpu_util(
    *, batch: int, lr: float, epochs: int, examples: int, cores: int = 8, pct_start: float = 0.4,
    div_factor: float = 25.0,
) -> Reading:  # fmt: skip
    """Settings of tpu-util's `OneCyclePolicy_TPU` (2021).

    *Arguments*: `batch`: `FLAGS["bs"]`, per core; `lr`: the peak, `FLAGS["lr"]`; `epochs` of `examples`;
    `pct_start`, `div_factor`: as there. The reading's `lr` is the part of the cycle that ran.
    """
    _counts(batch=batch, cores=cores, epochs=epochs, examples=examples)
    start, end, total = lr / div_factor, lr / div_factor / 1e4, batch * cores
    meant: Schedule = one_cycle(lr, f"{100 * pct_start:g}%", rounded(start), rounded(end), "linear-cosine")
    planned = examples // batch * epochs
    # DistributedSampler repeats examples to give each core equally many; an incomplete batch is dropped.
    ran = -(-examples // cores) // batch * epochs
    if not ran:
        raise RecipeError("read-no-batch", examples=examples, batch=batch, cores=cores)
    notes = [
        fact("read-batch-each", batch=batch, means=total, parts=cores),
        fact("read-batch-norm", parts=cores, replicas=cores, examples=batch),
    ]
    if cores > 1:
        notes.append(fact("read-rate-not-multiplied", lr=lr, cores=cores))
        notes.append(
            fact("read-cycle-cut", schedule=repr(meant), ran=ran, planned=planned, share=ran / planned)
        )
        if (ramp := pct_start * planned) > ran:
            meant = linear(rounded(start), rounded(start + (lr - start) * ran / ramp))
            notes.append(fact("read-peak-never-reached", lr=meant.end))
    notes.append(fact("read-optimizer-made-first"))
    return Reading("tpu_util", total, cores, meant, None, f"{ran}st", f"{planned}st", tuple(notes))


def _ends(length: float, run: float | None) -> list[Fact]:
    """Notes about a schedule of `length` in a run, both in steps or both in epochs."""
    if run and length > 1.02 * run:
        return [fact("read-schedule-outlasts", share=run / length)]
    return [fact("read-schedule-over", share=length / run)] if run and length < 0.98 * run else []


def _steps(epochs: float | None, examples: int | None, batch: int) -> float | None:
    return None if epochs is None or examples is None else epochs * examples / batch


def _epochs(epochs: float | None) -> str | None:
    return None if epochs is None else f"{epochs:g}ep"


def _counts(**given: Any) -> None:
    for name, value in given.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise RecipeError("read-count", name=name, value=value)


def _one_of(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise RecipeError("read-choice", name=name, value=value, choices=choices)
