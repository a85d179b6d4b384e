"""PyTorch modules through torchax: what eager PyTorch computes, and what is refused before training."""

import collections
import contextlib
import copy
import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

import chipwise as cw
import doc_pages
from chipwise.interop.adapter import flattened
from refusals import refused

torch = pytest.importorskip("torch")
pytest.importorskip("torchax")
nn, F = torch.nn, torch.nn.functional

RNG = np.random.default_rng(0)
DATA = cw.Arrays(
    image=RNG.normal(size=(40, 2, 6, 6)).astype(np.float32), label=RNG.integers(0, 3, 40), classes=3
)
ROWS = cw.Arrays(x=RNG.normal(size=(40, 4)).astype(np.float32), label=RNG.integers(0, 3, 40))


def net():
    torch.manual_seed(0)
    return unseeded()


def unseeded():
    return nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Dropout(0.5), nn.Linear(4, 3),
    )  # fmt: skip


def eager(module, loss, x, label):
    """Mean loss, gradients and buffers of one training step of a copy."""
    params = {n: p.detach().clone().requires_grad_() for n, p in module.named_parameters()}
    held = {**params, **{n: b.detach().clone() for n, b in module.named_buffers()}}
    value = loss(torch.func.functional_call(module.train(), held, (x,)), label)
    slopes = torch.autograd.grad(value, list(params.values()))
    return float(value.detach()), dict(zip(params, slopes, strict=True)), held


class Halved(nn.CrossEntropyLoss):
    """A loss of the user's, with a forward of its own that returns a mean."""

    def forward(self, outputs, target):
        return 0.5 * F.cross_entropy(outputs, target, reduction="mean")


@dataclasses.dataclass
class Scaled:
    """A callable without a hash."""

    by: float

    def __call__(self, outputs, target):
        return self.by * F.cross_entropy(outputs, target.long())


LOSSES = {
    "mean": lambda: nn.CrossEntropyLoss(),
    "smoothed": lambda: nn.CrossEntropyLoss(label_smoothing=0.1),
    "weighted": lambda: nn.CrossEntropyLoss(weight=torch.tensor([0.5, 1.0, 3.0])),
    "ignoring": lambda: nn.CrossEntropyLoss(ignore_index=1),
    "values": lambda: nn.CrossEntropyLoss(reduction="none"),
    "function": lambda: F.cross_entropy,
    "subclass": lambda: Halved(),
    "without a hash": lambda: Scaled(0.5),
    "own": lambda: lambda outputs, label: F.cross_entropy(outputs, label.long()) + outputs.square().mean(),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LOSSES)
def test_the_first_step_in_float64_is_that_of_pytorch(name):
    """Loss to float64's last digits; gradients and statistics within 1e-9."""
    module = net().double()
    module[5].p = 0.0  # the two draw other numbers
    loss = LOSSES[name]()
    if isinstance(loss, nn.Module):
        loss = loss.double()
    with jax.enable_x64(True):
        task = cw.torch.task(module, loss, train=DATA, check=False)
        params, state = task.init(jax.random.key(0))
        batch = {"image": jnp.asarray(DATA.columns["image"], jnp.float64), "label": DATA.columns["label"]}

        def mean(params):
            sums, new = task.loss(params, state, batch, jax.random.key(1), True)
            return sums["loss"].total / sums["loss"].count.astype(jnp.float64), new

        (value, new), slopes = jax.jit(jax.value_and_grad(mean, has_aux=True))(params)
        values = jax.device_get((value, slopes, new))
    x, label = (
        torch.from_numpy(DATA.columns["image"]).double(),
        torch.from_numpy(DATA.columns["label"]).long(),
    )
    theirs = loss if name != "values" else lambda outputs, label: loss(outputs, label).mean()
    expected, gradients, buffers = eager(module, theirs, x, label)
    assert float(values[0]) == pytest.approx(expected, abs=1e-9)
    for flat, tensors in ((flattened(values[1], "."), gradients), (flattened(values[2], "."), buffers)):
        for key, array in flat.items():
            np.testing.assert_allclose(array, tensors[key].numpy(), rtol=1e-9, atol=1e-9, err_msg=key)
    assert set(flattened(values[2], ".")) == {"1.running_mean", "1.running_var", "1.num_batches_tracked"}


