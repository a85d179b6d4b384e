import json

import pytest
import typer
from typer.testing import CliRunner

from chipwise.base.errors import DataError, DeviceError
from chipwise.base.facts import fact
from chipwise.chips import CHIPS, live_prices
from chipwise.chips.prices import load
from chipwise.cli.chips import FIGURES, chips
from refusals import refused

app = typer.Typer(rich_markup_mode=None)
app.command("chips")(chips)


def run(*arguments):
    return CliRunner().invoke(app, arguments, catch_exceptions=False)


def test_the_catalogue_is_one_line_a_chip():
    lines = run().stdout.splitlines()
    assert len(lines) == len(CHIPS) + 2
    assert "bf16 TFLOP/s" in lines[0] and "GB/s" in lines[0]
    for chip, line in zip(CHIPS, lines[1:], strict=False):
        assert line.startswith(chip.names[0]) and chip.name in line


@pytest.mark.parametrize("chip", CHIPS, ids=lambda chip: chip.names[0])
def test_one_chip_shows_every_figure_it_has(chip):
    out = run(chip.names[0]).stdout
    for field, (unit, what) in FIGURES.items():
        value = getattr(chip, field)
        assert (f"{what}, per {chip.scope}" in out) is (value is not None), field
        if value is not None:
            assert f"{value:g}" in out and unit in out
    assert chip.source in out and chip.verified in out and chip.notes in out


def test_prices_have_dates():
    out = run("v2").stdout
    assert "4.50" in out and "2026-02-26" in out and "6.50" not in out
    assert str(fact("prices-none")) in run("tpu7x").stdout
    assert "v3-64" in run("v3").stdout


def test_a_target_says_what_is_in_it():
    out = run("v3-8").stdout
    title = fact(
        "target-title-topology", target="v3-8", chips=4, chip="TPU v3", devices=8, hosts=1, topology="v3:2x2"
    )
    assert out.startswith(f"{title}\n") and "8.00" in out
    assert str(fact("target-one-core", rented_as="v2-8")) in run("v2-1").stdout
    assert "2 hosts" in run("h100:16").stdout


def test_json():
    every = json.loads(run("--json").stdout)
    assert every["schema"] == "chipwise.chips/2" and len(every["chips"]) == len(CHIPS)
    one = json.loads(run("V4-8", "--json").stdout)
    assert one["chip"]["name"] == "TPU v4" and one["units"]["memory_GBps"] == "GB/s per chip"
    assert one["target"]["devices"] == 4
    assert one["target"]["topology_arguments"]["chip_config_name"] == "megacore"
    assert [p["usd_per_hour"] for p in one["prices"]] == [12.88]


def test_your_own_prices(tmp_path):
    file = tmp_path / "mine.csv"
    file.write_text("chip,chips,usd_per_hour,includes,source,date\nt4,1,0.123,whole VM,me,2026-09-01\n")
    out = run("t4", "--prices", str(file)).stdout
    assert "0.1230" in out and "0.526" not in out
    with refused(DataError, "prices-unreadable", path="nowhere.csv"):
        run("t4", "--prices", "nowhere.csv")


def test_prices_of_today_are_told_first_and_saved(monkeypatch, tmp_path):
    read = fact("prices-live", prices=3, clouds=["aws 2026-11-28 (3)"])
    today = live_prices.PricesRead(load()[:3], (read,))
    monkeypatch.setattr(live_prices, "live", lambda: today)
    file = tmp_path / "today.csv"
    done = run("a100", "--prices", "live", "--out", str(file), "--json")
    assert done.stderr.splitlines() == [str(read), str(fact("written", path=file))]
    assert len(json.loads(done.stdout)["prices"]) == sum(p.chip == today.prices[0].chip for p in load(file))
    assert load(file) == today.prices
    with refused(DataError, "prices-unwritable", path=file / "inside"):
        run("--out", str(file / "inside"))


def test_a_wrong_name_says_the_nearest():
    with refused(DeviceError, "target-ambiguous", names=["rtx-4060-ti-8gb", "rtx-4060-ti-16gb"]):
        run("4060 Ti")
    with refused(DeviceError, "chip-unknown", name="a1000", hint="a100"):
        run("a1000")
    with refused(DeviceError, "slice-unknown", chip="v3"):
        run("v3-4")


def test_a_wrong_name_is_told_before_prices_are_read(monkeypatch):
    monkeypatch.setattr(live_prices, "live", None)
    with refused(DeviceError, "chip-unknown", name="a1000"):
        run("a1000", "--prices", "live")


def test_a_file_of_prices_is_checked(tmp_path):
    file = tmp_path / "mine.csv"
    file.write_text("chip,chips\n")
    with refused(DataError, "price-column-missing", column="source"):
        run("t4", "--prices", str(file))
