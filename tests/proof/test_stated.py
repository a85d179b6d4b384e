"""Whatever is changed in a run folder, an audit tells it, or says that it did not audit that."""

import json
import shutil

import pytest

import chipwise as cw
import tasks
from chipwise.proof.audit import audit
from chipwise.run.on import On

pytestmark = pytest.mark.slow

ONE = On(devices=1)
HOW = {
    "progress": "none",
    "log_every": "4st",
    "eval_every": "10st",
    "checkpoint_every": "7st",
    "keep": "7st",
    "keep_best": "eval/loss",
}


def recipe(**changes):
    return tasks.quick(duration="20st", **changes)


def trained(folder, **changes):
    cw.fit(recipe(**changes), folder, on=ONE, **HOW)
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("stated") / "run")


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """A run of another seed."""
    return trained(tmp_path_factory.mktemp("other") / "run", seed=4)


@pytest.fixture
def copy(run, tmp_path):
    return shutil.copytree(run, tmp_path / "run")


def lines(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


def put(file, rows):
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def with_rows(change):
    """A change of the rows of metrics.jsonl: `change(rows)` returns others, or changes them."""

    def apply(run, other):
        file = run / "metrics.jsonl"
        rows = lines(file)
        put(file, change(rows) or rows)

    return apply


def each(name, value):
    """`value(old)` in place of a name's values in all rows."""

    def change(rows):
        for row in rows:
            if name in row:
                row[name] = value(row[name])

    return with_rows(change)


def without(name):
    return with_rows(lambda rows: [{k: v for k, v in row.items() if k != name} for row in rows])


def added(name, beside):
    return with_rows(lambda rows: [{**row, name: 0.999} if beside in row else row for row in rows])


def with_result(**values):
    """Other values in result.json, by name; of "metrics" and "best" by name within; None removes one."""

    def apply(run, other):
        file = run / "result.json"
        result = json.loads(file.read_text())
        for name, value in values.items():
            inner = isinstance(value, dict) and isinstance(result.get(name), dict)
            result[name] = {**result[name], **value} if inner else value
            if inner:
                result[name] = {k: v for k, v in result[name].items() if v != "gone"}
            if value == "gone":
                del result[name]
        file.write_text(json.dumps(result))

    return apply


def with_ledger(change, result=False):
    """A change of the rows of the ledger; without `result`, that is removed."""

    def apply(run, other):
        head, *rows = lines(run / "ledger.jsonl")
        put(run / "ledger.jsonl", [head, *change(rows)])
        if not result:
            (run / "result.json").unlink()

    return apply


def replaced(name):
    def apply(run, other):
        shutil.rmtree(run / name)
        shutil.copytree(other / name, run / name)

    return apply


def best_of_another_step(run, other):
    shutil.rmtree(run / "best")
    (run / "best").mkdir()
    shutil.copytree(run / "checkpoints" / "14", run / "best" / "14")


def setting(name, value):
    def apply(run, other):
        recipe = json.loads((run / "recipe.json").read_text())
        recipe[name] = value
        (run / "recipe.json").write_text(json.dumps(recipe))

    return apply


def of_step(step, change):
    def apply(rows):
        return [made for row in rows for made in (change(row) if row["step"] == step else [row])]

    return apply


DIFFERS, RESULT, LEDGER = "audit-differs", "audit-result", "audit-other-ledger"
CHANGES = {
    # ---- rows of metrics
    "no accuracy in any row": (without("eval/accuracy"), DIFFERS),
    "no loss of evaluation in any row": (without("eval/loss"), DIFFERS),
    "no loss of training in any row": (without("train/loss"), DIFFERS),
    "no evaluation in any row": (
        with_rows(lambda rows: [row for row in rows if "eval/loss" not in row]),
        RESULT,  # of which step is the best
    ),
    "no rate in any row": (without("lr"), DIFFERS),
    "no epoch in any row": (without("epoch"), DIFFERS),
    "an invented metric of evaluation": (added("eval/f1", "eval/loss"), DIFFERS),
    "an invented metric of training": (added("train/f1", "train/loss"), DIFFERS),
    "accuracy is NaN": (each("eval/accuracy", lambda _: float("nan")), DIFFERS),
    "accuracy is infinite": (each("eval/accuracy", lambda _: float("inf")), DIFFERS),
    "accuracy is null": (each("eval/accuracy", lambda _: None), DIFFERS),
    "accuracy is text": (each("eval/accuracy", str), DIFFERS),
    "accuracy is true": (each("eval/accuracy", lambda _: True), DIFFERS),
    "accuracy is a list": (each("eval/accuracy", lambda old: [old]), DIFFERS),
    "accuracy is better": (each("eval/accuracy", lambda _: 0.999), DIFFERS),
    "the loss of training is null": (each("train/loss", lambda _: None), DIFFERS),
    "the loss of training is a little lower": (each("train/loss", lambda old: old * (1 - 1e-12)), DIFFERS),
    "the rate is ten times as large": (each("lr", lambda old: 10 * old), DIFFERS),
    "the rate is text": (each("lr", str), DIFFERS),
    "the epoch is another": (each("epoch", lambda old: old + 1), DIFFERS),
    "a false row before a true one": (
        with_rows(lambda rows: [{**rows[-1], "eval/accuracy": 0.999}, *rows]),
        DIFFERS,
    ),
    "a false row after a true one": (
        with_rows(lambda rows: [*rows, {**rows[-1], "eval/accuracy": 0.999}]),
        DIFFERS,
    ),
    "a true row twice": (with_rows(lambda rows: [*rows, rows[-1]]), DIFFERS),
    "a row after the end": (with_rows(lambda rows: [*rows, {**rows[-1], "step": 99}]), "audit-beyond"),
    "a row of another step": (with_rows(of_step(8, lambda row: [{**row, "step": 9}])), DIFFERS),
    "no row of step 8": (with_rows(of_step(8, lambda row: [])), DIFFERS),  # step 12 is the mean since 8
    "no row of step 20": (with_rows(of_step(20, lambda row: [])), RESULT),
    "no rows": (lambda run, other: (run / "metrics.jsonl").unlink(), RESULT),
    "another speed": (each("examples_per_second", lambda old: 9 * old), "metrics.jsonl: seconds, "),
    "other seconds": (each("seconds", lambda old: 9 * old), "metrics.jsonl: seconds"),
    "a number of one's own": (added("mine/bleu", "eval/loss"), "mine/bleu"),
    "rows of another run": (
        lambda run, other: shutil.copy(other / "metrics.jsonl", run / "metrics.jsonl"),
        DIFFERS,
    ),
    # ---- the result
    "a better accuracy in the result": (with_result(metrics={"eval/accuracy": 0.999}), RESULT),
    "no accuracy in the result": (with_result(metrics={"eval/accuracy": "gone"}), RESULT),
    "accuracy is null in the result": (with_result(metrics={"eval/accuracy": None}), RESULT),
    "accuracy is text in the result": (with_result(metrics={"eval/accuracy": "0.999"}), RESULT),
    "an invented metric in the result": (with_result(metrics={"eval/f1": 0.999}), RESULT),
    "a lower loss of training in the result": (with_result(metrics={"train/loss": 0.001}), RESULT),
    "no metrics in the result": (with_result(metrics="gone"), RESULT),
    "metrics are text in the result": (with_result(metrics="good"), RESULT),
    "another fingerprint": (with_result(fingerprint="0" * 64), RESULT),
    "no fingerprint": (with_result(fingerprint="gone"), RESULT),
    "more steps": (with_result(steps=40), RESULT),
    "fewer steps": (with_result(steps=10), RESULT),
    "steps are text": (with_result(steps="20"), RESULT),
    "another recipe's name": (with_result(recipe="imagenet"), RESULT),
    "another best value": (with_result(best={"value": 0.001}), RESULT),
    "another best step": (with_result(best={"step": 19}), RESULT),
    "the best of another metric": (with_result(best={"metric": "eval/accuracy"}), RESULT),
    "another ledger's digest": (with_result(ledger="0" * 64), LEDGER),
    "no ledger's digest": (with_result(ledger="gone"), LEDGER),
    "another speed in the result": (with_result(examples_per_second=1e9), "result.json: "),
    "another machine in the result": (with_result(machine={"title": "TPU v9"}), "machine"),
    "other seconds in the result": (with_result(seconds={"total": 1.0}), "seconds"),
    "no result": (lambda run, other: (run / "result.json").unlink(), "no result.json"),
    "the result of another run": (
        lambda run, other: shutil.copy(other / "result.json", run / "result.json"),
        RESULT,
    ),
    # ---- the ledger
    "a ledger cut short": (with_ledger(lambda rows: rows[:4], result=True), LEDGER),
    "a ledger cut short without a result": (with_ledger(lambda rows: rows[:3]), "is not finished"),
    "a ledger without digests of parameters": (
        with_ledger(lambda rows: [{k: v for k, v in row.items() if k != "parameters"} for row in rows]),
        DIFFERS,
    ),
    "a ledger without most digests": (
        with_ledger(lambda rows: [{k: row[k] for k in ("step", "state")} for row in rows]),
        DIFFERS,
    ),
    "a row of the ledger with another step": (
        with_ledger(of_step(12, lambda row: [{**row, "step": 13}])),
        DIFFERS,
    ),
    "the ledger of another run": (
        lambda run, other: shutil.copy(other / "ledger.jsonl", run / "ledger.jsonl"),
        DIFFERS,
    ),
    # ---- checkpoints
    "the best checkpoint of another run": (replaced("best"), "audit-best"),
    "another step's checkpoint as the best": (best_of_another_step, "audit-best"),
    "the last checkpoint of another run": (replaced("checkpoints/20"), DIFFERS),
    "an earlier checkpoint of another run": (replaced("checkpoints/7"), DIFFERS),
    "no checkpoint in between": (
        lambda run, other: shutil.rmtree(run / "checkpoints" / "7"),
        None,  # nothing that is there is false
    ),
    # ---- the rest
    "another seed in recipe.json": (setting("seed", 9), "audit-other-recipe"),
    "another batch in recipe.json": (setting("batch", 99), "audit-other-recipe"),
    "another process": (
        lambda run, other: shutil.copy(other / "processes.jsonl", run / "processes.jsonl"),
        "processes.jsonl",
    ),
}


@pytest.mark.drawn
@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_told_or_listed(run, other, copy, name):
    change, told = CHANGES[name]
    change(copy, other)
    verdict, statement = audit(copy, recipe(), steps="0:", on=ONE)
    codes = [found["code"] for found in statement["found"]]
    if told is not None and told.startswith("audit-"):
        assert told in codes and not statement["passed"]
    else:
        assert statement["passed"], verdict
        assert told is None or any(told in line for line in statement["unaudited"])
    assert "\n" not in str(verdict)


@pytest.mark.drawn
@pytest.mark.parametrize("stop", [None, "9st"])
@pytest.mark.parametrize("feed", ["device", "host"])
@pytest.mark.parametrize("log", ["1st", "3st", "7st", "100st"])
@pytest.mark.parametrize("evaluated", ["6st", "20st", None])
def test_honest_runs_pass(tmp_path, stop, feed, log, evaluated):
    how = {"on": On(devices=2, feed=feed), "log_every": log, "eval_every": evaluated, "progress": "none"}
    how |= {"checkpoint_every": "5st"}
    if stop is not None:
        cw.fit(recipe(), tmp_path / "run", stop_after=stop, **how)
        assert audit(tmp_path / "run", recipe(), on=ONE)[1]["passed"]
    cw.fit(recipe(), tmp_path / "run", **how)
    for steps in ("0:", "8:13", None):
        verdict, statement = audit(tmp_path / "run", recipe(), steps=steps, on=On(devices=3))
        assert statement["passed"] and statement["same_bits"], (verdict, statement["found"])
        if steps == "0:":
            assert not any("result" in line and "fingerprint" in line for line in statement["unaudited"])


def test_what_users_log_is_listed(tmp_path):
    for event in cw.training(recipe(), tmp_path / "run", on=ONE, progress="none", log_every="5st"):
        if event.kind == "log":
            event.log({"mine/bleu": 0.25})
            event.text("mine/text", "a text")
    verdict, statement = audit(tmp_path / "run", recipe(), steps="0:", on=ONE)
    assert statement["passed"], verdict
    assert (
        any("mine/bleu" in line for line in statement["unaudited"])
        and "media.jsonl" in statement["unaudited"]
    )
