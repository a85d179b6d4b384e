"""What a comparison says, and when it says nothing: headlines, one device, divergences, few values."""

import json

import pytest

from chipwise.base.errors import DataError, RecipeError
from chipwise.base.facts import fact
from chipwise.explain.compare.compare_parts import result, verdict
from chipwise.explain.row_sources import read
from chipwise.study.stats import HIGHER, LOWER, NO_DIFFERENCE
from explain.comparisons import (
    BETWEEN,
    LOSSES,
    WHEN,
    by_label,
    compared,
    headline,
    recipe,
    record,
    run,
    study,
    told,
)
from refusals import refused
from run_folders import started


def test_the_same_machine_twice_shows_no_difference(tmp_path):
    a = record(tmp_path / "a.json", 1000, 0.05, seed=1)
    b = record(tmp_path / "b.json", 1000, 0.05, seed=2)
    found = compared(a, b)
    assert found["rows"][1]["ratio"]["verdict"] == NO_DIFFERENCE
    assert headline(found) == ["no-difference-shown"]


def test_a_faster_one_is_faster_by_its_interval(tmp_path):
    found = compared(
        record(tmp_path / "slow.json", 1000),
        record(tmp_path / "fast.json", 2000, seed=1, kind="NVIDIA H100 80GB HBM3"),
    )
    verdict = found["rows"][1]["ratio"]
    assert verdict["verdict"] == HIGHER and verdict["low"] < 2 < verdict["high"]
    (faster,) = told(found, "headline", "faster")
    assert (faster["a"], faster["b"]) == ("fast", "slow") and faster["low"] < 2 < faster["high"]
    assert headline(found) == ["faster"]
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


@pytest.mark.parametrize(
    ("measured", "facts"),
    [
        ({"set": ["width=128"]}, {"what": "source.set.width", "a": None, "b": "128"}),
        ({"described": recipe(ema=0.9)}, {"what": "ema", "a": None, "b": 0.9}),
        (
            {"described": recipe(task={"train": {"examples": 60000, "image": "uint8[64, 64]"}})},
            {"what": "image", "a": "uint8[28, 28]", "b": "uint8[64, 64]"},
        ),
    ],
)
def test_records_of_other_settings_are_no_repeats(tmp_path, measured, facts):
    record(tmp_path / "mine" / "0.json"), record(tmp_path / "mine" / "1.json", **measured)
    with refused(DataError, "records-differ", **facts):
        read([str(tmp_path / "mine")])


def test_records_of_another_seed_or_length_are_repeats(tmp_path):
    record(tmp_path / "mine" / "0.json")
    longer = recipe(duration="2ep", seed=1)
    record(tmp_path / "mine" / "1.json", described=longer, set=["duration=2ep", "seed=1"])
    assert len(read([str(tmp_path / "mine")])[0].repeats) == 2


def test_other_batches_are_compared_by_examples_alone(tmp_path):
    b = record(tmp_path / "b.json", 3000, batch=1024, losses=[1.1 * x for x in LOSSES[:20]])
    found = compared(record(tmp_path / "a.json", 1000), b)
    assert all(row["steps_per_second"] is None for row in found["rows"])
    assert found["rows"][1]["ratio"]["value"] == pytest.approx(3, rel=0.05)
    assert told(found, "speed", "batches-differ")[0]["batches"] == [256, 1024]
    equal = compared(tmp_path / "a.json", record(tmp_path / "c.json"))
    assert all(row["steps_per_second"] for row in equal["rows"])


def test_one_device_crowns_no_chip(tmp_path):
    a = record(tmp_path / "a.json", 1000)
    assert headline(compared(a, record(tmp_path / "b.json", 3680, seed=1))) == ["faster", "same-device"]
    # what the chip is called does not tell one machine's CPU from another's, of accelerators it does
    for kind, count in (("cpu", 1), ("TPU v2", 8)):
        record(tmp_path / "a.json", 1000, kind=kind, count=count)
        record(tmp_path / "b.json", 3000, kind="TPU v2")
        assert headline(compared(a, tmp_path / "b.json")) == ["faster"]
    moved = json.loads(record(tmp_path / "b.json", 3000).read_text())
    moved["machine"]["cpu"] = "Another CPU"
    (tmp_path / "b.json").write_text(json.dumps(moved))
    assert compared(record(tmp_path / "a.json"), tmp_path / "b.json")["rows"][1]["same_device"] is False


