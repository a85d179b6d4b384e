"""A recipe: a task and every hyperparameter that changes the result, and nothing about a
machine."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from ..base import DataError, Fact, RecipeError, fact, invalid, unknown
from ..base.annotations import as_annotated
from ..base.elsewhere import refuse
from . import precision as precisions
from .described import described_rows
from .duration import Clock, Duration, Length
from .low_rank import lora
from .optimizers import Optimizer
from .schedules import as_schedule
from .source import spec_of
from .task import Task


def _refuse_unknown(cls):
    """Unknown and missing fields become a `RecipeError` that names the nearest field."""
    init = cls.__init__
    fields = dataclasses.fields(cls)
    names = [f.name for f in fields]
    needed = [f.name for f in fields if f.default is dataclasses.MISSING]

    @functools.wraps(init)
    def __init__(self, **given):
        for name in given:
            if name not in names:
                refuse("Recipe", [name])
                raise unknown("no-such-field", "field of Recipe", name, names)
        missing = [name for name in needed if name not in given]
        if missing:
            raise RecipeError("fields-missing", names=missing, example=_EXAMPLES[missing[0]])
        adapters = given.get("adapters")
        if isinstance(adapters, Mapping) and {*adapters} - {"stacked"} == {"rank", "alpha", "on"}:
            given["adapters"] = lora(**adapters)
        init(self, **given)

    cls.__init__ = __init__
    return cls


_EXAMPLES = {
    "task": "task=cw.Task(init=..., loss=..., train=...)",
    "batch": "batch=512 (global: over all replicas)",
    "duration": 'duration="24ep"',
    "optimizer": "optimizer=cw.sgd(lr=0.1)",
}


_ADAPTERS = "cw.recipe.lora(rank=16, alpha=32, on=('*/query/*kernel',)), or a dict of these"
_FOR_EVER = f"{10**8}st"
FROM_WEIGHTS = " from weights "
"""In the description of a recipe, between the name of a task's `init` and the digests of its
`weights`."""


@as_annotated
@dataclass(frozen=True, kw_only=True)
class Validated:
    """Where a recipe's settings are known to work.

    *Arguments*:

    - `source`: who measured it, and the result.
    - `forgetting`: the lowest and highest peak rate x weight decay x steps an epoch that worked.
      When it is None, `cw.check` takes half and twice the recipe's own.
    - `point`: the first `Recipe` that this is given to. That recipe sets it.
    """

    source: str
    forgetting: tuple[float, float] | None = None
    point: Recipe | None = field(default=None, repr=False)


@_refuse_unknown
@as_annotated
@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A task and every hyperparameter that changes the result.

    *Arguments* (keyword only, and every count is global, over all replicas and devices):

    - `task`: the `Task`.
    - `batch`: examples a step.
    - `duration`: how long to train: `"24ep"`, `"9360st"` or `"1.2e6ex"`.
    - `optimizer`: `cw.sgd(...)`, `cw.adam(...)`, `cw.adamw(...)`, `cw.recipe.muon(...)`,
      `cw.recipe.lamb(...)`, `cw.recipe.lars(...)` or `cw.from_optax(...)`.
    - `replicas`: logical data-parallel workers. Each takes `batch / replicas` examples of a step,
      with its own batch-norm statistics and random key. Devices share replicas, never the reverse.
    - `blocks`: programs that compute a step's replicas, each `replicas / blocks` of them together.
      None means one for each replica. Bits are equal on up to `blocks` devices. Another number
      gives different bits, and fewer are faster where one replica does not fill a chip.
    - `shards`: devices that compute a replica together as a group, with its parameters spread over
      them. The number of devices is `shards` times the number of groups. Bits are equal on any
      number of groups, and differ for another `shards`.
    - `precision`: `"f32"`, `"tf32"`, `"bf16"` or `"f16"`. See `chipwise.recipe.precision`.
    - `seed`: fixes initial parameters, data order, dropout and augmentation.
    - `ema`: decay per step of an exponential moving average of the parameters, which evaluation
      then uses. `None` for none.
    - `eval_block`: examples that evaluation and prediction compute together, on one device. The
      default follows from the replicas' batch, rounded up to whole groups of `Task.eval_group`.
      Another number gives other bits of metrics and predictions.
    - `frozen`: patterns of parameters and statistics that training leaves alone, such as
      `("backbone/*",)`. See `cw.recipe.freeze`. They are inputs of the step, with no gradient and
      no place in the optimizer.
    - `adapters`: `cw.recipe.lora(...)`, or a dict of its arguments. Low-rank changes of some
      matrices are trained. All else is frozen, unless `frozen` gives other patterns, such as
      `("*", "!classifier/*")`.
    - `name`: shown to people, no effect.
    - `validated`: where these settings are known to work. See `Validated`. It stays the same when
      settings are replaced, so `cw.check` can see how far they have moved.
    - `source`: how the command line created the recipe, which a run folder stores. No effect.

    Raises `RecipeError` for unknown fields and values out of range.
    """

    task: Annotated[Task, "cw.Task(...)"]
    batch: int
    duration: Length
    optimizer: Annotated[
        Optimizer, "cw.sgd(...), cw.adamw(...), cw.from_optax(...) or another of cw.recipe"
    ]
    replicas: int = 8
    blocks: int | None = None
    shards: int = 1
    precision: str = "f32"
    seed: int = 0
    ema: float | None = None
    eval_block: int | None = None
    frozen: tuple[str, ...] = ()
    adapters: Annotated[lora | None, _ADAPTERS] = None
    name: str = "recipe"
    validated: Validated | None = None
    source: dict[str, Any] | None = field(default=None, compare=False, repr=False)

    def __post_init__(self):
        if not self.name.isprintable():
            raise invalid("unprintable", "name", self.name, "text without control characters")
        for name in ("batch", "replicas", "blocks", "shards", "eval_block", "seed"):
            value = getattr(self, name)
            least = 0 if name == "seed" else 1
            if value is not None and value < least:
                expected = f"a whole number of at least {least}"
                raise invalid("field-not-whole", name, value, expected, least=least)
        if self.replicas % self.block_count:
            near = [n for n in range(1, self.replicas + 1) if self.replicas % n == 0]
            expected = f"a divisor of replicas={self.replicas}, such as {near}"
            raise invalid("blocks-indivisible", "blocks", self.blocks, expected, near=near)
        if self.shards > 1 and not self.optimizer.elementwise:
            kind = self.optimizer.describe()["optimizer"]
            expected = f"1, or an elementwise optimizer such as sgd or adamw, not {kind}"
            raise invalid("shards-whole-leaves", "shards", self.shards, expected, optimizer=kind)
        if self.seed >= 2**32:
            raise invalid("seed-too-large", "seed", self.seed, "below 2^32 = 4294967296")
        if self.ema is not None and not 0 < self.ema < 1:
            raise RecipeError("ema-range", ema=self.ema)
        object.__setattr__(self, "frozen", tuple(self.frozen))
        precisions.check(self.precision)
        if Duration.parse(self.duration).unit == "%":
            expected = "'24ep', '9360st' or '1.2e6ex', no share of itself"
            raise invalid("duration-of-itself", "duration", str(self.duration), expected)
        if self.validated is not None and self.validated.point is None:
            object.__setattr__(
                self,
                "validated",
                dataclasses.replace(
                    self.validated, point=dataclasses.replace(self, validated=None)
                ),
            )

    @property
    def held(self) -> tuple[str, ...]:
        """The patterns that training leaves alone: the task's, then `frozen`, by default all if
        there are adapters."""
        return (*self.task.frozen, *(self.frozen or (("*",) if self.adapters else ())))

    @property
    def block_count(self) -> int:
        """`blocks`, or the number of replicas if it is None."""
        return self.replicas if self.blocks is None else self.blocks

    @property
    def least_batch(self) -> int:
        """The smallest batch: one example for each device of each replica's group. Every batch is a
        multiple of it."""
        return self.replicas * self.shards

    def check_batch(self) -> None:
        """Raises `RecipeError` unless all replicas, and all devices of a group, get equally many
        examples."""
        code = "batch-indivisible"
        unit = self.replicas
        if self.batch % unit == 0:
            code = "shards-above-batch"
            unit = self.least_batch
        if self.batch % unit:
            lower = self.batch // unit * unit
            near = [n for n in (lower, lower + unit) if n]
            raise RecipeError(
                code, batch=self.batch, replicas=self.replicas, shards=self.shards, near=near
            )

    @property
    def clock(self) -> Clock:
        """Converts any duration to steps, from the training set's size, the batch and the total."""
        examples = len(self.task.train)
        if not examples:
            raise DataError(
                "training-source-empty", "The training source has no examples: len() is 0."
            )
        clock = Clock(examples=examples, batch=self.batch, total=None)
        return dataclasses.replace(clock, total=clock.steps(self.duration))

    @property
    def epochs(self) -> float:
        """How often the run takes every example."""
        clock = self.clock
        return (clock.total or 0) * clock.batch / clock.examples

    @property
    def forgetting(self) -> float | None:
        """Peak rate x weight decay x steps an epoch. This is one over the epochs over which weights
        average their updates (Wang & Aitchison 2024, arXiv:2405.13698). None for an optimizer
        without weight decay."""
        optimizer = self.optimizer
        clock = self.clock
        if optimizer.rate_power is None or "weight_decay" not in optimizer.settings:
            return None
        decay = as_schedule(optimizer.settings["weight_decay"]).highest(clock)
        return optimizer.hyper["lr"].highest(clock) * decay * clock.examples / self.batch

    @property
    def starts_at_its_peak(self) -> bool:
        """Whether no step has a higher rate than the first, which is above 0."""
        table = self.optimizer.hyper[self.optimizer.lr_name].table(self.clock)
        return bool(table.size) and float(table[0]) == float(table.max()) > 0

    def endless(self) -> Recipe:
        """This recipe, continued after its last step. The order of the examples continues into
        further epochs, and every hyperparameter keeps its last value. Up to there it is the same to
        the bit."""
        return dataclasses.replace(
            self, duration=_FOR_EVER, optimizer=self.optimizer.held(self.clock)
        )

    def describe(self) -> dict[str, Any]:
        """The recipe as plain JSON values, which are stored with a run and compared on resuming."""
        task = self.task

        def called(function):
            if function is None:
                return None
            function = getattr(function, "func", getattr(function, "__wrapped__", function))
            return getattr(function, "__qualname__", type(function).__qualname__)

        def data(source):
            if source is None:
                return None
            spec = spec_of(source)
            columns = {k: f"{v.dtype}{list(v.shape)}" for k, v in sorted(spec.items())}
            return {"examples": len(source), **columns}

        return {
            "name": self.name,
            "task": {
                "init": FROM_WEIGHTS.join(
                    [called(task.init), *(digest[:16] for digest in task.weights)]
                ),
                "loss": called(task.loss),
                "augment": called(task.augment),
                "mix": called(task.mix),
                "train": data(task.train),
                "eval": data(task.eval),
                **({"eval_group": task.eval_group} if task.eval_group > 1 else {}),
                **({"better": task.better} if task.better else {}),
            },
            "batch": self.batch,
            "replicas": self.replicas,
            "duration": str(self.duration),
            "optimizer": self.optimizer.describe(),
            "precision": self.precision,
            "seed": self.seed,
            "ema": self.ema,
            **({"blocks": self.blocks} if self.block_count != self.replicas else {}),
            **({"shards": self.shards} if self.shards > 1 else {}),
            **({"eval_block": self.eval_block} if self.eval_block is not None else {}),
            **({"frozen": frozen} if (frozen := [*task.frozen, *self.frozen]) else {}),
            **({"adapters": self.adapters.describe()} if self.adapters else {}),
        }

    def rows(self) -> list[tuple[str, str]]:
        """The recipe as (setting, value) pairs for a table, with the arithmetic done."""
        return described_rows({**self.describe(), "texts": self.task.known_texts}, self.clock)

    def warnings(self) -> list[Fact]:
        """What this recipe asks for but cannot do."""
        clock = self.clock
        warnings = []
        if clock.total == 0:
            warnings.append(fact("duration-zero", duration=str(self.duration)))
        if self.batch > clock.examples:
            warnings.append(fact("batch-above-examples", batch=self.batch, examples=clock.examples))
        return warnings + self.optimizer.warnings(clock)


Changes = list[tuple[str, Any, Any]]
"""Settings that differ, each with its value before and now."""


def difference(stored: dict, given: dict, path: str = "") -> Changes:
    """The differences between two descriptions, as (setting, stored, given)."""
    rows: Changes = []
    for key in sorted(set(stored) | set(given)):
        a = stored.get(key)
        b = given.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            rows += difference(a, b, f"{path}{key}.")
        elif a != b:
            rows.append((f"{path}{key}", a, b))
    return rows
