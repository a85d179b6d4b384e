"""Published image classifiers, as recipes: images arrive at the net's size, and nothing augments them.

    chipwise plan benchmarks/plan_accuracy/recipes/images.py:resnet --set batch=256 --set replicas=1 --on a100

`resnet` with a depth of 50 is chipwise's own net. The others were written here from their papers, sizes as in
timm: EfficientNet (Tan & Le 2019, arXiv:1905.11946; 2021, arXiv:2104.00298), MLP-Mixer (Tolstikhin et al.
2021, arXiv:2105.01601), ResNet v2 (He et al. 2016, arXiv:1603.05027), ResNeXt (Xie et al. 2016,
arXiv:1611.05431), VGG (Simonyan & Zisserman 2014, arXiv:1409.1556), MobileNetV2 (Sandler et al. 2018,
arXiv:1801.04381), ConvNeXt (Liu et al. 2022, arXiv:2201.03545).
"""

import itertools
import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import chipwise as cw
from chipwise.data.datasets import Dataset
from chipwise.data.synthetic import Absent
from chipwise.models.conv import conv
from chipwise.models.conv_layers import BatchNorm
from chipwise.models.layer_norm import LayerNorm
from chipwise.models.resnet50 import ResNet50
from chipwise.models.transformer import ViT
from chipwise.recipes.classification import by_channel, classification

BLOCKS = {18: (2, 2, 2, 2), 50: (3, 4, 6, 3), 152: (3, 8, 36, 3)}