def test_the_result_comes_first_with_a_verdict_over_seeds(tmp_path):
    """Better by pairs of seeds, no difference shown, and one seed each, which shows nothing."""
    found = compared(study(tmp_path / "study"))
    first, *_ = found["sentences"]["headline"]
    assert (first["code"], first["a"], first["b"], first["n"]) == ("better-by-pairs", "lr=0.2", "lr=0.1", 3)
    assert first["value"] == pytest.approx(0.01) and 0 < first["low"] <= first["value"] <= first["high"]
    turned = compared(tmp_path / "study", baseline="lr=0.2")["sentences"]["headline"][0]
    assert (turned["a"], turned["b"]) == ("lr=0.2", "lr=0.1")
    assert (turned["value"], turned["low"]) == pytest.approx((first["value"], first["low"]))
    for name, values in (("x", (0.90, 0.95, 0.93)), ("y", (0.94, 0.91, 0.92))):
        for seed, value in enumerate(values):
            run(tmp_path / name / f"{seed}", (value,), seed=seed)
    noise = compared(tmp_path / "x", tmp_path / "y")
    assert headline(noise)[0] == "no-better-shown"
    alone = compared(run(tmp_path / "a"), run(tmp_path / "b", (0.9, 0.99)))
    assert headline(alone)[0] == "one-seed-each" and alone["rows"][1]["metric"]["difference"]["low"] is None


def seeds_of(folder, metric, value, better=None):
    """Runs of three seeds that end with about this value."""
    for seed in range(3):
        row = {"step": 100, metric: value + 0.001 * seed**2, "examples_per_second": 1e3}
        made = run(folder / f"{seed}", rows=json.dumps(row) + "\n", seed=seed)
        result = json.loads((made / "result.json").read_text())
        (made / "result.json").write_text(json.dumps(result | ({"better": better} if better else {})))
    return folder


def test_which_is_better_follows_what_is_typed_then_the_runs_then_the_name(tmp_path):
    """The row that ends lower is better, worse, or neither. Each verdict says which way it took."""

    def judged(metric, stored=({}, {}), **typed):
        sides = [
            seeds_of(tmp_path / n, metric, v, b) for n, v, b in zip("ab", (1.0, 0.9), stored, strict=True)
        ]
        found = compared(*sides, **typed)
        first = found["sentences"]["headline"][0]
        assert found["better"] == first["better"] and found["metric"] == metric
        assert f"{first['better']} is better" in first["text"] or first["better"] is None
        return first["code"], first["a"], result(by_label(found)["b"], found["better"]), *headline(found)[1:2]

    assert judged("eval/bpb")[:3] == ("better-by-pairs", "b", "better")
    assert judged("eval/odd", ({"odd": "higher"},) * 2)[:3] == ("better-by-pairs", "a", "worse")
    odd = judged("eval/odd", ({"odd": "higher"},) * 2, better={"odd": "lower"})
    assert odd == ("better-by-pairs", "b", "better", "direction-as-typed")
    for unknown in (({}, {}), ({"odd": "higher"}, {"odd": "lower"}), ({"odd": ["lower"]}, {"odd": 1})):
        assert judged("eval/odd", unknown)[2:] == ("lower", "direction-unknown")
    assert judged("eval/odd", unknown)[0] == "results-differ"
    with refused(RecipeError, "direction-unknown", metric="eval/odd"):
        compared(tmp_path / "a", tmp_path / "b", target="odd=0.95")
    found = compared(tmp_path / "a", tmp_path / "b", target="odd=0.95", better={"odd": "lower"})
    assert found["target"]["better"] == "lower" and found["target"]["words"] == "eval/odd ≤ 0.95"
    assert by_label(found)["b"]["target"]["reached"] == 3 and not by_label(found)["a"]["target"]["reached"]


def ended(folder, fingerprint, seed=0, **changes):
    """A run that states the fingerprint of what it trained."""
    made = run(folder, seed=seed, **changes)
    result = json.loads((made / "result.json").read_text())
    (made / "result.json").write_text(json.dumps({**result, "fingerprint": fingerprint}))
    return made


def test_runs_of_one_fingerprint_are_the_same_to_the_bit(tmp_path):
    a, b = (ended(tmp_path / name, "abc") for name in "ab")
    found = compared(a, b)
    (same,) = told(found, "headline", "same-runs")
    assert found["sentences"]["headline"][0] == same and (same["a"], same["b"]) == ("b", "a")
    assert found["rows"][1]["metric"]["difference"]["verdict"] == "same-to-the-bit"
    assert found["rows"][1]["repeats"][0]["fingerprint"] == "abc"
    assert result(found["rows"][1], "higher") == "the same to the bit"
    assert headline(compared(a, ended(tmp_path / "c", "abd")))[0] == "one-seed-each"
    assert headline(compared(a, ended(tmp_path / "d", "abc", accuracies=(0.9, 0.8))))[0] == "one-seed-each"
    assert headline(compared(run(tmp_path / "e"), run(tmp_path / "f")))[0] == "one-seed-each"
    for seed in range(2):
        for name in "xy":
            ended(tmp_path / name / f"{seed}", f"abc{seed}", seed)
    assert headline(compared(tmp_path / "x", tmp_path / "y"))[0] == "same-runs"
    ended(tmp_path / "y" / "1", "other", 1)
    assert headline(compared(tmp_path / "x", tmp_path / "y"))[0] != "same-runs"


