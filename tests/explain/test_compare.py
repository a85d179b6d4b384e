"""Sources, agreement, intervals, targets and money: what a comparison says, and when it says nothing."""

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chipwise.chips import prices
from chipwise.errors import DataError, RecipeError, RunError
from chipwise.explain.compare import agreement as agree
from chipwise.explain.compare.document import document
from chipwise.explain.compare.figures import NO_INTERVAL, Figure, parse, ratio, repeated
from chipwise.explain.compare.table import verdict
from chipwise.explain.rows import Window, as_range, divergence
from chipwise.explain.sources import read, unpublished
from chipwise.planner.plans import SCHEMA as PLAN
from chipwise.study.stats import HIGHER, LOWER, NO_DIFFERENCE
from chipwise.words.facts import fact
from explain import comparisons
from explain.comparisons import LOSSES, plan, record, run, study
from refusals import refused

SPEEDS = st.floats(1e-3, 1e9)
HOW = fact("one-run")


def compared(*sources, **options):
    return document(read([str(s) for s in sources]), prices=prices.load(), **options)


def told(found, subject, code):
    """The facts of a code that a comparison states of a subject."""
    return [stated for stated in found["sentences"][subject] if stated["code"] == code]


def headline(found):
    return [stated["code"] for stated in found["sentences"]["headline"]]


def codes(facts):
    return [stated["code"] for stated in facts]


def by_label(found):
    return {row["label"]: row for row in found["rows"]}


# ---- speeds


def test_the_same_machine_twice_shows_no_difference(tmp_path):
    a = record(tmp_path / "a.json", 1000, 0.05, seed=1)
    b = record(tmp_path / "b.json", 1000, 0.05, seed=2)
    found = compared(a, b)
    assert found["rows"][1]["ratio"]["verdict"] == NO_DIFFERENCE
    assert headline(found) == ["no-difference-shown", "kind-of-both"]
    assert found["agreement"][0]["status"] == agree.SAME_BITS


def test_a_faster_one_is_faster_by_its_interval(tmp_path):
    found = compared(
        record(tmp_path / "slow.json", 1000),
        record(tmp_path / "fast.json", 2000, seed=1, kind="NVIDIA H100 80GB HBM3"),
    )
    verdict = found["rows"][1]["ratio"]
    assert verdict["verdict"] == HIGHER and verdict["low"] < 2 < verdict["high"]
    (faster,) = told(found, "headline", "faster")
    assert (faster["a"], faster["b"]) == ("fast", "slow") and faster["low"] < 2 < faster["high"]
    assert headline(found) == ["faster", "kind-of-both"]
    turned = compared(tmp_path / "slow.json", tmp_path / "fast.json", baseline="fast")
    assert turned["rows"][0]["ratio"]["verdict"] == LOWER
    (again,) = told(turned, "headline", "faster")
    assert (again["a"], again["b"]) == ("fast", "slow")
    assert again["value"] == pytest.approx(faster["value"])


def test_a_folder_of_records_is_one_row_with_repeats(tmp_path):
    for k in range(3):
        record(tmp_path / "mine" / f"{k}.json", 1000 * (1 + 0.01 * k), seed=k)
    found = compared(tmp_path / "mine", record(tmp_path / "b.json", 2000))
    mine, other = found["rows"]
    assert mine["examples_per_second"]["n"] == 3 and not mine["within_one_run"] and other["within_one_run"]
    assert other["ratio"]["verdict"] == HIGHER
    record(tmp_path / "mine" / "other.json", batch=64)
    with refused(DataError, "records-differ", what="batch", a=256, b=64):
        read([str(tmp_path / "mine")])


@given(st.lists(SPEEDS, min_size=2, max_size=5), st.lists(SPEEDS, min_size=2, max_size=5))
def test_a_ratio_and_its_inverse(a, b):
    for x, y in (
        (repeated(a), repeated(b)),
        (Figure(a[0], a[0] / 2, a[0] * 2, 0, HOW), Figure(b[0], b[0], b[0], 0, HOW)),
    ):
        there, back = ratio(x, y), ratio(y, x)
        assert there.value == pytest.approx(1 / back.value) and there.low <= there.value * (1 + 1e-9)
        assert there.low == pytest.approx(1 / back.high, rel=1e-6)
        assert (there.verdict == NO_DIFFERENCE) == (back.verdict == NO_DIFFERENCE)


