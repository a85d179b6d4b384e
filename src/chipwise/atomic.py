"""Files written whole or not at all."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from .errors import DataError


def replace_text(path: str | os.PathLike, text: str, what: str, option: str) -> Path:
    """`replace_bytes` of `text` in UTF-8."""
    return replace_bytes(path, text.encode("utf-8"), what, option)


def replace_bytes(path: str | os.PathLike, content: bytes, what: str, option: str) -> Path:
    """Writes `content` to `path` under a temporary name and renames it, making parent folders.

    *Arguments:*
    - `what`: what is written, such as "the page", for the error.
    - `option`: what chooses another place, such as "--html".

    Returns the path. Raises `DataError` where it cannot be written; what stood there is then untouched.
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
        reason = error.strerror or error
        raise DataError("file-unwritable", path=to, what=what, reason=reason, option=option) from None
    return to
