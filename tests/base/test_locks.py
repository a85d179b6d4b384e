import errno
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from chipwise.base import locks
from chipwise.base.errors import ChipwiseError, RunError
from chipwise.base.locks import Lock, hold
from chipwise.data.pack.packing import Packing
from chipwise.study import study_file
from chipwise.study.referee.tries import Tries
from refusals import refused

HOLDS = """
import errno, os, sys
from pathlib import Path
from chipwise.base import locks

number = int(sys.argv[2])
if number:
    def without(*_, **__):
        raise OSError(number, os.strerror(number))
    locks.lock_descriptor = without
lock = locks.hold(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""
WITHOUT = ("ENOLCK", "ENOSYS", "EOPNOTSUPP")


def holding(folder, number=0):
    """Another process that has the lock of `folder`. Its file system answers `number` if that is not 0."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    process = subprocess.Popen([sys.executable, "-c", HOLDS, folder, str(number)], env=environment, **pipes)
    assert process.stdout.readline() == "held\n"
    return process


def end(process):
    process.kill()
    process.communicate()


@pytest.fixture(params=[True, False], ids=["exchange", "no exchange"])
def exchange(request, monkeypatch):
    """Whether the file system exchanges two names, as filelock does to take over a lock. NFS does not."""
    if not request.param:
        monkeypatch.setattr("filelock._soft.exchange_names", lambda *_: False)


@pytest.fixture(params=["", *WITHOUT])
def number(request, monkeypatch, exchange):
    """What the file system answers whoever asks for a lock, or 0 where it has locks."""
    number = getattr(errno, request.param, 0)
    if number:

        def without(*_, **__):
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(locks, "lock_descriptor", without)
    return number


def test_one_process_has_a_folder_and_nobody_once_it_was_killed(tmp_path, number):
    other = holding(tmp_path, number)
    try:
        with refused(RunError, "folder-in-use", path=str(tmp_path)) as error:
            hold(tmp_path)
        assert error.value.facts["holder"].startswith(f"process {other.pid} on ")
        assert error.value.facts["held"] == str(tmp_path / ("lock.held" if number else "lock"))
        assert ("delete" in str(error.value)) == bool(number)
    finally:
        end(other)
    hold(tmp_path).close()
    hold(tmp_path).close()
    assert os.listdir(tmp_path) == ["lock"]


def test_whoever_may_wait_waits(tmp_path, number):
    other, waited = holding(tmp_path, number), []
    lock = Lock(tmp_path / "lock", lambda: waited.append(end(other)))
    with pytest.raises(BlockingIOError):
        Lock(tmp_path / "lock")
    lock.close()
    assert waited == [None]


def test_whoever_waits_for_a_file_that_is_deleted_has_the_next(tmp_path, number):
    other = holding(tmp_path, number)

    def delete():
        (tmp_path / "lock").unlink()
        end(other)

    Lock(tmp_path / "lock", delete).close()
    assert (tmp_path / "lock").exists() or number


def test_a_host_without_locks_is_seen_by_one_that_has_them(tmp_path):
    other = holding(tmp_path, errno.ENOLCK)
    try:
        with refused(RunError, "folder-in-use", held=str(tmp_path / "lock.held")):
            hold(tmp_path)
    finally:
        end(other)
    hold(tmp_path).close()
    assert os.listdir(tmp_path) == ["lock"]


def test_what_a_process_on_another_machine_left_is_named_and_stays(tmp_path):
    marker = tmp_path / "lock.held"
    marker.write_text("4194304\nelsewhere\n")
    with refused(RunError, "folder-in-use", held=str(marker)) as error:
        hold(tmp_path)
    assert f"delete '{marker}'" in str(error.value) or f"delete {marker}" in str(error.value)
    marker.unlink()
    hold(tmp_path).close()


def test_the_lock_of_a_file_that_is_gone_is_none(tmp_path, monkeypatch):
    """Its last holder removed it between our opening it and locking it."""
    real = locks.lock_descriptor

    def slow(handle, **how):
        (tmp_path / "lock").unlink()
        return real(handle, **how)

    monkeypatch.setattr(locks, "lock_descriptor", slow)
    with pytest.raises(BlockingIOError):
        Lock(tmp_path / "lock")


def test_another_fault_of_the_disk_is_no_lack_of_locks(tmp_path, monkeypatch):
    def broken(*_, **__):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(locks, "lock_descriptor", broken)
    with pytest.raises(OSError, match="Input/output"):
        hold(tmp_path)
    assert os.listdir(tmp_path) == ["lock"]


class SlowFile:
    """A file of which another thread has time to move the offset."""

    def __init__(self, file):
        self.fileno, self.close, self._file = file.fileno, file.close, file

    def seek(self, to):
        self._file.seek(to)
        time.sleep(0.005)

    def read(self, most):
        return self._file.read(most)


@pytest.mark.parametrize("without", [(), ("pread",)])
def test_threads_that_ask_at_once_are_told_that_a_folder_is_in_its_place(tmp_path, monkeypatch, without):
    for name in without:  # as on Windows
        monkeypatch.delattr(os, name)
    with hold(tmp_path) as lock, ThreadPoolExecutor(2) as threads:
        lock.file = SlowFile(lock.file)
        assert set(threads.map(lambda _: lock.elsewhere(), range(40))) == {None}


def write_study(folder):
    with study_file.opened(folder, "r", None) as study:
        yield study.write


def write_tries(folder):
    tries = Tries(folder, 0.05)
    yield lambda: tries.write({"verdict": "open"})
    tries.close()


def write_pack(folder):
    folder.mkdir()
    job = Packing([{"x": np.arange(3)}] * 4, folder / "pack")
    with job._alone():
        yield job._appear


@pytest.mark.parametrize("writer", [write_study, write_tries, write_pack])
@pytest.mark.parametrize("again", [False, True])
def test_no_writer_writes_where_its_folder_was(tmp_path, writer, again):
    """Moved away, and maybe with another's folder at its place."""
    path, to = tmp_path / "folder", tmp_path / "moved"
    writing = writer(path)
    write = next(writing)
    path.rename(to)
    theirs = ["lock", ".pack.partial.lock"] if again else []
    if again:
        path.mkdir()
        for name in theirs:
            (path / name).write_text("process 1 on another")
    with pytest.raises(ChipwiseError) as caught:
        write()
    assert caught.value.code == "folder-moved" and caught.value.facts["to"] == str(to)
    next(writing, None)  # it ends, and gives its own lock back
    assert sorted(p.name for p in path.iterdir()) == sorted(theirs) if again else not path.exists()