def recipe(name, net, image=224, classes=1000, optimizer="sgd", fold=1):
    """`net(rngs)` on `image` x `image` pixels that are 8-bit, as a pipeline on the host would give them, with
    squares of `fold` x `fold` pixels as channels."""
    spec = {
        "image": jax.ShapeDtypeStruct((image // fold, image // fold, 3 * fold**2), np.uint8),
        "label": jax.ShapeDtypeStruct((), np.int32),
    }
    train, held_out = (Absent(n, spec, name, {"label": classes}) for n in (1_281_167, 50_000))
    mean, std = (fold**2 * colors for colors in ((124.0, 116.0, 104.0), (58.0, 57.0, 57.0)))
    data = Dataset(train, held_out, classes, mean, std, name)
    lr = cw.schedules.warmup(cw.schedules.cosine(0.1), "5ep")
    made = {
        "sgd": lambda: cw.sgd(lr=lr, momentum=0.9, weight_decay=1e-4),
        # As in MLPerf: no decay and no ratio for biases and norms
        "lars": lambda: cw.recipe.lars(lr=lr.with_peak(10.0), weight_decay=1e-4, decay="kernels"),
        "adamw": lambda: cw.adamw(lr=lr.with_peak(1e-3), weight_decay=0.1),
        "adamw_clipped": lambda: cw.adamw(lr=lr.with_peak(3e-3), weight_decay=0.3, clip=1.0),
    }
    task = classification(cw.nnx.functional(net), data, by_channel(data.mean, data.std))
    return cw.Recipe(
        name=name, task=task, batch=256, replicas=1, duration="90ep", optimizer=made[optimizer](),
        precision="bf16",
    )  # fmt: skip


def resnet(depth=50, image=224, wide=1, groups=1, v2=False, optimizer="sgd", space_to_depth=False):
    """*Arguments:* `depth`: 18, 50 or 152; `wide`: times the channels inside a bottleneck, cut into `groups`,
    32 and twice as wide in ResNeXt; `v2`: batch norm and ReLU before each convolution; `optimizer`: `sgd` or
    `lars`; `space_to_depth`: `FoldedStem`, in a bottleneck ResNet."""
    if space_to_depth:
        net = partial(FoldedResNet, blocks=BLOCKS[depth])
    elif wide == 1 and depth > 18 and not v2:
        net = partial(ResNet50, blocks=BLOCKS[depth])
    else:
        net = partial(ResNet, BLOCKS[depth], small=depth == 18, wide=wide, groups=groups, v2=v2)
    fold = 2 if space_to_depth else 1
    return recipe(f"resnet{depth}", lambda rngs: net(rngs=rngs), image, optimizer=optimizer, fold=fold)


def resnet164():
    """For CIFAR-10: three stages of 18 bottlenecks, v2."""
    return recipe(
        "resnet164",
        lambda rngs: ResNet((18, 18, 18), v2=True, width=16, stem=3, classes=10, rngs=rngs),
        32,
        classes=10,
    )


def efficientnet(kind="b0", image=0):
    """*Arguments:* `kind`: `b0`, `b4`, `v2_b0` or `v2_s`; `image`: pixels on a side, the paper's when 0."""
    stem, pixels, blocks, head = EFFICIENTNETS[kind]
    return recipe(
        f"efficientnet-{kind}", lambda rngs: EfficientNet(stem, blocks, head, rngs), image or pixels
    )


def mobilenet():
    """MobileNetV2."""
    return recipe("mobilenet-v2", lambda rngs: EfficientNet(32, MOBILENET, 1280, rngs, plain=True))


def convnext():
    """ConvNeXt-T."""
    return recipe("convnext-t", lambda rngs: ConvNeXt(rngs), optimizer="adamw")


def vgg16():
    return recipe("vgg16", lambda rngs: VGG(rngs))


def mixer():
    """Mixer-B/16."""
    return recipe("mixer-b16", lambda rngs: Mixer(rngs), optimizer="adamw")


def vit(width=384, heads=6, tanh=False):
    """ViT-S/16 by default, without the recipe `vit-s16`'s augmentation. `tanh`: GELU as Flax has it."""
    return recipe("vit", lambda rngs: ViT(width=width, heads=heads, tanh=tanh, rngs=rngs), optimizer="adamw")


class FoldedStem(nnx.Module):
    """The first convolution, 7 x 7 by 2, on images whose squares of 2 x 2 pixels the host made channels: one
    of 4 x 4, with the kernel of 8 x 8 whose last row and column are zero (mlcommons/training_results_v1.0,
    `resnet-preview-TF-tpu-v4-128/resnet_model.py`)."""

    def __init__(self, width, rngs):
        self.kernel = nnx.Param(nnx.initializers.he_normal()(rngs.params(), (8, 8, 3, width), jnp.float32))

    def __call__(self, x):
        width, used = self.kernel.shape[-1], jnp.arange(8) < 7
        kernel = self.kernel[...] * (used[:, None] & used).astype(x.dtype)[:, :, None, None]
        kernel = kernel.reshape(4, 2, 4, 2, 3, width).transpose(0, 2, 1, 3, 4, 5).reshape(4, 4, 12, width)
        return conv(x, kernel)


class FoldedResNet(ResNet50):
    """ResNet-50 with `FoldedStem`: `(b, 112, 112, 12)` -> `(b, 1000)`."""

    def __init__(self, *, blocks, rngs):
        super().__init__(blocks=blocks, rngs=rngs)
        self.stem = FoldedStem(64, rngs)


class Residual(nnx.Module):
    """Two 3x3 convolutions (`small`) or a bottleneck, around a shortcut."""

    def __init__(self, c_in, middle, *, stride, small, wide, groups, v2, rngs):
        c_out, inner = (middle, middle) if small else (4 * middle, wide * middle)
        shapes = [(3, c_in, inner, stride, 1), (3, inner, c_out, 1, 1)] if small else [
            (1, c_in, inner, 1, 1), (3, inner, inner, stride, groups), (1, inner, c_out, 1, 1)
        ]  # fmt: skip
        self.convs = nnx.List([convolution(a, b, size, s, rngs, g) for size, a, b, s, g in shapes])
        self.norms = nnx.List([BatchNorm(a if v2 else b, epsilon=1e-5) for _, a, b, *_ in shapes])
        project = stride != 1 or c_in != c_out
        self.shortcut = nnx.List([convolution(c_in, c_out, 1, stride, rngs)] if project else [])
        self.last = nnx.List([BatchNorm(c_out, epsilon=1e-5)] if project and not v2 else [])
        self.v2 = v2

    def __call__(self, x):
        y, short = x, x
        for i, (convolve, norm) in enumerate(zip(self.convs, self.norms, strict=True)):
            if self.v2:
                y = nnx.relu(norm(y))
                short = y if i == 0 and self.shortcut else short
                y = convolve(y)
            else:
                y = norm(convolve(y))
                y = y if norm is self.norms[-1] else nnx.relu(y)
        for layer in (*self.shortcut, *self.last):
            short = layer(short)
        return y + short if self.v2 else nnx.relu(y + short)


class ResNet(nnx.Module):
    """Stages of `blocks`; `stem`: pixels on a side of the first kernel, 7 with a pool behind it."""

    def __init__(
        self, blocks, *, small=False, wide=1, groups=1, v2=False, width=64, stem=7, classes=1000, rngs
    ):  # fmt: skip
        self.first, self.pool = convolution(3, width, stem, 2 if stem == 7 else 1, rngs), stem == 7
        made, channels = [], width
        for stage, count in enumerate(blocks):
            for block in range(count):
                stride = 2 if stage > 0 and block == 0 else 1
                options = {"stride": stride, "small": small, "wide": wide, "groups": groups, "v2": v2}
                made.append(Residual(channels, width << stage, **options, rngs=rngs))
                channels = (1 if small else 4) * (width << stage)
        self.blocks, self.v2 = nnx.List(made), v2
        self.norm = BatchNorm(channels if v2 else width, epsilon=1e-5)
        self.classifier = nnx.Linear(channels, classes, rngs=rngs)

    def __call__(self, x):
        x = self.first(x)
        x = x if self.v2 else nnx.relu(self.norm(x))
        if self.pool:
            x = nnx.max_pool(x, (3, 3), strides=(2, 2), padding=((1, 1), (1, 1)))
        for block in self.blocks:
            x = block(x)
        x = nnx.relu(self.norm(x)) if self.v2 else x
        return self.classifier(mean(x, (1, 2)))


def convolution(c_in, c_out, size, stride, rngs, groups=1, bias=False):
    pad = (size - 1) // 2
    return nnx.Conv(
        c_in, c_out, (size, size), strides=stride, padding=((pad, pad), (pad, pad)), use_bias=bias,
        feature_group_count=groups, conv_general_dilated=conv, rngs=rngs,
    )  # fmt: skip


def mean(x, axes, keepdims=False):
    return jnp.mean(x.astype(jnp.float32), axes, keepdims=keepdims).astype(x.dtype)


class Inverted(nnx.Module):
    """1x1 to `expand` times the channels, a depthwise convolution, squeeze and excite, 1x1; or, `fused`, the
    first two as one convolution and no squeeze; or, `plain`, no squeeze and ReLU6."""

    def __init__(self, c_in, c_out, *, expand, size, stride, fused, rngs, plain=False):
        inner, thin = c_in * expand, max(1, c_in // 4)
        first = size if fused else 1
        self.residual, self.active = stride == 1 and c_in == c_out, jax.nn.relu6 if plain else nnx.silu
        start = convolution(
            c_in, inner if expand > 1 or not fused else c_out, first, stride if fused else 1, rngs
        )
        self.expand = nnx.List([start] if expand > 1 or fused else [])
        self.depthwise = nnx.List(
            [] if fused else [convolution(inner, inner, size, stride, rngs, groups=inner)]
        )
        pair = [nnx.Linear(inner, thin, rngs=rngs), nnx.Linear(thin, inner, rngs=rngs)]
        self.squeeze = nnx.List([] if fused or plain else pair)
        self.project = nnx.List([convolution(inner, c_out, 1, 1, rngs)] if expand > 1 or not fused else [])
        layers = (*self.expand, *self.depthwise, *self.project)
        self.norms = nnx.List([BatchNorm(layer.out_features, epsilon=1e-3) for layer in layers])

    def __call__(self, x):
        norms, y = iter(self.norms), x
        for layer in (*self.expand, *self.depthwise):
            y = self.active(next(norms)(layer(y)))
        if self.squeeze:
            down, up = self.squeeze
            y = y * nnx.sigmoid(up(nnx.silu(down(mean(y, (1, 2), True)))))
        for layer in self.project:
            y = next(norms)(layer(y))
        return x + y if self.residual else y


def _scaled(width, depth):
    """EfficientNet-B0's stages `(fused, count, size, stride, expand, channels)`, wider and deeper."""
    b0 = [(1, 3, 1, 1, 16), (2, 3, 2, 6, 24), (2, 5, 2, 6, 40), (3, 3, 2, 6, 80), (3, 5, 1, 6, 112),
          (4, 5, 2, 6, 192), (1, 3, 1, 6, 320)]  # fmt: skip
    return [
        (False, math.ceil(n * depth), size, stride, expand, rounded(c * width))
        for n, size, stride, expand, c in b0
    ]


def rounded(channels):
    """To the nearest multiple of 8."""
    return max(8, int(channels + 4) // 8 * 8)


EFFICIENTNETS = {  # stem, pixels, stages, head
    "b0": (32, 224, _scaled(1.0, 1.0), 1280),
    "b4": (48, 380, _scaled(1.4, 1.8), 1792),
    "v2_b0": (32, 192, [
        (True, 1, 3, 1, 1, 16), (True, 2, 3, 2, 4, 32), (True, 2, 3, 2, 4, 48), (False, 3, 3, 2, 4, 96),
        (False, 5, 3, 1, 6, 112), (False, 8, 3, 2, 6, 192),
    ], 1280),
    "v2_s": (24, 300, [
        (True, 2, 3, 1, 1, 24), (True, 4, 3, 2, 4, 48), (True, 4, 3, 2, 4, 64), (False, 6, 3, 2, 4, 128),
        (False, 9, 3, 1, 6, 160), (False, 15, 3, 2, 6, 256),
    ], 1280),
}  # fmt: skip


MOBILENET = [
    (False, n, 3, stride, expand, c) for n, stride, expand, c in [
        (1, 1, 1, 16), (2, 2, 6, 24), (3, 2, 6, 32), (4, 2, 6, 64), (3, 1, 6, 96), (3, 2, 6, 160),
        (1, 1, 6, 320),
    ]
]  # fmt: skip


class EfficientNet(nnx.Module):
    """`plain`: MobileNetV2's blocks and ReLU6."""

    def __init__(self, stem, stages, head, rngs, plain=False):
        self.active = jax.nn.relu6 if plain else nnx.silu
        self.first, self.norm = convolution(3, stem, 3, 2, rngs), BatchNorm(stem, epsilon=1e-3)
        made, channels = [], stem
        for fused, count, size, stride, expand, c_out in stages:
            for i in range(count):
                options = {"expand": expand, "size": size, "stride": stride if i == 0 else 1, "fused": fused}
                made.append(Inverted(channels, c_out, **options, rngs=rngs, plain=plain))
                channels = c_out
        self.blocks = nnx.List(made)
        self.head, self.last = convolution(channels, head, 1, 1, rngs), BatchNorm(head, epsilon=1e-3)
        self.classifier = nnx.Linear(head, 1000, rngs=rngs)

    def __call__(self, x):
        x = self.active(self.norm(self.first(x)))
        for block in self.blocks:
            x = block(x)
        return self.classifier(mean(self.active(self.last(self.head(x))), (1, 2)))


class VGG(nnx.Module):
    """Of 16 layers, without batch norm."""

    def __init__(self, rngs):
        made, channels = [], 3
        for count, width in ((2, 64), (2, 128), (3, 256), (3, 512), (3, 512)):
            stage = []
            for _ in range(count):
                stage.append(convolution(channels, width, 3, 1, rngs, bias=True))
                channels = width
            made.append(nnx.List(stage))
        self.stages = nnx.List(made)
        sizes = (49 * 512, 4096, 4096, 1000)
        self.layers = nnx.List([nnx.Linear(a, b, rngs=rngs) for a, b in itertools.pairwise(sizes)])

    def __call__(self, x):
        for stage in self.stages:
            for layer in stage:
                x = nnx.relu(layer(x))
            x = nnx.max_pool(x, (2, 2), strides=(2, 2))
        first, second, last = self.layers
        return last(nnx.relu(second(nnx.relu(first(x.reshape(x.shape[0], -1))))))


class ConvNeXt(nnx.Module):
    """Its smallest: stages of 3, 3, 9 and 3 blocks."""

    def __init__(self, rngs, depths=(3, 3, 9, 3), width=96):
        norm = partial(LayerNorm, epsilon=1e-6)
        stages, channels = [], 3
        for i, depth in enumerate(depths):
            size, c = (4, width) if i == 0 else (2, width << i)
            down = nnx.Conv(
                channels, c, (size, size), strides=size, padding="VALID", conv_general_dilated=conv, rngs=rngs
            )
            blocks = [
                nnx.List(
                    [
                        convolution(c, c, 7, 1, rngs, groups=c, bias=True),
                        norm(c),
                        nnx.Linear(c, 4 * c, rngs=rngs),
                        nnx.Linear(4 * c, c, rngs=rngs),
                        Scale(c),
                    ]
                )
                for _ in range(depth)
            ]
            stages.append(nnx.List([norm(c if i == 0 else channels), down, nnx.List(blocks)]))
            channels = c
        self.stages, self.norm = nnx.List(stages), norm(channels)
        self.classifier = nnx.Linear(channels, 1000, rngs=rngs)

    def __call__(self, x):
        for i, (norm, down, blocks) in enumerate(self.stages):
            x = norm(down(x)) if i == 0 else down(norm(x))
            for depthwise, inner, wide, narrow, scale in blocks:
                x = x + scale(narrow(nnx.gelu(wide(inner(depthwise(x))), approximate=False)))
        return self.classifier(self.norm(mean(x, (1, 2))))


class Scale(nnx.Module):
    """Each channel times a factor of its own."""

    def __init__(self, channels):
        self.factor = nnx.Param(jnp.full((channels,), 1e-6))

    def __call__(self, x):
        return x * self.factor[...].astype(x.dtype)


class Mixer(nnx.Module):
    """Twelve layers of two nets, over patches and over channels; as plain layers, since there is no attention
    that a loop would keep."""

    def __init__(self, rngs, width=768, depth=12, patch=16, image=224):
        places = (image // patch) ** 2
        self.patches = nnx.Conv(
            3, width, (patch, patch), strides=patch, padding="VALID", conv_general_dilated=conv, rngs=rngs
        )

        def pair(size, hidden):
            return nnx.List([nnx.Linear(size, hidden, rngs=rngs), nnx.Linear(hidden, size, rngs=rngs)])

        norm = partial(LayerNorm, width, epsilon=1e-6)
        self.layers = nnx.List(
            [
                nnx.List([norm(), pair(places, width // 2), norm(), pair(width, 4 * width)])
                for _ in range(depth)
            ]
        )
        self.norm, self.classifier = norm(), nnx.Linear(width, 1000, rngs=rngs)

    def __call__(self, x):
        x = self.patches(x)
        x = x.reshape(x.shape[0], -1, x.shape[-1])
        for norm1, (a, b), norm2, (c, d) in self.layers:
            y = norm1(x).transpose(0, 2, 1)
            x = x + b(nnx.gelu(a(y), approximate=False)).transpose(0, 2, 1)
            x = x + d(nnx.gelu(c(norm2(x)), approximate=False))
        return self.classifier(mean(self.norm(x), 1))
