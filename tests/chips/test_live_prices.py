"""gpuhunt's own classes read catalogues that are files here, and Vast's answer that is stored here."""

import io
import json
import socket
import sys
import zipfile
from dataclasses import replace

import pytest
import requests

from chipwise.base.errors import DataError
from chipwise.chips import live_prices
from chipwise.chips.live_prices import CLOUDS, LIVE, prices
from chipwise.chips.prices import load, prices_for, text
from chipwise.chips.targets import parse
from refusals import refused

gpuhunt = pytest.importorskip("gpuhunt", reason="it installs a package `tests`: see `make test-prices`")
storage = pytest.importorskip("gpuhunt._internal.storage")
vastai = pytest.importorskip("gpuhunt.providers.vastai")

VERSION = "20261128-3"


def offer(instance, gpu, memory, price, *, number=1, spot=False, region="us-1", vendor="nvidia", **more):
    return gpuhunt.CatalogItem(
        provider="",
        instance_name=instance,
        location=region,
        price=price,
        cpu=8,
        memory=32.0,
        gpu_count=number,
        gpu_name=gpu,
        gpu_memory=memory,
        spot=spot,
        disk_size=None,
        gpu_vendor=gpuhunt.AcceleratorVendor(vendor),
        **more,
    )


LISTED = {
    "aws": [
        offer("g4dn.xlarge", "T4", 16.0, 0.526),
        offer("g4dn.xlarge", "T4", 16.0, 0.6, region="eu-1"),
        offer("g4dn.2xlarge", "T4", 16.0, 0.752),
        offer("g4dn.2xlarge", "T4", 16.0, 0.15, spot=True, region="eu-1"),
        offer("p4d.24xlarge", "A100", 40.0, 21.96, number=8),
        offer("p4de.24xlarge", "A100", 80.0, 27.45, number=8),
        offer("p4d.24xlarge", "A100", 80.0, 1.0, number=8),  # the name says 40 GB
        offer("p9.large", "H100", 80.0, 1.0),  # a family that is not declared
        offer("g6f.large", "L4", 3.0, 0.2),  # an eighth of one
    ],
    "azure": [offer("Standard_NC24ads_A100_v4", "A100", 80.0, 3.67)],
    "gcp": [
        offer("v5litepod-8", "v5litepod-8", 128.0, 9.6, vendor="google"),
        offer("v5litepod-8", "v5litepod-8", 128.0, 4.1, vendor="google", spot=True, region="eu-2"),
        offer("v3-2048", "v3-2048", 128.0, 2048.0, vendor="google"),
        offer("a3-megagpu-8g", "H100", 80.0, 92.9, number=8),
        offer("a3-megagpu-8g", "H100", 80.0, 40.0, number=8, flags=["gcp-dws-calendar-mode"]),
        offer("g4-standard-48", "RTXPRO6000", 96.0, 4.5, flags=["gcp-g4"]),  # the server's form
    ],
    "lambdalabs": [
        offer("gpu_1x_a100", "A100", 40.0, 1.29),  # its PCIe card, which is not in the catalogue
        offer("gpu_1x_gh200", "GH200", 96.0, 1.49, flags=["lambda-arm"]),
    ],
    "nebius": [
        offer("gpu-h100-sxm 1gpu-16vcpu-200gb", "H100", 80.0, 2.95),
        offer("gpu-l40s-a 1gpu-8vcpu-32gb", "L40S", 48.0, 1.55),
        offer(
            "gpu-l40s-a 1gpu-8vcpu-32gb",
            "L40S",
            48.0,
            1.55,
            spot=True,
            provider_data={"is_preemptible_flat_rate": True},
        ),
    ],
    "runpod": [
        offer("NVIDIA A100 80GB PCIe", "A100", 80.0, 1.64),
        offer("NVIDIA A100-SXM4-80GB", "A100", 80.0, 1.89),
        offer("NVIDIA GeForce RTX 3080", "RTX3080", 10.0, 0.17),
        offer("NVIDIA GeForce RTX 4090", "RTX4090", 24.0, 0.34, flags=["runpod-cluster"]),
        offer("NVIDIA GeForce RTX 4090", "RTX4090", 24.0, 0.69),
        offer("AMD Instinct MI300X OAM", "MI300X", 192.0, 2.49, vendor="amd"),
    ],
}


def at_vast(name, ram, price, number=1, bid=None):
    return {
        "id": 7,
        "gpu_name": name,
        "gpu_ram": ram * 1024,
        "num_gpus": number,
        "dph_base": price,
        "min_bid": bid,
        "cpu_cores": 64,
        "cpu_cores_effective": 16.0,
        "cpu_ram": 128_000,
        "disk_space": 2000.0,
        "storage_cost": 0.36,  # USD for a GB and month: 5 cents an hour for 100 GB
        "geolocation": "Sweden, SE",
        "rentable": True,
        "rented": False,
    }


