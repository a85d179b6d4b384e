"""Writes files whole or not at all, and reads files without waiting for ever.

A folder of a run, a study, a pack or predictions may come from somebody else. The functions called
`..._inside` open its files. They do not follow, wait for or write through a link, a pipe or a
device at a file's name. The folder itself may be reached through a link.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import stat
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from filelock import lock_descriptor

from .errors import DataError, RunError, invalid

MOST_BYTES = 1 << 26  # of a settings or results file: a larger file is not one

# Windows has none but the last one, and opens no folder
NOFOLLOW = getattr(os, "O_NOFOLLOW", 0)
NONBLOCK = getattr(os, "O_NONBLOCK", 0)
DIRECTORY = getattr(os, "O_DIRECTORY", 0)
BINARY = getattr(os, "O_BINARY", 0)


def home() -> Path:
    """The folder for everything that chipwise fetches or compiles: CHIPWISE_CACHE, else the user's
    cache folder. Raises `DataError` for a user without a home."""
    import pooch

    try:
        return (
            Path(os.environ.get("CHIPWISE_CACHE") or pooch.os_cache("chipwise"))
            .expanduser()
            .absolute()
        )
    except RuntimeError as error:
        raise DataError(
            "homeless", "This user has no home folder: set CHIPWISE_CACHE to one."
        ) from error


def to_write(path: Any, what: str) -> Any:
    """Returns the `path` of a file or folder to write, for which `what` asks. Raises `RecipeError`
    "unprintable" for a blank path, which would be the current folder, and for one with control
    characters."""
    if not str(path).strip() or re.search(r"[\0-\x1f\x7f-\x9f\u2028\u2029]", str(path)):
        raise invalid(
            "unprintable", what, path, "a name that is not blank, without control characters"
        )
    return path


_NUMBER = re.compile(r"(?:os_error_code='|OS error |os error )(\d+)")
_OF_DAMAGE = (
    errno.ENOENT,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.ELOOP,
    errno.EINVAL,
    errno.ENAMETOOLONG,
    errno.EFBIG,
    errno.EOVERFLOW,
)
"""What damaged names and numbers make the system say. Any other error says nothing of the bytes."""


def system_number(error: BaseException) -> int | None:
    """The number of an error of the system, also in the text that tensorstore or safetensors make
    of one. `None` for other errors."""
    if isinstance(error, MemoryError):
        return errno.ENOMEM
    if isinstance(error, OSError):
        return error.errno
    found = _NUMBER.search(str(error))
    return int(found[1]) if found else None


@contextlib.contextmanager
def system_errors(path: str | os.PathLike) -> Iterator[None]:
    """A context that turns a library's own error, if it is one of the system, into an `OSError`."""
    try:
        yield
    except (OSError, MemoryError):
        raise
    except Exception as error:
        if (number := system_number(error)) is None:
            raise
        raise OSError(number, os.strerror(number), os.fspath(path)) from error


def may_be_whole(error: BaseException) -> bool:
    """Whether the system could not read a file, which may be undamaged."""
    return system_number(error) not in (None, *_OF_DAMAGE)


def is_full(error: BaseException) -> bool:
    """Whether more space would help."""
    return system_number(error) in (errno.ENOSPC, errno.EDQUOT)


def open_regular(path: str | os.PathLike) -> BinaryIO:
    """The file, opened for reading. Raises `OSError` also for a pipe or a device, which may never
    give a byte."""
    handle = os.open(path, os.O_RDONLY | NONBLOCK | BINARY)
    kind = os.fstat(handle).st_mode
    if not stat.S_ISREG(kind):
        os.close(handle)
        code = errno.EISDIR if stat.S_ISDIR(kind) else errno.EINVAL
        raise OSError(
            code, "Is a directory" if code == errno.EISDIR else "not a regular file", str(path)
        )
    return os.fdopen(handle, "rb")


def read_regular(path: str | os.PathLike, most: int = MOST_BYTES) -> bytes:
    """All bytes of a regular file. Raises `OSError` for another kind, and for more than `most`
    bytes."""
    with open_regular(path) as file:
        return _at_most(file, most, path)


