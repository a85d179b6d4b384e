"""`diff`: the first step at which two runs, or two recipes, part; and there the first cause that has a name.

The question is asked from the inputs to the result: the start, the examples, the schedules; then each
replica's gradient, and the first operation of its program with another result; then the update.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..data.sources import data_digest, take
from ..engine.checkpoint import flatten, state_of
from ..engine.feed import host_window
from ..engine.layout import Layout, tree_sum
from ..engine.ledger import head_of
from ..engine.on import ALL, On
from ..engine.session import Session
from ..engine.state import TrainState, first_digest, read
from ..engine.step import Step
from ..engine.stored import DIGESTS, Rows, StoredRun, read_ledger
from ..errors import RecipeError
from ..machine.arithmetic import fixed
from ..recipe.recipe import Recipe, difference
from ..words.facts import Fact, fact, plain
from .equations import parted, run

STEPS = 1000
"""How far two recipes are followed by default if they compute the same."""


@dataclass(frozen=True)
class Side:
    """One of the two that are compared. *Fields:* `name` to show; `recipe`; `run`, if it is one."""

    name: str
    recipe: Recipe
    run: StoredRun | None = None

    @property
    def rows(self) -> Rows:
        ledger = None if self.run is None else read_ledger(self.run.path)
        return {} if ledger is None else ledger.rows


@dataclass(frozen=True)
class Parting:
    """Where two part. *Fields:* the names `a` and `b`; `settings`, the differences of the recipes: (name, a,
    b); `same_program`, whether both trace to the same operations; `step`: the first after which bits differ,
    0 for the start, `None` if none was found; `compared`, the number of steps found the same; `parts`, what
    differs after `step`; `causes`, in the order of a step: the first one explains the others."""

    a: str
    b: str
    settings: list[tuple[str, Any, Any]]
    same_program: bool
    step: int | None = None
    compared: int = 0
    parts: list[str] = field(default_factory=list)
    causes: list[Fact] = field(default_factory=list)

    @property
    def verdict(self) -> Fact:
        facts = {"a": self.a, "b": self.b, "step": self.step, "compared": self.compared, "what": self.parts}
        code = "diff-start" if self.step == 0 else "diff-step"
        if self.step is None:
            code = "diff-not-yet" if self.compared else "diff-same"
        return fact(code, **facts)

    def to_json(self) -> dict[str, Any]:
        return {"schema": "chipwise.diff/1", **plain(self), "verdict": self.verdict.json()}


@fixed()
def diff(
    a: Side, b: Side, *, steps: int | None = None, on: On = ALL, say: Callable[[Fact], None] = lambda _: None
) -> Parting:
    """Where two runs or recipes part, and why. *Arguments:* `steps`, how far to follow them, by default to
    where their ledgers part, or `STEPS`; `say` is called with what is being done.

    Raises `RecipeError` for recipes with `shards`.
    """
    if (shards := max(a.recipe.shards, b.recipe.shards)) > 1:
        text = "shards={shards}: diff follows replicas on one device. Compare the runs' ledger.jsonl."
        raise RecipeError("diff-shards", text, shards=shards)
    settings = difference(a.recipe.describe(), b.recipe.describe())
    settings = [change for change in settings if not change[0].startswith("source")]
    with Session(a.recipe, on) as first, Session(b.recipe, on) as second:
        heads = [head_of(session) for session in (first, second)]
        same = heads[0]["computed"]["code"] == heads[1]["computed"]["code"]
        found = Parting(a.name, b.name, settings, same)
        agree, last = _ledgers(a.rows, b.rows)
        known = heads[0]["data"] == heads[1]["data"] and None not in heads[0]["data"].values()
        alike = same and not settings and known and last is None
        if alike and first_digest(a.recipe) == first_digest(b.recipe):
            return found
        most = min(first.total, second.total, steps or last or max(STEPS, agree))
        return _followed((a, b), (first, second), found, agree, most, say)


def _ledgers(a: Rows, b: Rows) -> tuple[int, int | None]:
    """The last step up to which two ledgers agree, 0 if none, and the first at which they do not, if any."""
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
    agree: int,
    most: int,
    say: Any,
) -> Parting:
    """Follows both from a state that they share to the first step that differs, and explains it."""
    start, states = _start(sides, sessions, agree)
    say(fact("diff-following", "following both from step {start} to at most {most}", start=start, most=most))

    def begin() -> None:
        for session, state in zip(sessions, states, strict=True):
            session.begin(state)

    def parts() -> list[str]:
        return _parts(*(one.programs.digests.read(one.digest()).values for one in sessions))

    begin()
    at, unlike = start, parts()
    while at < most and not unlike:
        at += 1
        for session in sessions:
            session.watched = (at,)
            session.advance()
        unlike = parts()
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
    """The newest step up to `agree` with a readable checkpoint in both runs, and their states; else 0."""
    runs = [side.run for side in sides if side.run is not None]
    shared = set(runs[0].checkpoints) & set(runs[1].checkpoints) if len(runs) == 2 else set()
    for step in sorted((one for one in shared if one <= agree), reverse=True):
        with contextlib.suppress(Exception):  # Orbax raises many types for damaged bytes
            pairs = zip(runs, sessions, strict=True)
            return step, [state_of(one.path, session.holding, step) for one, session in pairs]
    return 0, [None, None]


# ---- causes


def _of_seed(a: Recipe, b: Recipe) -> Iterator[Fact]:
    if a.seed != b.seed:
        yield fact("diff-seed", a=a.seed, b=b.seed)


def _of_start(recipes: list[Recipe], states: list[TrainState]) -> Iterator[Fact]:
    """Why the first states differ."""
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
        if x is None or y is None or x.shape != y.shape or np.asarray(x).tobytes() != np.asarray(y).tobytes()
    ]


def _of_step(recipes: list[Recipe], states: list[TrainState], step: int) -> Iterator[Fact]:
    """Why the states after `step` steps lead to different ones after one more."""
    windows = [host_window(recipe, step, 1) for recipe in recipes]
    sizes = [(recipe.batch, recipe.replicas, recipe.block_count) for recipe in recipes]
    if sizes[0] != sizes[1]:
        yield fact("diff-batch", a=sizes[0], b=sizes[1])
        return
    yield from _of_seed(*recipes)
    yield from _of_examples(recipes, windows)
    tables = [window["hyper"]["tables"] for window in windows]
    for name in dict.fromkeys([*tables[0], *tables[1]]):
        values = [float(table[name][0]) if name in table else None for table in tables]
        if values[0] != values[1]:
            yield fact("diff-rate", name=name, step=step + 1, a=values[0], b=values[1])
    yield from _of_replicas(*(_OneStep(*one) for one in zip(recipes, states, windows, strict=True)))


def _of_examples(recipes: list[Recipe], windows: list[dict]) -> Iterator[Fact]:
    """The first example of the step that differs, and in each column."""
    indices = [window["rows"]["indices"][0] for window in windows]
    size, places = recipes[0].batch // recipes[0].replicas, np.flatnonzero(indices[0] != indices[1])
    if len(places):
        i = int(places[0])
        yield fact("diff-order", replica=i // size, a=int(indices[0][i]), b=int(indices[1][i]))
        return
    digests = [data_digest(recipe.task.train) for recipe in recipes]
    if digests[0] == digests[1] is not None:
        return
    columns = [take(recipe.task.train, indices[0]) for recipe in recipes]
    for name in dict.fromkeys([*columns[0], *columns[1]]):
        pair = [each.get(name) for each in columns]
        for i in range(recipes[0].batch):
            a, b = (None if column is None else np.asarray(column[i]) for column in pair)
            if a is None or b is None or a.dtype != b.dtype or a.tobytes() != b.tobytes():
                shown = {s: "..." if x is None or x.ndim else x.item() for s, x in (("a", a), ("b", b))}
                yield fact("diff-example", name=name, example=int(indices[0][i]), replica=i // size, **shown)
                break


class _OneStep:
    """A step's replicas and update, one by one on one device."""

    def __init__(self, recipe: Recipe, state: TrainState, window: dict):
        self.recipe, self.window = recipe, window
        self.step = Step(recipe, Layout.of(recipe, 1), resident=False)
        sums = jax.tree.unflatten(jax.tree.structure(self.step.state.sums), jax.tree.leaves(state.sums))
        params = self.step.updates.flat.pack(state.params, np)
        self.state = dataclasses.replace(state, params=params, sums=sums)
        self.batch = take(recipe.task.train, window["rows"]["indices"][0])
        self.vector = jax.jit(self.step.replica)

    def arguments(self, number: int) -> tuple[Any, ...]:
        return (*read(self.state), self.window["rows"], self.batch, np.full(2, number, np.int32))

    def total(self) -> jax.Array:
        starts = range(0, self.recipe.replicas, self.step.together)
        return tree_sum([self.vector(*self.arguments(start)) for start in starts], jnp.add)

    def named(self, number: int) -> dict[str, Any]:
        """The parts of a replica's vector by name: gradients by their parameter, state, metric sums."""
        updates, vector = self.step.updates, np.asarray(self.vector(*self.arguments(number)))
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
    """The first replica whose vector differs and its first operation; otherwise those of the update."""
    for number in range(0, a.recipe.replicas, a.step.together):
        if unlike := _unlike(a.named(number), b.named(number)):
            yield fact("diff-replica", replica=number, what=unlike)
            apart = parted(*(run(one.step.replica, *one.arguments(number)) for one in (a, b)))
            yield apart or fact("diff-compiled")
            return
    yield fact("diff-update", "all replicas agree, and so does their sum: the update differs")
    given = [(one.step.after, one.state.without("donated"), a.total(), one.window["hyper"]) for one in (a, b)]
    if (apart := parted(*(run(*arguments) for arguments in given))) is not None:
        yield apart