def test_a_maker_draws_its_first_weights_from_the_seed():
    task = cw.torch.task(unseeded, nn.CrossEntropyLoss(), train=DATA, check=False)
    one, other = (task.init(jax.random.key(i))[0] for i in range(2))
    assert not np.array_equal(one["0"]["weight"], other["0"]["weight"])
    bound = 1 / np.sqrt(2 * 3 * 3)  # PyTorch's own initialiser
    assert 0.5 * bound < np.abs(one["0"]["weight"]).max() <= bound
    given = cw.torch.task(net(), nn.CrossEntropyLoss(), train=DATA, check=False)
    np.testing.assert_array_equal(given.init(jax.random.key(5))[0]["0"]["weight"], net()[0].weight.detach())


@pytest.mark.slow
def test_weights_and_statistics_go_back():
    module = net()
    task = cw.torch.task(module, cw.losses.softmax_cross_entropy, train=DATA)
    recipe = cw.Recipe(task=task, batch=8, replicas=2, duration="3st", optimizer=cw.sgd(lr=0.1))
    result = cw.fit(recipe, on=cw.On(devices=1), run=None, progress="none")
    fresh = net()
    assert result.to_torch(fresh) is fresh
    assert int(fresh[1].num_batches_tracked) == 3
    images = DATA.columns["image"]
    ours = task.predict(result.params, result.state, {"image": images})
    with torch.no_grad():
        np.testing.assert_allclose(fresh.eval()(torch.from_numpy(images)), ours, rtol=1e-4, atol=1e-5)
    before = {name: tensor.clone() for name, tensor in fresh.state_dict().items()}
    with refused(cw.errors.RecipeError, "adapter-weight-missing"):
        result.to_torch(nn.Sequential(*fresh, nn.Linear(3, 3)))
    with refused(cw.errors.RecipeError, "adapter-weight-shape"):
        result.to_torch(nn.Sequential(*list(fresh)[:6], nn.Linear(5, 3)))
    assert all(torch.equal(before[name], tensor) for name, tensor in fresh.state_dict().items())
    assert module.training and module[5].p == 0.5  # as they were


def module_of(forward, **parts):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(4, 3)
            for name, part in parts.items():
                if isinstance(part, torch.Tensor):
                    self.register_buffer(name, part)
                else:
                    setattr(self, name, part)

    Net.forward = forward
    return Net()


def test_plain_tensors_constants_and_tied_weights():
    def forward(self, x):
        places = torch.arange(3) * 0.1  # made on PyTorch's default device
        return self.lin(x) + self.shift + places + self.plain + self.again(x)

    module = module_of(forward, shift=torch.ones(3))
    module.plain = torch.full((3,), 2.0)  # an attribute that is no buffer, and stays as it is
    module.again = nn.Linear(4, 3)
    module.again.weight = module.lin.weight
    task = cw.torch.task(module, nn.CrossEntropyLoss(), train=ROWS)
    params, state = task.init(jax.random.key(0))
    assert set(flattened(params, ".")) == {"lin.weight", "lin.bias", "again.bias"} and state == {}


def test_several_inputs_by_name_and_a_dict_of_outputs():
    columns = {**ROWS.columns, "scale": np.ones(40, np.float32)}
    data = cw.Arrays(**columns)
    module = module_of(lambda self, x, scale: {"logits": self.lin(x) * scale[:, None]})
    task = cw.torch.task(module, lambda out, y: F.cross_entropy(out["logits"], y), train=data)
    params, state = task.init(jax.random.key(0))
    batch = {n: jnp.asarray(c) for n, c in columns.items()}
    assert task.loss(params, state, batch, None, False)[0]["loss"].count == 40


