"""A step of a PyTorch net through chipwise's door on the CPU, beside eager PyTorch's.

    pip install --no-deps -c constraints.txt --target build/zoo torchvision==0.28.0
    python benchmarks/torch_door.py [--turns 5]

A step is forward, loss, backward and SGD in float32, with the batch in memory; the door's is the program of
one replica. The two take turns in one process, after compilation and one step each. Processor time is that of
all threads. PyTorch's threads would wait for each other in a loop, which counts, and most on a busy machine:
here they sleep. The page is `benchmarks/torch_door.md`.
"""

import argparse
import os
import platform
import statistics
import sys
import time
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["OMP_WAIT_POLICY"] = "passive"
sys.path.insert(0, str(Path(__file__).parents[1]))

import jax
import numpy as np
import torch
from benchmarks.zoo_models import torchvision

import chipwise as cw

NETS = {"resnet18": (16, 64), "resnet50": (8, 64), "mobilenet_v2": (16, 64), "vit_b_32": (4, 224)}
"""Batch, and pixels of a side."""
THREADS = 2


def steps(net: str, batch: int, pixels: int) -> dict:
    """A function that runs one step of each kind."""
    made = getattr(torchvision().models, net)
    images = np.random.default_rng(0).normal(size=(batch, 3, pixels, pixels)).astype(np.float32)
    labels = np.arange(batch) % 10
    module, loss = made(num_classes=10), torch.nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(module.parameters(), 0.01)
    given = torch.from_numpy(images), torch.from_numpy(labels)

    def eager() -> None:
        optimizer.zero_grad()
        loss(module(given[0]), given[1]).backward()
        optimizer.step()

    data = cw.Arrays(image=images, label=labels)
    task = cw.torch.task(made(num_classes=10), loss, train=data, check=False)
    recipe = cw.Recipe(task=task, batch=batch, replicas=1, duration="10000st", optimizer=cw.sgd(lr=0.01))
    stepper = cw.Stepper(recipe, on=cw.On(devices=1, steps_per_call=1)).__enter__()

    def door() -> None:
        stepper.step()
        stepper.metrics()  # waits

    return {"eager": eager, "door": door}


def timed(step) -> tuple[float, float]:
    """Seconds of the processors and of the clock."""
    used, began = time.process_time(), time.perf_counter()
    step()
    return time.process_time() - used, time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--nets", nargs="+", default=list(NETS), choices=NETS)
    given = parser.parse_args()
    torch.set_num_threads(THREADS)
    lines, load = [], os.getloadavg()[0]
    for net in given.nets:
        ways = steps(net, *NETS[net])
        for step in ways.values():
            step()
        turns = [{name: timed(step) for name, step in ways.items()} for _ in range(given.turns)]
        for number, unit in enumerate(("processor", "clock")):
            ratios = sorted(turn["door"][number] / turn["eager"][number] for turn in turns)
            eager, door = (statistics.median(t[w][number] for t in turns) for w in ("eager", "door"))
            ratio = f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
            batch, pixels = NETS[net]
            cells = [f"`{net}`", f"{batch} of {pixels}x{pixels}", unit]
            cells += [f"{seconds * 1e3:.0f}" for seconds in (eager, door)]
            lines.append(f"| {' | '.join([*cells, ratio])} |")
            print(lines[-1], flush=True)
    cpu = next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line)
    where = f"{cpu.partition(': ')[2]}, {os.cpu_count()} cores, Python {platform.python_version()}"
    page = f"""# PyTorch's nets through the door, on a CPU

Written by `python benchmarks/torch_door.py --turns {given.turns}`: {where}, jax {jax.__version__},
torch {torch.__version__}, {THREADS} threads that sleep while they wait. Before it the machine's load average
was {load:.1f}: with other work the clock says little. A step of torchvision's nets, float32, SGD,
milliseconds; medians, and of the ratios (door over eager, in the same turn) the range. Below 1 the door is
faster.

| net | batch | time | eager | door | ratio |
|---|---|---|---|---|---|
"""
    (Path(__file__).parent / "torch_door.md").write_text(page + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
