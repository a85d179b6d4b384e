"""The rows of a run: metrics are read one step late, shown and stored."""

from __future__ import annotations

import contextlib
import itertools
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from ..base import DeviceFault, DivergedError, RunError, fact
from ..recipe.check import Finding, long_average
from ..recipe.recipe import Recipe
from ..recipe.task import finished
from ..step.state import NotFinite
from .folder.ledger import Ledger
from .folder.media import Medium
from .folder.run_folder import MOST_MEDIA, RunFolder
from .meter import Meter
from .noise import SCALE, Squared, scale_of
from .not_finite import cause
from .progress import Reporter
from .run_schedule import Agenda
from .session import Session
from .verify import ReplicaDiffers

SETTLED = 1000
"""Steps after which running statistics no longer depend on their initial values: with a momentum of
0.99, the default of Flax and Keras, 0.99 ** 1000 = 4e-5 of these is left, while after 100 steps it
is a third."""


def unsettled(metrics: Mapping[str, Any], step: int) -> bool:
    """Whether the running statistics of a model seem to depend on their initial values. If they do,
    the model evaluates far worse than it trains, after few steps."""
    train, held_out = (metrics.get(f"{on}/accuracy") for on in ("train", "eval"))
    if isinstance(train, float) and isinstance(held_out, float):
        return step < SETTLED and train - held_out > 0.2
    train, held_out = (metrics.get(f"{on}/loss") for on in ("train", "eval"))
    return (
        isinstance(train, float)
        and isinstance(held_out, float)
        and step < SETTLED
        and held_out > 3 * train > 0
    )


def epoch_of(recipe: Recipe, step: int) -> float:
    """The epochs done after `step`, as rows have them."""
    return round(step * recipe.batch / recipe.clock.examples, 6)


def rate_of(recipe: Recipe, step: int) -> float:
    """The learning rate of `step`, as rows have it. Steps are counted from 1."""
    rates = recipe.optimizer.hyper[recipe.optimizer.lr_name]
    return float(rates.table(recipe.clock, step - 1, step)[0])


