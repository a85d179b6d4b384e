"""Checkpoints that were damaged, cut short, or could not be written."""

import contextlib
import errno
import hashlib
import json
import logging
import os
import random
import resource
import shutil
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from orbax.checkpoint._src.metadata import checkpoint as metadata

import chipwise as cw
import processes
import tasks
from chipwise.base.files import system_number
from chipwise.run.folder import checkpoint as module
from chipwise.run.folder import run_reader
from chipwise.run.folder.checkpoint import KEEP, Checkpoints, digest, restore_run
from chipwise.run.folder.quiet_orbax import QuietOrbax
from chipwise.run.folder.run_folder import RunFolder
from chipwise.step.state import abstract_state
from refusals import refused

pytestmark = pytest.mark.as_users_compile


def plain(**changes):
    """The small task at its quickest to compile."""
    task = tasks.quick_task(loss=tasks.plain_loss, augment=None, eval=None)
    return tasks.quick(task=task, **changes)


QUIET = {"on": cw.On(devices=1), "log_every": "5st", "eval_every": None, "progress": "none"}


def saved_bytes(tree):
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


def restored(folder, template, **options):
    said = []
    checkpoints = Checkpoints(folder / "checkpoints", **options)
    try:
        return checkpoints.restore(template, said.append), said
    finally:
        checkpoints.close()


