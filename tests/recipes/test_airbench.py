"""`examples/cifar10_airbench.py` beside a PyTorch program of its published description."""

import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import chipwise as cw
from chipwise.data.order import indices
from chipwise.recipe.task import by_path
from chipwise.step.keys import augment_keys
from chipwise.step.state import abstract_state, count

EXAMPLE = str(Path(__file__).parents[2] / "examples" / "cifar10_airbench.py")
BATCH, IMAGES, EPOCHS = 32, 96, 6  # 18 steps: Lookahead meets after 5, 10, 15, 18, the bias rests from 9 on
SMALL = ["width=16", f"epochs={EPOCHS}", f"batch={BATCH}", "precision=f32"]


@pytest.fixture
def small(monkeypatch):
    """A data set whose classes differ in color."""
    random = np.random.default_rng(0)

    def part(n):
        label = np.arange(n, dtype=np.int32) % 10
        image = random.integers(0, 120, (n, 32, 32, 3)) + 13 * label[:, None, None, None]
        return cw.Arrays(image=image.astype(np.uint8), label=label)

    made = cw.datasets.cifar10()
    sources = {"train": part(IMAGES), "eval": part(20)}
    small = type(made)(**{**vars(made), **sources})
    monkeypatch.setattr(cw.datasets, "cifar10", lambda data: small)
    return small


# ---- The description in PyTorch


def torch_logits(torch, p, stats, x, train):
    """Logits of `x` `(b, 3, 32, 32)`. In training the running statistics move 40 % of the way."""
    functional = torch.nn.functional

    def conv(x, name, **more):
        return functional.conv2d(x, p[f"{name}/kernel"].permute(3, 2, 0, 1), **more)

    def norm(x, name):
        mean, var, bias = stats[f"{name}/mean"], stats[f"{name}/var"], p[f"{name}/bias"]
        if not train:
            return functional.batch_norm(x, mean, var, None, bias, eps=1e-12)
        mean.lerp_(x.detach().mean((0, 2, 3)), 0.4)
        var.lerp_(x.detach().var((0, 2, 3), unbiased=False), 0.4)
        return functional.batch_norm(x, None, None, None, bias, training=True, eps=1e-12)

    x = functional.gelu(conv(x, "whiten", bias=p["whiten/bias"]))
    for group in ("group1", "group2", "group3"):
        x = functional.max_pool2d(conv(x, f"{group}/conv1", padding=1), 2)
        x = functional.gelu(norm(x, f"{group}/norm1"))
        x = functional.gelu(norm(conv(x, f"{group}/conv2", padding=1), f"{group}/norm2"))
    return functional.max_pool2d(x, 3).flatten(1) @ p["head/kernel"] / 9


def six_views(torch, logits_of, x):
    def mirrored(x):
        return 0.5 * logits_of(x) + 0.5 * logits_of(x.flip(-1))

    wide = torch.nn.functional.pad(x, (1, 1, 1, 1), "reflect")
    moved = (mirrored(wide[..., :32, :32]) + mirrored(wide[..., 2:, 2:])) / 2
    return 0.5 * mirrored(x) + 0.5 * moved