def test_copies_of_a_run_are_one_sample(tmp_path):
    """A run that was copied or repeated says nothing of another seed, but something of the speed."""
    for copy in range(3):
        ended(tmp_path / "a" / f"{copy}", "abc", accuracies=(0.9,))
        ended(tmp_path / "b" / f"{copy}", "abd", accuracies=(0.8,), batch=64)
    found = compared(tmp_path / "a", tmp_path / "b")
    a, b = found["rows"]
    assert (a["metric"]["n"], b["metric"]["n"], a["metric"]["values"]) == (1, 1, [0.9])
    assert a["examples_per_second"]["n"] == a["wall_seconds"]["n"] == 3 and len(a["repeats"]) == 3
    assert headline(found)[0] == "one-seed-each"
    for seed in (1, 2):
        ended(tmp_path / "a" / f"seed-{seed}", f"abc{seed}", seed, accuracies=(0.9 + 0.01 * seed,))
        ended(tmp_path / "b" / f"seed-{seed}", f"abd{seed}", seed, accuracies=(0.8,), batch=64)
    final = compared(tmp_path / "a", tmp_path / "b")["rows"][1]["metric"]
    assert final["n"] == 3 and final["by_pairs"]
    ended(tmp_path / "c", "abc", accuracies=(0.9,))
    (
        ended(tmp_path / "d" / "0", "abc", accuracies=(0.9,)),
        ended(tmp_path / "d" / "1", "abc", accuracies=(0.9,)),
    )
    assert headline(compared(tmp_path / "c", tmp_path / "d"))[0] == "same-runs"


def test_two_models_are_comparable_with_size_speed_and_cost(tmp_path):
    a, b = run(tmp_path / "small"), run(tmp_path / "large", (0.9, 0.98), name="larger", batch=128)
    result = json.loads((b / "result.json").read_text())
    result["devices"] = {"kind": "NVIDIA H100 80GB HBM3", "count": 1, "parameters": 9_000_000}
    (b / "result.json").write_text(json.dumps(result))
    found = compared(a, b)
    assert found["recipes"] == ["mnist", "larger"]
    small, large = found["rows"]
    assert (small["parameters"], large["parameters"]) == (250_698, 9_000_000)
    assert small["cost"] is None and 0.01 < large["cost"]["usd"] < 10  # 300 s at dollars an hour
    assert {"recipe", "parameters", "batch (global)"} <= {d["setting"] for d in found["differing"]}


def test_what_was_set_differs_unless_the_recipe_says_so(tmp_path):
    """A size that only `--set` names is listed, but not the rate, nor the file of an address's password."""
    sources = [
        {"recipe": "gpt2-124m", "set": [f"lr={rate}", f"width={width}", "seed=1", *more]}
        for rate, width, *more in ((0.1, 64), (0.2, 128, "text=https://u:pw@host/a?sig=ABC"))
    ]
    a, b = (
        run(tmp_path / name, source=source, optimizer={"optimizer": "adam", "lr": source["set"][0]})
        for name, source in zip("ab", sources, strict=True)
    )
    found = compared(a, b, record(tmp_path / "c.json", set=["width=128"]))
    values = {d["setting"]: d["values"] for d in found["differing"]}
    assert {name for name in values if name.startswith("source")} == {"source.set.width", "source.set.text"}
    assert values["source.set.width"] == {"a": "64", "b": "128", "c": "128"}
    assert values["source.set.text"] == {"a": None, "b": "https://host/a", "c": None}


def test_the_best_evaluation_counts_where_a_run_kept_it(tmp_path):
    kept = run(tmp_path / "kept", (0.9, 0.97, 0.95))
    result = json.loads((kept / "result.json").read_text())
    result["best"] = {"metric": "eval/accuracy", "value": 0.97, "step": 200, "ended_early": True}
    (kept / "result.json").write_text(json.dumps(result))
    final = compared(kept, run(tmp_path / "last", (0.9, 0.97, 0.95)))
    one, other = (row["metric"] for row in final["rows"])
    assert (one["mean"], one["best_at"], other["mean"], other["best_at"]) == (0.97, [200], 0.95, [])


