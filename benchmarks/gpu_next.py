"""What has no measurement on a GPU yet, in order of worth: `python benchmarks/gpu.py --next --cifar DIR`.

BERT's exact step; ResNet-32 exact and with tuned kernels, the bits of two processes each; DavidNet to its end
beside PyTorch's same net, on the same files with the same seeds; small nets by single and by many steps;
the table of `gpu.py`, one net after another. Each answer is in `gpu_next.json` as soon as it is there, by the
GPU's name, and the same command goes on after it. What failed is tried again, last. A job that would not end
in time is left.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gpu
import numpy as np

SECONDS = 540.0
STEPS = "60st"
SEEDS = (0, 1, 2)
LAUNCHES = {
    "mnist": ("single", "many", "concurrent"),
    "digits": ("single", "many"),
    "cifar10-resnet32": ("single", "concurrent"),
}
"""How the steps of small nets are started: see `launches_child`."""
CONCURRENT = {"xla_gpu_command_buffer_scheduling_mode": "CONCURRENT"}


@dataclass(frozen=True)
class Job:
    """A child of `gpu.py` with its `words`, which needs `least` seconds, and the answer of another job."""

    name: str
    words: tuple[str, ...]
    least: float
    after: str = ""
    uncached: bool = False


def jobs(size: str, cifar: str, folder: Path) -> list[Job]:
    """All jobs, the most worth first."""
    timed = "0.2" if size == "tiny" else str(gpu.SECONDS)
    made = [
        Job("bert exact", ("chipwise", "bert-base", size, "exact", timed), 90),
        Job("bert exact again", ("chipwise", "bert-base", size, "exact", "0.2"), 60, "bert exact", True),
    ]
    for way in ("exact", "tuned", "gradients"):
        file = str(folder / f"gpu_next_{way}.textproto")
        words = ("kernels", size, way, file)
        last = made if way != "gradients" else (later := [])
        last += [
            Job(f"resnet32 {way}", (*words, "first"), 60),
            Job(f"resnet32 {way} again", (*words, "again"), 45, f"resnet32 {way}", True),
        ]
    if cifar or size == "tiny":
        for seed in map(str, SEEDS[: 1 if size == "tiny" else None]):
            made += [
                Job(f"davidnet {seed}", ("davidnet", size, cifar, seed), 60),
                Job(f"davidnet {seed} torch", ("torch_davidnet", size, cifar, seed), 75),
            ]
    for net, ways in LAUNCHES.items():
        made += [Job(f"launches {net} {way}", ("launches", net, size, way), 45) for way in ways]
    made += later
    for net in ("vit-s16", "gpt2-124m", "imagenet-resnet50", "cifar10-davidnet", "mnist"):
        made.append(Job(f"{net} exact", ("chipwise", net, size, "exact", timed), 60))
        if net in gpu.TORCH:
            made.append(Job(f"{net} torch", ("torch", net, size, timed), 60))
    return made


Ask = Callable[[float, Job], dict[str, Any]]


def work(
    todo: list[Job],
    done: dict[str, Any],
    budget: float,
    ask: Ask,
    keep: Callable[[], None],
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Asks for what `done` lacks, in order, then again for what failed, until `budget` seconds are over."""
    end, seen = clock() + budget, set[str]()
    new = [job for job in todo if job.name not in done]
    failed = [job for job in todo if "error" in done.get(job.name, {})]
    for job in [*new, *failed, *new]:  # at last what needed one that had failed
        if job.name in seen or (job.after and "error" in done.get(job.after, {"error": ""})):
            continue
        seen.add(job.name)
        if end - clock() < job.least:
            print(f"{job.name}: left for the next time: {end - clock():.0f} s do not suffice", flush=True)
            continue
        done[job.name] = ask(end - clock(), job)
        keep()
        print(f"{job.name}: {json.dumps(done[job.name])[:300]}", flush=True)