@pytest.fixture(scope="module")
def template():
    return abstract_state(plain())


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A finished run with checkpoints of steps 10, 20 and 30."""
    folder = tmp_path_factory.mktemp("run") / "run"
    result = cw.fit(plain(), folder, checkpoint_every="10st", **QUIET)
    return folder, result


@pytest.mark.parametrize("read_only", [False, True])
def test_a_path_that_is_no_text_is_refused_as_that(tmp_path, read_only):
    """As `é` is read with LANG=C, and as a name of another encoding is read anywhere."""
    with refused(cw.errors.RecipeError, "path-not-utf8", what="run"):
        Checkpoints(tmp_path / "\udcc3\udca9", read_only=read_only)


def test_the_newest_are_kept(run):
    assert sorted(p.name for p in (run[0] / "checkpoints").iterdir()) == ["10", "20", "30"]
    assert KEEP == 3


def test_flipped_bytes_in_any_file_are_found_or_do_not_matter(run, template, tmp_path, capfd):
    folder, _ = run
    (good, stated), said = restored(folder, template, read_only=True)
    assert said == [] and int(good.step) == 30
    (before, _), _ = restored_from(folder, 20, template, tmp_path / "before")
    rng, found = random.Random(1), 0
    newest = folder / "checkpoints" / "30"
    for file in sorted(p for p in newest.rglob("*") if p.is_file()):
        for flips in (1, 8):
            copy = tmp_path / "copy"
            shutil.copytree(folder, copy)
            data = bytearray(file.read_bytes())
            for _ in range(flips):
                data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            (copy / file.relative_to(folder)).write_bytes(data)
            (state, about), said = restored(copy, template, read_only=True)
            if int(state.step) == 30:
                assert saved_bytes(state) == saved_bytes(good), file
                assert about == stated, file
                assert said == []
            else:
                found += 1
                assert saved_bytes(state) == saved_bytes(before), file
                assert len(said) == 1
                assert (said[0].code, said[0]["step"]) == ("checkpoint-damaged", 30)
                assert "\n" not in str(said[0])
            shutil.rmtree(copy)
    assert found >= 4
    assert "Traceback" not in capfd.readouterr().err


def restated(folder, change):
    """Changes the JSON object of the newest checkpoint."""
    file = folder / "checkpoints" / "30" / "about" / "metadata"
    stated = json.loads(file.read_text())
    change(stated)
    file.write_text(json.dumps(stated))


def test_a_changed_number_of_the_json_object_is_found(run, template, tmp_path):
    shutil.copytree(run[0], tmp_path / "run")
    restated(tmp_path / "run", lambda stated: stated["recipe"].update(batch=stated["recipe"]["batch"] + 1))
    (state, _), said = restored(tmp_path / "run", template, read_only=True)
    assert int(state.step) == 20
    assert [(fact.code, fact["step"]) for fact in said] == [("checkpoint-damaged", 30)]


def restored_from(folder, step, template, copy):
    shutil.copytree(folder, copy)
    for path in (copy / "checkpoints").iterdir():
        if int(path.name) > step:
            shutil.rmtree(path)
    return restored(copy, template, read_only=True)


def damage(checkpoint):
    for file in checkpoint.rglob("*"):
        if file.is_file():
            file.write_bytes(file.read_bytes()[:-7])


def test_one_with_the_name_of_another_step_is_not_taken_for_it(run, template, tmp_path):
    copy = shutil.copytree(run[0], tmp_path / "copy")
    (copy / "checkpoints" / "20").rename(copy / "checkpoints" / "25")
    shutil.rmtree(copy / "checkpoints" / "30")
    (state, _), said = restored(copy, template, read_only=True)
    assert int(state.step) == 10
    assert [(fact.code, fact["step"]) for fact in said] == [("checkpoint-damaged", 25)]


def test_a_run_with_a_damaged_checkpoint_goes_on_from_the_one_before(run, tmp_path, capsys):
    folder, result = run
    shutil.copytree(folder, tmp_path / "run")
    damage(tmp_path / "run" / "checkpoints" / "30")
    with open(tmp_path / "run" / "metrics.jsonl", "a") as file:
        file.write('{"step": 30, "train/lo')
    again = cw.fit(plain(), tmp_path / "run", **QUIET)
    said = capsys.readouterr().err
    assert "warning: The checkpoint of step 30 is damaged" in said
    assert again.fingerprint == result.fingerprint
    assert again.metrics["train/loss"] == result.metrics["train/loss"]
    assert again.seconds["train"] > 0
    assert (tmp_path / "run" / "damaged-checkpoint-30").is_dir()
    assert cw.run.restore_run(plain(), tmp_path / "run").steps == 30


def test_when_all_are_damaged_it_says_so_as_often_as_it_is_asked(run, tmp_path):
    shutil.copytree(run[0], tmp_path / "run")
    for checkpoint in (tmp_path / "run" / "checkpoints").iterdir():
        damage(checkpoint)
    before = sorted((tmp_path / "run").rglob("*"))
    for _ in range(2):
        with refused(cw.errors.CheckpointError, "checkpoints-unreadable", steps=[10, 20, 30]):
            cw.fit(plain(), tmp_path / "run", **QUIET)
    assert sorted((tmp_path / "run").rglob("*")) == before


def of_tensorstore(number):
    """An error of the system as tensorstore tells it."""
    return ValueError(f"UNKNOWN: Failed to read: {os.strerror(number)} [os_error_code='{number}']")


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        *(OSError(n, os.strerror(n)) for n in (errno.EACCES, errno.EIO, errno.ESTALE, errno.ENOTCONN)),
        *(of_tensorstore(n) for n in (errno.EACCES, errno.EIO, errno.ESTALE)),
    ],
    ids=repr,
)
def test_one_that_cannot_be_opened_is_not_called_damaged(run, template, tmp_path, monkeypatch, error):
    shutil.copytree(run[0], tmp_path / "run")
    before = sorted((tmp_path / "run").rglob("*"))

    def closed(*_):
        raise error

    monkeypatch.setattr(Checkpoints, "about", closed)
    path = str(tmp_path / "run" / "checkpoints" / "30")
    number = system_number(error)
    told = {"path": path, "reason": os.strerror(number), "errno": number}
    with refused(cw.errors.CheckpointError, "checkpoint-closed", **told):
        restored(tmp_path / "run", template)
    assert sorted((tmp_path / "run").rglob("*")) == before


def test_the_file_that_the_system_cannot_read_is_named(run, template, tmp_path, monkeypatch):
    shutil.copytree(run[0], tmp_path / "run")
    file = tmp_path / "run" / "checkpoints" / "30" / "state" / "manifest.ocdbt"

    def closed(*_):
        raise ValueError(f"Error reading \"{file}\": Input/output error [os_error_code='5']")

    monkeypatch.setattr(module, "_opened", closed)
    with refused(cw.errors.CheckpointError, "checkpoint-closed", file=str(file), errno=errno.EIO):
        restored(tmp_path / "run", template)


@pytest.mark.parametrize("name", ["recipe.json", "result.json", "metrics.jsonl", "processes.jsonl"])
def test_a_file_that_the_system_cannot_read_is_not_called_damaged(run, tmp_path, monkeypatch, name):
    shutil.copytree(run[0], tmp_path / "run")
    before = sorted((tmp_path / "run").rglob("*"))

    def failing(path, most=0):
        if path.name == name:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return path.read_bytes()

    monkeypatch.setattr(run_reader, "read_inside", failing)
    told = {"path": str(tmp_path / "run" / name), "reason": os.strerror(errno.EIO)}
    for read in (
        lambda: run_reader.read_run(tmp_path / "run"),
        lambda: cw.fit(plain(), tmp_path / "run", **QUIET),
    ):
        with refused(cw.errors.RunError, "file-unreadable", **told):
            read()
    assert sorted((tmp_path / "run").rglob("*")) == before


NO_FOLDERS = """
import errno, os, sys
import chipwise as cw
import tasks
from chipwise.cli import main

