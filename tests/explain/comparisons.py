"""Records, run folders and studies to compare, made up; as small as they may be."""

import json
from pathlib import Path

import numpy as np

from chipwise.base.facts import fact
from chipwise.explain.compare.comparison import document
from chipwise.explain.row_sources import read
from chipwise.machine.fingerprint import Fingerprint
from chipwise.machine.record import Record, Series

MACHINE = Fingerprint(
    cpu="Some CPU", cores=2, memory_bytes=8 << 30, os="Linux 6.1 x86_64", python="3.12.1",
    versions={"jax": "0.10.2"}, accelerator=None, accelerators=0, commit=None, dirty=None,
)  # fmt: skip
LOSSES = tuple(float(np.float32(x)) for x in 2.3 * np.exp(-np.arange(50) / 40))


def recipe(name="mnist", batch=256, replicas=8, **changes):
    """What `Recipe.describe` says."""
    columns = {"image": "uint8[28, 28]", "label": "int32[]"}
    return {
        "name": name,
        "task": {"init": "init", "loss": "loss", "augment": None, "train": {"examples": 60000, **columns}},
        "batch": batch,
        "replicas": replicas,
        "duration": "24ep",
        "optimizer": {"optimizer": "adam", "lr": "constant(0.01)"},
        "precision": "f32",
        "seed": 0,
        **changes,
    }


def record(
    path, speed=1000.0, noise=0.01, *, n=10, losses=LOSSES, name="mnist", batch=256, kind="cpu", count=1,
    seed=0, described=None, **measured,
) -> Path:  # fmt: skip
    """A record of `chipwise bench` at `path`: `n` intervals of about `speed` examples/s, global."""
    runs = speed * np.exp(noise * np.random.default_rng(seed).normal(size=n))
    made = Record(
        kind="train",
        name=name,
        created="2026-01-15T12:00:00+00:00",
        measured={
            "framework": "chipwise",
            "recipe": recipe(name, batch) if described is None else described,
            "data": "synthetic",
            "data_note": "",
            "batch": batch,
            "replicas": 8,
            "precision": "f32",
            "exact": True,
            "devices": {"platform": "cpu" if kind == "cpu" else "gpu", "kind": kind, "count": count},
            "parameters": 250_698,
            "warmup_steps": 20,
            "timed_steps": 100,
            "steps_per_interval": 10,
            "seconds": {"start": 2.0, "compile": 3.0, "warmup": 1.0, "timed": 25.0},
            "first_losses": list(losses),
            "wait_data_share": 0.02,
            "share_of_peak": None,
            **measured,
        },
        figures={
            "examples_per_second": Series("examples/s", tuple(runs)),
            "steps_per_second": Series("steps/s", tuple(runs / batch)),
        },
        machine=MACHINE,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    made.write(path)
    return path


def run(
    folder, accuracies=(0.9, 0.95, 0.97), *, speed=1000.0, seed=0, timed=True, done=True, rows=None,
    diverged=None, **changes,
) -> Path:  # fmt: skip
    """A run folder: an evaluation every 100 steps, of 100 s each where `timed`."""
    folder.mkdir(parents=True, exist_ok=True)
    described = recipe(seed=seed, **{"source": {"recipe": "mnist", "set": []}, **changes})
    (folder / "recipe.json").write_text(json.dumps(described))
    made = []
    for k, accuracy in enumerate(accuracies):
        step = 100 * (k + 1)
        when = {"seconds": 100.0 * (k + 1) + seed} if timed else {}
        rate = speed * (1 + 0.01 * (k + seed))
        log = {
            "train/loss": 1 / (k + 1 + 0.01 * seed),
            "steps_per_second": rate / described["batch"],
            "examples_per_second": rate,
        }
        made += [{"step": step, **log, **when}, {"step": step, "eval/accuracy": accuracy, **when}]
    if diverged:
        made.append({"step": made[-1]["step"] + 50, "diverged": diverged})
    text = "".join(json.dumps(row) + "\n" for row in made) if rows is None else rows
    (folder / "metrics.jsonl").write_text(text)
    if done and not diverged:
        devices = {"platform": "cpu", "kind": "cpu", "count": 1, "exact": True, "parameters": 250_698}
        seconds = {"start": 5.0, "compile": 5.0, "train": 280.0, "total": 300.0 + seed}
        (folder / "result.json").write_text(json.dumps({"devices": devices, "seconds": seconds}))
    return folder


def study(folder, rates=("0.1", "0.2"), seeds=(0, 1, 2)) -> Path:
    """A study of a folder a run."""
    points = []
    for k, rate in enumerate(rates):
        runs = []
        for seed in seeds:
            name = f"lr={rate}/seed-{seed}"
            values = [v + 0.001 * seed + 0.01 * k for v in (0.9, 0.95, 0.97)]
            run(folder / name, values, seed=seed, optimizer={"optimizer": "adam", "lr": f"constant({rate})"})
            runs.append({"seed": seed, "run": name, "done": True})
        points.append({"set": {"lr": rate}, "runs": runs})
    made = {"schema": "chipwise.study/1", "recipe": "digits", "source": None, "points": points}
    (folder / "study.json").write_text(json.dumps(made))
    return folder


# ---- comparisons of them

WHEN = {"code": "loss-not-finite", "first": 301, "last": 350, "value": "nan"}
BETWEEN = fact("diverged-between", first=301, last=350).json()


def compared(*sources, **options):
    return document(read([str(s) for s in sources]), **options)


def told(found, subject, code):
    """The facts of a code that a comparison states of a subject."""
    return [stated for stated in found["sentences"][subject] if stated["code"] == code]


def headline(found):
    return [stated["code"] for stated in found["sentences"]["headline"]]


def codes(facts):
    return [stated["code"] for stated in facts]


def by_label(found):
    return {row["label"]: row for row in found["rows"]}