VAST = [
    at_vast("A100 SXM4", 40, 0.76),
    at_vast("A100 SXM4", 80, 0.99, bid=0.5),
    at_vast("A100 PCIE", 80, 0.87),
    at_vast("RTX 4090", 24, 0.31),
    at_vast("RTX 4090", 24, 0.29),
    at_vast("RTX 4090", 24, 2.2, number=8),
    at_vast("RTX 4070S Ti", 16, 0.12),
]


def publish(folder, listed):
    """The catalogues as gpuhunt publishes them, for its own reader."""
    for cloud, offers in listed.items():
        to = folder / cloud / VERSION
        to.mkdir(parents=True)
        (folder / cloud / "version").write_text(VERSION)
        storage.dump(offers, str(to / "catalog.csv"))
        with zipfile.ZipFile(to / "catalog.zip", "w") as archive:
            archive.write(to / "catalog.csv", f"{cloud}.csv")


def answer(url, json, timeout):
    assert json["limit"] == 3000  # machines of eight are the last by price
    assert json["disk_space"] == {"gte": 100}
    found = [one for one in VAST if one["gpu_name"] == json["gpu_name"]["eq"]]
    response = requests.Response()
    response.status_code, response.raw = 200, io.BytesIO(dumped({"offers": found}))
    return response


def dumped(value):
    return json.dumps(value).encode()


def cut_off(*_, **__):
    raise requests.ConnectionError("no route")


@pytest.fixture
def published(tmp_path, monkeypatch):
    def make(listed=LISTED, post=answer):
        publish(tmp_path / "catalogues", listed)
        monkeypatch.setenv("GPUHUNT_CATALOG_URL", (tmp_path / "catalogues").as_uri())
        monkeypatch.setattr(vastai.requests, "post", post)

    return make


def by_cloud(read):
    return {
        cloud: {
            (p.chip, p.chips): (p.usd_per_hour, p.spot_usd_per_hour) for p in read.prices if p.cloud == cloud
        }
        for cloud in CLOUDS.values()
    }


def test_every_offer_is_joined_by_a_declared_name_or_left_out(published):
    published()
    read = prices(LIVE)
    assert by_cloud(read) == {
        "aws": {
            ("T4", 1): (0.526, 0.15),
            ("A100-SXM4-40GB", 8): (21.96, None),
            ("A100-SXM4-80GB", 8): (27.45, None),
        },
        "azure": {("A100-PCIe-80GB", 1): (3.67, None)},
        "gcp": {("TPU v5e", 8): (9.6, 4.1), ("H100-SXM5-80GB", 8): (92.9, None)},
        "lambda": {("GH200 (96 GB)", 1): (1.49, None)},
        "nebius": {("H100-SXM5-80GB", 1): (2.95, None), ("L40S", 1): (1.55, None)},
        "runpod": {
            ("A100-PCIe-80GB", 1): (1.64, None),
            ("A100-SXM4-80GB", 1): (1.89, None),
            ("RTX 3080 (10 GB)", 1): (0.17, None),
            ("RTX 4090", 1): (0.69, None),
        },
        "vast (marketplace)": {
            ("A100-SXM4-40GB", 1): (0.81, None),
            ("A100-SXM4-80GB", 1): (1.04, 0.55),
            ("A100-PCIe-80GB", 1): (0.92, None),
            ("RTX 4090", 1): (0.34, None),
            ("RTX 4090", 8): (2.25, None),
            ("RTX 4070 Ti SUPER", 1): (0.17, None),
        },
    }
    said, left = read.said
    assert (said.code, said["prices"]) == ("prices-live", len(read.prices))
    assert (
        said["clouds"][:2] == ["aws 2026-11-28 (3)", "azure 2026-11-28 (1)"] and "(6)" in said["clouds"][-1]
    )
    assert (left.code, left["offers"]) == ("prices-live-unknown", 7)
    names = {"A100", "H100", "L4", "v3-2048", "RTXPRO6000", "AMD Instinct MI300X OAM"}
    assert set(left["names"]) == names and str(left)


def test_a_price_says_its_day_its_source_and_both_places(published):
    published()
    (t4,) = [p for p in prices(LIVE).prices if p.chip == "T4"]
    assert t4.date == "2026-11-28" and t4.source == f"gpuhunt {gpuhunt.version.__version__}, aws {VERSION}"
    assert (t4.instance, t4.region) == ("g4dn.xlarge", "us-1")
    assert (t4.spot_region, t4.note) == ("eu-1", "spot: g4dn.2xlarge")
    at_vast = [p for p in prices(LIVE).prices if p.cloud.startswith("vast")]
    assert not t4.market and all(p.market and p.note == "with 100 GB of disk" for p in at_vast)


