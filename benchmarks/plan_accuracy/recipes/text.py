"""Published language models besides GPT-2, as recipes: BERT, T5, GPT without fused attention.

    chipwise plan benchmarks/plan_accuracy/recipes/text.py:bert --set batch=8192 --set replicas=32 --on a100

BERT (Devlin et al. 2018, arXiv:1810.04805) is pretrained on masked words and the next sentence, T5 v1.1 on
spans (Raffel et al. 2020, arXiv:1910.10683; google-research/text-to-text-transfer-transformer). As in the
published programs, BERT and T5 have a kernel each for queries, keys and values, and hold attention's weights.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import chipwise as cw
from chipwise.data.synthetic import Absent
from chipwise.models.layer_norm import LayerNorm
from chipwise.models.tied import embed, tied_loss
from chipwise.models.transformer import GPT2, Attention, Blocks, Embedding, PreNormBlock, kernels

NORMAL = nnx.initializers.normal(0.02)
Z_LOSS = 1e-4


def _recipe(name, net, loss, columns, optimizer, classes=None):
    """*Arguments:* `columns`: name to shape, all whole numbers; `loss(apply, batch)`: name to a value an
    example."""
    init, apply = cw.nnx.functional(net)
    spec = {column: jax.ShapeDtypeStruct(shape, np.int32) for column, shape in columns.items()}

    def summed(params, state, batch, key, train):
        values = loss(lambda *inputs: apply(params, state, inputs, key, train)[0], batch)
        return {name: cw.Sum.of(value) for name, value in values.items()}, state

    return cw.Recipe(
        name=name, task=cw.Task(init=init, loss=summed, train=Absent(10_000_000, spec, name)), batch=256,
        replicas=1, duration="10000st", optimizer=optimizer, precision="bf16",
    )  # fmt: skip


def of_words(logits, words):
    """The mean cross-entropy of each example's words: (b, n, vocabulary) and (b, n) -> (b,)."""
    flat = logits.reshape(-1, logits.shape[-1]).astype(jnp.float32)
    return jnp.mean(cw.losses.softmax_cross_entropy(flat, words.reshape(-1)).reshape(words.shape), 1)


def bert(length=128, masked=0, size="large", optimizer="lamb", form="pytorch"):
    """Pretraining. *Arguments:* `length`: tokens; `masked`: of them to tell, 20 of 128 and 80 of 512 when 0;
    `size`: `base` or `large`; `optimizer`: `lamb` or `adamw`; `form`: one of `FORMS`."""
    masked = masked or (20 if length == 128 else 80)
    lr = cw.schedules.warmup(cw.schedules.cosine(1e-3), "10%")

    def loss(apply, batch):
        words, following = apply(batch["token"], batch["segment"], batch["place"])
        told = of_words(words, batch["word"])
        return {"loss": told + cw.losses.softmax_cross_entropy(following.astype(jnp.float32), batch["next"])}

    columns = {"token": (length,), "segment": (length,), "place": (masked,), "word": (masked,), "next": ()}
    # As in MLPerf: no decay and no ratio for biases and norms, and the gradient's norm is clipped
    lamb = cw.recipe.lamb(lr=lr, weight_decay=0.01, decay=kernels, clip=1.0)
    made = lamb if optimizer == "lamb" else cw.adamw(lr=lr)
    return _recipe(f"bert-{size}", lambda rngs: Bert(size, form, rngs), loss, columns, made)


def bert_classifier(length=128, size="base", form="apex"):
    """Fine-tuning: one of three labels for a pair of sentences."""

    def loss(apply, batch):
        _, logits = apply(batch["token"], batch["segment"], None)
        return {"loss": cw.losses.softmax_cross_entropy(logits.astype(jnp.float32), batch["label"])}

    columns = {"token": (length,), "segment": (length,), "label": ()}
    made = cw.adamw(lr=cw.schedules.cosine(2e-5))
    return _recipe(f"bert-{size}-3", lambda rngs: Bert(size, form, rngs, classes=3), loss, columns, made)


