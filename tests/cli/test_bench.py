"""`chipwise bench`: what it prints and writes, and how it fails."""

import json

import pytest

from chipwise.cli import main
from chipwise.measure.record import read

QUICK = ["--steps", "10", "--warmup", "3", "--devices", "1"]


def test_it_prints_speed_beside_batch_and_replicas_and_saves_the_record(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["bench", "digits", *QUICK, "--set", "batch=48", "--profile", "trace"]) == 0
    out = capsys.readouterr().out
    (file,) = tmp_path.glob("bench-digits-*.json")
    record = read(file, "train")
    assert file.name == f"bench-digits-{record.machine.hash}.json" and f"written: {file.name}" in out
    assert out.count("at batch 48, 8 replicas, f32") == 2 and "examples/s" in out and "steps/s" in out
    assert "median and quartiles of 10 intervals of 1 step" in out and "no evaluation" in out
    assert "losses" in out and "(steps 1 to 3)" in out and "share of peak  unknown" in out
    assert "warm-up" in out and "of calibration" in out
    assert "to browse it: tensorboard --logdir trace" in out and "ms a step" in out
    assert record.measured["set"] == ["batch=48"] and record.measured["batch"] == 48
    assert record.measured["profile"]["operations"][0]["name"][:40] in out


def test_ctrl_c_says_that_there_is_no_record(tmp_path, monkeypatch, capsys):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("chipwise.measure.bench.measure_train", interrupted)
    assert main(["bench", "digits"]) == 130
    assert capsys.readouterr().err == "error: interrupted: no record is written.\n"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("words", [["--data", "synthetic"], ["--synthetic"]])
def test_made_up_data_needs_none(tmp_path, capsys, words):
    file = tmp_path / "sub" / "r.json"
    assert main(["bench", "digits", *QUICK, *words, "--json", "--out", str(file)]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["name"] == "digits" and told["measured"]["data"] == "synthetic"
    assert told["schema"] == "chipwise.record/1" and told["written"] == str(file)
    assert read(file, "train").figures["steps_per_second"].runs == tuple(
        told["figures"]["steps_per_second"]["runs"]
    )
    assert told["measured"]["seconds"]["start"] > 0


@pytest.mark.parametrize(
    "arguments, code, words",
    [
        (["digist"], 2, "Did you mean 'digits'?"),
        (["mnist", "--data", "nowhere"], 3, "data=nowhere does not exist"),
        (["digits", "--data", "nowhere"], 2, "has no parameter 'data'"),
        (["digits", "--synthetic", "--data", "nowhere"], 2, "leave out --data nowhere"),
        (["digits", "--devices", "3"], 4, "devices"),
        (["digits", "--out", "file/x.json"], 3, "Give --out FILE.json."),
        (["digits", "--out", "."], 3, "it is a folder"),
        (["digits", "--profile", "file"], 3, "Give --profile DIR."),
        (["digits", *QUICK, "--set", "lr=1e30"], 6, "no record is written"),
    ],
)
def test_what_cannot_be_is_one_line_and_writes_nothing(tmp_path, monkeypatch, capsys, arguments, code, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    assert main(["bench", *arguments, "--json"]) == code
    said = capsys.readouterr()
    errors = [line for line in said.err.splitlines() if not line.startswith("warning: ")]
    assert len(errors) == 1 and errors[0].startswith("error: ") and words in errors[0]
    assert said.out == "" and not list(tmp_path.glob("*.json"))
