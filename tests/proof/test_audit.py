"""A run is what its recipe and data make, or the first step at which it is not."""

import dataclasses
import hashlib
import json
import shutil

import numpy as np
import pytest

import chipwise as cw
import pairs
from chipwise.proof.audit import audit
from chipwise.run.folder.run_reader import LEDGER
from chipwise.run.on import On
from refusals import refused

pytestmark = pytest.mark.slow

ONE = On(devices=1)
HOW = {"progress": "none", "log_every": "4st", "eval_every": "10st", "checkpoint_every": "7st", "keep": "7st"}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("audit") / "run"
    cw.fit(pairs.recipe(), folder, on=ONE, **HOW)
    return folder


@pytest.fixture
def copy(run, tmp_path):
    return shutil.copytree(run, tmp_path / "run")


def audited(run, recipe, steps=None, devices=1, every=None):
    return audit(run, recipe, steps=steps, every=every, on=On(devices=devices))


def test_a_run_is_what_it_says_on_other_devices(run):
    verdict, statement = audited(run, pairs.recipe(), devices=4)
    assert verdict.code == "audit-passed" and statement["passed"] and statement["same_bits"]
    # From the beginning and from the checkpoints of steps 7, 14 and 20, each to the next row
    assert statement["made"] == [[0, 4], [7, 8], [14, 16], [20, 20]] and statement["rows"] == 6
    digest = statement.pop("digest")
    assert hashlib.sha256(json.dumps(statement, sort_keys=True).encode()).hexdigest() == digest


@pytest.mark.parametrize(
    "asked, made",
    [
        ({"steps": "9:15"}, [[7, 15]]),
        ({"steps": "0:"}, [[0, 20]]),
        ({"steps": "16"}, [[14, 16]]),
        ({"steps": "14"}, [[7, 14]]),
        ({"steps": "19:99"}, [[14, 20]]),
        ({"every": "50%"}, [[7, 10], [14, 20]]),
    ],
)
def test_what_is_computed_again(run, asked, made):
    assert audited(run, pairs.recipe(), **asked)[1]["made"] == made


def test_steps_that_cannot_be_read(run):
    for steps in ("b:a", "9:7", "-1:4", ":9:9", "0", "7:7", "20:", "20:30", "21"):
        with refused(cw.errors.RecipeError, "audit-steps", steps=steps, end=20):
            audited(run, pairs.recipe(), steps)


def with_digit(run, place):
    """Changes the last digit of the ledger's row of step 12."""
    lines = (run / LEDGER).read_text().splitlines()
    row = next(i for i, line in enumerate(lines) if json.loads(line).get("step") == 12)
    made = json.loads(lines[row])
    made[place] = f"{int(made[place], 16) ^ 1:016x}"
    lines[row] = json.dumps(made)
    (run / LEDGER).write_text("\n".join(lines) + "\n")


def with_metric(run):
    file = run / "metrics.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    row = next(row for row in rows if row["step"] == 16)
    row["train/loss"] = float(np.nextafter(row["train/loss"], 0))
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def with_byte(run):
    file = max((run / "checkpoints" / "14").rglob("d/*"), key=lambda path: path.stat().st_size)
    content = bytearray(file.read_bytes())
    for place in range(0, len(content), 64):  # a single byte may be one that nothing reads
        content[place] ^= 1
    file.write_bytes(content)


CHANGES = {
    "checkpoint": (with_byte, {}, "audit-damaged", 14),
    "metrics": (with_metric, {}, "audit-differs", 16),
    "ledger": (lambda run: with_digit(run, "gradient"), {}, "audit-differs", 12),
    "rate": (None, {"optimizer": cw.adamw(lr=pairs.late(1), weight_decay=0.01)}, "audit-differs", 4),
    "seed": (None, {"seed": 4}, "audit-differs", 4),
    "label": (None, {"train": pairs.relabelled()}, "audit-differs", 4),
    "line": (None, {"lossy": pairs.changed(more=True)}, "audit-differs", 4),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_changed_thing_is_told_with_its_step(copy, what):
    change, other, code, step = CHANGES[what]
    if change is not None:
        change(copy)
    verdict, statement = audited(copy, pairs.recipe(**other), "0:" if what == "ledger" else None)
    assert (verdict.code, verdict["step"]) == (code, step) and not statement["passed"]
    told = {"rate": "audit-other-recipe", "seed": "audit-other-recipe", "label": "audit-other-data"}
    told |= {"ledger": "audit-other-ledger"}
    assert [fact["code"] for fact in statement["found"][1:]] == [told.get(what)] * (what in told)
    assert what != "label" or statement["found"][1]["what"] == ["examples"]
    assert "\n" not in str(verdict)


def test_another_chip_is_compared_by_its_metrics(copy):
    text = (copy / LEDGER).read_text()
    head = json.loads(text.splitlines()[0])
    head["computed"]["chip"] = "Another chip"
    (copy / LEDGER).write_text("\n".join([json.dumps(head), *text.splitlines()[1:]]) + "\n")
    verdict, statement = audited(copy, pairs.recipe(), "0:9")
    # Rows 4 and 8, and the evaluation of the last checkpoint
    assert verdict.code == "audit-passed" and not statement["same_bits"] and statement["rows"] == 3
    verdict, _ = audited(copy, dataclasses.replace(pairs.recipe(), seed=4), "0:9")
    assert verdict.code == "audit-differs" and "train/loss" in verdict["what"]


def test_a_run_without_a_ledger(copy):
    (copy / LEDGER).unlink()
    with refused(cw.errors.RunError, "run-without-ledger"):
        audited(copy, pairs.recipe())
