"""Bad input through the command line: one line with the fix, the documented code, and nothing written."""

import gzip
import json
import os
import pickle
import struct
from types import SimpleNamespace

import numpy as np
import pytest
import typer
from PIL import Image

import chipwise as cw
from chipwise import cli
from chipwise.cli import app
from refusals import refused as raises

HEAD = """
import numpy as np
import chipwise as cw
import tasks

def made(train, eval=None, **changes):
    return cw.Recipe(
        task=cw.Task(init=tasks.init, loss=tasks.plain_loss, train=train, eval=eval, classes=5),
        batch=24, duration="12st", optimizer=cw.sgd(lr=0.1), **changes,
    )

def rows(n=30, **changes):
    return [{**{k: v[i] for k, v in tasks.data().columns.items()}, **changes} for i in range(n)]
"""


@pytest.fixture
def refused(chipwise, tmp_path):
    """Trains a recipe; asserts the exit code, the error, its line alone, an untouched folder."""

    def check(code, error, *arguments, source=None, **facts):
        if source is not None:
            file = tmp_path / "bad_task.py"
            file.write_text(HEAD + source)
            arguments = (f"{file}:recipe", *arguments)
        run = () if "--run" in arguments else ("--run", tmp_path / "runs" / "one")
        before = sorted(p for p in tmp_path.rglob("*") if "__pycache__" not in p.parts)
        said = chipwise("train", *arguments, *run, "--quiet", "--json")
        assert said.refused(code, error, **facts)
        assert sorted(p for p in tmp_path.rglob("*") if "__pycache__" not in p.parts) == before
        return said.error.facts

    return check


# ---- recipes and settings


@pytest.mark.parametrize(
    "setting,error,facts",
    [
        ("batch=100", "batch-indivisible", {"batch": 100, "replicas": 8, "near": [96, 104]}),
        ("bacth=64", "recipe-setting-unknown", {"name": "bacth", "near": "batch"}),
        ("batch=many", "set-not-whole", {"name": "batch", "given": "many"}),
        ("lr=fast", "set-not-a-number", {"name": "lr", "given": "fast"}),
        ("duration=30", "duration-without-unit", {"number": "30"}),
        ("seed=-1", "field-not-whole", {"seed": -1, "least": 0}),
    ],
)
def test_a_setting_that_cannot_be(refused, setting, error, facts):
    refused(2, error, "digits", "--set", setting, **facts)


def test_an_unknown_recipe_or_field(refused):
    refused(2, "recipe-unknown", "digit", name="digit", near="digits")
    source = "def recipe(): return made(tasks.data(), replica=8)"
    refused(2, "no-such-field", source=source, near="replicas")
    refused(2, "recipe-file-fails", source="\nrecipe = 1 / 0", line=15)


LOSS = """
def loss(params, state, batch, key, train):
    return helper(batch)

def helper(batch):
    return batch["nothing"] + 1

task = tasks.task(loss=loss)
recipe = tasks.recipe(task=task)
"""


def test_a_loss_that_raises_names_its_own_line(chipwise, tmp_path):
    file = tmp_path / "bad_task.py"
    file.write_text(HEAD + LOSS)
    line = 1 + (HEAD + LOSS).splitlines().index('    return batch["nothing"] + 1')
    said = chipwise("train", f"{file}:recipe", "--run", tmp_path / "run", "--devices", 1, "--quiet")
    where, columns = f" at {file.name}:{line}", ["label", "x"]
    assert said.refused(2, "task-column", what="Task.loss", column="nothing", where=where, columns=columns)


def test_what_nobody_elses_code_raised_is_a_traceback():
    """A fault of chipwise's own is shown whole."""
    assert cli.own_code(RuntimeError("no frames")) is None
    try:
        json.loads("{")
    except ValueError as error:
        inner = error.with_traceback(error.__traceback__.tb_next)  # without this file
    assert cli.own_code(inner) is None
    try:
        exec(compile("1 / 0", "/usr/lib/python3/dist-packages/library.py", "exec"))
    except ZeroDivisionError as error:
        inner = error.with_traceback(error.__traceback__.tb_next)
    assert cli.own_code(inner) is None


@pytest.mark.parametrize("option", ["--eval-every", "--log-every", "--checkpoint-every", "--stop-after"])
def test_an_interval_that_is_none(refused, option):
    refused(2, "duration-unreadable", "digits", option, "often")


