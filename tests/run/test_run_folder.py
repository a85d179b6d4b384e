import dataclasses
import errno
import json
import math
import os
import shutil
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

import chipwise as cw
import tasks
from chipwise.base.errors import RunError
from chipwise.run.folder.checkpoint import Checkpoints
from chipwise.run.folder.run_folder import RunFolder, recorded
from chipwise.run.folder.run_reader import (
    disagreement,
    newest_checkpoint,
    read_ledger,
    read_media,
    read_processes,
    read_result,
    read_rows,
    stored_recipe,
)
from refusals import refused

RECIPE = {"name": "r", "seed": 0, "optimizer": {"lr": 0.1}, "source": {"recipe": "r"}}


def opened(path, recipe=RECIPE, **options):
    return RunFolder(path, recipe, 0, **options)


@pytest.mark.slow
def test_one_process_at_a_time(tmp_path):
    code = (
        "import sys; from chipwise.run.folder.run_folder import RunFolder; f = RunFolder(sys.argv[1], {}, 0);"
        "print('held', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "run")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "held\n"
        with refused(cw.errors.RunError, "folder-in-use") as caught:
            opened(tmp_path / "run", {})
        assert caught.value.facts["holder"].startswith(f"process {other.pid} on ")
        other.kill()  # however it ends, it holds nothing any more
    opened(tmp_path / "run", {}).close()


def test_metrics_after_the_checkpoint_are_dropped_and_half_lines_too(tmp_path):
    folder = opened(tmp_path)
    lines = [json.dumps({"step": s, "train/loss": 1.0}) for s in (4, 8, 12)]
    damaged = ["", "7", "[1]", '{"step": "x"}', '{"train/loss": 1', lines[0][:-3]]
    file = tmp_path / "metrics.jsonl"
    for text in ["\n".join([*lines, half]) for half in damaged] + ["\n".join([damaged[4], *lines])]:
        file.write_text(text)
        assert [row["step"] for row in folder.rewind(8)] == [4, 8]
        assert file.read_text() == "\n".join(lines[:2]) + "\n"
    file.write_bytes(b"\xff\xfe\x00\n" + lines[0].encode() + b"\n\x80")
    assert [row["step"] for row in folder.rewind(8)] == [4]
    folder.close()


def test_no_metrics_are_no_history(tmp_path):
    folder = opened(tmp_path)
    assert folder.rewind(0) == []
    folder.close()


def test_logged_lines_are_read_back_and_go_to_tensorboard(tmp_path):
    folder = opened(tmp_path)
    folder.log({"step": 1, "train/loss": 0.5})
    folder.log({"step": 2, "train/loss": 0.25})
    folder.close()
    assert len(list(tmp_path.glob("events.out.tfevents.*"))) == 1
    folder = opened(tmp_path)
    assert folder.rewind(5) == [{"step": 1, "train/loss": 0.5}, {"step": 2, "train/loss": 0.25}]
    folder.close()


def test_what_is_not_finite_is_null_in_json_and_not_in_tensorboard(tmp_path, caplog):
    folder = opened(tmp_path)
    folder.log({"step": 1, "train/loss": 0.5, "eval/loss": math.nan, "eval/f1": math.inf})
    folder.finish({"metrics": {"eval/loss": math.nan, "eval/each": [1.0, -math.inf]}})
    folder.close()
    assert caplog.records == []  # of tensorboardX, for what it cannot draw
    line = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=pytest.fail)
    assert line == {"step": 1, "train/loss": 0.5, "eval/loss": None, "eval/f1": None}
    result = json.loads((tmp_path / "result.json").read_text(), parse_constant=pytest.fail)
    assert result["metrics"] == {"eval/loss": None, "eval/each": [1.0, None]}
    folder = opened(tmp_path)
    (row,) = folder.rewind(5)
    folder.close()
    assert math.isnan(row["eval/loss"]) and row["train/loss"] == 0.5
    assert json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=pytest.fail) == line


@pytest.mark.parametrize("value", [np.float32(0.5), object()], ids=["number", "object"])
def test_what_json_lacks_is_refused_and_not_written_as_its_text(tmp_path, value):
    folder = opened(tmp_path)
    for write in (folder.log, folder.finish, lambda row: folder.replace("ledger.jsonl", [row])):
        with pytest.raises(TypeError):
            write({"step": 1, "what": value})
    folder.close()
    for described in (recorded, lambda recipe: disagreement({}, {"source": recipe.source})):
        with pytest.raises(TypeError):
            described(dataclasses.replace(tasks.quick(), source={"what": value}))
    assert not (tmp_path / "result.json").exists()


def test_a_recipe_keeps_what_is_not_finite():
    stored = recorded(dataclasses.replace(tasks.quick(), source={"most": math.inf, "sizes": (1, 2)}))
    assert stored["source"] == {"most": math.inf, "sizes": [1, 2]}
    assert disagreement({"most": None}, {"most": math.inf}) == [("most", None, math.inf)]
    assert disagreement({"most": math.inf}, {"most": math.inf}) == []


