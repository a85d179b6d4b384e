import importlib.metadata
import json

import pytest

import chipwise as cw
from chipwise import cli
from chipwise.base import errors

pytestmark = pytest.mark.as_users_compile

FAST = ("--eval-every", "end", "--json", "--quiet")


@pytest.fixture(scope="module")
def whole(mine, tmp_path_factory):
    """What an uninterrupted run says, and its folder."""
    import contextlib
    import io

    from chipwise.cli import main

    folder = tmp_path_factory.mktemp("whole") / "run"
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert main(["train", f"{mine}:recipe", "--run", str(folder), "--devices", "1", *FAST]) == 0
    return out.getvalue(), folder


def test_json_is_one_object_that_says_everything(whole):
    printed, folder = whole
    said = json.loads(printed)  # one object, and nothing beside it
    assert printed.count("\n") == 1
    assert said.keys() >= {
        "fingerprint",
        "steps",
        "metrics",
        "devices",
        "examples_per_second",
        "seconds",
        "run",
    }
    assert said["steps"] == 12
    assert said["run"] == str(folder)
    assert len(said["fingerprint"]) == 64
    assert said["examples_per_second"] > 0
    sections = ["start", "compile", "train", "wait_data", "evaluate", "checkpoint", "total"]
    assert set(said["seconds"]) - {"own_code"} == set(sections)  # which a loaded machine may have
    assert (
        sum(v for k, v in said["seconds"].items() if k not in ("total", "wait_data"))
        <= said["seconds"]["total"]
    )
    assert {"schema": "chipwise.train/1", **json.loads((folder / "result.json").read_text())} == said


def test_the_folder_knows_how_it_was_made(whole, mine):
    stored = json.loads((whole[1] / "recipe.json").read_text())
    assert stored["source"] == {"recipe": f"{mine}:recipe", "set": [], "data": None}
    assert stored["optimizer"]["momentum"] == 0.5


@pytest.mark.slow
def test_simulated_devices_give_one_fingerprint(subprocess_chipwise, mine, tmp_path):
    said = {}
    for count in (1, 8):
        ended = subprocess_chipwise(
            "train", f"{mine}:recipe", "--simulate", count, "--run", tmp_path / str(count), *FAST
        )
        assert ended.returncode == 0, ended.stderr
        (line,) = ended.stderr.splitlines()
        assert line.startswith("warning: batch norm over 3 examples a replica")
        said[count] = json.loads(ended.stdout)
        assert said[count]["devices"]["count"] == count
        assert said[count]["devices"]["replicas_per_device"] == 8 // count
    assert said[1]["fingerprint"] == said[8]["fingerprint"]
    assert said[1]["metrics"] == pytest.approx(said[8]["metrics"], rel=1e-6)


def test_stop_after_and_resuming_on_other_devices_give_the_same_fingerprint(chipwise, mine, whole, tmp_path):
    run = ("train", f"{mine}:recipe", "--run", tmp_path / "run", *FAST)
    first = chipwise(*run, "--devices", 1, "--stop-after", "5st")
    assert (first.code, json.loads(first.out)["steps"]) == (0, 5)
    assert not (tmp_path / "run" / "result.json").exists()
    second = chipwise(*run, "--devices", 2)
    assert json.loads(second.out)["fingerprint"] == json.loads(whole[0])["fingerprint"]
    assert json.loads(second.out)["steps"] == 12


def test_a_finished_run_says_the_same_again_without_training(chipwise, mine, whole):
    printed, folder = whole
    # A lock names the process that holds it
    others = (p for p in folder.rglob("*") if not p.name.startswith("events.out") and p.name != "lock")
    before = {p: p.read_bytes() for p in others if p.is_file()}
    said = chipwise("train", f"{mine}:recipe", "--run", folder, "--devices", 2, *FAST)
    assert said.code == 0
    first, again = json.loads(printed), json.loads(said.out)
    assert (again["fingerprint"], again["metrics"]) == (first["fingerprint"], first["metrics"])
    assert again["seconds"]["train"] == again["seconds"]["compile"] == 0
    after = {p: p.read_bytes() for p in before}
    assert after == before  # what was measured when it trained stays


@pytest.mark.slow
def test_settings_reach_the_run_and_fresh_discards_one(chipwise, mine, tmp_path):
    settings = ("--set", "rate=0.2", "--set", "momentum=0", "--set", "duration=2st", "--set", "seed=5")
    run = ("--run", tmp_path, "--devices", 1, *FAST)
    assert chipwise("train", f"{mine}:recipe", *settings, *run).code == 0
    stored = json.loads((tmp_path / "recipe.json").read_text())
    assert (stored["seed"], stored["duration"], stored["optimizer"]["momentum"]) == (5, "2st", 0.0)
    assert stored["optimizer"]["lr"]["peak"] == 0.2

    again = chipwise("train", f"{mine}:lion", "--set", "duration=1st", *run)
    assert again.refused(5, "run-of-another-recipe")
    assert chipwise("train", f"{mine}:lion", "--set", "duration=1st", "--fresh", *run).code == 0
    assert json.loads((tmp_path / "recipe.json").read_text())["name"] == "lion"


