"""`diff` finds the first step at which two runs, or two recipes, part, and the first cause there
that has a name.

It compares in order, from the inputs to the result: the start, the examples and the schedules. Then
it compares each replica's gradient, and looks for the first operation of its program with another
result. Last comes the update. Runs may part although their recipes compute the same. Then one of
them was computed otherwise. Computing the step here shows which one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..base import Fact, RecipeError, Say, fact, plain, silent
from ..base.annotations import as_annotated
from ..base.json_types import part
from ..data.compared import changed_data, texts
from ..machine.arithmetic import fixed
from ..machine.compiler import jitted
from ..recipe.recipe import Changes, Recipe, difference
from ..run.evaluate import evaluation
from ..run.feed import flat, host_window, trained
from ..run.folder.checkpoint import flatten, state_of
from ..run.folder.ledger import head_of
from ..run.folder.run_reader import (
    DIGESTS,
    Rows,
    StoredLedger,
    StoredRun,
    metrics_of,
    read_ledger,
    settings_in,
)
from ..run.on import ALL, On
from ..run.session import Session
from ..step.layout import Layout, tree_sum
from ..step.replica import ReplicaInput
from ..step.state import TrainState, first_digest
from ..step.step import Step
from .equations import parted, run

STEPS = 1000
"""The default number of steps for which two recipes that compute the same are followed."""


@dataclass(frozen=True)
class Side:
    """One of the two that are compared. `run` is `None` for a recipe without a run."""

    name: str
    """The name to show."""
    recipe: Recipe
    run: StoredRun | None = None

    @functools.cached_property
    def ledger(self) -> StoredLedger:
        ledger = None if self.run is None else read_ledger(self.run.path)
        return StoredLedger([], {}, {}, []) if ledger is None else ledger

    @property
    def rows(self) -> Rows:
        return self.ledger.rows

    def data(self, now: dict[str, Any]) -> dict[str, Any]:
        """The digests of its data, as its run states them, otherwise those of `now`."""
        return self.ledger.heads[-1]["data"] if self.ledger.heads else now

    def evaluations(self, last: int) -> dict[int, dict[str, float]]:
        """Step to metrics of the run's evaluations until step `last`."""
        rows = [] if self.run is None else self.run.rows
        return {
            row["step"]: values
            for row in rows
            if (values := {n: v for n, v in metrics_of(row).items() if n.startswith("eval/")})
            and row["step"] <= last
        }

    def known(self) -> dict[str, Any]:
        """The known facts of how the run was computed: the settings and the data that it states,
        the machine, its devices, the feed, the versions, and the number of faults."""
        if self.run is None:
            return {}
        starts = [start for start in self.run.starts if isinstance(start.get("machine"), dict)]
        ends = [end for end in self.run.processes if end["event"] == "end"]
        faults = [part(end, "verified").get("faults") for end in ends]
        last: dict[str, Any] = starts[-1] if starts else {}
        machine, devices, computed = (part(last, n) for n in ("machine", "devices", "computed"))
        return {
            "machine": machine.get("title"),
            **{name: devices.get(name) for name in ("kind", "count", "hosts", "update")},
            "versions": computed.get("versions") or {},
            "kernels": computed.get("kernels"),
            "feed": part(self.run.result, "feed").get("data"),
            "data": self.data({}),
            "recipe": settings_in(self.run.recipe),
            "faults": sum(len(each) for each in faults if isinstance(each, list)),
        }


@dataclass(frozen=True)
class Parting:
    """The place where two runs or recipes part. `a` and `b` are their names."""

    a: str
    b: str
    settings: Changes
    """The differences of the recipes: (name, a, b)."""
    same_program: bool
    """Whether both trace to the same operations."""
    step: int | None = None
    """The first step after which the recipes' bits differ, 0 for the start, `None` if there is
    none."""
    compared: int = 0
    """The number of steps with the same bits."""
    parts: list[str] = field(default_factory=list)
    """The parts that differ after `step`, or after `runs_part`."""
    causes: list[Fact] = field(default_factory=list)
    """In the order of a step. The first one explains the others."""
    runs_part: int | None = None
    """The first step after which the ledgers of two runs differ, although their recipes compute the
    same."""
    odd: list[str] = field(default_factory=list)
    """The names of the runs whose ledger differs from the step computed here."""
    evaluation: list[str] = field(default_factory=list)
    """The differences of their evaluation."""
    uncompared: bool = False
    """Whether they are two runs whose ledgers have no step in common."""

    @property
    def verdict(self) -> Fact:
        facts = {
            "a": self.a,
            "b": self.b,
            "step": self.step,
            "compared": self.compared,
            "what": self.parts,
        }
        if self.step is not None:
            return fact("diff-start" if self.step == 0 else "diff-step", **facts)
        if self.runs_part is not None:
            return fact("diff-runs", **facts | {"step": self.runs_part})
        if self.evaluation:
            return fact("diff-evaluation", **facts | {"what": self.evaluation})
        if self.uncompared:
            return fact("diff-uncompared", **facts)
        return fact("diff-not-yet" if self.compared else "diff-same", **facts)

    def to_json(self) -> dict[str, Any]:
        return {"schema": "chipwise.diff/1", **plain(self), "verdict": self.verdict.json()}


