import json
import os
import signal

import pytest

from chipwise.base.facts import fact
from chipwise.run.folder.run_folder import RunFolder

pytestmark = pytest.mark.as_users_compile

FAST = ("--eval-every", "end", "--devices", "1", "--quiet", "--set", "duration=5st")


@pytest.fixture(scope="module")
def swept(mine, tmp_path_factory):
    """What a sweep says as JSON, and its folder."""
    import contextlib
    import io

    from chipwise.cli import main

    folder, out = tmp_path_factory.mktemp("swept") / "s", io.StringIO()
    command = [
        "sweep",
        f"{mine}:recipe",
        "--set",
        "rate=0.1,0.3",
        "--seeds",
        "2",
        "--run",
        str(folder),
        "--json",
    ]
    with contextlib.redirect_stdout(out):
        assert main([*command, *FAST]) == 0
    return json.loads(out.getvalue()), folder


def test_json_is_the_study_and_its_table(swept):
    said, folder = swept
    assert {
        k: v for k, v in said.items() if k not in ("run", "metric", "better", "baseline", "rows")
    } == json.loads((folder / "study.json").read_text())
    assert (said["run"], said["metric"], said["seeds"]) == (str(folder), "eval/loss", [0, 1])
    assert said["better"] == "lower"
    assert said["settings"] == {"rate": ["0.1", "0.3"], "duration": ["5st"]}
    assert [row["label"] for row in said["rows"]] == ["rate=0.1", "rate=0.3"] and said[
        "baseline"
    ] == "rate=0.1"
    assert said["rows"][0]["metric"]["difference"] is None
    assert said["rows"][1]["metric"]["n"] == 2 and said["rows"][1]["metric"]["by_pairs"]
    assert said["source"]["recipe"].endswith("my_task.py:recipe")


@pytest.mark.slow
def test_the_folders_are_ordinary_runs(swept, chipwise, mine):
    said, folder = swept
    run = said["points"][1]["runs"][1]
    assert run["run"] == "rate=0.3,duration=5st/seed-1"
    evaluated = json.loads(chipwise("eval", folder / run["run"], "--recipe", f"{mine}:recipe", "--json").out)
    assert evaluated["metrics"]["loss"] == pytest.approx(run["metrics"]["eval/loss"])
    sets = ("--set", "rate=0.3", "--set", "seed=1")
    resumed = chipwise("train", f"{mine}:recipe", "--run", folder / run["run"], *sets, *FAST, "--json")
    assert json.loads(resumed.out)["fingerprint"] == run["fingerprint"]


def test_people_see_a_table_its_warnings_and_the_folder(swept, chipwise, mine):
    said = chipwise(
        "sweep", f"{mine}:recipe", "--set", "rate=0.1,0.3", "--seeds", 2, "--run", swept[1],
        "--metric", "train/loss", *FAST,
    )  # fmt: skip
    assert said.code == 0
    assert "train/loss" in said.out and "by pairs of runs" in " ".join(said.out.split())
    assert str(fact("few-seeds", enough=3)) in " ".join(said.out.split())
    assert f"run  {swept[1]}" in said.out
    wrong = chipwise("sweep", f"{mine}:recipe", "--set", "rate=0.1", "--run", swept[1], "--seeds", 1,
                     "--metric", "train/los", *FAST)  # fmt: skip
    assert wrong.code == 2
    assert "Did you mean 'loss'" in wrong.err


def test_a_metric_that_may_be_better_either_way_is_refused_before_anything_is_trained(
    chipwise, mine, tmp_path
):
    odd = """
import my_task

def loss(params, state, batch, key, train):
    sums, state = my_task.tasks.plain_loss(params, state, batch, key, train)
    return {**sums, "odd": sums["loss"]}, state

def recipe():
    return dataclasses.replace(old := my_task.recipe(), task=dataclasses.replace(old.task, loss=loss))
"""
    (mine.parent / "odd.py").write_text("import dataclasses" + odd)
    command = ["sweep", f"{mine.parent / 'odd.py'}:recipe", "--seeds", 1, "--run", tmp_path / "s", *FAST]
    assert chipwise(*command, "--metric", "eval/odd").refused(2, "direction-unknown", metric="eval/odd")
    assert chipwise(*command, "--metric", "eval/even").refused(2, "metric-unknown")
    assert not (tmp_path / "s").exists()