def gpt(context=2048, vocabulary=50_304, depth=12, width=768, heads=12):
    """GPT-2 whose attention holds its weights, as before fused kernels: XLA's products and softmax."""
    init, apply = cw.nnx.functional(
        lambda rngs: PlainGPT(
            vocabulary=vocabulary, context=context, depth=depth, width=width, heads=heads, rngs=rngs
        )
    )

    def loss(params, state, batch, key, train):
        text = batch["token"].astype(jnp.int32)
        states, state = apply(params, state, text[:, :-1], key, train)
        total = tied_loss(params["words"]["embedding"], states, text[:, 1:])
        return {"loss": cw.Sum(total, jnp.float32(text[:, 1:].size))}, state

    spec = {"token": jax.ShapeDtypeStruct((context + 1,), np.uint16)}
    return cw.Recipe(
        name="gpt2-plain", task=cw.Task(init=init, loss=loss, train=Absent(10_000_000, spec, "gpt2-plain")),
        batch=256, replicas=1, duration="10000st", precision="bf16",
        optimizer=cw.adamw(lr=cw.schedules.cosine(6e-4), b2=0.95, weight_decay=0.1, decay=kernels, clip=1.0),
    )  # fmt: skip


def t5(size="small"):
    """Span corruption: 512 tokens in, 128 out. *Arguments:* `size`: `small` or `large`, of version 1.1.
    Optimizer, layers, loss and accuracy as in google-research/t5x, `contrib/gpu/t5`."""

    def loss(apply, batch):
        logits, words = apply(batch["input"], batch["target"]), batch["target"]
        told = jax.nn.one_hot(words, logits.shape[-1], dtype=logits.dtype)
        right = jnp.argmax(logits, axis=-1).astype(words.dtype) == words
        losses, real = t5x_losses(logits, told), (words > 0).astype(jnp.float32)
        return {"loss": jnp.mean(losses * real, 1), "accuracy": jnp.mean(jnp.where(right, real, 0.0), 1)}

    optimizer = cw.adamw(lr=cw.schedules.cosine(1e-4), weight_decay=0.01, clip=1.0)
    columns = {"input": (512,), "target": (128,)}
    return _recipe(f"t5-{size}", lambda rngs: T5(*T5_SIZES[size], rngs), loss, columns, optimizer)


@jax.custom_vjp
def t5x_losses(logits, told):
    """Of logits (b, t, vocabulary) and as many probabilities, float32: the cross-entropies (b, t), each with
    1e-4 times the square of the softmax's log-sum. The gradient is made of the forward pass's exponentials
    (t5x/losses.py, `cross_entropy_with_logits`)."""
    return _t5x_forward(logits, told)[0]


def _t5x_forward(logits, told):
    most = jnp.max(logits, axis=-1, keepdims=True)
    weights = jnp.exp(logits - most)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    logs, log_z = logits - most - jnp.log(total), (jnp.log(total) + most)[..., 0]
    return -jnp.sum(told * logs, axis=-1) + Z_LOSS * log_z**2, (told, weights, total, logs, log_z)


def _t5x_backward(kept, gradient):
    told, weights, total, logs, log_z = kept
    slope = (1 + 2 * Z_LOSS * log_z)[..., None] * weights / total - told
    return gradient[..., None] * slope, -gradient[..., None] * logs


t5x_losses.defvjp(_t5x_forward, _t5x_backward)


def attend(q, k, v, seen=None, drop=None, softmax=jnp.float32):
    """Three times (b, t, heads, d) -> the same, by weights that are all there at once. `seen`: (t, t) bool,
    which of them are not 0; `drop` drops of them; `softmax`: its type, or `None` for that of `q`."""
    scores = jnp.einsum("btnd,bsnd->bnts", q, k).astype(softmax or q.dtype) * q.shape[-1] ** -0.5
    if seen is not None:
        scores = jnp.where(seen[None, None], scores, -jnp.inf)
    weights = jax.nn.softmax(scores).astype(q.dtype)
    return jnp.einsum("bnts,bsnd->btnd", weights if drop is None else drop(weights), v)


class PlainAttention(Attention):
    def __call__(self, x, seen=None, **_):
        b, t, width = x.shape
        q, k, v = jnp.split(self.qkv(x).reshape(b, t, 3 * self.heads, -1), 3, axis=2)
        return self.out(attend(q, k, v, jnp.tril(jnp.ones((t, t), bool))).reshape(b, t, width))


class PlainBlock(PreNormBlock):
    def __init__(self, width, heads, rngs):
        options = {"causal": True, "init": NORMAL, "out_init": NORMAL, "rngs": rngs}
        super().__init__(width, heads, tanh=True, epsilon=1e-5, **options)
        self.attention = PlainAttention(width, heads, **options)


