import json

import pytest

from chipwise.base.facts import fact
from chipwise.chips import live_prices, prices
from chipwise.cli import main
from chipwise.compile.answers import Answer
from chipwise.planner import ask
from compilers import no_gpu_compiler as no_gpu_compiler


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_a_table_with_a_verdict_and_a_page(tmp_path, capsys):
    page = tmp_path / "plan.html"
    assert main(["plan", "digits", "--on", "t4,a100:8", "--html", str(page)]) == 0
    out = capsys.readouterr().out
    assert "t4" in out and "a100:8" in out
    short = str(fact("plan-ranked-by-step", targets=["t4", "a100:8"]))  # not by its wall time
    assert short in out
    assert page.read_text().lower().startswith("<!doctype html>") and str(page) in out.replace("\n", "")


@pytest.mark.slow
def test_json_is_one_object(capsys):
    assert main(["plan", "mnist", "--on", "t4", "--json", "--set", "batch=512"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["schema"] == "chipwise.plan/4" and told["recipe"]["parameters"] == 250_698
    assert told["plans"][0]["target"] == "t4" and told["plans"][0]["batch"] == 512


@pytest.mark.slow
def test_a_failure_of_this_machine_is_told_and_fails(monkeypatch, capsys):
    real = ask.compile_steps
    failed = Answer("replica", fact("compiler-failed", program="replica", message="No space left on device"))

    def compile_steps(cases, **options):
        answers = dict(real(cases, **options))
        return [(0, answers[0]), (1, {"replica": failed})]

    monkeypatch.setattr(ask, "compile_steps", compile_steps)
    assert main(["plan", "digits", "--on", "t4,a100", "--json"]) == 4
    told = capsys.readouterr()
    assert [(p["problem"] or {}).get("code") for p in json.loads(told.out)["plans"]] == [
        None,
        "compiler-failed",
    ]
    assert told.err.startswith("error:") and "No space left on device" in told.err


def test_with_json_progress_goes_to_standard_error(monkeypatch, capsys):
    real = ask.compile_steps

    def compile_steps(cases, progress=None, **options):
        progress(0, 1)
        return real(cases, progress=progress, **options)

    monkeypatch.setattr(ask, "compile_steps", compile_steps)
    assert main(["plan", "digits", "--on", "t4", "--json"]) == 0
    told = capsys.readouterr()
    assert json.loads(told.out)["plans"][0]["target"] == "t4" and told.err.startswith("t4: ")


def test_own_prices(tmp_path, capsys):
    own = tmp_path / "mine.csv"
    own.write_text(
        "chip,chips,cloud,instance,region,usd_per_hour,includes,source,date\n"
        "t4,1,mine,desk,home,7.2,whole VM,receipt,2026-01-15\n"
    )
    assert main(["plan", "digits", "--on", "t4", "--json", "--prices", str(own)]) == 0
    plan = json.loads(capsys.readouterr().out)["plans"][0]
    assert plan["cheapest"]["cloud"] == "mine"
    assert plan["cheapest"]["usd"]["value"] == pytest.approx(plan["wall_seconds"]["value"] * 0.002)


def test_prices_of_today_are_told_before_the_plan(monkeypatch, capsys):
    row = "chip,chips,cloud,usd_per_hour,includes,source,date\nt4,1,runpod,7.2,whole VM,list,2026-11-28\n"
    read = fact("prices-live", prices=1, clouds=["runpod 2026-11-28 (1)"])
    monkeypatch.setattr(
        live_prices, "live", lambda: live_prices.PricesRead(prices.read(row, "live"), (read,))
    )
    assert main(["plan", "digits", "--on", "t4", "--json", "--prices", "live"]) == 0
    told = capsys.readouterr()
    cost = json.loads(told.out)["plans"][0]["cheapest"]
    assert told.err.startswith(f"{read}\n") and (cost["cloud"], cost["date"]) == ("runpod", "2026-11-28")


@pytest.mark.parametrize("given", [["--on", "t4,a1000"], ["--on", "t4", "--batch", "64"]])
def test_prices_of_today_are_not_read_for_what_is_refused(monkeypatch, capsys, given):
    monkeypatch.setattr(live_prices, "live", None)
    assert main(["plan", "digits", *given, "--prices", "live"]) in (2, 4)
    assert capsys.readouterr().err.count("\n") == 1


def test_made_up_data_has_the_shapes_of_the_recipe_s_own(capsys):
    assert main(["plan", "digits", "--on", "t4", "--json", "--synthetic"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["recipe"]["name"] == "digits-synthetic" and told["plans"][0]["problem"] is None


@pytest.mark.parametrize(
    "arguments, exit_code, said",
    [
        (["digits", "--on", "a1000"], 4, "Did you mean 'a100'?"),
        (["digits", "--on", ","], 4, "--on v5e-8"),
        (["digitz", "--on", "t4"], 2, "digits"),
        (["digits", "--on", "t4", "--set", "batch=63"], 2, "batch=63"),
        (["digits", "--on", "t4", "--prices", "none.csv"], 3, "none.csv"),
    ],
)
def test_one_line_and_nothing_written(arguments, exit_code, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["plan", *arguments, "--html", "page.html"]) == exit_code
    captured = capsys.readouterr()
    (line,) = [text for text in captured.err.splitlines() if text.startswith("error:")]
    assert str(said) in line and "Traceback" not in captured.err
    assert not (tmp_path / "page.html").exists()


@pytest.mark.parametrize(
    ("options", "code"),
    [
        (["--batch", "64"], "plan-like-incomplete"),
        (["--like", "run", "--target", "0.9"], "plan-like-incomplete"),
        (["--like", "run", "--target", "0.9", "--batch", "64..x"], "plan-batches"),
        (["--like", "run", "--target", "0.9", "--batch", "0,64"], "plan-batches"),
        (["--lower", "loss"], "plan-like-incomplete"),
    ],
)
def test_options_to_plan_to_a_target(chipwise, options, code):
    assert chipwise("plan", "digits", "--on", "t4", *options).refused(2, code)


def test_batches_are_named_or_doubled():
    from chipwise.cli.planning import _batches

    assert _batches("64..1024") == [64, 128, 256, 512, 1024] and _batches("64..1023") == [64, 128, 256, 512]
    assert _batches("96, 32") == [96, 32] and _batches("64..8") == [64]
