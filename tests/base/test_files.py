import contextlib
import errno
import os
import stat
from pathlib import Path

import pytest

from chipwise.base.errors import DataError
from chipwise.base.files import put_inside, put_on_disk, replace_file
from chipwise.base.locks import hold, room_beside
from refusals import refused


def test_a_file_is_replaced_whole_in_folders_made_for_it(tmp_path):
    path = tmp_path / "a" / "b.txt"
    assert replace_file(path, "one\n", "page-unwritable") == path
    replace_file(path, "two\n", "page-unwritable")
    assert path.read_bytes() == b"two\n" and [p.name for p in path.parent.iterdir()] == ["b.txt"]


def test_what_cannot_be_written_says_where_to_write_instead(tmp_path):
    (tmp_path / "file").write_text("old")
    with refused(DataError, "page-unwritable", path=tmp_path / "file" / "x"):
        replace_file(tmp_path / "file" / "x", "new", "page-unwritable")
    assert (tmp_path / "file").read_text() == "old" and len(list(tmp_path.iterdir())) == 1


def test_files_of_a_shared_folder_have_the_rights_that_the_user_gives_new_files(tmp_path):
    before = os.umask(0o002)
    try:
        put_inside(tmp_path / "file", b"1")
        hold(tmp_path).close()
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o664}


def test_a_file_that_cannot_be_replaced_stays_and_leaves_nothing_beside_it(tmp_path, monkeypatch):
    put_inside(tmp_path / "file", b"old", durable=True)

    def fails(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("chipwise.base.files.os.replace", fails)
    with pytest.raises(OSError, match="No space"):
        put_inside(tmp_path / "file", b"new")
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("file", b"old")]


def test_a_device_is_written_to_and_not_replaced():
    ours, terminal = os.openpty()
    try:
        path = os.ttyname(terminal)
        assert replace_file(path, "one", "page-unwritable") == Path(path) and os.read(ours, 9) == b"one"
        assert Path(path).is_char_device()
    finally:
        os.close(ours)
        os.close(terminal)


def test_a_room_is_empty_and_leaves_the_pack_of_that_name_alone(tmp_path):
    unfinished = tmp_path / ".flowers.partial" / "train"
    unfinished.mkdir(parents=True)
    with room_beside(tmp_path / "flowers") as room:
        assert not list(room.iterdir())
        (room / "whole").write_text("x")
    assert unfinished.is_dir() and [path.name for path in tmp_path.iterdir()] == [".flowers.partial"]


def test_what_is_removed_meanwhile_is_left_out(tmp_path, monkeypatch):
    (tmp_path / "kept").touch()
    walked = [(str(tmp_path / "gone"), [], ["a"]), (str(tmp_path), [], ["gone", "kept"])]
    monkeypatch.setattr("chipwise.base.files.os.walk", lambda folder: walked)
    synced = []
    monkeypatch.setattr("chipwise.base.files.os.fsync", synced.append)
    put_on_disk(tmp_path)
    assert len(synced) == 2  # the file that is there, and the folder


@pytest.mark.parametrize(("code", "told"), [(errno.EINVAL, False), (errno.ENOTSUP, False), (errno.EIO, True)])
def test_a_file_system_that_cannot_wait_for_folders_is_used_and_a_failing_one_told(
    tmp_path, monkeypatch, code, told
):
    real = os.fsync

    def fsync(handle):
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            raise OSError(code, os.strerror(code))
        real(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    for write in (lambda: put_inside(tmp_path / "file", b"new", durable=True), lambda: put_on_disk(tmp_path)):
        with pytest.raises(OSError) if told else contextlib.nullcontext():
            write()
    assert (tmp_path / "file").read_bytes() == b"new"