@as_annotated
@fixed()
def diff(
    a: Side,
    b: Side,
    *,
    steps: int | None = None,
    on: On = ALL,
    say: Say = silent,
) -> Parting:
    """Finds where two runs or recipes part, and why.

    *Arguments:* `steps` is how far to follow them, by default to where their ledgers part, or
    `STEPS`. `say` is called with a fact about the current work.

    Raises `RecipeError` for recipes with `shards`.
    """
    if (shards := max(a.recipe.shards, b.recipe.shards)) > 1:
        text = (
            "shards={shards}: diff follows replicas on one device. Compare the runs' ledger.jsonl."
        )
        raise RecipeError("diff-shards", text, shards=shards)
    for side in (a, b):
        if digest := side.known().get("kernels"):
            raise RecipeError("diff-kernels", kernels=digest)
    settings = difference(a.recipe.describe(), b.recipe.describe())
    settings = [change for change in settings if not change[0].startswith("source")]
    with Session(a.recipe, on) as first, Session(b.recipe, on) as second:
        data = [session.data_compared for session in (first, second)]
        heads = [head_of(session) for session in (first, second)]
        same = heads[0]["computed"]["code"] == heads[1]["computed"]["code"]
        stated = [side.data(texts(one)) for side, one in zip((a, b), data, strict=True)]
        evaluation = _evaluation(a.recipe, b.recipe, "evaluation" in dict(changed_data(*stated)))
        agree, last = _ledgers(a.rows, b.rows)
        evaluation = evaluation or _evaluated(a.evaluations(agree), b.evaluations(agree))
        apart = None not in (a.run, b.run) and not agree and last is None
        found = Parting(a.name, b.name, settings, same, evaluation=evaluation, uncompared=apart)
        one, other = (each["training"] for each in data)
        alike = same and not settings and one == other and one.whole and last is None
        if alike and first_digest(a.recipe) == first_digest(b.recipe):
            return found
        most = min(first.total, second.total, steps or last or max(STEPS, agree))
        return _followed((a, b), (first, second), found, (agree, last), most, say)


def _evaluation(a: Recipe, b: Recipe, changed: bool) -> list[str]:
    """The differences in how two recipes are evaluated. *Arguments:* `changed`: whether their data
    is known to differ."""
    sources = a.task.eval, b.task.eval
    if sources[0] is None or sources[1] is None:
        return [] if sources[0] is sources[1] else ["whether there is evaluation data"]
    one, other = evaluation(a, sources[0]), evaluation(b, sources[1])
    unlike = ["its metrics"] if one.sums.keys() != other.sums.keys() else []
    if not unlike and one.digest != other.digest:
        unlike = ["its program"]
    return unlike + ["its data"] * changed


def _evaluated(a: dict[int, dict[str, float]], b: dict[int, dict[str, float]]) -> list[str]:
    """The first evaluation in which two runs have other values of a metric."""
    steps = (step for step in sorted(a.keys() & b.keys()) if difference(a[step], b[step]))
    return [f"its values after step {step}" for step in steps][:1]


def _ledgers(a: Rows, b: Rows) -> tuple[int, int | None]:
    """The last step up to which two ledgers agree, or 0, and the first at which they differ, or
    `None`."""
    agree = 0
    for step in sorted(a.keys() & b.keys()):
        if _parts(a[step], b[step]):
            return agree, step
        agree = step
    return agree, None


def _parts(a: dict[str, str], b: dict[str, str]) -> list[str]:
    return [name for name in DIGESTS if a.get(name) != b.get(name)]