mkdir, left = os.mkdir, int(sys.argv[2])

def failing(path, *given, **named):
    global left
    if "orbax-checkpoint-tmp" in os.fspath(path):
        left -= 1
        if left < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    return mkdir(path, *given, **named)

os.mkdir = failing
try:
    cw.fit(tasks.quick(), sys.argv[1], on=cw.On(devices=1), checkpoint_every="10st", progress="none")
except cw.errors.RunError as error:
    print(error.code, error.facts["checkpoint"])
    sys.exit(error.exit_code)
"""


@pytest.mark.slow
@pytest.mark.parametrize("left", range(6))
def test_a_folder_that_cannot_be_made_ends_the_process_and_no_thread_waits(tmp_path, left):
    """Orbax's threads would wait for it at exit, for five minutes."""
    command = [sys.executable, "-c", NO_FOLDERS, str(tmp_path / "run"), str(left)]
    environment = processes.environment(JAX_PLATFORMS="cpu", JAX_NUM_CPU_DEVICES="1")
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 5, done.stderr
    code, checkpoint = done.stdout.split()
    assert code == "run-disk-full" and checkpoint in ("None", "10")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("failed", [True, False])
@pytest.mark.parametrize("file", ["/site-packages/orbax/checkpoint/writer.py", "/mine/orbax_like.py"])
def test_a_thread_of_orbax_says_nothing_beside_the_error_of_a_save(failed, file, monkeypatch):
    said = []
    monkeypatch.setattr(threading, "excepthook", said.append)
    quiet = QuietOrbax()
    quiet.expected = failed
    quiet.close()  # it may fail later than that
    names = {}
    exec(compile("def write():\n    raise ValueError('NOT_FOUND: Failed to rename')", file, "exec"), names)
    thread = threading.Thread(target=names["write"])
    thread.start()
    thread.join()
    assert len(said) == (not failed or "/orbax/" not in file)
    if failed:  # what stays then
        logging.getLogger("absl").removeFilter(quiet._log)
        sys.unraisablehook = quiet._unraisable


def test_reading_leaves_alone_what_is_damaged_or_just_being_written(run, template, tmp_path):
    shutil.copytree(run[0], tmp_path / "run")
    damage(tmp_path / "run" / "checkpoints" / "30")
    (tmp_path / "run" / "checkpoints" / "40.orbax-checkpoint-tmp").mkdir()
    before = sorted((tmp_path / "run").rglob("*"))
    (state, _), said = restored(tmp_path / "run", template, read_only=True)
    assert (int(state.step), len(said)) == (20, 1)
    assert sorted((tmp_path / "run").rglob("*")) == before


@pytest.mark.parametrize("older", [False, True])
def test_what_a_training_removes_meanwhile_is_read_again(run, tmp_path, monkeypatch, older):
    """With `keep=1`; with `older`, one that is kept for good is no substitute for the newest."""
    folder, aside, read = tmp_path / "run", tmp_path / "30", Checkpoints._read
    shutil.copytree(run[0], folder)
    (folder / "checkpoints" / "30").rename(aside)
    if not older:
        shutil.rmtree(folder / "checkpoints" / "10")

    def rotated(self, step, *arguments):
        if aside.exists():
            aside.rename(folder / "checkpoints" / "30")
            shutil.rmtree(folder / "checkpoints" / "20")
        return read(self, step, *arguments)

    monkeypatch.setattr(Checkpoints, "_read", rotated)
    assert restore_run(plain(), folder, pytest.fail).steps == 30