class PlainGPT(GPT2):
    def __init__(self, *, depth, width, heads, rngs, **sizes):
        super().__init__(depth=depth, width=width, heads=heads, rngs=rngs, **sizes)
        self.blocks = Blocks(depth, lambda rngs: PlainBlock(width, heads, rngs), rngs=rngs)


class Drop(nnx.Dropout):
    """Dropout of a tenth by the chip's own generator, as in TensorFlow and PyTorch. JAX computes more, to
    give the same numbers everywhere."""

    def __init__(self, rngs):
        super().__init__(0.1, rngs=rngs)

    def __call__(self, x):
        if self.deterministic:
            return x
        zero, one = jnp.zeros((), x.dtype), jnp.ones((), x.dtype)
        return jnp.where(jax.lax.rng_uniform(zero, one, x.shape) >= self.rate, x / (1 - self.rate), 0)


class BertBlock(nnx.Module):
    """`norm(x + attention(x))`, then the same around two layers: the norms come after."""

    tanh = False  # GELU by its tanh formula
    softmax = jnp.float32  # its type; `None` is that of the net

    def __init__(self, width, heads, rngs):
        linear = partial(nnx.Linear, width, width, kernel_init=NORMAL, rngs=rngs)
        self.query, self.key, self.value, self.mixed = (linear() for _ in range(4))
        self.heads = heads
        self.hidden = nnx.Linear(width, 4 * width, rngs=rngs)
        self.out = nnx.Linear(4 * width, width, rngs=rngs)
        self.norm1, self.norm2 = (LayerNorm(width, epsilon=1e-12) for _ in range(2))
        self.drop_weights, self.drop_mixed, self.drop_out = self.drops(rngs)

    def drops(self, rngs):
        return Drop(rngs), Drop(rngs), Drop(rngs)

    def attend(self, x):
        b, t, width = x.shape
        q, k, v = (layer(x).reshape(b, t, self.heads, -1) for layer in (self.query, self.key, self.value))
        y = attend(q, k, v, drop=self.drop_weights, softmax=self.softmax)
        return self.mixed(y.reshape(b, t, width))

    def __call__(self, x):
        x = self.norm1(x + self.drop_mixed(self.attend(x)))
        return self.norm2(x + self.drop_out(self.out(nnx.gelu(self.hidden(x), approximate=self.tanh))))


class PyTorchBlock(BertBlock):
    """GELU and the norms keep their arguments alone for the gradient."""

    def __call__(self, x):
        gelu = jax.checkpoint(partial(nnx.gelu, approximate=False))
        x = jax.checkpoint(self.norm1)(x + self.drop_mixed(self.attend(x)))
        return jax.checkpoint(self.norm2)(x + self.drop_out(self.out(gelu(self.hidden(x)))))


class ApexBlock(PyTorchBlock):
    softmax = None


class GoogleBlock(BertBlock):
    """Products give and take arrays of heads, and what the weights add up to divides their product."""

    tanh = True

    def attend(self, x):
        width = x.shape[-1]
        q, k, v = (
            jnp.einsum("btw,whd->bthd", x, layer.kernel[...].astype(x.dtype).reshape(width, self.heads, -1))
            + layer.bias[...].astype(x.dtype).reshape(1, 1, self.heads, -1)
            for layer in (self.query, self.key, self.value)
        )
        scores = jnp.einsum("btnd,bsnd->bnts", q * q.shape[-1] ** -0.5, k).astype(jnp.float32)
        weights = jnp.exp(scores - jax.lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True)))
        y = jnp.einsum("bnts,bsnd->btnd", self.drop_weights(weights.astype(x.dtype)), v)
        y = y / jnp.sum(weights, axis=-1, keepdims=True).transpose(0, 2, 1, 3).astype(x.dtype)
        kernel = self.mixed.kernel[...].astype(x.dtype).reshape(self.heads, -1, width)
        return jnp.einsum("btnd,ndw->btw", y, kernel) + self.mixed.bias[...].astype(x.dtype)[None, None]


class TensorFlowBlock(BertBlock):
    """Norms, what they add up and GELU are float32, but softmax has the type of the net."""

    tanh, softmax = True, None

    def __call__(self, x):
        wide = self.norm1(x.astype(jnp.float32) + self.drop_mixed(self.attend(x)).astype(jnp.float32))
        hidden = nnx.gelu(self.hidden(wide.astype(x.dtype)).astype(jnp.float32), approximate=True)
        out = self.drop_out(self.out(hidden.astype(x.dtype)))
        return self.norm2(out.astype(jnp.float32) + wide).astype(x.dtype)


