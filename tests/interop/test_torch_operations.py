"""Operations of PyTorch that torchax lacks or computes otherwise: the comparison holds outputs in both modes,
every gradient and buffers against eager PyTorch's."""

import numpy as np
import pytest

import chipwise as cw
from refusals import refused

torch = pytest.importorskip("torch")
pytest.importorskip("torchax")
nn, F = torch.nn, torch.nn.functional

RNG = np.random.default_rng(0)
ROWS = cw.Arrays(x=RNG.normal(size=(8, 12)).astype(np.float32), label=RNG.integers(0, 3, 8))


def made(f, part=None):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(12, 12)
            self.head = nn.Linear(4, 3)
            self.part = part

        def forward(self, x):
            y = f(self, self.lin(x))
            return self.head(y.reshape(len(x), -1)[:, :4])

    torch.manual_seed(0)
    return Net()


def image(x):
    return x.reshape(-1, 1, 3, 4)


def rows(x):
    return x.reshape(-1, 3, 4)


def attended(self, x):
    blind = torch.tensor([[True, True, False], [False, False, False], [True, False, True]])
    added = torch.zeros(3, 3).masked_fill(~blind, -torch.inf)
    one, other = (F.scaled_dot_product_attention(rows(x), rows(x), rows(x), m) for m in (blind, added))
    return one + other * 2


def ctc(self, x):
    log = rows(x).permute(1, 0, 2).log_softmax(-1)
    targets = torch.tensor([[1, 2], [1, 1], [3, 0], [2, 2]]).repeat(2, 1)[: len(x)]
    lengths = torch.tensor([2, 2, 1, 1]).repeat(2)[: len(x)]
    whole = torch.full((len(x),), 3)
    return F.ctc_loss(log, targets, whole, lengths, reduction="none")[:, None].repeat(1, 4)


def in_bags(mode, **settings):
    def f(self, x):
        index = (x > 0).long() + (x > 0.5).long()
        flat = self.part(index.reshape(-1), torch.arange(0, 12 * len(x), 12))
        return self.part(index) + 2 * flat

    return f, nn.EmbeddingBag(4, 4, mode=mode, **settings)


def weighted_bags(self, x):
    return self.part((x > 0).long(), per_sample_weights=x)