@given(SPEEDS, SPEEDS, st.floats(1, 3), st.floats(1, 3))
def test_intervals_that_overlap_show_no_difference(x, y, wide, wider):
    a, b = Figure(x, x / wide, x * wide, 1, HOW, (x,)), Figure(y, y / wider, y * wider, 1, HOW, (y,))
    overlap = a.low <= b.high and b.low <= a.high
    near = math.isclose(a.low, b.high, rel_tol=1e-9) or math.isclose(b.low, a.high, rel_tol=1e-9)
    assert near or (ratio(a, b).verdict == NO_DIFFERENCE) == overlap


def test_two_figures_without_intervals():
    assert ratio(Figure(2, None, None, 0, HOW), Figure(1, None, None, 0, HOW)).verdict == NO_INTERVAL


def test_other_batches_are_compared_by_examples_alone(tmp_path):
    b = record(tmp_path / "b.json", 3000, batch=1024, losses=losses(*[1.1] * 20))
    found = compared(record(tmp_path / "a.json", 1000), b)
    assert all(row["steps_per_second"] is None for row in found["rows"])
    assert found["rows"][1]["ratio"]["value"] == pytest.approx(3, rel=0.05)
    assert told(found, "speed", "batches-differ")[0]["batches"] == [256, 1024]
    assert found["rows"][1]["same_computation"] is False
    (why,) = found["agreement"][0]["fact"]["why"]
    assert (why["name"], why["a"], why["b"]) == ("batch", 1024, 256)
    equal = compared(tmp_path / "a.json", record(tmp_path / "c.json"))
    assert all(row["steps_per_second"] for row in equal["rows"])


# ---- agreement


def losses(*factors):
    return [x * f for x, f in zip(LOSSES, factors, strict=False)]


@pytest.mark.parametrize(
    ("factors", "status", "parts"),
    [
        ([1] * 20, agree.SAME_BITS, None),
        ([1 + 1e-7 * 1.2**k for k in range(20)], agree.AGREE, None),
        ([1 + e for e in (1e-7, 1e-7, 1e-5, 5e-5, 3e-4)], agree.AGREE, None),  # JAX and PyTorch, ResNet-32
        ([1 + min(1e-7 * 10**k, 0.1) for k in range(20)], agree.AGREE, 6),
        ([1, 1 + 1e-4] + [1.01] * 18, agree.PART, 2),  # another rate shows after one update
        ([1, 1, 1 + 1e-3] + [1.01] * 17, agree.PART, 3),  # another momentum after two
        ([1.5] * 20, agree.PART, 1),
    ],
)
def test_first_losses(tmp_path, factors, status, parts):
    made = losses(*factors)
    a = record(tmp_path / "a.json", losses=LOSSES[: len(made)])
    found = compared(a, record(tmp_path / "b.json", losses=made))["agreement"][0]
    assert (found["status"], found["parts"]) == (status, parts)
    assert found["same"] == (status != agree.PART)


def test_losses_that_part_for_a_reason_are_not_compared(tmp_path):
    a = record(tmp_path / "a.json")
    for changes, why in (
        ({"framework": "PyTorch"}, fact("another-value", name="framework", a="PyTorch", b="chipwise")),
        ({"data": "real"}, fact("another-value", name="data", a="real", b="synthetic")),
        ({"described": comparisons.recipe(seed=1)}, fact("another-value", name="seed", a=1, b=0)),
        ({"described": comparisons.recipe(duration="1ep")}, fact("other-settings", settings=["duration"])),
    ):
        found = compared(a, record(tmp_path / "b.json", losses=losses(*[1.1] * 20), **changes))
        assert found["agreement"][0]["status"] == agree.UNKNOWN
        assert found["agreement"][0]["fact"]["why"] == [why.json()]
        assert told(found, "speed", "rows-not-known-to-be-the-same")[0]["labels"] == ["b"]


