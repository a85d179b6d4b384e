"""PyTorch's own idioms: small modules, each with one thing that people write.

A function returns a module of `(x)`, images `(b, 3, 16, 16)`, rows `(b, 12, 16)` or tokens `(b, 12)`, to
logits of 10 classes. `IMAGES`, `ROWS` and `TOKENS` have them by name.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

Maker = Callable[[], nn.Module]
IMAGES: dict[str, Maker] = {}
ROWS: dict[str, Maker] = {}
TOKENS: dict[str, Maker] = {}


def of(kind: dict[str, Maker]) -> Callable[[Maker], Maker]:
    def added(make: Maker) -> Maker:
        kind[make.__name__] = make
        return make

    return added


class Called(nn.Module):
    """A module of parts and a function of `(self, x)`."""

    def __init__(self, forward: Callable[[Any, Any], Any], **parts: nn.Module):
        super().__init__()
        self._forward = forward
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, x: Any) -> Any:
        return self._forward(self, x)


def pooled(*parts: nn.Module, width: int = 16) -> nn.Sequential:
    """`parts` of images, then a mean over their places and a layer of 10 classes."""
    return nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10))


def over_rows(forward: Callable[[Any, Any], Any], width: int = 16, **parts: nn.Module) -> nn.Module:
    """`parts` of rows `(b, 12, 16)`, whose mean goes into a layer of 10 classes."""
    return Called(lambda self, x: self.head(forward(self, x).mean(1)), head=nn.Linear(width, 10), **parts)


# Convolutions and norms


@of(IMAGES)
def batch_norm() -> nn.Module:
    return pooled(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU())


@of(IMAGES)
def batch_norm_cumulative() -> nn.Module:
    return pooled(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16, momentum=None), nn.ReLU())


@of(IMAGES)
def batch_norm_without_statistics() -> nn.Module:
    return pooled(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16, track_running_stats=False), nn.ReLU())


@of(IMAGES)
def instance_norm_with_statistics() -> nn.Module:
    return pooled(
        nn.Conv2d(3, 16, 3), nn.InstanceNorm2d(16, affine=True, track_running_stats=True), nn.SiLU()
    )


@of(IMAGES)
def group_norm() -> nn.Module:
    return pooled(nn.Conv2d(3, 16, 3, padding="same"), nn.GroupNorm(4, 16), nn.GELU())


@of(IMAGES)
def local_response_norm() -> nn.Module:
    return pooled(nn.Conv2d(3, 16, 3), nn.LocalResponseNorm(5), nn.ReLU(inplace=True))


@of(IMAGES)
def weight_norm_old() -> nn.Module:
    return pooled(torch.nn.utils.weight_norm(nn.Conv2d(3, 16, 3)), nn.Tanh())


@of(IMAGES)
def weight_norm_parametrized() -> nn.Module:
    return pooled(torch.nn.utils.parametrizations.weight_norm(nn.Conv2d(3, 16, 3)), nn.Tanh())


@of(IMAGES)
def spectral_norm_old() -> nn.Module:
    return pooled(torch.nn.utils.spectral_norm(nn.Conv2d(3, 16, 3)), nn.ReLU())


@of(IMAGES)
def spectral_norm_parametrized() -> nn.Module:
    return pooled(torch.nn.utils.parametrizations.spectral_norm(nn.Conv2d(3, 16, 3)), nn.ReLU())


@of(ROWS)
def orthogonal_parametrized() -> nn.Module:
    line = torch.nn.utils.parametrizations.orthogonal(nn.Linear(16, 16))
    return over_rows(lambda self, x: torch.tanh(self.line(x)), line=line)


@of(IMAGES)
def pruned() -> nn.Module:
    from torch.nn.utils import prune

    conv = prune.l1_unstructured(nn.Conv2d(3, 16, 3), "weight", amount=0.5)
    return pooled(conv, nn.ReLU())


@of(IMAGES)
def depthwise_and_dilated() -> nn.Module:
    return pooled(nn.Conv2d(3, 16, 3), nn.Conv2d(16, 16, 3, groups=16, dilation=2), nn.Hardswish())


@of(IMAGES)
def transposed_convolution() -> nn.Module:
    return pooled(nn.Conv2d(3, 8, 3, 2), nn.ConvTranspose2d(8, 16, 4, 2, 1, output_padding=1), nn.ELU())


@of(IMAGES)
def max_pool_with_indices() -> nn.Module:
    def forward(self: Any, x: Any) -> Any:
        small, places = F.max_pool2d(self.conv(x), 2, return_indices=True)
        return self.rest(F.max_unpool2d(small, places, 2))

    return Called(forward, conv=nn.Conv2d(3, 16, 3, padding=1), rest=pooled(nn.ReLU()))


@of(IMAGES)
def adaptive_max_pool() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 16, 3), nn.AdaptiveMaxPool2d(2), nn.Flatten(), nn.Linear(64, 10))


@of(IMAGES)
def unfold_and_fold() -> nn.Module:
    def forward(self: Any, x: Any) -> Any:
        columns = F.unfold(x, 4, stride=4)
        return self.rest(F.fold(self.mixed(columns.mT).mT, (16, 16), 4, padding=0, stride=4))

    return Called(forward, mixed=nn.Linear(48, 48), rest=pooled(nn.Conv2d(3, 16, 3), nn.ReLU()))


@of(IMAGES)
def upsampled() -> nn.Module:
    return pooled(
        nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True), nn.Conv2d(3, 16, 3), nn.PReLU()
    )


@of(IMAGES)
def grid_sampled() -> nn.Module:
    def forward(self: Any, x: Any) -> Any:
        turn = self.turn(x.mean((2, 3))).view(-1, 2, 3)
        return self.rest(F.grid_sample(x, F.affine_grid(turn, x.shape, False), align_corners=False))

    return Called(forward, turn=nn.Linear(3, 6), rest=pooled(nn.Conv2d(3, 16, 3), nn.ReLU()))


@of(IMAGES)
def pixel_shuffled() -> nn.Module:
    return pooled(nn.Conv2d(3, 64, 3, padding=1), nn.PixelShuffle(2), nn.Mish())


@of(IMAGES)
def sizes_read() -> nn.Module:
    def forward(self: Any, x: Any) -> Any:
        b, c, h, w = x.shape
        patches = x.reshape(b, c, h // 4, 4, w // 4, 4).permute(0, 2, 4, 1, 3, 5).reshape(b, -1, c * 16)
        return self.head(self.mixed(patches).view(x.size(0), -1))

    return Called(forward, mixed=nn.Linear(48, 8), head=nn.Linear(128, 10))


# Random layers


@of(ROWS)
def dropout_layers() -> nn.Module:
    return over_rows(lambda self, x: self.drop(self.line(x)), line=nn.Linear(16, 16), drop=nn.Dropout(0.3))


@of(ROWS)
def dropout_functional() -> nn.Module:
    return over_rows(
        lambda self, x: F.dropout(self.line(x), 0.3, training=self.training), line=nn.Linear(16, 16)
    )


@of(IMAGES)
def dropout_of_channels() -> nn.Module:
    return pooled(nn.Conv2d(3, 16, 3), nn.Dropout2d(0.2), nn.AlphaDropout(0.1), nn.SELU())


@of(ROWS)
def drop_path() -> nn.Module:
    def forward(self: Any, x: Any) -> Any:
        branch = torch.relu(self.line(x))
        if self.training:
            kept = x.new_empty((x.shape[0], 1, 1)).bernoulli_(0.8)
            branch = branch * kept / 0.8
        return x + branch

    return over_rows(forward, line=nn.Linear(16, 16))


@of(ROWS)
def layer_drop() -> nn.Module:
    def forward(self: Any, x: Any) -> Any:
        for layer in self.layers:
            if self.training and torch.rand([]) < 0.2:
                continue
            x = x + layer(x)
        return x

    return over_rows(forward, layers=nn.ModuleList([nn.Linear(16, 16) for _ in range(3)]))


@of(ROWS)
def layer_drop_by_numpy() -> nn.Module:
    def forward(self: Any, x: Any) -> Any:
        for layer in self.layers:
            if not self.training or np.random.uniform() > 0.2:
                x = x + layer(x)
        return x

    return over_rows(forward, layers=nn.ModuleList([nn.Linear(16, 16) for _ in range(3)]))


@of(ROWS)
def layer_drop_by_python() -> nn.Module:
    def forward(self: Any, x: Any) -> Any:
        for layer in self.layers:
            if not self.training or random.random() > 0.2:
                x = x + layer(x)
        return x

    return over_rows(forward, layers=nn.ModuleList([nn.Linear(16, 16) for _ in range(3)]))


@of(ROWS)
def noise_added() -> nn.Module:
    def forward(self: Any, x: Any) -> Any:
        return self.line(x + 0.1 * torch.randn_like(x) if self.training else x)

    return over_rows(forward, line=nn.Linear(16, 16))


@of(ROWS)
def noise_of_a_shape() -> nn.Module:
    def forward(self: Any, x: Any) -> Any:
        return self.line(x + 0.1 * torch.randn(x.shape) if self.training else x)

    return over_rows(forward, line=nn.Linear(16, 16))


@of(ROWS)
def gumbel_softmax() -> nn.Module:
    def forward(self: Any, x: Any) -> Any:
        x = self.line(x)
        return F.gumbel_softmax(x, tau=1.0) if self.training else x.softmax(-1)

    return over_rows(forward, line=nn.Linear(16, 16))


@of(ROWS)
def rrelu() -> nn.Module:
    return over_rows(lambda self, x: self.act(self.line(x)), line=nn.Linear(16, 16), act=nn.RReLU())


@of(ROWS)
def variational() -> nn.Module:
    def forward(self: Any, x: Any) -> Any:
        mean, spread = self.both(x).chunk(2, -1)
        drawn = torch.distributions.Normal(mean, spread.exp())
        return drawn.rsample() if self.training else drawn.mean

    return over_rows(forward, both=nn.Linear(16, 32))


# Sequences


@of(ROWS)
def transformer() -> nn.Module:
    net = nn.Transformer(16, 2, 1, 1, 32, batch_first=True)
    return over_rows(lambda self, x: self.net(x, x[:, :6]), net=net)


@of(ROWS)
def transformer_encoder_with_masks() -> nn.Module:
    net = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2)

    def forward(self: Any, x: Any) -> Any:
        causal = nn.Transformer.generate_square_subsequent_mask(12)
        return self.net(x, mask=causal, is_causal=True)

    return over_rows(forward, net=net)


@of(ROWS)
def attention_with_masks() -> nn.Module:
    def forward(self: Any, x: Any) -> Any:
        padded = torch.arange(12, device=x.device).expand(x.shape[0], 12) >= 9
        causal = torch.triu(torch.ones(12, 12, dtype=torch.bool, device=x.device), 1)
        return self.attend(x, x, x, key_padding_mask=padded, attn_mask=causal, need_weights=False)[0]

    return over_rows(forward, attend=nn.MultiheadAttention(16, 2, dropout=0.1, batch_first=True))


@of(ROWS)
def scaled_dot_product_attention() -> nn.Module:
    def forward(self: Any, x: Any) -> Any:
        q, k, v = self.qkv(x).view(x.size(0), 12, 3, 2, 8).permute(2, 0, 3, 1, 4).unbind(0)
        drop = 0.1 if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=drop, is_causal=True)
        return mixed.transpose(1, 2).flatten(2)

    return over_rows(forward, qkv=nn.Linear(16, 48))


@of(ROWS)
def attention_with_a_row_masked_whole() -> nn.Module:
    def forward(self: Any, x: Any) -> Any:
        seen = torch.ones(12, 12, dtype=torch.bool, device=x.device).tril(-1)
        q, k, v = self.qkv(x).chunk(3, -1)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen)

    return over_rows(forward, qkv=nn.Linear(16, 48))


@of(ROWS)
def lstm() -> nn.Module:
    net = nn.LSTM(16, 8, num_layers=2, dropout=0.2, bidirectional=True, batch_first=True)
    return over_rows(lambda self, x: self.net(x)[0], net=net)


@of(ROWS)
def gru() -> nn.Module:
    return over_rows(lambda self, x: self.net(x)[0], net=nn.GRU(16, 16, batch_first=True))


@of(ROWS)
def lstm_cell() -> nn.Module:
    def forward(self: Any, x: Any) -> Any:
        hidden = cell = x.new_zeros(x.size(0), 16)
        seen = []
        for row in x.unbind(1):
            hidden, cell = self.cell(row, (hidden, cell))
            seen.append(hidden)
        return torch.stack(seen, 1)

    return over_rows(forward, cell=nn.LSTMCell(16, 16))


@of(ROWS)
def packed_sequence() -> nn.Module:
    def forward(self: Any, x: Any) -> Any:
        lengths = [12] * x.size(0)
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return nn.utils.rnn.pad_packed_sequence(self.net(packed)[0], batch_first=True)[0]

    return over_rows(forward, net=nn.GRU(16, 16, batch_first=True))


@of(ROWS)
def convolutions_of_sequences() -> nn.Module:
    net = nn.Sequential(nn.Conv1d(16, 16, 3, padding=1), nn.GLU(1), nn.MaxPool1d(2))
    return over_rows(lambda self, x: self.net(x.mT).mT, width=8, net=net)


@of(ROWS)
def spectrum() -> nn.Module:
    def forward(self: Any, x: Any) -> Any:
        return self.line(torch.fft.rfft(x, dim=1).abs())

    return over_rows(forward, line=nn.Linear(16, 16))


@of(ROWS)
def short_time_spectrum() -> nn.Module:
    def forward(self: Any, x: Any) -> Any:
        window = torch.hann_window(32, device=x.device)
        heard = torch.stft(x.flatten(1), 32, 16, window=window, return_complex=True)
        return self.line(heard.abs().mT)

    return over_rows(forward, line=nn.Linear(17, 16))


# Tokens


@of(TOKENS)
def embedding_with_padding() -> nn.Module:
    return Called(
        lambda self, x: self.head(self.table(x).mean(1)),
        table=nn.Embedding(99, 16, padding_idx=0), head=nn.Linear(16, 10),
    )  # fmt: skip


@of(TOKENS)
def embedding_bag() -> nn.Module:
    return nn.Sequential(nn.EmbeddingBag(99, 16, mode="mean"), nn.Linear(16, 10))


@of(TOKENS)
def embedding_max_norm() -> nn.Module:
    return Called(
        lambda self, x: self.head(self.table(x).mean(1)),
        table=nn.Embedding(99, 16, max_norm=1.0), head=nn.Linear(16, 10),
    )  # fmt: skip


@of(TOKENS)
def tied_weights() -> nn.Module:
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(10, 16)
            self.head = nn.Linear(16, 10, bias=False)
            self.head.weight = self.table.weight

        def forward(self, x):
            return self.head(torch.tanh(self.table(x % 10)).mean(1))

    return Tied()


@of(TOKENS)
def one_hot_and_scatter() -> nn.Module:
    def forward(self: Any, x: Any) -> Any:
        counts = torch.zeros(x.size(0), 99, device=x.device).scatter_add_(1, x, torch.ones_like(x).float())
        return self.head(counts + F.one_hot(x, 99).float().mean(1))

    return Called(forward, head=nn.Linear(99, 10))


# Ways to hold and to call


@of(ROWS)
def parameter_lists() -> nn.Module:
    class Lists(nn.Module):
        def __init__(self):
            super().__init__()
            self.scales = nn.ParameterList([torch.ones(16) for _ in range(3)])
            self.shifts = nn.ParameterDict({"a": torch.zeros(16), "b": torch.zeros(16)})
            self.parts = nn.ModuleDict({"head": nn.Linear(16, 10)})

        def forward(self, x):
            for scale in self.scales:
                x = torch.tanh(x * scale + self.shifts["a"]) - self.shifts["b"]
            return self.parts["head"](x.mean(1))

    return Lists()


@of(ROWS)
def tensors_in_dicts() -> nn.Module:
    class Held(nn.Module):
        def __init__(self):
            super().__init__()
            self.line = nn.Linear(16, 16)
            self.head = nn.Linear(16, 10)
            self.signs = {"rows": torch.linspace(-1, 1, 12)[:, None], "more": [torch.ones(16)]}

        def forward(self, x):
            return self.head((self.line(x) * self.signs["rows"] + self.signs["more"][0]).mean(1))

    return Held()


@of(ROWS)
def cache_kept_in_an_attribute() -> nn.Module:
    class Cached(nn.Module):
        def __init__(self):
            super().__init__()
            self.line = nn.Linear(16, 10)
            self.angles = None

        def forward(self, x):
            if self.angles is None or self.angles.shape[0] != x.shape[1]:
                self.angles = torch.arange(x.shape[1], device=x.device)[:, None] / 10
            return self.line((x * torch.cos(self.angles)).mean(1))

    return Cached()


@of(ROWS)
def buffer_that_counts() -> nn.Module:
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.line = nn.Linear(16, 10)
            self.register_buffer("mean", torch.zeros(16))

        def forward(self, x):
            if self.training:
                with torch.no_grad():
                    self.mean.mul_(0.9).add_(x.mean((0, 1)), alpha=0.1)
            return self.line((x - self.mean).mean(1))

    return Counting()


@of(ROWS)
def frozen_parameters() -> nn.Module:
    net = over_rows(lambda self, x: torch.relu(self.line(x)), line=nn.Linear(16, 16))
    return net.requires_grad_(False) and freed(net)


def freed(net: nn.Module) -> nn.Module:
    net.head.requires_grad_(True)
    return net


@of(ROWS)
def checkpointed() -> nn.Module:
    line = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 16))
    return over_rows(lambda self, x: checkpoint(self.line, x, use_reentrant=False), line=line)


@of(IMAGES)
def checkpointed_batch_norm() -> nn.Module:
    first = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU())
    return Called(
        lambda self, x: self.rest(checkpoint(self.first, x, use_reentrant=False)),
        first=first, rest=pooled(),
    )  # fmt: skip


@of(ROWS)
def einsum() -> nn.Module:
    def forward(self: Any, x: Any) -> Any:
        q, k = self.q(x), self.k(x)
        weights = torch.softmax(torch.einsum("bid,bjd->bij", q, k), -1)
        return torch.einsum("bij,bjd->bid", weights, x)

    return over_rows(forward, q=nn.Linear(16, 16), k=nn.Linear(16, 16))


@of(ROWS)
def bilinear() -> nn.Module:
    return over_rows(lambda self, x: self.both(x, x.flip(1).contiguous()), both=nn.Bilinear(16, 16, 16))


@of(ROWS)
def writes_in_place() -> nn.Module:
    def forward(self: Any, x: Any) -> Any:
        out = self.line(x).clone()
        out[:, ::2] += 1.0
        out[:, 0, :4] = 0.0
        out.masked_fill_(out > 2.0, 2.0)
        return out

    return over_rows(forward, line=nn.Linear(16, 16))


@of(ROWS)
def chosen_by_topk() -> nn.Module:
    def forward(self: Any, x: Any) -> Any:
        weight, which = self.gate(x).softmax(-1).topk(2, -1)
        every = torch.stack([expert(x) for expert in self.experts], 2)
        chosen = torch.gather(every, 2, which[..., None].expand(-1, -1, -1, 16))
        return (chosen * weight[..., None]).sum(2)

    experts = nn.ModuleList([nn.Linear(16, 16) for _ in range(4)])
    return over_rows(forward, gate=nn.Linear(16, 4), experts=experts)


@of(ROWS)
def experts_by_where() -> nn.Module:
    def forward(self: Any, x: Any) -> Any:
        rows = x.reshape(-1, 16)
        which = self.gate(rows).argmax(-1)
        out = torch.zeros_like(rows)
        for i, expert in enumerate(self.experts):
            mine = torch.where(which == i)[0]
            out[mine] = expert(rows[mine])
        return out.view(x.shape)

    experts = nn.ModuleList([nn.Linear(16, 16) for _ in range(4)])
    return over_rows(forward, gate=nn.Linear(16, 4), experts=experts)


@of(ROWS)
def gradient_reversed() -> nn.Module:
    class Reversed(torch.autograd.Function):
        @staticmethod
        def forward(context, x):
            return x.view_as(x)

        @staticmethod
        def backward(context, slope):
            return -slope

    return over_rows(lambda self, x: Reversed.apply(self.line(x)), line=nn.Linear(16, 16))


@of(ROWS)
def straight_through() -> nn.Module:
    def forward(self: Any, x: Any) -> Any:
        x = self.line(x)
        return x + (torch.sign(x) - x).detach()

    return over_rows(forward, line=nn.Linear(16, 16))


@of(ROWS)
def mapped_by_vmap() -> nn.Module:
    return over_rows(lambda self, x: torch.vmap(self.line)(x), line=nn.Linear(16, 16))


@of(ROWS)
def scripted() -> nn.Module:
    return over_rows(lambda self, x: _scaled(self.line(x), 2.0), line=nn.Linear(16, 16))


@torch.jit.script
def _scaled(x: torch.Tensor, by: float) -> torch.Tensor:
    return torch.tanh(x) * by


@of(ROWS)
def several_outputs() -> nn.Module:
    class Several(nn.Module):
        def __init__(self):
            super().__init__()
            self.line = nn.Linear(16, 16)
            self.head = nn.Linear(16, 10)

        def forward(self, x):
            hidden = torch.relu(self.line(x))
            return {"logits": self.head(hidden.mean(1)), "hidden": hidden}

    return Several()


@of(ROWS)
def forward_hooks() -> nn.Module:
    net = over_rows(lambda self, x: self.line(x), line=nn.Linear(16, 16))
    net.line.register_forward_hook(lambda part, given, output: output * 0.5)
    return net


@of(ROWS)
def made_in_half_precision() -> nn.Module:
    return over_rows(lambda self, x: torch.relu(self.line(x)), line=nn.Linear(16, 16)).bfloat16()


@of(ROWS)
def autocast() -> nn.Module:
    def forward(self: Any, x: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return self.line(x).float()

    return over_rows(forward, line=nn.Linear(16, 16))


@of(ROWS)
def lazily_sized() -> nn.Module:
    net = over_rows(lambda self, x: self.line(x), line=nn.LazyLinear(16))
    net(torch.zeros(1, 12, 16))
    return net


@of(ROWS)
def branches_on_values() -> nn.Module:
    def forward(self: Any, x: Any) -> Any:
        x = self.line(x)
        return x * 2 if x.mean() > 0 else x

    return over_rows(forward, line=nn.Linear(16, 16))


@of(ROWS)
def cumulative_and_sorted() -> nn.Module:
    def forward(self: Any, x: Any) -> Any:
        x = self.line(x)
        return x.cumsum(1).sort(-1).values + x.roll(1, 1) + torch.logcumsumexp(x, 1)

    return over_rows(forward, line=nn.Linear(16, 16))