def test_a_run_that_diverged_counts_nowhere(tmp_path):
    runs = tmp_path / "runs"
    for seed in range(4):
        lost = {"accuracies": (0.0, 0.0, 0.0), "speed": 9e6, "diverged": WHEN} if seed == 3 else {}
        run(runs / f"seed-{seed}", seed=seed, **lost)
    found = compared(runs, run(tmp_path / "b"), target="0.95")
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
    (lost,) = told(found, "metric", "row-diverged")
    assert (lost["label"], lost["runs"], lost["of"]) == ("lost", 1, 1)


def test_a_study_says_what_diverged_before_any_row(tmp_path):
    made = study(tmp_path / "study")
    (made / "lr=0.1" / "seed-2" / "metrics.jsonl").write_text("")
    stored = json.loads((made / "study.json").read_text())
    stored["points"][0]["runs"][2] |= {"done": False, "diverged": WHEN}
    (made / "study.json").write_text(json.dumps(stored))
    low = compared(made)["rows"][0]
    assert (low["diverged"]["runs"], low["diverged"]["of"], low["metric"]["n"]) == (1, 3, 2)


def test_two_runs_are_both_shown_and_make_no_interval(tmp_path):
    found = compared(study(tmp_path / "study", seeds=(0, 1)), target="0.95")
    low = found["rows"][0]
    for figure in (low["wall_seconds"], low["target"]["wall"], low["examples_per_second"], low["metric"]):
        assert figure["n"] == 2 and figure["low"] is None and len(figure["values"]) == 2
    assert "2 runs are too few for an interval" in found["sentences"]["wall"][0]["text"]
    final = told(found, "metric", "final")[0]["runs"]
    assert (final["code"], final["low"], final["high"]) == ("final-of-two", 0.97, 0.971)


def test_pairs_are_those_of_seeds_that_both_finished(tmp_path):
    made = study(tmp_path / "study")
    (made / "lr=0.2" / "seed-2" / "result.json").unlink()
    final = compared(made)["rows"][1]["metric"]
    assert final["by_pairs"] and final["n"] == 2 and final["difference"]["value"] == pytest.approx(0.01)


def test_the_folds_of_a_cross_validation_are_pairs(tmp_path):
    """Their seeds are alike, so folders of the same names are. Folds differ by more than the two nets do."""
    for fold, value in enumerate((0.95, 0.90, 0.80, 0.70)):
        run(tmp_path / "small" / f"fold-{fold}", (value,))
        run(tmp_path / "large" / f"fold-{fold}", (value + 0.01 + 0.001 * fold,), name="larger")
    found = compared(tmp_path / "small", tmp_path / "large")
    assert headline(found)[0] == "better-by-pairs"
    final = found["rows"][1]["metric"]
    assert final["by_pairs"] and final["n"] == 4 and final["difference"]["value"] == pytest.approx(0.0115)


def test_few_seeds_and_many_comparisons_are_said(tmp_path):
    few = compared(study(tmp_path / "few", seeds=(0, 1)))
    assert [f["code"] for f in few["sentences"]["metric"]] == ["final", "final", "few-seeds"]
    for k, name in enumerate("abcd"):
        for seed in range(3):
            run(tmp_path / name / f"{seed}", (0.9 + 0.01 * k + 0.001 * seed * (k + 1),), seed=seed)
    (many,) = told(compared(*(tmp_path / name for name in "abcd")), "metric", "many-comparisons")
    assert many["n"] == 3 and many["chance"] == pytest.approx(1 - 0.95**3)


def test_another_metric_can_be_named(tmp_path):
    a, b = run(tmp_path / "a"), run(tmp_path / "b", seed=1)
    assert compared(a, b, metric="train/loss")["metric"] == "train/loss"
    with refused(RecipeError, "study-no-metric", metric="train/los", near="train/loss"):
        compared(a, b, metric="train/los")


def test_a_share_stays_between_0_and_1(tmp_path):
    for seed, accuracy in enumerate((1.0, 0.4, 1.0)):
        run(tmp_path / "runs" / f"{seed}", (accuracy,), seed=seed)
    metric = compared(tmp_path / "runs", run(tmp_path / "b"))["rows"][0]["metric"]
    assert 0 <= metric["low"] < 0.8 < metric["high"] == 1


def test_an_unfinished_run_says_what_is_missing(tmp_path):
    found = compared(run(tmp_path / "whole"), run(tmp_path / "part", done=False))
    part = by_label(found)["part"]
    assert part["wall_seconds"] is None and part["device"] == "device unknown"
    assert part["notes"] == [fact("run-unfinished", steps=300).json()]


