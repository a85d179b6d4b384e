"""Modules that read the size of their batch leave as ONNX and StableHLO, for batches of any size or, if they
have to know it, of one."""

import jax
import numpy as np
import pytest

import chipwise as cw
from chipwise.deploy.model import Trained
from refusals import refused

torch = pytest.importorskip("torch")
pytest.importorskip("torchax")
nn, F = torch.nn, torch.nn.functional

RNG = np.random.default_rng(0)
X = RNG.normal(size=(130, 4, 6)).astype(np.float32)
ROWS = cw.Arrays(x=X, label=RNG.integers(0, 3, 130))


def made(f, **parts):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(24, 3)
            self.parts = nn.ModuleDict(parts)

        def forward(self, x):
            return f(self, x)

    torch.manual_seed(0)
    return Net().eval()


def view(self, x):
    return self.head(x.view(x.size(0), -1))


def unpacked(self, x):
    b, t, d = x.shape
    return self.head(x.reshape(b, t * d))


def windows(self, x):
    b, t, d = x.shape
    parts = x.view(b, t // 2, 2, d).permute(0, 2, 1, 3).reshape(-1, 2, d).softmax(1)
    return self.head(parts.view(parts.shape[0] // 2, 2, 2, d).flatten(1))


def heads(self, x):
    b, t, _ = x.shape
    q = x.view(b, t, 2, 3).transpose(1, 2)
    y = F.scaled_dot_product_attention(q, q, q, is_causal=True)
    return self.head(y.transpose(1, 2).contiguous().view(b, -1))


def token(self, x):
    first = torch.zeros(1, 1, 6).expand(x.shape[0], -1, -1)
    return self.head(torch.cat([first, x], 1)[:, :4].flatten(1))


def new_tensors(self, x):
    rows = torch.arange(x.shape[0])
    state = torch.zeros(x.size(0), 1, 6) + torch.ones(x[:, :1].shape)
    return self.head(torch.cat([state, x[:, 1:]], 1)[rows].view(len(x.shape) and x.shape[0], -1))


def merged(self, x):
    b, t, d = x.shape
    y = F.layer_norm(x.view(b * t, d), (d,))
    return self.head(y.view(b, t, d).reshape(x.numel() // 24, 24))


def asked(self, x):
    b = x.shape[0]
    if b == 0 or x.shape[0] != b or max(2, 1) > x.dim():
        raise ValueError
    return self.head(x.unflatten(1, (2, 2)).flatten(1)) - x.sum() * 0 / b


def recurrent(name):
    def f(self, x):
        return self.head(self.parts["layer"](x)[0].reshape(x.size(0), -1))

    return f, {"layer": getattr(nn, name)(6, 3, batch_first=True, bidirectional=True, num_layers=2)}


def attended(self, x):
    return self.head(self.parts["layer"](x, x, x)[0].flatten(1))


def cell(name):
    def f(self, x):
        state = None
        for t in range(x.shape[1]):
            state = self.parts["layer"](x[:, t], state)
        h = state[0] if isinstance(state, tuple) else state
        return self.head(F.pad(h, (0, 20)))

    return f, {"layer": getattr(nn, name)(6, 4)}


def resized(mode):
    def f(self, x):
        wide = F.interpolate(F.prelu(x[:, None], self.head.bias[:1]), (8, 6), mode=mode)
        return self.head(wide[:, 0, ::2].flatten(1))

    return f, {}


def unpooled(self, x):
    y, at = F.max_pool2d(x[:, None], 2, return_indices=True)
    return self.head(F.max_unpool2d(y, at, 2).flatten(1))


def turned(self, x):
    grid = F.affine_grid(torch.eye(2, 3).expand(x.shape[0], 2, 3) * 0.9, x[:, None].shape, False)
    return self.head(F.grid_sample(x[:, None], grid, align_corners=False).flatten(1))


def squeezed(self, x):
    return self.head((x[:, :, None].squeeze().view(-1, 4, 6) * 2).flatten(1))


IDIOMS = {
    "view": (view, {}),
    "unpacked": (unpacked, {}),
    "windows": (windows, {}),
    "heads": (heads, {}),
    "token": (token, {}),
    "new tensors": (new_tensors, {}),
    "merged": (merged, {}),
    "asked": (asked, {}),
    "LSTM": recurrent("LSTM"),
    "GRU": recurrent("GRU"),
    "LSTMCell": cell("LSTMCell"),
    "GRUCell": cell("GRUCell"),
    "RNNCell": cell("RNNCell"),
    "bilinear": resized("bilinear"),
    "bicubic": resized("bicubic"),
    "unpooled": (unpooled, {}),
    "turned": (turned, {}),
    "squeezed": (squeezed, {}),
    "MultiheadAttention": (attended, {"layer": nn.MultiheadAttention(6, 2, batch_first=True)}),
    "encoder": (
        lambda self, x: self.head(self.parts["layer"](x).flatten(1)),
        {"layer": nn.TransformerEncoderLayer(6, 2, 8, batch_first=True)},
    ),
}
KNOWN = {
    "len": lambda self, x: self.head(x.reshape(len(x), -1)),
    "loop": lambda self, x: torch.stack([self.head(row.flatten()) for row in x]),
    "int": lambda self, x: self.head(x.reshape(int(x.shape[0]), -1)),
    "branch": lambda self, x: self.head(x.flatten(1)) * (2 if x.shape[0] == 64 else 1),
    "range": lambda self, x: self.head(torch.stack([x[i] for i in range(x.shape[0])]).flatten(1)),
    "key": lambda self, x: self.head({x.shape[0]: x}[x.shape[0]].flatten(1)),
}
"""What has to know the size."""
DECIDES = {
    "even": lambda x: x.shape[0] % 2 == 0,
    "odd": lambda x: x.shape[0] % 2,
    "not two": lambda x: x.shape[0] - 2,
    "one": lambda x: x.shape[0] == 1,
    "not one": lambda x: x.shape[0] != 1,
    "one of": lambda x: x.shape[0] in (0, 1),
    "all sizes": lambda x: x.shape == (1, 4, 6),
    "no other": lambda x: x[1:].numel() == 0,
}
"""What is true of some sizes."""


def trained(net):
    task = cw.torch.task(net, nn.CrossEntropyLoss(), train=ROWS, check=False)
    params, state = jax.device_get(task.init(jax.random.key(0)))
    recipe = cw.Recipe(task=task, batch=8, duration="1st", optimizer=cw.sgd(lr=0.1))
    return Trained(recipe, params, state)


def outputs(file, to, x):
    if to == "stablehlo":
        return np.asarray(*jax.export.deserialize(bytearray(file.read_bytes())).call({"x": x}).values())
    session = pytest.importorskip("onnxruntime").InferenceSession(str(file))
    return session.run(None, {"x": x})[0]


def leaves(f, parts, to, file, batch=None):
    """Exports a module, and compares the file's outputs with the module's own."""
    pytest.importorskip({"stablehlo": "flatbuffers", "onnx": "jax2onnx"}[to])
    net = made(f, **parts)
    export = cw.export(trained(net), to, file, data=ROWS, batch=batch)
    assert export.batch == batch and export.examples == 130
    for rows in (1, 3) if batch is None else (batch,):
        own = net(torch.from_numpy(X[:rows])).detach().numpy()
        np.testing.assert_allclose(outputs(file, to, X[:rows]), own, rtol=1e-4, atol=1e-5)


def test_a_module_that_reads_its_batch_size_is_exported_for_any(tmp_path):
    leaves(*IDIOMS["view"], "stablehlo", tmp_path / "m")


@pytest.mark.slow
@pytest.mark.drawn(share=0.25)
@pytest.mark.parametrize("to", ["stablehlo", "onnx"])
@pytest.mark.parametrize("name", IDIOMS)
def test_idioms_of_batch_sizes_are_exported_for_any(tmp_path, name, to):
    leaves(*IDIOMS[name], to, tmp_path / "m")


@pytest.mark.slow
@pytest.mark.drawn(share=0.25)
@pytest.mark.parametrize("to", ["stablehlo", "onnx"])
@pytest.mark.parametrize("name", KNOWN)
def test_what_has_to_know_the_size_is_exported_for_one(tmp_path, name, to):
    with refused(cw.errors.RecipeError, "export-any-batch", format=to) as caught:
        leaves(KNOWN[name], {}, to, tmp_path / "any")
    assert caught.value.facts["where"].startswith(" at test_torch_export.py:")
    leaves(KNOWN[name], {}, to, tmp_path / "m", batch=8)


@pytest.mark.parametrize("name", DECIDES)
def test_what_is_true_of_some_sizes_is_not_written_for_any(tmp_path, name):
    pytest.importorskip("flatbuffers")
    net = made(lambda self, x: self.head(x.flatten(1)) * (2 if DECIDES[name](x) else 1))
    with refused(cw.errors.RecipeError, "export-any-batch", format="stablehlo") as caught:
        cw.export(trained(net), "stablehlo", tmp_path / "any", data=ROWS)
    assert caught.value.facts["where"].startswith(" at test_torch_export.py:")


def test_weights_have_no_batch(tmp_path):
    with refused(cw.errors.RecipeError, "export-batch", batch=8):
        cw.export(trained(made(view)), "safetensors", tmp_path / "m", batch=8)


def test_what_depends_on_the_other_examples_is_refused_as_that(tmp_path):
    norm = nn.BatchNorm1d(4, track_running_stats=False)
    net = made(lambda self, x: self.head(self.parts["norm"](x).flatten(1)), norm=norm)
    with refused(cw.errors.RecipeError, "export-of-neighbours"):
        cw.export(trained(net), "stablehlo", tmp_path / "net", data=ROWS)


def test_a_net_that_diverged_is_not_one_of_neighbours(tmp_path):
    net = made(lambda self, x: self.head(x.flatten(1)) * np.nan)
    with refused(cw.errors.RecipeError, "export-differs"):
        cw.export(trained(net), "stablehlo", tmp_path / "net", data=ROWS)