def test_a_run_meets_a_record_by_the_mean_of_its_losses(tmp_path):
    row = {"step": 10, "train/loss": float(np.mean(LOSSES[:10])), "examples_per_second": 1000.0}
    made = run(tmp_path / "run", rows=json.dumps(row) + "\n")
    found = compared(record(tmp_path / "a.json"), made)["agreement"][0]
    assert found["status"] == agree.AGREE and found["steps"] == 10 and found["first_bits"] is None


def test_losses_first_known_late_cannot_tell(tmp_path):
    a, b = (
        run(tmp_path / "a"),
        run(tmp_path / "b", rows=json.dumps({"step": 100, "train/loss": 1.3, "examples_per_second": 9.0})),
    )
    found = compared(a, b)["agreement"][0]
    assert found["status"] == agree.UNKNOWN and found["fact"]["why"] == [
        fact("first-loss-too-late", step=100).json()
    ]


@given(
    st.lists(st.integers(1, 6), min_size=1, max_size=8), st.lists(st.integers(1, 6), min_size=1, max_size=8)
)
def test_windows_meet_where_both_end(a, b):
    def windows(lengths):
        ends = np.cumsum(lengths)
        return [
            Window(int(e) - n + 1, int(e), (e + (e - n + 1)) / 2) for e, n in zip(ends, lengths, strict=True)
        ]

    met = agree.meet(windows(a), windows(b))  # the loss of step k is k
    assert [m.step for m in met] == sorted({m.step for m in met})
    assert {m.step for m in met} <= set(np.cumsum(a)) & set(np.cumsum(b))
    assert all(m.a == pytest.approx(m.b) for m in met)
    if a == b:
        assert len(met) == len(a)


# ---- one device


def test_one_device_crowns_no_chip(tmp_path):
    a = record(tmp_path / "a.json", 1000)
    equal = compared(a, record(tmp_path / "b.json", 3680, seed=1))
    assert headline(equal) == ["same-device-and-steps", "kind-of-both"]
    assert equal["sentences"]["headline"][0]["device"] == "Some CPU, 2 cores"
    for changes, code, settings in (
        ({"framework": "PyTorch"}, "same-device-other-framework", None),
        (
            {"described": comparisons.recipe(duration="1ep"), "losses": [3.0] * 9},
            "same-device-other-settings",
            ["duration"],
        ),
    ):
        other = compared(a, record(tmp_path / "b.json", 3680, seed=1, **changes))
        assert headline(other)[:2] == [code, "faster"]
        assert other["sentences"]["headline"][0].get("settings") == settings
        assert told(other, "headline", "faster")[0]["a"] == "b"
    # what the chip is called does not tell one machine's CPU from another's, of accelerators it does
    for kind, count in (("cpu", 1), ("TPU v2", 8)):
        record(tmp_path / "a.json", 1000, kind=kind, count=count)
        record(tmp_path / "b.json", 3000, kind="TPU v2")
        other = compared(a, tmp_path / "b.json")
        assert headline(other)[0] == "faster" and other["sentences"]["headline"][0]["a"] == "b"
    moved = json.loads(record(tmp_path / "b.json", 3000).read_text())
    moved["machine"]["cpu"] = "Another CPU"
    (tmp_path / "b.json").write_text(json.dumps(moved))
    assert compared(record(tmp_path / "a.json"), tmp_path / "b.json")["rows"][1]["same_device"] is False


# ---- runs that diverged

WHEN = {"code": "loss-not-finite", "first": 301, "last": 350, "value": "nan"}
BETWEEN = fact("diverged-between", first=301, last=350).json()


def test_when_a_run_diverged():
    assert divergence(WHEN).json() == BETWEEN and divergence(None) is divergence("") is None
    older = divergence("The training loss\nbecame nan " + 300 * "x")
    assert older.code == "diverged-as-told" and "\n" not in older["words"] and len(older["words"]) == 160


