"""`chipwise bench`: what it prints and writes, and how it fails."""

import csv
import dataclasses
import importlib
import json
from pathlib import Path

import jax
import pytest

import chipwise as cw
from chipwise.base.facts import fact
from chipwise.cli import main, options, speed
from chipwise.machine.record import read

ROOT = Path(__file__).parents[2]
QUICK = ["--steps", "10", "--warmup", "3", "--devices", "1"]


def test_it_prints_speed_beside_batch_and_replicas_and_saves_the_record(tmp_path, monkeypatch, chipwise):
    monkeypatch.chdir(tmp_path)
    said = chipwise("bench", "digits", *QUICK, "--set", "batch=48")
    out = " ".join(said.out.split())
    assert said.code == 0
    (file,) = tmp_path.glob("bench-digits-*.json")
    record = read(file)
    assert file.name == f"bench-digits-{record.machine.hash}.json" and f"written: {file.name}" in out
    assert out.count("at batch 48, 8 replicas, f32") == 2 and "examples/s" in out and "steps/s" in out
    assert str(fact("bench-intervals", intervals=10, steps=1)) in out
    assert "losses" in out and "(steps 1 to 3)" in out and "share of peak unknown" in out
    measured, seconds = record.measured, record.measured["seconds"]
    assert str(fact("bench-clock", **{**measured, **seconds, "warmup_steps": 3})) in out
    assert record.measured["set"] == ["batch=48"] and record.measured["batch"] == 48


def test_a_cpu_has_no_planned_speed_and_says_so(tmp_path, chipwise):
    file = tmp_path / "r.json"
    said = chipwise("bench", "digits", *QUICK, "--out", str(file))
    assert str(fact("share-of-a-cpu")) in " ".join(said.out.split())
    measured = read(file).measured
    assert measured["planned"]["problem"]["code"] == "share-of-a-cpu" and measured["found"] == []
    said = chipwise("bench", "digits", *QUICK, "--out", str(file), "--no-plan")
    assert "planned" not in read(file).measured and "of the plan" not in said.out


def test_a_slow_gpu_shows_its_share_and_what_was_found(tmp_path, monkeypatch, chipwise):
    from chipwise.base.prediction import Range
    from chipwise.planner import measured_share

    slow = measured_share.MeasuredShare("h100", Range(0.01, 0.008, 0.012), 0.02, "launch")
    monkeypatch.setattr(measured_share, "measured_share", lambda *_, **__: slow)
    said = chipwise("bench", "digits", *QUICK, "--json", "--out", str(tmp_path / "r.json"))
    measured = json.loads(said.out)["measured"]
    assert measured["planned"]["share"]["value"] == 0.5 and measured["planned"]["slow"] is True
    assert [one["code"] for one in measured["found"]] == ["share-launches"]
    said = chipwise("bench", "digits", *QUICK, "--out", str(tmp_path / "r.json"))
    out = " ".join(said.out.split())
    assert "50% of the speed that is planned for h100, 40% to 60%" in out and "found" in out


def test_a_gpu_that_is_as_fast_as_planned_has_no_findings(tmp_path, monkeypatch, chipwise):
    from chipwise.base.prediction import Range
    from chipwise.planner import measured_share

    planned = measured_share.MeasuredShare("h100", Range(0.01, 0.008, 0.012), 0.01, "launch")
    monkeypatch.setattr(measured_share, "measured_share", lambda *_, **__: planned)
    said = chipwise("bench", "digits", *QUICK, "--json", "--out", str(tmp_path / "r.json"))
    measured = json.loads(said.out)["measured"]
    assert measured["planned"]["fact"]["code"] == "share-as-planned" and measured["found"] == []


def test_a_row_to_send_is_one_of_the_published_form(tmp_path, monkeypatch, chipwise):
    from chipwise.study import bench

    measure = bench.measure_train

    def on_two_gpus(*given, **more):
        made = measure(*given, **more)
        devices = {**made.measured["devices"], "platform": "gpu", "kind": "NVIDIA H100 80GB HBM3", "count": 2}
        return dataclasses.replace(made, measured={**made.measured, "devices": devices, "chip": "h100"})

    monkeypatch.setattr(bench, "measure_train", on_two_gpus)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    file = tmp_path / "mine.json"
    settings = ["--set", "batch=48", "--set", "lr=0.002"]
    said = chipwise("bench", "digits", *QUICK, *settings, "--out", str(file), "--no-plan", "--row")
    assert said.code == 0 and str(fact("written", path=tmp_path / "mine.csv")) in said.err
    with open(tmp_path / "mine.csv", newline="") as text:
        (cells,) = csv.DictReader(text)
    monkeypatch.syspath_prepend(ROOT)
    published = importlib.import_module("benchmarks.plan_accuracy.rows")
    assert list(cells) == published.PUBLISHED.read_text().splitlines()[0].split(",")
    assert cells["dataset_input_shape"] == "real: image uint8[8, 8], label int32[]"
    row = published._row({**cells, "row": "999"})
    speed = read(file).figures["examples_per_second"].median
    assert row.measured == pytest.approx(speed, rel=1e-5) and row.seconds == pytest.approx(48 / row.measured)
    assert (row.on, row.n_chips, row.batch, row.use, row.clock) == ("h100:2", 2, 48, "held-out", "steps")
    words = "digits --set batch=48 --set replicas=8 --set precision=f32 --set lr=0.002 --on h100:2"
    assert row.command == f"chipwise plan {words}" and row.source == "mine.json"


