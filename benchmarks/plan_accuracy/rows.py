"""Published training throughputs as programs of one device, to be timed and compared.

`published.csv` holds the measurements, each with its source; this file says what each ran. `rows()` gives one
`Row` for every line: usable ones with their programs, the others with the reason why not. Nothing is
traced before a program is asked for.

Sizes come from the sources named in the table, MaxText's from the scripts beside its results
(https://github.com/AI-Hypercomputer/maxtext src/maxtext/configs/tpu, and `get_individual_scales` of its
configuration for the models given as a scale) and from
https://github.com/AI-Hypercomputer/tpu-recipes training; llm-foundry's micro-batches from its
scripts/train/benchmarking/README.md. Parameter counts are tested against the published ones.
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp

from chipwise.chips.catalogue import Chip, named
from chipwise.interop.nnx import functional
from chipwise.models.davidnet import DavidNet
from chipwise.models.small import MnistNet

from . import programs
from .nets_convolutional import NETS
from .nets_transformer import GPT, bert, mixer, vit
from .programs import DTYPES, Program, Spec

PUBLISHED = Path(__file__).with_name("published.csv")


@dataclass(frozen=True)
class Part:
    """A program that a step runs `count` times on each device."""

    name: str
    count: int
    program: Callable[[], Program]


@dataclass(frozen=True)
class Reduce:
    """A sum over `devices`, `count` times a step. `hidden`: it runs beside the computation."""

    bytes: float  # of the array that each of them has
    devices: int
    count: float
    hidden: bool


@dataclass(frozen=True)
class Row:
    """One measurement and the program that stands for it.

    `program` is the gradient of the loss over a device's micro-batch and the optimizer's update. With
    `update_program` set it is the gradient alone, run `accumulation` times before one update. With
    `layered` it is one of `layers` equal layers, forwards and backwards, and `head_program` the
    embedding, logits and loss. `parts` says all this as programs and counts. Throughput is global,
    examples are images or sequences, `per_device_batch` is one micro-batch's.
    """

    line: int  # of published.csv
    model: str
    family: str = ""
    chip: str = ""  # name in the catalogue
    devices: int = 1  # JAX devices
    per_device_batch: int = 0
    accumulation: int = 1
    precision: str = ""  # "bf16", "fp16", "tf32", "f32"
    software: str = ""  # "eager", "compiled", "tuned"
    parallel: str = "none"  # "none", "data", "fsdp"
    measured: float = 0.0  # examples/s
    parameters: int = 0
    program: Callable[[], Program] | None = None
    update_program: Callable[[], Program] | None = None
    head_program: Callable[[], Program] | None = None
    layered: bool = False
    layers: int = 1
    reduces: tuple[Reduce, ...] = ()
    kernel: bool = False  # the source ran hand-written attention kernels
    kernel_flops: float = 0.0  # that a layer's program leaves out: to be added at the chip's peak
    clock: str = "steps"  # "wall": the time includes evaluation, input or compilation
    source: str = ""
    note: str = ""
    usable: bool = True
    why_not: str = ""

    @property
    def examples_per_step(self) -> int:
        return self.per_device_batch * self.devices * self.accumulation

    @property
    def parts(self) -> tuple[Part, ...]:
        if self.program is None:
            return ()
        parts = [Part("layer" if self.layered else "step", self.layers * self.accumulation, self.program)]
        if self.head_program is not None:
            parts.append(Part("head", self.accumulation, self.head_program))
        if self.update_program is not None:
            parts.append(Part("update", 1, self.update_program))
        return tuple(parts)

    @property
    def label(self) -> str:
        size = f"{self.devices} x {self.per_device_batch}"
        return f"{self.model}, {size}{f' x {self.accumulation}' if self.accumulation > 1 else ''}"


# ---- one-program models: loss and inputs of a micro-batch


@dataclass(frozen=True)
class Model:
    """A net that fits one device: `loss(w, *inputs)`, and the inputs for a batch in a dtype."""

    family: str
    loss: Callable
    inputs: Callable


def _images(net, pixels: int, family: str, channels: int = 3) -> Model:
    def loss(w, images, labels):
        return programs.cross_entropy(net(w, images), labels)

    def inputs(batch, dtype):
        return Spec((batch, pixels, pixels, channels), dtype), Spec((batch,), jnp.int32)

    return Model(family, loss, inputs)


def _module(make) -> Callable:
    """A Flax NNX module of chipwise as a net."""
    init, apply = functional(make)

    def net(w, x):
        params, state = jax.eval_shape(init, jax.random.key(0))
        leaves, tree = jax.tree.flatten(params)
        given = jax.tree.unflatten(tree, [w(*leaf.shape) for leaf in leaves])
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), state)
        return apply(given, zeros, x, jax.random.key(0), True)[0]

    return net


def _bert(length: int, masked: int) -> Model:
    def inputs(batch, dtype):
        sizes = ((batch, length), (batch, length), (batch, masked), (batch, masked), (batch,))
        return tuple(Spec(size, jnp.int32) for size in sizes)

    return Model("bert", bert, inputs)


MODELS = {
    **{name: _images(net, 224, "resnet") for name, net in NETS.items() if "resnet" in name},
    "resnet164": _images(NETS["resnet164"], 32, "cifar"),
    "efficientnet_b0": _images(NETS["efficientnet_b0"], 224, "efficientnet"),
    "efficientnetv2_s": _images(NETS["efficientnetv2_s"], 300, "efficientnet"),
    "vit_s16": _images(vit, 224, "vit"),
    "mixer_b16": _images(mixer, 224, "mixer"),
    "davidnet": _images(_module(lambda rngs: DavidNet(rngs=rngs)), 32, "cifar"),
    "mnist": _images(_module(lambda rngs: MnistNet(rngs=rngs)), 28, "cifar", channels=1),
    "bert128": _bert(128, 20),
    "bert512": _bert(512, 80),
}


def _mpt(layers: int, width: int, heads: int, remat: str = "none") -> GPT:
    return GPT(layers, width, heads, 4 * width, 50368, 2048, tied=True, remat=remat)


def _gpt2(layers: int, width: int, heads: int) -> GPT:
    return GPT(layers, width, heads, 4 * width, 50304, 1024, tied=True)


def _llama(layers, width, heads, hidden, vocab=128256, length=8192, kv_heads=8) -> GPT:
    return GPT(layers, width, heads, hidden, vocab, length, kv_heads=kv_heads, kind="llama")


def _scaled(layers: int, width: int, heads: int, hidden: int) -> GPT:
    """MaxText's default model times a scale: heads of 128, a vocabulary of 32,000, length 2048."""
    return GPT(
        layers, width, heads, hidden, 32000, 2048, size=128, kind="llama", tpu=True, attention="kernel"
    )