class FlaxBlock(BertBlock):
    """Dropout by JAX's own generator; of attention's weights the same entries for all examples and heads."""

    alike = (0, 1)

    def drops(self, rngs):
        dropout = partial(nnx.Dropout, 0.1, rngs=rngs)
        return dropout(broadcast_dims=self.alike), dropout(), dropout()


class KerasBlock(FlaxBlock):
    """Dropout draws for every entry, also of the weights."""

    tanh, alike = True, ()


FORMS = {
    "pytorch": PyTorchBlock,
    # level O2: NVIDIA/DeepLearningExamples, PyTorch/LanguageModeling/BERT/run_squad.py
    "apex": ApexBlock,
    # for TPUs: mlcommons/training_results_v1.0, bert-preview-TF-tpu-v4-6912/modeling.py
    "google": GoogleBlock,
    # NVIDIA/DeepLearningExamples, TensorFlow2/LanguageModeling/BERT/official/nlp/modeling/layers
    "tensorflow": TensorFlowBlock,
    "flax": FlaxBlock,  # huggingface/transformers, models/bert/modeling_flax_bert.py
    # keras-team/keras, backend/jax/random.py; keras-hub, layers/modeling/transformer_encoder.py
    "keras": KerasBlock,
}


class Bert(nnx.Module):
    """`(tokens, segments, places)` -> logits of the words at `places`, and of the pair's label. One layer
    follows another, and a tenth is dropped."""

    def __init__(self, size, form, rngs, classes=2, vocabulary=30_528):
        width, depth, heads = {"base": (768, 12, 12), "large": (1024, 24, 16)}[size]
        self.words, self.places, self.segments = (
            Embedding(count, width, rngs=rngs) for count in (vocabulary, 512, 2)
        )
        block = FORMS[form]
        self.blocks = nnx.Sequential(*(block(width, heads, rngs) for _ in range(depth)))
        self.drop = nnx.Dropout(0.1, rngs=rngs) if issubclass(block, FlaxBlock) else Drop(rngs)
        self.norm, self.told_norm = (LayerNorm(width, epsilon=1e-12) for _ in range(2))
        self.pooled, self.told = (nnx.Linear(width, width, rngs=rngs) for _ in range(2))
        self.bias = nnx.Param(jnp.zeros((vocabulary,), jnp.float32))
        self.following, self.tanh = nnx.Linear(width, classes, rngs=rngs), block.tanh

    def __call__(self, inputs):
        tokens, segments, places = inputs
        x = embed(self.words.embedding[...], tokens) + embed(self.segments.embedding[...], segments)
        x = self.norm(x + self.places.embedding[...][None, : tokens.shape[1]])
        x = self.blocks(self.drop(x))
        following = self.following(jnp.tanh(self.pooled(x[:, 0])))
        if places is None:
            return None, following
        told = jnp.take_along_axis(x, places[:, :, None], axis=1)
        told = self.told_norm(nnx.gelu(self.told(told), approximate=self.tanh))
        return told @ self.words.embedding[...].T + self.bias[...].reshape(1, 1, -1), following


T5_SIZES = {  # width, hidden, depth, heads, dropout
    "small": (512, 1024, 8, 6, 0.1),
    "large": (1024, 2816, 24, 16, 0.0),
}


