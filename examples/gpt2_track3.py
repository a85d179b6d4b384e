"""The fixed net, data and batch of modded-nanogpt's track 3, where optimizers race in steps.

    chipwise train examples/gpt2_track3.py:recipe --data DIR       # DIR has fineweb_{train,val}_*.bin
    chipwise train examples/gpt2_track3.py:recipe --data DIR --set optimizer=adamw --set steps=5625
    chipwise plan examples/gpt2_track3.py:recipe --on h100:8,a100  # what it costs, without data

Source: github.com/KellerJordan/modded-nanogpt at f411b3d3, records/track_3_optimization: its README.md, its
train_gpt_simple.py for the net, the data and Muon (row 36 of its table, 3,250 steps to a loss of 3.28 on
FineWeb), and the log of row 2 for AdamW (5,625 steps). An optimizer of your own goes into `OPTIMIZERS`.

The tests compare five steps with a PyTorch program of the same description, in float32 and float64. What
differs from the track:

* Every run of the track reads its files from the front. Here the seed draws the order of the same sequences.
* The track keeps the embedding and its moments in bfloat16, here parameters are float32.
* AdamW starts from the initial values of row 36.

Planned times beside published ones: benchmarks/track3.md. By the plan, 8 H100 take 147 ms a step, where the
logs of the track have 134 to 154. Up to eight devices share the eight replicas, as on the track. A replica of
64 sequences needs 54 GB, those of `--set replicas=64` less. No GPU has trained this recipe.
"""

import functools
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import chipwise as cw
from chipwise.models import attention, embed

# ---- Data


class Sequences:
    """The first `count` sequences of the files `fineweb_SPLIT_*.bin` in a folder.

    A file has 256 int32, of which three count (20240520, 1, the number of tokens), and the tokens as
    uint16. A sequence has `context` tokens, and the one that the last of them predicts. What remains of a
    file behind its last whole `batch` is left out, as on the track.
    """

    def __init__(self, folder, split, count, *, batch, context, vocabulary):
        self.spec = {"token": jax.ShapeDtypeStruct((context + 1,), np.uint16)}
        self.below = {"token": vocabulary}  # for --synthetic
        self.folder, self.split, self.count, self.batch = folder, split, count, batch

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return {name: column[0] for name, column in self.take([index]).items()}

    def take(self, indices):
        files = np.searchsorted(self.starts, indices, side="right") - 1
        rows = [
            self.files[file][index - self.starts[file]] for file, index in zip(files, indices, strict=True)
        ]
        return {"token": np.stack(rows)}

    @functools.cached_property
    def files(self):
        """The sequences of each file, `(n, context + 1)`, as views of the file."""
        if self.folder is None:
            text = "No tokens are given: type --data DIR, or --synthetic for random ones."
            raise cw.errors.DataError("tokens-absent", text)
        files, name = [], f"fineweb_{self.split}_*.bin"
        for path in sorted(Path(self.folder).glob(name)):
            header = np.fromfile(path, "<i4", 256)
            if header[:2].tolist() != [20240520, 1] or path.stat().st_size != 1024 + 2 * header[2]:
                text = "{path} begins with {header}: expected 20240520, 1 and the number of its tokens."
                raise cw.errors.DataError("tokens-header", text, path=path, header=header[:3].tolist())
            length = self.spec["token"].shape[0]
            if header[2] <= length:  # not one sequence
                continue
            content = np.memmap(path, "<u2", "r", offset=1024)
            whole = (len(content) - 2) // (self.batch * (length - 1)) * self.batch
            windows = np.lib.stride_tricks.sliding_window_view(content, length)
            files.append(windows[:: length - 1][:whole])
        if (found := sum(map(len, files))) < self.count:
            text = "{folder} has {found} of {count} sequences in {name}: add files, or --set fewer steps."
            facts = {"folder": self.folder, "found": found, "count": self.count, "name": name}
            raise cw.errors.DataError("tokens-few", text, **facts)
        return files

    @functools.cached_property
    def starts(self):
        """The number of the first sequence of each file."""
        return np.cumsum([0, *map(len, self.files[:-1])])


# ---- Net


SPREAD = nnx.initializers.variance_scaling(0.33, "fan_in", "normal")
ZEROS = nnx.initializers.zeros  # so that a block first adds nothing, and every token is as likely


def wide(x):
    """`x` in float32, or as it is if that is wider."""
    return x.astype(jnp.float32) if jnp.finfo(x.dtype).bits < 32 else x


