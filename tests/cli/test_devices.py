"""`chipwise devices`: tables for people, JSON, and the exit code."""

import dataclasses
import io
import json
import os
import subprocess
import sys

import pytest
from rich.console import Console

from chipwise.base.facts import fact
from chipwise.cli.devices import render
from chipwise.machine.devices_report import look
from chipwise.machine.host_facts import HostFacts
from chipwise.machine.limits import Cores, HostMemory


@pytest.fixture(scope="module")
def report():
    return look()


def printed(report, width=100):
    out = io.StringIO()
    render(report, Console(file=out, width=width))
    return out.getvalue()


def test_tables_by_default(chipwise, report):
    said = chipwise("devices")
    assert said.code == 0
    for part in ("8 simulated", "host cores", "host memory", "versions", "jax"):
        assert part in said.out
    assert all(problem.what in said.out for problem in report.problems)


@pytest.mark.parametrize("width", [20, 60, 200])
def test_any_width_can_be_printed(report, width):
    assert printed(report, width)


def test_remedies_with_brackets_are_printed_whole(report):
    tpu = HostFacts(environment={"COLAB_TPU_ADDR": "x"}, paths=frozenset({"/dev/accel0"}))
    alone = dataclasses.replace(report, facts=tpu, devices=report.devices[:1], jax_platforms=None)
    (problem,) = [problem for problem in alone.problems if problem.severity == "error"]
    text = printed(alone, width=300)
    assert f"error: {problem.what}" in text and problem.why in text and problem.fix in text
    assert "[tpu]" in problem.fix


def test_no_problems_are_said(report):
    roomy = dataclasses.replace(
        report, facts=HostFacts(), cores=Cores(16, 16.0), memory=HostMemory(64 << 30, 60 << 30)
    )
    assert printed(roomy).splitlines()[-1] == str(fact("no-problems"))


def test_json_is_one_object_and_nothing_else(chipwise):
    said = chipwise("devices", "--json")
    body = json.loads(said.out)
    assert (said.code, body["schema"], body["ok"]) == (0, "chipwise.devices/3", True)


def test_help_shows_an_example(chipwise):
    assert "chipwise devices --simulate 8" in chipwise("devices", "--help").out


CODE = "from chipwise.cli import main; main()"


@pytest.mark.parametrize(
    ("environment", "arguments", "code", "count"),
    [
        ({}, ["--simulate", "3"], 0, 3),
        # JAX cannot start: reported, not raised
        pytest.param({"JAX_PLATFORMS": "no_such_platform"}, [], 4, 0, marks=pytest.mark.slow),
    ],
)
def test_in_a_fresh_process(environment, arguments, code, count):
    clean = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    done = subprocess.run(
        [sys.executable, "-c", CODE, "devices", "--json", *arguments],
        env={**clean, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == code, done.stderr
    report = json.loads(done.stdout)
    assert report["device_count"] == count and report["ok"] == (code == 0)
    if code:
        problem = report["problems"][0]
        assert problem["code"] == "no-backend" and "no_such_platform" in problem["said"]
        assert "Traceback" not in done.stderr
