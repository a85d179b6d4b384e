"""The transformers of the published rows: BERT, ViT, Mixer, and the GPT family layer by layer.

BERT, ViT and Mixer are whole losses, `loss(w, *inputs)`, with a loop over stacked blocks. A GPT is given
as the programs that a step repeats: one layer, forwards and backwards, and the head (embedding, logits,
loss), each on one device's part. That is how large sharded models can be timed on one device, where they
would not fit: step time = layers x layer + head.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from functools import cached_property, partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from .flash import flash_attention, kernel_flops, stand_in
from .programs import Program, Reader, Spec, cross_entropy, shapes

WIDE = jnp.float32


def linear(w, x, c_out, *, bias=True):
    y = lax.dot_general(x, w(x.shape[-1], c_out), (((x.ndim - 1,), (0,)), ((), ())))
    return y + w(*(1,) * (x.ndim - 1), c_out) if bias else y


def layer_norm(w, x, *, bias=True):
    y, shape = x.astype(WIDE), (1,) * (x.ndim - 1) + (-1,)
    y = y - jnp.mean(y, -1, keepdims=True)
    y = y * lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + 1e-6) * w.wide(x.shape[-1]).reshape(shape)
    return (y + w.wide(x.shape[-1]).reshape(shape) if bias else y).astype(x.dtype)


def rms_norm(w, x):
    y, shape = x.astype(WIDE), (1,) * (x.ndim - 1) + (-1,)
    y = y * lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + 1e-6)
    return (y * w.wide(x.shape[-1]).reshape(shape)).astype(x.dtype)


def plain_attention(q, k, v):
    """Softmax attention that keeps its `length x length` weights: `(batch, length, heads, size)` each."""
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k).astype(WIDE) * (q.shape[-1] ** -0.5)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores, -1).astype(v.dtype), v)


def causal_attention(q, k, v):
    """The same without looking ahead; `k` and `v` may have fewer heads, each shared by as many of `q`'s."""
    shared = q.shape[2] // k.shape[2]
    if shared > 1:
        k, v = jnp.repeat(k, shared, axis=2), jnp.repeat(v, shared, axis=2)
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k).astype(WIDE) * (q.shape[-1] ** -0.5)
    seen = jnp.tril(jnp.ones((q.shape[1], q.shape[1]), bool))
    weights = jax.nn.softmax(jnp.where(seen[None, None], scores, -1e30), -1).astype(v.dtype)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v)


def stacked(block, x, depth):
    """`(shapes of the blocks' parameters, run)`: `depth` blocks in a loop over stacked parameters."""
    spec = Spec(x.shape, x.dtype)
    one = shapes(block, [spec], x.dtype)

    def run(w, x):
        params = [w.wide(depth, *shape) for shape in one]

        def body(x, layer):
            return block(Reader(x.dtype, layer), x), None

        return lax.scan(body, x, params)[0]

    return run


