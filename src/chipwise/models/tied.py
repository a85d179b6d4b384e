"""A tied vocabulary table: the embedding look-up, and the loss of the logits.

The logits of a batch are the largest array of a small language model: 50,257 × 1,024 float32 are
206 MB for a sequence. They never exist all at once. The loss takes the tokens in chunks, and
computes the gradient of each chunk while its logits exist, so nothing is stored or computed twice.
Sums are float32. In bfloat16 the gradient of a frequent word would stop growing at 256 terms.
"""

import math
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from . import wide
from .chip_traits import by_platform, on_gpu
from .large import fsdp

_CHUNK = 1024  # tokens per chunk: 206 MB of float32 logits with GPT-2's vocabulary
_GPU_LOGITS = 1 << 28
"""The most logits of a chunk on GPUs: 1 GiB. Each chunk reads and writes the sum for the table's
gradient."""


@jax.custom_vjp
def embed(table: jax.Array, tokens: jax.Array) -> jax.Array:
    """The rows of `table` `(vocabulary, width)` at integer `tokens`: `(*tokens.shape, width)`.

    A token outside the vocabulary gives NaN. The gradient is summed in float32 or wider, on every
    chip in a fixed order.
    """
    return table.at[tokens].get(mode="fill", fill_value=jnp.nan, wrap_negative_indices=False)


def _embed_forward(table, tokens):
    return embed(table, tokens), (tokens, jnp.zeros((0, *table.shape), table.dtype))


def _embed_backward(residuals, g):
    tokens, like = residuals
    rows = g.astype(wide(g.dtype)).reshape(-1, g.shape[-1])
    sums = by_platform(
        tokens.reshape(-1),
        rows,
        cuda=partial(_sums_by_sorting, like.shape[1]),
        rocm=partial(_sums_by_sorting, like.shape[1]),
        default=partial(_sums, like.shape[1]),
    )
    return sums.astype(like.dtype), None


def _sums(vocabulary, tokens, rows):
    """`(vocabulary, width)`: the sum of the `rows` `(n, width)` of each token."""
    sums = jnp.zeros((vocabulary, rows.shape[1]), rows.dtype)
    return sums.at[tokens].add(rows, mode="drop", wrap_negative_indices=False)


def _sums_by_sorting(vocabulary, tokens, rows):
    """`_sums` for GPUs, where XLA would add with atomics in any order, or sort all numbers of
    `rows` to avoid that. Here the tokens are sorted, and the rows of equal tokens are added in a
    fixed order."""
    n = tokens.shape[0]
    tokens, order = lax.sort_key_val(tokens.astype(jnp.int32), jnp.arange(n, dtype=jnp.int32))
    rows = rows[order]
    begins = jnp.concatenate([jnp.ones(1, bool), tokens[1:] != tokens[:-1]])

    def add(left, right):
        (a, _), (b, fresh) = left, right
        return jnp.where(fresh[:, None], b, a + b), left[1] | fresh

    rows, _ = lax.associative_scan(add, (rows, begins))
    ends = jnp.concatenate([begins[1:], jnp.ones(1, bool)])
    # Indices are unique, so no two rows are added
    nowhere = vocabulary + jnp.arange(n, dtype=jnp.int32)
    places = jnp.where(ends & (tokens >= 0) & (tokens < vocabulary), tokens, nowhere)
    sums = jnp.zeros((vocabulary, rows.shape[1]), rows.dtype)
    return sums.at[places].set(rows, mode="drop", unique_indices=True, wrap_negative_indices=False)


embed.defvjp(_embed_forward, _embed_backward)


@jax.custom_vjp
def next_token_loss(
    hidden: jax.Array, table: jax.Array, targets: jax.Array, counted: jax.Array | None = None
) -> jax.Array:
    """The SUM over tokens of the cross-entropy of `hidden @ table.T`, in nats: () float32.

    *Arguments:* `hidden` `(..., width)` and `table` `(vocabulary, width)` of one float dtype, in
    which they are multiplied. Logits, log-sum-exp and sums are float32. `targets` `(...)`:
    integers. One outside the vocabulary makes the sum NaN. `counted` `(...)`: 0 where a target adds
    nothing. By default all add.
    """
    chunks, turns = _chunks(hidden, table, targets, counted)

    def chunk(total, at):
        h, goal, real = at
        logits, lse = _logits(h, table)
        return total + jnp.sum(_losses(logits, lse, goal, real)), None

    return lax.scan(chunk, jnp.float32(0), chunks, unroll=turns)[0]


