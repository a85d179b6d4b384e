import json
import shlex

import pytest

import chipwise as cw
from chipwise.study.critical_batch import critical_batch


@pytest.mark.parametrize("more", [(), ("--lr", "0.2"), ("--duration", "24st")])
def test_the_table_ends_with_the_line_that_trains_the_new_recipe(chipwise, mine, more):
    said = chipwise("transfer", f"{mine}:recipe", "--batch", 8, "--set", "rate=0.3", *more)
    assert said.code == 0 and said.err == ""
    assert "Goyal" in said.out and "Unaffected:" in said.out
    lr = next(line.split() for line in said.out.splitlines() if line.startswith("lr "))
    assert lr[1:3] == ["0.3", more[1] if "--lr" in more else "0.1"]
    words = shlex.split(said.out.splitlines()[-1].removeprefix("Next: "))
    assert words[:5] == ["chipwise", "train", f"{mine}:recipe", "--set", "rate=0.3"]
    again = cw.load(words[2], [word for word in words[3:] if word != "--set"])
    settings = {"lr": 0.2} if "--lr" in more else {"duration": "24st"} if more else {}
    old = cw.load(f"{mine}:recipe", ["rate=0.3"])
    assert again.describe() == cw.transfer(old, batch=8, **settings).recipe.describe()


def test_a_length_within_a_schedule_ends_with_a_line_of_python(chipwise, tmp_path):
    file = tmp_path / "steps.py"
    schedule = 'optimizer=cw.sgd(lr=cw.schedules.warmup(0.1, "4st"))'
    file.write_text(f"import chipwise as cw, tasks\nrecipe = tasks.recipe({schedule}, duration='12st')\n")
    said = chipwise("transfer", f"{file}:recipe", "--batch", 8)
    assert said.code == 0, said.err
    line = said.out.splitlines()[-1]
    code = line[line.index("cw.fit(") :].removeprefix("cw.fit(").removesuffix(")")
    assert eval(code).describe() == cw.transfer(cw.load(f"{file}:recipe"), batch=8).recipe.describe()


def test_the_line_of_python_has_the_data(chipwise, tmp_path):
    file = tmp_path / "steps.py"
    schedule = 'optimizer=cw.sgd(lr=cw.schedules.warmup(0.1, "4st"))'
    made = f"tasks.recipe({schedule}, duration='12st')"
    file.write_text(f"import chipwise as cw, tasks\ndef recipe(data=None): return {made}\n")
    said = chipwise("transfer", f"{file}:recipe", "--batch", 8, "--data", tmp_path)
    assert f"cw.load('{file}:recipe', data={str(tmp_path)!r})" in said.out.splitlines()[-1]
    said = chipwise("transfer", "gpt2-124m", "--batch", 256, "--set", "ema=0.9", "--synthetic")
    assert "cw.load('gpt2-124m', ['ema=0.9'], synthetic=True)" in said.out.splitlines()[-1]


def test_json_is_one_object(chipwise):
    said = chipwise("transfer", "cifar10-davidnet", "--batch", 128, "--lr", 0.4, "--json")
    told = json.loads(said.out)
    assert told["schema"] == "chipwise.transfer/1" and told["recipe"]["batch"] == 128
    changed = {c["setting"]: c["new"] for c in told["changes"] if c["old"] != c["new"]}
    assert changed == {"batch": 128, "steps": 9375, "weight_decay": 1.25e-4}


def test_mistakes_are_one_line(chipwise, mine):
    for arguments in (
        (f"{mine}:lion", "--batch", 8),
        (f"{mine}:recipe",),
        (f"{mine}:recipe", "--batch", 25),
        (f"{mine}:recipe", "--duration", "3 parsecs"),
    ):
        said = chipwise("transfer", *arguments)
        assert said.code == 2 and said.err.count("\n") == 1 and said.out == "", arguments


@pytest.mark.slow
def test_a_run_with_a_noise_scale_says_the_length(chipwise, mine, tmp_path):
    run, recipe = tmp_path / "run", f"{mine}:recipe"
    how = ("--devices", 1, "--noise", "--eval-every", "2st", "--log-every", "1st", "--quiet")
    assert chipwise("train", recipe, "--run", run, *how).code == 0
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = [row["eval/loss"] for row in rows if "eval/loss" in row]
    goal = f"eval/loss={max(losses[1:]):.6f}1"
    law = critical_batch(cw.load(recipe), run, goal)
    batch = cw.load(recipe).batch * 2
    words = ("transfer", recipe, "--batch", batch, "--like", run, "--target", goal)
    told = json.loads(chipwise(*words, "--json").out)
    assert told["like"]["steps"] == law.steps(batch).steps and told["recipe"]["batch"] == batch
    assert told["recipe"]["duration"] == f"{law.steps(batch).steps}st"
    assert told["like"]["critical"] == pytest.approx(law.examples)
    shown = chipwise(*words)
    assert shown.code == 0 and f"duration={law.steps(batch).steps}st" in shown.out.splitlines()[-1]
    for less in (words[:-2], words[:4] + words[6:], (*words[:2], *words[4:]), (*words, "--duration", "2ep")):
        assert chipwise(*less).refused(2, "transfer-like")