def test_a_snapshot_reads_back_and_prices_a_target(published, tmp_path):
    published()
    read = prices(LIVE).prices
    (tmp_path / "today.csv").write_text(text(read))
    assert load(tmp_path / "today.csv") == read == prices(tmp_path / "today.csv").prices
    (slice_,) = prices_for(parse("v5e-16"), read)
    assert (slice_.usd_per_hour, slice_.spot_usd_per_hour) == (19.2, 8.2)  # both in proportion
    (tmp_path / "bundle.csv").write_text(text(load()))
    assert load(tmp_path / "bundle.csv") == load()


def test_a_cloud_that_cannot_be_read_is_named(published):
    published({cloud: LISTED[cloud] for cloud in ("aws", "gcp")}, cut_off)
    read = prices(LIVE)
    assert {p.cloud for p in read.prices} == {"aws", "gcp"}
    missing = ["azure", "lambda", "nebius", "runpod", "vast (marketplace)"]
    told = read.said[-1]
    assert (told.code, told["clouds"]) == ("prices-live-failed", missing)
    assert all(map(str.startswith, told["reasons"], missing)) and "vast (marketplace) (no route)" in str(told)


@pytest.mark.parametrize("field", ["storage_cost", "cpu_cores_effective", "gpu_ram", "disk_space"])
def test_a_field_of_vast_that_is_null_leaves_the_other_clouds(published, monkeypatch, field):
    published()
    monkeypatch.setattr(sys.modules[__name__], "VAST", [{**VAST[0], field: None}, *VAST[1:]])
    read = prices(LIVE)
    assert {p.cloud for p in read.prices} == {*CLOUDS.values()} - {"vast (marketplace)"}
    assert read.said[-1]["clouds"] == ["vast (marketplace)"]


def test_without_a_network_it_is_one_refusal(published, capfd):
    published({}, cut_off)
    usual = socket.getdefaulttimeout()
    with refused(DataError, "prices-live-none", snapshot=max(p.day for p in load())) as caught:
        prices(LIVE)
    assert "No such file" in caught.value.facts["why"] and socket.getdefaulttimeout() == usual
    assert capfd.readouterr() == ("", "")  # gpuhunt logs a traceback for each cloud


INSTANCES = {
    ("aws", "a100"): "p4d.24xlarge",
    ("aws", "a100-80gb"): "p4de.24xlarge",
    ("aws", "h100"): "p5.48xlarge",
    ("aws", "v100"): "p3.2xlarge",
    ("aws", "v100-32gb"): "p3dn.24xlarge",
    ("azure", "a100"): "Standard_ND96asr_v4",
    ("azure", "a100-80gb"): "Standard_ND96amsr_A100_v4",
    ("azure", "a100-pcie"): "Standard_NC24ads_A100_v4",
    ("azure", "h100"): "Standard_ND96isr_H100_v5",
    ("azure", "v100-pcie"): "Standard_NC6s_v3",
    ("azure", "v100-32gb"): "Standard_ND40rs_v2",
    ("gcp", "a100"): "a2-highgpu-1g",
    ("gcp", "a100-80gb"): "a2-ultragpu-1g",
    ("gcp", "h100"): "a3-highgpu-8g",
    ("gcp", "p100"): "n1-standard-8",
    ("gcp", "v100"): "n1-standard-8",
    ("gcp", ""): "g4-standard-48",
    ("lambdalabs", "a100"): "gpu_1x_a100_sxm4",
    ("lambdalabs", "a100-80gb"): "gpu_8x_a100_80gb_sxm4",
    ("lambdalabs", "h100"): "gpu_8x_h100_sxm5",
    ("lambdalabs", "h100-pcie"): "gpu_1x_h100_pcie",
    ("lambdalabs", "v100"): "gpu_8x_v100",
    ("nebius", "h100"): "gpu-h100-sxm 1gpu-16vcpu-200gb",
}
"""An instance that each cloud rents, by the chip that it has."""


@pytest.mark.parametrize("row", live_prices._NAMES, ids=lambda row: "-".join(filter(None, row.values())))
def test_every_declared_name_is_one_of_a_chip(row):
    assert row["cloud"] in CLOUDS and row["gpu"] and set(row) == {"cloud", "gpu", "instance", "chip"}
    chip = live_prices.called(row["chip"]) if row["chip"] else ()
    assert len(chip) == bool(row["chip"])
    made = offer("an instance of another name", row["gpu"], chip[0].memory_GB if chip else 1.0, 1.0)
    if row["instance"]:
        assert live_prices._chips(row["cloud"], row["gpu"], made) is None
        sold = replace(made, instance_name=INSTANCES[row["cloud"], row["chip"]])
        assert live_prices._chips(row["cloud"], row["gpu"], sold) == ((chip[0].name, 1) if chip else None)
    else:
        assert live_prices._chips(row["cloud"], row["gpu"], made) == (chip[0].name, 1)
        assert live_prices._chips(row["cloud"], row["gpu"], replace(made, gpu_memory=None)) is None