def test_a_run_that_diverged_counts_nowhere(tmp_path):
    runs = tmp_path / "runs"
    for seed in range(4):
        lost = {"accuracies": (0.0, 0.0, 0.0), "speed": 9e6, "diverged": WHEN} if seed == 3 else {}
        run(runs / f"seed-{seed}", seed=seed, **lost)
    found = compared(runs, run(tmp_path / "b"), target=parse("0.95"))
    row = found["rows"][0]
    assert row["metric"]["values"] == [0.97] * 3 and row["examples_per_second"]["n"] == 3
    assert row["target"]["runs"] == 4 and row["diverged"] == {"runs": 1, "of": 4, "when": [BETWEEN]}
    (beside,) = told(found, "metric", "final")[0]["more"]
    assert (beside["code"], beside["runs"], beside["of"]) == ("diverged-beside", 1, 4)
    assert [(n["run"], n["note"]["code"]) for n in row["notes"] if n["code"] == "note-of-run"] == [
        ("seed-3", "run-diverged-when")
    ]


def test_a_row_that_diverged_ranks_nowhere(tmp_path):
    lost = run(tmp_path / "lost", (0.0,), speed=9e6, diverged=WHEN)
    found = compared(lost, run(tmp_path / "a"), run(tmp_path / "b", seed=1))
    row = by_label(found)["lost"]
    assert row["examples_per_second"] is row["metric"] is row["ratio"] is None and verdict(row) == "diverged"
    assert found["baseline"] == "a" and "lost" not in str(found["sentences"]["headline"])
    (lost,) = told(found, "speed", "row-diverged")
    assert (lost["label"], lost["runs"], lost["of"]) == ("lost", 1, 1)


def test_a_study_says_what_diverged_before_any_row(tmp_path):
    made = study(tmp_path / "study")
    (made / "lr=0.1" / "seed-2" / "metrics.jsonl").write_text("")
    stored = json.loads((made / "study.json").read_text())
    stored["points"][0]["runs"][2] |= {"done": False, "diverged": "The training loss became nan"}
    (made / "study.json").write_text(json.dumps(stored))
    low = compared(made)["rows"][0]
    assert (low["diverged"]["runs"], low["diverged"]["of"], low["metric"]["n"]) == (1, 3, 2)


# ---- few values


def test_two_runs_are_both_shown_and_make_no_interval(tmp_path):
    found = compared(study(tmp_path / "study", seeds=(0, 1)), target=parse("0.95"))
    low = found["rows"][0]
    for figure in (low["wall_seconds"], low["target"]["wall"], low["examples_per_second"], low["metric"]):
        assert figure["n"] == 2 and figure["low"] is None and len(figure["values"]) == 2
    assert "2 runs are too few for an interval" in found["sentences"]["wall"][0]["text"]
    final = told(found, "metric", "final")[0]["runs"]
    assert (final["code"], final["low"], final["high"]) == ("final-of-two", 0.97, 0.971)


def test_warm_up_counts_nowhere(tmp_path):
    """Of a run that was resumed to its end, neither the first interval nor the first after the resumption."""
    speeds = (1.0, 100.0, 101.0, 2.0, 102.0, 103.0)
    rows = [{"step": 10 * (k + 1), "train/loss": 1.0, "examples_per_second": v} for k, v in enumerate(speeds)]
    made = run(tmp_path / "a", rows="".join(json.dumps(row) + "\n" for row in rows))
    result = json.loads((made / "result.json").read_text())
    (made / "result.json").write_text(json.dumps({**result, "speed": {"intervals": 2}}))
    (row,) = read([str(made)])
    assert [v for _, v in row.repeats[0].speeds] == [100.0, 101.0, 102.0, 103.0]
    (row,) = read([str(run(tmp_path / "b", rows=json.dumps(rows[0])))])
    assert row.repeats[0].warming_up and row.repeats[0].examples_per_second == 1


def test_a_share_stays_between_0_and_1(tmp_path):
    for seed, accuracy in enumerate((1.0, 0.4, 1.0)):
        run(tmp_path / "runs" / f"{seed}", (accuracy,), seed=seed)
    metric = compared(tmp_path / "runs", run(tmp_path / "b"))["rows"][0]["metric"]
    assert 0 <= metric["low"] < 0.8 < metric["high"] == 1


# ---- other recipes, damaged files