@pytest.mark.parametrize(
    "given, out, code, error",
    [
        ([], "r.json", 4, "bench-no-row"),
        ([], "mine.csv", 3, "bench-row-out"),
        ([], "old.json", 3, "bench-row-out"),
        (["--no-exact"], "r.json", 2, "bench-row-exact"),
        (["--set", "lr=a b"], "r.json", 2, "bench-row-setting"),
        (["--set", "lr=a=b"], "r.json", 2, "bench-row-setting"),
    ],
)
def test_a_row_that_cannot_be_is_refused_before_the_measurement(tmp_path, chipwise, given, out, code, error):
    (tmp_path / "old.csv").write_text("whole")
    said = chipwise("bench", "digits", *QUICK, *given, "--out", str(tmp_path / out), "--no-plan", "--row")
    assert (said.code, said.error.code) == (code, error)
    assert [one.name for one in tmp_path.iterdir()] == ["old.csv"]
    assert (tmp_path / "old.csv").read_text() == "whole"


def test_a_second_row_leaves_the_first(tmp_path, monkeypatch):
    from chipwise.planner import measured_share

    for number in "12":
        monkeypatch.setattr(measured_share, "accuracy_row", lambda *_, n=number: {"row": n})
        speed._write_row(options.Given("digits", set_=None), cw.load("digits"), None, tmp_path / "bench.json")
    assert {one.name: one.read_text() for one in tmp_path.iterdir()} == {
        "bench.csv": "row\n1\n",
        "bench-2.csv": "row\n2\n",
    }


def test_ctrl_c_while_it_plans_keeps_the_record(tmp_path, monkeypatch, chipwise):
    from chipwise.planner import measured_share

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(measured_share, "measured_share", interrupted)
    file = tmp_path / "r.json"
    assert chipwise("bench", "digits", *QUICK, "--out", str(file)).code == 130
    assert read(file).measured["batch"] and "planned" not in read(file).measured


def test_ctrl_c_leaves_no_record(tmp_path, monkeypatch, chipwise):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("chipwise.study.bench.measure_train", interrupted)
    assert chipwise("bench", "digits").code == 130
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_made_up_data_needs_none(tmp_path, capsys):
    file = tmp_path / "sub" / "r.json"
    assert main(["bench", "digits", *QUICK, "--synthetic", "--json", "--out", str(file)]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["name"] == "digits" and told["measured"]["data"] == "synthetic"
    assert told["schema"] == "chipwise.record/1" and told["written"] == str(file)
    assert read(file).figures["steps_per_second"].runs == tuple(told["figures"]["steps_per_second"]["runs"])
    assert told["measured"]["seconds"]["start"] > 0


@pytest.mark.parametrize(
    "arguments, code, error",
    [
        (["digist"], 2, "recipe-unknown"),
        (["mnist", "--data", "nowhere"], 3, "data-absent"),
        (["digits", "--data", "nowhere"], 2, None),
        (["digits", "--synthetic", "--data", "nowhere"], 2, None),
        (["digits", "--devices", "3", "--set", "blocks=2"], 4, "devices-above-blocks"),
        (["digits", "--out", "file/x.json"], 3, "bench-out"),
        (["digits", "--out", "."], 3, "bench-out"),
        (["digits", *QUICK, "--set", "lr=1e30"], 6, None),
    ],
)
def test_what_cannot_be_is_one_line_and_writes_nothing(
    tmp_path, monkeypatch, chipwise, arguments, code, error
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    said = chipwise("bench", *arguments, "--json")
    assert (said.code, said.out) == (code, "") and not list(tmp_path.glob("*.json"))
    assert error in (None, said.error.code) or " " in said.error.code
    told = [line for line in said.err.splitlines() if not line.startswith("warning: ")]
    assert told == [f"error: {said.error}"]
