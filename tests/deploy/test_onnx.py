"""Operations one by one: ONNX Runtime beside JAX, with a batch of 1 and of 5.

What the built-in models need, what jax2onnx would translate otherwise, and loops and branches.
"""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import chipwise as cw
from chipwise.deploy.onnx import to_onnx
from chipwise.models.attention_blocks import blocks
from chipwise.models.attention_mask import Mask
from refusals import refused

runtime = pytest.importorskip("onnxruntime")
pytest.importorskip("jax2onnx")

RNG = np.random.default_rng(0)
KERNEL = RNG.normal(size=(3, 3, 2, 4)).astype(np.float32)
MATRIX = RNG.normal(size=(4, 6)).astype(np.float32)
WINDOW = (1, 2, 2, 1)


def conv(x, **options):
    return lax.conv_general_dilated(x, KERNEL, dimension_numbers=("NHWC", "HWIO", "NHWC"), **options)


def attention(x):  # (b, 8, 8, 4)
    q = x.reshape(x.shape[0], 8, 8, 4)
    weights = jax.nn.softmax(jnp.einsum("btnd,bsnd->bnts", q, q))
    return jnp.einsum("bnts,bsnd->btnd", weights, q)


def blockwise_attention(x):  # 64 positions in blocks of 24, padded to 72
    q = x.reshape(x.shape[0], 64, 2, 2)
    return blocks(q, q, q, Mask(causal=True), block=24).reshape(x.shape)


def loop(x):
    def step(carry, row):
        carry = jnp.tanh(carry * row.reshape(1, 1, 1, 4))
        return carry, jnp.sum(carry, axis=(1, 2, 3))

    carry, sums = lax.scan(step, x, MATRIX[:, :4])
    return carry.reshape(x.shape[0], -1) + sums.T[:, :1]


CASES = {
    "elementwise": lambda x: (
        jnp.exp(-jnp.abs(x)) * lax.rsqrt(x * x + 1) + jnp.log1p(x * x) - jnp.expm1(-x * x)
    ),
    "activations": lambda x: (
        jax.nn.gelu(x) + jax.nn.gelu(x, approximate=True) + jax.nn.silu(x) + jax.nn.relu(x)
    ),
    "powers": lambda x: x**3 + jnp.abs(x) ** 1.5 + jnp.square(x) + lax.erf(x) + lax.erfc(x),
    "select": lambda x: jnp.where((x > 0) & (x < 1) | (x != x), x, -x),
    "clip": lambda x: jnp.clip(x, -0.5, 0.5) + jnp.sign(x) + jnp.floor(x) + jnp.ceil(x),
    "reduce": lambda x: jnp.stack([x.sum((1, 2)), x.max((1, 2)), x.min((1, 2)), x.mean((1, 2))], axis=1),
    "argmax": lambda x: jnp.argmax(x.reshape(x.shape[0], -1), axis=1),
    "any": lambda x: jnp.any(x > 2, axis=(1, 2)) & jnp.all(x > -9, axis=(1, 2)),
    "softmax": lambda x: jax.nn.log_softmax(x.reshape(x.shape[0], -1)),
    "matmul": lambda x: x @ MATRIX,
    "transposed matmul": lambda x: jnp.einsum("bhwc,nc->bhwn", x, MATRIX.T),
    "attention": attention,
    "blockwise attention": blockwise_attention,
    "conv": lambda x: conv(x[..., :2], window_strides=(1, 1), padding="SAME"),
    "strided conv": lambda x: conv(x[..., :2], window_strides=(2, 2), padding=((1, 0), (2, 1))),
    "dilated conv": lambda x: conv(x[..., :2], window_strides=(1, 1), padding="VALID", rhs_dilation=(2, 2)),
    "grouped conv": lambda x: conv(x, window_strides=(1, 1), padding="SAME", feature_group_count=2),
    "max pool": lambda x: lax.reduce_window(x, -jnp.inf, lax.max, WINDOW, WINDOW, "SAME"),
    "max pool with padding": lambda x: lax.reduce_window(
        x, -jnp.inf, lax.max, (1, 3, 3, 1), WINDOW, ((0, 0), (1, 1), (2, 0), (0, 0))
    ),
    "max pool behind channels": lambda x: lax.reduce_window(
        x, -jnp.inf, lax.max, (1, 1, 2, 2), (1, 1, 2, 1), ((0, 0), (0, 0), (0, 0), (1, 0))
    ),
    "mean pool": lambda x: lax.reduce_window(x, 0.0, lax.add, WINDOW, WINDOW, "VALID") / 4,
    "shapes": lambda x: jnp.concatenate([x.transpose(0, 2, 1, 3)[:, ::2], x[:, 1:5]], axis=1).reshape(
        x.shape[0], -1
    ),
    "pad": lambda x: jnp.pad(x, ((0, 0), (1, 2), (0, 0), (3, 0)), constant_values=2.0),
    "set a row": lambda x: x.at[:, 3].set(1.5) + x.at[:, :, -1].set(x[:, :, 0]),
    "set a place": lambda x: x.at[:, 2, 0, 1].set(x[:, 0, 0, 0]),
    "set a window": lambda x: lax.dynamic_update_slice(x, x[:, :2, 3:6, 1:3], (0, 9, 1, 0)),
    "set a whole": lambda x: lax.dynamic_update_slice(x, x + 1, (0, 0, 0, 0)),
    "row": lambda x: x[:, 3, -1] + x[:, 0, 0] + jnp.flip(x, axis=3)[:, 1, 1],
    "table": lambda x: jnp.asarray(MATRIX)[jnp.clip(jnp.abs(x[..., 0] * 2), 0, 3).astype(jnp.int32)],
    "broadcast": lambda x: jnp.broadcast_to(x[:, :1], x.shape) @ MATRIX,
    "batch of ones": lambda x: jnp.concatenate([jnp.ones((x.shape[0], 1)), x[:, 0, 0]], axis=1),
    "loop": loop,
    "long loop": lambda x: lax.scan(lambda c, r: (jnp.tanh(c * r), c[:, 0]), x, jnp.ones(129))[1][-1],
    "loop with an end": lambda x: lax.while_loop(lambda v: v.sum() < 900, lambda v: v + 1, x),
    "branch": lambda x: lax.cond(x.sum() > 0, lambda v: v, lambda v: -v, x),
    "sort": lambda x: jnp.sort(x, axis=1),
    "set by index": lambda x: x.at[:, jnp.argmax(x.sum((0, 2, 3)))].set(1.0),
    "cumsum": lambda x: jnp.cumsum(x, axis=1),
    "marked": lambda x: checkpoint_name(x, "mlpwi") + 1,
    "dead code": lambda x: (jax.random.normal(jax.random.key(0), (3,)), x + 1)[1],
}