@pytest.mark.parametrize(
    ("changes", "code", "has", "other"),
    [
        ({"name": "digits"}, "another-recipe", "digits", "mnist"),
        ({"parameters": 9}, "another-size", 9, 250_698),
        (
            {"described": comparisons.recipe(task={"train": {"examples": 9, "image": "uint8[32, 32, 3]"}})},
            "another-shape",
            ["image uint8[32, 32, 3]"],
            ["image uint8[28, 28]", "label int32[]"],
        ),
    ],
)
def test_another_recipe_is_refused(tmp_path, changes, code, has, other):
    with refused(RecipeError, code, row="b", other="a", has=has, other_has=other):
        compared(record(tmp_path / "a.json"), record(tmp_path / "b.json", **changes))


def test_bad_files_are_one_line(tmp_path):
    good = record(tmp_path / "a.json")
    stored = json.loads(good.read_text())
    cases = {
        "newer.json": ({**stored, "schema": "chipwise.record/9"}, "record-newer"),
        "feed.json": ({**stored, "kind": "feed"}, "record-kind"),
        "nothing.json": ({}, "record-other-schema"),
        "speedless.json": ({**stored, "figures": {}}, "record-no-speed"),
        "batchless.json": ({**stored, "measured": {}}, "recipe-unnamed"),
        "plan.json": ({"schema": "chipwise.plan/99"}, "plan-other-schema"),
        "find.json": ({"schema": "chipwise.find_lr/1"}, "record-other-schema"),
        "damaged.json": ({"schema": PLAN, "plans": 3}, "plan-damaged"),
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
        ("first_losses", "x", "a list of numbers"),
        ("first_losses", ["x"], "a list of numbers"),
        ("batch", True, "a whole number from 1 on"),
        ("steps_per_interval", 0, "a whole number from 1 on"),
        ("seconds", [1], "an object"),
        ("share_of_peak", "unknown", "a number"),
        ("exact", 1, "true or false"),
        ("framework", 3, "text"),
    ],
)
def test_a_field_of_another_type_is_named(tmp_path, field, value, expected):
    facts = {"field": f"measured.{field}", "value": json.dumps(value), "expected": expected}
    with refused(DataError, "record-measured-type", **facts):
        read([str(record(tmp_path / "a.json", **{field: value}))])


def test_a_folder_of_runs_of_several_recipes(tmp_path):
    run(tmp_path / "runs" / "a"), run(tmp_path / "runs" / "b", name="digits", batch=64)
    with refused(RecipeError, "runs-of-several-recipes") as error:
        read([str(tmp_path / "runs")])
    assert {(f["run"], f["recipe"]) for f in error.value.facts["runs"]} == {("a", "mnist"), ("b", "digits")}
    changed = {f"setting_of_a_long_name_{k}": k for k in range(9)}
    run(tmp_path / "many" / "a"), run(tmp_path / "many" / "b", **changed)
    assert [r.label for r in read([str(tmp_path / "many")])] == ["a", "b"]


def test_folders_that_hold_nothing(tmp_path):
    (tmp_path / "empty").mkdir()
    with refused(RunError, "folder-holds-nothing"):
        read([str(tmp_path / "empty")])
    with refused(RunError, "run-no-metrics"):
        read([str(run(tmp_path / "young", rows=""))])
    with refused(RecipeError, "compare-alone", labels=["a"]):
        compared(record(tmp_path / "a.json"))


def test_an_unfinished_run_says_what_is_missing(tmp_path):
    found = compared(run(tmp_path / "whole"), run(tmp_path / "part", done=False))
    part = by_label(found)["part"]
    assert part["wall_seconds"] is None and part["device"] == "device unknown"
    assert part["notes"] == [fact("run-unfinished", steps=300).json()]


def test_what_is_no_number_is_left_out(tmp_path):
    rows = '{"step": 1, "train/loss": NaN, "examples_per_second": Infinity}\n'
    rows += '{"step": 2, "examples_per_second": 5, "wait_data_seconds": 1' + 400 * "0" + "}\nnot"
    found = compared(run(tmp_path / "a", rows=rows), record(tmp_path / "b.json", losses=[2.0, None, 1.0]))
    assert by_label(found)["a"]["examples_per_second"]["value"] == 5
    assert by_label(found)["b"]["notes"][0] == fact("loss-not-finite-at", step=2).json()
    json.dumps(found, allow_nan=False)


