"""Run folders made by hand: what a run of some recipe leaves, without training."""

import json
import socket
from pathlib import Path

import psutil

from chipwise.recipe.schedules import one_cycle

HOSTILE = "<script>alert('x')</script>\"><img src=https://example.com/x onerror=alert(1)>[red]\x1b[2J"
RECIPE = {
    "name": "toy",
    "task": {
        "init": "init",
        "loss": "loss",
        "augment": None,
        "mix": None,
        "train": {"examples": 1000, "x": "uint8[12]", "label": "int32[]"},
        "eval": {"examples": 400, "x": "uint8[12]", "label": "int32[]"},
    },
    "batch": 50,
    "replicas": 5,
    "duration": "10ep",
    "optimizer": {
        "optimizer": "sgd",
        "lr": one_cycle(0.4, warmup="20%").json(),
        "momentum": 0.9,
        "weight_decay": 0.001,
        "clip": None,
    },
    "precision": "f32",
    "seed": 0,
    "ema": None,
    "source": None,
}
STEPS = 200  # of RECIPE
SECONDS = {
    "start": 10.0,
    "compile": 5.0,
    "train": 80.0,
    "wait_data": 2.0,
    "evaluate": 3.0,
    "checkpoint": 1.0,
    "total": 100.0,
}


def row(step, seconds=None, **more):
    """A line of metrics; `train_loss=...` is "train/loss"."""
    made = {"step": step, "epoch": step / 20}
    if seconds is not None:
        made["seconds"] = seconds
    return made | {k.replace("train_", "train/").replace("eval_", "eval/"): v for k, v in more.items()}


def timed(step, speed=5.0, waited=0.0, seconds=None, **more):
    """A line of training, `speed` in steps/s."""
    rates = {"steps_per_second": speed, "examples_per_second": 50 * speed, "wait_data_share": waited}
    return row(step, seconds, **more) | rates


def usual(last=STEPS, first_speed=2.5, speeds=None, waited=0.0):
    """Rows every 10 steps, evaluated every 40: a loss that falls to a plateau, 5 steps/s after warm-up."""
    made, clock = [], 15.0
    for at in range(10, last + 1, 10):
        speed = (speeds or {}).get(at, first_speed if at == 10 else 5.0)
        clock += 10 / speed
        loss = 0.5 + 2 * 0.5 ** (at / 10)
        made.append(timed(at, speed, waited, round(clock, 3), train_accuracy=1 - loss / 4, train_loss=loss))
        if at % 40 == 0:
            clock += 0.6
            made.append(row(at, round(clock, 3), eval_accuracy=1 - loss / 3.9, eval_loss=loss + 0.01))
    return made


def finished(rows, **changes):
    """A result.json for `rows`."""
    metrics: dict = {}
    for one in rows:
        metrics |= {k: v for k, v in one.items() if k.startswith(("train/", "eval/"))}
    return {
        "recipe": "toy",
        "steps": rows[-1]["step"],
        "metrics": metrics,
        "fingerprint": "ab" * 32,
        "devices": {
            "platform": "cpu", "kind": "cpu", "count": 2, "simulated": True, "replicas": 5,
            "exact": True, "parameters": 1234,
        },
        "examples_per_second": 250.0,
        "speed": {
            "batch": 50, "steps_per_second": 5.0, "examples_per_second": 250.0,
            "examples_per_second_quartiles": [245.0, 255.0], "intervals": 19, "share_of_peak": "unknown",
        },
        "seconds": SECONDS,
        "feed": {"data": "on the device", "verdict": "the data is on the device: nothing to wait for"},
        "run": "elsewhere",
        **changes,
    }  # fmt: skip


def started(step=0, **more):
    """A line of processes.jsonl: this process began, at `step`."""
    here = psutil.Process()
    process = {"pid": here.pid, "started": here.create_time(), "host": socket.gethostname()}
    return {"event": "start", "time": "2026-01-15T12:00:00+00:00", "step": step, **process, **more}


def ended(step, how="done", code=None):
    """A line of processes.jsonl."""
    return {"event": "end", "time": "2026-01-15T13:00:00+00:00", "step": step, "how": how, "code": code}


def write(path, rows=(), result=None, checkpoints=(), processes=(), **recipe):
    """A run folder at `path`, with `recipe` on top of `RECIPE`."""
    path = Path(path)
    path.mkdir(parents=True)
    (path / "recipe.json").write_text(json.dumps(RECIPE | recipe, indent=2))
    if rows:
        (path / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    if processes:
        (path / "processes.jsonl").write_text("".join(json.dumps(one) + "\n" for one in processes))
    if result is not None:
        (path / "result.json").write_text(json.dumps(result))
    for step in checkpoints:
        (path / "checkpoints" / str(step)).mkdir(parents=True)
    return path


def hostile(value):
    """`value` with markup, terminal codes and a script in every text that is free to hold them."""
    if isinstance(value, dict):
        return {k: hostile(v) for k, v in value.items()}
    return HOSTILE if isinstance(value, str) else value
