"""What `--prices live` says where gpuhunt is not installed."""

import sys

from chipwise.base.errors import DataError
from chipwise.chips.live_prices import LIVE, prices
from chipwise.chips.prices import load
from refusals import refused


def test_without_gpuhunt_the_error_says_what_to_type(monkeypatch):
    monkeypatch.setitem(sys.modules, "gpuhunt", None)
    with refused(DataError, "prices-live-library") as caught:
        prices(LIVE)
    assert "pip install 'chipwise[prices]'" in str(caught.value)
    assert prices().prices == load() and prices().said == ()
