import datetime
from dataclasses import replace

import pytest

from chipwise.base.errors import DataError
from chipwise.base.facts import fact
from chipwise.chips.catalogue import CHIPS, named
from chipwise.chips.prices import INCLUDES, OLD_DAYS, cheapest, load, prices_for, read
from chipwise.chips.targets import names, parse
from refusals import refused

BUNDLE = load()
HEADER = (
    "chip,chips,cloud,instance,region,usd_per_hour,spot_usd_per_hour,spot_region,includes,source,date,note"
)


def reckoned(price):
    return {how.code for how in price.reckoned}


def test_every_bundled_price_has_a_chip_a_date_and_a_source():
    known = {chip.name for chip in CHIPS}
    assert len(BUNDLE) > 70
    for price in BUNDLE:
        assert price.chip in known and price.source and price.day.year == 2026
        assert price.includes in INCLUDES and price.machines == 1
        for usd in (price.usd_per_hour, price.spot_usd_per_hour):
            assert usd is None or 0.05 < usd / price.chips < 35, price
        if price.usd_per_hour and price.spot_usd_per_hour:
            assert price.spot_usd_per_hour < price.usd_per_hour, price


def test_traps_of_the_sources_are_not_in_the_bundle():
    per_gpu = {p.cloud: p.usd_per_hour / p.chips for p in prices_for(parse("h100:8"), BUNDLE)}
    assert per_gpu["gcp"] > 10  # not the 4.20 of another offer
    assert not [p for p in BUNDLE if p.usd_per_hour == 700 or p.usd_per_hour == 0 or p.spot_usd_per_hour == 0]
    assert all(p.spot_usd_per_hour is None for p in BUNDLE if p.cloud.startswith(("vast", "runpod")))
    assert len({(p.chip, p.chips, p.cloud, p.instance, p.date) for p in BUNDLE}) == len(BUNDLE)


def test_an_accelerator_alone_says_so():
    alone = {(p.chip, p.cloud) for p in BUNDLE if p.includes == "accelerator alone"}
    assert {("T4", "gcp"), ("V100-SXM2", "gcp"), ("H200-SXM-141GB", "gcp")} <= alone
    slices = [p for p in BUNDLE if p.chip.startswith("TPU")]
    assert slices and all(p.includes == "slice with its host" for p in slices)


def test_every_target_has_prices_of_its_own_size_or_says_how_it_was_reckoned():
    for name in names():
        target = parse(name)
        for price in prices_for(target, BUNDLE):
            assert price.chips == target.chips and price.chip == target.chip.name, name
            listed = any(p.chips == price.chips and p.instance == price.instance for p in BUNDLE)
            assert listed or reckoned(price) & {"price-in-proportion", "price-of-machines"}, name


def test_slices_are_priced_in_proportion_to_the_nearest_size():
    [price] = prices_for(parse("v5e-16"), BUNDLE)
    assert price.usd_per_hour == pytest.approx(19.2)
    assert price.spot_usd_per_hour == pytest.approx(16 * 0.24493, rel=1e-3)
    assert price.reckoned == (fact("price-in-proportion", instance="v5litepod-8"),) and price.machines == 1
    # Boards of v2 cost 1.125 a chip, larger slices 1.5.
    assert prices_for(parse("v2-128"), BUNDLE)[0].usd_per_hour == 96
    assert prices_for(parse("v2-8"), BUNDLE)[0].usd_per_hour == 4.5


def test_one_core_costs_what_it_is_rented_as():
    [price] = prices_for(parse("v2-1"), BUNDLE)
    assert (price.chips, price.usd_per_hour) == (4, 4.5)
    assert price.reckoned == (fact("price-of-the-whole", whole="v2-8", target="v2-1"),)


def test_gpus_of_several_machines_are_an_estimate():
    prices = prices_for(parse("t4:4"), BUNDLE)
    assert {p.machines for p in prices} == {4}
    assert all(p.reckoned == (fact("price-of-machines", machines=4),) for p in prices)
    assert min(p.usd_per_hour for p in prices if p.has_host) == pytest.approx(4 * 0.526)
    hosts = cheapest(prices_for(parse("h100:16"), BUNDLE))
    assert (hosts.machines, hosts.usd_per_hour) == (2, pytest.approx(2 * 31.92))


def test_a_part_of_a_machine_has_no_price():
    row = f"{HEADER}\na100,8,aws,p4d,us,21.9,,,whole VM,page,2026-07-20,\n"
    assert prices_for(parse("a100"), read(row, "mine.csv")) == []
    assert prices_for(parse("a100:8"), read(row, "mine.csv"))[0].usd_per_hour == 21.9
    assert prices_for(parse("tpu7x-8"), BUNDLE) == []  # none was found


def test_cheapest_buys_the_whole_thing():
    prices = prices_for(parse("v100"), BUNDLE)
    assert cheapest(prices).usd_per_hour == 0.1381
    assert cheapest(prices, spot=True).usd_per_hour == 3.06  # of those with a host and a spot price
    h100s = prices_for(parse("h100:8"), BUNDLE)
    assert any(p.usd_per_hour < 15 for p in h100s)  # eight separate machines
    assert cheapest(h100s).usd_per_hour == 31.92 and cheapest(h100s).machines == 1
    alone = [p for p in prices if not p.has_host]
    assert cheapest(alone) is alone[0] and cheapest([]) is None
    assert cheapest([replace(alone[0], usd_per_hour=None)]) is None


