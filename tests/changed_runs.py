"""Changes of everything that a person or a command reads in a run folder, and what an audit says of each.

`ALL` maps a change to the kind of run in `RUNS` that it changes, to a function of a copy of that run's
folder, and to what the audit of all steps says: the code of an error or of a difference, with its step if it
has one, or a part of a line of what was not audited. `None` is said of a change that leaves nothing false. A
change may also return another recipe, to audit the run with.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

import chipwise as cw
import tasks
from chipwise.base import ChipwiseError
from chipwise.proof.audit import audit
from chipwise.run.folder.checkpoint import Checkpoints
from chipwise.run.on import On

ONE = On(devices=1)
STEPS = 20
NAMES = ("ant", "bee", "cat", "dog", "eel")


def recipe(**changes: Any) -> cw.Recipe:
    """The recipe of all runs. *Arguments:* of its task or of the recipe."""
    parts = {n: changes.pop(n) for n in ("train", "eval", "loss", "augment") if n in changes}
    task = tasks.quick_task(class_names=NAMES, **parts)
    return tasks.recipe(**{"task": task, "duration": f"{STEPS}st", **changes})


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of run."""

    changes: dict[str, Any]
    """Those of the recipe."""
    how: dict[str, Any]
    """The options of its training."""


OFTEN = {"log_every": "4st", "eval_every": "10st", "checkpoint_every": "7st", "keep": "7st"}
STILL = cw.sgd(lr=1e-9)  # so the first evaluation is the best
RUNS = {
    "whole": Kind({}, {**OFTEN, "keep_best": "eval/loss"}),
    "early": Kind(
        {"optimizer": STILL},
        {**OFTEN, "eval_every": "2st", "keep_best": "eval/accuracy", "patience": "4st"},
    ),
    "few rows": Kind({}, {**OFTEN, "log_every": "end", "ledger": "100%", "keep_best": "eval/loss"}),
    "stopped": Kind({}, {**OFTEN, "stop_after": "9st", "keep_best": "eval/loss"}),
    "unevaluated": Kind({"eval": None}, {**OFTEN, "eval_every": None}),
}


def trained(folder: Path, kind: str = "whole", **changes: Any) -> Path:
    run = RUNS[kind]
    for event in cw.training(
        recipe(**run.changes, **changes), folder, on=On(devices=1, noise=True), progress="none", **run.how
    ):
        if event.kind == "log" and event.step == 8:
            event.text("mine/text", "Once upon a time")
            event.log({"mine/bleu": 0.25})
    return folder


def told(run: Path, given: cw.Recipe, steps: str = "0:") -> tuple[list[tuple[str, int | None]], list[str]]:
    """What an audit of all steps finds, as codes with steps, and what it lists as not audited."""
    try:
        _, statement = audit(run, given, steps=steps, on=ONE)
    except ChipwiseError as error:
        return [(error.code, error.facts.get("step"))], []
    found = [(fact["code"], fact.get("step")) for fact in statement["found"]]
    assert statement["passed"] == (not found)
    return found, statement["unaudited"]


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def put(file: Path, rows: list[Any]) -> None:
    file.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))


Other = Callable[[], Path]
"""Another seed's run of the same kind, trained when it is asked for."""
Change = Callable[[Path, Other], Any]
Rows = list[dict[str, Any]]


def in_file(name: str, change: Callable[[Rows], Any]) -> Change:
    """A change of the rows of a file: `change(rows)` returns others, or changes them."""

    def apply(run: Path, other: Other) -> None:
        rows = lines(run / name)
        put(run / name, change(rows) or rows)

    return apply


def with_rows(change: Callable[[Rows], Any]) -> Change:
    return in_file("metrics.jsonl", change)


def each(name: str, value: Callable[[Any], Any], step: int | None = None) -> Change:
    """`value(old)` in place of a name's values in all rows, or in those of `step`."""

    def change(rows: Rows) -> None:
        for row in rows:
            if name in row and step in (None, row["step"]):
                row[name] = value(row[name])

    return with_rows(change)


def without(name: str) -> Change:
    return with_rows(lambda rows: [{k: v for k, v in row.items() if k != name} for row in rows])


def added(name: str, beside: str, value: Any = 0.999) -> Change:
    return with_rows(lambda rows: [{**row, name: value} if beside in row else row for row in rows])


