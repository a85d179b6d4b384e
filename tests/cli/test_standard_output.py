"""Commands whose output, cache or settings cannot be used: one line, an exit code and no traceback."""

import io
import os
import resource
import subprocess
import sys

import pytest

import processes
import run_folders
from chipwise.cli import main

MAIN = "import sys; sys.argv[0] = 'chipwise'; from chipwise.cli import main; main()"
FULL = pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no full device")


def command(*words, shell="", **more):
    """The exit code, output and errors of a command whose streams `shell` redirects."""
    line = ["bash", "-c", f'exec "$@" {shell}', "bash", sys.executable, "-c", MAIN, *map(str, words)]
    environment = processes.environment(JAX_PLATFORMS="cpu", **more)
    done = subprocess.run(line, capture_output=True, env=environment, timeout=120)
    return done.returncode, done.stdout, done.stderr.decode()


def here(capsys, *words):
    """The same of a command in this process."""
    code = main(list(map(str, words)))
    return code, *capsys.readouterr()


def one_line(said):
    code, _, errors = said
    assert code and "Traceback" not in errors, errors
    assert [line.startswith("error: ") for line in errors.splitlines()][-1:] == [True]
    assert errors.count("error: ") == 1 and "Exception ignored" not in errors


@pytest.mark.slow
@FULL
@pytest.mark.parametrize(
    ("words", "unbuffered"),
    [("chips", ""), ("chips", "1"), ("chips --json", ""), ("--help", ""), ("--version", "1")],
)
def test_full_output_is_told_in_a_line(words, unbuffered):
    one_line(command(*words.split(), shell=">/dev/full", PYTHONUNBUFFERED=unbuffered))


@pytest.mark.slow
@FULL
def test_a_run_whose_output_is_full_is_whole(tmp_path):
    run = tmp_path / "run"
    recipe = f"{processes.HERE / 'tasks.py'}:quick"
    words = ["train", recipe, "--set", "duration=1st", "--set", "replicas=1", "--run", run]
    one_line(command(*words, shell=">/dev/full"))
    assert (run / "result.json").exists()
    one_line(command("report", run, shell=">/dev/full"))


def test_a_report_is_written_in_any_encoding(tmp_path, monkeypatch, capfdbinary):
    rows = run_folders.usual()
    run = run_folders.write(tmp_path / "run", rows, run_folders.finished(rows))
    for encoding in ("ascii", "utf-16"):
        with monkeypatch.context() as patch:
            own = io.TextIOWrapper(io.BytesIO(), encoding)
            patch.setattr(sys, "__stdout__", own)
            patch.setattr(sys, "stdout", own)
            assert main(["report", str(run)]) == 0
            sys.stdout.flush()
        out, errors = capfdbinary.readouterr()
        assert "eval/loss" in out.decode(encoding) and not errors, (encoding, errors)


def test_closed_output_is_told_in_a_line_and_closed_errors_are_none():
    one_line(command("chips", shell=">&-"))
    assert command("chips", shell="2>&-")[0] == 0


def test_an_output_that_nobody_reads_ends_quietly():
    """With the exit code of a program that SIGPIPE ends, which `--help` explains."""
    assert command("chips", shell="| head -1")[2] == ""
    code, _, said = command("chips", shell="| true; exit ${PIPESTATUS[0]}")
    assert (code, said) == (141, "") and b"141" in command("--help")[1]


@pytest.mark.parametrize("number", ["٣", "--margin=٠٫١%", "１", "--spend=٣٠"])
def test_a_number_in_the_digits_of_another_script_is_refused(number, capsys):
    code, _, said = here(capsys, "referee", "digits", number)
    assert code == 2 and "digits 0 to 9" in said


@pytest.mark.slow
@pytest.mark.parametrize("words", [["--prompt", "١٩٩٩"], ["--prompt=١٩٩٩"], ["--stop", "１"]])
def test_a_text_may_be_digits_of_another_script(words, capsys):
    assert main(["generate", "no-such-run", *words]) != 0
    assert "0 to 9" not in capsys.readouterr().err


def test_settings_that_would_hang_are_refused():
    one_line(command("devices", NPROC="999999"))
    one_line(command("devices", NPROC="many"))
    one_line(command("devices", JAX_ENABLE_X64="perhaps"))


def test_a_limit_of_addresses_with_which_xla_would_end_the_process(monkeypatch, capsys):
    monkeypatch.setattr(resource, "getrlimit", lambda which: (10**9, 10**9))
    one_line(here(capsys, "devices"))
    monkeypatch.setattr(resource, "getrlimit", lambda which: (4 * 10**9, 4 * 10**9))
    assert here(capsys, "chips")[0] == 0


def test_a_cache_that_cannot_be_used(tmp_path, monkeypatch, capsys):
    file = tmp_path / "file"
    file.write_text("")
    monkeypatch.delenv("CHIPWISE_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(file))
    one_line(here(capsys, "plan", "digits", "--on", "t4"))


def test_sizes_and_names_beyond_what_is_possible(tmp_path, capsys):
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("a text")
    one_line(here(capsys, "pack", tmp_path / "texts", tmp_path / "out", "--tokens", 99999999999))
    one_line(here(capsys, "pack", tmp_path / "texts", tmp_path / ("x" * 300), "--tokens", 4))
    assert [path.name for path in tmp_path.iterdir()] == ["texts"]
