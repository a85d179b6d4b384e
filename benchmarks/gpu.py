"""Measures one GPU in at most ten minutes: chipwise, exact and not, compared with torch.compile.

    python benchmarks/gpu.py                        # any NVIDIA GPU; writes benchmarks/gpu.md
    python benchmarks/gpu.py --data DIR             # and CIFAR-10 to its end with cifar10-davidnet
    python benchmarks/gpu.py --tiny --minutes 3     # tiny nets, on a CPU too: whether it works

For each net, in the chip's best precision, on random examples in its memory, it measures: examples/s of the
exact step, of the exact step with `blocks=1` (one program) and of `exact=False`; whether a second process
gets the same bits; the planned and the measured step time, which needs chipwise[plan]; and examples/s of
torch.compile, if torch with CUDA is installed. PyTorch's steps have no augmentation, chipwise's have the
recipe's. Each contender has its own process. If time runs out, the page says what is missing.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

NETS: dict[str, dict[str, Any]] = {
    "cifar10-davidnet": {"full": ["batch=512", "replicas=8"], "tiny": ["batch=16", "replicas=2", "width=4"]},
    "imagenet-resnet50": {
        "full": ["batch=128", "replicas=2"],
        "tiny": ["batch=8", "replicas=2", "image=32", "width=4", "blocks=1,1,1,1"],
    },
    "vit-s16": {
        "full": ["batch=128", "replicas=2", "magnitude=0", "mixup=0"],
        "tiny": [
            "batch=8",
            "replicas=2",
            "magnitude=0",
            "mixup=0",
            "image=32",
            "depth=1",
            "width=16",
            "heads=2",
        ],
    },
    "gpt2-124m": {
        "full": ["batch=16", "replicas=2"],
        "tiny": ["batch=4", "replicas=2", "context=16", "vocabulary=64", "depth=1", "width=16", "heads=2"],
    },
}
MODES = {"exact": (None, True), "blocks=1": (1, True), "free": (None, False)}
BIT_STEPS = 10
SECONDS = 8.0  # seconds of timed steps for each figure


# ---- one contender, in its own process


def chipwise_child(net: str, size: str, again: bool) -> dict[str, Any]:
    """Examples/s by mode, and the bits after some steps; in the second process (`again`) only the bits."""
    import chipwise as cw
    from chipwise.engine.session import Session
    from chipwise.engine.state import fingerprint
    from chipwise.measure.bench import measure_train

    machine = cw.machine.detect.detect(1)
    recipe = made_up(net, size, precision(machine.devices[0]))
    with Session(recipe, cw.On(devices=1)) as session:
        session.begin()
        session.advance(BIT_STEPS)
        made = {"bits": fingerprint(session.snapshot().params), "device": machine.kind}
    if again:
        return made
    speeds = {}
    for mode, (blocks, exact) in MODES.items():
        one = recipe if blocks is None else dataclasses.replace(recipe, blocks=blocks)
        seconds = SECONDS if size == "full" else 0.2
        record = measure_train(
            one, seconds=seconds, warmup=10, on=cw.On(devices=1, exact=exact), progress="none"
        )
        speeds[mode] = record.figures["examples_per_second"].median
    return {**made, "speeds": speeds, "batch": recipe.batch, "precision": recipe.precision}


def made_up(net: str, size: str, computed_in: str) -> Any:
    """The recipe, with few enough examples for the memory of any GPU."""
    import chipwise as cw
    from chipwise.data.synthetic import Synthetic

    recipe = cw.load(net, [*NETS[net][size], f"precision={computed_in}"], synthetic=True)
    many = recipe.task.train
    few = Synthetic(8 * recipe.batch, many.spec, many.below)
    return dataclasses.replace(recipe, task=dataclasses.replace(recipe.task, train=few))


def precision(device: Any) -> str:
    """The fastest precision of `device`; bfloat16 is emulated before compute capability 8.0."""
    if device.platform == "cpu":
        return "f32"
    capability = getattr(device, "compute_capability", None)
    return "f16" if capability is not None and float(capability) < 8 else "bf16"


def plan_child(net: str, size: str, device: str, computed_in: str) -> dict[str, Any]:
    """The planned seconds of a step on such a device, exact."""
    import chipwise as cw
    from chipwise.chips.catalogue import find, spelled

    chip = find(device)
    target = "cpu" if chip is None else spelled(chip.name)
    (plan,) = cw.plan(made_up(net, size, computed_in), [target])
    if plan.step_seconds is None:
        raise RuntimeError(str(plan.problem))
    return {"seconds": plan.step_seconds.value}


def davidnet_child(data: str) -> dict[str, Any]:
    """A whole run of cifar10-davidnet, in one block: its accuracy and its seconds of training."""
    import chipwise as cw

    recipe = dataclasses.replace(cw.load("cifar10-davidnet", (), data), blocks=1)
    result = cw.fit(recipe, eval_every=None, progress="none", on=cw.On(devices=1))
    return {"accuracy": result.metrics["eval/accuracy"], "seconds": result.seconds["train"]}


def torch_child(net: str, size: str) -> dict[str, Any]:
    """Examples/s of the same net, batch and optimizer under torch.compile."""
    import torch
    import torch.nn.functional as F

    settings = dict(text.split("=") for text in NETS[net][size])
    model, x, y = torch_net(net, settings, int(settings["batch"]))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    layout = torch.channels_last if x.ndim == 4 else torch.contiguous_format
    model, x, y = model.to(device, memory_format=layout), x.to(device, memory_format=layout), y.to(device)
    half = device == "cuda"
    dtype = torch.bfloat16 if half and torch.cuda.get_device_capability()[0] >= 8 else torch.float16
    scaler = torch.amp.GradScaler(device, enabled=half and dtype == torch.float16)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=half)
    if net in ("cifar10-davidnet", "imagenet-resnet50"):
        optimizer = torch.optim.SGD(model.parameters(), 1e-2, momentum=0.9, nesterov=True, fused=half)
    if size == "full":
        model = torch.compile(model, mode="max-autotune-no-cudagraphs")

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device, dtype, enabled=half):
            out = model(x)
            loss = F.cross_entropy(out.flatten(0, -2), y.flatten())
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    def seconds(steps: int) -> float:
        began = time.perf_counter()
        for _ in range(steps):
            step()
        if half:
            torch.cuda.synchronize()
        return time.perf_counter() - began

    seconds(10 if size == "full" else 1)
    steps = max(1, int((SECONDS if size == "full" else 0.2) / seconds(1)))
    return {"speed": int(settings["batch"]) * steps / seconds(steps), "torch": torch.__version__}


def torch_net(net: str, settings: dict[str, str], batch: int) -> tuple[Any, Any, Any]:
    """The module, with random inputs and labels."""
    import torch
    from torch import nn

    class Transformer(nn.Module):
        """Pre-norm blocks over patches of images, or causal ones over tokens."""

        def __init__(
            self, width: int, heads: int, depth: int, length: int, kinds: int, first: Any, causal: bool
        ):
            super().__init__()
            self.first, self.causal = first, causal
            self.places = nn.Parameter(0.02 * torch.randn(length, width))
            block = nn.TransformerEncoderLayer(
                width, heads, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True
            )
            self.blocks = nn.TransformerEncoder(block, depth, nn.LayerNorm(width), enable_nested_tensor=False)
            self.last = nn.Linear(width, kinds, bias=False)
            if causal:
                self.last.weight = first.weight

        def forward(self, x: Any) -> Any:
            x = self.first(x)
            if x.ndim == 4:
                x = x.flatten(2).transpose(1, 2)
            n = x.shape[1]
            mask = nn.Transformer.generate_square_subsequent_mask(n, x.device) if self.causal else None
            x = self.blocks(x + self.places[:n], mask=mask, is_causal=self.causal)
            return self.last(x if self.causal else x.mean(1))

    def number(name: str, usual: int) -> int:
        return int(settings.get(name, usual))

    if net == "gpt2-124m":
        length, kinds, width = number("context", 1024), number("vocabulary", 50_257), number("width", 768)
        first, heads, depth = nn.Embedding(kinds, width), number("heads", 12), number("depth", 12)
        tokens = torch.randint(kinds, (batch, length + 1))
        model = Transformer(width, heads, depth, length, kinds, first, True)
        return model, tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    side = 32 if net == "cifar10-davidnet" else number("image", 224)
    x = torch.randn(batch, 3, side, side)
    if net == "cifar10-davidnet":
        return davidnet(number("width", 64)), x, torch.arange(batch) % 10
    y = torch.arange(batch) % 1000
    if net == "vit-s16":
        width, patch = number("width", 384), 16
        first, length = nn.Conv2d(3, width, patch, patch), (side // patch) ** 2
        return Transformer(width, number("heads", 6), number("depth", 12), length, 1000, first, False), x, y
    from torchvision.models.resnet import Bottleneck, ResNet

    blocks = [int(n) for n in settings.get("blocks", "3,4,6,3").split(",")]
    return ResNet(Bottleneck, blocks), x, y  # torchvision's first layer has 64 channels whatever `width`


def davidnet(width: int) -> Any:
    import torch
    from torch import nn

    def conv(a: int, b: int) -> Any:
        return nn.Sequential(nn.Conv2d(a, b, 3, 1, 1, bias=False), nn.BatchNorm2d(b), nn.ReLU())

    class Residual(nn.Module):
        def __init__(self, c: int):
            super().__init__()
            self.body = nn.Sequential(conv(c, c), conv(c, c))

        def forward(self, x: Any) -> Any:
            return x + self.body(x)

    class Head(nn.Module):
        def __init__(self, c: int):
            super().__init__()
            self.dense = nn.Linear(c, 10, bias=False)

        def forward(self, x: Any) -> Any:
            return self.dense(torch.amax(x, (2, 3))) * 0.125

    w, pool = width, nn.MaxPool2d(2)
    first = [conv(3, w), conv(w, 2 * w), pool, Residual(2 * w), conv(2 * w, 4 * w), pool]
    return nn.Sequential(*first, conv(4 * w, 8 * w), pool, Residual(8 * w), Head(8 * w))


# ---- all of them


def ask(deadline: float, *words: str, **environment: str) -> dict[str, Any]:
    """A contender's answer, or {"error": one line}."""
    left = deadline - time.monotonic()
    if left < 10:
        return {"error": "no time left"}
    command = [sys.executable, __file__, "--child", *words]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=left, env=os.environ | environment
        )
    except subprocess.TimeoutExpired:
        return {"error": "no time left"}
    if done.returncode:
        return {"error": (done.stderr.strip().splitlines() or ["died"])[-1][:200]}
    return json.loads(done.stdout.strip().splitlines()[-1])


