"""SkyPilot's catalogue as a frame of its columns, and its package as a module that hands it out."""

import datetime
import importlib.util
import math
import sys
import types
from pathlib import Path

import pytest

from chipwise.chips.prices import load

TOOL = Path(__file__).parents[2] / "tools" / "skypilot_prices.py"
spec = importlib.util.spec_from_file_location("skypilot_prices", TOOL)
skypilot = importlib.util.module_from_spec(spec)
spec.loader.exec_module(skypilot)

NONE = math.nan


def row(name, count, region, price, spot=NONE, instance=NONE):
    return {
        "InstanceType": instance, "vCPUs": 8.0, "MemoryGiB": 32.0, "AcceleratorName": name,
        "AcceleratorCount": count, "GpuInfo": name, "Region": region, "AvailabilityZone": f"{region}-a",
        "Price": price, "SpotPrice": spot,
    }  # fmt: skip


GCP = [
    row(NONE, NONE, "us-central1", 0.38, 0.13, "n1-standard-8"),
    row("T4", 1.0, "us-central1", 0.35, 0.175),
    row("T4", 1.0, "us-central1", 0.35, 0.175),  # again, for another zone
    row("H100", 8.0, "us-central1", 78.4, 40.0),
    row("H100", 8.0, "us-west1", 33.6, 20.0),  # another offer than on demand
    row("H100", 8.0, "europe-west4", 86.2, 0.0),
    row("tpu-v6e-8", 1.0, "us-central1", 21.6, 4.35),
    row("tpu-v6e-8", 1.0, "us-south1", 700.0, 700.0),  # a placeholder
    row("tpu-v5litepod-4", 1.0, "us-central1", 4.8, 0.98),
    row("tpu-v3-2048", 1.0, "us-east1", 2048.0, 614.4),  # larger than plans go
    row("P4", 1.0, "us-central1", 0.6, 0.2),  # not in the catalogue
    row("L4", 0.5, "us-central1", 0.3, 0.1),  # half a GPU
]
OTHERS = {
    "aws": [
        row("V100", 1.0, "us-east-1", 3.06, 3.06, "p3.2xlarge"),  # no spot market
        row("H200", 8.0, "us-east-1", NONE, NONE, "p5e.48xlarge"),
        row("V100", 1.0, "us-west-2", 3.06, 0.53, "p3.2xlarge"),
    ],
    "azure": [row("V100", 1.0, "eastus", 3.06, NONE, "Standard_NC6s_v3")],
    "runpod": [row("A100-80GB", 1.0, "US", 1.39, 1.39, "1x_A100-80GB_SECURE")],
    "vast": [
        row("A100-80GB", 1.0, "SE", 0.87, 0.0, "1x-A100_PCIE"),
        row("RTX4090", 1.0, "SE", 0.4, 0.0, "1x-RTX_4090"),
        row("RTX4090", 1.0, "US", 0.9, 0.0, "1x-RTX_4090"),
    ],
}


class Frame:
    """What `read_catalog` gives: a data frame, of which only this is used."""

    def __init__(self, rows):
        self.rows = rows

    def to_dict(self, orient):
        assert orient == "records"
        return self.rows


@pytest.fixture
def sky(monkeypatch):
    """A package `sky` whose catalogue is the tables above; other clouds cannot be read."""
    asked = []

    def read_catalog(name, pull_frequency_hours=None):
        asked.append((name, pull_frequency_hours))
        print(f"Updating {name}")
        cloud = name.removesuffix("/vms.csv")
        if cloud not in {"gcp", *OTHERS}:
            raise ConnectionError("no network\nand more")
        return Frame(GCP if cloud == "gcp" else OTHERS[cloud])

    common = types.ModuleType("sky.catalog.common")
    common.read_catalog = read_catalog
    catalog = types.ModuleType("sky.catalog")
    catalog.common = common
    package = types.ModuleType("sky")
    package.catalog = catalog
    for module in (package, catalog, common):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return asked


def test_the_traps_stay_out():
    found = {(p.chip, p.chips): p for p in skypilot.clean("gcp", GCP, "2026-09-01")}
    assert set(found) == {("T4", 1), ("H100-SXM5-80GB", 8), ("TPU v6e (Trillium)", 8), ("TPU v5e", 4)}
    h100 = found["H100-SXM5-80GB", 8]
    assert (h100.usd_per_hour, h100.region) == (78.4, "us-central1")
    assert (h100.spot_usd_per_hour, h100.spot_region) == (20.0, "us-west1")
    assert "1 lower listings left out" in h100.note and h100.includes == "accelerator alone"
    v6e = found["TPU v6e (Trillium)", 8]
    assert (v6e.usd_per_hour, v6e.spot_usd_per_hour) == (21.6, 4.35)
    assert v6e.includes == "slice with its host" and v6e.instance == "v6e-8" and not v6e.note


def test_clouds_mean_different_cards_by_one_name():
    found = {c: skypilot.clean(c, rows, "2026-09-01") for c, rows in OTHERS.items()}
    [volta] = found["aws"]
    assert (volta.chip, volta.usd_per_hour, volta.spot_usd_per_hour) == ("V100-SXM2", 3.06, 0.53)
    assert [p.chip for p in found["azure"]] == ["V100-PCIe"]
    [runpod] = found["runpod"]
    assert runpod.chip == "A100-PCIe-80GB" and runpod.spot_usd_per_hour is None
    vast = {p.chip: p for p in found["vast"]}
    assert set(vast) == {"A100-PCIe-80GB", "RTX 4090"}
    assert vast["RTX 4090"].usd_per_hour == 0.4 and vast["RTX 4090"].spot_usd_per_hour is None


def test_fetch_dates_every_price_and_leaves_out_clouds_it_cannot_read(sky, capsys):
    warnings = []
    found = skypilot.fetch(warn=warnings.append)
    assert {p.cloud for p in found} == {"gcp", *OTHERS}
    assert all(p.date == datetime.date.today().isoformat() and "SkyPilot" in p.source for p in found)
    assert len(warnings) == len(skypilot.CLOUDS) - 5
    assert all("left out" in w and w.endswith("(no network).") for w in warnings)
    assert ("gcp/vms.csv", skypilot.STALE_HOURS) in sky
    said = capsys.readouterr()
    assert not said.out and "Updating gcp/vms.csv" in said.err  # standard output may be JSON


def test_the_file_is_one_that_plans_take(sky, tmp_path, capsys):
    file = tmp_path / "prices.csv"
    skypilot.main([str(file)])
    prices = load(file)
    assert prices == tuple(skypilot.fetch())
    assert capsys.readouterr().out.startswith(f"{len(prices)} prices (aws ")


def test_what_is_written_reads_back(tmp_path):
    skypilot.write(load(), tmp_path / "again.csv")
    assert load(tmp_path / "again.csv") == load()


def test_where_it_cannot_write_it_says_so(sky, tmp_path):
    with pytest.raises(SystemExit, match=r"prices\.csv"):
        skypilot.main([str(tmp_path / "none" / "prices.csv")])


def test_nothing_read_is_an_error(sky):
    with pytest.raises(ValueError, match="check the network"):
        skypilot.fetch(clouds=("lambda",))


def test_without_skypilot_the_error_says_what_to_type(monkeypatch, tmp_path):
    for name in ("sky", "sky.catalog", "sky.clouds", "sky.clouds.service_catalog"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(SystemExit, match="pip install skypilot"):
        skypilot.main([str(tmp_path / "prices.csv")])
