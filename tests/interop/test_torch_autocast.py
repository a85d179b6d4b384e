"""`torch.autocast` inside a module: the trace computes in the types that eager PyTorch computes in."""

import jax
import numpy as np
import pytest

import chipwise as cw
from chipwise.interop.adapter import flattened

torch = pytest.importorskip("torch")
pytest.importorskip("torchax")
nn, F = torch.nn, torch.nn.functional

ROWS = cw.Arrays(
    x=np.random.default_rng(0).normal(size=(8, 12)).astype(np.float32),
    label=np.arange(8) % 3,
)
CAST = {
    "a layer": lambda self, x: self.line(x),
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
}


def made(f, after=lambda self, y: y):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.line = nn.Linear(12, 12)
            self.head = nn.Linear(12, 3)

        def forward(self, x):
            with torch.autocast("cpu", torch.bfloat16):
                y = f(self, x)
            return after(self, y)

    torch.manual_seed(0)
    return Net()


@pytest.mark.parametrize("name", CAST)
def test_what_autocast_casts_is_cast(name):
    net = made(CAST[name])
    task = cw.torch.task(net, lambda out, _: out.float().mean(), train=ROWS, check=False)
    ours = task.predict(*task.init(jax.random.key(0)), dict(ROWS.columns))
    theirs = net(torch.from_numpy(ROWS.columns["x"])).detach()
    assert str(ours.dtype) == str(theirs.dtype).removeprefix("torch.")
    wide = theirs.float().numpy()
    assert np.allclose(np.asarray(ours, np.float32), wide, rtol=0, atol=2**-6 * abs(wide).max())


def test_a_step_with_autocast_is_pytorchs():
    net = made(CAST["a layer"], lambda self, y: self.head(y.float()))
    x, label = (torch.from_numpy(ROWS.columns[n]).repeat_interleave(64, 0) for n in ("x", "label"))
    rows = cw.Arrays(x=x.numpy(), label=label.numpy())
    task = cw.torch.task(net, nn.CrossEntropyLoss(), train=rows)

    def loss(params):
        total = task.loss(params, {}, dict(rows.columns), jax.random.key(0), True)[0]["loss"]
        return total.total / total.count

    ours = flattened(jax.grad(loss)(task.init(jax.random.key(0))[0]), ".")
    F.cross_entropy(net(x), label.long()).backward()
    for name, p in net.named_parameters():
        most = abs(p.grad.numpy()).max()
        assert np.allclose(ours[name], p.grad.numpy(), rtol=0, atol=2**-6 * most), name