def main(size: str, cifar: str, folder: Path, budget: float = SECONDS) -> None:
    """Works on all jobs. Ends at once, with an error, where there is no GPU, unless it is only tried."""
    began = time.monotonic()
    found = gpu.ask(began + budget, "device")
    if "error" in found or (found["platform"] != "gpu" and size != "tiny"):
        raise SystemExit(f"no GPU here ({found.get('error') or found['kind']}): nothing is measured")
    file = folder / "gpu_next.json"
    everything = json.loads(file.read_text()) if file.exists() else {}
    done = everything.setdefault(found["kind"], {})
    if not cifar:
        print("without --cifar DIR: DavidNet is not trained", flush=True)

    def keep() -> None:
        part = file.with_suffix(".part")
        part.write_text(json.dumps(everything, indent=1))
        part.replace(file)
        (folder / "gpu_next.md").write_text(page(everything))

    with tempfile.TemporaryDirectory() as cache:
        cached = {
            "JAX_COMPILATION_CACHE_DIR": cache,
            "TORCHINDUCTOR_CACHE_DIR": cache,
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }

        def ask(left: float, job: Job) -> dict[str, Any]:
            variables = {"JAX_ENABLE_COMPILATION_CACHE": "false"} if job.uncached else cached
            answer = gpu.ask(time.monotonic() + left, *job.words, **variables)
            return {**answer, "date": time.strftime("%Y-%m-%d")}

        work(jobs(size, cifar, folder), done, budget - (time.monotonic() - began), ask, keep)


def page(everything: dict[str, dict[str, Any]]) -> str:
    """What is known, as Markdown."""
    lines = ["# Measured by `python benchmarks/gpu.py --next`", ""]
    for device, done in everything.items():
        lines += [
            f"## {device}",
            "",
            "| what | ms a step | the same bits in a second process |",
            "|---|---|---|",
        ]
        for name in ("bert exact", "resnet32 exact", "resnet32 tuned", "resnet32 gradients"):
            one, again = done.get(name, {}), done.get(f"{name} again", {})
            bits = [answer.get("bits") or answer.get("first_losses") for answer in (one, again)]
            same = "not measured" if None in bits else "yes" if bits[0] == bits[1] else "**no**"
            speed = one.get("examples_per_second")
            ms = f"{1e3 * one['batch'] / speed['median']:.2f}" if speed else one.get("error", "not measured")
            lines.append(f"| {name} | {ms} | {same} |")
        lines += [
            "",
            "| DavidNet, seed | accuracy | seconds of training | PyTorch | seconds |",
            "|---|---|---|---|---|",
        ]
        for seed in SEEDS:
            pair = [done.get(f"davidnet {seed}{way}", {}) for way in ("", " torch")]
            told = [
                f"{100 * one['accuracy']:.2f} % | {one['seconds']:.1f}" if "accuracy" in one else "- | -"
                for one in pair
            ]
            lines.append(f"| {seed} | {' | '.join(told)} |")
        lines += ["", "| small net | steps | ms a step | the bits of single steps |", "|---|---|---|---|"]
        for net, ways in LAUNCHES.items():
            single = done.get(f"launches {net} single", {})
            for way in ways:
                one = done.get(f"launches {net} {way}", {})
                same = "not measured"
                if "bits" in one and "bits" in single:
                    same = "yes" if one["bits"] == single["bits"] else "**no**"
                if way == "many" and one.get("steps_per_call") == 1:
                    same = "single steps: other kernels"
                ms = f"{one['ms']:.3f}" if "ms" in one else one.get("error", "not measured")
                lines.append(f"| {net} | {way} | {ms} | {same} |")
        lines += ["", "| others | answer |", "|---|---|"]
        shown = ("bert", "resnet32", "davidnet", "launches")
        lines += [
            f"| {n} | `{json.dumps(one)[:200]}` |" for n, one in done.items() if not n.startswith(shown)
        ]
        lines.append("")
    return "\n".join(lines)


# ---- children, each in a process of its own


def device_child() -> dict[str, Any]:
    import chipwise as cw

    found = cw.machine.detect.detect(1)
    return {"platform": found.platform, "kind": found.kind}