def of_step(step: int, change: Callable[[Any], Rows]) -> Callable[[Rows], Rows]:
    return lambda rows: [made for row in rows for made in (change(row) if row.get("step") == step else [row])]


def swapped(rows: Rows) -> None:
    first, last = (row for row in rows if "eval/accuracy" in row)
    first["eval/accuracy"], last["eval/accuracy"] = last["eval/accuracy"], first["eval/accuracy"]


def in_json(name: str, **values: Any) -> Change:
    """Other values in a JSON file, by name; of objects within, by the name there; "gone" removes one."""

    def merged(old: Any, new: Any) -> Any:
        if not isinstance(new, dict) or not isinstance(old, dict):
            return new
        both = {**old, **{key: merged(old.get(key), value) for key, value in new.items()}}
        return {key: value for key, value in both.items() if value != "gone"}

    def apply(run: Path, other: Other) -> None:
        (run / name).write_text(json.dumps(merged(json.loads((run / name).read_text()), values)))

    return apply


def with_result(**values: Any) -> Change:
    return in_json("result.json", **values)


def setting(**values: Any) -> Change:
    return in_json("recipe.json", **values)


def all_of(*changes: Change) -> Change:
    def apply(run: Path, other: Other) -> None:
        for change in changes:
            change(run, other)

    return apply


def gone(name: str) -> Change:
    def apply(run: Path, other: Other) -> None:
        shutil.rmtree(run / name) if (run / name).is_dir() else (run / name).unlink()

    return apply


def of_other(name: str) -> Change:
    def apply(run: Path, other: Other) -> None:
        gone(name)(run, other)
        source = other() / name
        copy = shutil.copytree if source.is_dir() else shutil.copy
        copy(source, run / name)

    return apply


def content(name: str, text: str) -> Change:
    def apply(run: Path, other: Other) -> None:
        (run / name).parent.mkdir(exist_ok=True)
        (run / name).write_text(text)

    return apply


def renamed(name: str, to: str, keep: bool = False) -> Change:
    def apply(run: Path, other: Other) -> None:
        shutil.copytree(run / name, run / to)
        if not keep:
            shutil.rmtree(run / name)

    return apply


def with_ledger(change: Callable[[Rows], Rows], result: bool = False) -> Change:
    """A change of the rows of the ledger; without `result`, that is removed."""
    made = in_file("ledger.jsonl", lambda rows: [rows[0], *change(rows[1:])])
    return made if result else all_of(made, gone("result.json"))


def head(result: bool = False, **values: Any) -> Change:
    """Other values in the head of the ledger; without `result`, that is removed."""

    def change(rows: Rows) -> None:
        for name, value in values.items():
            rows[0][name] = {**rows[0][name], **value} if isinstance(value, dict) else value

    made = in_file("ledger.jsonl", change)
    return made if result else all_of(made, gone("result.json"))


def second_head(**values: Any) -> Change:
    """A head after step 8, with other values."""

    def change(rows: Rows) -> Rows:
        more = {**rows[0], "from": 8}
        more |= {n: {**more[n], **v} if isinstance(v, dict) else v for n, v in values.items()}
        at = 1 + next(i for i, row in enumerate(rows) if row.get("step") == 8)
        return [*rows[:at], more, *rows[at:]]

    return in_file("ledger.jsonl", change)


def flipped(folder: str, file: str = "d/*") -> Change:
    """Bits of the largest file of a checkpoint, flipped."""

    def apply(run: Path, other: Other) -> None:
        path = max((run / folder).rglob(file), key=lambda path: path.stat().st_size)
        made = bytearray(path.read_bytes())
        for place in range(0, len(made), 64):  # a single byte may be one that nothing reads
            made[place] ^= 1
        path.write_bytes(made)

    return apply


def sealed(folder: str, arrays: str = "", **about: Any) -> Change:
    """A checkpoint that is whole, of other values: of the arrays whose names start so, and `about` it."""

    def apply(run: Path, other: Other) -> None:
        place, step = run / Path(folder).parent, int(Path(folder).name)
        with contextlib.closing(Checkpoints(place, read_only=True)) as there:
            state, said = there.arrays(step), there.about(step)
        for name in state:
            if arrays and name.startswith(arrays):
                state[name] = state[name] + state[name].dtype.type(1)
        shutil.rmtree(run / folder)
        with contextlib.closing(Checkpoints(place, newest=9)) as there:
            there.save(step, state, {**said, **about})
            there.wait()

    return apply


