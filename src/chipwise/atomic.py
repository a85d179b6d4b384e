"""Files written whole or not at all, read without waiting for ever; JSON values and messages read with types.

A folder of a run, a study, a pack or predictions may come from somebody else. The functions called
`..._inside` and `hold` open its files: no link, pipe or device at a file's name is followed, waited for or
written through. The folder itself may be reached through a link.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import json
import os
import re
import secrets
import socket
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from importlib.resources import files as resources
from pathlib import Path
from typing import Any, BinaryIO, get_args, get_origin, get_type_hints

from .errors import DataError, RunError, invalid
from .words.figures import known

MOST_BYTES = 1 << 26  # of a settings or results file: a larger file is not one


def to_write(path: Any, what: str) -> Any:
    """The `path` of a file or folder to write, which `what` asks for. Raises `RecipeError` "unprintable" for
    a blank one, which would be the current folder, and one with control characters."""
    if not str(path).strip() or re.search(r"[\0-\x1f\x7f-\x9f\u2028\u2029]", str(path)):
        raise invalid("unprintable", what, path, "a name that is not blank, without control characters")
    return path


def open_regular(path: str | os.PathLike) -> BinaryIO:
    """The file opened for reading. `OSError` also for a pipe or a device, which may never give a byte."""
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    kind = os.fstat(handle).st_mode
    if not stat.S_ISREG(kind):
        os.close(handle)
        code = errno.EISDIR if stat.S_ISDIR(kind) else errno.EINVAL
        raise OSError(code, "Is a directory" if code == errno.EISDIR else "not a regular file", str(path))
    return os.fdopen(handle, "rb")


def read_regular(path: str | os.PathLike, most: int = MOST_BYTES) -> bytes:
    """All bytes of a regular file. `OSError` for another, and for one of more than `most` bytes."""
    with open_regular(path) as file:
        return _at_most(file, most, path)


def _at_most(file: BinaryIO, most: int, path: str | os.PathLike) -> bytes:
    content = file.read(most + 1)
    if len(content) > most:
        raise OSError(errno.EFBIG, f"more than {most:,} bytes", str(path))
    return content


def replace_file(path: str | os.PathLike, content: str | bytes, code: str, **facts: Any) -> Path:
    """Writes `content` (text in UTF-8) to `path` under a temporary name and renames it, making folders above.
    A device, such as /dev/null, is written to, not replaced.

    Returns the path. Raises `DataError` where it cannot be written, with the `code` of what is written, such
    as "page-unwritable", the `path`, the `reason` and `facts`; what stood there is then untouched.
    """
    to, content = Path(path), content.encode() if isinstance(content, str) else content
    try:
        to.parent.mkdir(parents=True, exist_ok=True)
        if to.is_char_device():
            to.write_bytes(content)
        else:
            put_inside(to, content)
    except OSError as error:
        raise DataError(code, path=to, reason=error, **facts) from None
    return to


# ---- files in a folder that somebody else may have made


def open_inside(path: Path, flags: int = os.O_RDONLY) -> int:
    """A descriptor of the regular file `path`, opened with `flags`. Raises `OSError`, and `RunError`
    "file-not-plain" where a link, a pipe or a device has its name, or to write to it, another name has it."""
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        flags |= os.O_NOFOLLOW | os.O_NONBLOCK  # a pipe is refused below instead of waited for
        handle = os.open(path.name, flags & ~os.O_TRUNC, 0o666, dir_fd=folder)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):
            raise _not_plain(path, os.lstat(path).st_mode) from None
        raise
    finally:
        os.close(folder)
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
    """All bytes of a file, opened by `open_inside`. `OSError` also for more than `most` bytes."""
    with os.fdopen(open_inside(path), "rb") as file:
        return _at_most(file, most, path)


def put_inside(path: Path, content: bytes, durable: bool = False) -> None:
    """Replaces `path` by a new file, or leaves it untouched and raises `OSError`. With `durable`, waits for
    the disk. A link at `path` would be replaced and not followed."""
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    temporary = f".{path.name}.{secrets.token_hex(4)}.part"
    try:
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666, dir_fd=folder)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(content)
                if durable:
                    file.flush()
                    os.fsync(handle)
            os.replace(temporary, path.name, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            os.unlink(temporary, dir_fd=folder)
            raise
        if durable:
            os.fsync(folder)
    finally:
        os.close(folder)


def check_inside(folder: Path, *names: str) -> None:
    """Raises `RunError` "file-not-plain" if one of `names` in `folder` (by default all), or anything below
    one, is neither a file nor a folder, or is a small file of Orbax without end. Called before a library
    opens files."""
    paths = [folder / name for name in names or os.listdir(folder)]
    for path in paths:  # which grows
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):  # another process may write here
            about = os.lstat(path)
            if stat.S_ISDIR(about.st_mode):
                paths += path.iterdir()
            elif not stat.S_ISREG(about.st_mode) or (path.name in ORBAX_SMALL and about.st_size > MOST_BYTES):
                raise _not_plain(path, about.st_mode)


ORBAX_SMALL = ("_CHECKPOINT_METADATA", "_METADATA", "_sharding", "metadata", "manifest.ocdbt")  # read whole
_KINDS = {stat.S_IFLNK: "a link", stat.S_IFIFO: "a pipe", stat.S_IFREG: "too large"}


def _not_plain(path: Path, mode: int) -> RunError:
    text = "{path} is {kind}: expected a plain file or folder of its own. Delete it, or name another folder."
    return RunError("file-not-plain", text, path=str(path), kind=_KINDS.get(stat.S_IFMT(mode), "a device"))


def hold(folder: Path, *names: str) -> BinaryIO:
    """The open lock file of `folder`; the lock is released when it is closed or the process ends.

    Checks `names`, which only its holder writes, by `check_inside`, and removes what a killed `put_inside` of
    them left. Raises `RunError` while another process has the lock.
    """
    lock = os.fdopen(open_inside(folder / "lock", os.O_RDWR | os.O_APPEND | os.O_CREAT), "a+b", buffering=0)
    try:
        # The kernel releases it when the process ends for any reason, so there are no stale locks.
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        check_inside(folder, *names, "lock")
        remove_temporaries(folder, *names)
    except BlockingIOError:
        lock.seek(0)
        holder = lock.read(200).decode(errors="replace").strip() or "another process"
        lock.close()
        text = "{path} is in use by {holder}: wait for it, or name another folder."
        raise RunError("folder-in-use", text, path=str(folder), holder=holder) from None
    except BaseException:
        lock.close()
        raise
    with contextlib.suppress(OSError):  # if the disk is full, writing the folder's files will fail too
        lock.truncate(0)
        lock.write(f"process {os.getpid()} on {socket.gethostname()}".encode())
    return lock


@contextlib.contextmanager
def alone(path: Path, waiting: Callable[[], None]) -> Iterator[None]:
    """A context with the lock file `path`, which is released when the process ends for any reason.

    *Arguments:* `waiting`: called before it waits for another process.
    """
    with open(path, "a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waiting()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def remove_temporaries(folder: Path, *names: str) -> None:
    """Removes what a killed `put_inside` of files called `names` left."""
    for left in (path for name in names for path in folder.glob(f".{name}.????????.part")):
        left.unlink()


# ---- JSON values of known types


class Misfit(ValueError):
    """A JSON value is not of its type.

    *Attributes:* `code`: "field-missing", "field-type" or "runs"; `facts`: the `field`, and but for a missing
    one its `value` and the types `expected`.
    """

    def __init__(self, code: str, field: str, value: Any = None, expected: Sequence[str] = ()):
        self.code = code
        self.facts: dict[str, Any] = {"field": field}
        if code != "field-missing":
            self.facts |= {"value": json.dumps(value)[:60], "expected": list(expected)}
        super().__init__(" ".join(map(str, (code, *self.facts.values()))))


def typed(kind: Any, value: Any, field: str = "") -> Any:
    """The JSON value `value` as a `kind`: a dataclass, of whose fields those with a default may be missing, a
    mapping, a tuple of numbers, or a scalar. `float` is any finite number. Raises `Misfit`."""
    inside = get_args(kind)
    if is_dataclass(kind):
        given, hints = typed(dict, value, field), get_type_hints(kind)
        values = {}
        for one in fields(kind):
            path = f"{field}.{one.name}".removeprefix(".")
            if one.name in given:
                values[one.name] = typed(hints[one.name], given[one.name], path)
            elif one.default is MISSING and one.default_factory is MISSING:
                raise Misfit("field-missing", path)
        return kind(**values)  # type: ignore[operator]
    if get_origin(kind) in (dict, Mapping):
        return {n: typed(inside[1], item, f"{field}.{n}") for n, item in typed(dict, value, field).items()}
    if get_origin(kind) is tuple:
        if not typed(list, value, field) or not all(map(known, value)):
            raise Misfit("runs", field, value)
        return tuple(value)
    kinds = [get_origin(one) or one for one in inside or (kind,)]
    kinds = [dict if one is Mapping else one for one in kinds]
    # bool is an int to Python, and not to JSON
    if (
        kind is Any
        or (float in kinds and known(value))
        or (type(value) in kinds and type(value) is not float)
    ):
        return value
    raise Misfit("field-type", field, value, [_JSON[one] for one in kinds])


_JSON = {str: "string", int: "integer", float: "number", bool: "boolean", dict: "object", list: "array"}
_JSON[type(None)] = "null"


# ---- messages of protobuf


@functools.cache
def message_class(package: str, schema: str, name: str) -> Any:
    """The class of the message `name`, from `schema`, a `FileDescriptorProto` as text in a folder of the
    package."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format

    text, pool = resources(package).joinpath(schema).read_text("utf-8"), descriptor_pool.DescriptorPool()
    pool.Add(text_format.Parse(text, descriptor_pb2.FileDescriptorProto()))
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(name))
