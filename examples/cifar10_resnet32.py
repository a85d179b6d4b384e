"""CIFAR-10 with the pre-activation ResNet-32 of TensorFlow's research models: 464,154 parameters.

    chipwise train examples/cifar10_resnet32.py:recipe --data DIR

Source of the net: github.com/tensorflow/models, `research/resnet/resnet_model.py` (removed 2019), with He et
al., "Identity Mappings in Deep Residual Networks" (2016, arXiv:1603.05027). Three stages of five units,
16, 32 and 64 channels, leaky ReLU of 0.1, batch norm with momentum 0.9 and epsilon 1e-3; shortcuts
have no parameters: 2x2 average pool, channels padded with zeros on both sides. 69 million multiply-adds per
image in the forward pass.

The schedule, by step, is that of the April 2018 comparison "TensorFlow Performance by GPU and TPU":
0.1, from step 40,000 0.01, from 60,000 0.001, from 80,000 0.0001; batch 128, momentum 0.9, L2 decay
2e-4 on kernels. Expected test accuracy: 92.5 % at about 80,000 steps (the README of research/resnet).
One replica, as there: batch norm over 128 examples; `--set replicas=8` spreads it over eight devices.
"""

import jax
import jax.numpy as jnp
from flax import nnx

import chipwise as cw
from chipwise.models import BatchNorm, conv_layer, global_mean
from chipwise.recipes.classification import by_image, classification


class Unit(nnx.Module):
    """Two 3x3 convolutions, each after batch norm and leaky ReLU, with a shortcut.

    `first`: the activation comes before the shortcut, as in the first unit of the first stage. `(b, h, w,
    c_in)` -> `(b, h/stride, w/stride, c_out)`.
    """

    def __init__(self, c_in: int, c_out: int, *, stride: int = 1, first: bool = False, rngs: nnx.Rngs):
        self.norm1 = BatchNorm(c_in, momentum=0.9, epsilon=1e-3)
        self.conv1 = conv_layer(c_in, c_out, stride=stride, rngs=rngs)
        self.norm2 = BatchNorm(c_out, momentum=0.9, epsilon=1e-3)
        self.conv2 = conv_layer(c_out, c_out, rngs=rngs)
        self.widen, self.stride, self.first = c_out - c_in, stride, first

    def __call__(self, x: jax.Array) -> jax.Array:
        active = _activate(self.norm1(x))
        y = self.conv2(_activate(self.norm2(self.conv1(active))))
        return y + self._shortcut(active if self.first else x)

    def _shortcut(self, x):
        if self.stride == 2:
            b, h, w, c = x.shape
            # The mean as a sum over a reshaped array: exact in gradient and fast on every chip.
            x = x.reshape(b, h // 2, 2, w // 2, 2, c)
            x = (x[:, :, 0, :, 0] + x[:, :, 0, :, 1] + x[:, :, 1, :, 0] + x[:, :, 1, :, 1]) * 0.25
        side = self.widen // 2
        return jnp.pad(x, ((0, 0), (0, 0), (0, 0), (side, self.widen - side))) if self.widen else x


class ResNet32(nnx.Module):
    """`(batch, 32, 32, 3)` standardised floats -> logits `(batch, classes)`."""

    def __init__(self, *, units: int = 5, classes: int = 10, rngs: nnx.Rngs):
        self.stem = conv_layer(3, 16, rngs=rngs)
        wide = [c for c in (16, 32, 64) for _ in range(units)]
        pairs = zip([16, *wide], wide, strict=False)
        units = [Unit(a, b, stride=b // a, first=i == 0, rngs=rngs) for i, (a, b) in enumerate(pairs)]
        self.units = nnx.List(units)
        self.norm = BatchNorm(64, momentum=0.9, epsilon=1e-3)
        uniform = nnx.initializers.variance_scaling(1.0, "fan_in", "uniform")
        self.classifier = nnx.Linear(64, classes, kernel_init=uniform, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.stem(x)
        for unit in self.units:
            x = unit(x)
        x = _activate(self.norm(x))
        return self.classifier(global_mean(x))


def _activate(x):
    return jax.nn.leaky_relu(x, 0.1)


def recipe(data: str | None = None) -> cw.Recipe:
    net = cw.nnx.functional(lambda rngs: ResNet32(rngs=rngs))
    return cw.Recipe(
        name="cifar10-resnet32",
        task=classification(
            net, cw.datasets.cifar10(data), by_image, augment=cw.augment.reflect_crop(pad=2, flip=0.5)
        ),
        batch=128,
        replicas=1,
        duration="90000st",
        optimizer=cw.sgd(
            lr=cw.schedules.piecewise({"0st": 0.1, "40000st": 0.01, "60000st": 0.001, "80000st": 0.0001}),
            momentum=0.9,
            weight_decay=2e-4,
            decay="kernels",
        ),
        validated=cw.recipe.Validated(
            source="92.5 % at 80,000 steps, README of tensorflow/models research/resnet"
        ),
    )