@pytest.mark.slow
def test_named_seeds_are_one_row_and_a_folder_each(chipwise, mine, tmp_path):
    setting, folder = ("--set", "duration=5st"), tmp_path / "s"
    said = chipwise("sweep", f"{mine}:recipe", "--seeds", "3,1", "--run", folder, *FAST[:-3], *setting)
    assert said.code == 0, said.err
    assert sorted(p.name for p in folder.iterdir()) == ["duration=5st", "lock", "study.json"]
    assert sorted(p.name for p in (folder / "duration=5st").iterdir()) == ["seed-1", "seed-3"]
    assert "eval/loss" in said.out
    stored = json.loads((folder / "duration=5st" / "seed-3" / "recipe.json").read_text())
    assert (stored["seed"], stored["duration"]) == (3, "5st")
    assert stored["source"]["set"] == ["duration=5st", "seed=3"]


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["sweep", "digits", "--seeds", "many"], "seeds-unreadable"),
        (["sweep", "digits", "--set", "lr=0.1,"], "value-missing"),
        (["sweep", "digits", "--set", "lr=0.1,high"], None),
        (["sweep", "digits", "--set", "seed=1,2"], "seed-is-no-setting"),
    ],
)
def test_what_makes_no_sense_is_said_on_one_line_and_makes_no_folder(
    chipwise, tmp_path, monkeypatch, arguments, error
):
    monkeypatch.chdir(tmp_path)
    answer = chipwise(*arguments)
    assert answer.refused(2, error or answer.error.code)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_stop_names_the_folder_that_goes_on(chipwise, mine, tmp_path, monkeypatch):
    log = RunFolder.log

    def log_and_stop(self, row):
        log(self, row)
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(RunFolder, "log", log_and_stop)
    command = ("sweep", f"{mine}:recipe", "--set", "rate=0.1,0.3", "--seeds", 1, "--no-exact", *FAST)
    said = chipwise(*command, "--log-every", "1st")
    assert said.code == 75
    assert said.error.code == "study-stopped"
    folder = said.error.facts["folder"]
    assert list((tmp_path / "runs").iterdir()) == [folder]
    monkeypatch.setattr(RunFolder, "log", log)
    again = chipwise(*command, "--log-every", "1st", "--run", folder)
    assert again.code == 0, again.err
    assert all(p["runs"][0]["done"] for p in json.loads((folder / "study.json").read_text())["points"])


def test_when_every_run_diverged_the_exit_code_says_so(chipwise, tmp_path):
    file = tmp_path / "wild.py"
    file.write_text(
        "import chipwise as cw, tasks\n"
        "recipe = tasks.recipe(task=tasks.task(loss=tasks.plain_loss, augment=None), duration='4st', "
        "optimizer=cw.sgd(lr=1.0))\n"
    )
    said = chipwise(
        "sweep", f"{file}:recipe", "--set", "lr=1e38", "--seeds", 1, "--run", tmp_path / "s", *FAST[:-2]
    )
    assert said.code == 6 and said.error.code == "every-run-diverged"
    assert "1 of 1 diverged" in said.out


def test_a_metric_cannot_be_better_both_ways(chipwise, mine, tmp_path):
    command = ["sweep", f"{mine}:recipe", "--seeds", 1, "--run", tmp_path / "s", *FAST]
    both = ["--lower", "odd", "--higher", "eval/odd"]
    assert chipwise(*command, *both).refused(2, "better-twice", metrics=["odd"])