def kernels_child(size: str, way: str, file: str, turn: str) -> dict[str, Any]:
    """ResNet-32's bits after some steps, then its speed.

    The first process of a way tunes and leaves its file, the second one reads it. With the way "gradients",
    those of convolutions are tuned too, which chipwise refuses: does XLA choose some that add in one order?
    """
    import chipwise as cw
    from chipwise.machine import kernels
    from chipwise.run import tune
    from chipwise.study.bench import measure_train

    if way == "gradients":
        kernels._GRADIENT = re.compile("(?!)")
    recipe = gpu.made_up("cifar10-resnet32", size)
    asked = None if way == "exact" else kernels.TUNED if turn == "first" else file
    with tempfile.TemporaryDirectory() as place:
        run = Path(place) / "run"
        on = cw.On(devices=1, kernels=asked)
        steps = "3st" if size == "tiny" else STEPS
        result = cw.fit(recipe, run, on=on, stop_after=steps, eval_every=None, progress="none")
        if asked == tune.TUNED:
            Path(file).write_bytes((run / kernels.FILE).read_bytes())
    made = {"bits": result.fingerprint, "batch": recipe.batch, **kernels.stated(kernels.loaded())}
    if turn == "first":
        seconds = 0.2 if size == "tiny" else gpu.SECONDS
        record = measure_train(recipe, seconds=seconds, warmup=10, on=on, progress="none")
        made["examples_per_second"] = record.figures["examples_per_second"].to_json()
    return made


def davidnet_child(size: str, cifar: str, seed: str) -> dict[str, Any]:
    """The recipe to its end."""
    import chipwise as cw

    tiny = [*gpu.NETS["cifar10-davidnet"]["tiny"], "duration=3st"] if size == "tiny" else []
    recipe = cw.load("cifar10-davidnet", [f"seed={seed}", *tiny], cifar or None, synthetic=not cifar)
    result = cw.fit(recipe, eval_every=None, progress="none")
    known = {name: result.seconds.get(name) for name in ("compile", "total")}
    accuracy = float(result.metrics["eval/accuracy"])
    return {"accuracy": accuracy, "seconds": result.seconds["train"], **known, "bits": result.fingerprint}