@pytest.mark.slow
def test_a_run_that_keeps_one_checkpoint_is_read_while_it_trains(tmp_path):
    code = (
        "import sys, chipwise as cw, tasks; cw.fit(tasks.quick(duration='1000000st'), sys.argv[1], "
        "on=cw.On(devices=1), checkpoint_every='1st', keep=1, eval_every=None, progress='none')"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "run")]
    with subprocess.Popen(command, env=processes.environment(JAX_PLATFORMS="cpu")) as other:
        try:
            while not list((tmp_path / "run").glob("checkpoints/[1-9]*[0-9]")):
                assert other.poll() is None
                time.sleep(0.1)
            recipe = tasks.quick(duration="1000000st")
            steps = [restore_run(recipe, tmp_path / "run").steps for _ in range(20)]
        finally:
            other.kill()
    assert steps == sorted(steps) and steps[-1] > steps[0]


def test_a_checkpoint_is_on_disk_before_it_has_its_name_and_an_older_one_goes(tmp_path, monkeypatch):
    """A power cut empties what no fsync has followed."""
    on_disk, real = {}, os.fsync

    def fsync(handle):
        real(handle)
        about = os.fstat(handle)
        on_disk[about.st_ino] = (about.st_mtime_ns, Path(os.readlink(f"/proc/self/fd/{handle}")))

    monkeypatch.setattr(os, "fsync", fsync)
    folder = tmp_path / "run"
    cw.fit(plain(duration="4st"), folder, checkpoint_every="1st", keep=1, **QUIET)
    (newest,) = (folder / "checkpoints").iterdir()
    for path in [newest, *newest.rglob("*"), folder / "result.json", folder / "recipe.json"]:
        about = path.stat()
        changed, named = on_disk[about.st_ino]
        assert changed == about.st_mtime_ns, path
        if newest in (path, *path.parents):
            assert any("orbax-checkpoint-tmp" in part for part in named.parts)


def test_a_checkpoint_takes_its_name_only_when_orbax_has_written_all_of_it(tmp_path, monkeypatch):
    """Orbax writes what it knows of a checkpoint in a thread of its own, by the temporary name."""
    written = metadata._MetadataStoreImpl.update

    def late(*given, **named):
        time.sleep(0.2)
        return written(*given, **named)

    monkeypatch.setattr(metadata._MetadataStoreImpl, "update", late)
    folder = tmp_path / "run"
    assert cw.fit(plain(duration="3st"), folder, checkpoint_every="1st", **QUIET).steps == 3
    for step in ("1", "2", "3"):
        assert json.loads((folder / "checkpoints" / step / "_CHECKPOINT_METADATA").read_text())[
            "item_handlers"
        ]


def test_the_rows_and_the_name_of_a_save_are_on_disk_before_the_older_one_goes(tmp_path, monkeypatch):
    happened, sync, remove, rename = [], os.fsync, Path.unlink, os.rename

    def fsync(handle):
        path = Path(os.readlink(f"/proc/self/fd/{handle}"))
        happened.append(("sync", path.name, os.fstat(handle).st_size))
        sync(handle)

    def renamed(source, target, **more):
        rename(source, target, **more)
        if "orbax" in str(source):
            happened.append(("name", Path(target).name, 0))

    def removed(path, *given, **more):
        happened.append(("remove", str(path), 0))
        remove(path, *given, **more)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "rename", renamed)
    monkeypatch.setattr(
        shutil,
        "rmtree",
        lambda path, *_, real=shutil.rmtree, **more: (
            happened.append(("remove", Path(path).name, 0)),
            real(path, *_, **more),
        ),
    )
    folder = tmp_path / "run"
    cw.fit(plain(duration="3st"), folder, checkpoint_every="1st", keep=1, **{**QUIET, "log_every": "1st"})
    names = [one[:2] for one in happened]
    for step in ("2", "3"):
        named = names.index(("name", step))
        assert ("sync", "ledger.jsonl") in names[:named] and ("sync", "metrics.jsonl") in names[:named]
        gone = names.index(("remove", str(int(step) - 1)))
        assert ("sync", "checkpoints") in names[named:gone]


