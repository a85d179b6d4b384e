"""`torch.autocast` inside a module: the trace computes in the types that eager PyTorch computes in."""

import threading

import jax
import numpy as np
import pytest

import chipwise as cw
from chipwise.interop import torch_autocast
from chipwise.interop.adapter import flattened
from refusals import refused

torch = pytest.importorskip("torch")
pytest.importorskip("torchax")
nn, F = torch.nn, torch.nn.functional
checkpoint = torch.utils.checkpoint.checkpoint

ROWS = cw.Arrays(
    x=np.random.default_rng(0).normal(size=(8, 12)).astype(np.float32),
    label=np.arange(8) % 3,
)
CAST = {
    "a layer": lambda self, x: self.line(x),
    "a biased layer": lambda self, x: self.biased(x),
    "a product": lambda self, x: x @ x.T,
    "bmm": lambda self, x: torch.bmm(x[None], x.T[None]),
    "einsum": lambda self, x: torch.einsum("ij,kj->ik", x, x),
    "tensordot": lambda self, x: torch.tensordot(x, x.T, 1),
    "a convolution": lambda self, x: F.conv1d(x[:, None], x[:3, None, :3]),
    "attention": lambda self, x: F.scaled_dot_product_attention(x, x, x),
    "transposed": lambda self, x: F.conv_transpose1d(x[:, None], x[:1, None, :3], bias=x[0, :1]),
    "a sum": lambda self, x: self.line(x) + x,
    "softmax of a product": lambda self, x: self.line(x).softmax(-1),
    "a loss of a product": lambda self, x: F.mse_loss(self.line(x), x),
    "none inside": lambda self, x: torch.autocast("cpu", enabled=False)(self.line)(x),
    "none by the device": lambda self, x: torch.autocast(x.device.type, enabled=False)(self.line)(x),
    "einsum of no sum": lambda self, x: torch.einsum("i,j->ij", x[0], x[1]),
    "einsum by element": lambda self, x: torch.einsum("bi,bj->bij", x, x),
    "einsum of three": lambda self, x: torch.einsum("ij,kj,kl->il", x, x, x),
    "tensordot of no axis": lambda self, x: torch.tensordot(x[0], x[1], 0),
    "inner": lambda self, x: torch.inner(x, x),
    "by a vector": lambda self, x: torch.mv(x, x[0]),
    "bilinear": lambda self, x: F.bilinear(x, x, torch.ones(2, 12, 12)),
    "multi_dot": lambda self, x: torch.linalg.multi_dot([x, x.T, x]),
    "matrix_power": lambda self, x: torch.linalg.matrix_power(x.diag_embed(), 3),
    "pinverse": lambda self, x: torch.pinverse(x),
    "cdist": lambda self, x: torch.cdist(x, x + 1),
    "cosine_similarity": lambda self, x: F.cosine_similarity(x, x + 1),
    "a cell": lambda self, x: self.cell(x)[0],
    "layer norm": lambda self, x: self.norm(self.line(x)),
    "layer norm by names": lambda self, x: torch.layer_norm(
        input=self.line(x), normalized_shape=(12,), weight=self.norm.weight
    ),
    "group norm": lambda self, x: self.groups(self.line(x)),
    "root mean square norm": lambda self, x: self.root(self.line(x)),
    "instance norm": lambda self, x: F.instance_norm(self.line(x)[None], weight=x[:8, 0]),
    "batch norm": lambda self, x: self.batch(self.line(x)),
    "checkpointed": lambda self, x: checkpoint(self.line, x, use_reentrant=False),
    "heads": lambda self, x: self.heads(x[None], x[None], x[None])[0],
    "pad": lambda self, x: F.pad(self.line(x)[None], (1, 1), "reflect"),
    "pool": lambda self, x: F.max_pool3d(self.line(x)[None, None, None], (1, 2, 2)),
    "a product of all": lambda self, x: self.line(x)[:, :2].prod(-1),
}


