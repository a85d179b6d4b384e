import json
import shlex

import chipwise as cw


def test_a_table_and_a_file_that_trains_the_same(chipwise, mine, tmp_path):
    to = tmp_path / "small.py"
    said = chipwise("transfer", f"{mine}:recipe", "--batch", 8, "--set", "rate=0.3", "--apply", to)
    assert said.code == 0 and said.err == ""
    assert "Goyal" in said.out and "Unaffected:" in said.out and str(to) in said.out
    lr = next(line.split() for line in said.out.splitlines() if line.startswith("lr "))
    assert lr[1:3] == ["0.3", "0.1"]
    moved = cw.load(str(to))
    assert said.out.endswith(f"written: {to}\nNext: chipwise train {to}:recipe\n")
    assert (moved.batch, moved.duration, moved.optimizer.lr.peak) == (8, "36st", 0.1)
    again = chipwise("transfer", f"{mine}:recipe", "--batch", 8, "--apply", to)
    assert again.refused(2, "recipe-file-exists")


def test_without_apply_it_ends_with_what_to_type(chipwise, mine, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    said = chipwise("transfer", f"{mine}:recipe", "--batch", 8, "--lr", 0.2, "--set", "rate=0.3")
    written, trained = said.out.splitlines()[-2:]
    assert written.endswith(f"{mine}:recipe --batch 8 --lr 0.2 --set rate=0.3 --apply mine_8.py")
    assert trained.split() == ["chipwise", "train", "mine_8.py:recipe"]
    words = shlex.split(written.removeprefix("Next: chipwise "))
    assert chipwise(*words).code == 0 and cw.load(trained.split()[-1]).optimizer.lr.peak == 0.2


def test_json_is_one_object(chipwise):
    said = chipwise("transfer", "cifar10-davidnet", "--batch", 128, "--lr", 0.4, "--json")
    told = json.loads(said.out)
    assert told["schema"] == "chipwise.transfer/1" and told["recipe"]["batch"] == 128
    changed = {c["setting"]: c["new"] for c in told["changes"] if c["old"] != c["new"]}
    assert changed == {"batch": 128, "steps": 9375, "weight_decay": 1.25e-4}


def test_mistakes_are_one_line(chipwise, mine, tmp_path):
    for arguments in (
        (f"{mine}:lion", "--batch", 8),
        (f"{mine}:recipe",),
        (f"{mine}:recipe", "--batch", 25),
        (f"{mine}:recipe", "--duration", "3 parsecs"),
    ):
        said = chipwise("transfer", *arguments, "--apply", tmp_path / "x.py")
        assert said.code == 2 and said.err.count("\n") == 1 and said.out == "", arguments
    assert not list(tmp_path.iterdir())
