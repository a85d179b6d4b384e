"""Sums over several hosts, by the links as they lie."""

import pytest

from chipwise.chips.targets import parse
from chipwise.compile.time_links import (
    HOP_SECONDS,
    LINK_EFFICIENCY,
    NETWORK_GBps,
    ONE_CARD_GBps,
    all_reduce_seconds,
    axes,
    sum_seconds,
)

GIB = float(1 << 30)


@pytest.mark.parametrize("name", ["v5e-8", "v2-8", "tpu7x-8", "h100:8", "a100", "t4:4"])
def test_within_a_host_nothing_is_new(name):
    target = parse(name)
    old = all_reduce_seconds(GIB, target.devices, target.chip)
    assert sum_seconds(GIB, target, target.devices) == old


def test_a_sum_in_any_order_is_as_before():
    target = parse("h100:64")
    assert sum_seconds(GIB, target, 64, exact=False) == all_reduce_seconds(GIB, 64, target.chip)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("v5e-64", [(8, False), (8, False)]),
        ("v5e-128", [(8, False), (16, True)]),
        ("v6e-256", [(16, True), (16, True)]),
        ("v5p-32", [(2, False), (2, False), (4, False)]),
        ("v5p-128", [(4, True)] * 3),
        ("tpu7x-512", [(4, True), (8, True), (8, True)]),
        ("v2-256", [(8, False), (16, False)]),
        ("v2-512", [(16, True), (16, True)]),
        ("v3-512", [(16, False), (16, False)]),
    ],
)
def test_axes_are_closed_where_google_closes_them(name, expected):
    assert axes(parse(name)) == expected


def test_a_mesh_is_crossed_at_its_middle():
    target = parse("v5e-64")  # 8x8: 100 GB/s a port, both ways
    link = 50e9 * LINK_EFFICIENCY["ICI"]
    hops = 2 * 63 * HOP_SECONDS["ICI"]
    # One way 32 chips send half of theirs over 8 links: two devices' bytes a link. A corner gathers over two.
    assert sum_seconds(GIB, target, 64) == pytest.approx(GIB * 63 / 64 * (2 + 1 / 2) / link + hops)
    ring = sum_seconds(GIB, parse("v5p-128"), 64)  # 4x4x4, closed: twice the links in every way
    link = 100e9 * LINK_EFFICIENCY["ICI"]
    assert ring == pytest.approx(GIB * 63 / 64 * (1 / 2 + 1 / 6) / link + hops)


def test_two_devices_a_chip_share_its_links():
    target = parse("v3-32")  # 4x4 chips of two
    link = 656e9 / 2 / 4 / 2 * LINK_EFFICIENCY["ICI"]
    expected = GIB * 31 / 32 * (4 / 4 + 1 / 2) / link + 62 * HOP_SECONDS["ICI"]
    assert sum_seconds(GIB, target, 32) == pytest.approx(expected)


def test_what_leaves_a_host_goes_through_a_card_for_each_gpu():
    target = parse("h100:64")
    card = NETWORK_GBps["NVLink4"] * 1e9 * LINK_EFFICIENCY["NVLink"]
    least = GIB * 56 / 64 / card  # the exchange alone
    found = sum_seconds(GIB, target, 64)
    assert least < found < 1.3 * least
    ring = all_reduce_seconds(GIB, 64, target.chip)  # in any order: added within the host first
    assert 2 * GIB * 63 / 64 / (8 * card) < ring < found / 3
    assert sum_seconds(GIB, parse("h100:16"), 16) < found  # less leaves a host


def test_groups_of_whole_hosts_meet_over_the_network():
    card = NETWORK_GBps["NVLink4"] * 1e9 * LINK_EFFICIENCY["NVLink"]
    assert sum_seconds(GIB, parse("h100:16"), 2, shards=8) == pytest.approx(GIB / card, rel=0.01)
    inside = sum_seconds(GIB, parse("h100:16"), 2, shards=4)  # two groups, on one host
    assert inside == sum_seconds(GIB, parse("h100:8"), 2)


def test_without_a_card_each_the_host_shares_one():
    slow, fast = (sum_seconds(GIB, parse(name), 16) for name in ("t4:16", "v100:16"))
    assert slow > 2 * fast


def test_a_rack_that_nvlink_joins_needs_no_network():
    rack, hosts = parse("gb200:8"), parse("b200:16")
    assert sum_seconds(GIB, rack, 8) < all_reduce_seconds(GIB, 8, rack.chip) / 4
    assert sum_seconds(GIB, rack, 8) < sum_seconds(GIB, hosts, 16) / 5


def test_groups_share_the_one_card_of_their_host():
    """Two devices a group: each host's card carries two sums at once, in any order too."""
    card = ONE_CARD_GBps * 1e9 * LINK_EFFICIENCY["PCIe"]
    found = sum_seconds(GIB, parse("t4:16"), 8, exact=False, shards=2)
    assert found == pytest.approx(2 * GIB * 7 / 8 / (card / 2), rel=0.01)