def in_about(folder: str, old: str, new: str) -> Change:
    """Another text in the JSON object of a checkpoint, without another digest."""

    def apply(run: Path, other: Other) -> None:
        file = run / folder / "about" / "metadata"
        assert old in file.read_text()
        file.write_text(file.read_text().replace(old, new))

    return apply


def process(**values: Any) -> Change:
    def change(rows: Rows) -> None:
        for row in rows:
            row.update({n: v for n, v in values.items() if n in row})

    return in_file("processes.jsonl", change)


def given(**changes: Any) -> Change:
    """The folder as it is, and another recipe."""
    return lambda run, other: recipe(**changes)


def with_label(n: int, seed: int) -> cw.Arrays:
    columns = {name: np.array(column) for name, column in tasks.data(n, seed).columns.items()}
    columns["label"][7] = (columns["label"][7] + 1) % tasks.CLASSES
    return cw.Arrays(**columns)


def scaled(params: Any, state: Any, batch: Any, key: Any, train: bool) -> Any:
    sums, state = tasks.quick_loss(params, state, batch, key, train)
    return {**sums, "loss": cw.Sum(sums["loss"].total * jnp.float32(1.001), sums["loss"].count)}, state


def evaluated_otherwise(params: Any, state: Any, batch: Any, key: Any, train: bool) -> Any:
    sums, state = tasks.quick_loss(params, state, batch, key, train)
    if not train:
        sums = {**sums, "accuracy": cw.Sum(jnp.float32(2) * sums["accuracy"].total, sums["accuracy"].count)}
    return sums, state


DIFFERS, RESULT, LEDGER, DAMAGED = "audit-differs", "audit-result", "audit-other-ledger", "audit-damaged"
OTHER_RECIPE, OTHER_DATA, BEST = "audit-other-recipe", "audit-other-data", "audit-best"
END = STEPS
FIRST = f"checkpoints/{7}"
METADATA = "checkpoints: seconds, verified"