# ---- runs, studies, plans


def test_a_study_is_a_row_a_point(tmp_path):
    found = compared(study(tmp_path / "study"), target=parse("0.96"))
    low, high = found["rows"]
    assert (low["label"], high["label"]) == ("lr=0.1", "lr=0.2") and low["metric"]["n"] == 3
    assert high["metric"]["by_pairs"] and high["metric"]["difference"]["value"] == pytest.approx(0.01)
    assert low["wall_seconds"]["n"] == 3 and high["wall_ratio"]["verdict"] == NO_DIFFERENCE
    assert low["target"]["kind"] == "measured" and low["target"]["wall"]["n"] == 3
    assert {d["setting"] for d in found["differing"]} == {"optimizer.lr"}


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
        ("replicas=8", 3),
        ("replicas=1", 3),
    ]


def test_plans_are_predictions_and_say_what_cannot_run(tmp_path):
    found = compared(record(tmp_path / "cpu.json"), plan(tmp_path / "plan.json"))
    rows = by_label(found)
    assert [rows[k]["kind"] for k in ("cpu", "v5e-8", "t4")] == ["measured", "predicted", "predicted"]
    assert rows["k80"]["examples_per_second"] is None
    assert rows["k80"]["notes"] == [fact("cannot-run", problem="too small a memory").json()]
    assert rows["v5e-8"]["ratio"]["low"] < 250 / 1.5 * 1.1 and rows["v5e-8"]["wall_seconds"]["low"] == 50
    (kinds,) = told(found, "headline", "kinds-of-both")
    assert (kinds["a"], kinds["a_kind"], kinds["b_kind"]) == ("v5e-8", "predicted", "measured")
    assert rows["v5e-8"]["same_computation"] is None


def test_time_to_a_target_is_measured_or_reckoned(tmp_path):
    sources = (run(tmp_path / "run"), record(tmp_path / "fast.json", 2560.0, 0), plan(tmp_path / "plan.json"))
    rows = by_label(compared(*sources, target=parse("0.95")))
    one = {"low": None, "high": None, "n": 1, "how": fact("one-run").json()}
    speed = rows["run"]["examples_per_second"]["value"]
    trained = 200 * 256 / speed
    assert rows["run"]["target"] | {"how": ""} == {
        "training": {"value": trained, **one, "values": [trained]},
        "wall": {"value": 200.0, **one, "values": [200.0]},
        "steps": 200, "kind": "measured", "reached": 1, "runs": 1, "how": "",
    }  # fmt: skip
    fast = rows["fast"]["target"]
    assert fast["kind"] == "predicted"
    assert fast["how"] == fact("steps-of-another", label="run", steps=200).json()
    assert fast["training"]["value"] == pytest.approx(200 * 256 / 2560) and fast["wall"] is None
    assert rows["fast"]["target_ratio"]["value"] == pytest.approx(speed / 2560)  # the same kind of time
    # a plan knows what comes around training: 5 s of start, 3 of compilation, 4 of evaluation in 5,625 steps
    t4 = rows["t4"]["target"]
    assert t4["wall"]["value"] == pytest.approx(t4["training"]["value"] + 8 + 4 * 200 / 5625)
    cost = rows["t4"]["costs"][0]
    assert cost["target"]["value"] == pytest.approx(t4["wall"]["value"] * cost["usd_per_hour"] / 3600)
    assert cost["target_basis"] == "wall time" and rows["k80"]["target"]["training"] is None
    never = by_label(compared(*sources, target=parse("0.999")))
    assert never["run"]["target"]["how"] == fact("target-missed", best=0.97).json()
    assert never["fast"]["target"]["training"] is None
    down = by_label(compared(*sources, target=parse("eval/accuracy=.9")))
    assert down["run"]["target"]["steps"] == 100