def test_a_stopped_run_compares_by_what_it_has(tmp_path):
    devices = {"platform": "cpu", "kind": "cpu", "count": 2, "simulated": True, "exact": True}
    stopped = run(tmp_path / "part", done=False)
    (stopped / "processes.jsonl").write_text(json.dumps(started(devices=devices)) + "\n")
    both = by_label(compared(run(tmp_path / "whole"), stopped))
    assert both["part"]["device"] == "cpu (2 simulated devices)"
    assert both["part"]["examples_per_second"]["value"] == 1015


def test_what_is_no_number_is_left_out(tmp_path):
    rows = '{"step": 1, "train/loss": NaN, "examples_per_second": Infinity}\n'
    rows += (
        '{"step": 2, "examples_per_second": 5, "steps_per_second": 1, "wait_data_seconds": 1'
        + 400 * "0"
        + "}\nnot"
    )
    found = compared(run(tmp_path / "a", rows=rows), record(tmp_path / "b.json", losses=[2.0, None, 1.0]))
    assert by_label(found)["a"]["examples_per_second"]["value"] == 5
    assert by_label(found)["b"]["notes"][0] == fact("loss-not-finite-at", step=2).json()
    json.dumps(found, allow_nan=False)


def test_a_study_is_a_row_a_point(tmp_path):
    found = compared(study(tmp_path / "study"), target="0.96")
    low, high = found["rows"]
    assert (low["label"], high["label"]) == ("lr=0.1", "lr=0.2") and low["metric"]["n"] == 3
    assert high["metric"]["by_pairs"] and high["metric"]["difference"]["value"] == pytest.approx(0.01)
    assert low["wall_seconds"]["n"] == 3 and high["wall_ratio"]["verdict"] == NO_DIFFERENCE
    assert low["target"]["reached"] == 3 and low["target"]["wall"]["n"] == 3
    assert {d["setting"] for d in found["differing"]} == {"optimizer.lr"}


def test_a_baseline_that_became_several_rows(tmp_path):
    made = study(tmp_path / "study")
    for arguments, label in (([made], str(made)), ([f"S={made}"], "S")):
        with refused(RecipeError, "baseline-several", n=2):
            compared(*arguments, baseline=label)
    a = record(tmp_path / "a.json")
    assert compared(f"mine={a}", made, baseline=str(a))["baseline"] == "mine"


def test_the_wall_time_of_a_resumed_run_is_of_all_its_processes(tmp_path):
    made = run(tmp_path / "run")
    result = json.loads((made / "result.json").read_text())
    result["seconds"] = {"start": 2.0, "train": 90.0, "total": 95.0}  # the last process
    (made / "result.json").write_text(json.dumps(result))
    (row, _) = compared(made, run(tmp_path / "other"))["rows"]
    assert row["wall_seconds"]["value"] == pytest.approx(300.0) and "train" not in row["seconds"]


def test_wall_times_of_unknown_lengths_have_no_ratio(tmp_path):
    for name, ends in (("a", (1, 2)), ("b", (3, 4))):
        for seed, end in enumerate(ends):
            run(tmp_path / name / f"{seed}", (0.9,) * end, seed=seed, duration=name)
    (_, b) = compared(tmp_path / "a", tmp_path / "b")["rows"]
    assert b["steps"] is None and b["wall_seconds"] and b["wall_ratio"] is None


def test_a_target_asks_those_that_have_its_metric(tmp_path):
    """A run that never evaluated it does not know which way it is better."""
    one, other = seeds_of(tmp_path / "a", "eval/odd", 1.0, {"odd": "lower"}), run(tmp_path / "b")
    assert compared(one, other, target="odd=1.0")["target"]["better"] == "lower"


def test_a_run_that_is_not_over_has_no_final_metric(tmp_path):
    speeds = {"examples_per_second": 900.0, "steps_per_second": 3.5}
    rows = json.dumps({"step": 100, "train/loss": 1.0, **speeds, "seconds": 0.0}) + "\n"
    early = run(tmp_path / "early", done=False, rows=rows)
    found = compared(run(tmp_path / "whole"), early, target="0.95")
    row = found["rows"][1]
    assert row["metric"] is None and row["target"]["training"] is None


def test_no_escape_sequence_reaches_the_terminal(tmp_path, capsys):
    from chipwise.cli import main

    a = record(tmp_path / "a.json", framework="\x1b[31mred")
    assert main(["compare", str(a), str(record(tmp_path / "b.json"))]) == 0
    assert "\x1b" not in capsys.readouterr().out