CHANGES: dict[str, dict[str, tuple[Change, Any]]] = {
    "metrics.jsonl": {
        "no accuracy in any row": (without("eval/accuracy"), (DIFFERS, 10)),
        "no loss of evaluation in any row": (without("eval/loss"), (DIFFERS, 10)),
        "no loss of training in any row": (without("train/loss"), (DIFFERS, 4)),
        "no evaluation in any row": (
            with_rows(lambda rows: [row for row in rows if "eval/loss" not in row]),
            (RESULT, END),  # of which step is the best
        ),
        "no rate in any row": (without("lr"), (DIFFERS, 4)),
        "no epoch in any row": (without("epoch"), (DIFFERS, 4)),
        "an invented metric of evaluation": (added("eval/f1", "eval/loss"), (DIFFERS, 10)),
        "an invented metric of training": (added("train/f1", "train/loss"), (DIFFERS, 4)),
        "an evaluation in a row of training": (
            with_rows(of_step(8, lambda row: [{**row, "eval/accuracy": 0.5}])),
            (DIFFERS, 8),
        ),
        "a metric of training in a row of evaluation": (
            with_rows(of_step(10, lambda row: [{**row, "train/loss": 0.5}])),
            (DIFFERS, 10),
        ),
        "accuracy is NaN": (each("eval/accuracy", lambda _: float("nan")), (DIFFERS, 10)),
        "accuracy is infinite": (each("eval/accuracy", lambda _: float("inf")), (DIFFERS, 10)),
        "accuracy is null": (each("eval/accuracy", lambda _: None), (DIFFERS, 10)),
        "accuracy is text": (each("eval/accuracy", str), (DIFFERS, 10)),
        "accuracy is true": (each("eval/accuracy", lambda _: True), (DIFFERS, 10)),
        "accuracy is a list": (each("eval/accuracy", lambda old: [old]), (DIFFERS, 10)),
        "accuracy is an object": (each("eval/accuracy", lambda old: {"mean": old}), (DIFFERS, 10)),
        "accuracy is a number that no float holds": (
            each("eval/accuracy", lambda _: 10**400),
            (DIFFERS, 10),
        ),
        "accuracy is better": (each("eval/accuracy", lambda _: 0.999), (DIFFERS, 10)),
        "accuracy is better at the end": (each("eval/accuracy", lambda _: 0.999, END), (DIFFERS, END)),
        "the loss of evaluation is a little lower": (
            each("eval/loss", lambda old: float(np.nextafter(old, 0)), 10),
            (DIFFERS, 10),
        ),
        "two evaluations have changed places": (with_rows(swapped), (DIFFERS, 10)),
        "the loss of training is null": (each("train/loss", lambda _: None), (DIFFERS, 4)),
        "the loss of training is a little lower": (
            each("train/loss", lambda old: old * (1 - 1e-12)),
            (DIFFERS, 4),
        ),
        "the loss of training is lower in one row": (
            each("train/loss", lambda old: old / 2, 16),
            (DIFFERS, 16),
        ),
        "the rate is ten times as large": (each("lr", lambda old: 10 * old), (DIFFERS, 4)),
        "the rate is text": (each("lr", str), (DIFFERS, 4)),
        "the rate of one row is another": (each("lr", lambda old: old + 1e-9, 12), (DIFFERS, 12)),
        "a rate in a row of evaluation": (
            with_rows(of_step(10, lambda row: [{**row, "lr": 1.0}])),
            (DIFFERS, 10),
        ),
        "a row of a rate alone": (
            with_rows(lambda rows: [*rows, {"step": 9, "epoch": 0, "lr": 1.0}]),
            (DIFFERS, 9),
        ),
        "the epoch is another": (each("epoch", lambda old: old + 1), (DIFFERS, 4)),
        "the epoch is another in the first of two rows": (
            with_rows(
                lambda rows: [{**r, "epoch": 9} if r["step"] == END and "lr" in r else r for r in rows]
            ),
            (DIFFERS, END),
        ),
        "a false row before a true one": (
            with_rows(lambda rows: [{**rows[-1], "eval/accuracy": 0.999}, *rows]),
            (DIFFERS, END),
        ),
        "a false row after a true one": (
            with_rows(lambda rows: [*rows, {**rows[-1], "eval/accuracy": 0.999}]),
            (DIFFERS, END),
        ),
        "a true row twice": (with_rows(lambda rows: [*rows, rows[-1]]), (DIFFERS, END)),
        "a row after the end": (
            with_rows(lambda rows: [*rows, {**rows[-1], "step": 99}]),
            ("audit-beyond", 99),
        ),
        "a row of the beginning": (
            with_rows(lambda rows: [{"step": 0, "epoch": 0.0, "eval/accuracy": 0.9}, *rows]),
            "metrics.jsonl: 1 steps, the first is 0",
        ),
        "a row of another step": (with_rows(of_step(8, lambda row: [{**row, "step": 9}])), (DIFFERS, 9)),
        "a row whose step is no whole number": (
            with_rows(of_step(8, lambda row: [{**row, "step": 8.5}])),
            ("metrics-damaged", None),
        ),
        "a row whose step is text": (
            with_rows(of_step(8, lambda row: [{**row, "step": "8"}])),
            (DIFFERS, 12),
        ),
        "a line that is no row": (
            with_rows(lambda rows: [rows[0], "good", *rows[1:]]),
            ("metrics-damaged", None),
        ),
        "no row of step 8": (
            with_rows(of_step(8, lambda row: [])),
            (DIFFERS, 12),
        ),  # which is the mean since 8
        "no row of step 20": (
            with_rows(of_step(END, lambda row: [])),
            (RESULT, END),
        ),  # of which step is the best
        "no row of an evaluation that was not the best": (
            with_rows(of_step(10, lambda row: [])),
            "metrics.jsonl: 3 steps without a row, the first is 7",
        ),
        "no rows": (gone("metrics.jsonl"), (RESULT, END)),
        "rows that are empty": (content("metrics.jsonl", ""), (RESULT, END)),
        "rows of another run": (of_other("metrics.jsonl"), (DIFFERS, 4)),
        "another speed": (each("examples_per_second", lambda old: 9 * old), "metrics.jsonl: seconds, "),
        "other seconds": (each("seconds", lambda old: 9 * old), "metrics.jsonl: seconds"),
        "another wait for data": (each("wait_data_share", lambda _: 0.9), "wait_data_share"),
        "another noise": (each("noise/trace", lambda _: 9.0), "noise/trace"),
        "another noise scale": (each("train/noise_scale", lambda _: 9.0), (RESULT, END)),
        "another number of the user's": (each("mine/bleu", lambda _: 1.0), "mine/bleu"),
        "a run that diverged": (added("diverged", "lr", {"code": "loss-not-finite"}), "diverged"),
    },
    "result.json": {
        "a better accuracy in the result": (with_result(metrics={"eval/accuracy": 0.999}), (RESULT, END)),
        "no accuracy in the result": (with_result(metrics={"eval/accuracy": "gone"}), (RESULT, END)),
        "accuracy is null in the result": (with_result(metrics={"eval/accuracy": None}), (RESULT, END)),
        "accuracy is text in the result": (with_result(metrics={"eval/accuracy": "0.999"}), (RESULT, END)),
        "accuracy is NaN in the result": (
            with_result(metrics={"eval/accuracy": float("nan")}),
            (RESULT, END),
        ),
        "accuracy is a list in the result": (with_result(metrics={"eval/accuracy": [0.9]}), (RESULT, END)),
        "an invented metric in the result": (with_result(metrics={"eval/f1": 0.999}), (RESULT, END)),
        "a lower loss of training in the result": (with_result(metrics={"train/loss": 0.001}), (RESULT, END)),
        "no metrics in the result": (with_result(metrics="gone"), (RESULT, END)),
        "metrics are text in the result": (with_result(metrics="good"), (RESULT, END)),
        "another fingerprint": (with_result(fingerprint="0" * 64), (RESULT, END)),
        "no fingerprint": (with_result(fingerprint="gone"), (RESULT, END)),
        "more steps": (with_result(steps=40), (RESULT, END)),
        "fewer steps": (with_result(steps=10), (RESULT, END)),
        "steps are text": (with_result(steps="20"), (RESULT, END)),
        "another recipe's name": (with_result(recipe="imagenet"), (RESULT, END)),
        "another best value": (with_result(best={"value": 0.001}), (RESULT, END)),
        "another best step": (with_result(best={"step": 19}), (RESULT, END)),
        "no best value": (with_result(best={"value": None}), (RESULT, END)),
        "the best of another metric": (with_result(best={"metric": "eval/accuracy"}), (RESULT, END)),
        "the best is the worst": (with_result(best={"better": "higher"}), (RESULT, END)),
        "the run ended early": (with_result(best={"ended_early": True}), (RESULT, END)),
        "the run had patience": (with_result(best={"patience": "4st"}), (RESULT, END)),
        "the best is text": (with_result(best="good"), (RESULT, END)),
        "the best is null": (with_result(best=None), (RESULT, END)),
        "no best": (with_result(best="gone"), (RESULT, END)),
        "more about the best": (with_result(best={"note": "good"}), (RESULT, END)),
        "another ledger's digest": (with_result(ledger="0" * 64), (LEDGER, None)),
        "no ledger's digest": (with_result(ledger="gone"), (LEDGER, None)),
        "another speed in the result": (with_result(examples_per_second=1e9), "examples_per_second"),
        "other quartiles of the speed": (with_result(speed={"share_of_peak": 0.9}), "speed"),
        "another machine in the result": (with_result(machine={"title": "TPU v9"}), "machine"),
        "more devices in the result": (with_result(devices={"count": 64}), "devices"),
        "other seconds in the result": (with_result(seconds={"total": 1.0}), "seconds"),
        "another feed in the result": (with_result(feed={"waited_share": 0.0}), "feed"),
        "another folder in the result": (with_result(run="/elsewhere"), "run"),
        "more replicas compared": (with_result(verified={"replicas": 10**6}), "verified"),
        "a metric is better the other way": (with_result(better={"accuracy": "lower"}), "better"),
        "an invented field of the result": (with_result(award="first"), "award"),
        "no result": (gone("result.json"), "no result.json"),
        "a result that is no JSON": (content("result.json", "{"), ("result-damaged", None)),
        "a result that is a list": (content("result.json", "[]"), ("result-damaged", None)),
        "the result of another run": (of_other("result.json"), (RESULT, END)),
    },
    "ledger.jsonl": {
        "no ledger": (gone("ledger.jsonl"), ("run-without-ledger", None)),
        "an empty ledger": (with_ledger(lambda rows: []), ("run-without-ledger", None)),
        "a ledger cut short": (with_ledger(lambda rows: rows[:4], result=True), (LEDGER, None)),
        "a ledger cut short without a result": (
            with_ledger(lambda rows: rows[:3]),
            ("ledger-rows-missing", None),
        ),
        "a hole in the ledger": (
            with_ledger(of_step(8, lambda row: [])),
            ("ledger-rows-missing", None),
        ),
        "a ledger without digests of parameters": (
            with_ledger(lambda rows: [{k: v for k, v in row.items() if k != "parameters"} for row in rows]),
            (DIFFERS, 4),
        ),
        "a ledger without most digests": (
            with_ledger(lambda rows: [{k: row[k] for k in ("step", "state")} for row in rows]),
            (DIFFERS, 4),
        ),
        "no gradient in one row": (
            with_ledger(of_step(8, lambda row: [{k: v for k, v in row.items() if k != "gradient"}])),
            (DIFFERS, 8),
        ),
        **{
            f"another digest of the {name} in one row": (
                with_ledger(of_step(12, lambda row, name=name: [{**row, name: "0" * 16}])),
                (DIFFERS, 12),
            )
            for name in ("gradient", "parameters", "state", "optimizer")
        },
        "a digest that is no number": (
            with_ledger(of_step(16, lambda row: [{**row, "state": "zzzzzzzzzzzzzzzz"}])),
            (DIFFERS, 16),
        ),
        "an invented digest": (
            with_ledger(of_step(8, lambda row: [{**row, "loss": "0" * 16}])),
            ("ledger-damaged", None),
        ),
        "a row of the ledger with another step": (
            with_ledger(of_step(12, lambda row: [{**row, "step": 13}])),
            (DIFFERS, 13),
        ),
        "a row of the ledger after the end": (
            with_ledger(lambda rows: [*rows, {**rows[-1], "step": 99}]),
            ("audit-beyond", 99),
        ),
        "a row of the ledger twice": (with_ledger(lambda rows: [*rows, rows[-1]]), ("ledger-damaged", None)),
        "a line of the ledger that is no row": (
            with_ledger(lambda rows: [rows[0], "good", *rows[1:]]),
            ("ledger-damaged", None),
        ),
        "the ledger of another run": (of_other("ledger.jsonl"), (DIFFERS, 4)),
        "the ledger of another version": (head(ledger=2), ("ledger-version", None)),
        "another recipe in the head": (head(result=True, recipe="0" * 64), (LEDGER, None)),
        "another recipe in the head without a result": (head(recipe="0" * 64), "recipe of the head"),
        "other training data in the head": (
            head(data={"training": f"examples:{'0' * 64}"}),
            (OTHER_DATA, None),
        ),
        "other evaluation data in the head": (
            head(data={"evaluation": f"examples:{'0' * 64}"}),
            (OTHER_DATA, None),
        ),
        "no training data in the head": (head(data={"training": None}), "training data (examples)"),
        "other parts of the data in the head": (
            head(data={"training": f"labels:{'0' * 64}"}),
            "training data (examples, labels)",
        ),
        "other code in the head": (head(computed={"code": "0" * 64}), "ledger.jsonl: code of the head"),
        "other versions in the head": (head(computed={"versions": {"jax": "0.1"}}), "versions.jax"),
        "other settings in the head": (head(computed={"settings": {"x64": True}}), "settings.x64"),
        "another chip in the head": (head(computed={"chip": "TPU v9"}), "ledger.jsonl: 8 steps"),
        "another layout in the head": (
            head(computed={"layout": ["cpu", 2, 1, True]}),
            "ledger.jsonl: 8 steps",
        ),
        "devices in the head": (head(computed={"devices": 4}), "ledger.jsonl: 8 steps"),
        "a head that begins later": (head(**{"from": 6}), "from of the head from step 6"),
        "a second head with other data": (
            second_head(data={"training": f"examples:{'0' * 64}"}),
            (OTHER_DATA, None),
        ),
        "a second head of another chip": (second_head(computed={"chip": "TPU v9"}), "ledger.jsonl: chip"),
        "a second head that changes nothing": (second_head(), "from of the head from step 8"),
    },
    "checkpoints/": {
        "no checkpoint in between": (gone(FIRST), None),
        "no last checkpoint": (gone(f"checkpoints/{END}"), f"checkpoints/{END}"),
        "no checkpoints": (gone("checkpoints"), f"checkpoints/{END}"),
        "the last checkpoint of another run": (of_other(f"checkpoints/{END}"), (DIFFERS, END)),
        "an earlier checkpoint of another run": (of_other(FIRST), (DIFFERS, 7)),
        "a checkpoint of another step": (renamed("checkpoints/14", "checkpoints/13"), (DAMAGED, 13)),
        "a checkpoint in place of a later one": (
            all_of(gone(f"checkpoints/{END}"), renamed("checkpoints/14", f"checkpoints/{END}")),
            (DAMAGED, END),
        ),
        "a checkpoint after the end": (
            renamed("checkpoints/14", "checkpoints/99", keep=True),
            ("audit-beyond", 99),
        ),
        "bytes of a checkpoint": (flipped(FIRST), (DAMAGED, 7)),
        "bytes about a checkpoint": (flipped(FIRST, "about/metadata"), (DAMAGED, 7)),
        "bytes of a checkpoint's index": (flipped(FIRST, "state/manifest.ocdbt"), (DAMAGED, 7)),
        "bytes of a file that nothing reads": (flipped(FIRST, "ocdbt.process_0/manifest.ocdbt"), None),
        "another recipe about a checkpoint": (
            in_about("checkpoints/14", '"seed": 3', '"seed": 4'),
            (DAMAGED, 14),
        ),
        "another step about a checkpoint": (
            in_about("checkpoints/14", '"step": 14', '"step": 13'),
            (DAMAGED, 14),
        ),
        "a checkpoint without its arrays": (gone("checkpoints/14/state"), (DAMAGED, 14)),
        "a checkpoint without what is about it": (gone("checkpoints/14/about"), (DAMAGED, 14)),
        **{
            f"a whole checkpoint with another {what}": (sealed("checkpoints/14", f"{name}."), (DIFFERS, 14))
            for what, name in (
                ("parameter", "params"),
                ("count in the state", "state"),
                ("moment", "optimizer"),
            )
        },
        "other sums of metrics in a whole checkpoint": (sealed("checkpoints/14", "sums."), (DIFFERS, 14)),
        "other seconds in a whole checkpoint": (sealed("checkpoints/14", seconds=9e9), METADATA),
        "more compared in a whole checkpoint": (sealed("checkpoints/14", verified={"step": 14}), METADATA),
        "a checkpoint that was set aside": (renamed(FIRST, "damaged-checkpoint-7"), "damaged-checkpoint-7"),
    },
    "best/": {
        "no best checkpoint": (gone("best"), "best/"),
        "the best checkpoint of another run": (of_other("best"), (BEST, None)),
        "another step's checkpoint as the best": (
            all_of(gone("best"), renamed("checkpoints/14", "best/14")),
            (BEST, 14),
        ),
        "the best checkpoint of another step": (renamed(f"best/{END}", "best/19"), (BEST, None)),
        "bytes of the best checkpoint": (flipped("best"), (BEST, None)),
        "a whole best checkpoint with another parameter": (sealed(f"best/{END}", "params."), (BEST, END)),
        "other seconds in the best checkpoint": (sealed(f"best/{END}", seconds=9e9), METADATA),
    },
    "recipe.json": {
        "no recipe.json": (gone("recipe.json"), ("not-a-run", None)),
        "recipe.json is no JSON": (content("recipe.json", "{"), ("recipe-json-damaged", None)),
        "another seed in recipe.json": (setting(seed=9), (OTHER_RECIPE, None)),
        "another batch in recipe.json": (setting(batch=99), (OTHER_RECIPE, None)),
        "another duration in recipe.json": (setting(duration="40st"), (OTHER_RECIPE, None)),
        "another rate in recipe.json": (setting(optimizer={"lr": {"peak": 0.5}}), (OTHER_RECIPE, None)),
        "another precision in recipe.json": (setting(precision="bf16"), (OTHER_RECIPE, None)),
        "another loss in recipe.json": (setting(task={"loss": "another"}), (OTHER_RECIPE, None)),
        "more examples in recipe.json": (setting(task={"train": {"examples": 9999}}), (OTHER_RECIPE, None)),
        "no optimizer in recipe.json": (setting(optimizer="gone"), (OTHER_RECIPE, None)),
        "an invented setting in recipe.json": (setting(award="first"), (OTHER_RECIPE, None)),
        "other classes in recipe.json": (setting(classes=["fox", *NAMES[1:]]), (OTHER_RECIPE, None)),
        "no classes in recipe.json": (setting(classes="gone"), "recipe.json: classes"),
        "a tokenizer in recipe.json": (setting(texts={"tokenizer": "mine"}), "recipe.json: texts"),
        "another origin in recipe.json": (setting(source={"recipe": "digits"}), "recipe.json: source"),
    },
    "other files": {
        "another text of the user's": (
            in_file("media.jsonl", lambda rows: [{**row, "text": "The end"} for row in rows]),
            "media.jsonl",
        ),
        "a picture of the user's": (
            in_file("media.jsonl", lambda rows: [*rows, {"step": 9, "name": "mine/x", "png": ""}]),
            "media.jsonl",
        ),
        "no record of processes": (gone("processes.jsonl"), None),
        "processes of another run": (of_other("processes.jsonl"), "processes.jsonl"),
        "another machine of a process": (process(machine={"title": "TPU v9"}), "processes.jsonl"),
        "other versions of a process": (process(computed={}), "processes.jsonl"),
        "other faults of a process": (process(verified={"faults": [1]}), "processes.jsonl"),
        "another end of a process": (process(how="failed"), "processes.jsonl"),
        "another rule of a process": (
            process(best={"metric": "eval/accuracy", "patience": None}),
            (RESULT, END),
        ),
        "other curves for TensorBoard": (content("events.out.tfevents.1", "curves"), "events.out.tfevents.1"),
        "something sent to a service": (content("tracked/wandb.json", "{}"), "tracked"),
        "a file of predictions": (content("predictions.csv", "label\n"), "predictions.csv"),
        "an exported model": (content("exported/model.json", "{}"), "exported"),
        "notes": (content("notes.md", "good"), "notes.md"),
        "notes whose name has two lines": (content("a\nb", "good"), "a b"),
    },
    "the recipe and the data": {
        "another seed": (given(seed=4), (DIFFERS, 4)),
        "another rate": (
            given(optimizer=cw.adamw(lr=cw.one_cycle(0.03, warmup="20%"), weight_decay=0.01)),
            (DIFFERS, 4),
        ),
        "a line in the loss": (given(loss=scaled), (DIFFERS, 4)),
        "a line in the evaluation": (given(loss=evaluated_otherwise), (DIFFERS, 10)),
        "an augmentation": (given(augment=tasks.augment), (DIFFERS, 4)),
        "a label that is read": (given(train=with_label(101, 0)), (OTHER_DATA, None)),
        "a label of the evaluation": (given(eval=with_label(53, 1)), (DIFFERS, 10)),
        "fewer examples": (given(train=tasks.data(96)), (DIFFERS, 4)),
        "no evaluation data": (given(eval=None), (DIFFERS, 10)),
    },
}

