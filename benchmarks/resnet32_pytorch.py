"""Trains `cifar10-resnet32` in PyTorch, and measures it as `chipwise bench` does, with the same kind of
record.

    chipwise bench cifar10-resnet32 --data synthetic --out chipwise.json
    python benchmarks/resnet32_pytorch.py --out pytorch.json
    chipwise compare chipwise.json pytorch.json

It is the same training, not only the same net: it starts from the recipe's initial weights and uses the same
random images in the same order, with the same crops and flips, at the same rates. So its first losses can be
compared with chipwise's, and differ only by the rounding of other kernels.

The time covers standardising the images, forward, loss, backward and SGD, in float32, eagerly, with the data
in memory. Crops and flips are computed beforehand with chipwise's function, so PyTorch's time is without
them, while chipwise's step includes them. After the last prepared batch, steps start again with the first.
"""

from __future__ import annotations

import argparse
import math
import os
import time

import jax
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import chipwise as cw
from chipwise.engine import feed, keys
from chipwise.engine.state import first_state
from chipwise.errors import DivergedError
from chipwise.machine.limits import peak_bytes
from chipwise.machine.record import Record, Series
from chipwise.measure.timing import intervals

NAME = "cifar10-resnet32"
BATCHES = 100  # prepared batches: 39 MB


class Unit(nn.Module):
    """`chipwise.models.resnet32.Unit`, `(b, c, h, w)`."""

    def __init__(self, c_in: int, c_out: int, stride: int, first: bool):
        super().__init__()
        self.norm1, self.norm2 = norm(c_in), norm(c_out)
        # With stride 2 the extra zero is at the end, as in TensorFlow
        self.conv1 = nn.Conv2d(c_in, c_out, 3, stride, 1 if stride == 1 else 0, bias=False)
        self.conv2 = nn.Conv2d(c_out, c_out, 3, 1, 1, bias=False)
        self.widen, self.stride, self.first = c_out - c_in, stride, first

    def forward(self, x):
        active = F.leaky_relu(self.norm1(x), 0.1)
        y = self.conv1(active if self.stride == 1 else F.pad(active, (0, 1, 0, 1)))
        y = self.conv2(F.leaky_relu(self.norm2(y), 0.1))
        shortcut = active if self.first else x
        if self.stride == 2:
            shortcut = F.avg_pool2d(shortcut, 2)
        side = self.widen // 2
        return y + (F.pad(shortcut, (0, 0, 0, 0, side, self.widen - side)) if self.widen else shortcut)


class ResNet32(nn.Module):
    """`chipwise.models.resnet32.ResNet32`: images `(b, 32, 32, 3)` uint8 -> logits `(b, 10)`."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, 1, 1, bias=False)
        self.units = nn.Sequential(
            *(
                Unit(
                    c_in if unit == 0 else c_out,
                    c_out,
                    stride=2 if unit == 0 and stage > 0 else 1,
                    first=stage == unit == 0,
                )
                for stage, (c_in, c_out) in enumerate([(16, 16), (16, 32), (32, 64)])
                for unit in range(5)
            )
        )
        self.norm = norm(64)
        self.classifier = nn.Linear(64, 10)

    def forward(self, images):
        x = images.permute(0, 3, 1, 2).to(torch.float32, memory_format=torch.contiguous_format)
        std, mean = torch.std_mean(x, (1, 2, 3), correction=0, keepdim=True)
        x = (x - mean) / std.clamp(min=x[0].numel() ** -0.5)
        if self.stem.weight.is_contiguous(memory_format=torch.channels_last):
            x = x.contiguous(memory_format=torch.channels_last)
        return self.logits(x)

    def logits(self, x):
        """The logits of standardised images `(b, 3, 32, 32)`."""
        x = F.leaky_relu(self.norm(self.units(self.stem(x))), 0.1)
        return self.classifier(x.mean((2, 3)))


def norm(channels: int) -> nn.BatchNorm2d:
    return nn.BatchNorm2d(channels, eps=1e-3, momentum=0.1)


def carry_over(model: nn.Module, params: dict) -> None:
    """Copies the parameters of the recipe's net into `model`, with kernels in PyTorch's order of axes."""
    names = {"kernel": "weight", "scale": "weight"}
    state = model.state_dict()
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        *where, last = (part.key for part in path)
        value = np.asarray(leaf)
        if last == "kernel":
            value = value.transpose(3, 2, 0, 1) if value.ndim == 4 else value.T
        name = ".".join([*where, names.get(last, last)])
        assert state[name].shape == value.shape, (name, state[name].shape, value.shape)
        state[name] = torch.from_numpy(value.copy())
    model.load_state_dict(state)


def made_batches(recipe: cw.Recipe, steps: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The images and labels of the first `steps` steps, augmented as in the recipe's step."""
    columns = feed.read(recipe.task.train, recipe.task.classes, "training")
    augment = jax.jit(
        lambda batch, epochs, indices: jax.vmap(recipe.task.augment)(
            batch, keys.augment_keys(recipe.seed, epochs, indices)
        )
    )
    window = feed.host_window(recipe, 0, steps)["rows"]
    made = []
    for indices, epoch, cut in zip(window["indices"], window["epoch"], window["cut"], strict=True):
        epochs = epoch + (np.arange(recipe.batch) >= cut).astype(np.int32)
        batch = augment({name: column[indices] for name, column in columns.items()}, epochs, indices)
        image, label = (np.array(batch[name]) for name in ("image", "label"))
        made.append((torch.from_numpy(image), torch.from_numpy(label).long()))
    return made