def unit(x):
    """Each vector of `x` `(..., n)` with a mean square of 1."""
    y = wide(x)
    mean = jnp.mean(y * y, axis=-1, keepdims=True)
    return (y * jax.lax.rsqrt(mean + jnp.finfo(y.dtype).eps)).astype(x.dtype)


def turned(x):
    """Rotary positions for the first half of each head's pairs: `(b, t, heads, d)` -> the same.

    Angular frequencies fall from 1 to 1/1024. The other half of the pairs does not turn.
    """
    a, b = jnp.split(wide(x), 2, axis=-1)
    moving = a.shape[-1] // 2
    frequency = (1 / 1024) ** jnp.linspace(0, 1, moving, dtype=a.dtype)
    angle = jnp.arange(x.shape[1], dtype=a.dtype)[:, None] * jnp.pad(frequency, (0, moving))[None]
    cos, sin = jnp.cos(angle)[None, :, None], jnp.sin(angle)[None, :, None]
    return jnp.concatenate([a * cos + b * sin, b * cos - a * sin], axis=-1).astype(x.dtype)


class Norm(nnx.Module):
    def __init__(self, width):
        self.gains = nnx.Param(jnp.ones(width))

    def __call__(self, x):
        return unit(x) * self.gains[None, None]


class Attention(nnx.Module):
    """Causal attention with normalised queries and keys, whose products are scaled by 0.12."""

    def __init__(self, width, head, rngs):
        line = functools.partial(nnx.Linear, width, width, rngs=rngs)
        self.query, self.key, self.value = (line(kernel_init=SPREAD) for _ in range(3))
        self.out = line(kernel_init=ZEROS)
        self.head = head

    def __call__(self, x):
        q, k, v = (
            layer(x).reshape(*x.shape[:2], -1, self.head) for layer in (self.query, self.key, self.value)
        )
        scale = 0.12 * math.sqrt(self.head)  # `attention` divides by the root
        y = attention(turned(unit(q)) * scale, turned(unit(k)), v, causal=True)
        return self.out(y.reshape(x.shape))


