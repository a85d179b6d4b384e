"""`chipwise launch`: what it writes, what it prints, that it starts nothing unless told. Plans are given."""

import json
import re
from dataclasses import replace

import pytest

from chipwise.base.facts import fact
from planner import documents


def planned(target: str, step: float, *rates: float, **rest):
    priced = tuple((rate, False, target, "us") for rate in rates)
    return documents.plan(target, target, held=None, step=step, peak=1e15, rates=priced, devices=1, **rest)


@pytest.fixture
def plans(monkeypatch):
    """What `plan` answers, by target."""
    known = {"t4": planned("t4", 4.0, 0.5), "a100": planned("a100", 1.0, 3.0), "l4": planned("l4", 3.0, 0.7)}
    other = planned("v100", 1.0, problem=fact("may-fail"))
    missing = fact("compiler-missing", chips="GPUs", install="pip install 'chipwise[plan-gpu]'")
    known["h100"] = planned("h100", 1.0, problem=missing)

    def plan(recipe, targets, **options):
        return [known.get(target, other) for target in targets]

    monkeypatch.setattr("chipwise.planner.ask.plan", plan)
    return known


@pytest.mark.slow
def test_writes_and_starts_nothing(chipwise, plans, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", "")
    said = chipwise("launch", "digits", "--on", "a100", "--to", "slurm", "--out", tmp_path, "--json")
    assert said.code == 0, said.err
    told = json.loads(said.out)
    assert told["start"] == ["sbatch", "chipwise-digits.sbatch"] and told["target"] == "a100"
    assert [one["code"] for one in told["about"]] == ["launch-job", "launch-planned", "launch-price-own"]
    text = (tmp_path / "chipwise-digits.sbatch").read_text()
    assert "#SBATCH --gpus-per-node=1" in text and "#SBATCH --time=3:00:00" in text  # 1.5 x 1.46 hours
    assert all(f"# {one['text']}\n" in text for one in told["about"])


def test_a_job_sends_its_rows_and_has_what_sends_them(chipwise, plans, tmp_path):
    options = ["--track", "wandb:mine", "--track", "trackio:a b", "--sbatch=--exclusive"]
    said = chipwise("launch", "digits", "--on", "a100", "--to", "slurm", *options, "--out", tmp_path)
    assert said.code == 0, said.err
    text = (tmp_path / "chipwise-digits.sbatch").read_text()
    assert "train digits --track wandb:mine --track 'trackio:a b' --run" in text
    assert "#SBATCH --exclusive\n" in text
    wanted = (tmp_path / "chipwise-digits.env.sh").read_text()
    assert re.search(r"\bwandb\b", wanted) and re.search(r"\btrackio\b", wanted)


@pytest.mark.parametrize(
    "to, on, code",
    [
        ("skypilot", "a100", "launch-costs"),
        ("dstack", "a100", "launch-costs"),
        ("docker", "a100", "launch-price-own"),
        pytest.param("kaggle", "t4", "launch-price-free", marks=pytest.mark.slow),
        pytest.param("colab", "t4", "launch-price-free", marks=pytest.mark.slow),
        pytest.param("colab", "a100", "launch-price-units", marks=pytest.mark.slow),
    ],
)
def test_the_price_is_the_one_of_the_place(chipwise, plans, tmp_path, to, on, code):
    plans["t4:2"] = planned("t4:2", 2.0, 1.0)
    bucket = ["--bucket", "s3://my-runs"] if to in ("skypilot", "dstack") else []
    said = chipwise("launch", "digits", "--on", on, "--to", to, *bucket, "--out", tmp_path, "--json")
    told = json.loads(said.out)
    said = [one["code"] for one in told["about"]]
    assert said[2] == code and said[3:] == (
        ["launch-needs-dstack", "launch-needs-aws"] if to == "dstack" else []
    )
    assert told["target"] == ("t4:2" if to == "kaggle" else on)


@pytest.mark.parametrize("cloud, usd", [("runpod", 2.0), ("vast", 1.0), (None, 3.0)])
def test_the_price_is_the_one_of_the_cloud(chipwise, plans, tmp_path, cloud, usd):
    each = {"runpod": 2.0, "vast (marketplace)": 1.0, "gcp": 3.0}
    plans["l4"] = planned("l4", 1.0, 1.0)
    (cost,) = plans["l4"].costs
    costs = [replace(cost, cloud=name, usd_per_hour=hour) for name, hour in each.items()]
    plans["l4"] = replace(plans["l4"], costs=tuple(costs))
    words = ["--to", "skypilot", "--on", "l4", "--bucket", "s3://my-runs", "--out", tmp_path, "--json"]
    told = json.loads(chipwise("launch", "digits", *words, *(["--cloud", cloud] if cloud else [])).out)
    assert told["about"][2]["hour"] == usd
    assert told["start"][-1] == "chipwise-digits.yaml" and ("--secret" in told["start"]) is bool(cloud)


def test_a_recipe_travels_with_what_it_imports_and_this_chipwise(chipwise, plans, tmp_path):
    (tmp_path / "mine.py").write_text("from chipwise.recipes.digits import recipe\n")
    file = tmp_path / "own.py"
    file.write_text("import sklearn\nfrom mine import recipe\n")
    words = ["--on", "a100", "--to", "docker", "--also", "some-package==1", "--out", tmp_path / "out"]
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "a-link.py").symlink_to(file)
    assert chipwise("launch", f"{tmp_path}/other/a-link.py:recipe", *words).code == 0
    assert "train /app/own.py:recipe " in (tmp_path / "out" / "chipwise-a-link.docker.sh").read_text()
    assert chipwise("launch", f"{file}:recipe", *words).code == 0
    carried = {path.name for path in (tmp_path / "out" / "chipwise-own-files").iterdir()}
    assert {"own.py", "mine.py"} < carried
    (wheel,) = carried - {"own.py", "mine.py"}
    text = (tmp_path / "out" / "chipwise-own.Dockerfile").read_text()
    assert f"install --no-cache-dir /app/{wheel} " in text
    assert " scikit-learn==" in text and " some-package==1\n" in text