def main() -> None:
    began = time.perf_counter()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", required=True, metavar="FILE.json")
    parser.add_argument("--steps", type=int, metavar="N", help="timed steps [about 10 seconds of them]")
    parser.add_argument("--warmup", type=int, default=50, metavar="N")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--channels-last", action="store_true", help="not PyTorch's default order of axes")
    arguments = parser.parse_args()
    if arguments.warmup < 1 or (arguments.steps is not None and arguments.steps < 1):
        parser.error("--steps and --warmup: expected at least 1")
    torch.set_num_threads(arguments.threads)
    jax.config.update("jax_platforms", "cpu")  # prepares weights and batches, untimed

    recipe = cw.load(NAME, synthetic=True)
    params = jax.device_get(first_state(recipe).params)
    batches = made_batches(recipe, max(arguments.warmup, BATCHES))
    model = ResNet32()
    carry_over(model, params)
    if arguments.channels_last:
        model = model.to(memory_format=torch.channels_last)
    model.train()
    own = recipe.optimizer
    rates = own.tables(recipe.clock, 0, 1)
    kernels = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    optimizer = torch.optim.SGD(
        [
            {"params": kernels, "weight_decay": float(rates["weight_decay"][0])},
            {"params": others, "weight_decay": 0.0},
        ],
        lr=float(rates["lr"][0]),
        momentum=float(rates["momentum"][0]),
        nesterov=own.nesterov,
    )
    done = 0

    def step() -> torch.Tensor:
        nonlocal done
        images, labels = batches[done % len(batches)]
        optimizer.param_groups[0]["lr"] = optimizer.param_groups[1]["lr"] = lr[done]
        optimizer.zero_grad(set_to_none=True)
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        done += 1
        return loss.detach()

    lr = own.tables(recipe.clock)["lr"].tolist()
    seconds = {"start": time.perf_counter() - began, "compile": 0.0}
    began = time.perf_counter()
    losses = [float(loss) for loss in [step() for _ in range(arguments.warmup)]]
    if not all(math.isfinite(loss) for loss in losses):
        raise DivergedError(f"The training loss became NaN or infinite within {arguments.warmup} steps.")
    probe = time.perf_counter()
    step()
    seconds["warmup"], warm = time.perf_counter() - began, done
    counts = intervals(time.perf_counter() - probe, arguments.steps)
    timed = []
    for count in counts:
        began = time.perf_counter()
        for _ in range(count):
            step()
        timed.append(time.perf_counter() - began)
        print(f"step {done}: {recipe.batch * count / timed[-1]:.1f} examples/s", flush=True)
    seconds["timed"] = sum(timed)

    speeds = [count / taken for count, taken in zip(counts, timed, strict=True)]
    parameters = sum(p.numel() for p in model.parameters())
    record = Record.now(
        "train",
        NAME,
        measured={
            "framework": f"PyTorch {torch.__version__.partition('+')[0]}",
            "recipe": recipe.describe(),
            "set": [],
            "data": "synthetic",
            "data_note": "",
            "layout": "channels last" if arguments.channels_last else "NCHW",
            "threads": arguments.threads,
            "batch": recipe.batch,
            "replicas": 1,
            "precision": recipe.precision,
            "exact": False,
            "devices": {
                "platform": "cpu",
                "kind": "cpu",
                "count": 1,
                "simulated": False,
                "replicas": 1,
                "replicas_per_device": 1,
                "batch": recipe.batch,
                "replica_batch": recipe.batch,
                "exact": False,
            },
            "parameters": parameters,
            "warmup_steps": warm,
            "timed_steps": sum(counts),
            "steps_per_interval": counts[0],
            "steps_per_call": 1,
            "seconds": {name: round(value, 6) for name, value in seconds.items()},
            "compilation_cache": False,
            "first_losses": losses,
            "wait_data_share": None,
            "feed": {},
            "memory_bytes_per_device": {
                "parameters": 4 * parameters,
                "optimizer": 4 * parameters,
                **dict.fromkeys(("state", "data", "temporaries", "program", "peak_measured", "available")),
            },
            "host_peak_bytes": peak_bytes(),
            "flops_per_step_per_device": None,
            "share_of_peak": None,
            "profile": None,
        },
        figures={
            "steps_per_second": Series("steps/s", tuple(speeds)),
            "examples_per_second": Series("examples/s", tuple(speed * recipe.batch for speed in speeds)),
        },
    )
    print(f"written: {record.write(arguments.out)}")


if __name__ == "__main__":
    main()