def _at_most(file: BinaryIO, most: int, path: str | os.PathLike) -> bytes:
    content = file.read(most + 1)
    if len(content) > most:
        raise OSError(errno.EFBIG, f"more than {most:,} bytes", str(path))
    return content


def toml_beside(module: str) -> dict[str, Any]:
    """The TOML file beside a module's file, with its name. For this package's own, which need no
    checks."""
    return tomllib.loads(Path(module).with_suffix(".toml").read_text("utf-8"))


def replace_file(path: str | os.PathLike, content: str | bytes, code: str, **facts: Any) -> Path:
    """Writes `content` (text in UTF-8) to `path` under a temporary name and renames it. Creates the
    folders above. A device, and standard output as /dev/stdout, is written to, not replaced.

    *Returns* the path. Raises `DataError` if it cannot be written, with the `code` of what is
    written, such as "page-unwritable", the `path`, the `reason` and `facts`. A file that was there
    is then untouched.
    """
    to, content = Path(path), content.encode() if isinstance(content, str) else content
    try:
        to.parent.mkdir(parents=True, exist_ok=True)
        if to.is_char_device() or str(to.parent) in ("/dev", "/dev/fd"):
            to.write_bytes(content)
        else:
            put_inside(to, content)
    except OSError as error:
        raise DataError(code, path=to, reason=error, **facts) from None
    return to


# ---- files in a folder that somebody else may have made


def open_inside(path: Path, flags: int = os.O_RDONLY) -> int:
    """A descriptor of the regular file `path`, opened with `flags`. Raises `OSError`. Raises
    `RunError` "file-not-plain" for a link, a pipe or a device, and, when opened to write, for a
    file that has another name too."""
    flags |= NOFOLLOW | NONBLOCK | BINARY  # a pipe is refused below instead of waited for
    if not NOFOLLOW and path.is_symlink():
        raise _not_plain(path, stat.S_IFLNK)
    try:
        with _folder_of(path) as folder:
            handle = os.open(_in(folder, path), flags & ~os.O_TRUNC, 0o666, dir_fd=folder)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):
            raise _not_plain(path, os.lstat(path).st_mode) from None
        raise
    about = os.fstat(handle)
    shared = flags & (os.O_WRONLY | os.O_RDWR) and about.st_nlink > 1
    if shared or not stat.S_ISREG(about.st_mode):
        os.close(handle)
        if stat.S_ISDIR(about.st_mode):
            raise IsADirectoryError(errno.EISDIR, "Is a directory", str(path))
        raise _not_plain(path, stat.S_IFLNK if shared else about.st_mode)
    if flags & os.O_TRUNC:
        os.ftruncate(handle, 0)
    return handle


def read_inside(path: Path, most: int = MOST_BYTES) -> bytes:
    """All bytes of a file, opened by `open_inside`. Raises `OSError` also for more than `most`
    bytes."""
    with os.fdopen(open_inside(path), "rb") as file:
        return _at_most(file, most, path)