def _tpu(model: GPT) -> GPT:
    return replace(model, tpu=True, attention="kernel")


LLAMA2_7B = _llama(32, 4096, 32, 11008, 32000, 4096, kv_heads=32)
LLAMA2_70B = _tpu(_llama(80, 8192, 64, 28672, 32000, 4096))
LLAMA3_8B = _llama(32, 4096, 32, 14336)
LLAMA3_70B = _tpu(_llama(80, 8192, 64, 28672))
LLAMA3_405B = _tpu(_llama(126, 16384, 128, 53248))
# The names fit MaxText's defaults of 2023: two matrices in the feed-forward, heads of 256. Its script of then
# (MaxText/configs/v4/22b.sh@232369c) asks for no attention kernel.
GPT_22B = GPT(48, 6144, 24, 24576, 32768, 2048, size=256, kind="plain", tpu=True, remat="full")
GPT_52B = GPT(32, 12288, 32, 49152, 32768, 2048, size=256, kind="plain", tpu=True, remat="full")
GPT_16B = _scaled(32, 4096, 64, 28672)
GPT_32B = _scaled(32, 8192, 64, 28672)
GPT_64B = _scaled(64, 8192, 64, 28672)
GPT_128B = _scaled(64, 8192, 128, 57344)
GPT_256B = _scaled(64, 16384, 128, 57344)
GPT_1024B = _scaled(128, 16384, 256, 114688)
PAX_126M = GPT(12, 768, 12, 3072, 50304, 2048, tied=True)
PAX_5B = GPT(24, 4096, 32, 16384, 50304, 2048, tied=True, remat="dots")


