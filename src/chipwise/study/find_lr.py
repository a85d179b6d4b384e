"""`cw.find_lr(recipe)`: a peak learning rate from one short run whose rate grows."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..engine.on import ALL, On
from ..engine.placement import describe
from ..engine.progress import Reporter
from ..engine.session import Session
from ..errors import DivergedError, RecipeError
from ..recipe.recipe import Recipe, Validated
from ..recipe.schedules import as_schedule, rounded
from ..words.facts import Fact, fact
from .range_test import (
    FEWEST,
    NOT_FINITE,
    TOO_HIGH,
    Losses,
    RangeCurve,
    hyperparameter,
    read,
    run,
    tested,
    value_of,
)

LOW, HIGH, STEPS = 1e-5, 10.0, 100
"""Six decades hold the rates of every optimizer here, and 100 steps are as many as fastai's finder makes."""

MOST = 2000
"""Steps of a test: more read no better, and reading takes the square of their number."""

SCHEMA = "chipwise.find_lr/1"
MARKS = ("suggestion", "valley", "steep", "last_stable")


@dataclass(frozen=True)
class RangeTest:
    """One test. *Fields:* `held`: settings held at other values than the recipe's, such as `{"momentum":
    0.9}`; `curve`; `stopped`: a fact, why it ended before its last step, or None."""

    held: dict[str, float]
    curve: RangeCurve
    stopped: Fact | None

    @property
    def name(self) -> str:
        """Such as `momentum=0.9`, or ""."""
        return ", ".join(f"{name}={value:g}" for name, value in self.held.items())

    def to_json(self) -> dict[str, Any]:
        return {
            "held": self.held,
            **{name: getattr(self.curve, name) for name in MARKS},
            "stopped": self.stopped and self.stopped.json(),
            "doubts": [doubt.json() for doubt in self.curve.doubts],
            **{name: getattr(self.curve, name).tolist() for name in ("rates", "losses", "smoothed")},
        }