OF_OTHER_KINDS: dict[str, tuple[str, Change, Any]] = {
    "the early end is denied": ("early", with_result(best={"ended_early": False}), "result.json"),
    "the early end had more steps": ("early", with_result(steps=END), (RESULT, 6)),
    "the early end had other patience": ("early", with_result(best={"patience": "2st"}), (RESULT, 6)),
    "a row after the early end": (
        "early",
        with_rows(lambda rows: [*rows, {"step": 18, "epoch": 0.0, "eval/accuracy": 0.9}]),
        (RESULT, 6),
    ),
    "a checkpoint without a row of the ledger": ("few rows", of_other("checkpoints/14"), (DIFFERS, 14)),
    "a whole checkpoint without a row has another moment": (
        "few rows",
        sealed(FIRST, "optimizer."),
        (DIFFERS, 7),
    ),
    "the newest checkpoint of a stopped run": ("stopped", of_other("checkpoints/9"), (DIFFERS, 9)),
    "an earlier checkpoint as the newest one": (
        "stopped",
        all_of(gone("checkpoints/9"), renamed(FIRST, "checkpoints/9")),
        (DAMAGED, 9),
    ),
    "an invented result of a stopped run": (
        "stopped",
        content("result.json", '{"steps": 20, "metrics": {"eval/accuracy": 0.9}}'),
        (LEDGER, None),
    ),
    "accuracy of a run without evaluation": ("unevaluated", added("eval/accuracy", "lr"), (DIFFERS, 4)),
    "accuracy in the result of a run without evaluation": (
        "unevaluated",
        with_result(metrics={"eval/accuracy": 0.9}),
        (RESULT, END),
    ),
    "a best evaluation of a run without evaluation": (
        "unevaluated",
        with_result(best={"metric": "eval/loss", "value": 0.1, "step": 8}),
        (RESULT, END),
    ),
}

ALL: dict[str, tuple[str, Change, Any]] = {
    **{name: ("whole", *one) for changes in CHANGES.values() for name, one in changes.items()},
    **OF_OTHER_KINDS,
}