# ---- what each line ran


@dataclass(frozen=True)
class Run:
    """Of one line: the model (a name of `MODELS`, a `GPT`, the size of a product, or none); how it ran."""

    model: str | GPT | int | None
    software: str
    optimizer: str = "sgd"
    batch: int = 0  # micro-batch of a device; 0: the line's global batch over its devices
    accumulation: int = 1
    parallel: str = ""  # "" : "data" on several devices
    precision: str = ""  # "": the line's
    clock: str = "steps"
    note: str = ""
    why_not: str = ""
    chips: float = 0.0  # 0: the line's
    epochs: int = 0  # of 50,000 images in the line's seconds


def _fsdp(model: GPT, batch: int, accumulation: int = 1, **options) -> Run:
    software = "compiled" if model.tpu else "tuned"
    return Run(model, software, "adam", batch, accumulation, parallel="fsdp", **options)


_R50 = "resnet50"
_CONVENTION = (
    "TFLOP/s by MaxText's count before July 2025, attention not halved; if it was, 2 to 4 % more tokens"
)
_NOT_BUILT = "a mixture of experts: how tokens spread over experts is not in a static program"
_EPOCHS = "seconds to an accuracy with a net of its own, epochs and batch not stated in the line"

RUNS: dict[int, Run] = {
    **{line: Run(_R50, "eager") for line in (2, 3, 4, 5, 6, 7, 8)},
    **{line: Run(_R50, "tuned") for line in (9, 10, 11, 12, 13)},
    **{line: Run(_R50, "compiled") for line in (14, 15, 16, 17, 18, 19)},
    20: Run("bert128", "eager", "lamb", 256, 32),
    21: Run("bert128", "eager", "lamb", 128, 64),
    22: Run("bert128", "eager", "lamb", 256, 32),
    23: Run("bert512", "eager", "lamb", 32, 128),
    24: Run("bert512", "eager", "lamb", 32, 128),
    25: Run("bert128", "eager", "lamb", 32, 128),
    26: Run("bert128", "eager", "lamb", 64, 64),
    **{line: Run(_R50, "tuned", "lars", note="image decoding included") for line in (27, 28, 29, 30)},
    31: Run(_R50, "tuned", why_not="16 hosts of CPUs, sockets and network not stated"),
    **{
        line: Run(
            "bert512", "tuned", "lamb", why_not="sequences packed to an unstated mean length, perhaps fp8"
        )
        for line in (32, 33, 34)
    },
    35: Run(_R50, "compiled", clock="wall"),
    36: Run(_R50, "compiled", clock="wall"),
    37: Run(_R50, "compiled", "lars", clock="wall"),
    38: Run(_R50, "compiled", clock="wall", note="precision inferred; whether XLA ran is not stated"),
    39: Run(_R50, "compiled", clock="wall"),
    40: Run(_R50, "compiled", clock="wall"),
    41: Run(_R50, "compiled", note="batch: the one then suggested for TPUs"),
    42: Run(_R50, "eager", why_not="batch unknown"),
    43: Run(_R50, "compiled", clock="wall"),
    44: Run(_R50, "compiled", clock="wall"),
    45: Run(_R50, "compiled", clock="wall"),
    46: Run("bit_resnet50", "compiled", precision="f32", clock="wall", note="90 epochs in about 32 minutes"),
    47: Run("resnet18", "eager"),
    48: Run(_R50, "eager"),
    49: Run("resnet152", "eager"),
    50: Run("vit_s16", "eager"),
    51: Run("efficientnet_b0", "eager"),
    52: Run("mixer_b16", "eager"),
    53: Run("wide_resnet50_2", "eager"),
    54: Run("efficientnetv2_s", "eager"),
    55: Run(_R50, "eager", why_not="channels first: the programs here are channels last"),
    56: _fsdp(replace(LLAMA2_7B, remat="flash"), 2),
    57: Run(PAX_126M, "compiled", "adam", 4, note="length 2048 not confirmed; eight hosts"),
    58: _fsdp(PAX_5B, 8, note="length 2048 not confirmed; 32 hosts"),
    59: _fsdp(PAX_5B, 8, note="length 2048 not confirmed; 32 hosts"),
    60: _fsdp(_mpt(12, 768, 12), 26, 3),
    61: _fsdp(_mpt(24, 1024, 16), 16, 4),
    62: _fsdp(_mpt(24, 2048, 16), 8, 8),
    63: _fsdp(_mpt(32, 4096, 32, "full"), 12, 4),
    64: _fsdp(_mpt(12, 768, 12), 40, 2),
    65: _fsdp(_mpt(24, 1024, 16), 32, 2),
    66: _fsdp(_mpt(32, 2560, 20), 10, 2),
    67: _fsdp(_mpt(32, 4096, 32), 6, 2),
    68: _fsdp(_mpt(24, 1536, 12), 24, 2),
    69: _fsdp(_mpt(24, 2048, 16), 14),
    70: _fsdp(_mpt(32, 4096, 32), 6),
    71: Run(_gpt2(24, 1024, 16), "tuned", "adam", 32, 2),
    72: Run(_gpt2(36, 1280, 20), "tuned", "adam", 32, 2),
    73: Run(_gpt2(48, 1600, 25), "tuned", "adam", 16, 8),
    **{
        line: _fsdp(
            replace(LLAMA3_8B, remat="alternate"), 2, why_not="an H100 of 500 W and 2.4 TB/s, in no catalogue"
        )
        for line in (74, 75, 76)
    },
    77: _fsdp(GPT_22B, 13, note=_CONVENTION),
    78: _fsdp(GPT_52B, 7, note=_CONVENTION),
    79: _fsdp(replace(GPT_16B, remat="full"), 6, note=_CONVENTION),
    80: _fsdp(replace(GPT_32B, remat="full"), 4, note=_CONVENTION),
    81: _fsdp(replace(GPT_64B, remat="full"), 2, note=_CONVENTION),
    82: _fsdp(replace(GPT_128B, remat="qkv", tensor=16), 1, note=_CONVENTION),
    83: _fsdp(replace(GPT_16B, remat="full"), 6, why_not="32 slices over a data-centre network"),
    84: _fsdp(replace(GPT_32B, remat="dots", tensor=4), 6, note=_CONVENTION),
    85: _fsdp(replace(GPT_64B, remat="dots", tensor=4), 3, note=_CONVENTION),
    86: _fsdp(replace(GPT_128B, remat="dots", tensor=8), 1, note=_CONVENTION),
    87: _fsdp(replace(GPT_256B, remat="dots", tensor=8), 1, note=_CONVENTION),
    88: _fsdp(replace(GPT_1024B, remat="full", tensor=16), 2, note=_CONVENTION),
    89: _fsdp(replace(LLAMA2_70B, remat="qkv"), 2, note="2,097,152 tokens a step in the recipe's log"),
    90: _fsdp(replace(LLAMA3_70B, remat="qkv"), 5, note="10,485,760 tokens a step in the recipe's log"),
    91: _fsdp(LLAMA3_405B, 1, why_not="batch and rematerialisation not stated for one slice"),
    92: Run(None, "compiled", why_not=_NOT_BUILT),
    93: _fsdp(replace(LLAMA2_70B, remat="qkvo"), 4, chips=256, note="512 TensorCores: v5p-512 has 256 chips"),
    94: Run(None, "compiled", why_not=_NOT_BUILT),
    95: _fsdp(replace(_tpu(LLAMA3_8B), remat="qkvo"), 3),
    96: _fsdp(replace(_tpu(LLAMA3_8B), remat="qkvo"), 4),
    97: _fsdp(replace(LLAMA3_70B, remat="qkv"), 2),
    98: Run(None, "compiled", why_not="alternating local attention over 32,768 tokens is not built here"),
    99: _fsdp(replace(LLAMA3_70B, remat="qkva"), 2),
    100: _fsdp(replace(LLAMA3_405B, remat="kv"), 3),
    101: Run(None, "compiled", why_not="fp8"),
    102: Run(None, "compiled", why_not="the model's sizes were not found"),
    103: Run(None, "compiled", why_not="the model's sizes were not found"),
    104: Run(None, "compiled", why_not=_NOT_BUILT),
    105: Run(1024, "compiled"),
    106: Run(2048, "compiled"),
    107: Run(4096, "compiled"),
    108: Run(32768, "compiled"),
    109: _fsdp(replace(LLAMA2_7B, remat="flash"), 4, note=_CONVENTION),
    **{line: Run(None, "eager", why_not=_EPOCHS) for line in (*range(110, 116), 120)},
    116: Run(None, "eager", why_not="epochs and batch not stated"),
    117: Run("davidnet", "eager", epochs=24, clock="wall", note="validation included"),
    118: Run(
        "davidnet", "eager", epochs=13, clock="wall", note="CELU and ghost batch norm; as DavidNet here"
    ),
    119: Run("davidnet", "eager", why_not="evaluation with flipped copies inside the clock"),
    121: Run(None, "eager", why_not="a net of its own, precision not stated"),
    122: Run(None, "eager", why_not="width, batch and precision not stated"),
    123: Run(None, "eager", why_not="width, batch and precision not stated"),
    124: Run(None, "eager", why_not="batch and precision not stated"),
    125: Run("resnet164", "eager", batch=128, epochs=181, clock="wall", note="batch 128 assumed"),
    126: Run("resnet164", "eager", batch=128, epochs=181, clock="wall", note="batch 128 assumed"),
    127: Run("davidnet", "compiled"),
    128: Run("davidnet", "eager"),
    129: Run("davidnet", "eager"),
    130: Run("mnist", "compiled", "adam"),
    131: Run("mnist", "eager", "adam"),
}