class T5Block(nnx.Module):
    """Attention to itself and, `decoder`, to what the encoder made; then gated GELU. RMS norms, no biases.
    Dropout drops the same entries at each place, as T5X does."""

    def __init__(self, width, hidden, heads, dropout, decoder, rngs):
        linear = partial(nnx.Linear, use_bias=False, rngs=rngs)
        kinds = 2 if decoder else 1
        self.norms = nnx.List([nnx.Param(jnp.ones((width,), jnp.float32)) for _ in range(kinds + 1)])
        self.queries = nnx.List([linear(width, heads * 64) for _ in range(kinds)])
        self.keys = nnx.List([linear(width, heads * 64) for _ in range(kinds)])
        self.values = nnx.List([linear(width, heads * 64) for _ in range(kinds)])
        self.outs = nnx.List([linear(heads * 64, width) for _ in range(kinds)])
        self.up, self.gate, self.down = linear(width, hidden), linear(width, hidden), linear(hidden, width)
        self.heads, self.drop = heads, nnx.Dropout(dropout, broadcast_dims=(-2,), rngs=rngs)

    def attend(self, i, x, others, bias):
        b, t, _ = x.shape
        q = self.queries[i](x / jnp.asarray(8, x.dtype)).reshape(b, t, self.heads, 64)
        k, v = (layer(others).reshape(b, -1, self.heads, 64) for layer in (self.keys[i], self.values[i]))
        scores = jnp.einsum("btnd,bsnd->bnts", q, k)  # T5X: in the type of the net, not in float32
        weights = jax.nn.softmax(scores + bias)
        if self.drop.rate > 0:
            weights = weights * self.drop(jnp.ones((b, self.heads, 1, k.shape[1]), x.dtype))
        y = jnp.einsum("bnts,bsnd->btnd", weights, v)
        return self.drop(self.outs[i](y.reshape(b, t, -1)))

    def __call__(self, x, bias, memory=None, memory_bias=None):
        y = rms(x, self.norms[0])
        x = x + self.attend(0, y, y, bias)
        if memory is not None:
            x = x + self.attend(1, rms(x, self.norms[1]), memory, memory_bias)
        y = rms(x, self.norms[-1])
        return x + self.drop(self.down(self.drop(nnx.gelu(self.gate(y), approximate=True) * self.up(y))))


def hidden_pairs(rows, columns, dtype):
    """(b, t) and (b, s) tokens -> (b, 1, t, s) to add to scores: where one is padding, -1e10."""
    seen = (rows > 0)[:, None, :, None] & (columns > 0)[:, None, None, :]
    return jnp.where(seen, 0.0, -1e10).astype(dtype)


def rms(x, scale):
    y = x.astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + 1e-6)
    return (y * scale[...].astype(jnp.float32).reshape(1, 1, -1)).astype(x.dtype)


class Stack(nnx.Module):
    """`depth` blocks, one after another, with the bias for distances that they share. `tokens` (b, t) of `x`;
    `seen` (b, s) of the encoder's result `memory`."""

    def __init__(self, width, hidden, depth, heads, dropout, decoder, rngs):
        self.blocks = nnx.List([T5Block(width, hidden, heads, dropout, decoder, rngs) for _ in range(depth)])
        self.begin = nnx.Dropout(dropout, broadcast_dims=(-2,), rngs=rngs)
        self.end = nnx.Dropout(dropout, broadcast_dims=(-2,) if decoder else (), rngs=rngs)
        self.distances = nnx.Param(NORMAL(rngs.params(), (32, heads)))
        self.scale, self.decoder = nnx.Param(jnp.ones((width,), jnp.float32)), decoder

    def __call__(self, x, tokens, memory=None, seen=None):
        t, x = x.shape[1], self.begin(x)
        places = jnp.arange(t, dtype=jnp.int32)
        apart = places[None, :] - places[:, None]
        bucket = jnp.clip(jnp.abs(apart), 0, 15) + jnp.where(
            apart > 0, 16, 0
        )  # the original's grow with the log
        bias = self.distances[...][bucket].transpose(2, 0, 1)[None].astype(x.dtype)
        if self.decoder:
            bias = jnp.where(apart[None, None] > 0, -1e10, bias)
        bias = bias + hidden_pairs(tokens, tokens, x.dtype)
        for block in self.blocks:
            x = block(x, bias, memory, None if seen is None else hidden_pairs(tokens, seen, x.dtype))
        return self.end(rms(x, self.scale))


class T5(nnx.Module):
    """`(inputs, targets)` -> logits of the targets."""

    def __init__(self, width, hidden, depth, heads, dropout, rngs, vocabulary=32_128):
        self.words = Embedding(vocabulary, width, rngs=rngs)
        self.encoder = Stack(width, hidden, depth, heads, dropout, False, rngs)
        self.decoder = Stack(width, hidden, depth, heads, dropout, True, rngs)
        self.logits = nnx.Linear(width, vocabulary, use_bias=False, rngs=rngs)

    def __call__(self, inputs):
        given, targets = inputs
        table = self.words.embedding[...]
        before = jnp.pad(targets[:, :-1], ((0, 0), (1, 0)))
        memory = self.encoder(embed(table, given), given)
        states = self.decoder(embed(table, before), targets, memory, given)
        return states.astype(jnp.float32) @ self.logits.kernel[...].astype(jnp.float32)
