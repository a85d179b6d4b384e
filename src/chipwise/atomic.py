"""Files written whole or not at all, read without waiting for ever, and JSON values read with their types."""

from __future__ import annotations

import errno
import json
import os
import stat
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any, BinaryIO, get_args, get_origin, get_type_hints

from .errors import DataError
from .words.figures import known

MOST_BYTES = 1 << 26  # of a settings or results file: a larger file is not one


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
        content = file.read(most + 1)
    if len(content) > most:
        raise OSError(errno.EFBIG, f"more than {most:,} bytes", str(path))
    return content


def replace_text(path: str | os.PathLike, text: str, code: str, **facts: Any) -> Path:
    """`replace_bytes` of `text` in UTF-8."""
    return replace_bytes(path, text.encode("utf-8"), code, **facts)


def replace_bytes(path: str | os.PathLike, content: bytes, code: str, **facts: Any) -> Path:
    """Writes `content` to `path` under a temporary name and renames it, making parent folders.

    Returns the path. Raises `DataError` where it cannot be written, with the `code` of what is written, such
    as "page-unwritable", the `path`, the `reason` and `facts`; what stood there is then untouched.
    """
    to = Path(path)
    temporary = None
    try:
        to.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=to.parent, prefix=f".{to.name}.")
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.chmod(temporary, 0o644)
        os.replace(temporary, to)
    except OSError as error:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)
        raise DataError(code, path=to, reason=error.strerror or str(error), **facts) from None
    return to


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
