"""Settings written for another framework, as this one counts them: `cw.read.fenwicks(batch=512, ...)`.

Here the batch is global, the loss a mean over it, weight decay acts once after the gradients are summed,
and a schedule has a value a step. Elsewhere each of these can be a device's own. Each function takes the
numbers as they were written and returns a `Reading`: the numbers that training really used, with one note
for each that means something else here.

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
from ..recipe.schedules import Schedule, exponential, linear, one_cycle
from ..study.move.values import rounded


@dataclass(frozen=True)
class Note:
    """One setting: as `written` there, what it `means` here, why, and where that can be read."""

    setting: str
    written: str
    means: str
    why: str
    source: str

    def __str__(self) -> str:
        return f"{self.setting}: {self.written} means {self.means}: {self.why} ({self.source})"


@dataclass(frozen=True)
class Reading:
    """What training really used, in this library's terms.

    `batch` and `replicas` are global; `lr` is a number or a schedule on the mean gradient;
    `weight_decay` acts once a step; `duration` is the run's length and `schedule` the length after which the
    written schedule ends, both None when not told. `notes`: what differs from the numbers as written.
    """

    framework: str
    batch: int
    replicas: int
    lr: float | Schedule
    weight_decay: float | None = None
    duration: str | None = None
    schedule: str | None = None
    notes: tuple[Note, ...] = ()

    @property
    def settings(self) -> list[str]:
        """For `cw.load(recipe, settings)` or `--set`: every number that was told. A schedule is left out."""
        values = {
            "batch": self.batch,
            "replicas": self.replicas,
            "lr": None if isinstance(self.lr, Schedule) else self.lr,
            "weight_decay": self.weight_decay,
            "duration": self.duration,
        }
        return [f"{name}={value}" for name, value in values.items() if value is not None]

    def __str__(self) -> str:
        return "\n".join([f"{self.framework}: {' '.join(self.settings)}", *map(str, self.notes)])


_FENWICKS = "fenwicks/train.py and TensorFlow's CrossShardOptimizer"


def fenwicks(
    *,
    batch: int,
    lr: float,
    weight_decay: float = 0.0,
    cores: int = 8,
    optimizer: str = "sgd",
    summed_loss: bool = False,
    epochs: float | None = None,
    examples: int | None = None,
    base_lr: float | None = None,
    decay_steps: int | None = None,
) -> Reading:
    """Settings of Fenwicks (2019) on a TPU of `cores` cores; `cores=1` on a GPU.

    *Arguments*: `batch`: global, as there; `lr`: the peak, and with `base_lr` and `decay_steps` the
    `init_lr` of `exp_decay_lr`; `weight_decay`: as given to `sgd_optimizer` or, with `optimizer="adam"`, to
    `adam_optimizer`; `summed_loss`: the loss was a sum over the batch, with `lr / batch` and
    `weight_decay * batch` given, as in its CIFAR-10 tutorial: `lr` and `weight_decay` are those two;
    `epochs` of `examples`, of which it drops the last, incomplete batch.

    Raises `RecipeError` for counts below 1 and other optimizers.
    """
    _counts(batch=batch, cores=cores)
    if optimizer not in ("sgd", "adam"):
        raise RecipeError(f"optimizer={optimizer!r}: Fenwicks has 'sgd' and 'adam'.")
    notes = []
    rate: float | Schedule = rounded(lr * batch) if summed_loss else lr
    decay = rounded(weight_decay / batch) if summed_loss else weight_decay
    if summed_loss:
        why = "the loss was summed, so the gradient is the mean's times the batch"
        notes.append(Note("lr", f"{lr:g}", f"{rate:g}", why, "Fenwicks tutorial 2"))
        notes.append(Note("weight_decay", f"{weight_decay:g}", f"{decay:g}", why, "Fenwicks tutorial 2"))
    if decay and optimizer == "sgd":
        acts = rounded(decay * cores)
        if cores > 1:
            why = f"each of {cores} cores adds the decay to its gradient, and the {cores} are summed"
            notes.append(Note("weight_decay", f"{decay:g}", f"{acts:g}", why, _FENWICKS))
        decay = acts
    elif decay:
        why = "the decayed copy of a weight is not the variable that is then updated: nothing decays"
        notes.append(Note("weight_decay", f"{decay:g}", "0", why, "fenwicks/optim.py"))
        decay = 0.0
    if decay_steps is not None:
        assert not isinstance(rate, Schedule)
        floor = base_lr or 0.0
        why = "exp_decay_lr adds the base rate to a decay by e, so the peak is their sum"
        notes.append(
            Note("lr", f"init {rate:g}, base {floor:g}", f"peak {rate + floor:g}", why, "fenwicks/train.py")
        )
        rate = exponential(rate, 1 / math.e, decay=f"{decay_steps}st", floor=floor)
    if cores > 1:
        why = "batch norm takes its statistics on each core"
        notes.append(
            Note("replicas", f"{cores} cores", f"{batch // cores} examples each", why, "TPUEstimator")
        )
    duration = None
    if epochs is not None:
        steps = int(epochs * (_needed("examples", examples) // batch))
        duration = f"{steps}st"
        exact = math.floor(epochs * _needed("examples", examples) / batch + 0.5)
        if exact != steps:
            why = f"the incomplete batch of each epoch is dropped; '{epochs:g}ep' is {exact} steps here"
            notes.append(Note("duration", f"{epochs:g} epochs", f"{steps} steps", why, "fenwicks/data"))
    return Reading("fenwicks", batch, cores, rate, decay, duration, None, tuple(notes))


_DDP = "torch.nn.parallel.DistributedDataParallel"


def pytorch_ddp(
    *,
    batch: int,
    world: int,
    lr: float,
    weight_decay: float = 0.0,
    epochs: float | None = None,
    examples: int | None = None,
    summed_loss: bool = False,
    sync_batch_norm: bool = False,
) -> Reading:
    """Settings of PyTorch's DistributedDataParallel, on `world` processes of one device each.

    *Arguments*: `batch`: of the DataLoader, a process; `lr`, `weight_decay`: of the optimizer;
    `summed_loss`: the loss is a sum over the process's batch; `epochs` of `examples`; `sync_batch_norm`:
    statistics over all processes.
    """
    _counts(batch=batch, world=world)
    notes = [
        Note(
            "batch",
            f"{batch} a process",
            f"{batch * world}",
            f"each of {world} processes loads its own",
            _DDP,
        )
    ]
    rate = lr
    if summed_loss:
        rate = rounded(lr * batch)
        why = "each process sums its batch, and the sums are averaged, not added, over processes"
        notes.append(Note("lr", f"{lr:g}", f"{rate:g}", why, _DDP))
        if weight_decay:
            given, weight_decay = weight_decay, rounded(weight_decay / batch)
            notes.append(
                Note("weight_decay", f"{given:g}", f"{weight_decay:g}", "beside a gradient that large", _DDP)
            )
    if weight_decay:
        why = "added after the average, alike in every process: once, whatever their number"
        notes.append(Note("weight_decay", f"{weight_decay:g}", f"{weight_decay:g}", why, "torch.optim"))
    replicas = 1 if sync_batch_norm else world
    over = batch * world // replicas
    notes.append(
        Note(
            "replicas",
            f"{world} processes",
            f"{replicas}",
            f"batch norm over {over} examples",
            "torch.nn.BatchNorm2d",
        )
    )
    if epochs is not None and examples is not None and examples % world:
        padded = -(-examples // world) * world
        why = f"DistributedSampler repeats {padded - examples} examples to share them evenly; here none is"
        notes.append(Note("duration", f"{epochs:g} epochs", f"{epochs:g}ep", why, "torch.utils.data"))
    duration = None if epochs is None else f"{epochs:g}ep"
    return Reading("pytorch_ddp", batch * world, replicas, rate, weight_decay, duration, None, tuple(notes))


def lightning(
    *,
    batch: int,
    devices: int,
    lr: float,
    weight_decay: float = 0.0,
    nodes: int = 1,
    accumulate_grad_batches: int = 1,
    epochs: float | None = None,
    examples: int | None = None,
    schedule_length: int | None = None,
    interval: str = "epoch",
) -> Reading:
    """Settings of Lightning's Trainer.

    *Arguments*: `batch`: of the DataLoader, a device; `devices` of each of `nodes`; `schedule_length`: the
    length written into the scheduler (`T_max`, `total_steps`), which is stepped once an `interval`:
    `"epoch"`, Lightning's default, or `"step"`, an optimizer step; `epochs` of `examples`.
    """
    _counts(batch=batch, devices=devices, nodes=nodes, accumulate_grad_batches=accumulate_grad_batches)
    if interval not in ("epoch", "step"):
        raise RecipeError(f"interval={interval!r}: Lightning has 'epoch' and 'step'.")
    world = devices * nodes
    total = batch * world * accumulate_grad_batches
    parts = f"{batch} a device × {devices} devices × {nodes} nodes × {accumulate_grad_batches} accumulated"
    source = "lightning.pytorch.Trainer"
    notes = [
        Note("batch", f"{batch}", f"{total}", parts, source),
        Note(
            "lr",
            f"{lr:g}",
            f"{lr:g}",
            "never multiplied by the devices; the accumulated loss is a mean",
            source,
        ),
        Note(
            "replicas",
            f"{world} devices",
            f"{world * accumulate_grad_batches}",
            f"batch norm sees {batch} examples at a time, on each device and in each accumulated part",
            "torch.nn.BatchNorm2d",
        ),
    ]
    schedule = None
    if schedule_length is not None:
        schedule = f"{schedule_length}{'ep' if interval == 'epoch' else 'st'}"
        run = None if epochs is None or examples is None else epochs * examples / total
        length = float(schedule_length) if interval == "step" else None
        if interval == "epoch" and epochs is not None:
            run, length = float(epochs), float(schedule_length)
        why = f"stepped once an {'epoch' if interval == 'epoch' else 'optimizer step'}"
        notes.append(
            _ends(f"{schedule_length}", schedule, length, run, why, "configure_optimizers: interval")
        )
    duration = None if epochs is None else f"{epochs:g}ep"
    replicas = world * accumulate_grad_batches
    return Reading("lightning", total, replicas, lr, weight_decay, duration, schedule, tuple(notes))


def accelerate(
    *,
    batch: int,
    processes: int,
    lr: float,
    weight_decay: float = 0.0,
    split_batches: bool = False,
    gradient_accumulation_steps: int = 1,
    epochs: float | None = None,
    examples: int | None = None,
    schedule_length: int | None = None,
) -> Reading:
    """Settings of Hugging Face Accelerate with a prepared scheduler.

    *Arguments*: `batch`: of the DataLoader, a process, or all of them with `split_batches`;
    `schedule_length`: steps written into the scheduler; `epochs` of `examples`.
    """
    _counts(batch=batch, processes=processes, gradient_accumulation_steps=gradient_accumulation_steps)
    if split_batches and batch % processes:
        raise RecipeError(f"batch={batch} with split_batches: expected a multiple of processes={processes}.")
    together = batch if split_batches else batch * processes
    total = together * gradient_accumulation_steps
    replicas = processes * gradient_accumulation_steps
    why = "split over the processes" if split_batches else f"each of {processes} processes loads its own"
    if gradient_accumulation_steps > 1:
        why += f", {gradient_accumulation_steps} times before a step"
    notes = [
        Note("batch", f"{batch}", f"{total}", why, "accelerate.Accelerator(split_batches)"),
        Note("lr", f"{lr:g}", f"{lr:g}", "never multiplied by the processes", "accelerate/optimizer.py"),
        Note(
            "replicas",
            f"{processes} processes",
            f"{replicas}",
            f"batch norm over {total // replicas} examples",
            "torch.nn.BatchNorm2d",
        ),
    ]
    schedule = None
    if schedule_length is not None:
        pace = 1 if split_batches else processes
        steps = max(math.floor(Fraction(schedule_length, pace) + Fraction(1, 2)), 1)
        schedule = f"{steps}st"
        why = "stepped once a step" if pace == 1 else f"stepped {pace} times a step, once for each process"
        run = None if epochs is None or examples is None else epochs * examples / total
        notes.append(_ends(f"{schedule_length} steps", schedule, steps, run, why, "accelerate/scheduler.py"))
    duration = None if epochs is None else f"{epochs:g}ep"
    return Reading("accelerate", total, replicas, lr, weight_decay, duration, schedule, tuple(notes))


def tpu_util(
    *,
    batch: int,
    lr: float,
    epochs: int,
    examples: int,
    cores: int = 8,
    pct_start: float = 0.4,
    div_factor: float = 25.0,
) -> Reading:
    """Settings of tpu-util's `OneCyclePolicy_TPU` (2021).

    *Arguments*: `batch`: `FLAGS["bs"]`, a core; `lr`: the peak, `FLAGS["lr"]`; `epochs` of `examples`;
    `pct_start`, `div_factor`: as there. The reading's `lr` is the part of the cycle that ran; what was meant
    is in the notes.
    """
    _counts(batch=batch, cores=cores, epochs=epochs, examples=examples)
    start, end = lr / div_factor, lr / div_factor / 1e4
    meant = one_cycle(lr, f"{100 * pct_start:g}%", rounded(start), rounded(end), "linear-cosine")
    planned = examples // batch * epochs
    # DistributedSampler gives each core as many, repeating some; an incomplete batch is dropped.
    ran = -(-examples // cores) // batch * epochs
    if not ran:
        raise RecipeError(
            f"{examples} examples make no batch of {batch} on each of {cores} cores: batch is a core's."
        )
    source = "tpu_util OneCyclePolicy_TPU"
    notes = [
        Note("batch", f"{batch} a core", f"{batch * cores}", f"each of {cores} cores loads its own", source),
        Note(
            "replicas",
            f"{cores} cores",
            f"{cores}",
            f"batch norm over {batch} examples",
            "torch.nn.BatchNorm2d",
        ),
    ]
    ramp = pct_start * planned
    ran_lr: float | Schedule = meant
    if cores > 1:
        why = "multiplied by the number of cores before they are started, when it is still 1"
        notes.append(Note("lr", f"{lr:g} × {cores} intended", f"{lr:g}", why, source))
        share = ran / planned
        reached = start + (lr - start) * min(ran / ramp, 1.0)
        why = f"its length is counted without the cores: {ran} of {planned} steps run ({share:.0%})"
        means = (
            f"a rise to {reached:.2g} that never peaks" if ran < ramp else "a cycle cut off before its end"
        )
        notes.append(Note("schedule", f"{meant!r}", means, why, source))
        if ran < ramp:
            ran_lr = linear(rounded(start), rounded(reached))
    why = (
        "the optimizer holds the parameters from before the model moved to the TPU, so none may have trained"
    )
    notes.append(
        Note("parameters", "optimizer made first", "unknown", why, "pytorch/xla: .to() makes new ones")
    )
    return Reading("tpu_util", batch * cores, cores, ran_lr, None, f"{ran}st", f"{planned}st", tuple(notes))


def _ends(written: str, means: str, length: float | None, run: float | None, why: str, source: str) -> Note:
    if length is not None and run:
        if length > 1.02 * run:
            why += f"; the run ends after {run:g}, {run / length:.0%} of the schedule"
        elif length < 0.98 * run:
            why += f"; it is over after {length / run:.0%} of the run"
    return Note("schedule", written, means, why, source)


def _counts(**given: Any) -> None:
    for name, value in given.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise RecipeError(f"{name}={value!r}: expected a whole number of at least 1.")


def _needed(name: str, value: int | None) -> int:
    if value is None:
        raise RecipeError(f"epochs= needs {name}=, the size of the training set, to become steps.")
    return value