def test_a_users_file(tmp_path):
    file = tmp_path / "mine.csv"
    file.write_text(
        "chip,chips,usd_per_hour,includes,source,date\n"
        "H100_80GB,8,20,whole VM,invoice,2026-09-01\n"
        "trillium,8,,whole VM,invoice,2026-09-01\n".replace("trillium,8,", "trillium,8,3"),
        encoding="utf-8-sig",
    )
    h100, trillium = load(file)
    assert (h100.chip, h100.chips, h100.usd_per_hour) == ("H100-SXM5-80GB", 8, 20.0)
    assert trillium.chip == named("v6e").name and trillium.cloud == trillium.note == ""


def test_owned_hardware_by_the_hour():
    text = "chip,chips,source,date,usd_per_hour,includes\nrtx-4090,2,receipt,2026-02-03,0.8,owned\n"
    (rig,) = read(text, "mine.csv")
    assert rig.owned and rig.has_host and rig.cloud == "owned" and rig.usd_per_hour == 0.8
    # Neither halved nor doubled.
    assert prices_for(parse("rtx-4090"), [rig]) == prices_for(parse("rtx-4090:4"), [rig]) == []
    assert prices_for(parse("rtx-4090:2"), [rig]) == [rig]


GOOD = {"chip": "t4", "chips": "1", "usd_per_hour": "0.5", "includes": "whole VM", "source": "x",
        "date": "2026-01-02"}  # fmt: skip


@pytest.mark.parametrize(
    ("row", "line", "code", "facts"),
    [
        (GOOD | {"chip": "a1000"}, 2, "price-chip-unknown", {"chip": "a1000", "hint": "a100"}),
        (
            GOOD | {"chip": "rtx-3080"},
            2,
            "price-chip-ambiguous",
            {"names": ["rtx-3080-10gb", "rtx-3080-12gb"]},
        ),
        (GOOD | {"chip": ""}, 2, "price-chip-unknown", {"chip": ""}),
        (GOOD | {"chips": "0"}, 2, "price-cell", {"column": "chips", "value": "0"}),
        (GOOD | {"chips": "1.5"}, 2, "price-cell", {"column": "chips", "value": "1.5"}),
        (GOOD | {"usd_per_hour": "0"}, 2, "price-cell", {"column": "usd_per_hour", "value": "0"}),
        (GOOD | {"usd_per_hour": "cheap"}, 2, "price-cell", {"value": "cheap"}),
        (GOOD | {"usd_per_hour": "nan"}, 2, "price-cell", {"value": "nan"}),
        (GOOD | {"usd_per_hour": ""}, 2, "price-missing", {}),
        (GOOD | {"date": ""}, 2, "price-cell", {"column": "date", "value": ""}),
        (GOOD | {"date": "July"}, 2, "price-cell", {"value": "July"}),
        (GOOD | {"date": "2026-02-30"}, 2, "price-cell", {"value": "2026-02-30"}),
        (GOOD | {"date": "2026-07-32"}, 2, "price-cell", {"value": "2026-07-32"}),
        (GOOD | {"date": "2026-07-20 (spot 2026-06-31)"}, 2, "price-cell", {"column": "date"}),
        (GOOD | {"source": '"' + "x" * 140_000}, 2, "price-csv", {}),
        (GOOD | {"source": ""}, 2, "price-cell", {"column": "source"}),
        (GOOD | {"includes": "all"}, 2, "price-cell", {"column": "includes", "value": "all"}),
        (GOOD | {"usd_per_huor": "1"}, 1, "price-column-unknown", {"hint": "usd_per_hour"}),
        ({k: v for k, v in GOOD.items() if k != "date"}, 1, "price-column-missing", {"column": "date"}),
        (
            {k: v for k, v in GOOD.items() if k != "usd_per_hour"},
            1,
            "price-column-missing",
            {"column": "usd_per_hour"},
        ),
        (GOOD | {"source": "a,b,c"}, 2, "price-cells", {}),
    ],
)
def test_a_bad_file_names_the_line(row, line, code, facts):
    text = f"{','.join(row)}\n{','.join(row.values())}\n"
    with refused(DataError, code, file="mine.csv", line=line, **facts):
        read(text, "mine.csv")


def test_files_that_are_no_prices(tmp_path):
    with refused(DataError, "prices-unreadable", path=str(tmp_path / "none.csv")):
        load(tmp_path / "none.csv")
    with refused(DataError, "prices-unreadable"):
        load(tmp_path)
    (tmp_path / "bytes.csv").write_bytes(b"\xff\xfe\x00chip")
    with refused(DataError, "prices-unreadable"):
        load(tmp_path / "bytes.csv")
    (tmp_path / "empty.csv").write_text("")
    with refused(DataError, "price-column-missing", column="chip"):
        load(tmp_path / "empty.csv")


@pytest.mark.parametrize("days, old", [(OLD_DAYS - 1, False), (OLD_DAYS, False), (OLD_DAYS + 1, True)])
def test_a_price_is_old_after_ninety_days(days, old):
    (price,) = read(f"{HEADER}\nt4,1,aws,g4,us-east-1,0.5,,,whole VM,page,2026-07-30", "mine.csv")
    assert price.old(price.day + datetime.timedelta(days=days)) is old


def test_a_spot_price_has_the_day_it_was_read():
    date = "2026-07-20 (spot ~2026-01/02 inferred)"
    (price,) = read(f"{HEADER}\nv100,1,aws,p3,us-east-1,3.06,0.53,us-west-2,whole VM,page,{date}", "mine.csv")
    today = datetime.date(2026, 8, 1)
    assert not price.old(today) and price.old(today, spot=True)