def batches(data_set):
    """The images and labels of each step: the order and the offsets are chipwise's, the rest is done here."""
    first = np.random.default_rng(0).random(IMAGES) < 0.5
    image, label = (data_set.train.columns[name] for name in ("image", "label"))
    crop = cw.augment.reflect_crop(pad=2)
    for step in range(EPOCHS * IMAGES // BATCH):
        rows = indices(0, step * BATCH, (step + 1) * BATCH, IMAGES)
        epoch = step * BATCH // IMAGES
        keys = augment_keys(0, jnp.full(BATCH, epoch), jnp.asarray(rows))
        halfway = np.where(first[rows, None, None, None], image[rows, :, ::-1], image[rows])
        found = np.asarray(jax.vmap(lambda x, key: crop({"image": x}, key)["image"])(halfway, keys))
        for one, source in zip(found, halfway, strict=True):
            wide = np.pad(source, [(2, 2), (2, 2), (0, 0)], mode="reflect")
            crops = [wide[i : i + 32, j : j + 32] for i in range(5) for j in range(5)]
            assert any(map(np.array_equal, crops, [one] * 25))
        yield found[:, :, ::-1] if epoch % 2 else found, label[rows]


def torch_run(data_set, params, stats):
    """The mean loss of each step, then parameters, statistics and the logits of the evaluation."""
    torch = pytest.importorskip("torch")
    p, s = ({n: torch.tensor(np.asarray(x)) for n, x in by_path(tree).items()} for tree in (params, stats))

    def prepared(image):
        x = torch.tensor(image.astype(np.float32)).permute(0, 3, 1, 2)
        mean, std = (torch.tensor(x)[:, None, None] for x in (data_set.mean, data_set.std))
        return (x - mean) / std

    length = 1024 * (1 + 1 / (1 - 0.85))
    lr, decay = 11.5 / length, 0.0153 * BATCH / length
    trained = {name: x.requires_grad_() for name, x in p.items() if name != "whiten/kernel"}
    norms = [x for name, x in trained.items() if "norm" in name]
    others = [x for name, x in trained.items() if "norm" not in name]
    sgd = torch.optim.SGD(
        [
            {"params": norms, "lr": 64 * lr, "weight_decay": decay / (64 * lr)},
            {"params": others, "lr": lr, "weight_decay": decay / lr},
        ],
        momentum=0.85,
        nesterov=True,
    )
    steps = EPOCHS * IMAGES // BATCH
    rise = int(steps * 0.23)

    def triangle(step):
        if step < rise:
            return 0.2 + 0.8 * step / rise
        return 1 - 0.93 * (step - rise) / (steps - rise)

    schedule = torch.optim.lr_scheduler.LambdaLR(sgd, triangle)
    slow = {name: x.detach().clone() for name, x in {**p, **s}.items()}

    def meet(decay):
        with torch.no_grad():
            for name, x in {**p, **s}.items():
                x.copy_(slow[name].lerp_(x, 1 - decay))

    losses = []
    for step, (image, label) in enumerate(batches(data_set)):
        p["whiten/bias"].requires_grad_(step < 3 * IMAGES // BATCH)
        logits = torch_logits(torch, p, s, prepared(image), True)
        target = torch.tensor(label).long()
        loss = torch.nn.functional.cross_entropy(logits, target, label_smoothing=0.2, reduction="sum")
        sgd.zero_grad()
        loss.backward()
        sgd.step()
        schedule.step()
        if (step + 1) % 5 == 0:
            meet(0.95**5 * ((step + 1) / steps) ** 3)
        if step + 1 == steps:
            meet(1.0)
        losses.append(loss.item() / BATCH)
    with torch.no_grad():
        evaluated = prepared(data_set.eval.columns["image"])
        logits = six_views(torch, lambda x: torch_logits(torch, p, s, x, False), evaluated)
    return losses, *({n: x.detach().numpy() for n, x in tree.items()} for tree in (p, s)), logits.numpy()


@pytest.mark.slow
def test_it_trains_and_evaluates_as_the_description_in_pytorch(small):
    recipe, found = cw.load(EXAMPLE, SMALL), []
    with cw.Stepper(recipe, cw.On(devices=1)) as stepper:
        params, state = stepper.state()
        losses, weights, stats, logits = torch_run(small, params, state["norms"])
        while stepper.done < stepper.total:
            stepper.step()
            found.append(stepper.metrics()["loss"])
        params, state = stepper.state()
    predicted = recipe.task.predict(params, state, small.eval.columns)
    np.testing.assert_allclose(found, losses, rtol=1e-5)
    for name, expected in {**weights, **stats}.items():
        leaf = {**by_path(params), **by_path(state["norms"])}[name]
        np.testing.assert_allclose(leaf, expected, rtol=1e-4, atol=5e-4, err_msg=name)
    np.testing.assert_allclose(predicted, logits, rtol=1e-4, atol=1e-4)


# ---- Its parts


def test_its_sizes_and_steps_are_those_of_the_source():
    recipe = cw.load(EXAMPLE)
    kernels = 9 * (24 * 64 + 64 * 64 + 64 * 256 + 3 * 256 * 256) + 256 * 10
    trained = kernels + 24 + 2 * (64 + 256 + 256)  # and the biases of the whitening and of six norms
    assert count(abstract_state(recipe).params) == trained
    assert recipe.clock.total == 476 and recipe.warnings() == [] and not cw.check(recipe)
    rates = recipe.optimizer.tables(recipe.clock)
    assert rates["lr"][109] == np.float32(1.5) and rates["lr of whiten/bias"][[143, 144]].tolist() == [1, 0]
    met = np.flatnonzero(rates["share"] >= 0) + 1
    assert met.tolist() == [*range(5, 476, 5), 476] and rates["share"][-1] == 0


def test_whitened_patches_are_uncorrelated(small):
    kernel = cw.load(EXAMPLE, SMALL).task.from_data(None)["whiten/kernel"]
    images = (small.train.columns["image"] - np.array(small.mean)) / np.array(small.std)
    windows = np.lib.stride_tricks.sliding_window_view(images, (2, 2), axis=(1, 2))
    out = np.einsum("bijcyx,yxcf->bijf", windows, kernel).reshape(-1, 24)
    np.testing.assert_array_equal(kernel[..., 12:], -kernel[..., :12])
    np.testing.assert_allclose(out[:, :12].T @ out[:, :12] / len(out), np.eye(12), atol=1e-2)


def test_the_first_filters_pass_their_channel_on(small):
    params, _ = cw.load(EXAMPLE, ["width=30"]).task.init(jax.random.key(0))
    x = np.random.default_rng(0).normal(size=(1, 5, 5, 24)).astype(np.float32)
    y = jax.lax.conv(
        jnp.moveaxis(x, 3, 1), params["group1"]["conv1"]["kernel"].transpose(3, 2, 0, 1), (1, 1), "SAME"
    )
    np.testing.assert_allclose(np.moveaxis(y, 1, 3)[..., :24], x, rtol=1e-6)
    assert np.abs(params["group1"]["conv1"]["kernel"][..., 24:]).max() <= 1 / math.sqrt(9 * 24)


@pytest.mark.slow
@pytest.mark.as_users_compile
def test_it_has_the_same_bits_on_one_three_and_eight_devices(small, tmp_path):
    recipe = cw.load(EXAMPLE, [*SMALL, "replicas=8"])
    whole = cw.fit(recipe, on=cw.On(devices=1), progress="none")
    cw.fit(recipe, tmp_path, on=cw.On(devices=3), progress="none", stop_after="7st")
    again = cw.fit(recipe, tmp_path, on=cw.On(devices=8), progress="none")
    assert again.fingerprint == whole.fingerprint and again.metrics == whole.metrics