def _loss_forward(hidden, table, targets, counted=None):
    chunks, turns = _chunks(hidden, table, targets, counted)

    def chunk(carry, at):
        total, d_table = carry
        h, goal, real = at
        logits, lse = _logits(h, table)
        total = total + jnp.sum(_losses(logits, lse, goal, real))
        d_logits = jnp.exp(logits - lse) - _is(goal, logits).astype(jnp.float32)
        d_logits = jnp.where(real[:, None], d_logits, 0.0).astype(table.dtype)
        product = partial(lax.dot_general, preferred_element_type=jnp.float32)
        d_hidden = product(d_logits, table, (((1,), (0,)), ((), ())))
        d_table = d_table + product(d_logits, h, (((0,), (0,)), ((), ())))
        return (total, d_table), d_hidden.astype(h.dtype)

    zeros = jnp.zeros(table.shape, jnp.float32)
    (total, d_table), d_rows = lax.scan(chunk, (jnp.float32(0), zeros), chunks, unroll=turns)
    d_rows = d_rows.reshape(-1, hidden.shape[-1])[: targets.size]
    return total, (d_rows.reshape(hidden.shape), d_table.astype(table.dtype))


def _loss_backward(residuals, g):
    return *(g.astype(d.dtype) * d for d in residuals), None, None


next_token_loss.defvjp(_loss_forward, _loss_backward)


def tied_loss(
    table: jax.Array, hidden: jax.Array, targets: jax.Array, counted: jax.Array | None = None
) -> jax.Array:
    """`next_token_loss` as a layer in `cw.models.fsdp`."""
    return fsdp(
        lambda table, hidden, *rows: next_token_loss(hidden, table, *rows),
        table,
        hidden,
        targets,
        counted,
    )


def _chunks(hidden, table, targets, counted):
    """The chunks, and the number of them that one turn of the loop computes. That is all of them on
    GPUs, where a loop would copy the sum that it carries, and otherwise 1. The chunks are rows
    `(chunks, size, width)`, targets `(chunks, size)` int32, and which positions count."""
    n = targets.size
    width = hidden.shape[-1]
    size = min(n, _CHUNK)
    if on_gpu():
        size = math.ceil(n / math.ceil(n * len(table) / _GPU_LOGITS))
    fill = -n % size
    rows = jnp.pad(hidden.reshape(n, width), ((0, fill), (0, 0))).reshape(-1, size, width)
    goals = jnp.pad(targets.reshape(n).astype(jnp.int32), (0, fill)).reshape(-1, size)
    valid = (jnp.arange(n + fill, dtype=jnp.int32) < n).reshape(-1, size)
    if counted is not None:
        valid = jnp.pad(counted.reshape(n) != 0, (0, fill)).reshape(-1, size)
    return (rows, goals, valid), len(rows) if on_gpu() else 1


def _logits(h, table):
    logits = lax.dot_general(h, table, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
    return logits, _in_one_pass(logits) if on_gpu() else jax.nn.logsumexp(
        logits, axis=1, keepdims=True
    )


def _in_one_pass(logits):
    """`logsumexp` of rows, `(n, 1)`, which reads them once: each partial sum has its own
    maximum."""

    def add(left, right):
        (a, x), (b, y) = left, right
        most = jnp.maximum(a, b)
        return most, x * jnp.exp(a - most) + y * jnp.exp(b - most)

    start = jnp.finfo(jnp.float32).min, jnp.float32(0)
    most, total = lax.reduce((logits, jnp.ones_like(logits)), start, add, (1,))
    return (most + jnp.log(total))[:, None]


def _is(goal, logits):
    return goal[:, None] == jnp.arange(logits.shape[1], dtype=jnp.int32)[None, :]


def _losses(logits, lse, goal, real):
    inside = (goal >= 0) & (goal < logits.shape[1])
    if on_gpu():
        own = jnp.take_along_axis(logits, jnp.where(inside, goal, 0)[:, None], axis=1)[:, 0]
    else:  # by comparison, not by index: it fuses into the pass over the logits
        own = jnp.sum(jnp.where(_is(goal, logits), logits, 0.0), axis=1)
    return jnp.where(real, jnp.where(inside, lse[:, 0] - own, jnp.nan), 0.0)
