"""`--draw TEXT`: of each test that is marked `drawn`, a tenth of its cases runs, or the `share` of its mark.

The corpora of hostile input, of kills and of documented pages take hours as a whole. A merge draws its part
by the commit's hash, so that merges draw different parts. `make test-all` runs all of them.
"""

from __future__ import annotations

import hashlib
import math
from collections import defaultdict

import pytest

from .clock import left_out

SHARE = 0.1  # of a test's cases, rounded up; few cases of one promise are marked `drawn(share=0.25)`


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--draw", metavar="TEXT", help="run a share of each corpus, drawn by this text")


def drawn(names: list[str], text: str, share: float = SHARE) -> set[str]:
    """The part of `names` that `text` draws: the same one on every machine and in every worker."""
    count = math.ceil(share * len(names))
    by_hash = sorted(names, key=lambda name: hashlib.sha256(f"{text} {name}".encode()).digest())
    return set(by_hash[:count])


@pytest.fixture
def draw(request: pytest.FixtureRequest) -> str | None:
    """The text by which a test that strikes at random draws a few of its strikes, `None` for all of them."""
    return request.config.getoption("draw")


@pytest.hookimpl(trylast=True)  # after `-m` has chosen
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    text = config.getoption("draw")
    if text is None or config.getoption("lf", False):  # what failed was drawn already
        return
    corpora: dict[tuple[str, float], list[str]] = defaultdict(list)
    for item in items:
        if mark := item.get_closest_marker("drawn"):
            share = mark.kwargs.get("share", SHARE)
            corpora[item.nodeid.partition("[")[0], share].append(item.nodeid)
    part = {name for (_, share), names in corpora.items() for name in drawn(names, text, share)}
    part.update(left_out(config.getoption("left_out")))  # drawn by an earlier merge, and still to do
    left = [i for i in items if i.get_closest_marker("drawn") and i.nodeid not in part]
    if left:
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if item not in set(left)]