def test_a_run_of_before_knows_its_steps_and_not_its_seconds(tmp_path):
    found = by_label(compared(run(tmp_path / "a", timed=False), run(tmp_path / "b"), target=parse("0.95")))
    assert found["a"]["target"]["wall"] is None and found["a"]["target"]["training"]
    assert found["a"]["target"]["how"]["code"] == "own-steps" and found["a"]["target"]["steps"] == 200


def test_one_run_against_several_to_a_target(tmp_path):
    found = by_label(compared(study(tmp_path / "study", ("0.1",)), run(tmp_path / "b"), target=parse("0.95")))
    assert found["b"]["target_ratio"]["verdict"] == NO_DIFFERENCE


def test_targets_nobody_measured(tmp_path):
    with refused(RecipeError, "target-not-measured", metric="eval/f1", seen=["eval/accuracy"]):
        compared(run(tmp_path / "a"), run(tmp_path / "b"), target=parse("f1=0.5"))
    for text in ("", "high", "eval/loss=", "=1", "nan"):
        with refused(RecipeError, "target-unreadable", given=text):
            parse(text)


# ---- money


def test_dollars_by_dated_prices(tmp_path):
    table = prices.read(
        "chip,chips,cloud,instance,region,usd_per_hour,spot_usd_per_hour,spot_region,includes,source,date,note\n"
        "t4,1,there,one,us,3.6,1.8,eu,whole VM,a list,2026-01-02,\n", "mine.csv",
    )  # fmt: skip
    sources = (record(tmp_path / "cpu.json"), record(tmp_path / "gpu.json", 1000.0, 0, kind="Tesla T4"))
    cpu, gpu = document(read([str(s) for s in sources]), prices=table)["rows"]
    assert cpu["costs"] == [] and cpu["no_price"]["code"] == "no-price-of-a-cpu" and gpu["no_price"] is None
    assert [(c["spot"], c["date"], c["source"]) for c in gpu["costs"]] == [
        (False, "2026-01-02", "a list"), (True, "2026-01-02", "a list"),
    ]  # fmt: skip
    # 1,000 examples/s: a million in 1,000 s, at $3.60 and $1.80 an hour
    assert [c["per_million_examples"]["value"] for c in gpu["costs"]] == pytest.approx([1.0, 0.5])


@pytest.mark.parametrize(
    ("kind", "count", "target"),
    [
        ("TPU v5 lite", 8, "v5e-8"), ("TPU v2", 8, "v2-8"), ("NVIDIA H100 80GB HBM3", 2, "h100:2"),
        ("TPU v5 lite", 3, None), ("NVIDIA H100 80GB HBM3", 9, None), ("Abacus", 1, None), ("cpu", 8, None),
    ],
)  # fmt: skip
def test_what_one_rents_for_devices(tmp_path, kind, count, target):
    (row,) = read([str(record(tmp_path / "a.json", kind=kind, count=count))])
    assert (row.rented and row.rented.name) == target


# ---- names


def test_a_baseline_that_became_several_rows(tmp_path):
    made = study(tmp_path / "study")
    for arguments, label in (([made], str(made)), ([f"S={made}"], "S")):
        with refused(RecipeError, "baseline-several", n=2):
            compared(*arguments, baseline=label)
    a = record(tmp_path / "a.json")
    assert compared(f"mine={a}", made, baseline=str(a))["baseline"] == "mine"


def test_published_without_figures_is_left_out(tmp_path):
    sources = [str(record(tmp_path / f"{k}.json", name="digits")) for k in "ab"] + ["published"]
    rows = read(sources)
    (note,) = unpublished(sources, rows)
    assert [r.kind for r in rows] == ["measured"] * 2
    assert (note.code, note["recipe"]) == ("nobody-published", "digits")
    assert document(rows, prices=(), notes=[note])["notes"] == [note.json()]
    with refused(RecipeError, "compare-alone-unpublished", labels=["a"]):
        document(rows[:1], prices=(), notes=[note])
    with refused(RecipeError, "published-none", words="v100"):
        read([sources[0], "published:v100"])
    assert unpublished(["published"], read(["published:mnist"])) == []