class Output(collections.OrderedDict):
    """As Hugging Face's: a mapping with attributes, which JAX does not know."""

    def __getattr__(self, name):
        return self[name]


def test_outputs_in_a_mapping_of_ones_own_are_a_dict():
    def forward(self, x):
        return Output(logits=self.lin(x), first=x[:, :1] * 2, past_key_values=object())

    task = cw.torch.task(module_of(forward), lambda out, y: F.cross_entropy(out.logits, y), train=ROWS)
    params, state = task.init(jax.random.key(0))
    outputs = task.predict(params, state, {"x": jnp.asarray(ROWS.columns["x"])})
    assert {name: x.shape for name, x in outputs.items()} == {"first": (40, 1), "logits": (40, 3)}


def moved_by_hand(self, x):
    with torch.no_grad():
        self.seen = self.seen + x.detach().mean(0)
    return self.lin(x)


def moved_in_numpy(self, x):
    if self.training and type(x) is torch.Tensor:
        self.seen.numpy()[:] += 1
    return self.lin(x)


def kept(self, x):
    self.last = x.mean() + getattr(self, "last", 0.0)
    return self.lin(x) + self.last


def otherwise(self, x):
    return self.lin(x) * (1.0 if type(x) is torch.Tensor else 0.5)


REFUSED = {
    "torch-depends-on-values": lambda self, x: self.lin(x) if x.sum() > 0 else -self.lin(x),
    "torch-attribute-moves": kept,
    "adapter-call-fails": lambda self, x: self.lin(x[:, :2]),
    "torch-operation-missing": lambda self, x: self.lin(x) + torch.special.airy_ai(x).sum(),
    "torch-step-differs": otherwise,
}


@pytest.mark.parametrize("code", REFUSED)
def test_what_would_train_something_else_is_refused(code):
    with refused(cw.errors.RecipeError, code):
        cw.torch.task(module_of(REFUSED[code]), nn.CrossEntropyLoss(), train=ROWS)


def without_gradient(self, x):
    with torch.no_grad():
        h = self.lin(x)
        with torch.enable_grad():
            again = self.lin(x)
        h = h * 2 + again
    return h + self.lin(x) * 0.5 + again


@torch.no_grad()
def of_another(part, x):
    return part(x)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2.0

    @staticmethod
    def backward(ctx, slope):
        return slope * 2.0