def test_a_disk_that_fails_at_the_last_moment_is_told_and_loses_nothing(tmp_path, monkeypatch):
    def fsync(handle):
        if "orbax-checkpoint-tmp" in os.readlink(f"/proc/self/fd/{handle}") and (tmp_path / "full").exists():
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", fsync)
    how = {**QUIET, "checkpoint_every": "10st"}
    cw.fit(plain(), tmp_path / "run", stop_after="10st", **how)
    (tmp_path / "full").touch()
    with refused(cw.errors.RunError, "checkpoint-unwritable", checkpoint=10):
        cw.fit(plain(), tmp_path / "run", **how)
    (tmp_path / "full").unlink()
    assert cw.fit(plain(), tmp_path / "run", **how).steps == 30


def test_a_half_written_checkpoint_is_not_there(run, template, tmp_path):
    shutil.copytree(run[0], tmp_path / "run")
    place = tmp_path / "run" / "checkpoints"
    (place / "30").rename(place / "30.orbax-checkpoint-tmp")
    (state, _), said = restored(tmp_path / "run", template)
    assert (int(state.step), said) == (20, [])
    deadline = time.monotonic() + 30  # Orbax removes it in the background
    while (place / "30.orbax-checkpoint-tmp").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not (place / "30.orbax-checkpoint-tmp").exists()


def test_arrays_that_a_header_alone_states_are_not_read(tmp_path, monkeypatch):
    """Here a large array of zeros, which is small in its file, and a small recipe."""
    zeros = {"w": np.zeros((1000, 1000), np.float32)}
    with contextlib.closing(Checkpoints(tmp_path / "checkpoints")) as checkpoints:
        checkpoints.save(1, zeros, {"step": 1})
        checkpoints.wait()
        monkeypatch.setattr(module, "_ANYWAY", 0)
        assert checkpoints.restore(zeros, print)[0]["w"].shape == (1000, 1000)  # as the recipe has it
        opened = module._opened

        def unread(place):  # a `read` would be another error
            about = ("size", "chunk_layout", "dtype")
            return {n: SimpleNamespace(**{a: getattr(s, a) for a in about}) for n, s in opened(place).items()}

        monkeypatch.setattr(module, "_opened", unread)
        monkeypatch.setattr(checkpoints, "about", lambda step: {"digest": ""})
        with pytest.raises(ValueError, match="4000000 bytes stated"):
            checkpoints.arrays(1)
        said = []
        with refused(cw.errors.CheckpointError, "checkpoints-unreadable", steps=[1]):
            checkpoints.restore({"w": np.zeros((10, 10), np.float32)}, said.append)
    assert [(fact.code, fact["step"]) for fact in said] == [("checkpoint-damaged", 1)]


@pytest.mark.slow
def test_arrays_without_elements_come_back(tmp_path):
    small = plain()

    def init(key):
        params, state = small.task.init(key)
        return {**params, "none": np.zeros((0, 3), np.float32)}, {**state, "none": np.zeros((2, 0), np.int32)}

    recipe = replace(small, task=replace(small.task, init=init))
    for stop in ("10st", None):
        cw.fit(recipe, tmp_path / "run", stop_after=stop, **QUIET)
    restored = restore_run(recipe, tmp_path / "run")
    assert (
        restored.steps == 30
        and restored.params["none"].shape == (0, 3)
        and restored.state["none"].shape == (2, 0)
    )
    assert restored.state["none"].dtype == np.int32


def test_the_digest_is_that_of_all_versions():
    """Of checkpoints, and of the weights that a run began with: another one would call both damaged."""
    flat = {"step": np.int32(3), "w": np.arange(6, dtype=np.float32).reshape(2, 3)}
    text = b"step:int32:(1,);" + flat["step"].tobytes() + b"w:float32:(2, 3);"
    assert digest(flat) == hashlib.sha256(text + flat["w"].tobytes()).hexdigest()
    cut = digest(flat, {"shards": 3, "axes": {"step": -1, "w": 1}})
    assert cut == hashlib.sha256(text + flat["w"].T.tobytes()).hexdigest()


