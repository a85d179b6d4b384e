"""Fetches published files into the user's cache, once, with checksums and a progress bar."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from ..errors import DataError
from .cache import home


def fetch(name: str, url: str, files: Mapping[str, str]) -> list[Path]:
    """The local paths of `files` (file name to MD5) found under `url`, downloaded if not cached.

    `name` is how messages call the data set. A file appears in the cache only when its checksum is
    right, so an interrupted download leaves nothing behind that looks whole.

    Raises `DataError`, one line, without network, for a wrong checksum, or a cache that cannot be
    written; it names the URL, the files and `--data DIR`, which takes their place.
    """
    import pooch
    import requests

    pooch.get_logger().setLevel(logging.WARNING)  # it announces each download; the bar does too
    cache = home()
    paths = []
    for file, md5 in files.items():
        bar = _Bar(file)
        downloader = pooch.HTTPDownloader(progressbar=bar, timeout=30)
        try:
            got = pooch.retrieve(
                url + file, known_hash=f"md5:{md5}", fname=file, path=cache, downloader=downloader
            )
        except (requests.RequestException, OSError, ValueError) as error:
            # ValueError is pooch's for a wrong checksum
            raise DataError(
                f"Cannot get {name}: {url + file}: {_reason(error)}. Without network, put "
                f"{', '.join(files)} into a folder DIR and give --data DIR (or set CHIPWISE_DATA=DIR)."
            ) from error
        finally:
            bar.close()
        paths.append(Path(got))
    return paths


def _reason(error: Exception) -> str:
    import requests

    if isinstance(error, requests.Timeout):
        return "no answer in 30 s"
    if isinstance(error, requests.ConnectionError):
        return "no connection"  # its own text is a paragraph of nested exceptions
    return " ".join(str(error).split())[:200]


class _Bar:
    """pooch's progress protocol (`total`, `update`, `reset`, `close`) drawn by rich.

    pooch's own bar needs tqdm, a dependency more.
    """

    def __init__(self, file: str):
        self.total = 0  # bytes, set by pooch before the first update
        columns = (TextColumn(file), BarColumn(), DownloadColumn(), TransferSpeedColumn())
        # stderr: a command's output may be piped
        self._progress = Progress(*columns, console=Console(stderr=True))
        self._task = self._progress.add_task(file, total=None)

    def update(self, size: int) -> None:
        self._progress.start()  # only files that come get a bar; starting twice does nothing
        self._progress.update(self._task, advance=size, total=self.total or None)

    def reset(self) -> None:
        """pooch calls this at the end, before a last `update(total)`."""
        self._progress.reset(self._task)

    def close(self) -> None:
        """Also after a failure, or the terminal would keep the bar's thread and hidden cursor."""
        if self._progress.live.is_started:
            self._progress.stop()