def test_a_wheel_of_ones_own_goes_along(chipwise, plans, tmp_path):
    wheel = tmp_path / "chipwise-9-py3-none-any.whl"
    wheel.write_bytes(b"a wheel")
    words = ["--on", "a100", "--to", "docker", "--package", wheel, "--out", tmp_path / "out"]
    assert chipwise("launch", "digits", *words).code == 0
    assert (tmp_path / "out" / "chipwise-digits-files" / wheel.name).read_bytes() == b"a wheel"
    assert f" /app/{wheel.name} " in (tmp_path / "out" / "chipwise-digits.Dockerfile").read_text()
    given = [
        "--on",
        "a100",
        "--to",
        "docker",
        "--package",
        "git+https://example.org/x",
        "--out",
        tmp_path / "git",
    ]
    assert chipwise("launch", "digits", *given).code == 0
    assert sorted(path.name for path in (tmp_path / "git").iterdir()) == [
        "chipwise-digits.Dockerfile",
        "chipwise-digits.docker.sh",
    ]


@pytest.mark.parametrize(
    "arguments, code",
    [
        (["--to", "skypilot", "--on", "t4"], "launch-without-bucket"),
        (["--to", "slurm", "--on", "v5e-8"], "launch-not-offered"),
        (["--to", "docker", "--on", "cpu"], "target-cpu"),
    ],
)
def test_what_no_plan_would_change_is_refused_before_it(chipwise, tmp_path, monkeypatch, arguments, code):
    monkeypatch.setattr("chipwise.planner.ask.plan", None)
    said = chipwise("launch", "digits", *arguments, "--out", tmp_path / "out")
    assert said.refused(2 if "without" in code else 4, code)


@pytest.mark.parametrize(
    "arguments, code, error",
    [
        (["--to", "slurms", "--on", "a100"], 2, "launch-place-unknown"),
        (["--to", "slurm", "--on", "v100"], 4, "launch-cannot-run"),
        (["--to", "slurm", "--on", "h100"], 4, "launch-not-planned"),
        (["--to", "skypilot", "--on", "a100"], 2, "launch-without-bucket"),
        (["--to", "skypilot", "--on", "a100", "--bucket", "my-runs"], 2, "launch-bucket"),
        (["--to", "colab", "--on", "a100", "--spot"], 2, "launch-no-spot"),
        (["--to", "colab", "--on", "a100", "--bucket", "gs://my-runs"], 2, "launch-option-unused"),
        (["--to", "docker", "--on", "a100", "--sbatch", "--exclusive"], 2, "launch-option-unused"),
        (["--to", "slurm", "--on", "a100", "--track", "csv:mine"], 2, "track-destination"),
        (["--to", "skypilot", "--on", "a100", "--zone", "us-east1-b"], 2, "launch-option-unused"),
        (["--to", "docker", "--on", "a100", "--package", __file__], 2, "launch-package-local"),
        (["--to", "docker", "--on", "a100", "--cloud", "vast"], 2, "launch-option-unused"),
        (["--to", "dstack", "--on", "a100", "--cloud", "lamda"], 2, "launch-cloud-unknown"),
        (["--to", "skypilot", "--on", "rtx-4090", "--cloud", "vast"], 4, "launch-not-offered-at"),
    ],
)
def test_one_line_and_nothing_written(chipwise, plans, tmp_path, arguments, code, error):
    out = tmp_path / "out"
    assert chipwise("launch", "digits", *arguments, "--out", out).refused(code, error)
    assert not out.exists()
