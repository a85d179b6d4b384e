"""Training steps on the CPU: chipwise's models against the same nets in PyTorch.

    python benchmarks/cpu_vs_pytorch.py [--nets mnist davidnet resnet32] [--runs 5] [--threads 2]

A step is forward, loss, backward and optimizer (Adam for MNIST, Nesterov SGD for the others), float32, batch
128, with the data in memory. Each contender has its own process and waits while another is measured. Runs
alternate, so that other work on the machine affects all of them. Compilation and three warm-up steps are not
timed. The table goes to `benchmarks/cpu_vs_pytorch.md`.
"""

import argparse
import os
import platform
import runpy
import statistics
import subprocess
import sys
import time
from datetime import date
from pathlib import Path

BATCH = 128
#: Steps in one run: one to three seconds.
STEPS = {"mnist": 40, "davidnet": 2, "resnet32": 4}
SHAPES = {"mnist": (28, 28, 1), "davidnet": (32, 32, 3), "resnet32": (32, 32, 3)}
CONTENDERS = ("chipwise", "chipwise-kept", "chipwise-lax", "pytorch", "pytorch-channels-last")
#: With these, glibc keeps the memory of XLA's temporaries between calls.
KEPT = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "2147483647"}
LABELS = {
    "chipwise": "chipwise",
    "chipwise-kept": "chipwise, memory kept",
    "chipwise-lax": "the same with XLA's own convolutions",
    "pytorch": "PyTorch, NCHW (its default)",
    "pytorch-channels-last": "PyTorch, channels last",
}


def jax_step(net: str, plain: bool):
    """A function that runs `n` steps, and the versions used. `plain`: without chipwise's CPU forms."""
    import jax
    import jax.numpy as jnp
    import optax

    if plain:
        from chipwise.models import conv_layers as layers

        layers.conv = jax.lax.conv_general_dilated
    from chipwise.interop.nnx import functional
    from chipwise.models.davidnet import DavidNet
    from chipwise.models.small import MnistNet

    example = Path(__file__).parents[1] / "examples" / "cifar10_resnet32.py"
    model = {"mnist": MnistNet, "davidnet": DavidNet}.get(net) or runpy.run_path(str(example))["ResNet32"]
    init, apply = functional(lambda rngs: model(rngs=rngs))
    optimizer = optax.adam(1e-3) if net == "mnist" else optax.sgd(1e-3, momentum=0.9, nesterov=True)

    def step(carry, x, y):
        params, state, moments, key = carry

        def loss(params):
            logits, new = apply(params, state, x, key, True)
            return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean(), new

        (value, state), grads = jax.value_and_grad(loss, has_aux=True)(params)
        updates, moments = optimizer.update(grads, moments, params)
        return (optax.apply_updates(params, updates), state, moments, jax.random.split(key, 1)[0]), value

    step = jax.jit(step, donate_argnums=0)
    params, state = init(jax.random.key(0))
    carry = (params, state, optimizer.init(params), jax.random.key(1))
    x = jax.random.normal(jax.random.key(2), (BATCH, *SHAPES[net]))
    y = jnp.arange(BATCH) % 10

    def run(n: int):
        nonlocal carry
        for _ in range(n):
            carry, value = step(carry, x, y)
        return float(value)

    return run, f"jax {jax.__version__}"