def torch_davidnet_child(size: str, cifar: str, seed: str) -> dict[str, Any]:
    """The same net, files, batch, schedule, decay and augmentation in PyTorch, compiled, under autocast to
    bfloat16. Batch norm is over 512 examples, as in the original, chipwise's over 64 of a replica."""
    import torch
    import torch.nn.functional as F

    import chipwise as cw

    torch.manual_seed(int(seed))
    full = size == "full"
    device = "cuda" if torch.cuda.is_available() else "cpu"
    batch, epochs, width = (512, 24, 64) if full else (16, 1, 4)
    images = cw.datasets.cifar10(cifar or None) if cifar else None
    numbers = (125.31, 122.95, 113.87), (62.99, 62.09, 66.70)  # as in `cw.datasets.cifar10`
    mean, std = (torch.tensor(values, device=device).view(3, 1, 1) for values in numbers)

    def whole(source: Any) -> tuple[Any, Any]:
        if source is None:
            return torch.randint(256, (64, 3, 32, 32), device=device), torch.arange(64, device=device) % 10
        columns = source.take(np.arange(len(source)))
        x = torch.as_tensor(columns["image"], device=device).permute(0, 3, 1, 2)
        return x, torch.as_tensor(columns["label"], device=device).long()

    (x, y), (held_x, held_y) = (whole(images and getattr(images, part)) for part in ("train", "eval"))
    normal = ((x.float() - mean) / std).bfloat16() if device == "cuda" else (x.float() - mean) / std
    padded = F.pad(normal, (4, 4, 4, 4), "reflect")
    net = gpu.davidnet(width).to(device, memory_format=torch.channels_last)
    model = torch.compile(net) if full else net
    rule = torch.optim.SGD(
        net.parameters(), 0.4, momentum=0.9, nesterov=True, weight_decay=5e-4, fused=device == "cuda"
    )
    side = torch.arange(32, device=device)
    order = torch.cat([torch.randperm(len(x), device=device) for _ in range(epochs)])
    total = -(-epochs * len(x) // batch)

    def drawn(rows: Any) -> Any:
        """Mirror-padded crops, flips and 8 x 8 cutouts of these images."""
        n = len(rows)
        top, left = torch.randint(9, (2, n, 1), device=device)
        across = torch.where(torch.rand(n, 1, device=device) < 0.5, side, 31 - side) + left
        cut = padded[rows[:, None, None], :, (top + side)[:, :, None], across[:, None, :]].permute(0, 3, 1, 2)
        high, far = torch.randint(25, (2, n, 1), device=device)
        inside = [(side >= at) & (side < at + 8) for at in (high, far)]
        hole = inside[0][:, None, :, None] & inside[1][:, None, None, :]
        return cut.masked_fill(hole, 0).contiguous(memory_format=torch.channels_last)

    def step(number: int, rows: Any) -> None:
        epoch = (number + 1) * batch / len(x)
        falling = max(0.0, (epochs - epoch) / (epochs - 5)) if epochs > 5 else 1.0
        rule.param_groups[0]["lr"] = 0.4 * min(epoch / 5, falling)
        rule.zero_grad(set_to_none=True)
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            loss = F.cross_entropy(model(drawn(rows)).float(), y[rows])
        loss.backward()
        rule.step()

    def settled() -> float:
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    before = {name: value.clone() for name, value in net.state_dict().items()}
    for _ in range(3):  # compiles
        step(0, order[:batch])
    net.load_state_dict(before)
    rule.state.clear()
    began = settled()
    for number in range(total):
        step(number, order[number * batch : (number + 1) * batch])
    seconds = settled() - began
    net.eval()
    with torch.no_grad(), torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
        right = 0
        for at in range(0, len(held_x), 1000):
            part = ((held_x[at : at + 1000].float() - mean) / std).contiguous(
                memory_format=torch.channels_last
            )
            right += int((net(part).argmax(1) == held_y[at : at + 1000]).sum())
    return {"accuracy": right / len(held_x), "seconds": seconds, "steps": total, "torch": torch.__version__}


def launches_child(net: str, size: str, way: str) -> dict[str, Any]:
    """What the step's programs start, by XLA's list of their thunks, the milliseconds of a step, and the bits
    after all. "many" runs many steps in a call. "concurrent" lets a graph's commands run beside each other.
    """
    from launches import STEPS, dumped

    many, steps = way == "many", 8 if size == "tiny" else 640
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_dump_to={folder}"
        os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"
        import chipwise as cw
        from chipwise.machine import compiler
        from chipwise.run.session import Session
        from chipwise.step.state import fingerprint

        if way == "concurrent":
            serial = compiler._gpu_options
            compiler._gpu_options = lambda *about: {**serial(*about), **CONCURRENT}
        recipe = cw.load(net) if net == "digits" else gpu.made_up(net, size)
        recipe = dataclasses.replace(recipe, duration=f"{steps}st")
        on = cw.On(devices=1, feed="device", steps_per_call=min(STEPS, steps // 4) if many else 1)
        with Session(recipe, on) as session:
            session.begin()
            before = dict(dumped(Path(folder)))
            session.compile(steps)
            seconds = []
            for _ in range(4):
                began = time.perf_counter()
                session.advance(steps // 4)
                session.wait()
                seconds.append(time.perf_counter() - began)
            bits, most = fingerprint(session.snapshot()), session.calls.most
        found = {name: one for name, one in dumped(Path(folder)) if name not in before}
    starts = {name: [one.alone.total(), one.graphs, one.commands] for name, one in found.items()}
    ms = 1e3 * min(seconds[1:]) / (steps // 4)
    return {"ms": ms, "steps_per_call": most, "bits": bits, "starts": starts}


CHILDREN = {
    "device": device_child,
    "kernels": kernels_child,
    "davidnet": davidnet_child,
    "torch_davidnet": torch_davidnet_child,
    "launches": launches_child,
}