def put_inside(path: Path, content: bytes, durable: bool = True) -> None:
    """Replaces `path` by a new file, or leaves it untouched and raises `OSError`. Unless `durable`
    is false, waits for the disk. A link at `path` is replaced and not followed. Removes what killed
    processes left here of a file of that name."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    remove_temporaries(path.parent, path.name)
    with _folder_of(path) as folder:
        part = _in(folder, temporary)
        handle = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | BINARY, 0o666, dir_fd=folder)
        try:
            with os.fdopen(handle, "wb") as file:
                _locked(handle, blocking=True)  # until it has its name
                if os.fstat(handle).st_nlink == 0:  # taken for a killed process's before that
                    return put_inside(path, content, durable)
                file.write(content)
                file.flush()
                if durable:
                    os.fsync(handle)
                if os.name == "nt":  # which renames no open file
                    file.close()
                os.replace(part, _in(folder, path), src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(part, dir_fd=folder)
            raise
        if durable and folder is not None:
            _fsync_names(folder)


def _locked(handle: int, blocking: bool = False) -> bool:
    """Whether this process now has the lock of a temporary file."""
    try:
        return lock_descriptor(handle, blocking=blocking)
    except OSError:  # a file system without locks
        return False


def put_on_disk(*paths: Path) -> None:
    """Waits until files and folders, with what is below them, are on disk, so that a power cut
    loses none of it. Leaves out what is missing, or removed meanwhile."""
    for path in paths:
        if path.is_file():
            # Windows needs the right to write
            flags = os.O_RDONLY if DIRECTORY else os.O_RDWR
            with contextlib.suppress(FileNotFoundError), _handle(path, flags | BINARY) as file:
                os.fsync(file)
        elif path.is_dir():
            with contextlib.suppress(FileNotFoundError):
                put_on_disk(*path.iterdir())
                fsync_folder(path)


def fsync_folder(folder: Path) -> None:
    """Waits until the names in `folder` are on disk."""
    if DIRECTORY:  # Windows opens no folder
        with _handle(folder, os.O_RDONLY | DIRECTORY) as handle:
            _fsync_names(handle)


def _fsync_names(folder: int) -> None:
    try:
        os.fsync(folder)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems
            raise


@contextlib.contextmanager
def _handle(path: str | os.PathLike, flags: int) -> Iterator[int]:
    handle = os.open(path, flags)
    try:
        yield handle
    finally:
        os.close(handle)


@contextlib.contextmanager
def _folder_of(path: Path) -> Iterator[int | None]:
    """A descriptor of the folder of `path`, which stays that folder whatever is renamed meanwhile.
    `None` where the system opens no folder."""
    if not DIRECTORY:
        yield None
        return
    with _handle(path.parent, os.O_RDONLY | DIRECTORY) as folder:
        yield folder


def _in(folder: int | None, path: Path) -> str | Path:
    return path if folder is None else path.name


def check_inside(folder: Path, *names: str) -> None:
    """Raises `RunError` "file-not-plain" if one of `names` in `folder` (by default all), or
    anything below one, is neither a file nor a folder, or is one of `ORBAX_SMALL` with more than
    `MOST_BYTES`. Called before a library opens files."""
    paths = [folder / name for name in names or os.listdir(folder)]
    for path in paths:  # which grows
        # Another process may write here
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            about = os.lstat(path)
            if stat.S_ISDIR(about.st_mode):
                paths += path.iterdir()
            elif not stat.S_ISREG(about.st_mode) or (
                path.name in ORBAX_SMALL and about.st_size > MOST_BYTES
            ):
                raise _not_plain(path, about.st_mode)


# Read whole
ORBAX_SMALL = ("_CHECKPOINT_METADATA", "_METADATA", "_sharding", "metadata", "manifest.ocdbt")
_KINDS = {stat.S_IFLNK: "a link", stat.S_IFIFO: "a pipe", stat.S_IFREG: "too large"}


def _not_plain(path: Path, mode: int) -> RunError:
    text = (
        "{path} is {kind}: expected a plain file or folder of its own. Delete it, or "
        "name another folder."
    )
    kind = _KINDS.get(stat.S_IFMT(mode), "a device")
    return RunError("file-not-plain", text, path=str(path), kind=kind)


def remove_temporaries(folder: Path, *names: str, alone: bool = False) -> None:
    """Removes what a killed `put_inside` of files called `names` left: what no process has locked,
    and everything if this process is `alone` in the folder."""
    found = {f".{name}." for name in names}
    for left in os.listdir(folder):
        if left[-5:] != ".part" or left[:-13] not in found:
            continue
        # Another removes it, it is a link, or it is somebody else's
        with contextlib.suppress(OSError, RunError):
            if alone or _unlocked(folder / left):
                (folder / left).unlink()


def _unlocked(path: Path) -> bool:
    with os.fdopen(open_inside(path, os.O_RDWR), "rb") as file:
        return _locked(file.fileno())
