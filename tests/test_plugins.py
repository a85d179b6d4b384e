"""What the suite's own options do: each in a pytest of its own, over a few made-up tests."""

import re
import sys
import time
from pathlib import Path

import pytest

from plugins.draw import drawn

pytest_plugins = ["pytester"]

CORPUS = """
import pytest

@pytest.mark.drawn
@pytest.mark.parametrize("case", range(25))
def check_corpus(case): pass

def check_alone(): pass
"""
QUARTER = CORPUS.replace("drawn", "drawn(share=0.25)")
SKIPS = """
import pytest

def check_tool(): pytest.skip("no such tool")
def check_runs(): pass
"""


@pytest.fixture
def suite(pytester, monkeypatch):
    """A pytest with the three plugins; *returns* a function that runs `text` with `options`."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    pytester.makeini("[pytest]\nmarkers = drawn\npython_functions = check_*")

    def run(text, *options):
        pytester.makepyfile(test_it=text)
        names = [word for name in ("clock", "draw", "skips") for word in ("-p", f"plugins.{name}")]
        return pytester.runpytest_subprocess("-p", "no:cacheprovider", *names, *map(str, options))

    return run


def test_a_tenth_is_drawn_and_every_case_at_some_time():
    names = [f"case{i}" for i in range(25)]
    parts = [drawn(names, f"commit {i}") for i in range(100)]
    assert {len(part) for part in parts} == {3}
    assert set().union(*parts) == set(names)
    assert drawn(names, "commit 1") == parts[1] != parts[2]
    assert drawn(["one"], "commit") == {"one"} and drawn([], "commit") == set()


@pytest.mark.slow
def test_only_what_is_marked_is_drawn(suite):
    suite(CORPUS, "--draw=abc").assert_outcomes(passed=4, deselected=22)
    suite(QUARTER, "--draw=abc").assert_outcomes(passed=8, deselected=18)
    suite(CORPUS).assert_outcomes(passed=26)


@pytest.mark.slow
def test_nothing_is_started_after_the_time_and_the_next_call_begins_with_it(suite, tmp_path):
    file = tmp_path / "memory" / "tests"
    late = suite(CORPUS, f"--stop-at={time.time() - 1}", f"--left-out={file}")
    late.assert_outcomes(skipped=26)
    assert len(file.read_text().splitlines()) == 26
    file.write_text("test_it.py::check_alone\n")
    early = suite(CORPUS, f"--stop-at={time.time() + 1000}", f"--left-out={file}", "-v")
    early.assert_outcomes(passed=26)
    assert re.search(r"::check_(\w+)", early.stdout.str())[1] == "alone"
    assert file.read_text() == ""


@pytest.mark.slow
def test_what_was_left_out_is_run_whatever_is_drawn(suite, tmp_path):
    file = tmp_path / "tests"
    cases = {f"test_it.py::check_corpus[{i}]" for i in range(25)}
    other = sorted(cases - drawn(sorted(cases), "abc"))[0]
    file.write_text(f"{other}\n")
    suite(CORPUS, "--draw=abc", f"--left-out={file}").assert_outcomes(passed=5, deselected=21)
    assert file.read_text() == ""


@pytest.mark.slow
def test_a_test_that_is_gone_is_forgotten_but_not_one_of_another_file(suite, tmp_path):
    file = tmp_path / "tests"
    for more in ((), ("-n1",)):
        file.write_text("test_it.py::check_gone\ntest_other.py::check_other\n")
        suite(CORPUS, f"--left-out={file}", *more).assert_outcomes(passed=26)
        assert file.read_text() == "test_other.py::check_other\n"


@pytest.mark.slow
def test_a_skip_that_nobody_listed_fails(suite):
    suite(SKIPS).assert_outcomes(passed=1, skipped=1)
    suite(SKIPS, "--skips-listed").assert_outcomes(passed=1, failed=1)
    module = "import pytest\npytest.importorskip('no_such_module')\n"
    suite(module, "--skips-listed").assert_outcomes(errors=1)
    suite(SKIPS, "--skips-listed", "--stop-at=0").assert_outcomes(skipped=2)


@pytest.mark.slow
def test_workers_of_xdist_do_the_same(suite, tmp_path):
    assert "xdist" in sys.modules
    file = tmp_path / "tests"
    suite(SKIPS, "--skips-listed", "-n2", f"--left-out={file}").assert_outcomes(passed=1, failed=1)
    suite(CORPUS, "--draw=abc", "-n2", "--stop-at=0", f"--left-out={file}").assert_outcomes(skipped=4)
    assert len(file.read_text().splitlines()) == 4
