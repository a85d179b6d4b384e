import json

import pytest

from chipwise.cli import main


@pytest.fixture(scope="module")
def of_a_file(mine, tmp_path_factory):
    """A run of a recipe file, with settings and an average."""
    folder = tmp_path_factory.mktemp("file") / "run"
    settings = ["--set", "rate=0.2", "--set", "ema=0.5", "--devices", "1", "--eval-every", "end", "--quiet"]
    assert main(["train", f"{mine}:recipe", "--run", str(folder), *settings]) == 0
    return folder


@pytest.mark.slow
def test_the_batch_and_the_devices_do_not_change_the_result(chipwise, digits):
    trained = json.loads((digits / "result.json").read_text())["metrics"]
    found = []
    for options in (
        ["--batch", 1, "--devices", 1],
        ["--batch", 7, "--devices", 2],
        ["--batch", 359, "--devices", 1],
        ["--batch", 1000, "--devices", 1],
        ["--simulate", 8],
        ["--simulate", 8, "--batch", 7],
    ):
        said = chipwise("eval", digits, "--json", *options)
        assert said.code == 0, said.err
        shown = json.loads(said.out)
        assert (shown["steps"], shown["examples"], shown["run"]) == (30, 360, str(digits))
        found.append(shown["metrics"])
    assert {metrics["accuracy"] for metrics in found} == {trained["eval/accuracy"]}
    for metrics in found:
        assert metrics["loss"] == pytest.approx(trained["eval/loss"], rel=1e-5)


def test_the_recipe_of_a_file_is_found_again_with_its_settings(chipwise, of_a_file, mine):
    trained = json.loads((of_a_file / "result.json").read_text())["metrics"]
    said = chipwise("eval", of_a_file, "--recipe", f"{mine}:recipe", "--json", "--devices", 1)
    assert said.err == ""
    assert json.loads(said.out)["metrics"]["loss"] == pytest.approx(trained["eval/loss"], rel=1e-6)
    shown = chipwise("eval", of_a_file, "--recipe", f"{mine}:recipe", "--devices", 1).out
    assert shown.split()[0] == "eval/loss"


def test_a_recipe_file_is_not_executed_because_a_run_names_it(chipwise, of_a_file, tmp_path):
    """A run folder may come from anybody, with a recipe file in it."""
    evil = tmp_path / "run" / "evil.py"
    evil.parent.mkdir()
    evil.write_text(f"open({str(tmp_path / 'executed')!r}, 'w')")
    stored = json.loads((of_a_file / "recipe.json").read_text())
    for file in (str(evil), "evil.py", "digits.py"):
        stored["source"]["recipe"] = f"{file}:recipe"
        (evil.parent / "recipe.json").write_text(json.dumps(stored))
        assert chipwise("eval", evil.parent).refused(5, "run-recipe-in-file", recipe=f"{file}:recipe")
    assert not (tmp_path / "executed").exists()


def test_looking_changes_nothing(chipwise, of_a_file, mine):
    (of_a_file / "checkpoints" / "99.orbax-checkpoint-tmp").mkdir()  # somebody is just writing it
    before = sorted(of_a_file.rglob("*"))
    assert chipwise("eval", of_a_file, "--recipe", f"{mine}:recipe", "--devices", 1).code == 0
    assert sorted(of_a_file.rglob("*")) == before


def test_a_recipe_that_has_changed_since_is_said(chipwise, of_a_file, mine):
    text = mine.read_text()
    try:
        mine.write_text(text.replace("momentum=0.5", "momentum=0.6"))
        said = chipwise("eval", of_a_file, "--recipe", f"{mine}:recipe", "--devices", 1)
        assert said.code == 0
        assert "optimizer.momentum: 0.5 there, 0.6 now" in said.err
        wider = (
            "init=lambda key: ({**tasks.init(key)[0], 'more': tasks.init(key)[0]['v']}, tasks.init(key)[1]),"
        )
        mine.write_text(text.replace("init=tasks.init,", wider))
        said = chipwise("eval", of_a_file, "--recipe", f"{mine}:recipe", "--devices", 1)
    finally:
        mine.write_text(text)
    assert said.code == 5 and (" " in said.error.code or said.error.code == "checkpoint-of-other-arrays")


@pytest.mark.parametrize(
    "damage,error",
    [
        (None, "not-a-run"),
        ("{", "recipe-json-damaged"),
        ("[]", "recipe-json-damaged"),
        ("{}", "run-recipe-in-python"),
    ],
)
def test_a_folder_that_is_no_run_is_one_line(chipwise, tmp_path, damage, error):
    if damage is not None:
        (tmp_path / "recipe.json").write_text(damage)
    assert chipwise("eval", tmp_path).refused(5, error)


def test_a_run_without_a_checkpoint_is_one_line(chipwise, of_a_file, mine, tmp_path):
    (tmp_path / "recipe.json").write_bytes((of_a_file / "recipe.json").read_bytes())
    assert chipwise("eval", tmp_path, "--recipe", f"{mine}:recipe").refused(5, "run-without-checkpoints")
    (tmp_path / "checkpoints").mkdir()
    assert chipwise("eval", tmp_path, "--recipe", f"{mine}:recipe").refused(5, "run-without-checkpoints")


@pytest.mark.slow
def test_the_best_checkpoint_and_a_third_split(chipwise, mine, tmp_path):
    """`--best` of every command that uses a trained model, and `--eval-data` of any split."""
    import numpy as np

    import chipwise as cw
    import tasks

    run, third = tmp_path / "run", tmp_path / "third.npz"
    data = tasks.data(31, 5)
    np.savez(third, x=data.columns["x"], label=data.columns["label"])
    options = ["--devices", "1", "--eval-every", "4st", "--set", "rate=30.0"]
    keep = ["--keep-best", "eval/loss", "--patience", "4st"]
    said = chipwise("train", f"{mine}:recipe", "--run", run, *options, *keep, "--eval-data", third, "--lines")
    assert said.code == 0, said.err
    kept = json.loads((run / "result.json").read_text())["best"]
    stored = json.loads((run / "recipe.json").read_text())
    assert stored["task"]["eval"]["examples"] == 31 and stored["source"]["eval_data"] == str(third)
    assert kept["ended_early"] and kept["step"] == 4
    same = ["--recipe", f"{mine}:recipe", "--devices", 1, "--json"]
    shown = json.loads(chipwise("eval", run, "--best", *same).out)
    assert (shown["steps"], shown["examples"], shown["metrics"]["loss"]) == (4, 31, kept["value"])
    newest = json.loads(chipwise("eval", run, *same).out)
    assert newest["steps"] == 8 and newest["metrics"]["loss"] > kept["value"]
    other = tmp_path / "other.npz"
    data = tasks.data(17, 6)
    np.savez(other, x=data.columns["x"], label=data.columns["label"])
    said = chipwise("eval", run, "--best", "--eval-data", other, *same)
    shown = json.loads(said.out)
    assert (shown["examples"], said.err) == (17, "")
    best = cw.result(run, cw.load(f"{mine}:recipe", ["rate=30.0"])).best
    assert cw.evaluate(best, data, on=cw.On(devices=1)) == shown["metrics"]
