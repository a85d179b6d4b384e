"""`benchmarks/gpu.py --next`: its order, its time, and what it does the next time. Nothing is measured."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def gpu_next(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import gpu_next

    return gpu_next


class Children:
    """A clock, and children that take `seconds`; `fails` are the jobs that fail."""

    def __init__(self, seconds=40, fails=()):
        self.now, self.seconds, self.fails, self.asked = 0.0, seconds, fails, []

    def ask(self, left, job):
        self.now += min(left, self.seconds)
        self.asked.append(job.name)
        return {"error": "died"} if job.name in self.fails else {"bits": "1"}

    def work(self, gpu_next, todo, done, budget=540.0):
        kept = []
        gpu_next.work(todo, done, budget, self.ask, lambda: kept.append(dict(done)), lambda: self.now)
        assert all(
            name in then for name, then in zip(self.asked, kept, strict=True)
        )  # as soon as it is there
        return self.asked


def names(gpu_next, tmp_path, cifar="files"):
    return [job.name for job in gpu_next.jobs("full", cifar, tmp_path)]


def test_the_order_is_that_of_worth(gpu_next, tmp_path):
    order = names(gpu_next, tmp_path)
    assert len(set(order)) == len(order)
    worth = [
        "bert exact",
        "resnet32 exact",
        "resnet32 tuned",
        "davidnet 0",
        "launches mnist single",
        "vit-s16 exact",
    ]
    assert sorted(worth, key=order.index) == worth and order[0] == "bert exact"
    for seed in (0, 1, 2):  # beside PyTorch's, one after the other
        at = order.index(f"davidnet {seed}")
        assert order[at + 1] == f"davidnet {seed} torch"
    assert not [name for name in names(gpu_next, tmp_path, cifar="") if name.startswith("davidnet")]


def test_two_processes_share_the_file_of_kernels_and_no_compiled_program(gpu_next, tmp_path):
    jobs = {job.name: job for job in gpu_next.jobs("full", "", tmp_path)}
    first, again = jobs["resnet32 tuned"], jobs["resnet32 tuned again"]
    assert first.words[:-1] == again.words[:-1] and first.words[-1] != again.words[-1]
    assert again.uncached and again.after == "resnet32 tuned"


def test_nothing_begins_that_would_not_end_in_time(gpu_next, tmp_path):
    children, done = Children(seconds=100), {}
    order = names(gpu_next, tmp_path)
    asked = children.work(gpu_next, gpu_next.jobs("full", "files", tmp_path), done)
    assert asked == order[:5] and children.now <= 540  # 40 seconds are left, and none needs less
    assert not Children().work(gpu_next, gpu_next.jobs("full", "files", tmp_path), {}, budget=30)


def test_the_next_time_goes_on_where_this_one_ended(gpu_next, tmp_path):
    todo, done, asked = gpu_next.jobs("full", "files", tmp_path), {}, []
    while len(done) < len(todo):
        asked += Children(seconds=100).work(gpu_next, todo, done)
    assert asked == [job.name for job in todo]
    assert Children().work(gpu_next, todo, done) == []


def test_what_failed_is_tried_again_last_and_stops_only_what_needs_it(gpu_next, tmp_path):
    todo, done = gpu_next.jobs("full", "files", tmp_path), {}
    first = Children(seconds=1, fails=("bert exact", "resnet32 tuned")).work(gpu_next, todo, done)
    waiting = ["bert exact again", "resnet32 tuned again"]
    assert first == [job.name for job in todo if job.name not in waiting]
    del done["mnist exact"]
    again = Children(seconds=1).work(gpu_next, todo, done)
    assert again == ["mnist exact", "bert exact", "resnet32 tuned", *waiting]


def test_the_page_says_whose_bits_are_equal(gpu_next):
    speed = {"batch": 128, "examples_per_second": {"median": 12800.0}}
    done = {
        "resnet32 exact": {"bits": "a", **speed},
        "resnet32 exact again": {"bits": "a"},
        "resnet32 tuned": {"bits": "b", **speed},
        "resnet32 tuned again": {"bits": "c"},
        "davidnet 0": {"accuracy": 0.94, "seconds": 20.0},
        "launches digits single": {"bits": "a", "ms": 0.25},
        "launches digits many": {"bits": "b", "ms": 0.125},
        "launches mnist many": {"bits": "a", "ms": 2.0},
    }
    page = gpu_next.page({"NVIDIA": done})
    assert "| resnet32 exact | 10.00 | yes |" in page and "| resnet32 tuned | 10.00 | **no** |" in page
    assert "| digits | many | 0.125 | **no** |" in page and "| mnist | many | 2.000 | not measured |" in page
    assert "| 0 | 94.00 % | 20.0 | - | - |" in page and "| bert exact | not measured | not measured |" in page


@pytest.mark.slow
def test_without_a_gpu_it_says_so_in_a_line(tmp_path):
    command = [sys.executable, str(BENCHMARKS / "gpu.py"), "--next", "--out", str(tmp_path)]
    done = subprocess.run(
        command, env={**os.environ, "JAX_PLATFORMS": "cpu"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1 and done.stdout == "" and not list(tmp_path.iterdir())
    assert done.stderr.splitlines()[-1].startswith("no GPU here") and len(done.stderr.splitlines()) == 1