@pytest.mark.parametrize("name", ["metrics.jsonl", "media.jsonl", "processes.jsonl", "ledger.jsonl"])
def test_a_file_in_the_place_of_a_run_has_no_rows_to_read(tmp_path, name):
    """Rows of a missing file are none, but a path below a file is no run."""
    read = {
        "metrics.jsonl": read_rows,
        "media.jsonl": read_media,
        "processes.jsonl": read_processes,
        "ledger.jsonl": read_ledger,
    }[name]
    (tmp_path / "file").write_text("")
    with refused(RunError, "file-unreadable", path=str(tmp_path / "file" / name)):
        read(tmp_path / "file")
    with refused(RunError, "not-a-run"):
        stored_recipe(tmp_path / "file")
    assert read_result(tmp_path / "file") == (None, "")


def test_a_result_is_whole_or_not_there(tmp_path):
    folder = opened(tmp_path)
    assert folder.result() is None
    folder.finish({"steps": 3})
    assert folder.result() == {"steps": 3}
    (tmp_path / "result.json").write_text('{"steps": ')
    assert folder.result() is None
    folder.close()


def test_another_recipe_is_refused_and_where_it_came_from_does_not_count(tmp_path):
    opened(tmp_path).close()
    opened(tmp_path, {**RECIPE, "source": {"recipe": "elsewhere"}}).close()
    before = (tmp_path / "recipe.json").read_bytes()
    with refused(
        cw.errors.RunError, "run-of-another-recipe", changes=[("optimizer.lr", 0.1, 0.2), ("seed", 0, 1)]
    ):
        opened(tmp_path, {**RECIPE, "seed": 1, "optimizer": {"lr": 0.2}})
    assert (tmp_path / "recipe.json").read_bytes() == before
    opened(tmp_path).close()  # the refused one holds nothing


def test_fresh_discards_a_run_and_nothing_else(tmp_path):
    opened(tmp_path).close()
    (tmp_path / "checkpoints" / "4").mkdir(parents=True)
    (tmp_path / "notes.txt").write_text("mine")
    opened(tmp_path, {**RECIPE, "seed": 1}, fresh=True).close()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["lock", "notes.txt", "recipe.json"]
    assert stored_recipe(tmp_path)["seed"] == 1