def test_a_checkpoint_of_another_model_is_not_called_damaged(run, tmp_path):
    other = abstract_state(plain(optimizer=cw.sgd(lr=0.1)))
    with refused(cw.errors.CheckpointError, "checkpoint-of-other-arrays", step=30):
        restored(run[0], other, read_only=True)


@pytest.mark.parametrize("folder", ["checkpoints", "best"])
def test_one_of_another_recipe_is_not_believed(run, tmp_path, folder):
    """It is whole, of the same model, and newer than the run's own."""
    other = cw.fit(plain(seed=1), tmp_path / "other", checkpoint_every="10st", **QUIET)
    mine = tmp_path / "mine"
    cw.fit(plain(), mine, stop_after="15st", **QUIET)
    shutil.copytree(tmp_path / "other" / "checkpoints" / "30", mine / folder / "30")
    where = {"path": str(mine / folder / "30"), "changes": [("seed", 1, 3)]}
    with refused(cw.errors.CheckpointError, "checkpoint-of-another-run", **where):
        restore_run(plain(), mine, best=folder == "best")
    if folder == "checkpoints":
        with refused(cw.errors.CheckpointError, "checkpoint-of-another-run", **where):
            cw.fit(plain(), mine, **QUIET)
        (mine / folder / "30").rename(tmp_path / "theirs")
        assert cw.fit(plain(), mine, **QUIET).fingerprint == run[1].fingerprint != other.fingerprint


@pytest.mark.parametrize(
    "code, more",
    [
        ("state-names", {"a.b": np.ones(2, np.float32), "a": {"b": np.ones(2, np.float32)}}),
        ("state-names", {"a/": np.ones(2, np.float32)}),
        ("state-dtype", {"a": np.ones(2, jnp.uint4)}),
    ],
)
def test_what_cannot_be_saved_is_refused_before_anything_is_written(tmp_path, code, more):
    def init(key):
        params, state = tasks.init(key)
        return params, state | more

    recipe = tasks.quick(task=tasks.quick_task(init=init, loss=tasks.plain_loss, eval=None))
    with refused(cw.errors.RecipeError, code):
        cw.fit(recipe, tmp_path / "run", **QUIET)
    assert not (tmp_path / "run").exists()


def test_a_disk_that_fills_up_while_saving_loses_nothing(run, tmp_path, monkeypatch):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    log = RunFolder.log

    def fill(self, row):
        log(self, row)
        if row["step"] == 20:  # the save of this step comes next; that of step 10 shall have ended
            while not (tmp_path / "checkpoints" / "10").exists():
                time.sleep(0.01)
            resource.setrlimit(resource.RLIMIT_FSIZE, (2500, hard))  # room for a line, not for arrays

    monkeypatch.setattr(RunFolder, "log", fill)
    expected = {"reason": os.strerror(errno.EFBIG), "run": str(tmp_path)}
    try:
        with refused(cw.errors.RunError, "checkpoint-unwritable", **expected) as caught:
            cw.fit(plain(), tmp_path, checkpoint_every="10st", **QUIET)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    monkeypatch.undo()
    kept = caught.value.facts["checkpoint"]
    assert kept in (10, 20)  # a row may be written only after the save of its step
    assert cw.run.restore_run(plain(), tmp_path).steps == kept
    assert cw.fit(plain(), tmp_path, **QUIET).fingerprint == run[1].fingerprint


@pytest.mark.slow
def test_a_disk_that_fills_up_while_logging_loses_nothing(run, tmp_path, monkeypatch):
    log = RunFolder.log

    def full(path, flags):
        return os.open("/dev/full", os.O_RDWR)

    def fill(self, row):
        if row["step"] == 25:
            monkeypatch.setattr("chipwise.run.folder.run_folder.open_inside", full)
        log(self, row)

    monkeypatch.setattr(RunFolder, "log", fill)
    with refused(cw.errors.RunError, "run-disk-full") as caught:
        cw.fit(plain(), tmp_path, checkpoint_every="10st", **QUIET)
    assert caught.value.facts["checkpoint"] in (10, 20)
    monkeypatch.undo()
    assert cw.fit(plain(), tmp_path, **QUIET).fingerprint == run[1].fingerprint