def torch_step(net: str, threads: int, channels_last: bool):
    """A function that runs `n` steps, and the versions used."""
    import torch
    import torch.nn.functional as F
    from torch import nn

    torch.set_num_threads(threads)

    def conv_bn(c_in, c_out, kernel=3, stride=1):
        pad = (kernel - stride + 1) // 2
        return [
            nn.Conv2d(c_in, c_out, kernel, stride, pad, bias=False),
            nn.BatchNorm2d(c_out),
            nn.ReLU(inplace=True),
        ]

    class Residual(nn.Module):
        def __init__(self, c):
            super().__init__()
            self.body = nn.Sequential(*conv_bn(c, c), *conv_bn(c, c))

        def forward(self, x):
            return x + self.body(x)

    class Head(nn.Module):
        def __init__(self, c):
            super().__init__()
            self.dense = nn.Linear(c, 10, bias=False)

        def forward(self, x):
            return self.dense(torch.amax(x, (2, 3))) * 0.125

    if net == "mnist":
        model = nn.Sequential(
            *conv_bn(1, 6),
            *conv_bn(6, 12, 6, 2),
            *conv_bn(12, 24, 6, 2),
            nn.Flatten(),
            nn.Linear(7 * 7 * 24, 200, bias=False),
            nn.BatchNorm1d(200),
            nn.ReLU(inplace=True),
            nn.Dropout(0.5),
            nn.Linear(200, 10, bias=False),
        )
    elif net == "resnet32":
        from torch_resnet32 import ResNet32

        model = ResNet32()
    else:
        pool = nn.MaxPool2d(2)
        model = nn.Sequential(
            *conv_bn(3, 64),
            *conv_bn(64, 128),
            pool,
            Residual(128),
            *conv_bn(128, 256),
            pool,
            *conv_bn(256, 512),
            pool,
            Residual(512),
            Head(512),
        )
    if net == "mnist":
        optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    else:
        optimizer = torch.optim.SGD(model.parameters(), 1e-3, momentum=0.9, nesterov=True)
    h, w, c = SHAPES[net]
    x, y = torch.randn(BATCH, c, h, w), torch.arange(BATCH) % 10
    if channels_last:
        model, x = model.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)

    logits = model.logits if net == "resnet32" else model

    def run(n: int):
        for _ in range(n):
            optimizer.zero_grad(set_to_none=True)
            value = F.cross_entropy(logits(x), y)
            value.backward()
            optimizer.step()
        return value.item()

    return run, f"torch {torch.__version__}"


def child(contender: str, net: str, threads: int):
    """Answers each line on standard input with the seconds of a step."""
    if contender.startswith("chipwise"):
        run, versions = jax_step(net, plain=contender == "chipwise-lax")
    else:
        run, versions = torch_step(net, threads, channels_last=contender.endswith("last"))
    run(3)
    print(versions, flush=True)
    for _ in sys.stdin:
        start = time.perf_counter()
        run(STEPS[net])
        print((time.perf_counter() - start) / STEPS[net], flush=True)


def measure(net: str, runs: int, threads: int):
    """Seconds of a step for each contender, `runs` each, and their versions."""
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": str(threads)}
    processes, versions = {}, {}
    for name in CONTENDERS:
        # Sequentially, since compiling two at a time would need twice the memory.
        command = [sys.executable, __file__, "--child", name, "--nets", net, "--threads", str(threads)]
        processes[name] = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment | (KEPT if name == "chipwise-kept" else {}),
        )
        versions[name] = processes[name].stdout.readline().strip()
    seconds = {name: [] for name in CONTENDERS}
    for _ in range(runs):
        for name, process in processes.items():
            process.stdin.write("\n")
            process.stdin.flush()
            seconds[name].append(float(process.stdout.readline()))
    for process in processes.values():
        process.stdin.close()
        process.wait()
    return seconds, versions


def table(net: str, seconds: dict, runs: int) -> str:
    """A markdown table: medians, the extremes, and the rate against PyTorch's default."""
    base = statistics.median(seconds["pytorch"])
    lines = [
        f"## {net}, batch {BATCH}",
        "",
        f"| | ms a step, median of {runs} | min to max | images/s | PyTorch NCHW = 1 |",
        "|---|---|---|---|---|",
    ]
    for name, s in seconds.items():
        middle = statistics.median(s)
        lines.append(
            f"| {LABELS[name]} | {middle * 1e3:.1f} | {min(s) * 1e3:.1f} to {max(s) * 1e3:.1f} "
            f"| {BATCH / middle:,.0f} | {base / middle:.2f}x |"
        )
    return "\n".join(lines) + "\n"


def processor() -> str:
    """The processor's name as the system gives it."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nets", nargs="+", default=list(STEPS), choices=list(STEPS))
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--child", choices=CONTENDERS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        return child(arguments.child, arguments.nets[0], arguments.threads)
    parts, versions = [], {}
    for net in arguments.nets:
        seconds, versions = measure(net, arguments.runs, arguments.threads)
        parts.append(table(net, seconds, arguments.runs))
        print(parts[-1], flush=True)
    header = (
        "# Training steps on the CPU against PyTorch\n\n"
        f"Written by `benchmarks/cpu_vs_pytorch.py` on {date.today()}: {processor()}, "
        f"{arguments.threads} cores, {', '.join(sorted(set(versions.values())))}, "
        f"Python {platform.python_version()}, float32.\n"
        "A step is forward, loss, backward and optimizer; runs alternate between the contenders.\n"
        f"Memory kept: {' '.join(f'{name}={value}' for name, value in KEPT.items())} (docs/measured.md).\n"
    )
    text = "\n".join([header, *parts])
    Path(__file__).with_suffix(".md").write_text(text)


if __name__ == "__main__":
    main()