CHIPS = {
    "A100-SXM4": "a100",
    "H100 96GB": "h100",
    "V100": "v100",
    "P100": "p100",
    "Xeon": "cpu",
    "TPU7x": "tpu7x",
}
"""Where the catalogue knows a published name differently: by its beginning."""


def chip_of(device: str) -> Chip:
    """The catalogue's row for a device named as in published.csv."""
    close = named(device) or named(device.split(" (")[0])
    if close is None:
        close = next(named(name) for start, name in CHIPS.items() if device.startswith(start))
    assert close is not None, device
    return close


def _precision(text: str) -> str:
    for word, name in (
        ("bf16", "bf16"),
        ("tf32", "tf32"),
        ("fp32", "f32"),
        ("fp16", "fp16"),
        ("amp", "fp16"),
    ):
        if word in text:
            return name
    return "fp8" if "fp8" in text else ""


def rows(attention: str = "kernel") -> list[Row]:
    """One for each line of `published.csv`, in order. `attention`: "kernel" or "blocks", what stands for
    TPU kernels in them; see `flash`."""
    with PUBLISHED.open(newline="", encoding="utf-8") as file:
        return [
            _row(line, cells, RUNS[line], attention) for line, cells in enumerate(csv.DictReader(file), 2)
        ]


def _row(line: int, cells: dict[str, str], run: Run, attention: str) -> Row:
    if isinstance(run.model, GPT) and run.model.attention == "kernel":
        run = replace(run, model=replace(run.model, attention=attention))
    chip = chip_of(cells["device"])
    chips = run.chips or float(cells["n_chips"])
    devices = max(1, round(chips * chip.jax_devices_per_chip))
    batch = run.batch
    if not batch and cells["global_batch"]:
        batch = int(cells["global_batch"]) // devices // run.accumulation
    several = "data" if devices > 1 else "none"
    row = Row(
        line=line,
        model=re.sub(r"^timm ", "", cells["model"]),
        chip=chip.name,
        devices=devices,
        per_device_batch=1 if isinstance(run.model, int) else batch,
        accumulation=run.accumulation,
        precision=run.precision or _precision(cells["precision"]),
        software=run.software,
        parallel=run.parallel or several,
        measured=float(cells["throughput"]),
        clock=run.clock,
        source=cells["source"],
        note=run.note,
        usable=not run.why_not,
        why_not=run.why_not,
    )
    if run.model is None or row.precision not in DTYPES or not row.per_device_batch:
        assert run.why_not, f"line {line}: no model, precision or batch, and no reason"
        return row
    fill = _product if isinstance(run.model, int) else _layered if isinstance(run.model, GPT) else _whole
    row = fill(row, run)
    return row if run.why_not else replace(row, measured=_examples_per_second(row, cells, run, chips))


