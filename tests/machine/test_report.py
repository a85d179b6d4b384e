import dataclasses
import io
import json

import pytest
from rich.console import Console

from chipwise.machine.facts import HostFacts, gather
from chipwise.machine.problems import Problem
from chipwise.machine.report import look


def printed(report, width=100):
    out = io.StringIO()
    report.render(Console(file=out, width=width))
    return out.getvalue()


@pytest.fixture(scope="module")
def report():
    return look()


def test_the_json_has_its_keys_and_survives_json(report):
    made = report.to_json()
    assert json.loads(json.dumps(made)) == made
    assert list(made) == [
        "schema", "where", "platform", "device_count", "simulated", "processes", "devices", "host",
        "versions", "problems", "ok",
    ]  # fmt: skip
    assert (
        made["schema"] == 1 and made["platform"] == "cpu" and made["device_count"] == 8 and made["simulated"]
    )
    assert set(made["devices"][0]) == {
        "id", "platform", "kind", "process", "chip", "memory_bytes", "memory_used_bytes", "error",
    }  # fmt: skip
    assert {d["error"] for d in made["devices"]} == {None}
    assert made["host"]["cores_usable"] > 0 and made["host"]["disk_free_bytes"] > 0
    assert made["versions"]["jax"] and made["versions"]["libtpu"] == gather().packages.get("libtpu")
    assert set(made["versions"]) >= {"chipwise", "python", "jaxlib", "numpy", "cuda plugin", "nvidia driver"}


def test_the_tables_show_devices_host_versions_and_remedies(report):
    text = printed(report)
    for part in ("8 simulated", "cpu", "host memory", "disk", "versions", "jax"):
        assert part in text
    for problem in report.problems:
        assert problem.what in text


@pytest.mark.parametrize("width", [20, 60, 200])
def test_any_width_can_be_printed(report, width):
    assert printed(report, width)


def test_remedies_with_brackets_are_printed_whole(report):
    problem = Problem("error", "no [cuda] plugin", "it is [missing]", 'pip install "chipwise[cuda]"')
    failed = dataclasses.replace(report, problems=(problem,))
    text = printed(failed)
    assert (
        "error: no [cuda] plugin" in text and 'pip install "chipwise[cuda]"' in text and "[missing]" in text
    )
    assert failed.failed and not failed.to_json()["ok"]


def test_an_accelerator_left_alone_is_reported():
    facts = HostFacts(paths=frozenset({"/dev/nvidia0"}), packages={"jax": "0.10.2", "jaxlib": "0.10.2"})
    report = look(facts=facts)  # the test suite itself asks for the CPU
    assert not report.failed and any("GPU is left alone" in p.what for p in report.problems)


def test_a_folder_that_does_not_exist_yet(tmp_path):
    assert look(tmp_path / "new" / "run").disk.path == str(tmp_path)