def _followed(
    sides: tuple[Side, Side],
    sessions: tuple[Session, Session],
    found: Parting,
    ledgers: tuple[int, int | None],
    most: int,
    say: Any,
) -> Parting:
    """Follows both from a state that they share to the first step that differs, and explains it.

    *Arguments:* `ledgers`: see `_ledgers`.
    """
    agree, apart = ledgers
    start, states = _start(sides, sessions, agree)
    say(
        fact(
            "diff-following",
            "following both from step {start} to at most {most}",
            start=start,
            most=most,
        )
    )

    def begin() -> None:
        for session, state in zip(sessions, states, strict=True):
            session.begin(state)

    def digests() -> list[dict[str, str]]:
        return [one.programs.digests.read(one.digest()).values for one in sessions]

    begin()
    at, unlike, odd = start, _parts(*digests()), list[str]()
    while at < most and not unlike:
        at += 1
        for session in sessions:
            session.watched = (at,)
            session.advance()
        here = digests()
        unlike = _parts(*here)
        if at == apart:
            odd = [
                side.name
                for side, own in zip(sides, here, strict=True)
                if _parts(side.rows[at], own)
            ]
    if not unlike and apart is not None and apart <= at:
        parts, causes = (
            _parts(sides[0].rows[apart], sides[1].rows[apart]),
            list(_of_runs(sides, odd)),
        )
        return dataclasses.replace(
            found, compared=at, runs_part=apart, parts=parts, odd=odd, causes=causes
        )
    if not unlike:
        return dataclasses.replace(found, compared=at)
    begin()
    for session in sessions:
        session.watched = ()
        session.advance(max(0, at - 1 - start))
    before = [session.snapshot() for session in sessions]
    recipes = [side.recipe for side in sides]
    causes = list(_of_start(recipes, before) if at == start else _of_step(recipes, before, at - 1))
    return dataclasses.replace(found, step=at, compared=max(0, at - 1), parts=unlike, causes=causes)


def _start(sides: Any, sessions: Any, agree: int) -> tuple[int, list[TrainState | None]]:
    """The newest step up to `agree` with a readable checkpoint in both runs, and their states.
    Otherwise step 0 without states."""
    runs = [side.run for side in sides if side.run is not None]
    shared = set(runs[0].checkpoints) & set(runs[1].checkpoints) if len(runs) == 2 else set()
    for step in sorted((one for one in shared if one <= agree), reverse=True):
        with contextlib.suppress(Exception):  # Orbax raises many types for damaged bytes
            pairs = zip(runs, sessions, strict=True)
            return step, [state_of(one.path, session.state_layout, step) for one, session in pairs]
    return 0, [None, None]


# ---- causes


def _of_runs(sides: tuple[Side, Side], odd: list[str]) -> Iterator[Fact]:
    """The known differences of two runs that part although their recipes compute the same."""
    if odd:
        yield fact("diff-odd", odd=odd)
    for name, a, b in difference(sides[0].known(), sides[1].known()):
        yield fact("diff-known", name=name, a=a, b=b)


def _of_seed(a: Recipe, b: Recipe) -> Iterator[Fact]:
    if a.seed != b.seed:
        yield fact("diff-seed", a=a.seed, b=b.seed)


def _of_start(recipes: list[Recipe], states: list[TrainState]) -> Iterator[Fact]:
    """The reasons why the first states differ."""
    yield from _of_seed(*recipes)
    trees = [flatten(dataclasses.replace(state, sums={})) for state in states]
    if unlike := _unlike(*trees):
        yield fact("diff-initial", "the start differs in {what:few}", what=unlike)