def test_labels(tmp_path):
    a, b = record(tmp_path / "a.json"), record(tmp_path / "lr=0.2" / "a.json")
    assert [r.label for r in read([str(a), str(b)])] == ["a", "a (2)"]
    assert [r.label for r in read([f"mine={a}", f"x={plan(tmp_path / 'p.json')}"])] == [
        "mine",
        "x v5e-8",
        "x t4",
        "x k80",
    ]
    with refused(RecipeError, "baseline-unknown", label="abb", near="abba"):
        compared(f"abba={a}", b, baseline="abb")
    assert [r.kind for r in read([str(a), "published:t4"])] == ["measured", "published"]
    with refused(RecipeError, "published-no-match", recipe="mnist", words="abacus", rows=2, target="t4"):
        read([str(a), "published:abacus"])


def test_published_figures_alone_are_of_one_recipe():
    assert len(read(["published:mnist"])) == 2
    with refused(RecipeError, "published-of-which-recipe"):
        read(["published"])
    found = document(read(["published:resnet32"]), prices=())
    (relative,) = found["sentences"]["headline"]
    assert relative["code"] == "published-relative"
    assert (relative["times"][-1]["label"], relative["times"][-1]["span"]) == ("K80 (2018)", "8 to 9")


@pytest.mark.parametrize(
    ("text", "code"),
    [("{", "study-damaged"), ('{"schema": "chipwise.study/9"}', "study-schema"), ("[]", "study-damaged")],
)
def test_damaged_studies(tmp_path, text, code):
    (tmp_path / "study.json").write_text(text)
    with refused(RunError, code):
        read([str(tmp_path)])


def test_a_few_equal_losses_or_another_setting_are_not_the_same_computation(tmp_path):
    one = record(tmp_path / "one.json", losses=LOSSES[:1])
    two = record(tmp_path / "two.json", losses=LOSSES[:1])
    (said,) = compared(one, two)["agreement"]
    assert not said["same"] and codes(said["fact"]["but"]) == ["too-few-steps"]
    rate = {"optimizer": {"optimizer": "adam", "lr": "constant(0.5)"}}
    a = record(tmp_path / "a.json")
    b = record(tmp_path / "b.json", described=comparisons.recipe("mnist", 256, **rate))
    (said,) = compared(a, b)["agreement"]
    assert not said["same"] and codes(said["fact"]["but"]) == ["although"]
    assert said["fact"]["but"][0]["why"] == [fact("other-settings", settings=["optimizer.lr"]).json()]


def test_the_wall_time_of_a_resumed_run_is_of_all_its_processes(tmp_path):
    made = run(tmp_path / "run")
    result = json.loads((made / "result.json").read_text())
    result["seconds"] = {"start": 2.0, "train": 90.0, "total": 95.0}  # the last process
    (made / "result.json").write_text(json.dumps(result))
    (row, _) = compared(made, run(tmp_path / "other"))["rows"]
    assert row["wall_seconds"]["value"] == pytest.approx(300.0) and "train" not in row["seconds"]


def test_a_run_that_is_not_over_has_no_final_metric_and_no_predicted_time(tmp_path):
    rows = json.dumps({"step": 100, "train/loss": 1.0, "examples_per_second": 900.0, "seconds": 0.0}) + "\n"
    early = run(tmp_path / "early", done=False, rows=rows)
    found = compared(run(tmp_path / "whole"), early, target=parse("0.95"))
    row = found["rows"][1]
    assert row["metric"] is None and row["target"]["training"] is None


@pytest.mark.parametrize("low", [0.0, -1.0, 1e9])
def test_a_range_that_cannot_be_is_none(low):
    assert as_range({"value": 10.0, "low": low, "high": 20.0}) is None


def test_labels_are_never_twice(tmp_path):
    paths = ["bench.json", "bench (2).json", "x/bench.json"]
    labels = [row["label"] for row in compared(*(record(tmp_path / p) for p in paths))["rows"]]
    assert len(set(labels)) == 3


def test_no_escape_sequence_reaches_the_terminal(tmp_path, capsys):
    from chipwise.cli import main

    a = record(tmp_path / "a.json", framework="\x1b[31mred")
    assert main(["compare", str(a), str(record(tmp_path / "b.json"))]) == 0
    assert "\x1b" not in capsys.readouterr().out
