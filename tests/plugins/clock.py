"""`--stop-at SECONDS` starts no test after that time, `--left-out FILE` remembers which ones.

A test that is not started is a skip with the reason `LEFT_OUT`. The next call with the same file begins with
these tests, so a slow machine runs everything in several merges.
"""

from __future__ import annotations

import time
from collections.abc import Generator
from pathlib import Path

import pytest

LEFT_OUT = "left out: no time"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--stop-at", type=float, metavar="SECONDS", help="start no test after this time (since 1970)"
    )
    parser.addoption(
        "--left-out", type=Path, metavar="FILE", help="begin with the tests in FILE, and write those left out"
    )


def left_out(file: Path | None) -> list[str]:
    """The node ids in `file`, which need not exist."""
    return file.read_text(encoding="utf-8").splitlines() if file and file.is_file() else []


@pytest.hookimpl(wrapper=True)  # after the order that the suite chooses
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> Generator[None, None, None]:
    yield
    before = set(left_out(config.getoption("left_out")))
    items.sort(key=lambda item: item.nodeid not in before)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    stop_at = item.config.getoption("stop_at")
    if stop_at is not None and time.time() > stop_at:
        pytest.skip(LEFT_OUT)


class Remember:
    """Writes what was left out when the session ends, in the process that hears of every test."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.names = dict.fromkeys(left_out(file))
        self.collected: set[str] = set()

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.collected.update(item.nodeid for item in session.items)

    @pytest.hookimpl(optionalhook=True)  # of xdist, whose workers collect
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        self.collected.update(ids)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.skipped and LEFT_OUT in str(report.longrepr):
            self.names[report.nodeid] = None
        elif report.when == "call":
            self.names.pop(report.nodeid, None)

    def _is_there(self, name: str, files: set[str]) -> bool:
        """Whether a test still exists: its file was not collected, or was collected with it."""
        return name in self.collected or name.partition("::")[0] not in files

    def pytest_sessionfinish(self) -> None:
        files = {name.partition("::")[0] for name in self.collected}
        names = [name for name in self.names if self._is_there(name, files)]
        self.file.parent.mkdir(parents=True, exist_ok=True)
        self.file.write_text("".join(f"{name}\n" for name in names), encoding="utf-8")


def pytest_configure(config: pytest.Config) -> None:
    file = config.getoption("left_out")
    if file is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Remember(file), "remember-left-out")