@pytest.mark.slow
def test_people_see_the_recipe_the_devices_and_the_result(chipwise, mine, tmp_path):
    said = chipwise(
        "train", f"{mine}:finished", "--set", "duration=2st", "--devices", 1, "--run", tmp_path / "r"
    )
    assert said.code == 0
    assert "24 = 8 replicas × 3" in said.err
    assert "cpu: 1 × cpu (simulated), 8 of 8 replicas each" in said.err
    assert "step 2/2" in said.err
    for name in ("eval/loss", "seconds", "fingerprint", "run"):
        assert name in said.out


def test_help_shows_examples_line_by_line_and_the_exit_codes(chipwise):
    said = chipwise("train", "--help")
    assert said.code == 0
    lines = [line.strip() for line in said.out.splitlines()]
    assert "chipwise train digits" in lines
    assert "chipwise train my_task.py:recipe --set lr=0.2 --devices 4" in lines
    assert not any(line.startswith(f"{errors.Stopped.exit_code} ") for line in lines)
    assert "\b" not in said.out
    assert "chipwise eval runs/mnist-1 --batch 7 --simulate 8 --json" in chipwise("eval", "--help").out


def test_the_exit_codes_in_the_help_are_those_of_the_errors(chipwise):
    said = chipwise("--help").out
    listed = {int(words[0]) for line in said.splitlines() if (words := line.split()) and words[0].isdigit()}
    codes = {e.exit_code for e in vars(errors).values() if isinstance(e, type) and hasattr(e, "exit_code")}
    assert codes | {0, 130, 141} == listed


COMMANDS = len(cli.app().registered_commands)


def test_the_help_lists_every_command_once(chipwise):
    """In one of its groups: the application's own class raises for a name that is no command."""
    listed = [name for names in cli.COMMANDS.values() for name in names]
    assert len(set(listed)) == len(listed) == COMMANDS - 2  # without `skill` and `track`
    shown = chipwise("--help").out.splitlines()
    indented = [line for line in shown if line.startswith("  ") and line[2:3].strip()]  # others go on
    assert [line.split()[0] for line in indented if line.split()[0] in listed] == listed


def test_the_version(chipwise):
    assert chipwise("--version").out == f"{importlib.metadata.version('chipwise')}\n"


def test_chipwise_alone_shows_the_help(chipwise):
    said = chipwise()
    assert "Train a recipe on all devices." in said.out + said.err


def test_usage_errors_go_to_standard_error(chipwise):
    said = chipwise("trian", "digits")
    assert (said.code, said.out) == (2, "")
    assert "trian" in said.err
    assert "Traceback" not in said.err


@pytest.mark.slow
def test_from_goes_on_with_the_weights_of_a_run(chipwise, mine, whole, tmp_path):
    old, new = whole[1], tmp_path / "new"
    command = ["train", f"{mine}:recipe", "--set", "lr=0", "--from", old, "--run", new, "--devices", 1, *FAST]
    went_on = chipwise(*command)
    assert went_on.code == 0, went_on.err
    result = json.loads(went_on.out)
    before, after = (cw.pretrained(run) for run in (old, new))
    assert result["steps"] == 12 and before.digest == after.digest  # at a rate of 0 they stay what they were
    stored = json.loads((new / "recipe.json").read_text())
    assert stored["source"]["from"] == str(old)
    assert stored["task"]["init"].endswith(f" from weights {before.digest[:16]}")
    evaluated = chipwise("eval", new, "--recipe", f"{mine}:recipe", "--devices", 1, "--json")
    assert "warning" not in evaluated.err
    assert json.loads(evaluated.out)["metrics"]["loss"] == result["metrics"]["eval/loss"]
    assert f"--from {old} " in chipwise("report", new, "--json").out
    # The same command resumes; what begins otherwise is another run
    assert json.loads(chipwise(*command).out)["fingerprint"] == result["fingerprint"]
    without = [word for word in command if word not in ("--from", old)]
    assert chipwise(*without).refused(5, "run-of-another-recipe")
    assert chipwise(*[old if word == new else word for word in command]).refused(2, "from-itself")


@pytest.mark.slow
def test_a_run_goes_on_with_the_optimizer_of_another(chipwise, mine, tmp_path):
    options = ["--devices", 1, "--eval-every", "end", "--quiet"]
    assert chipwise("train", f"{mine}:recipe", "--run", tmp_path / "a", *options).code == 0
    more = ["--from", tmp_path / "a", "--with-optimizer", "--set", "duration=5st"]
    said = chipwise("train", f"{mine}:recipe", "--run", tmp_path / "b", *options, *more)
    assert said.code == 0, said.err
    source = json.loads((tmp_path / "b" / "recipe.json").read_text())["source"]
    assert source["with_optimizer"] is True and source["from"] == str(tmp_path / "a")
    again = chipwise("report", tmp_path / "b").out
    assert "--with-optimizer" in again
    said = chipwise("train", f"{mine}:recipe", "--with-optimizer", *options)
    assert said.refused(2, "optimizer-of-which-run")


def test_noise_needs_replicas(chipwise):
    said = chipwise("train", "digits", "--devices", 1, "--noise", "--set", "replicas=1")
    assert (said.code, said.error.code, said.error.facts["how"]) == (2, "noise-one-block", "--set replicas=8")