def encoder_block(heads, hidden, *, after=False):
    """A block of ViT, or with the norms `after` the sums one of BERT."""

    def attend(w, x):
        b, t, d = x.shape
        q, k, v = (linear(w, x, d).reshape(b, t, heads, d // heads) for _ in range(3))
        return linear(w, plain_attention(q, k, v).reshape(b, t, d), d)

    def feed(w, x):
        return linear(w, jax.nn.gelu(linear(w, x, hidden), approximate=False), x.shape[-1])

    def block(w, x):
        if after:
            x = layer_norm(w, x + attend(w, x))
            return layer_norm(w, x + feed(w, x))
        x = x + attend(w, layer_norm(w, x))
        return x + feed(w, layer_norm(w, x))

    return block


def patches(w, x, size, width):
    b, h, v, c = x.shape
    x = x.reshape(b, h // size, size, v // size, size, c).transpose(0, 1, 3, 2, 4, 5)
    return linear(w, x.reshape(b, h // size * (v // size), size * size * c), width)


def vit(w, x, *, width=384, depth=12, heads=6, size=16, classes=1000):
    """ViT-S/16 with a class token, as timm's `vit_small_patch16_224`."""
    x = patches(w, x, size, width)
    token = jnp.broadcast_to(w(1, 1, width), (x.shape[0], 1, width))
    x = jnp.concatenate([token, x], 1) + w(1, x.shape[1] + 1, width)
    x = stacked(encoder_block(heads, 4 * width), x, depth)(w, x)
    return linear(w, layer_norm(w, x)[:, 0], classes)


def mixer(w, x, *, width=768, depth=12, size=16, classes=1000):
    """Mixer-B/16 (arXiv:2105.01601) as timm's `mixer_b16_224`."""
    x = patches(w, x, size, width)

    def block(w, x):
        y = layer_norm(w, x).transpose(0, 2, 1)
        y = linear(w, jax.nn.gelu(linear(w, y, width // 2), approximate=False), x.shape[1])
        x = x + y.transpose(0, 2, 1)
        y = jax.nn.gelu(linear(w, layer_norm(w, x), 4 * width), approximate=False)
        return x + linear(w, y, width)

    x = layer_norm(w, stacked(block, x, depth)(w, x))
    return linear(w, jnp.mean(x.astype(WIDE), 1).astype(x.dtype), classes)


def bert(w, tokens, segments, places, words, following, *, width=1024, depth=24, heads=16, vocab=30528):
    """BERT-Large's pretraining loss: masked words at `places` `(batch, masked)`, and the next sentence.

    Dropout is left out: where it runs fused with its neighbours it moves no further bytes.
    """
    table, position, segment = w(vocab, width), w(512, width), w(2, width)
    x = jnp.take(table, tokens, axis=0) + position[None, : tokens.shape[1]]
    x = layer_norm(w, x + jnp.take(segment, segments, axis=0))
    x = stacked(encoder_block(heads, 4 * width, after=True), x, depth)(w, x)
    pooled = jnp.tanh(linear(w, x[:, 0], width))
    masked = jnp.take_along_axis(x, places[:, :, None], axis=1)
    masked = layer_norm(w, jax.nn.gelu(linear(w, masked, width), approximate=False))
    logits = lax.dot_general(masked, table, (((2,), (1,)), ((), ()))) + w(1, 1, vocab)
    return cross_entropy(logits, words) + cross_entropy(linear(w, pooled, 2), following)


@dataclass(frozen=True)
class GPT:
    """A decoder. Sizes are of the whole model; `tensor` devices split each layer's heads and hidden units."""

    layers: int
    width: int
    heads: int
    hidden: int
    vocab: int
    length: int
    kv_heads: int = 0  # 0: as many as heads
    size: int = 0  # of a head; 0: width / heads
    kind: str = (
        "gpt2"  # "gpt2": GELU, biases, layer norm, learned positions; "llama": SwiGLU, RMS norm, rotary
    )
    tied: bool = False  # logits by the embedding's own table
    remat: str = "none"  # what is computed again backwards; see `POLICIES`
    tensor: int = 1
    tpu: bool = False  # the embedding as a product with one-hot rows
    attention: str = "plain"  # or a stand-in for a TPU's kernel: see `flash`

    @property
    def key_heads(self) -> int:
        return self.kv_heads or self.heads

    @property
    def head_size(self) -> int:
        return self.size or self.width // self.heads

    @cached_property
    def layer_parameters(self) -> int:
        whole = dataclasses.replace(self, tensor=1)
        return sum(math.prod(s) for s in shapes(whole.layer, [self._spec(1)], jnp.bfloat16))

    @property
    def parameters(self) -> int:
        """All of them, with embedding, positions, last norm and logits."""
        norm = 2 if self.kind == "gpt2" else 1
        outside = self.width * (self.vocab * (1 if self.tied else 2) + norm)
        positions = self.length * self.width if self.kind == "gpt2" else 0
        return self.layers * self.layer_parameters + outside + positions

    def training_flops_per_token(self, *, causal: bool) -> float:
        """What MaxText divides by its step time (src/maxtext/utils/maxtext_utils.py): three times the forward
        products, logits included, the attention whole until July 2025 and halved as `causal` since."""
        inner = self.head_size * (2 * self.heads + 2 * self.key_heads)
        matrices = 2 if self.kind in ("gpt2", "plain") else 3
        products = 2 * self.width * (inner + matrices * self.hidden)
        attention = 4 * self.length * self.heads * self.head_size * (0.5 if causal else 1.0)
        return 3 * (self.layers * (products + attention) + 2 * self.width * self.vocab)

    def _spec(self, batch: int, dtype=jnp.bfloat16) -> Spec:
        return Spec((batch, self.length, self.width), dtype)

    def layer(self, w, x):
        """One layer on one device: `(batch, length, width)` -> the same; a share of the sum if split."""
        heads, kv = self.heads // self.tensor, max(1, self.key_heads // self.tensor)
        b, t, _ = x.shape
        gpt2, size = self.kind == "gpt2", self.head_size
        norm = layer_norm if gpt2 else rms_norm
        project = partial(linear, bias=gpt2)
        y = norm(w, x)
        q = checkpoint_name(project(w, y, heads * size), "q")
        k = checkpoint_name(project(w, y, kv * size), "k")
        v = checkpoint_name(project(w, y, kv * size), "v")
        q, k, v = (z.reshape(b, t, -1, size) for z in (q, k, v))
        if not gpt2:
            q, k = rotary(q), rotary(k)
        attend = {"plain": jax.checkpoint(causal_attention), "blocks": flash_attention, "kernel": stand_in}[
            self.attention
        ]
        y = checkpoint_name(attend(q, k, v), "attention").reshape(b, t, heads * size)
        x = x + checkpoint_name(project(w, y, self.width), "out")
        y, hidden = norm(w, x), self.hidden // self.tensor
        up = checkpoint_name(project(w, y, hidden), "up")
        if gpt2:
            up = jax.nn.gelu(up, approximate=True)
        elif self.kind == "plain":
            up = jax.nn.relu(up)
        else:
            up = jax.nn.silu(up) * checkpoint_name(project(w, y, hidden), "gate")
        return x + checkpoint_name(project(w, up, self.width), "down")

    def layer_program(self, batch: int, dtype=jnp.bfloat16) -> Program:
        """One layer forwards and backwards, in `dtype` throughout as a gathered copy of the weights is."""
        x = self._spec(batch * self.tensor, dtype)
        params = [Spec(s, dtype if len(s) > 1 else WIDE) for s in shapes(self.layer, [x], dtype)]

        def forward(params, x):
            return self.layer(Reader(dtype, params), x)

        if self.remat != "none":
            forward = jax.checkpoint(forward, policy=POLICIES[self.remat])

        def both(params, x, error):
            y, back = jax.vjp(forward, params, x)
            return y, back(error)

        return both, (params, x, x)

    def kernel_flops(self, batch: int) -> float:
        """Of the attention of one layer on one device, both ways, where a stand-in leaves it out."""
        if self.attention != "kernel":
            return 0.0
        forwards = 1 if self.remat in ("none", "flash", "qkva", "alternate") else 2
        heads = self.heads // self.tensor
        return batch * self.tensor * kernel_flops(heads, self.length, self.head_size, forwards)

    def head_program(self, batch: int, dtype=jnp.bfloat16) -> Program:
        """Embedding, last norm, logits and loss, with their gradients; `chunk` tokens of logits at a time,
        so that they take at most 2 GB."""
        rows, tokens = self.vocab // self.tensor, batch * self.tensor * self.length
        chunk = tokens
        while chunk * rows * 4 > 2e9 and chunk % 2 == 0:
            chunk //= 2
        table = Spec((rows, self.width), dtype)
        ids, scale = Spec((tokens,), jnp.int32), Spec((self.width,), WIDE)

        def loss(table, scale, x, labels):
            y = rms_norm(_Given(scale), x)
            logits = lax.dot_general(y, table, (((1,), (1,)), ((), ())))
            return cross_entropy(logits, labels)

        def head(embedding, table, scale, ids, x, labels, error):
            embed = partial(_iota_embed if self.tpu else _embed, ids, chunk)
            start, back = jax.vjp(embed, embedding)
            cut = [z.reshape(tokens // chunk, chunk, *z.shape[1:]) for z in (x, labels)]

            def body(sums, piece):
                value, gradient = jax.value_and_grad(loss, (0, 1, 2))(table, scale, *piece)
                sums = [s + g for s, g in zip(sums, (value, *gradient[:2]), strict=True)]
                return sums, gradient[2]

            zero = [jnp.zeros((), WIDE), jnp.zeros(table.shape, dtype), jnp.zeros(scale.shape, WIDE)]
            if chunk == tokens:
                sums, dx = body(zero, (x, labels))
            else:
                sums, dx = lax.scan(body, zero, tuple(cut))
            return start, sums, dx, back(error)

        x = Spec((tokens, self.width), dtype)
        return head, (table, table, scale, ids, x, ids, x)


class _Given:
    """A `w` that serves one array."""

    def __init__(self, array):
        self.array = array

    def wide(self, *shape):
        return self.array


def _embed(ids, chunk, table):
    return jnp.take(table, ids, axis=0)


def _iota_embed(ids, chunk, table):
    def rows(ids):
        return lax.dot_general(
            jax.nn.one_hot(ids, table.shape[0], dtype=table.dtype), table, (((1,), (0,)), ((), ()))
        )

    if ids.shape[0] == chunk:
        return rows(ids)
    return lax.map(rows, ids.reshape(-1, chunk)).reshape(-1, table.shape[1])


def rotary(x):
    """Rotary positions for `(batch, length, heads, size)`."""
    half = x.shape[-1] // 2
    turn = jnp.arange(x.shape[1], dtype=WIDE)[:, None] * 1e-4 ** (jnp.arange(half, dtype=WIDE)[None] / half)
    cos, sin = jnp.cos(turn)[None, :, None], jnp.sin(turn)[None, :, None]
    a, b = x[..., :half].astype(WIDE), x[..., half:].astype(WIDE)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)


_names = jax.checkpoint_policies.save_only_these_names
POLICIES = {
    "full": jax.checkpoint_policies.nothing_saveable,
    "qkv": _names("q", "k", "v"),
    "qkvo": _names("q", "k", "v", "out"),
    "qkva": _names("q", "k", "v", "attention"),
    "kv": _names("k", "v"),
    "dots": _names("q", "k", "v", "out", "up", "gate", "down"),
    "flash": _names("q", "k", "v", "attention", "out", "up", "gate", "down"),
    "alternate": _names("q", "v", "attention", "up", "down"),
}
"""What is kept from the forward pass; the rest is computed again. `"dots"` is MaxText's `minimal`, `"flash"`
its `minimal_flash`, `"qkv"` its `qkv_proj_offloaded`, `"alternate"` torchtitan's selective checkpointing,
which keeps every second product."""