class Log:
    """Collects rows `{"step", "epoch", "seconds", "train/...", "eval/...", speeds}`.

    `seconds` is the wall time of the run over all its processes, including start and compilation.
    Lost work, after the checkpoint from which a run is resumed, does not count. `undoing` removes
    its rows.

    *Arguments:* `session`: at the step with which this process begins. `folder`: only on host 0.
    `ledger`: gets rows of digests at the same times.

    *Fields:*

    - `begin`: the step with which this process begins.
    - `history`: all rows, including those before it was resumed.
    - `new`: the rows that have not been yielded yet, each with its kind, "log", "evaluation" or
      "checkpoint".
    - `final`: the last value of each metric.
    - `logged`: the last step whose training metrics were read.
    """

    def __init__(
        self,
        session: Session,
        meter: Meter,
        reporter: Reporter,
        folder: RunFolder | None,
        ledger: Ledger,
    ):
        self.session, self.recipe, self.meter, self.reporter = (
            session,
            session.recipe,
            meter,
            reporter,
        )
        self.folder, self.ledger = folder, ledger
        self.new: deque[tuple[str, dict[str, Any]]] = deque()
        self.begin = self.logged = session.step
        reporter.start(self.begin, session.total, ledger.saver.best.metric)
        if folder is not None and self.begin < ledger.agenda.last:
            for name, one in folder.data.items():
                reporter.say(one.told(name))
        for hole in ledger.holes:
            reporter.warn(hole)
        self.history = folder.rows(self.begin) if folder is not None else []
        self.final: dict[str, Any] = {}
        for row in self.history:
            self.final |= {k: v for k, v in row.items() if k.startswith(("train/", "eval/"))}
        self._pending: tuple[int, dict, bool] | None = None
        self._squared: Squared | None = None
        if session.on.noise:
            session.noisy = ledger.agenda.log
        self._warned = self._full = False

    def undoing(
        self, train: Callable[[], Generator[Any, None, None]], last: int
    ) -> Generator[Any, None, None]:
        """Removes what was recorded after the session's step, and yields from `train()`, which
        trains to step `last`. If two devices differ in a replica, goes back to the checkpoint
        before and does it again, to find out which is wrong."""
        session, ledger, saver = self.session, self.ledger, self.ledger.saver
        session.verifier.say = self.reporter.warn
        while True:
            self.history[:] = [row for row in self.history if row["step"] <= session.step]
            saver.rewind_best(self.history)
            if self.folder is not None:
                self.folder.rewind(session.step)
                if session.step < last and not saver.best.over:
                    self.folder.unfinish()
            try:
                yield from train()
                return
            except ReplicaDiffers:
                ledger.agree()
                session.begin(saver.restore(self.reporter), last=last)
                self.logged, self._pending = session.step, None
                self.new.clear()
                ledger.begin()
            except DeviceFault as fault:
                if isinstance(verified := fault.facts.get("verified"), int):
                    saver.forget(max(verified, self.begin))
                    ledger.forget(max(verified, self.begin))
                raise

    def take(self, agenda: Agenda) -> None:
        """After a log step, keeps the metric sums of the steps so far, which are on the device, for
        `collect`. After a step of the ledger, starts its digests."""
        if self.session.step in agenda.log:
            self._pending = (self.session.step, self.session.drain(), True)
            self._squared = self.session.programs.squared
        self.ledger.take()

    @property
    def unread(self) -> bool:
        """Whether `take` kept what `collect` has not read."""
        return self._pending is not None

    def collect(self, *, last: bool = False, rest: bool = False) -> None:
        """Reads what `take` kept. Called after the next step was started, so that the device is not
        idle. After the `last` step before a save, also compares the devices.

        Where a process stops between two rows, `rest` reads the sums of the steps since the last
        row. They stay in the state, and only `final` gets the values. Raises `NotFinite` when the
        loss is not finite, and the errors of `Ledger.collect`.
        """
        if last:
            self.ledger.take(last=True)
            self.session.verifier.collect(self.session.step)
        self.ledger.collect()
        if rest and self._pending is None and self.session.step > self.logged:
            self._pending = (self.session.step, self.session.drain(keep=True), False)
        if self._pending is None:
            return
        (step, sums, kept), self._pending = self._pending, None
        self.session.verifier.collect(step)
        counted = {name: s for name, s in jax.device_get(sums).items() if np.all(s.count)}
        values = {f"train/{name}": value for name, value in finished(counted).items()}
        noise = self._noise() if kept else {}
        values |= {name: noise.pop(name) for name in (SCALE,) if name in noise}
        speed = self.meter.mark(step)
        loss = values.get("train/loss", float("nan"))
        if not np.isfinite(loss):
            raise NotFinite("loss-not-finite", step, float(loss))
        row = self.row(step, {**values, **noise, "lr": rate_of(self.recipe, step)})
        if speed is not None:
            row |= {"steps_per_second": speed, "examples_per_second": speed * self.recipe.batch}
            row |= self.session.watch.row((step - self.logged) / speed)
        self.logged = step
        self._keep(row, values, "log" if kept else None)

    def _noise(self) -> dict[str, float]:
        """Returns the noise of the gradient in the step that `take` kept, if it is measured."""
        if self._squared is None:
            return {}
        squared, self._squared = self._squared, None
        values = self.session.programs.squares.read(squared, self.recipe.batch)
        return values and {**values, **scale_of(itertools.chain([values], reversed(self.history)))}

    def missed(self, agenda: Agenda) -> bool:
        """Whether the evaluation after the session's step is due, and an earlier process ended
        before it was recorded."""
        step = self.session.step
        made = any(
            row["step"] == step and any(name.startswith("eval/") for name in row)
            for row in self.history
        )
        due = 0 < step < agenda.last and step in agenda.evaluate
        due = due and self.recipe.task.eval is not None
        return due and self.session.placement.agree("missed", not made)

    def evaluate(self, kept: bool = True) -> None:
        """Evaluates the state if the task has evaluation data, and records the metrics, in `final`
        alone unless `kept`. Waits."""
        self.collect()
        session = self.session
        if self.recipe.task.eval is None:
            return
        with self.meter.section("evaluate"):
            metrics = session.evaluate()
        values = {f"eval/{name}": value for name, value in metrics.items()}
        if any(
            old["step"] == session.step and not old.keys().isdisjoint(values)
            for old in self.history
        ):
            self.final = values | self.final  # a finished run that is opened again keeps its values
        else:
            self._keep(self.row(session.step, values), values, "evaluation" if kept else None)
        average = long_average(self.recipe, session.step)
        # What a longer run settles by itself is no doubt about it
        short = session.total < SETTLED and session.step >= SETTLED / 10
        late = session.step == session.total or (short and not average)
        if late and jax.tree.leaves(session.abstract.state) and unsettled(self.final, session.step):
            if not self._warned:
                doubt = fact("statistics-unsettled", steps=session.step)
                self.reporter.warn(Finding(average[0]).sentence if average else doubt)
            self._warned = True

    @contextlib.contextmanager
    def divergence(self, newest: Callable[[], int | None]) -> Iterator[None]:
        """A context that turns `NotFinite` into a `DivergedError`, with the range of steps and the
        last good checkpoint, the step that `newest` returns.

        Adds a row with `"diverged"` to the run folder, which a resumed run removes.
        """
        try:
            yield
        except NotFinite as found:
            facts: dict[str, Any] = {
                "first": self.logged + 1,
                "last": found.step,
                "value": str(found.value),
            }
            if self.folder is not None:
                # A full disk must not hide why the run ends.
                with contextlib.suppress(RunError):
                    self.folder.log(
                        {**self.row(found.step, {}), "diverged": {"code": found.code, **facts}}
                    )
            run = str(self.folder.path) if self.folder is not None else None
            facts |= {"steps": (facts["first"], facts["last"]), "checkpoint": newest(), "run": run}
            why = None
            with contextlib.suppress(Exception):  # whatever the user's code raises in the search
                why = cause(self.recipe, facts["first"], facts["last"])
            if why is not None:
                text = (
                    "The training loss became {value} {steps:steps}: {why}. {checkpoint:checkpoint}"
                )
                raise DivergedError(found.code, text, **facts, why=why) from None
            raise DivergedError(found.code, **facts) from None

    def row(self, step: int, values: dict[str, Any]) -> dict[str, Any]:
        return {
            "step": step,
            "epoch": epoch_of(self.recipe, step),
            "seconds": self.meter.run_seconds,
            **values,
        }

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Adds a row of the user's own values, unless an earlier process has added it."""
        if not any(
            old["step"] == step and not old.keys().isdisjoint(values) for old in self.history
        ):
            self._store(self.row(step, dict(values)))

    def show(self, step: int, name: str, medium: Medium) -> None:
        """Stores a user's text or picture. Warns once, of the first for which there is no room."""
        if self.folder is not None and not self.folder.show(step, name, medium) and not self._full:
            self._full = True
            self.reporter.warn(fact("media-full", name=name, step=step, most=MOST_MEDIA))

    def _keep(self, row: dict[str, Any], values: dict[str, Any], kind: str | None) -> None:
        """Shows a row, and stores it if it has a `kind`."""
        self.final |= values
        self.reporter.update(row)
        if kind is not None:
            self._store(row)
            self.new.append((kind, row))

    def _store(self, row: dict[str, Any]) -> None:
        self.history.append(row)
        if self.folder is not None:
            self.folder.log({k: v for k, v in row.items() if not isinstance(v, np.ndarray)})