def _examples_per_second(row: Row, cells: dict[str, str], run: Run, chips: float) -> float:
    value, unit = float(cells["throughput"]), cells["unit"]
    if run.epochs:
        return 50_000 * run.epochs / value
    if isinstance(run.model, int):
        return value * 1e12 / (2 * run.model**3)
    if unit in ("images/s", "sequences/s"):
        return value
    assert isinstance(run.model, GPT), f"line {row.line}: {unit} of a model without tokens"
    if unit == "TFLOP/s/chip":
        value = value * 1e12 / run.model.training_flops_per_token(causal=False)
    return value * (1.0 if unit == "tokens/s" else chips) / run.model.length


@cache
def _shapes(model: Model) -> list[tuple[int, ...]]:
    return programs.shapes(model.loss, model.inputs(2, jnp.float32))


def _whole(row: Row, run: Run) -> Row:
    assert isinstance(run.model, str)
    model, dtype = MODELS[run.model], DTYPES[row.precision]
    inputs = model.inputs(row.per_device_batch, dtype)
    sizes = _shapes(model)
    parameters = sum(math.prod(size) for size in sizes)
    apart = row.accumulation > 1
    reduce = Reduce(4.0 * parameters, row.devices, 1, hidden=chip_of(row.chip).kind == "GPU")
    return replace(
        row,
        family=model.family,
        parameters=parameters,
        program=lambda: programs.step(model.loss, inputs, dtype, None if apart else run.optimizer),
        update_program=(lambda: programs.update(sizes, run.optimizer)) if apart else None,
        reduces=(reduce,) if row.devices > 1 else (),
    )


