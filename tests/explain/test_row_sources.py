"""What arguments name, as rows: records, runs and studies."""

import json

import pytest

import run_folders
from chipwise.base.errors import DataError, RecipeError, RunError
from chipwise.explain.compare.compare_parts import parts
from chipwise.explain.page import render
from chipwise.explain.row import divergence, identity
from chipwise.explain.row_sources import read
from explain.comparisons import (
    BETWEEN,
    WHEN,
    by_label,
    compared,
    record,
    run,
    study,
)
from refusals import refused


def test_warm_up_counts_nowhere(tmp_path):
    """Of a run that was resumed to its end, neither the first interval nor the first after the resumption."""
    speeds = (1.0, 100.0, 101.0, 2.0, 102.0, 103.0)
    rows = [
        {"step": 10 * (k + 1), "train/loss": 1.0, "examples_per_second": v, "steps_per_second": v / 256}
        for k, v in enumerate(speeds)
    ]
    made = run(tmp_path / "a", rows="".join(json.dumps(row) + "\n" for row in rows))
    starts = [run_folders.started(), run_folders.started(step=30)]
    (made / "processes.jsonl").write_text("".join(json.dumps(one) + "\n" for one in starts))
    (row,) = read([str(made)])
    assert [v for _, v in row.repeats[0].speeds] == [100.0, 101.0, 102.0, 103.0]
    (row,) = read([str(run(tmp_path / "b", rows=json.dumps(rows[0])))])
    assert row.repeats[0].warming_up and row.repeats[0].examples_per_second == 1


def test_when_a_run_diverged():
    assert divergence(WHEN).json() == BETWEEN and divergence(None) is divergence("") is None
    assert divergence("damaged") is divergence({"first": "3"}) is None


def test_bad_files_are_one_line(tmp_path):
    good = record(tmp_path / "a.json")
    stored = json.loads(good.read_text())
    cases = {
        "newer.json": ({**stored, "schema": "chipwise.record/9"}, "record-other-schema"),
        "nothing.json": ({}, "record-other-schema"),
        "speedless.json": ({**stored, "figures": {}}, "record-no-speed"),
        "batchless.json": ({**stored, "measured": {}}, "recipe-unnamed"),
        "plan.json": ({"schema": "chipwise.plan/12"}, "record-other-schema"),
        "find.json": ({"schema": "chipwise.find_lr/1"}, "record-other-schema"),
    }
    for name, (document_, code) in cases.items():
        (tmp_path / name).write_text(json.dumps(document_))
        with refused(DataError, code):
            read([str(good), str(tmp_path / name)])
    (tmp_path / "short.json").write_text(good.read_text()[:200])
    with refused(DataError, "record-not-json"):
        read([str(tmp_path / "short.json")])
    with refused(DataError, "source-missing", path=tmp_path / "absent.json"):
        read([str(tmp_path / "absent.json")])


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("first_losses", "x", ["array"]),
        ("batch", True, ["integer", "null"]),
        ("steps_per_interval", 0.5, ["integer"]),
        ("seconds", [1], ["object"]),
        ("share_of_peak", "unknown", ["number", "null"]),
        ("exact", 1, ["boolean", "null"]),
        ("framework", 3, ["string", "null"]),
    ],
)
def test_a_field_of_another_type_is_named(tmp_path, field, value, expected):
    facts = {"field": f"measured.{field}", "value": json.dumps(value), "expected": expected}
    with refused(DataError, "record-measured-type", **facts):
        read([str(record(tmp_path / "a.json", **{field: value}))])


def test_runs_of_several_recipes_are_rows_of_several_recipes(tmp_path):
    run(tmp_path / "runs" / "a"), run(tmp_path / "runs" / "b", name="digits", batch=64)
    assert [r.label for r in read([str(tmp_path / "runs")])] == ["a", "b"]
    assert compared(tmp_path / "runs")["recipes"] == ["mnist", "digits"]


def test_folders_that_hold_nothing(tmp_path):
    (tmp_path / "empty").mkdir()
    with refused(RunError, "folder-holds-nothing"):
        read([str(tmp_path / "empty")])
    with refused(RunError, "run-no-metrics"):
        read([str(run(tmp_path / "young", rows=""))])
    with refused(RecipeError, "compare-alone", labels=["a"]):
        compared(record(tmp_path / "a.json"))


def test_a_study_with_runs_to_come(tmp_path):
    made = study(tmp_path / "study")
    (made / "lr=0.1" / "seed-2" / "metrics.jsonl").unlink()
    low, high = read([str(made)])
    assert (len(low.repeats), len(high.repeats)) == (2, 3)
    assert [note.code for note in low.notes] == ["run-left-out"]


def test_a_folder_of_runs_is_a_row_a_setting(tmp_path):
    for seed in range(3):
        run(tmp_path / "runs" / f"a{seed}", seed=seed)
        run(tmp_path / "runs" / f"b{seed}", seed=seed, replicas=1)
    assert [(r.label, len(r.repeats)) for r in read([str(tmp_path / "runs")])] == [
        ("a0", 3),
        ("b0", 3),
    ]


def trained(folder, parameters=None, **changes):
    """A run whose result states this number of parameters."""
    made = run(folder, **changes)
    result = json.loads((made / "result.json").read_text())
    result["devices"]["parameters"] = parameters
    (made / "result.json").write_text(json.dumps(result))
    return made