def _unlike(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    """The names of arrays that differ, also in their shapes."""
    pairs = [(name, a.get(name), b.get(name)) for name in dict.fromkeys([*a, *b])]
    return [
        name
        for name, x, y in pairs
        if x is None
        or y is None
        or x.shape != y.shape
        or np.asarray(x).tobytes() != np.asarray(y).tobytes()
    ]


def _of_step(recipes: list[Recipe], states: list[TrainState], step: int) -> Iterator[Fact]:
    """The reasons why the states after `step` steps lead to different ones after one more."""
    windows = [host_window(recipe, step, 1) for recipe in recipes]
    sizes = [(recipe.batch, recipe.replicas, recipe.block_count) for recipe in recipes]
    if sizes[0] != sizes[1]:
        yield fact("diff-batch", a=sizes[0], b=sizes[1])
        return
    yield from _of_seed(*recipes)
    yield from _of_examples(recipes, step)
    tables = [window["hyper"]["tables"] for window in windows]
    for name in dict.fromkeys([*tables[0], *tables[1]]):
        values = [float(table[name][0]) if name in table else None for table in tables]
        if values[0] != values[1]:
            yield fact("diff-rate", name=name, step=step + 1, a=values[0], b=values[1])
    yield from _of_replicas(*(_OneStep(*one) for one in zip(recipes, states, windows, strict=True)))


def _of_examples(recipes: list[Recipe], step: int) -> Iterator[Fact]:
    """The first example of the batch after `step` steps with another index. If there is none, the
    first example that differs in each column."""
    indices, columns = zip(*(trained(one, step, one.batch) for one in recipes), strict=True)
    size, places = recipes[0].batch // recipes[0].replicas, np.flatnonzero(indices[0] != indices[1])
    if len(places):
        i = int(places[0])
        yield fact("diff-order", replica=i // size, a=int(indices[0][i]), b=int(indices[1][i]))
        return
    for name in dict.fromkeys([*columns[0], *columns[1]]):
        pair = [each.get(name) for each in columns]
        for i in range(recipes[0].batch):
            a, b = (None if column is None else np.asarray(column[i]) for column in pair)
            if a is None or b is None or a.dtype != b.dtype or a.tobytes() != b.tobytes():
                shown = {
                    s: "..." if x is None or x.ndim else x.item() for s, x in (("a", a), ("b", b))
                }
                yield fact(
                    "diff-example",
                    name=name,
                    example=int(indices[0][i]),
                    replica=i // size,
                    **shown,
                )
                break


class _OneStep:
    """A step's replicas and update, one by one on one device."""

    def __init__(self, recipe: Recipe, state: TrainState, window: dict):
        self.recipe, self.window = recipe, window
        self.step = Step(recipe, Layout.of(recipe, 1))
        sums = jax.tree.unflatten(
            jax.tree.structure(self.step.state.sums), jax.tree.leaves(state.sums)
        )
        params = self.step.updates.flat.pack(state.params, np)
        self.state = dataclasses.replace(state, params=params, sums=sums)
        self.batch: Any = flat(trained(recipe, int(window["rows"]["start"]), recipe.batch)[1])
        self.vector = jitted(self.step.replica, jax.local_devices()[0])

    def inputs(self, number: int) -> ReplicaInput:
        place: Any = np.full(2, number, np.int32)
        return ReplicaInput.of(self.state, self.window["rows"], self.batch, place)

    def total(self) -> jax.Array:
        starts = range(0, self.recipe.replicas, self.step.together)
        return tree_sum([self.vector(self.inputs(start)) for start in starts], jnp.add)

    def named(self, number: int) -> dict[str, Any]:
        """The parts of a replica's vector by name: gradients by their parameter, state, and metric
        sums."""
        updates, vector = self.step.updates, np.asarray(self.vector(self.inputs(number)))
        beside = updates.aside.unpack(vector[updates.flat.size :])
        states = beside["state"]  # of each leaf one or two arrays: see `replica.summable`
        paths = list(flatten(self.state.state))
        names = paths if len(paths) == len(states) else map(str, range(len(states)))
        gradients = flatten(updates.gradient.unpack(vector[: updates.flat.size]))
        return {
            **{f"the gradient of {name}": leaf for name, leaf in gradients.items()},
            **{f"the task's state {name}": leaf for name, leaf in zip(names, states, strict=True)},
            **{f"the metric {name}": leaf for name, leaf in flatten(beside["sums"]).items()},
        }


def _of_replicas(a: _OneStep, b: _OneStep) -> Iterator[Fact]:
    """The first replica whose vector differs, and its first operation that differs. If all replicas
    agree, the first operation of the update that differs."""
    for number in range(0, a.recipe.replicas, a.step.together):
        if unlike := _unlike(a.named(number), b.named(number)):
            yield fact("diff-replica", replica=number, what=unlike)
            apart = parted(*(run(one.step.replica, one.inputs(number)) for one in (a, b)))
            yield apart or fact("diff-compiled")
            return
    yield fact("diff-update", "all replicas agree, and so does their sum: the update differs")
    given = [
        (one.step.after, one.state.without("donated"), a.total(), one.window["hyper"])
        for one in (a, b)
    ]
    if (apart := parted(*(run(*arguments) for arguments in given))) is not None:
        yield apart