FAST = {"argmax", "branch", "clip", "conv", "matmul", "max pool", "pad", "select", "softmax", "sort"}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in FAST else pytest.mark.slow) for n in CASES]
)
@pytest.mark.drawn(share=0.25)
def test_an_operation_gives_what_jax_gives(name):
    def function(inputs):
        return {"y": CASES[name](inputs["x"])}

    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        spec = {"x": jax.ShapeDtypeStruct((8, 8, 4), np.float32)}
        model = to_onnx(function, spec, {"y": "y"}, {})
        session = runtime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
        for rows in (1, 5):
            x = RNG.normal(size=(rows, 8, 8, 4)).astype(np.float32)
            expected = np.asarray(function({"x": jnp.asarray(x)})["y"])
            (found,) = session.run(None, {"x": x})
            assert found.dtype == expected.dtype and found.shape == expected.shape
            np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-5)


FUNCTIONS = """
import jax, jax.numpy as jnp, numpy as np
before = [{name: value for name, value in vars(m).items() if callable(value)} for m in (jnp, jax.lax, jax.nn)]
from chipwise.deploy.onnx import to_onnx
spec = {"x": jax.ShapeDtypeStruct((3,), np.float32)}
to_onnx(lambda c: {"y": jnp.cumsum(c["x"], -1)}, spec, {"y": "y"}, {})
for module, own in zip((jnp, jax.lax, jax.nn), before):
    assert [name for name, value in own.items() if getattr(module, name) is not value] == []
"""


@pytest.mark.slow
def test_an_export_leaves_the_functions_of_jax_alone():
    subprocess.run([sys.executable, "-c", FUNCTIONS], check=True, env=os.environ | {"JAX_PLATFORMS": "cpu"})


def test_what_has_no_counterpart_is_refused():
    spec = {"x": jax.ShapeDtypeStruct((4,), np.float32)}
    with refused(cw.errors.RecipeError, "onnx-operation"):
        to_onnx(
            lambda inputs: {"y": jax.random.normal(jax.random.key(0), inputs["x"].shape)},
            spec,
            {"y": "y"},
            {},
        )