def made(f, after=lambda self, y: y, device=lambda x: "cpu"):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.line, self.biased = nn.Linear(12, 12, bias=False), nn.Linear(12, 12)
            self.head = nn.Linear(12, 3)
            self.cell = nn.LSTMCell(12, 5)
            self.lstm, self.gru, self.rnn = (kind(12, 5) for kind in (nn.LSTM, nn.GRU, nn.RNN))
            self.norm, self.root, self.groups = nn.LayerNorm(12), nn.RMSNorm(12), nn.GroupNorm(3, 12)
            self.batch, self.heads = nn.BatchNorm1d(12), nn.MultiheadAttention(12, 2)

        def forward(self, x):
            with torch.autocast(device(x), torch.bfloat16):
                y = f(self, x)
            return after(self, y)

    torch.manual_seed(0)
    return Net()


def task(net, **named):
    return cw.torch.task(net, lambda out, _: out.float().mean(), train=ROWS, **named)


def agree(net):
    """Asserts that a prediction of `net` is PyTorch's in type and values."""
    made = task(net.eval(), check=False)
    ours = made.predict(*made.init(jax.random.key(0)), dict(ROWS.columns))
    theirs = net(torch.from_numpy(ROWS.columns["x"])).detach()
    assert str(ours.dtype) == str(theirs.dtype).removeprefix("torch.")
    wide, ours = theirs.float().numpy(), np.asarray(ours, np.float32)
    assert np.allclose(ours, wide, rtol=0, atol=2**-6 * abs(wide).max())
    return ours, wide


@pytest.mark.filterwarnings("ignore:Mismatch dtype")  # PyTorch's own, of such a norm
@pytest.mark.parametrize("name", CAST)
def test_what_autocast_casts_is_cast(name):
    agree(made(CAST[name]))


ROUNDS_ONCE = "a layer", "a product", "a sum", "a loss of a product", "bmm", "einsum", "inner", "pad"


@pytest.mark.parametrize("name", ROUNDS_ONCE)
def test_what_is_cast_is_rounded(name, monkeypatch):
    """Less differs from PyTorch's than what autocast changes there."""
    net = made(CAST[name])
    ours, wide = agree(net)
    monkeypatch.setattr(*torch_autocast.closed())
    without = net(torch.from_numpy(ROWS.columns["x"])).detach().float().numpy()
    assert np.linalg.norm(ours - wide) < np.linalg.norm(without - wide) / 2


class Twice(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.bfloat16)
    def forward(ctx, x):
        return x + x

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx, slope):
        return 2 * slope


BY_THE_DEVICE = {
    "a product": CAST["a product"],
    "none of it": lambda self, x: torch.autocast(x.device.type, enabled=False)(self.line)(x),
    "whether": lambda self, x: x * torch.is_autocast_enabled(x.device.type),
    "its type": lambda self, x: x.to(torch.get_autocast_dtype(x.device.type)),
    "inputs of custom_fwd": lambda self, x: Twice.apply(x),
}


@pytest.mark.parametrize("name", BY_THE_DEVICE)
def test_autocast_is_named_by_the_device_of_a_tensor(name):
    agree(made(BY_THE_DEVICE[name], device=lambda x: x.device.type))


def test_autocast_of_another_thread_casts_nothing_here():
    def f(self, x):
        opened, closed = threading.Event(), threading.Event()

        def other():
            with torch.autocast("cpu", torch.bfloat16):
                opened.set()
                closed.wait()

        thread = threading.Thread(target=other)
        thread.start()
        opened.wait()
        y = x @ x.T
        closed.set()
        thread.join()
        return y

    agree(made(lambda self, x: torch.autocast("cpu", enabled=False)(f)(self, x)))


def test_a_step_with_autocast_is_pytorchs():
    net = made(CAST["a layer"], lambda self, y: self.head(y.float()))
    x, label = (torch.from_numpy(ROWS.columns[n]).repeat_interleave(64, 0) for n in ("x", "label"))
    rows = cw.Arrays(x=x.numpy(), label=label.numpy())
    made_of = cw.torch.task(net, nn.CrossEntropyLoss(), train=rows)

    def loss(params):
        total = made_of.loss(params, {}, dict(rows.columns), jax.random.key(0), True)[0]["loss"]
        return total.total / total.count

    ours = flattened(jax.grad(loss)(made_of.init(jax.random.key(0))[0]), ".")
    F.cross_entropy(net(x), label.long()).backward()
    for name, p in net.named_parameters():
        if p.grad is None:
            assert not np.any(ours[name]), name
            continue
        most = abs(p.grad.numpy()).max()
        assert np.allclose(ours[name], p.grad.numpy(), rtol=0, atol=2**-6 * most), name


