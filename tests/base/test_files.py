import contextlib
import errno
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from chipwise.base import files
from chipwise.base.errors import DataError, RunError
from chipwise.base.files import put_inside, put_on_disk, replace_file
from chipwise.base.locks import hold, replaced
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
    put_inside(tmp_path / "file", b"old")

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


def test_what_is_made_has_its_name_only_whole_and_leaves_the_pack_of_that_name_alone(tmp_path):
    unfinished = tmp_path / ".flowers.partial" / "train"
    unfinished.mkdir(parents=True)
    with replaced(tmp_path / "flowers.npz") as whole:
        assert not list(whole.parent.iterdir()) and whole.suffix == ".npz"
        whole.write_text("x")
        assert not (tmp_path / "flowers.npz").exists()
    assert unfinished.is_dir() and (tmp_path / "flowers.npz").read_text() == "x"
    assert sorted(path.name for path in tmp_path.iterdir()) == [".flowers.partial", "flowers.npz"]


def test_a_pipe_is_no_place_for_a_whole_file(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="neither a file nor a folder"), replaced(tmp_path / "pipe"):
        raise AssertionError
    assert [(one.name, one.is_fifo()) for one in tmp_path.iterdir()] == [("pipe", True)]


@pytest.mark.parametrize("pipe", [False, True])
def test_standard_output_by_its_name_stays(tmp_path, pipe):
    code = "from chipwise.base.files import replace_file; replace_file('/dev/stdout', 'text', 'x')"
    with open(tmp_path / "out", "w+") as file:
        done = subprocess.run(
            [sys.executable, "-c", code], check=True, stdout=subprocess.PIPE if pipe else file, text=True
        )
        file.seek(0)
        assert (done.stdout if pipe else file.read()) == "text" and Path("/dev/stdout").is_symlink()


def test_what_somebody_else_left_hinders_no_write(tmp_path, monkeypatch):
    left = tmp_path / ".file.01234567.part"
    left.write_text("theirs")
    real = files.open_inside

    def refused_there(path, *flags):
        if path == left:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return real(path, *flags)

    monkeypatch.setattr(files, "open_inside", refused_there)
    put_inside(tmp_path / "file", b"mine")
    assert (tmp_path / "file").read_bytes() == b"mine" and left.read_text() == "theirs"


def test_one_that_is_there_is_not_replaced_unasked(tmp_path):
    (tmp_path / "made").write_text("old")
    with pytest.raises(FileExistsError), replaced(tmp_path / "made", fresh=False) as whole:
        whole.write_text("new")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("made", "old")]


def remade(folder, text="new"):
    with replaced(folder) as whole:
        whole.mkdir()
        (whole / "file").write_text(text)


OPERATIONS = ("rename", "replace", "mkdir", "fsync", "open", "unlink", "rmdir")


@pytest.mark.parametrize("kind", ["folder", "file"])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_each_operation_of_a_writer_may_fail_and_the_old_one_stays(tmp_path, monkeypatch, kind, operation):
    """What fails may leave the old one or the new one, whole, and nothing of a dead process for ever."""

    def write(text):
        if kind == "folder":
            remade(tmp_path / "made", text)
        else:
            put_inside(tmp_path / "made", text.encode())

    def read():
        return (tmp_path / "made" / "file" if kind == "folder" else tmp_path / "made").read_text()

    write("0")
    real, failed = getattr(os, operation), 0
    for nth in range(1, 40):
        count = 0

        def fails(*given, **named):
            nonlocal count, failed
            count += 1
            if count == nth:
                failed += 1
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return real(*given, **named)

        before = read()
        monkeypatch.setattr(os, operation, fails)
        with contextlib.suppress(OSError, RunError):
            write(str(nth))
        monkeypatch.setattr(os, operation, real)
        assert read() in (before, str(nth))
        if count < nth:
            break
    assert failed or operation not in ("replace", "fsync", "open")
    write("last")
    assert read() == "last" and [path.name for path in tmp_path.iterdir()] == ["made"]


def test_what_is_made_goes_with_its_folder_and_never_into_another_at_its_place(tmp_path):
    path, to = tmp_path / "out", tmp_path / "moved"
    path.mkdir()
    with pytest.raises((OSError, RunError)), replaced(path / "made") as whole:
        whole.write_text("mine")
        path.rename(to)
        (path / ".made.making" / "theirs").mkdir(parents=True)
        (path / "made").write_text("theirs")
    assert (path / "made").read_text() == "theirs" and (path / ".made.making" / "theirs").is_dir()
    assert not list(to.rglob("whole*"))


def test_a_folder_whose_process_was_killed_between_two_names_comes_back(tmp_path):
    remade(tmp_path / "made", "old")
    (tmp_path / ".made.making" / "left").mkdir(parents=True)
    (tmp_path / "made").rename(tmp_path / ".made.making" / "old")
    with pytest.raises(FileExistsError), replaced(tmp_path / "made", fresh=False):
        pytest.fail("it is there")
    assert (tmp_path / "made" / "file").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["made"]


KILLED = """
import os, sys
from pathlib import Path
from chipwise.base.files import put_inside
os.replace = lambda *_, **__: (print("written", flush=True), sys.stdin.read())
put_inside(Path(sys.argv[1]), b"killed")
"""


def test_what_a_killed_process_left_is_swept_by_the_next_write_and_a_living_one_is_let_be(tmp_path):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(
        [sys.executable, "-c", KILLED, tmp_path / "page"], env=environment, **pipes
    ) as other:
        assert other.stdout.readline() == "written\n"
        replace_file(tmp_path / "page", "mine", "page-unwritable")
        assert len(list(tmp_path.iterdir())) == 2  # it may still give its own the name
        other.kill()
    replace_file(tmp_path / "other", "mine", "page-unwritable")
    assert len(list(tmp_path.iterdir())) == 3
    replace_file(tmp_path / "page", "mine again", "page-unwritable")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "page"]


def test_what_is_removed_meanwhile_is_left_out(tmp_path, monkeypatch):
    for name in ("gone", "kept"):
        (tmp_path / name).touch()
    synced, real = [], os.open

    def opened(path, *given, **named):
        (tmp_path / "gone").unlink(missing_ok=True)
        return real(path, *given, **named)

    monkeypatch.setattr("chipwise.base.files.os.open", opened)
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
    for write in (lambda: put_inside(tmp_path / "file", b"new"), lambda: put_on_disk(tmp_path)):
        with pytest.raises(OSError) if told else contextlib.nullcontext():
            write()
    assert (tmp_path / "file").read_bytes() == b"new"