def _layered(row: Row, run: Run) -> Row:
    model = run.model
    assert isinstance(model, GPT)
    dtype, batch = DTYPES[row.precision], row.per_device_batch
    layers = model.layers * row.accumulation
    sharers = row.devices // model.tensor
    if row.parallel == "fsdp":
        # Weights are gathered forwards and again backwards, gradients scattered: three halves of a sum each.
        reduces = [
            Reduce(2.0 * model.parameters / model.tensor, sharers, 1.5 * row.accumulation, hidden=True)
        ]
    else:
        reduces = [Reduce(2.0 * model.parameters, row.devices, 1, hidden=True)]
    if model.tensor > 1:
        sums = 6 if model.remat == "full" else 4
        activations = 2.0 * batch * model.tensor * model.length * model.width
        reduces.append(Reduce(activations, model.tensor, sums * layers, hidden=False))
    return replace(
        row,
        family="gpt",
        parameters=model.parameters,
        layered=True,
        layers=model.layers,
        program=lambda: model.layer_program(batch, dtype),
        head_program=lambda: model.head_program(batch, dtype),
        update_program=lambda: programs.update(model.parameters // row.devices, run.optimizer, dtype),
        reduces=tuple(reduces) if row.devices > 1 else (),
        kernel=not model.tpu or model.attention != "plain",
        kernel_flops=model.kernel_flops(batch),
    )


def _product(row: Row, run: Run) -> Row:
    assert isinstance(run.model, int)
    spec = Spec((run.model, run.model), jnp.bfloat16)
    return replace(
        row, family="matmul", parallel="none", program=lambda: (lambda a, b: jnp.dot(a, b), (spec, spec))
    )
