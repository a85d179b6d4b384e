"""A small decoder as vorushin/tpuchat trained it on one TPU, `08_tpu_ablations.py`.

    chipwise plan benchmarks/plan_accuracy/recipes/tpuchat.py:decoder --set replicas=16 --on v6e-1

Blocks one after another, nothing is recomputed. All arrays are bfloat16, also in norms and rotations. Norms
have no scales; queries and keys have norms, logits a cap. Splash attention with one head of keys and values.
The loss takes the vocabulary in halves.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

import chipwise as cw
from chipwise.data.synthetic import Absent

DEPTH, WIDTH, HEADS, HEAD, HIDDEN = 8, 1024, 4, 256, 3072
VOCABULARY, CONTEXT, BLOCK, CAP, HALVES = 32_768, 2048, 1024, 15.0, 2

SHAPES = {
    "query": (WIDTH, HEADS, HEAD), "key": (WIDTH, 1, HEAD), "value": (WIDTH, 1, HEAD),
    "mixed": (HEADS, HEAD, WIDTH), "gate": (WIDTH, HIDDEN), "up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH),
}  # fmt: skip


def decoder():
    spec = {"token": jax.ShapeDtypeStruct((CONTEXT + 1,), np.uint16)}
    return cw.Recipe(
        name="tpuchat", task=cw.Task(init=init, loss=loss, train=Absent(10_000_000, spec, "tpuchat")),
        batch=64, replicas=16, duration="10000st", precision="bf16",
        optimizer=cw.adamw(lr=cw.schedules.cosine(1e-4), b2=0.95, weight_decay=0.1),
    )  # fmt: skip


def init(key):
    def normal(shape):
        return 0.02 * jax.random.normal(key, shape)

    blocks = [{name: normal(shape) for name, shape in SHAPES.items()} for _ in range(DEPTH)]
    return {"words": normal((VOCABULARY, WIDTH)), "head": normal((WIDTH, VOCABULARY)), "blocks": blocks}, {}


def norm(x):
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + jnp.asarray(1e-6, x.dtype))


def rotated(x):
    """(b, heads, t, HEAD) -> the same."""
    frequencies = 10_000.0 ** (-np.arange(0, HEAD, 2) / HEAD)
    angles = np.arange(x.shape[2])[:, None] * frequencies
    cos, sin = (jnp.asarray(f(angles), x.dtype)[None, None] for f in (np.cos, np.sin))
    left, right = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([left * cos + right * sin, right * cos - left * sin], axis=-1)


def attend(q, k, v):
    mask = masks.MultiHeadMask([masks.CausalMask((CONTEXT, CONTEXT))] * HEADS)
    names = ("block_q", "block_kv", "block_q_dkv", "block_kv_dkv", "block_q_dq", "block_kv_dq")
    sizes = splash.BlockSizes(**dict.fromkeys(names, BLOCK))
    return jax.vmap(splash.make_splash_mha(mask, head_shards=1, q_seq_shards=1, block_sizes=sizes))(q, k, v)


def block(p, x):
    y = norm(x)
    q, k, v = (jnp.einsum("btd,dhk->bhtk", y, p[name]) for name in ("query", "key", "value"))
    x = x + jnp.einsum("bhtk,hkd->btd", attend(norm(rotated(q)), norm(rotated(k)), v), p["mixed"])
    y = norm(x)
    return x + jnp.einsum("bth,hd->btd", jax.nn.silu(y @ p["gate"]) * (y @ p["up"]), p["down"])


def loss(params, state, batch, key, train):
    text = batch["token"].astype(jnp.int32)
    following, x = text[:, 1:], norm(params["words"][text[:, :-1]])
    for p in params["blocks"]:
        x = block(p, x)
    x, size = norm(x), VOCABULARY // HALVES
    total = jnp.full(following.shape, -jnp.inf, jnp.float32)
    right = jnp.zeros(following.shape, jnp.float32)
    for first in range(0, VOCABULARY, size):
        logits = CAP * jnp.tanh((x @ params["head"][:, first : first + size]) / CAP)
        total = jnp.logaddexp(total, jax.nn.logsumexp(logits, axis=-1).astype(jnp.float32))
        place, here = following - first, (following >= first) & (following < first + size)
        found = jnp.take_along_axis(logits, jnp.where(here, place, 0)[..., None], axis=-1)[..., 0]
        right += jnp.where(here, found.astype(jnp.float32), 0.0)
    return {"loss": cw.Sum(jnp.sum(total - right), jnp.float32(following.size))}, state
