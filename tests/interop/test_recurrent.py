"""Recurrent layers of PyTorch and Keras: what eager PyTorch computes, in a program as long for any time."""

import os

import jax
import numpy as np
import pytest

import chipwise as cw
from chipwise.models.remat import inside
from refusals import refused

os.environ.setdefault("KERAS_BACKEND", "jax")
RNG = np.random.default_rng(0)


def data(time):
    x = RNG.normal(size=(16, time, 3)).astype(np.float32)
    return cw.Arrays(x=x, label=RNG.integers(0, 2, 16), classes=2)


def operations(task, time):
    batch = {
        "x": jax.ShapeDtypeStruct((4, time, 3), np.float32),
        "label": jax.ShapeDtypeStruct((4,), np.int32),
    }
    params, state = jax.eval_shape(task.init, jax.random.key(0))
    traced = jax.make_jaxpr(lambda p, b: task.loss(p, state, b, jax.random.key(0), True)[0]["loss"].total)(
        params, batch
    )
    made = [e.primitive.name for one in inside(traced.jaxpr) for e in one.eqns]
    return len(made), made.count("scan")


def torch_task(kind, time, **settings):
    torch = pytest.importorskip("torch")
    pytest.importorskip("torchax")
    nn = torch.nn
    torch.manual_seed(0)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = getattr(nn, kind)(3, 5, **settings)
            wide = settings.get("proj_size", 5) * (2 if settings.get("bidirectional") else 1)
            self.head = nn.Linear(wide, 2)

        def forward(self, x):
            x = x if settings.get("batch_first") else x.transpose(0, 1)
            out, last = self.layers(x)
            end = last[0] if isinstance(last, tuple) else last
            out = out.mean(1 if settings.get("batch_first") else 0)
            return self.head(out) + end.sum((0, 2))[:, None]

    # Compares outputs in both modes and every gradient with eager PyTorch's
    return cw.torch.task(Net(), nn.CrossEntropyLoss(), train=data(time))


@pytest.mark.filterwarnings("ignore:LSTM with projections:UserWarning")  # of PyTorch's own speed
@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        pytest.param("LSTM", {"batch_first": True}, marks=pytest.mark.slow),
        pytest.param(
            "LSTM",
            {"num_layers": 2, "bidirectional": True, "dropout": 0.5, "proj_size": 2},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "GRU",
            {"num_layers": 2, "bidirectional": True, "batch_first": True, "bias": False},
            marks=pytest.mark.slow,
        ),
        pytest.param("RNN", {"nonlinearity": "relu"}, marks=pytest.mark.slow),
        ("RNN", {"batch_first": True}),
    ],
)
def test_a_recurrent_layer_of_pytorch_is_a_loop(kind, settings):
    short, long = (operations(torch_task(kind, time, **settings), time) for time in (3, 11))
    loops = settings.get("num_layers", 1) * (2 if settings.get("bidirectional") else 1)
    assert short == long and short[1] == loops


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_a_recurrent_layer_of_keras_is_a_loop(kind):
    keras = pytest.importorskip("keras")
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def counted(time):
        layer = getattr(keras.layers, kind)(5)
        net = keras.Sequential([keras.Input((time, 3)), layer, keras.layers.Dense(2)])
        return operations(cw.keras.task(net, loss, train=data(time)), time)

    with jax.numpy_rank_promotion("allow"):  # in rules that JAX traces after the door has let it
        short, long = counted(3), counted(11)
    assert short == long and short[1] == 1


def packed(**settings):
    torch = pytest.importorskip("torch")
    pytest.importorskip("torchax")
    nn, rnn = torch.nn, torch.nn.utils.rnn
    torch.manual_seed(0)

    class Net(nn.Module):
        def __init__(self, kind, known, **more):
            super().__init__()
            self.layers = getattr(nn, kind)(3, 5, batch_first=True, bidirectional=True, **more)
            self.next = getattr(nn, kind)(10, 5, bidirectional=True)
            self.head, self.known = nn.Linear(10, 2), known

        def forward(self, x, length):
            length = torch.tensor([4, 2, 3, 1] * 4)[: len(x)] if self.known else length.cpu()
            x = rnn.pack_padded_sequence(x, length, batch_first=True, enforce_sorted=False)
            out, last = self.layers(x)
            out, _ = self.next(out.to(torch.float32))
            out, length = rnn.pad_packed_sequence(out, batch_first=True, total_length=5)
            end = last[0] if isinstance(last, tuple) else last
            return self.head(out.sum(1) / length[:, None]) + end.sum((0, 2))[:, None]

    length = RNG.integers(1, 5, 16).astype(np.int32)
    rows = cw.Arrays(x=data(5).columns["x"], length=length, label=RNG.integers(0, 2, 16))
    return cw.torch.task(
        Net(**settings), nn.CrossEntropyLoss(), train=rows, inputs=("x", "length"), classes=2
    )