class DoubledWithModes(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        with torch.enable_grad():
            y = x * 1.0
            with torch.no_grad():
                y = y * 1.0
        with torch.no_grad():
            y = y * 1.0
        return y * 2.0

    @staticmethod
    def backward(ctx, slope):
        return slope * 2.0


STOPPED = {
    "no_grad": without_gradient,
    "a decorator": lambda self, x: of_another(self.lin, x) + self.lin(x) * 0.5,
    "a true backward": lambda self, x: Doubled.apply(self.lin(x)),
    "modes before a backward": lambda self, x: self.lin(x) + DoubledWithModes.apply(self.lin(x)),
    "modes on a constant": lambda self, x: DoubledWithModes.apply(torch.ones(3)) + self.lin(x),
}


@pytest.mark.parametrize("name", STOPPED)
def test_the_gradient_stops_where_pytorch_stops_it(name):
    """The comparison holds every gradient against eager PyTorch's."""
    cw.torch.task(module_of(STOPPED[name]), nn.CrossEntropyLoss(), train=ROWS)


def test_the_classes_of_others_are_left_as_they_were():
    import torchax.tensor

    kinds = (torchax.tensor.Tensor, torchax.tensor.View, torch.autograd.Function)
    before = [dict(vars(kind)) for kind in kinds]
    cw.torch.task(module_of(STOPPED["a true backward"]), nn.CrossEntropyLoss(), train=ROWS)
    assert before == [dict(vars(kind)) for kind in kinds]
    assert all("is_meta" not in names for names in before)


def test_buffers_move_as_pytorch_moves_them_or_are_refused():
    task = cw.torch.task(module_of(moved_by_hand, seen=torch.zeros(4)), nn.CrossEntropyLoss(), train=ROWS)
    params, state = task.init(jax.random.key(0))
    batch = {name: jnp.asarray(column) for name, column in ROWS.columns.items()}
    _, new = task.loss(params, state, batch, jax.random.key(0), True)
    np.testing.assert_allclose(new["seen"], ROWS.columns["x"].mean(0), rtol=1e-5, atol=1e-6)
    with refused(cw.errors.RecipeError, "torch-buffers-unmoved", names=["seen"]):
        cw.torch.task(module_of(moved_in_numpy, seen=torch.zeros(4)), nn.CrossEntropyLoss(), train=ROWS)


@pytest.mark.parametrize(
    ("make", "loss", "code"),
    [
        (lambda: 3, F.cross_entropy, "adapter-no-model"),
        (lambda: lambda: 3, F.cross_entropy, "adapter-no-model"),
        (lambda: nn.Linear(4, 3, device="meta"), F.cross_entropy, "torch-elsewhere"),
        (lambda: nn.Linear(4, 3), nn.CrossEntropyLoss(reduction="sum"), "torch-loss-summed"),
        (lambda: nn.Linear(4, 3), "mse", "adapter-loss"),
    ],
)
def test_mistakes_are_one_line(make, loss, code):
    with refused(cw.errors.RecipeError, code):
        cw.torch.task(make(), loss, train=ROWS)


def hooked_parameter(m):
    return m.weight.register_hook(torch.zeros_like)


HOOKS = {
    "gradient": (hooked_parameter, ["weight"]),
    "accumulated": (lambda m: m.weight.register_post_accumulate_grad_hook(print), ["weight"]),
    "module": (lambda m: m.register_full_backward_hook(print), ["itself"]),
    "module before": (lambda m: m.register_full_backward_pre_hook(print), ["itself"]),
    "every module": (
        lambda m: nn.modules.module.register_module_full_backward_hook(print),
        ["every module"],
    ),
}


@pytest.mark.parametrize("kind", HOOKS)
def test_hooks_of_the_backward_pass_are_refused_by_name(kind):
    hook, names = HOOKS[kind]
    handle = hook(module := nn.Linear(4, 3))
    try:
        with refused(cw.errors.RecipeError, "torch-backward-hook", module="Linear", names=names):
            cw.torch.task(module, F.cross_entropy, train=ROWS)
    finally:
        handle.remove()
    cw.torch.task(module, F.cross_entropy, train=ROWS)


def test_a_hook_after_the_task_is_made_is_refused_in_training_alone():
    task = cw.torch.task(module := nn.Linear(4, 3), F.cross_entropy, train=ROWS)
    hooked_parameter(module)
    params, state = task.init(jax.random.key(0))
    batch = {name: jnp.asarray(column) for name, column in ROWS.columns.items()}
    with refused(cw.errors.RecipeError, "torch-backward-hook", names=["weight"]):
        task.loss(params, state, batch, jax.random.key(0), True)
    task.loss(params, state, batch, jax.random.key(0), False)


LABELS = ROWS.columns["label"]
TARGETS = {
    "a class too many": (F.cross_entropy, LABELS + 1),
    "a row of one label": (F.cross_entropy, LABELS[:, None]),
    "a truth value": (F.cross_entropy, LABELS > 0),
    "a label of 16 bits": (F.cross_entropy, LABELS.astype(np.int16)),
    "probabilities of two": (F.cross_entropy, np.full((40, 2), 0.5, np.float32)),
    "indices for numbers": (nn.BCEWithLogitsLoss(), LABELS),
    "a loss of one argument": (lambda outputs: outputs, LABELS),
}


@pytest.mark.parametrize("kind", TARGETS)
def test_a_target_that_the_loss_refuses_is_told_as_that(kind):
    loss, label = TARGETS[kind]
    rows = cw.Arrays(x=ROWS.columns["x"], label=label)
    target = f"{label.dtype}{[8, *label.shape[1:]]}".replace("int64", "int32")
    with refused(cw.errors.RecipeError, "adapter-loss-fails", outputs="float32[8, 3]", target=target):
        cw.torch.task(nn.Linear(4, 3), loss, train=rows)


@pytest.mark.parametrize(
    "cut",
    [
        lambda outputs, target: F.cross_entropy(outputs.detach(), target),
        lambda outputs, target: (outputs.argmax(1) != target).float().mean(),
    ],
)
def test_a_loss_without_a_gradient_is_told_as_that(cut):
    with refused(cw.errors.RecipeError, "torch-loss-cut", loss="<lambda>"):
        cw.torch.task(nn.Linear(4, 3), cut, train=ROWS)


def test_a_loss_that_no_step_was_compared_for_is_told_as_that():
    def half(outputs, target):
        return F.cross_entropy(outputs[:3], target)

    task = cw.torch.task(nn.Linear(4, 3), half, train=ROWS, check=False)
    batch = {name: jnp.asarray(column) for name, column in ROWS.columns.items()}
    with refused(cw.errors.RecipeError, "torch-not-traced", module="The loss of Linear"):
        task.loss(*task.init(jax.random.key(0)), batch, jax.random.key(0), True)


def test_a_loss_of_ones_own_that_sums_is_refused_before_the_first_step():
    def summed(outputs, target):
        return nn.functional.cross_entropy(outputs, target, reduction="sum")

    task = cw.torch.task(nn.Linear(4, 3), summed, train=ROWS)
    recipe = cw.Recipe(task=task, batch=16, replicas=2, duration="1st", optimizer=cw.sgd(lr=0.1))
    with refused(cw.errors.RecipeError, "loss-summed", replicas=2):
        cw.fit(recipe, on=cw.On(devices=1), progress="none")


def test_torch_without_torchax(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "torchax.tensor", None)
    with refused(cw.errors.RecipeError, "torchax-missing"):
        cw.torch.task(nn.Linear(4, 3), F.cross_entropy, train=ROWS)


@functools.cache
def stubbed():
    """PyPI's torchvision wants an operator that is compiled against another build of torch."""
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        with contextlib.suppress(RuntimeError):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return library


def real(name):
    library = stubbed()
    torch.manual_seed(1)
    if name == "resnet18":
        made = pytest.importorskip("torchvision").models.resnet18(num_classes=10)
    else:
        timm = pytest.importorskip("timm")
        made = timm.models.vision_transformer.VisionTransformer(
            img_size=32, patch_size=8, embed_dim=96, depth=3, num_heads=3, num_classes=10
        )
    return made, library


def eager_steps(module, dtype, images, label, lr):
    """Three steps of PyTorch's SGD with momentum 0.9: the losses, and weights and statistics in the end."""
    module = copy.deepcopy(module).to(dtype).train()
    optimizer = torch.optim.SGD(module.parameters(), lr=lr, momentum=0.9)
    x, label, losses = torch.from_numpy(images).to(dtype), torch.from_numpy(label).long(), []
    for _ in range(3):
        optimizer.zero_grad()
        loss = F.cross_entropy(module(x), label)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return losses, {name: tensor.detach().double().numpy() for name, tensor in tensors.items()}


def float64_steps(module, images, label, lr):
    """The same of the traced module and chipwise's optimizer, in float64."""
    data = cw.Arrays(image=images, label=label, classes=10)
    optimizer = cw.sgd(lr=lr, momentum=0.9)
    with jax.enable_x64(True):
        task = cw.torch.task(copy.deepcopy(module).double(), nn.CrossEntropyLoss(), train=data, check=False)
        params, state = task.init(jax.random.key(0))
        batch = {"image": jnp.asarray(images, jnp.float64), "label": label}

        def mean(params, state):
            sums, new = task.loss(params, state, batch, jax.random.key(1), True)
            return sums["loss"].total / sums["loss"].count.astype(jnp.float64), new

        @jax.jit
        def step(params, state, moments):
            (loss, state), slopes = jax.value_and_grad(mean, has_aux=True)(params, state)
            hyper = {name: schedule.value for name, schedule in optimizer.hyper.items()}
            return *optimizer.update(slopes, moments, params, hyper), state, loss

        moments, losses = optimizer.init(params), []
        for _ in range(3):
            params, moments, state, loss = step(params, state, moments)
            losses.append(float(loss))
        return losses, {**flattened(params, "."), **flattened(jax.device_get(state), ".")}


@pytest.mark.slow
@pytest.mark.timeout(600)  # three programs of a ResNet are compiled
@pytest.mark.filterwarnings("ignore")  # of torchvision and timm
@pytest.mark.parametrize("name", ["resnet18", "vit"])
def test_three_steps_beside_eager_pytorch(name):
    """Losses, weights and statistics. In float64 the same to its last digits. In float32, through the step of
    a recipe, as near to that as PyTorch's float32 comes, within a factor of 8: the two add in other orders,
    which changes what the rounding is, not how large."""
    module, _library = real(name)
    images, label, lr = RNG.normal(size=(16, 3, 32, 32)).astype(np.float32), RNG.integers(0, 10, 16), 0.01
    losses, exact = eager_steps(module, torch.float64, images, label, lr)
    ours, found = float64_steps(module, images, label, lr)
    np.testing.assert_allclose(ours, losses, rtol=1e-9)
    for key, array in found.items():
        np.testing.assert_allclose(array, exact[key], rtol=1e-8, atol=1e-9, err_msg=key)

    near_losses, near = eager_steps(module, torch.float32, images, label, lr)
    data = cw.Arrays(image=images, label=label, classes=10)
    recipe = cw.Recipe(
        task=cw.torch.task(module, nn.CrossEntropyLoss(), train=data), batch=16, replicas=1, duration="3st",
        optimizer=cw.sgd(lr=lr, momentum=0.9),
    )  # fmt: skip
    result = cw.fit(recipe, on=cw.On(devices=1), run=None, progress="none", log_every="1st")
    noise = max(abs(a - b) for a, b in zip(near_losses, losses, strict=True))
    ours = [row["train/loss"] for row in result.history if "train/loss" in row]
    np.testing.assert_allclose(ours, losses, rtol=1e-6, atol=8 * noise)
    worst = {}
    for key, array in {**flattened(result.params, "."), **flattened(result.state, ".")}.items():
        # At least float32's spacing, and the noise of a typical entry: one small tensor may be lucky
        scale = np.abs(exact[key]).max()
        noise = max(np.abs(near[key] - exact[key]).max(), 2**-22 * max(scale, lr))
        worst[key] = float(np.abs(array - exact[key]).max() / noise)
    print(sorted(worst.items(), key=lambda pair: -pair[1])[:5])
    assert max(worst.values()) <= 8, max(worst, key=worst.get)


@pytest.mark.slow
@pytest.mark.as_users_compile
def test_three_devices_give_the_bits_of_one():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3))
    task = cw.torch.task(module, nn.CrossEntropyLoss(), train=ROWS, check=False)
    recipe = cw.Recipe(task=task, batch=12, replicas=4, duration="5st", optimizer=cw.sgd(lr=0.1))
    one, three = (cw.fit(recipe, on=cw.On(devices=n), progress="none") for n in (1, 3))
    assert one.devices["count"] == 1 and three.devices["count"] == 3
    assert one.fingerprint == three.fingerprint
    assert not np.array_equal(one.params["0"]["weight"], module[0].weight.detach())