def test_fresh_in_a_folder_that_holds_no_run_is_refused(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    with refused(cw.errors.RunError, "run-fresh-elsewhere", files=["checkpoints"]):
        opened(tmp_path, fresh=True)
    assert (tmp_path / "checkpoints").is_dir()
    (tmp_path / "checkpoints").rmdir()
    opened(tmp_path, fresh=True).close()


def test_a_folder_that_cannot_be_finished_is_not_left_behind(tmp_path, monkeypatch):
    def full(file, content):
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr("chipwise.run.folder.run_folder.put_inside", full)
    with refused(cw.errors.RunError, "run-disk-full", checkpoint=None):
        opened(tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


def test_a_name_that_no_system_takes_is_one_line(tmp_path):
    with refused(cw.errors.RunError, "run-unusable", checkpoint=None):
        opened(tmp_path / ("x" * 300))


def test_a_full_disk_names_the_last_good_checkpoint(tmp_path, monkeypatch):
    folder = opened(tmp_path)
    for name in ("8", "12", "16.orbax-checkpoint-tmp"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    assert newest_checkpoint(tmp_path) == 12

    def full(path, flags):
        return os.open("/dev/full", os.O_RDWR)

    monkeypatch.setattr("chipwise.run.folder.run_folder.open_inside", full)
    with refused(cw.errors.RunError, "run-disk-full", checkpoint=12, path=str(tmp_path)):
        folder.log({"step": 13})
    folder.close()


@pytest.mark.parametrize("again", [False, True])
def test_a_folder_that_is_moved_under_its_run_is_told_as_that(tmp_path, again):
    path, to = tmp_path / "run", tmp_path / "moved"
    folder = opened(path)
    folder.log({"step": 1, "train/loss": 0.5})
    (path / "checkpoints" / "4").mkdir(parents=True)
    path.rename(to)
    if again:  # another process took its place, whose files are not this one's
        path.mkdir()
        for name in ("lock", "recipe.json"):
            (path / name).write_text("another")
    with refused(RunError, "run-moved", path=str(path), to=str(to), checkpoint=4):
        folder.log({"step": 2, "train/loss": 0.5})
    folder.close()
    assert path.exists() == again and not (path / "metrics.jsonl").exists()


@pytest.mark.parametrize("line", ["its own", "none"])
def test_a_copy_by_the_same_process_of_another_host_is_another_owner(tmp_path, monkeypatch, line):
    """Two containers have equal names and numbers; a full disk has no line of the owner at all."""
    path, to = tmp_path / "run", tmp_path / "moved"
    folder = opened(path)
    own = folder._lock.file
    own.seek(0)
    who, token = own.read(200).decode().splitlines()
    if line == "none":
        own.truncate(0)
    path.rename(to)
    path.mkdir()
    (path / "lock").write_text("" if line == "none" else f"{who}\n{token[::-1]}\n")
    with refused(RunError, "run-moved", path=str(path), to=str(to)):
        folder.finish({"steps": 3})
    folder.close()
    assert [p.name for p in path.iterdir()] == ["lock"] and not (to / "result.json").exists()


def test_a_save_goes_with_its_folder_and_never_into_another_at_its_place(tmp_path, monkeypatch):
    """Moved while Orbax writes in the background."""
    task = tasks.quick_task(loss=tasks.plain_loss, augment=None, eval=None)
    recipe, save = tasks.quick(task=task), Checkpoints.save
    how = {"on": cw.On(devices=1), "log_every": "5st", "eval_every": None, "progress": "none"}
    path, to = tmp_path / "run", tmp_path / "moved"

    def moved(self, step, *given):
        if step == 20:
            self.wait()
            path.rename(to)
            path.mkdir()
            (path / "checkpoints").mkdir()
        save(self, step, *given)

    monkeypatch.setattr(Checkpoints, "save", moved)
    with refused(RunError, "run-moved", path=str(path), to=str(to)):
        cw.fit(recipe, path, checkpoint_every="10st", **how)
    monkeypatch.undo()
    assert [p.name for p in path.rglob("*")] == ["checkpoints"]
    assert cw.fit(recipe, to, **how).steps == 30


def test_a_folder_that_is_deleted_under_its_run_is_told_as_that(tmp_path):
    folder = opened(tmp_path / "run")
    shutil.rmtree(tmp_path / "run")
    with refused(RunError, "run-gone", path=str(tmp_path / "run")):
        folder.log({"step": 2, "train/loss": 0.5})
    folder.close()
    assert not (tmp_path / "run").exists()


def test_a_run_whose_folder_is_moved_goes_on_where_it_is_now(tmp_path, monkeypatch):
    task = tasks.quick_task(loss=tasks.plain_loss, augment=None, eval=None)
    recipe, log = tasks.quick(task=task), RunFolder.log
    how = {"on": cw.On(devices=1), "log_every": "5st", "eval_every": None, "progress": "none"}
    path, to = tmp_path / "run", tmp_path / "moved"

    def move(self, row):
        log(self, row)
        if row["step"] == 20:
            while not (path / "checkpoints" / "10").exists():
                time.sleep(0.01)
            path.rename(to)

    monkeypatch.setattr(RunFolder, "log", move)
    with refused(RunError, "run-moved", path=str(path), to=str(to)) as caught:
        cw.fit(recipe, path, checkpoint_every="10st", **how)
    monkeypatch.undo()
    assert not path.exists()
    assert caught.value.facts["checkpoint"] == cw.run.restore_run(recipe, to).steps
    assert cw.fit(recipe, to, **how).steps == 30


def test_another_length_is_no_reason_to_discard_a_run(tmp_path):
    opened(tmp_path, {**RECIPE, "duration": "2ep"}).close()
    with refused(RunError, "run-of-another-duration") as caught:
        opened(tmp_path, {**RECIPE, "duration": "3ep"})
    assert "--with-optimizer" in str(caught.value) and "--fresh" not in str(caught.value)
    with refused(RunError, "run-of-another-recipe"):
        opened(tmp_path, {**RECIPE, "duration": "3ep", "seed": 1})


def test_where_recipes_disagree():
    assert disagreement({"a": 1, "source": 1}, {"a": 1, "source": 2}) == []
    assert disagreement({"a": {"b": None}}, {"a": {"b": (1,)}}) == [("a.b", None, [1])]


def test_a_full_disk_ends_in_one_error_and_no_thread_says_more(tmp_path, monkeypatch):
    """What TensorBoard's file cannot take is raised where the row is logged."""
    folder = opened(tmp_path)
    folder.log({"step": 1, "train/loss": 0.5})
    before = threading.active_count()

    def full(self):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("tensorboardX.event_file_writer.EventsWriter.flush", full)
    monkeypatch.setattr("chipwise.run.folder.run_folder._SECONDS", -1.0)
    with refused(RunError, "run-disk-full"):
        folder.log({"step": 2, "train/loss": 0.25})
    folder.close()
    assert threading.active_count() == before


def test_fresh_stops_where_a_checkpoint_cannot_be_removed(tmp_path):
    opened(tmp_path).close()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "checkpoints").symlink_to(tmp_path / "elsewhere")
    with refused(RunError, "file-not-plain", path=str(tmp_path / "checkpoints"), kind="a link"):
        opened(tmp_path, {**RECIPE, "seed": 1}, fresh=True)
    assert stored_recipe(tmp_path)["seed"] == 0  # so that no other recipe resumes from what is left


def test_a_fresh_run_keeps_no_best_checkpoint_of_the_former(tmp_path):
    RunFolder(tmp_path, {"seed": 0}, 0).close()
    (tmp_path / "best" / "5").mkdir(parents=True)
    RunFolder(tmp_path, {"seed": 1}, 0, fresh=True).close()
    assert not (tmp_path / "best").exists()