class Block(nnx.Module):
    def __init__(self, width, head, rngs):
        self.norm1, self.norm2 = Norm(width), Norm(width)
        self.attention = Attention(width, head, rngs)
        self.hidden = nnx.Linear(width, 4 * width, kernel_init=SPREAD, rngs=rngs)
        self.out = nnx.Linear(4 * width, width, kernel_init=ZEROS, rngs=rngs)

    def __call__(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.out(jnp.square(jax.nn.relu(self.hidden(self.norm2(x)))))


class GPT(nnx.Module):
    """Tokens `(b, t)` -> logits `(b, t, vocabulary)` in float32, softly capped at 15."""

    def __init__(self, vocabulary, depth, width, head, rngs):
        self.words = nnx.Param(nnx.initializers.normal(1.0)(rngs.params(), (vocabulary, width)))
        self.blocks = nnx.List([Block(width, head, rngs) for _ in range(depth)])
        self.norm1, self.norm2 = Norm(width), Norm(width)
        self.head = nnx.Linear(width, vocabulary, kernel_init=ZEROS, rngs=rngs)

    def __call__(self, tokens):
        x = self.norm1(embed(self.words[...], tokens))
        for block in self.blocks:
            x = block(x)
        logits = wide(self.head(self.norm2(x)))
        return 15 * logits * jax.lax.rsqrt(logits * logits + 15**2)


# ---- Optimizers


def steady_then_falling(peak):
    """`peak` for 30 % of the run, then a straight line to 0."""
    return cw.one_cycle(peak, warmup="30%", start=peak)


def part_of(path, leaf):
    """Which optimizer a parameter has: that of the hidden layers' matrices, of words, head or vectors."""
    name = jax.tree_util.keystr(path, simple=True, separator="/")
    if leaf.ndim < 2:
        return "vectors"
    return {"words": "words", "head": "head"}.get(name.split("/")[0], "hidden")


def beside_adamw(hidden, decay, tokens, *, words_lr, head_lr, vectors_lr):
    """`hidden` for the matrices of hidden layers, and AdamW for all else.

    The track's gradient is that of the sum over a step's tokens, which matters for the epsilons. chipwise's
    is that of the mean.
    """
    adamw = functools.partial(optax.adamw, b1=0.8, b2=0.95, eps=1e-10, weight_decay=decay)
    parts = {"hidden": hidden, "words": adamw(words_lr), "head": adamw(head_lr), "vectors": adamw(vectors_lr)}
    labels = functools.partial(jax.tree_util.tree_map_with_path, part_of)
    return optax.chain(optax.scale(float(tokens)), optax.partition(parts, labels))


def orthogonal(matrix, dtype):
    """12 Newton-Schulz iterations towards the nearest orthogonal matrix, times the root of outputs over
    inputs if there are more of them. `matrix`: `(inputs, outputs)`."""
    inputs, outputs = matrix.shape
    x = matrix.astype(dtype)
    x = x if inputs <= outputs else x.T
    x = x / (jnp.linalg.norm(x) + 1e-7)
    for _ in range(12):
        square = x @ x.T
        x = 2 * x + (0.5 * square @ square - 1.5 * square) @ x
    x = x if inputs <= outputs else x.T
    return x.astype(matrix.dtype) * max(1, outputs / inputs) ** 0.5


def orthogonal_momentum(momentum, dtype):
    """Nesterov momentum, made orthogonal."""

    def average(old, new):
        return jax.tree.map(lambda a, b: momentum * a + (1 - momentum) * b, old, new)

    def update(grads, velocity, params=None):
        velocity = average(velocity, grads)
        return jax.tree.map(lambda x: orthogonal(x, dtype), average(velocity, grads)), velocity

    return optax.GradientTransformation(lambda params: jax.tree.map(jnp.zeros_like, params), update)


def muon(lr, *, tokens, iterated_in, **rates):
    hidden = optax.chain(
        orthogonal_momentum(0.95, iterated_in),
        optax.add_decayed_weights(0.05),
        optax.scale_by_learning_rate(lr),
    )
    return beside_adamw(hidden, 0.001, tokens, **rates)


def adamw(lr, *, tokens, iterated_in, **rates):
    hidden = optax.adamw(lr, b1=0.9, b2=0.95, eps=1e-10, weight_decay=0.1)
    return beside_adamw(hidden, 0.0, tokens, **rates)


OPTIMIZERS = {
    "muon": (muon, {"lr": 0.025, "words_lr": 0.7, "head_lr": 0.004, "vectors_lr": 0.015}, 0),
    "adamw": (adamw, {"lr": 0.0015, "words_lr": 0.3, "head_lr": 1 / 320, "vectors_lr": 0.01}, 250),
}
"""The optimizer, its rates, and the steps of a linear warm-up whose first step has a part of the rate."""


# ---- Recipe


def recipe(
    data: str | None = None,
    optimizer: str = "muon",
    steps: int = 3250,
    batch: int = 512,
    context: int = 1024,
    vocabulary: int = 50_304,
    depth: int = 12,
    width: int = 768,
    head: int = 128,
    iterated_in: str = "bfloat16",
) -> cw.Recipe:
    """*Arguments:* `batch`: sequences a step. `head`: entries of a head. `iterated_in`: the type of
    Newton-Schulz iterations."""
    if optimizer not in OPTIMIZERS:
        facts = {"given": optimizer, "known": list(OPTIMIZERS)}
        raise cw.errors.RecipeError("optimizer-unknown", "{given} is none of {known:or}.", **facts)
    init, apply = cw.nnx.functional(lambda rngs: GPT(vocabulary, depth, width, head, rngs))

    def loss(params, state, batch, key, train):
        text = batch["token"].astype(jnp.int32)
        logits, state = apply(params, state, text[:, :-1], key, train)
        values = cw.losses.softmax_cross_entropy(logits.reshape(-1, vocabulary), text[:, 1:].reshape(-1))
        return {"loss": cw.Sum.of(values)}, state

    sizes = {"batch": batch, "context": context, "vocabulary": vocabulary}
    train = Sequences(data, "train", steps * batch, **sizes)
    held_out = Sequences(data, "val", 20 * batch, **sizes)
    rule, rates, rise = OPTIMIZERS[optimizer]
    hyper = {name: steady_then_falling(rate) for name, rate in rates.items()}
    if rise:
        hyper = {
            name: cw.schedules.warmup(hyper[name], f"{rise - 1}st", start=rate / rise)
            for name, rate in rates.items()
        }
    rule = functools.partial(rule, tokens=batch * context, iterated_in=iterated_in)
    return cw.Recipe(
        name=f"gpt2-track3-{optimizer}",
        task=cw.Task(init=init, loss=loss, train=train, eval=held_out),
        batch=batch,
        replicas=8,
        duration=f"{steps}st",
        optimizer=cw.from_optax(rule, **hyper),
        precision="bf16",
    )