@dataclass(frozen=True)
class LrSearch:
    """The result of `find_lr`.

    *Fields:* `old`: the recipe; `tests`: one, or one for each value of the second setting; `chosen`: the
    index of the test that gives the suggestion, and `why`, a fact; `devices`: what it ran on; `notes`: facts.
    `curve` and the marks are those of the chosen test.
    """

    old: Recipe
    tests: tuple[RangeTest, ...]
    chosen: int
    why: Fact
    devices: dict[str, Any]
    notes: tuple[Fact, ...] = ()

    @property
    def test(self) -> RangeTest:
        """The chosen test."""
        return self.tests[self.chosen]

    @property
    def curve(self) -> RangeCurve:
        return self.test.curve

    suggestion = property(lambda self: self.curve.suggestion, doc="The peak rate to use, in the middle.")
    valley = property(lambda self: self.curve.valley)
    steep = property(lambda self: self.curve.steep)
    last_stable = property(lambda self: self.curve.last_stable)
    stopped = property(lambda self: self.test.stopped, doc="Why the test ended early, a fact or None.")

    @property
    def own_peak(self) -> float:
        """The highest rate of the original recipe."""
        optimizer = self.old.optimizer
        return optimizer.hyper[optimizer.lr_name].highest(self.old.clock)

    @property
    def settings(self) -> dict[str, float]:
        """The settings to use: the suggested rate, to two digits, and the value of the second setting."""
        held = {name: value for name, value in self.test.held.items() if value != value_of(self.old, name)}
        return {self.old.optimizer.lr_name: rounded(self.suggestion, 2), **held}

    @property
    def recipe(self) -> Recipe:
        """The recipe with `settings`: the schedule keeps its shape and gets the rate as its peak.

        If the curve is conclusive, the recipe counts as `validated` by the test, for `cw.check`. Raises
        `RecipeError` if the schedule is a function of the step, whose peak cannot be set.
        """
        optimizer = self.old.optimizer
        changed: dict[str, Any] = {}
        for name, value in self.settings.items():
            given, highest = optimizer.settings[name], value
            schedule = as_schedule(given, name)
            if name != optimizer.lr_name:  # held at its value at the highest rate
                highest = value * schedule.highest(self.old.clock) / (value_of(self.old, name) or 1.0)
            number = isinstance(given, int | float)
            changed[name] = value if number else schedule.with_peak(rounded(highest))
        new = dataclasses.replace(self.old, optimizer=optimizer.replace(**changed))
        if not self.curve.fell:
            return new
        source = str(fact("validated-by-find-lr", steps=len(self.curve.rates), batch=new.batch))
        return dataclasses.replace(new, validated=Validated(source=source))

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values; every number is finite."""
        return {
            "schema": SCHEMA,
            "recipe": self.old.describe(),
            "devices": self.devices,
            "notes": [note.json() for note in self.notes],
            "own_peak": self.own_peak,
            "suggestion": self.suggestion,
            "settings": self.settings,
            "why": self.why.json(),
            "chosen": self.chosen,
            "sweeps": [test.to_json() for test in self.tests],
        }


def find_lr(
    recipe: Recipe,
    *,
    low: float = LOW,
    high: float = HIGH,
    steps: int = STEPS,
    second: str | None = None,
    values: Sequence[float] | None = None,
    on: On = ALL,
    progress: str = "auto",
) -> LrSearch:
    """Finds a peak learning rate for `recipe` with the range test of Smith (2015, arXiv:1506.01186, section
    3.3): a fresh run whose rate grows from `low` to `high` with every step.

    The curve has the same bits on 1 and on 8 devices. The recipe is not changed, and nothing is written.

    *Arguments:*

    - `low`, `high`: the first and the last rate. `steps`: their number, from 10 to 2,000.
    - `second`: also vary `"momentum"` (`"b1"` for Adam), `"weight_decay"` or another number of the optimizer,
      with one test for each value, and suggest a pair, after Smith (2018, arXiv:1803.09820, sections 4.3 and
      4.4).
    - `values`: the values of `second`; by default some around the recipe's own. If it follows a schedule, its
      value at the highest rate counts.
    - `on`, `progress`: as in `fit`; a test is always exact.

    Raises `RecipeError` for settings that cannot be tested, `DataError` and `DeviceError` as `fit` does, and
    `DivergedError` if the very first loss is not finite.
    """
    _check(low, high, steps)
    if second is None and values is not None:
        raise RecipeError(
            "values-of-nothing", "values={values} needs a setting, such as second='momentum'.",
            values=list(values),
        )  # fmt: skip
    cases: list[dict[str, float]] = [{}]
    if second is not None:
        cases = [{second: value} for value in axis(recipe, second, values)]
    recipes = [tested(recipe, low, high, steps, held) for held in cases]
    tests = []
    with contextlib.ExitStack() as closing:
        reporter = Reporter(progress)
        session = closing.enter_context(Session(recipes[0], dataclasses.replace(on, exact=True)))
        closing.callback(reporter.stop)
        reporter.say(fact("range-test-begins", recipe=recipe.name, low=low, high=high))
        for number, (held, one) in enumerate(zip(cases, recipes, strict=True), 1):
            if held:
                name = ", ".join(f"{name}={value:g}" for name, value in held.items())
                reporter.say(fact("range-test-of-several", number=number, count=len(cases), name=name))

            def seen(step: int, loss: float) -> None:
                if step == 1:  # it includes compilation; the others do not
                    reporter.start(step, steps)
                reporter.update({"step": step, "train/loss": loss})

            losses = run(session, one, seen)
            reporter.stop()
            if not losses.finite:
                raise DivergedError(
                    "loss-not-finite-at-once",
                    "The first loss of '{recipe}' is not finite, before any rate acts. Check the data, "
                    "Task.init and Task.loss.", recipe=recipe.name,
                )  # fmt: skip
            rates = one.optimizer.hyper[one.optimizer.lr_name].table(one.clock).astype(np.float64)
            tests.append(RangeTest(held, read(rates, np.asarray(losses.finite)), _stopped(losses, rates)))
        chosen, why = choose(tests)
        devices = describe(session.machine, session.layout)
        return LrSearch(recipe, tuple(tests), chosen, why, devices, tuple(session.warnings))


def choose(tests: Sequence[RangeTest]) -> tuple[int, Fact]:
    """The index of the best test, and the reason.

    Smith (2018, sections 4.3 and 4.4): the value whose test reaches the lowest loss; if several do, the one
    that stays stable up to the highest rate.
    """
    if len(tests) == 1:
        return 0, fact("one-range-test")
    lowest = [float(test.curve.smoothed.min()) for test in tests]
    best = int(np.argmin(lowest))
    near = lowest[best] + 0.1 * max(float(tests[best].curve.smoothed[0]) - lowest[best], 0.0)
    as_low = [i for i, loss in enumerate(lowest) if loss <= near]
    chosen = max(as_low, key=lambda i: (tests[i].curve.last_stable, -lowest[i]))
    about = {"name": tests[chosen].name, "loss": lowest[chosen]}
    if chosen == best:
        return chosen, fact("lowest-loss", **about)
    others = [tests[i].name for i in as_low if i != chosen]
    return chosen, fact("as-low-and-stable", **about, others=others, lr=tests[chosen].curve.last_stable)


def _stopped(losses: Losses, rates: np.ndarray) -> Fact | None:
    if not losses.ended:
        return None
    step = len(losses.finite) + (losses.ended == NOT_FINITE)
    about = {"step": step, "steps": len(rates), "lr": float(rates[step - 1])}
    if losses.ended == NOT_FINITE:
        return fact("range-test-not-finite", **about)
    return fact("range-test-diverged", **about, times=TOO_HIGH)


def _check(low: float, high: float, steps: int) -> None:
    for name, value in (("low", low), ("high", high)):
        if type(value) not in (int, float) or not 1e-30 < value < 1e30:
            raise RecipeError(
                "rate-not-above-zero", "{name}={value!r}: expected a rate above 0.", name=name, value=value
            )
    if not low < high:
        raise RecipeError(
            "rates-out-of-order", "low={low:g}: expected less than high={high:g}.", low=low, high=high
        )
    if type(steps) is not int or not FEWEST <= steps <= MOST:
        facts = {"steps": steps, "fewest": FEWEST, "most": MOST}
        raise RecipeError("range-test-steps", "steps={steps!r}: expected {fewest} to {most}.", **facts)


def axis(recipe: Recipe, second: str, values: Sequence[float] | None = None) -> list[float]:
    """The values to hold `second` at, ascending and distinct; by default some around the recipe's own.

    Raises `RecipeError` if the optimizer has no such number, or a value is out of range.
    """
    own = value_of(recipe, second)
    schedule = as_schedule(hyperparameter(recipe.optimizer, second), second)
    if own == 0 and schedule.highest(recipe.clock) > 0:
        raise RecipeError(
            "second-is-zero-at-peak",
            "{name} is 0 where the rate is highest, so it cannot be scaled. Give {name} as a number.",
            name=second,
        )  # fmt: skip
    averages = second in ("momentum", "b1", "b2")
    if values is None:
        if averages:  # as Smith's 0.8, 0.9, 0.95: averages over half and twice as many steps
            around = [1 - 2 * (1 - own), own, 1 - (1 - own) / 2] if own > 0.5 else [0.0, 0.5, 0.9]
        else:
            around = [own / 3, own, own * 3] if own else [0.0, 1e-5, 1e-4, 1e-3]
        values = [rounded(value, 3) for value in around]
    for value in values:
        if type(value) not in (int, float) or not 0 <= value < (1 if averages else math.inf):
            below = " and less than 1" if averages else ""
            raise RecipeError(
                "second-out-of-range", "{name}={value!r}: expected a number of at least 0{below}.",
                name=second, value=value, below=below,
            )  # fmt: skip
    if not values:
        raise RecipeError(
            "second-without-values",
            "{name} has no values to test. Give some, such as {name}={own:g},{half:g}.", name=second, own=own,
            half=own / 2,
        )  # fmt: skip
    return sorted({float(value) for value in values})