def row(net: str, one: dict, again: dict, plan: dict, torch: dict) -> str:
    """A line of the table; a dash is missing."""
    if "error" in one:
        return f"| {net} | {one['error']} |" + " |" * 7
    speeds = one["speeds"]
    measured = one["batch"] / speeds["exact"]
    same = "-" if "error" in again else ("yes" if again["bits"] == one["bits"] else "**no**")
    planned = "-" if "error" in plan else f"{plan['seconds'] / measured:.2f}"
    other = "- | -" if "error" in torch else f"{torch['speed']:,.0f} | {speeds['free'] / torch['speed']:.2f}"
    return (
        f"| {net} | {one['batch']}, {one['precision']} | {speeds['exact']:,.0f} | {speeds['blocks=1']:,.0f} "
        f"| {speeds['free']:,.0f} | {speeds['free'] / speeds['blocks=1'] - 1:+.1%} | {same} | {planned} "
        f"| {other} |"
    )


HEAD = [
    "| net | batch | exact | blocks=1 | free | free over blocks=1 | same bits again | planned / measured "
    "| torch.compile | free / torch |",
    "|---|---|---|---|---|---|---|---|---|---|",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="tiny nets, to see that it works")
    parser.add_argument("--nets", nargs="+", choices=list(NETS), default=list(NETS))
    parser.add_argument("--data", help="folder of CIFAR-10, for cifar10-davidnet to its end")
    parser.add_argument("--minutes", type=float, default=9.5)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".md"))
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        kind, *words = arguments.child
        children = {"plan": plan_child, "torch": torch_child, "davidnet": davidnet_child}
        if kind in children:
            print(json.dumps(children[kind](*words)))
        else:
            print(json.dumps(chipwise_child(*words, again=kind == "again")))
        return
    size, deadline = "tiny" if arguments.tiny else "full", time.monotonic() + 60 * arguments.minutes
    lines, device, notes = list(HEAD), "?", set()
    for net in arguments.nets:
        one = ask(deadline, "chipwise", net, size)
        again = ask(deadline, "again", net, size) if "error" not in one else one
        plan = one
        if "error" not in one:
            device = one["device"]
            plan = ask(deadline, "plan", net, size, device, one["precision"], JAX_PLATFORMS="cpu")
        torch = ask(deadline, "torch", net, size)
        lines.append(row(net, one, again, plan, torch))
        said = {"chipwise": one, "the second process": again, "plan": plan, "torch": torch}
        notes |= {f"{net}, {what}: {answer['error']}." for what, answer in said.items() if "error" in answer}
        print(lines[-1], flush=True)
    if arguments.data:
        run = ask(deadline, "davidnet", arguments.data)
        notes.add(f"cifar10-davidnet, blocks=1: {json.dumps(run)}")
    text = [
        "# Beside torch.compile on one GPU",
        "",
        f"`python benchmarks/gpu.py`, {device}, {time.strftime('%Y-%m-%d')}; examples/s, medians over "
        f"{SECONDS:g} seconds; each contender a process of its own.",
        "",
        *lines,
        "",
        *(f"* {note}" for note in sorted(notes)),
    ]
    arguments.out.write_text("\n".join(text).rstrip() + "\n")


if __name__ == "__main__":
    main()
