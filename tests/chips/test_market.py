"""Prices by cloud, region and kind of market."""

import datetime

import pytest

from chipwise.chips.market import Market
from chipwise.chips.prices import OLD_DAYS, load, read
from chipwise.errors import DataError
from refusals import refused

HEADER = "chip,chips,cloud,instance,region,usd_per_hour,spot_usd_per_hour,spot_region,includes,source,date\n"
BUNDLE = load()


def rows(*lines):
    return read(HEADER + "\n".join(lines), "mine.csv")


def test_clouds_are_called_by_any_of_their_names():
    for name in ("lambda", "shadeform", "LAMBDA"):
        kept = Market(clouds=(name,)).select(BUNDLE)
        assert kept and all("lambda" in p.cloud or "shadeform" in p.cloud for p in kept)
    two = {p.cloud for p in Market(clouds=("gcp", "aws")).select(BUNDLE)}
    assert two == {"gcp", "aws"}
    with refused(DataError, "price-cloud-unknown", cloud="gpc", hint="gcp"):
        Market(clouds=("gpc",)).select(BUNDLE)


def test_marketplaces_are_left_out_on_demand():
    kept = Market(marketplaces=False).select(BUNDLE)
    assert len(kept) < len(BUNDLE) == len(Market().select(BUNDLE))
    assert not any(p.market for p in kept) and {p.cloud for p in BUNDLE if p.market} == {"vast (marketplace)"}


def test_a_region_takes_its_own_price_of_a_row():
    table = rows(
        "a100,1,gcp,a2,us-central1,3.67,1.69,europe-west4,whole VM,page,2026-07-30",
        "a100,1,runpod,secure,all,1.39,,,whole VM,page,2026-07-30",
    )

    def prices(*regions):
        return [(p.usd_per_hour, p.spot_usd_per_hour) for p in Market(regions=regions).select(table)]

    assert prices() == [(3.67, 1.69), (1.39, None)]
    assert prices("us-") == [(3.67, None), (1.39, None)]
    assert prices("europe") == [(None, 1.69), (1.39, None)]
    with refused(DataError, "price-region-unknown", region="asia"):
        prices("asia")


def test_what_one_owns_is_never_left_out():
    text = "chip,chips,source,date,usd_per_hour,includes\nt4,1,receipt,2020-02-03,0.1,owned\n"
    (card,) = read(text, "mine.csv")
    assert Market(clouds=("owned",), regions=(), marketplaces=False).select([card]) == (card,)
    (aws,) = rows("t4,1,aws,g4,us-east-1,0.5,,,whole VM,page,2026-07-30")
    assert card in Market(clouds=("aws",), regions=("us",)).select([card, aws])


@pytest.mark.parametrize("days, old", [(OLD_DAYS - 1, False), (OLD_DAYS, False), (OLD_DAYS + 1, True)])
def test_a_price_is_old_after_ninety_days(days, old):
    (price,) = rows("t4,1,aws,g4,us-east-1,0.5,,,whole VM,page,2026-07-30")
    assert price.old(price.day + datetime.timedelta(days=days)) is old


def test_a_spot_price_has_the_day_it_was_read():
    date = "2026-07-20 (spot ~2026-01/02 inferred)"
    (price,) = rows(f"v100,1,aws,p3,us-east-1,3.06,0.53,us-west-2,whole VM,page,{date}")
    today = datetime.date(2026, 8, 1)
    assert not price.old(today) and price.old(today, spot=True)