class LightningModule(nn.Module):
    """The methods that Lightning's class has for its Trainer, some of them."""

    def training_step(self, batch, index): ...

    def validation_step(self, batch, index): ...

    def configure_optimizers(self): ...

    def optimizer_step(self, *given): ...

    def on_train_epoch_end(self): ...

    def on_before_optimizer_step(self, optimizer): ...

    def configure_callbacks(self): ...

    @classmethod
    def load_from_checkpoint(cls, path): ...

    @property
    def automatic_optimization(self): ...


@pytest.mark.parametrize("name", [n for n in vars(LightningModule) if not n.startswith("__")])
def test_what_only_lightning_s_trainer_calls_is_refused_by_name(name):
    body = {name: lambda self, *given: None, "forward": lambda self, x: self.net(x)}
    module = type("Own", (LightningModule,), body)()
    module.net = nn.Linear(4, 3)
    with refused(cw.errors.RecipeError, "torch-own-step", module="Own", names=[name]):
        cw.torch.task(module, nn.CrossEntropyLoss(), train=ROWS)


def test_a_lightning_module_of_a_forward_alone_is_a_network():
    module = type("Own", (LightningModule,), {"forward": lambda self, x: self.net(x)})()
    module.net = nn.Linear(4, 3)
    assert cw.torch.task(module, nn.CrossEntropyLoss(), train=ROWS, check=False).framework == "torch"