def origin(*settings, recipe="gpt2-124m", **more):
    """What the command line stores of a recipe."""
    return {"recipe": recipe, "set": [*settings], "data": "/data", **more}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"source": origin("width=64", "seed=0")}, {"source": origin("width=128", "seed=0")}),
        ({"source": origin(recipe="/a/net.py:net")}, {"source": origin(recipe="/b/net.py:net")}),
        ({"source": origin()}, {"source": origin(**{"from": "/runs/a"})}),
        (
            {"source": origin(**{"from": "/runs/a"})},
            {"source": origin(**{"from": "/runs/a", "with_optimizer": True})},
        ),
        ({"read": {"model": "Net(64) of PyTorch"}}, {"read": {"model": "Net(128) of PyTorch"}}),
        ({"parameters": 1000}, {"parameters": 2000}),
    ],
)
def test_models_that_differ_are_never_repeats(tmp_path, one, other):
    for seed in range(2):
        trained(tmp_path / "runs" / f"a{seed}", seed=seed, **one)
        trained(tmp_path / "runs" / f"b{seed}", seed=seed, **other)
    rows = read([str(tmp_path / "runs")])
    assert [(row.label, len(row.repeats)) for row in rows] == [("a0", 2), ("b0", 2)]
    assert [row.source["label"] for row in rows] == ["a0", "b0"]


@pytest.mark.parametrize(
    "sources",
    [
        [origin("width=64", f"seed={seed}", "depth=2") for seed in range(3)],
        [origin("depth=2", "width=32", "width = 64"), origin("width=64", "depth=2", "seed=1")],
        [origin(f"fold={fold}") for fold in range(3)],
        [origin() | {"data": f"/data/{k}", "eval_data": f"/held/{k}"} for k in range(2)],
        [None, None],  # of a Python program
        [{"set": {"width": 1}}, {"set": [1]}, "damaged"],
    ],
)
def test_seeds_and_folds_are_repeats(tmp_path, sources):
    for seed, source in enumerate(sources):
        trained(tmp_path / "runs" / f"a{seed}", seed=seed, source=source, parameters=None if seed else 1000)
    (row,) = read([str(tmp_path / "runs")])
    assert (row.label, len(row.repeats), row.parameters) == ("runs", len(sources), 1000)


def damaged(folder, seed=0, rows=None, seconds=None, devices=None, **recipe):
    """A run with other numbers in its rows, in its result, and in its recipe."""
    made = run(folder, seed=seed, **recipe)
    lines = [json.loads(line) | (rows or {}) for line in (made / "metrics.jsonl").read_text().splitlines()]
    (made / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    result = json.loads((made / "result.json").read_text())
    result["seconds"] |= seconds or {}
    result["devices"] |= devices or {}
    (made / "result.json").write_text(json.dumps(result))
    return made


@pytest.mark.parametrize(
    "numbers",
    [
        {"rows": {"examples_per_second": 0}},
        {"rows": {"examples_per_second": -1.0}},
        {"rows": {"seconds": -1.0}},
        {"seconds": {"total": -300.0}, "rows": {"seconds": None}},
        {"devices": {"kind": "NVIDIA H100 80GB HBM3", "count": 10**400}},
        {"optimizer": {"optimizer": "adam", "lr": float("nan")}},
    ],
)
def test_numbers_that_cannot_be_are_unknown(tmp_path, numbers):
    for seed in range(3):
        damaged(tmp_path / "runs" / f"{seed}", seed, **numbers)
        run(tmp_path / "sound" / f"{seed}", seed=seed)
    for several in (("runs", "sound"), ("sound", "runs"), ("runs/0", "sound"), ("runs/0", "sound/0")):
        found = compared(*(tmp_path / one for one in several), target="0.95")
        json.dumps(found, allow_nan=False)
        render([*parts(found)], found)
    row = by_label(found)["0"]
    for figure in (row["examples_per_second"], row["wall_seconds"]):
        assert figure is None or figure["value"] > 0


def test_a_batch_or_a_recipe_that_cannot_be_is_refused(tmp_path):
    with refused(DataError, "recipe-unnamed"):
        read([str(with_text(run(tmp_path / "a"), f'"batch": 1{400 * "0"}'))])
    deep = with_text(run(tmp_path / "deep" / "a"), f'"ema": {900 * "["}{900 * "]"}')
    for path in (deep, deep.parent):
        with pytest.raises((DataError, RunError)) as caught:
            read([str(path)])
        assert caught.value.code in ("source-nested", "recipe-json-damaged")


def with_text(run, text):
    """A run whose recipe has this text too."""
    stored = (run / "recipe.json").read_text()
    (run / "recipe.json").write_text(f"{stored[:-1]}, {text}}}")
    return run


def test_labels(tmp_path):
    a, b = record(tmp_path / "a.json"), record(tmp_path / "lr=0.2" / "a.json")
    assert [r.label for r in read([str(a), str(b)])] == ["a", "a (2)"]
    assert [r.label for r in read([f"mine={a}", f"x={study(tmp_path / 's')}"])] == [
        "mine",
        "x lr=0.1",
        "x lr=0.2",
    ]
    with refused(RecipeError, "baseline-unknown", label="abb", near="abba"):
        compared(f"abba={a}", b, baseline="abb")


def test_labels_are_never_twice(tmp_path):
    paths = ["bench.json", "bench (2).json", "x/bench.json"]
    labels = [row["label"] for row in compared(*(record(tmp_path / p) for p in paths))["rows"]]
    assert len(set(labels)) == 3


@pytest.mark.parametrize(
    ("text", "code"),
    [("{", "study-damaged"), ('{"schema": "chipwise.study/9"}', "study-schema"), ("[]", "study-damaged")],
)
def test_damaged_studies(tmp_path, text, code):
    (tmp_path / "study.json").write_text(text)
    with refused(RunError, code):
        read([str(tmp_path)])


def test_descriptions_of_packs_are_no_settings():
    described = {"name": "mine", "batch": 8, "lr": 0.1, "packs": {"train": {"names": ["a"]}}}
    assert list(identity(described, "recipe.json")["settings"]) == ["lr"]
