"""The fused attention kernels of NVIDIA's GPUs and of TPUs, behind one signature."""

from __future__ import annotations

import json
from typing import Any

import jax
import jax.numpy as jnp
from jax.stages import Lowered
from jaxlib.mlir import ir

from ..base import DeviceError
from .attention_mask import SAVED, Mask, visited

LANES = 128  # lanes of a TPU's vector registers; a block of keys must be a multiple


def cudnn(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: Mask,
    document: jax.Array | None = None,
    *,
    keys: int | None = None,
) -> jax.Array:
    """`attention` by cuDNN. If `document` is given, cuDNN reads which pairs of positions are of one
    document from an array of `t * t` values for each head of an example. Raises `DeviceError` if
    the library is missing. JAX's packages for NVIDIA GPUs contain it, so this happens only when a
    GPU is planned on a machine without one."""
    window = None if mask.window is None else (mask.window - 1, 0)
    t = query.shape[1]
    keys = keys or key.shape[1]
    same = None
    lengths: tuple[jax.Array | None, ...] = (None, None)
    if odd := any(x.shape[1] % 2 for x in (query, key)):  # its gradient takes even lengths alone
        query, key, value = (
            jnp.pad(x, [(0, 0), (0, x.shape[1] % 2), (0, 0), (0, 0)]) for x in (query, key, value)
        )
    # With a causal mask no position sees the padding. Otherwise no keys behind the length are seen,
    # and their gradients are 0, to which JAX's own tests compare cuDNN's.
    if keys < key.shape[1] and not mask.causal and document is None:
        # By the operands, for JAX maps cuDNN's kernel over lengths only if each has its own.
        none = 0 * query[:, 0, 0, 0].astype(jnp.int32)
        lengths = none + query.shape[1], none + keys
    if document is not None:
        document = _filled(document, query.shape[1])
        same = (document[:, :, None] == document[:, None])[:, None]
        # One for all heads would do, but JAX 0.10 cannot map it over replicas.
        same = jnp.broadcast_to(same, (len(same), query.shape[2], *same.shape[2:]))
    try:
        out = jax.nn.dot_product_attention(
            query,
            key,
            value,
            mask=same,
            is_causal=mask.causal,
            local_window_size=window,
            query_seq_lengths=lengths[0],
            key_value_seq_lengths=lengths[1],
            implementation="cudnn",
        )
        return out[:, :t] if odd else out
    except RuntimeError as error:
        if "cuDNN" not in str(error):
            raise
        text = "Attention on this GPU needs cuDNN: {install}."
        raise DeviceError(
            "attention-without-cudnn", text, install="pip install nvidia-cudnn-cu12"
        ) from error


def in_fixed_order(lowered: Lowered) -> Lowered:
    """`lowered`, an exact program for a GPU, in which every backward pass of cuDNN states itself
    that it adds in a fixed order. With `xla_gpu_deterministic_ops`, XLA (jaxlib 0.11.2) writes that
    only into the first of several equal ones while it compiles them, and does not find the code of
    the others. Then a net of two layers stops in its first step with
    `IndexError: raw_hash_map<>::at`."""

    def visit(op: Any) -> ir.WalkResult:
        name = str(op.attributes["call_target_name"]) if op.name == "stablehlo.custom_call" else ""
        if "fmha" in name and "SoftmaxBackward" in name:
            config = json.loads(op.attributes["backend_config"].value)
            config["cudnn_fmha_backend_config"]["force_deterministic"] = True
            op.attributes["backend_config"] = ir.StringAttr.get(json.dumps(config), op.context)
        return ir.WalkResult.ADVANCE

    lowered.compiler_ir().operation.walk(visit)  # type: ignore[union-attr]
    return lowered


def _filled(document: jax.Array, length: int) -> jax.Array:
    """`document` padded to `length` with a document of its own."""
    more = length - document.shape[1]
    none = jnp.iinfo(document.dtype).min
    return jnp.pad(document, [(0, 0), (0, more)], constant_values=none)


def splash(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: Mask,
    document: jax.Array | None = None,
) -> jax.Array:
    """`attention` by JAX's kernel for TPUs. Lengths are padded to whole blocks."""
    from jax.experimental.pallas.ops.tpu import splash_attention as kernels

    (_, t, heads, d), s = query.shape, key.shape[1]
    rows, columns = (block_of(n, d, mask.window) for n in (t, s))
    long, wide = (-(-n // block) * block for n, block in ((t, rows), (s, columns)))
    reach = None if mask.window is None else mask.window - 1
    side = (reach, 0 if mask.causal else reach)
    one = (
        kernels.FullMask((long, wide))
        if side == (None, None)
        else kernels.LocalMask((long, wide), side, 0)
    )
    sizes = kernels.BlockSizes(
        block_q=rows,
        block_kv=columns,
        block_q_dkv=rows,
        block_kv_dkv=columns,
        block_q_dq=rows,
        block_kv_dq=columns,
    )
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        kernel = kernels.make_splash_mha(
            kernels.MultiHeadMask([one] * heads),
            head_shards=1,
            q_seq_shards=1,
            block_sizes=sizes,
            residual_checkpoint_name=SAVED,
        )
        segments = None
        each = None
        if document is not None:
            segments = kernels.SegmentIds(*(_filled(document, n) for n in (long, wide)))
            each = 0
        elif (long, wide) != (t, s) and not mask.causal:
            # Padding is a separate segment; with a causal mask no position sees it.
            ends = (_filled(jnp.zeros((1, n), jnp.int32), m)[0] for n, m in ((t, long), (s, wide)))
            segments = kernels.SegmentIds(*ends)
        parts = [
            jnp.pad(x, [(0, 0), (0, n - x.shape[1]), (0, 0), (0, 0)]).transpose(0, 2, 1, 3)
            for x, n in (
                (query * jnp.asarray(d**-0.5, query.dtype), long),
                (key, wide),
                (value, wide),
            )
        ]
        share = visited(long, wide, mask, min(rows, columns))
        with jax.named_scope(f"attention[{share:.4f}]"):
            out = jax.vmap(kernel, (0, 0, 0, each))(*parts, segments)
    return out.transpose(0, 2, 1, 3)[:, :t]


PRODUCTS = {"fwd": 2, "dq": 3, "dkv": 4}
"""Products of splash attention's kernels. The last two compute the weights again."""


def block_of(length: int, size: int, window: int | None = None) -> int:
    """Positions of a block, for heads of `size` entries. It is the largest of 1,024, 512, 256 and
    128 with little padding, since larger ones are faster. It is 1,024 only if `length` and
    `window`, where there is one, are 4,096 or more, because at the edge of a mask larger blocks
    compute more pairs that are not visible (`benchmarks/splash.md`). It is not 1,024 for heads that
    would not fit in a v4's on-chip memory."""
    least = -(-length // LANES) * LANES
    for block in (1024, 512, 256)[min(length, window or length) < 4096 or size > LANES :]:
        if 8 * (-(-length // block) * block) <= 9 * least:
            return block
    return LANES