@pytest.mark.slow
@pytest.mark.parametrize("known", [True, False], ids=["constant lengths", "lengths of the data"])
@pytest.mark.parametrize(("kind", "more"), [("LSTM", {}), ("GRU", {"num_layers": 2}), ("RNN", {})])
def test_packed_sequences_are_those_of_pytorch(kind, more, known):
    packed(kind=kind, known=known, **more)


def padded(packed, rnn, **settings):
    return rnn.pad_packed_sequence(packed, batch_first=True, **settings)[0].mean(1)


READ = {
    "no total_length": padded,
    "the same said": lambda p, rnn: padded(p, rnn, total_length=p.batch_sizes.size(0)),
    "data": lambda p, rnn: p.data.mean(0)[None],
    "changed data": lambda p, rnn: padded(rnn.PackedSequence(p.data.tanh(), *p[1:]), rnn, total_length=5),
    "flat data": lambda p, rnn: p.data.flatten().mean() + p.data[:1],
    "first of data": lambda p, rnn: p[0][:1],
    "number of data": lambda p, rnn: p.data.new_zeros(1, 10) + len(p.data),
    "size of data": lambda p, rnn: p.data.size(0) + p.data.shape[0],
    "elements of data": lambda p, rnn: p.data.numel(),
    "batch_sizes": lambda p, rnn: p.batch_sizes.sum(),
    "number of batch_sizes": lambda p, rnn: len(p.batch_sizes),
    "last of batch_sizes": lambda p, rnn: p.batch_sizes[-1],
    "shape of batch_sizes": lambda p, rnn: p.batch_sizes.shape[0],
    "list of batch_sizes": lambda p, rnn: sum(p.batch_sizes.tolist()),
    "all batch_sizes": lambda p, rnn: sum(p.batch_sizes),
}


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("name", READ)
def test_what_would_count_the_padding_of_packed_sequences_is_refused(name, check):
    torch = pytest.importorskip("torch")
    pytest.importorskip("torchax")
    nn, rnn = torch.nn, torch.nn.utils.rnn

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.RNN(3, 10, batch_first=True)
            self.head = nn.Linear(10, 2)

        def forward(self, x, length):
            packed = rnn.pack_padded_sequence(x, length.cpu(), batch_first=True, enforce_sorted=False)
            out, last = self.layers(packed)
            return self.head(last[0] + READ[name](out, rnn))

    rows = cw.Arrays(x=data(5).columns["x"], length=np.full(16, 5), label=RNG.integers(0, 2, 16))
    with refused(cw.errors.RecipeError, "torch-not-traced") as caught:
        cw.torch.task(
            Net(), nn.CrossEntropyLoss(), train=rows, inputs=("x", "length"), classes=2, check=check
        )
    assert "total_length=x.shape[1]" in caught.value.facts["reason"]
    assert caught.value.facts["where"].startswith("test_recurrent.py:")


def test_packed_data_is_no_output():
    torch = pytest.importorskip("torch")
    pytest.importorskip("torchax")

    class Net(torch.nn.Module):
        def forward(self, x, length):
            pack = torch.nn.utils.rnn.pack_padded_sequence
            return pack(x, length, batch_first=True, enforce_sorted=False).data

    rows = cw.Arrays(x=data(5).columns["x"], length=np.full(16, 5), label=RNG.integers(0, 2, 16))
    with refused(cw.errors.RecipeError, "torch-not-traced") as caught:
        cw.torch.task(Net(), lambda out, y: out, train=rows, inputs=("x", "length"), classes=2, check=False)
    assert "total_length=x.shape[1]" in caught.value.facts["reason"]
