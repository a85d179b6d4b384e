"""Measures one GPU in a few minutes: plans compared with steps, bits, whole trainings, torch.compile.

    python benchmarks/gpu.py --plan h100 h200       # anywhere, needs chipwise[plan]; writes gpu_plans.json
    python benchmarks/gpu.py --mnist DIR --cifar DIR  # on an NVIDIA GPU; writes gpu.json and gpu.md
    python benchmarks/gpu.py --next --cifar DIR     # what has no measurement yet, in 9 minutes: gpu_next.py
    python benchmarks/gpu.py --tiny                 # tiny nets, on a CPU too: whether it works

For each net, on random examples in the GPU's memory, it measures: examples/s of the exact step, of
`exact=False` and of the exact step with `blocks=1` (one program); peak memory; whether a second process gets
the same losses; and examples/s of torch.compile, if torch with CUDA is installed. PyTorch's steps have no
augmentation, chipwise's have the recipe's. Each contender has its own process. First all of them compile at
once, which uses the host's cores, and beside them digits, MNIST and CIFAR-10 are trained to their ends, for
their accuracy and bits. Then each contender is timed with nothing beside it, from the cache of compiled
programs. What is not done when the minutes are over is told as such.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

BF16 = "precision=bf16"
TOKENS = ["context=16", "vocabulary=64"]
SMALL = ["depth=1", "width=16", "heads=2"]
FILES = {"cifar10-resnet32": f"{Path(__file__).parents[1]}/examples/cifar10_resnet32.py:recipe"}
NETS: dict[str, dict[str, Any]] = {
    "mnist": {"full": [], "tiny": []},
    "cifar10-resnet32": {"full": [], "tiny": ["batch=16"]},
    "cifar10-davidnet": {"full": [], "tiny": ["batch=16", "replicas=2", "width=4"]},
    "imagenet-resnet50": {
        "full": ["batch=256", "replicas=2", BF16],
        "tiny": ["batch=8", "replicas=2", "image=32", "width=4", "blocks=1,1,1,1"],
    },
    "vit-s16": {
        "full": ["batch=256", "replicas=2", "magnitude=0", "mixup=0", BF16],
        "tiny": ["batch=8", "replicas=2", "magnitude=0", "mixup=0", "image=32", *SMALL],
    },
    "gpt2-124m": {"full": ["batch=16", "replicas=2"], "tiny": ["batch=4", "replicas=2", *TOKENS, *SMALL]},
    "bert-base": {
        "full": ["batch=64", "replicas=2", BF16],
        "tiny": ["batch=4", "replicas=2", "length=16", "vocabulary=64", *SMALL],
    },
}
TORCH = ("cifar10-davidnet", "imagenet-resnet50", "vit-s16", "gpt2-124m")
MODES = {"exact": (None, True), "free": (None, False), "blocks=1": (1, True)}
SECONDS = 3.0  # seconds of timed steps for each figure


# ---- one contender, in its own process


def chipwise_child(net: str, size: str, mode: str, seconds: str) -> dict[str, Any]:
    """Examples/s with quartiles, the first losses and the memory."""
    import chipwise as cw
    from chipwise.study.bench import measure_train

    recipe = made_up(net, size)
    blocks, exact = MODES[mode]
    one = recipe if blocks is None else dataclasses.replace(recipe, blocks=blocks)
    record = measure_train(
        one, seconds=float(seconds), warmup=10, on=cw.On(devices=1, exact=exact), progress="none"
    )
    return {
        "batch": recipe.batch,
        "device": cw.machine.detect.detect(1).kind,
        "examples_per_second": record.figures["examples_per_second"].to_json(),
        "memory": record.measured["memory_bytes_per_device"],
        "seconds": record.measured["seconds"],
        "share_of_peak": record.measured["share_of_peak"],
        "first_losses": record.measured["first_losses"],
    }


def made_up(net: str, size: str) -> Any:
    """The recipe, with few enough examples for the memory of any GPU."""
    import chipwise as cw
    from chipwise.data.synthetic import Synthetic

    recipe = cw.load(FILES.get(net, net), NETS[net][size], synthetic=True)
    many = recipe.task.train
    few = Synthetic(8 * recipe.batch, many.spec, many.below)
    return dataclasses.replace(recipe, task=dataclasses.replace(recipe.task, train=few))


def plan_child(net: str, size: str, *chips: str) -> dict[str, Any]:
    """What is planned for one of each chip: the seconds of an exact step, and the bytes."""
    import chipwise as cw

    made = {}
    for mode, (blocks, exact) in MODES.items():
        recipe = made_up(net, size)
        recipe = recipe if blocks is None else dataclasses.replace(recipe, blocks=blocks)
        for plan in cw.plan(recipe, list(chips), exact=exact):
            made.setdefault(plan.target, {})[mode] = {
                "problem": plan.problem and str(plan.problem),
                "seconds": plan.step_seconds and dataclasses.asdict(plan.step_seconds),
                "bytes": plan.memory and plan.memory.needed,
                "bound": plan.bound,
            }
    return made


def trainings_child(name: str, data: str) -> dict[str, Any]:
    """A recipe to its end; a short one also again, streamed from the host, and stopped and resumed."""
    import chipwise as cw

    recipe = cw.load(name, (), data or None)
    note = cw.datasets.cifar10(data).note if name.startswith("cifar10") else ""
    made: dict[str, Any] = {"total_steps": recipe.clock.total, "note": note}

    def told(result: Any) -> dict[str, Any]:
        known = {key: result.seconds.get(key) for key in ("train", "compile", "total", "wait_data")}
        return {
            "bits": result.fingerprint,
            "metrics": result.metrics,
            "seconds": known,
            "speed": result.speed,
        }

    made["resident"] = told(cw.fit(recipe, eval_every=None, progress="none"))
    if recipe.name == "cifar10-davidnet":
        return made
    with tempfile.TemporaryDirectory() as folder:
        for way, on in {"again": cw.On(), "streamed": cw.On(feed="host")}.items():
            made[way] = told(cw.fit(recipe, on=on, eval_every=None, progress="none"))
        half = f"{recipe.clock.total // 2}st"
        cw.fit(recipe, folder + "/run", eval_every=None, stop_after=half, progress="none")
        made["resumed"] = told(cw.fit(recipe, folder + "/run", eval_every=None, progress="none"))
    return made


def torch_child(net: str, size: str, aim: str) -> dict[str, Any]:
    """Examples/s of the same net, batch and optimizer under torch.compile, timed for `aim` seconds."""
    import torch
    import torch.nn.functional as F

    settings = dict(text.split("=") for text in NETS[net][size])
    batch = int(settings.get("batch", 512))  # cifar10-davidnet's own
    model, x, y = torch_net(net, settings, batch)
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
        model = torch.compile(model)

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
    steps = max(1, int(float(aim) / 5 / seconds(1)))
    speeds = sorted(batch * steps / seconds(steps) for _ in range(5))
    return {"speed": {"low": speeds[0], "median": speeds[2], "high": speeds[-1]}, "torch": torch.__version__}


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
    if left < 5:
        return {"error": "no time left"}
    command = [sys.executable, __file__, "--child", *words]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=left, env=os.environ | environment
        )
    except subprocess.TimeoutExpired:
        return {"error": "no time left"}
    if done.returncode:
        print(done.stderr[-3000:], file=sys.stderr, flush=True)
        return {"error": (done.stderr.strip().splitlines() or ["died"])[-1][:200]}
    return json.loads(done.stdout.strip().splitlines()[-1])


def prepare(nets: list[str], modes: list[str], size: str, data: dict[str, str], deadline: float) -> dict:
    """Fills the caches of compiled programs and trains, all at once. *Returns* the answers by name."""
    share = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    with ThreadPoolExecutor(len(data) + max(8, os.cpu_count() or 1)) as pool:
        jobs = {f"trained {name}": ("trainings", name, where) for name, where in data.items()}
        for mode, net in itertools.product(modes, nets):
            jobs[f"compiled {net}:{mode}"] = ("chipwise", net, size, mode, "0.1")
        jobs |= {f"compiled {net}:torch": ("torch", net, size, "0.5") for net in nets if net in TORCH}
        asked = {name: pool.submit(ask, deadline, *words, **share) for name, words in jobs.items()}
        return {name: job.result() for name, job in asked.items()}


def page(made: dict[str, Any], plans: dict[str, Any]) -> str:
    """The page of what was measured, beside the plans of that chip. A dash was not measured."""
    from chipwise.chips.catalogue import find, spelled

    measured = {name: one for name, one in made["measured"].items() if "error" not in one}
    device = next(iter(measured.values()))["device"]
    chip = find(device)
    target = spelled(chip.names[0]) if chip else device
    lines = [
        "# Measured on one GPU",
        "",
        f"`python benchmarks/gpu.py`, {device}, {made['date']}. Examples/s are medians (quartiles) over "
        f"{SECONDS:g} seconds, each net a process of its own with nothing beside it.",
        "",
        "| net | batch | exact | `exact=False` | `torch.compile` | exact / free "
        "| the same losses in a second process | memory, peak |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for net in NETS:
        exact, free = (measured.get(f"{net}:{mode}") for mode in ("exact", "free"))
        if not exact and not free:
            continue
        speeds = [one and one["examples_per_second"] for one in (exact, free)]
        cells = [
            "{median:,.0f} ({quartiles[0]:,.0f} to {quartiles[1]:,.0f})".format(**s) if s else "-"
            for s in speeds
        ]
        ratio = f"{speeds[0]['median'] / speeds[1]['median']:.2f}" if all(speeds) else "-"
        first = made["compiled"].get(f"{net}:exact", {}).get("first_losses")
        same = "-" if not exact else ("yes" if first == exact["first_losses"] else "**no**")
        held = exact and exact["memory"]["peak_measured"]  # CPUs do not tell
        peak = f"{held / 1e9:.2f} GB" if held else "-"
        batch = (exact or free)["batch"]
        theirs = made.get("torch", {}).get(net, {}).get("speed")
        cells.append("{median:,.0f} ({low:,.0f} to {high:,.0f})".format(**theirs) if theirs else "-")
        lines.append(f"| {net} | {batch} | {' | '.join(cells)} | {ratio} | {same} | {peak} |")
    lines += [
        "",
        f"Milliseconds of a step, planned for {target} beforehand on a machine without a GPU, and measured:",
        "",
        "| net | planned (90 % interval) | measured | measured / planned | inside |",
        "|---|---|---|---|---|",
    ]
    for name, one in measured.items():
        net, mode = name.split(":")
        plan = plans.get(net, {}).get(target, {}).get(mode, {}).get("seconds")
        if plan:
            ms = 1e3 * one["batch"] / one["examples_per_second"]["median"]
            value, low, high = (1e3 * plan[key] for key in ("value", "low", "high"))
            inside = "yes" if low <= ms <= high else "no"
            lines.append(
                f"| {net}, {mode} | {value:.2f} ({low:.2f} to {high:.2f}) | {ms:.2f} "
                f"| {ms / value:.2f} | {inside} |"
            )
    for name, one in made["trained"].items():
        if "error" not in one:
            ways = [way for way in one if way not in ("total_steps", "note")]
            bits = {one[way]["bits"] for way in ways}
            result = one[ways[0]]["metrics"]["eval/accuracy"]
            lines += ["", f"{name}, {one['total_steps']} steps, {', '.join(ways)}: {len(bits)} fingerprint, "]
            lines[-1] += (
                f"{100 * result:.2f} % of the held-out examples{one['note'] and ' of the '}{one['note']}."
            )
    missing = [f"{n}, {k}" for k in ("trained", "compiled") for n, one in made[k].items() if "error" in one]
    if missing:
        lines += ["", "Not measured, for lack of time or as told below: " + "; ".join(missing) + "."]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="tiny nets, to see that it works")
    parser.add_argument("--nets", nargs="+", choices=list(NETS), default=list(NETS))
    parser.add_argument("--modes", nargs="+", choices=list(MODES), default=list(MODES))
    parser.add_argument("--plan", nargs="+", metavar="CHIP", help="plan these chips, and measure nothing")
    parser.add_argument("--mnist", default="", help="folder of MNIST, to train it to its end")
    parser.add_argument("--cifar", default="", help="folder of CIFAR-10, for cifar10-davidnet to its end")
    parser.add_argument("--next", action="store_true", help="what has no measurement yet: see gpu_next.py")
    parser.add_argument("--minutes", type=float, default=9.5)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    size, deadline = "tiny" if arguments.tiny else "full", time.monotonic() + 60 * arguments.minutes
    if arguments.child:
        kind, *words = arguments.child
        from gpu_next import CHILDREN

        children = {"plan": plan_child, "torch": torch_child, "trainings": trainings_child}
        print(json.dumps({**children, **CHILDREN, "chipwise": chipwise_child}[kind](*words)))
        return
    if arguments.next:
        from gpu_next import SECONDS as MOST
        from gpu_next import main as measure_next

        measure_next(size, arguments.cifar, arguments.out, min(MOST, 60 * arguments.minutes))
        return
    made: dict[str, Any] = {"date": time.strftime("%Y-%m-%d"), "began": time.monotonic(), "trained": {}}

    def keep(name: str, answer: dict[str, Any]) -> None:
        made.setdefault(name.split()[0], {})[name.split()[1]] = answer
        made["minutes"] = (time.monotonic() - made["began"]) / 60
        (arguments.out / ("gpu_plans.json" if arguments.plan else "gpu.json")).write_text(
            json.dumps(made, indent=1)
        )
        print(f"{made['minutes']:.1f} min: {name}: {json.dumps(answer)[:300]}", flush=True)

    if arguments.plan:
        for net in arguments.nets:
            keep(
                f"plans {net}",
                ask(deadline + 86_400, "plan", net, size, *arguments.plan, JAX_PLATFORMS="cpu"),
            )
        return
    cache = tempfile.TemporaryDirectory()  # of compiled programs
    os.environ["JAX_COMPILATION_CACHE_DIR"] = os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache.name
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.1"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
    timed = "0.2" if arguments.tiny else str(SECONDS)
    data = {"digits": "", "mnist": arguments.mnist, "cifar10-davidnet": arguments.cifar}
    data = {name: where for name, where in data.items() if where or (arguments.mnist and name == "digits")}
    half = time.monotonic() + 30 * arguments.minutes
    for name, answer in prepare(arguments.nets, arguments.modes, size, data, half).items():
        keep(name, answer)
    for mode, net in itertools.product(arguments.modes, arguments.nets):
        if "error" not in made["compiled"][f"{net}:{mode}"]:
            keep(f"measured {net}:{mode}", ask(deadline, "chipwise", net, size, mode, timed))
    for net in [net for net in arguments.nets if net in TORCH]:
        keep(f"torch {net}", ask(deadline, "torch", net, size, timed))
    plans = arguments.out / "gpu_plans.json"
    planned = json.loads(plans.read_text())["plans"] if plans.exists() else {}
    (arguments.out / "gpu.md").write_text(page(made, planned))


if __name__ == "__main__":
    main()