@pytest.mark.parametrize("default", [True, False])
@pytest.mark.parametrize("name", ["train", "training", "is_training", "deterministic", "inference"])
def test_an_argument_for_the_mode_is_refused_by_name(name, default):
    """PyTorch's own flag is set. Nothing would set this one."""
    names = {"F": F, "nn": nn}
    exec(f"def forward(self, x, {name}={default}):\n return self.net(F.dropout(x, training={name}))", names)
    module = type("Own", (nn.Module,), {"forward": names["forward"]})()
    module.net = nn.Linear(4, 3)
    with refused(cw.errors.RecipeError, "torch-mode-argument", module="Own", names=[name]):
        cw.torch.task(module, nn.CrossEntropyLoss(), train=ROWS)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of torchvision and timm
@pytest.mark.parametrize("library", ["timm", "torchvision"])
def test_the_three_lines_of_the_page_take_the_real_library(library, tmp_path, monkeypatch):
    """On the page itself another net stands in its place."""
    kept = stubbed()
    pytest.importorskip(library)
    page = doc_pages.ROOT / "docs" / "public_models.md"
    texts = [text for _, text in doc_pages.blocks(page, "python")]
    for place in ("cat/0", "cat/1", "dog/0", "dog/1"):
        file = tmp_path / "photos" / f"{place}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(RNG.integers(0, 255, (32, 32, 3), np.uint8)).save(file)
    monkeypatch.chdir(tmp_path)
    names = {}
    lines = next(text for text in texts if text.startswith(f"import {library}"))
    for text in (
        texts[0].replace("size=64", "size=32"),
        lines.replace("5ep", "1st").replace("batch=32", "batch=4, replicas=1"),
    ):
        exec(text, names)
    assert np.isfinite(names["result"].metrics["train/loss"]) and kept


def test_a_prediction_has_what_is_in_tuples_and_no_memory_that_hugging_face_leaves_out():
    class Remembers(nn.Linear):
        config = types.SimpleNamespace(keys_to_ignore_at_inference=["mems"])

        def forward(self, x):
            return {"logits": super().forward(x), "mems": [x.T], "states": (x, x * 2)}

    def loss(outputs, label):
        return F.cross_entropy(outputs["logits"], label) + outputs["mems"][0].mean()

    task = cw.torch.task(Remembers(4, 3), loss, train=ROWS)
    params, state = task.init(jax.random.key(0))
    names = {"logits", "states.0", "states.1"}
    assert task.predict(params, state, dict(ROWS.columns)).keys() == names


def test_a_prediction_names_no_two_arrays_alike():
    class Dotted(nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            return {"a.0": y, "a": (y * 2,)}

    with refused(cw.errors.RecipeError, "torch-output-twice", module="Dotted"):
        task = cw.torch.task(Dotted(4, 3), lambda out, y: F.cross_entropy(out["a.0"], y), train=ROWS)
        task.predict(*task.init(jax.random.key(0)), dict(ROWS.columns))