def grouped(self, x):
    both = torch.stack([self.lin.weight, self.lin.weight.T * 2])
    return torch._grouped_mm(x, both, offs=torch.tensor([len(x) // 3, len(x)], dtype=torch.int32))


def distributed(self, x):
    normal = torch.distributions.Normal(x, F.softplus(x))
    start = torch.distributions.Normal(torch.zeros_like(x), torch.ones_like(x))
    drawn = torch.distributions.Categorical(logits=x)
    return normal.log_prob(x.detach() / 2) + torch.distributions.kl_divergence(normal, start) + (
        drawn.entropy()[:, None] + drawn.log_prob(torch.zeros(len(x)))[:, None]
    )  # fmt: skip


def joined(self, x):
    log = rows(x).permute(1, 0, 2).log_softmax(-1)
    lengths = torch.tensor([2, 2, 1, 2]).repeat(2)[: len(x)]
    targets = torch.tensor([1, 2, 1, 1, 3, 2, 2]).repeat(2)[: int(lengths.sum())]
    whole = torch.full((len(x),), 3)
    return F.ctc_loss(log, targets, whole, lengths, reduction="none")[:, None].repeat(1, 4)


def mapped_index(self, x):
    """As transformers makes masks of functions of places."""
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

    def at(row, place):
        return x[row, place] * (place < 7)

    with TransformGetItemToIndex():
        each = torch.vmap(torch.vmap(at, in_dims=(None, 0)), in_dims=(0, None))
        return each(torch.arange(len(x)), torch.arange(12))


def unpooled(stride):
    def f(self, x):
        best, at = F.max_pool2d(image(x), 2, stride, return_indices=True)
        return F.max_unpool2d(best, at, 2, stride, output_size=(3, 4))

    return f


QUICK = {
    "cumulative batch norm": (lambda self, x: self.part(x), nn.BatchNorm1d(12, momentum=None)),
    "arguments of linear": lambda self, x: F.linear(input=x, weight=self.lin.weight, bias=self.lin.bias),
    "each channel by a kernel": (
        lambda self, x: self.part(x.reshape(-1, 3, 2, 2)),
        nn.Conv2d(3, 3, 3, stride=(2, 1), padding=1, groups=3),
    ),
    "no padding by its name": (
        lambda self, x: self.part(x.reshape(-1, 3, 2, 2)),
        nn.Sequential(nn.Conv2d(3, 5, 3, padding="same"), nn.Conv2d(5, 4, 2, 2, padding="valid")),
    ),
    "a kernel larger than its images": (
        lambda self, x: self.part(x.reshape(-1, 3, 2, 2)),
        nn.Sequential(nn.Conv2d(3, 5, 3, stride=(2, 1), padding=1), nn.Conv2d(5, 4, 1, bias=False)),
    ),
    "on the CPU": lambda self, x: x.cpu() + x.to("cpu") + x.to(torch.device("cpu"), torch.float32),
    "new_tensor": lambda self, x: x + x.new_tensor([1.0] * 12) * x.new_tensor(2.0),
    "attention that sees nothing": attended,
    "in place": lambda self, x: (x * 1).exp_() + (x.tanh() / 2).erfinv_(),
}


def masked_view(self, x):
    y = x * 1
    view = y[:, :6]
    view[view > 0] = 1.0
    view[torch.ones(len(x), 6) == 2] = 3.0
    view[:, torch.arange(6) > 4] = 0.5
    return y


def written_view(self, x):
    y = x * 1
    view = y[:, :6]
    view.masked_fill_(view > 0, 2.0)
    view.index_fill_(1, torch.tensor([1, 2]), 3.0)
    view.lerp_(y[:, 6:], 0.5)
    y[:, 3:].neg_()
    return y


OPERATIONS = {
    "vmap": lambda self, x: torch.vmap(torch.outer, out_dims=1)(x[:, :3], x[:, 3:6]).transpose(0, 1),
    "vmap of an index": mapped_index,
    "vmap with keywords": lambda self, x: torch.vmap(torch.sum)(x[:, None] * x[:, :, None], dim=0),
    "a view, by masks": masked_view,
    "a view, in place": written_view,
    "arguments of tensor_split": lambda self, x: torch.tensor_split(x, indices=[4, 8], dim=1)[0],
    "arguments of pad": lambda self, x: F.pad(input=x, pad=(1, 1)),
    "arguments of max_pool2d": lambda self, x: F.max_pool2d(input=image(x), kernel_size=2, stride=1),
    "fold": lambda self, x: F.fold(F.unfold(image(x), 2, padding=1), (3, 4), 2, padding=1),
    "fold by strides": lambda self, x: F.fold(
        F.unfold(image(x), 2, padding=(1, 0), stride=2), (3, 4), 2, padding=(1, 0), stride=2
    ),
    "fold dilated": lambda self, x: F.fold(F.unfold(image(x), 2, dilation=2), (3, 4), 2, dilation=2),
    "adaptive_max_pool2d": lambda self, x: F.adaptive_max_pool2d(image(x), (2, 3)),
    "adaptive_max_pool1d": lambda self, x: F.adaptive_max_pool1d(rows(x), 3),
    "dilated kernels of channels": (
        lambda self, x: self.part(x.reshape(-1, 3, 2, 2)),
        nn.Conv2d(3, 3, 2, padding=1, groups=3, dilation=2, bias=False),
    ),
    "no padding of rows by its name": (
        lambda self, x: self.part(rows(x)),
        nn.Sequential(nn.Conv1d(3, 5, 3, padding="same"), nn.Conv1d(5, 4, 2, padding="valid")),
    ),
    "two kernels of each channel": (
        lambda self, x: self.part(x.reshape(-1, 3, 2, 2)),
        nn.Conv2d(3, 6, 2, padding=1, groups=3),
    ),
    "bags by mean": in_bags("mean"),
    "bags by sum": in_bags("sum", padding_idx=1),
    "bags by maximum": in_bags("max", padding_idx=1),
    "weighted bags": (weighted_bags, nn.EmbeddingBag(4, 4, mode="sum")),
    "ctc": ctc,
    "ctc of joined targets": joined,
    "max_unpool2d": unpooled(2),
    "max_unpool2d that overlaps": unpooled(1),
    "max_pool1d with indices": lambda self, x: sum(F.max_pool1d(rows(x), 3, 2, 1, 1, True, True)),
    "dilated max_pool1d": lambda self, x: F.max_pool1d(rows(x), 2, dilation=2, stride=1),
    "dilated max_pool2d": lambda self, x: F.max_pool2d(image(x), 2, 2, 1, dilation=2, ceil_mode=True),
    "cumulative, from behind": lambda self, x: x.logcumsumexp(-1) + x.cummax(-1)[0] + x.cummin(-1)[0],
    "take_along_dim": lambda self, x: torch.take_along_dim(x, x.argsort(1), 1),
    "affine_grid": lambda self, x: F.grid_sample(
        image(x),
        F.affine_grid(x[:, :6].reshape(-1, 2, 3), (len(x), 1, 3, 4), align_corners=False),
        align_corners=False,
    ),
    "bicubic, smoothed": lambda self, x: F.interpolate(image(x), (2, 3), mode="bicubic", antialias=True),
    "bilinear, smoothed by a scale": lambda self, x: F.interpolate(
        image(x), scale_factor=(0.6, 1.3), mode="bilinear", antialias=True
    ),
    "bicubic, smoothed by a scale": lambda self, x: F.interpolate(
        image(x), scale_factor=(1.4, 0.9), mode="bicubic", antialias=True
    ),
    "repeat_interleave by names": lambda self, x: x.repeat_interleave(repeats=2, dim=-1),
    "a copy of a view": lambda self, x: torch.zeros_like(x).copy_(x[:, :]),
    "a constant mask": lambda self, x: x[:, torch.tensor([True, False] * 6)],
    "repeated by a constant": lambda self, x: x.repeat_interleave(torch.tensor([2] * 12), 1),
    "gamma": lambda self, x: torch.distributions.Gamma(F.softplus(x) + 1, 2.0).log_prob(
        torch.full_like(x, 0.3)
    ),
    "stft": lambda self, x: torch.stft(
        x, 4, hop_length=2, window=torch.hann_window(4), return_complex=True
    ).abs(),
    "instance norm": (
        lambda self, x: self.part(rows(x)),
        nn.InstanceNorm1d(3, affine=True, track_running_stats=True),
    ),
    "grouped_mm": grouped,
    "distributions": distributed,
    "index_add": lambda self, x: x.new_zeros(len(x), 4).index_add(
        1, torch.tensor([0, 1, 2, 3] * 3), x, alpha=2
    ),
}


def compared(given):
    f, part = given if isinstance(given, tuple) else (given, None)
    cw.torch.task(made(f, part), nn.CrossEntropyLoss(), train=ROWS)


@pytest.mark.parametrize("name", QUICK)
def test_an_operation_has_pytorchs_numbers(name):
    compared(QUICK[name])


@pytest.mark.slow
@pytest.mark.drawn(share=0.25)
@pytest.mark.parametrize("name", OPERATIONS)
def test_a_rarer_operation_has_pytorchs_numbers(name):
    compared(OPERATIONS[name])


@pytest.mark.parametrize("check", [True, False])
def test_a_write_into_a_plain_tensor_is_not_lost(check):
    def f(self, x):
        out = torch.zeros(x.shape)
        out[:, 0] = x[:, 0]
        return out + x

    with refused(cw.errors.RecipeError, "torch-not-traced") as caught:
        cw.torch.task(made(f), nn.CrossEntropyLoss(), train=ROWS, check=check)
    assert "device=x.device" in caught.value.facts["reason"]


def test_a_mapped_function_draws_only_if_all_examples_draw_the_same():
    def f(self, x):
        return torch.vmap(lambda row: row * torch.rand(12))(x)

    with refused(cw.errors.RecipeError, "torch-not-traced") as caught:
        cw.torch.task(made(f), nn.CrossEntropyLoss(), train=ROWS, check=False)
    assert "randomness='same'" in caught.value.facts["reason"]


INSTEAD = "x * (m / n.detach().clamp(min=m))"


@pytest.mark.parametrize(
    ("part", "named"),
    [(nn.Embedding(4, 3, max_norm=1.0), INSTEAD), (nn.EmbeddingBag(4, 3, max_norm=1.0), "max_norm")],
)
def test_what_is_refused_in_a_layer_of_pytorch_is_named_with_the_layer(part, named):
    class Whole(nn.Module):
        def forward(self, x):
            return (x > 0).long()

    net = nn.Sequential(Whole(), part)
    with refused(cw.errors.RecipeError, "torch-not-traced") as caught:
        cw.torch.task(net, lambda out, y: out.flatten(1).sum(1), train=ROWS)
    facts = caught.value.facts
    assert facts["where"] == f"layer '1', {type(part).__name__}" and named in facts["reason"]


def test_what_is_typed_instead_of_max_norm_is_equal():
    part = nn.Embedding(4, 3, max_norm=0.5)
    x = part.weight.detach().clone()
    names = {"x": x, "m": 0.5, "n": x.norm(dim=-1, keepdim=True)}
    assert torch.allclose(eval(INSTEAD, names), part(torch.arange(4)))


def test_a_line_of_a_library_is_named_with_the_layer(tmp_path):
    file = tmp_path / "site-packages" / "foreign" / "layers.py"
    file.parent.mkdir(parents=True)
    lost = "def lost(out, y): return halved(out).sum(1)\n"
    file.write_text("def halved(x):\n    return x / 2 if x.sum() > 0 else x\n" + lost)
    names = {}
    exec(compile(file.read_text(), file, "exec"), names)

    class Foreign(nn.Module):
        forward = staticmethod(names["halved"])

    with refused(cw.errors.RecipeError, "torch-depends-on-values") as caught:
        cw.torch.task(nn.Sequential(nn.Linear(12, 3), Foreign()), nn.CrossEntropyLoss(), train=ROWS)
    assert caught.value.facts["where"] == "layer '1', Foreign at layers.py:2"
    with refused(cw.errors.RecipeError, "torch-depends-on-values", where="layers.py:2"):
        cw.torch.task(Foreign(), nn.CrossEntropyLoss(), train=ROWS, check=False)  # of no layer
    with refused(cw.errors.RecipeError, "torch-depends-on-values", where="layers.py:2"):
        cw.torch.task(nn.Linear(12, 3), names["lost"], train=ROWS)