def test_devices_that_are_not_there(refused):
    refused(4, "devices-option", "digits", "--devices", "none", given="none")
    refused(4, "devices-missing", "digits", "--devices", "9", count=9, here=8)
    refused(4, "devices-above-blocks", "digits", "--devices", "3", "--set", "blocks=2", blocks=2, devices=3)
    for shares, groups in (
        ("3,3,2", 2),
        ("4,3", 2),
    ):  # one of a device that is not there; two that do not add up
        numbers = {"shares": list(map(int, shares.split(","))), "groups": groups, "blocks": 8}
        refused(4, "shares-unlike", "digits", "--devices", "2", "--shares", shares, **numbers)
    refused(4, "shares-unlike", "digits", "--shares", "1,1,1,1,1,1,1,1,1", groups=8, blocks=8)
    refused(2, "stuck-unreadable", "digits", "--stuck", "5m", stuck="5m")
    for given, most in (("0", 0), ("1.5", "1.5"), ("many", "many")):
        refused(2, "steps-per-call", "digits", "--steps-per-call", given, value=most)


# ---- data


def test_empty_data(refused):
    refused(3, "training-source-empty", source="def recipe(): return made([])")
    refused(3, "evaluation-data-empty", source="def recipe(): return made(tasks.data(), [])")


def test_a_label_out_of_range(refused):
    bad = "rows(30) + rows(1, label=np.int32(5))"
    for arguments in (bad, f"tasks.data(), {bad}"):
        facts = refused(3, "label-out-of-range", source=f"def recipe(): return made({arguments})")
        assert (facts["example"], facts["label"], facts["last"]) == (30, 5, 4)


def test_examples_of_two_shapes(refused):
    odd = "rows(30) + rows(1, x=np.zeros(13, np.uint8))"
    refused(3, "example-unlike", source=f"def recipe(): return made({odd})", example=30)


def test_labels_that_are_not_integers(refused):
    source = "def recipe(): return made([{'x': np.zeros(12, np.uint8), 'label': np.float32(1)}] * 30)"
    refused(2, "labels-shape", source=source)


def test_images_of_two_shapes(refused, tmp_path):
    for name, size in (("a", 8), ("b", 9)):
        folder = tmp_path / "photos" / "train" / name
        folder.mkdir(parents=True)
        for i in range(4):
            Image.fromarray(np.full((size, size, 3), 40 * i, np.uint8)).save(folder / f"{i}.png")
    source = f"""
from chipwise.data import ImageFolder

def loss(params, state, batch, key, train):
    means = batch["image"].astype("float32").mean((1, 2, 3))
    return {{"loss": cw.Sum.of(means * params["v"][0, 0])}}, state

def recipe():
    task = cw.Task(init=tasks.init, loss=loss, train=ImageFolder({str(tmp_path / "photos")!r}, split="train"))
    return cw.Recipe(task=task, batch=8, duration="2st", optimizer=cw.sgd(lr=0.1))
"""
    facts = refused(3, "image-sizes-differ", source=source, first="a/0.png", file="b/0.png")
    assert (facts["first_size"], facts["size"]) == ([8, 8], [9, 9])


def idx(array):
    return (
        struct.pack(">HBB", 0, 8, array.ndim) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()
    )


@pytest.mark.parametrize("zipped", [False, True])
def test_a_truncated_idx_file(refused, tmp_path, zipped):
    folder = tmp_path / "mnist"
    folder.mkdir()
    for part, n in (("train", 60), ("t10k", 10)):
        for name, array in (
            ("images-idx3", np.zeros((n, 28, 28), np.uint8)),
            ("labels-idx1", np.zeros(n, np.uint8)),
        ):
            data = idx(array)
            data = gzip.compress(data)[:-9] if zipped else data[:-3]
            (folder / f"{part}-{name}-ubyte{'.gz' if zipped else ''}").write_bytes(data)
    error = "file-damaged" if zipped else "not-the-original"
    refused(3, error, "mnist", "--data", tmp_path, "--devices", 1)


def test_a_data_folder_without_the_data(refused, tmp_path):
    refused(3, "data-absent", "mnist", "--data", tmp_path / "nowhere")
    refused(3, "mnist-missing", "mnist", "--data", tmp_path)


class Malicious:
    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return os.system, (f"touch {self.mark}",)