REFUSED = {
    "LSTM": lambda self, x: self.lstm(x[None])[0],
    "GRU": lambda self, x: self.gru(x[None])[0],
    "RNN": lambda self, x: self.rnn(x[None])[0],
    "pinv": lambda self, x: torch.linalg.pinv(x),
    "corrcoef": lambda self, x: torch.corrcoef(x),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_rounds_elsewhere_is_refused_in_autocast(name):
    with refused(cw.errors.RecipeError, "torch-autocast-layer") as caught:
        task(made(REFUSED[name]), check=False)
    assert caught.value.facts["where"].startswith("test_torch_autocast.py:")


def test_float16_is_refused():
    net = made(lambda self, x: torch.autocast("cpu", torch.float16)(self.line)(x))
    with refused(cw.errors.RecipeError, "torch-autocast-float16") as caught:
        task(net)
    assert caught.value.facts["where"].startswith("test_torch_autocast.py:")


def test_what_is_refused_leaves_no_autocast_open():
    class Alone(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.line = torch.nn.Linear(12, 12)

        def forward(self, x):
            with torch.autocast("cpu", torch.float16):
                return self.line(x)

    with refused(cw.errors.RecipeError, "torch-autocast-float16"):
        task(Alone)
    assert not torch.is_autocast_enabled("cpu")
    assert torch.autocast_increment_nesting() == 1 and torch.autocast_decrement_nesting() == 0


def test_autocast_around_a_task_is_refused():
    with (
        refused(cw.errors.RecipeError, "torch-autocast-outside", module="Net"),
        torch.autocast("cpu", torch.bfloat16),
    ):
        task(made(lambda self, x: self.line(x)))


def losing(kept):
    """A function with a gradient that is `kept` in part in the trace, where tensors are of no CPU."""

    class Losing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.part = 1 if x.device.type == "cpu" else kept
            return x * 1

        @staticmethod
        def backward(ctx, slope):
            return ctx.part * slope

    return lambda x: Losing.apply(x)


SOME, NONE = losing(0.9), losing(0.0)
LOST = {
    "in float64": made(CAST["a layer"], lambda self, y: self.head(SOME(y).to(self.head.weight.dtype))),
    "in float32": made(CAST["a layer"], lambda self, y: self.head(SOME(y).float())),
    "in autocast alone": made(
        lambda self, x: self.line(x.bfloat16()), lambda self, y: self.head(NONE(y).float())
    ),
    "in bfloat16": made(
        lambda self, x: x, lambda self, x: self.head(SOME(self.line(x.to(self.line.weight.dtype))))
    ).bfloat16(),
}


@pytest.mark.parametrize("name", LOST)
def test_a_gradient_that_is_lost_is_found_beside_autocast(name):
    with refused(cw.errors.RecipeError, "torch-step-differs", what="gradient"):
        cw.torch.task(LOST[name], nn.CrossEntropyLoss(), train=ROWS)


def test_autocast_is_compared_though_only_it_computes():
    net = made(lambda self, x: self.line(x.bfloat16()), lambda self, y: self.head(y.float()))
    cw.torch.task(net, nn.CrossEntropyLoss(), train=ROWS)


def test_a_cast_that_differs_is_found(monkeypatch):
    """Also where the step without autocast is PyTorch's."""

    def f(self, x):
        near = 1 + 2**-9 + 0 * x  # 1 in bfloat16
        return 512 * (near @ torch.eye(12).to(x.device) - 1) + self.line(x)

    net = made(f, lambda self, y: self.head(y.float()))
    cw.torch.task(net, nn.CrossEntropyLoss(), train=ROWS)
    monkeypatch.setattr(torch_autocast, "casts", lambda *_: False)
    with refused(cw.errors.RecipeError, "torch-step-differs", what="outputs in evaluation"):
        cw.torch.task(net, nn.CrossEntropyLoss(), train=ROWS)
