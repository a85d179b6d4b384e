"""A run asked to stop saves itself, says how to go on, and ends as if nobody had asked."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time

import pytest

import chipwise as cw
import processes
import tasks
from chipwise.base import ending
from chipwise.base.facts import fact
from chipwise.cli import main
from chipwise.run.folder.run_folder import RunFolder
from chipwise.run.folder.run_reader import read_processes
from chipwise.run.programs import Programs
from chipwise.run.signals import StopRequest
from refusals import refused

pytestmark = pytest.mark.as_users_compile

FILE = """
import os
import time

import chipwise as cw
import tasks

def recipe(slow: bool = False):
    if slow:  # stands for a large model: a save that takes long
        from chipwise.run.folder.checkpoint import Checkpoints
        Checkpoints.save = lambda *_: time.sleep(120)
    return tasks.quick(task=tasks.quick_task(loss=tasks.plain_loss, eval=None), duration="400000st")
"""


def plain(**changes):
    """The small task at its quickest to compile."""
    task = tasks.quick_task(loss=tasks.plain_loss, augment=None, eval=None)
    return tasks.quick(task=task, **changes)


QUIET = {"on": cw.On(devices=1), "log_every": "4st", "eval_every": None, "progress": "none"}


@pytest.fixture(scope="module")
def whole():
    return cw.fit(plain(), **QUIET)


def test_a_stopped_run_is_saved_and_resumes_to_the_same_bits_on_other_devices(whole, tmp_path, monkeypatch):
    log = RunFolder.log

    def log_and_stop(self, row):
        log(self, row)
        if row["step"] == 12:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(RunFolder, "log", log_and_stop)
    before = signal.getsignal(signal.SIGTERM)
    with refused(cw.errors.Stopped, "stopped", signal="SIGTERM", total=30, run=str(tmp_path)):
        cw.fit(plain(), tmp_path, **QUIET)
    assert signal.getsignal(signal.SIGTERM) is before
    assert not (tmp_path / "result.json").exists()
    monkeypatch.undo()
    assert 12 < cw.run.restore_run(plain(), tmp_path).steps < 30
    resumed = cw.fit(plain(), tmp_path, **(QUIET | {"on": cw.On(devices=2)}))
    assert resumed.fingerprint == whole.fingerprint
    assert resumed.metrics["train/loss"] == whole.metrics["train/loss"]


@pytest.mark.slow
def test_a_signal_while_compiling_stops_before_the_first_step(whole, tmp_path, monkeypatch):
    compile = Programs.compile

    def compile_and_stop(self, *arguments):
        os.kill(os.getpid(), signal.SIGTERM)
        compile(self, *arguments)

    monkeypatch.setattr(Programs, "compile", compile_and_stop)
    with refused(cw.errors.Stopped, "stopped", step=0, total=30):
        cw.fit(plain(), tmp_path, **QUIET)
    monkeypatch.undo()
    assert cw.fit(plain(), tmp_path, **QUIET).fingerprint == whole.fingerprint


def test_without_a_folder_it_says_that_nothing_is_saved(monkeypatch):
    step = Programs.step

    def step_and_stop(self, *arguments):
        os.kill(os.getpid(), signal.SIGTERM)
        return step(self, *arguments)

    monkeypatch.setattr(Programs, "step", step_and_stop)
    with refused(cw.errors.Stopped, "stopped-unsaved"):
        cw.fit(plain(), **QUIET)


@pytest.fixture
def at_step_12(monkeypatch):
    """Sets what happens when step 12 is logged."""

    def then(action):
        log = RunFolder.log

        def log_and_act(self, row):
            log(self, row)
            if row["step"] == 12:
                action()

        monkeypatch.setattr(RunFolder, "log", log_and_act)

    return then


def test_a_second_ctrl_c_in_another_program_is_a_keyboard_interrupt(at_step_12, tmp_path, monkeypatch):
    def twice():
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    at_step_12(twice)
    monkeypatch.setattr(os, "_exit", lambda code: pytest.fail(f"the host's process ended with {code}"))
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        cw.fit(plain(), tmp_path, **QUIET)
    assert signal.getsignal(signal.SIGINT) is before
    monkeypatch.undo()
    assert cw.fit(plain(), tmp_path, **QUIET).steps == 30  # nobody holds the folder


def test_the_command_lines_own_process_leaves_at_once(monkeypatch):
    codes = []
    monkeypatch.setattr(os, "_exit", codes.append)
    monkeypatch.setattr(ending, "own", True)
    with contextlib.closing(StopRequest()) as request, pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
        assert (request.name, codes) == ("SIGINT", [])
        os.kill(os.getpid(), signal.SIGINT)
    assert codes == [130]


def test_a_closed_terminal_saves(at_step_12, tmp_path):
    at_step_12(lambda: os.kill(os.getpid(), signal.SIGHUP))
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run below `nohup`
    try:
        with refused(cw.errors.Stopped, "stopped", signal="SIGHUP", run=str(tmp_path)):
            cw.fit(plain(), tmp_path, **QUIET)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert cw.run.restore_run(plain(), tmp_path).steps >= 12


def test_with_nohup_a_closed_terminal_is_nothing(at_step_12, tmp_path):
    at_step_12(lambda: os.kill(os.getpid(), signal.SIGHUP))
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert cw.fit(plain(), tmp_path, **QUIET).steps == 30
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_log_that_nobody_reads_any_more_saves(at_step_12, tmp_path, monkeypatch):
    reader, writer = os.pipe()
    with open(writer, "w", buffering=1) as pipe:
        monkeypatch.setattr(sys, "stderr", pipe)
        at_step_12(lambda: os.close(reader))
        with refused(cw.errors.Stopped, "stopped", signal="SIGPIPE", run=str(tmp_path)):
            cw.fit(plain(duration="3000st"), tmp_path, **QUIET | {"progress": "lines"})
        with contextlib.suppress(BrokenPipeError):  # of what is left to write
            pipe.close()
    assert cw.run.restore_run(plain(duration="3000st"), tmp_path).steps >= 12


def test_ctrl_c_before_training_leaves_at_once_and_writes_nothing(tmp_path, monkeypatch, capsys):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("chipwise.run.indexed.materialize", interrupted)
    assert main(["train", "digits", "--run", str(tmp_path / "run"), "--devices", "1", "--quiet"]) == 130
    assert capsys.readouterr().err == "interrupted\n"
    assert not (tmp_path / "run").exists()


def test_outside_the_main_thread_it_listens_for_nothing():
    before = signal.getsignal(signal.SIGTERM)
    found = []

    def elsewhere():
        request = StopRequest()
        found.append(bool(request))
        request.close()

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert found == [False]
    assert signal.getsignal(signal.SIGTERM) is before


class Running:
    """`chipwise train` in a process of its own, once it has trained some steps."""

    def __init__(self, folder, *arguments, stderr=subprocess.PIPE, loud=False):
        self.run = folder / "run"
        (folder / "long.py").write_text(FILE)
        command = [
            sys.executable,
            "-c",
            # The tests may run below `nohup`
            "import signal; signal.signal(signal.SIGHUP, signal.SIG_DFL)\n"
            "from chipwise.cli import main; main()",
            "train",
            f"{folder / 'long.py'}:recipe",
        ]
        command += ["--run", str(self.run), "--simulate", "1", "--log-every", "200st", *arguments]
        command += [] if loud else ["--quiet"]
        self.process = subprocess.Popen(
            command, env=processes.environment(), stderr=stderr, stdout=subprocess.PIPE, text=True
        )
        lines, deadline = self.lines(), time.monotonic() + 120
        while self.lines() <= lines and self.process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)

    def lines(self):
        file = self.run / "metrics.jsonl"
        return len(file.read_bytes().splitlines()) if file.exists() else 0

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.communicate()


@pytest.mark.slow
def test_ctrl_c_ends_a_process_with_75_and_the_way_to_resume(tmp_path):
    with Running(tmp_path) as running:
        running.process.send_signal(signal.SIGINT)
        out, err = running.process.communicate(timeout=60)
    assert running.process.returncode == 75, err
    assert out == "" and "Traceback" not in err
    (step,) = re.findall(r"Stopped by SIGINT at step (\d+)", err)
    assert int(step) > 0
    assert f"error: {fact('stopped', signal='SIGINT', step=step, total=400000, run=running.run)}" in err


@pytest.mark.slow
def test_a_second_ctrl_c_leaves_at_once_with_130(tmp_path):
    with Running(tmp_path, "--set", "slow=true") as running:
        running.process.send_signal(signal.SIGINT)
        while "again leaves at once" not in running.process.stderr.readline():
            assert running.process.poll() is None
        time.sleep(0.5)  # into the save
        before = time.monotonic()
        running.process.send_signal(signal.SIGINT)
        assert running.process.wait(timeout=60) == 130
        assert time.monotonic() - before < 5


@pytest.mark.slow
def test_a_closed_terminal_ends_a_process_with_75(tmp_path):
    ours, theirs = os.openpty()
    with Running(tmp_path, stderr=theirs) as running:
        os.close(theirs)
        os.close(ours)  # the process writes to a terminal that is gone
        running.process.send_signal(signal.SIGHUP)
        assert running.process.wait(timeout=60) == 75
    assert read_processes(running.run)[-1]["how"] == "stopped"


@pytest.mark.slow
def test_a_reader_that_leaves_ends_a_process_with_75(tmp_path):
    with Running(tmp_path, "--log-every", "20000st", loud=True) as running:
        running.process.stderr.close()  # as `head` does
        assert running.process.wait(timeout=60) == 75
    assert read_processes(running.run)[-1]["how"] == "stopped"