def test_a_malicious_pickle_is_refused_and_nothing_in_it_runs(refused, tmp_path):
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    mark = tmp_path / "executed"
    for name in [f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"]:
        (folder / name).write_bytes(pickle.dumps({"data": Malicious(mark), "labels": [0]}))
    words = ("cifar10-davidnet", "--data", tmp_path, "--set", "width=2", "--devices", 1)
    refused(3, "not-the-original", *words, path=folder / "data_batch_1")
    assert not mark.exists()


# ---- the run folder


NAMELESS = ("", "  ", "\n", "a\nb", "a\x1b[2J", "a\0b", "\x9b", "a\u2028b")


@pytest.mark.parametrize("name", NAMELESS)
def test_a_name_to_write_that_is_blank_or_has_control_characters(chipwise, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    found = set()
    for command, one in typer.main.get_command(app()).commands.items():
        for flag in {"--run", "--out", "--html"} & {flag for p in one.params for flag in p.opts}:
            assert chipwise(command, flag, name).refused(2, "unprintable", what=flag, value=name)
            found.add((command, flag))
    outs = ("predict", "export", "launch", "bench", "chips")
    assert found == {
        *((command, "--run") for command in ("train", "sweep", "referee")),
        *((command, "--out") for command in outs),
        *((command, "--html") for command in ("plan", "report", "compare")),
    }
    (tmp_path / "text.txt").write_text("one two three")
    assert chipwise("pack", "text.txt", name).refused(2, "unprintable", what="dst", value=name)
    assert [path.name for path in tmp_path.iterdir()] == ["text.txt"]


def test_no_name_to_read_has_a_zero_byte(chipwise, tmp_path):
    assert chipwise("pack", "a\0b", tmp_path / "packed").code == 3
    assert chipwise("chips", "--prices", "a\0b").code == 2


@pytest.mark.parametrize("name", ["", "a\nb"])
def test_calls_refuse_such_a_name_too(digits, mine, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    for call in (
        lambda: cw.fit(cw.load(f"{mine}:finished"), name),
        lambda: cw.sweep(f"{mine}:finished", seeds=1, run=name),
        lambda: cw.referee.referee(f"{mine}:finished", f"{mine}:lion", run=name),
        lambda: cw.predict(digits, out=name),
        lambda: cw.export(digits, "safetensors", name),
    ):
        with raises(cw.errors.RecipeError, "unprintable", value=name):
            call()
    assert not [*tmp_path.iterdir()]


def test_a_name_may_have_letters_of_any_language_and_spaces_within(chipwise, digits, tmp_path):
    for name in ("un été.csv", "\u202fa\u200db\u3000.csv"):
        assert chipwise("predict", digits, "--out", tmp_path / name, "--quiet").code == 0
        assert (tmp_path / name).exists()


def test_a_run_folder_that_is_a_file_or_lies_under_one(refused, tmp_path):
    (tmp_path / "file").write_text("mine")
    for place in (tmp_path / "file", tmp_path / "file" / "run", tmp_path / "file" / "deep" / "run"):
        refused(5, "run-is-a-file", "digits", "--run", place, "--devices", 1)
    assert (tmp_path / "file").read_text() == "mine"


def test_a_run_folder_where_nobody_may_write(refused):
    refused(5, None, "digits", "--run", "/proc/chipwise/run", "--devices", 1)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_run_folder_without_permission(refused, tmp_path):
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o500)
    refused(5, "run-unwritable", "digits", "--run", closed / "run", "--devices", 1)


def test_a_disk_without_room_for_checkpoints(refused, monkeypatch):
    usage = SimpleNamespace(free=1000)
    monkeypatch.setattr("chipwise.run.folder.run_folder.shutil.disk_usage", lambda place: usage)
    refused(5, "run-without-space", "digits", "--devices", 1)


@pytest.mark.slow
def test_a_run_of_another_recipe_is_refused_with_old_and_new(refused, chipwise, mine, tmp_path):
    run = ("--run", tmp_path / "run", "--devices", 1)
    assert chipwise("train", f"{mine}:lion", "--set", "duration=1st", *run, "--quiet").code == 0
    other = ("--set", "duration=2st", "--set", "b1=0.7")
    refused(5, "run-of-another-recipe", f"{mine}:lion", *other, *run)
    for text in ("{", "", "[1]", '"text"', "\x00"):
        (tmp_path / "run" / "recipe.json").write_text(text)
        refused(5, "recipe-json-damaged", f"{mine}:lion", "--set", "duration=1st", *run)

    # What the message says to do: the run goes on from its checkpoint
    (tmp_path / "run" / "recipe.json").unlink()
    said = chipwise("train", f"{mine}:lion", "--set", "duration=1st", *run, "--quiet", "--json")
    assert (said.code, json.loads(said.out)["seconds"]["train"]) == (0, 0)


def test_a_folder_in_use_names_the_process(refused, mine, tmp_path):
    from chipwise.run.folder.run_folder import RunFolder

    held = RunFolder(tmp_path / "run", {}, 0)
    try:
        refused(5, "folder-in-use", f"{mine}:finished", "--run", tmp_path / "run", "--devices", 1)
    finally:
        held.close()


def test_fresh_does_not_discard_what_is_not_a_run(refused, mine, tmp_path):
    (tmp_path / "home" / "checkpoints").mkdir(parents=True)
    (tmp_path / "home" / "lock").touch()
    run = ("--run", tmp_path / "home", "--devices", 1)
    refused(5, "run-fresh-elsewhere", f"{mine}:finished", "--fresh", *run)
