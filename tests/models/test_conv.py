"""`conv` equals `lax.conv_general_dilated`, in values and gradients, and is it on TPU and GPU."""

import itertools
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from chipwise.models import conv_cpu
from chipwise.models.conv import NHWC, conv

# batch, height, width, in, out, kernel, stride: each form in each of its three uses, N-1, N, N+1.
SHAPES = [
    (1, 5, 5, 1, 6, 3, 1),
    (3, 28, 28, 1, 6, 3, 1),
    (2, 28, 27, 6, 12, 6, 2),
    (1, 14, 14, 12, 24, 6, 2),
    (2, 9, 8, 3, 64, 3, 1),
    (1, 8, 8, 128, 128, 3, 1),
    (2, 8, 8, 16, 16, 3, 1),
    (2, 8, 8, 16, 32, 3, 2),
    (2, 7, 7, 64, 64, 1, 1),
    (2, 7, 7, 64, 96, 1, 2),
    (2, 9, 9, 4, 8, 5, 1),
    (2, 11, 10, 3, 64, 7, 2),
]
_CHOICE = ("case", "return", "constant")
PADDINGS = ["SAME", "VALID", ((2, 1), (0, 3))]


def _reference(x, k, strides, padding):
    return lax.conv_general_dilated(x, k, strides, padding, dimension_numbers=NHWC)


# Each compiles two gradients: by default only one does
@pytest.mark.drawn
@pytest.mark.parametrize(
    "shape, padding",
    [
        pytest.param(shape, padding, marks=() if (i + j) % 21 == 0 else pytest.mark.slow)
        for (i, shape), (j, padding) in itertools.product(enumerate(SHAPES), enumerate(PADDINGS))
        if padding != "VALID" or min(shape[1:3]) >= shape[5]  # else there is no output
    ],
)
def test_values_and_gradients_equal_lax(shape, padding):
    b, h, w, c, o, size, stride = shape
    keys = jax.random.split(jax.random.key(0), 3)
    x, k = jax.random.normal(keys[0], (b, h, w, c)), jax.random.normal(keys[1], (size, size, c, o))

    def both(function):
        y, back = jax.vjp(lambda x, k: function(x, k, (stride, stride), padding), x, k)
        return y, *back(jax.random.normal(keys[2], y.shape))

    mine, theirs = jax.jit(lambda: both(conv))(), jax.jit(lambda: both(_reference))()
    for a, b in zip(mine, theirs, strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-5 * float(jnp.abs(b).max()) + 1e-6)


def test_each_form_is_tested():
    forms = {
        (use.__name__, use((shape[6],) * 2, (shape[5], shape[5], *shape[3:5])))
        for shape in SHAPES
        for use in (conv_cpu.forward_form, conv_cpu.input_form, conv_cpu.kernel_form)
    }
    assert {form for _, form in forms} == {"blocks", "rows", "lax"}
    assert len(forms) == 6  # two of each


def test_half_precision_is_rounded_once():
    x = jax.random.normal(jax.random.key(0), (2, 8, 8, 128), jnp.bfloat16)
    k = jax.random.normal(jax.random.key(1), (3, 3, 128, 128), jnp.bfloat16)
    y = conv(x, k)
    exact = _reference(x.astype(jnp.float32), k.astype(jnp.float32), (1, 1), "SAME")
    assert y.dtype == jnp.bfloat16
    np.testing.assert_allclose(y.astype(jnp.float32), exact, rtol=2**-7, atol=1e-3)


@pytest.mark.slow
def test_vmap_over_images_and_kernels():
    x = jax.random.normal(jax.random.key(0), (3, 2, 8, 8, 128))
    k = jax.random.normal(jax.random.key(1), (3, 3, 3, 128, 128))
    mine, theirs = jax.vmap(conv)(x, k), [_reference(a, b, (1, 1), "SAME") for a, b in zip(x, k, strict=True)]
    np.testing.assert_allclose(mine, jnp.stack(theirs), atol=2e-4)


@pytest.mark.slow
@pytest.mark.parametrize("check_vma", [True, False])
def test_gradient_inside_shard_map(check_vma):
    mesh = Mesh(jax.devices()[:4], ("data",))
    x = jax.random.normal(jax.random.key(0), (8, 8, 8, 128))
    k = jax.random.normal(jax.random.key(1), (3, 3, 128, 128))

    def local(x, k):
        if check_vma:
            k = lax.pcast(k, "data", to="varying")
        value, gradient = jax.value_and_grad(lambda k: jnp.sum(conv(x, k) ** 2))(k)
        return lax.psum((value, gradient), "data")

    sharded = jax.shard_map(local, mesh=mesh, in_specs=(P("data"), P()), out_specs=P(), check_vma=check_vma)
    expected = jax.value_and_grad(lambda k: jnp.sum(_reference(x, k, (1, 1), "SAME") ** 2))(k)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1), jax.jit(sharded)(x, k), expected
    )


@pytest.mark.parametrize("platform", ["tpu", "cuda", "rocm"])
@pytest.mark.parametrize("shape", [(2, 8, 8, 128, 128, 3, 1), (2, 28, 28, 6, 12, 6, 2)])
def test_other_platforms_get_the_plain_program(platform, shape):
    b, h, w, c, o, size, stride = shape
    x, k = jnp.ones((b, h, w, c)), jnp.ones((size, size, c, o))

    def text(function):
        def loss(x, k):
            return jnp.sum(function(x, k, (stride, stride), "SAME"))

        lowered = jax.jit(jax.value_and_grad(loss, argnums=(0, 1))).trace(x, k)
        return lowered.lower(lowering_platforms=(platform,)).as_text()

    def operations(program):
        # The choice of platform leaves a one-branch `case` of a constant, which XLA inlines.
        names = set(re.findall(r"stablehlo\.\w+", program)) - {f"stablehlo.{n}" for n in _CHOICE}
        return {name: len(re.findall(rf"{name}\b[( \"]", program)) for name in names}

    mine, theirs = operations(text(conv)), operations(text(_reference))
    assert mine["stablehlo.convolution"] == 3
    assert mine == theirs


def test_other_layouts_and_groups_go_to_lax():
    x, k = jnp.ones((2, 8, 8, 4)), jnp.ones((3, 3, 2, 6))
    mine = conv(x, k, (1, 1), "SAME", feature_group_count=2)
    theirs = lax.conv_general_dilated(x, k, (1, 1), "SAME", dimension_numbers=NHWC, feature_group_count=2)
    np.testing.assert_array_equal(mine, theirs)
    nchw = ("NCHW", "OIHW", "NCHW")
    mine = conv(jnp.ones((2, 4, 8, 8)), jnp.ones((6, 4, 3, 3)), dimension_numbers=nchw)
    assert mine.shape == (2, 6, 8, 8)


_BITS = """
import hashlib, os, sys
os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={sys.argv[1]}"
import jax, numpy as np
from chipwise.models.conv import conv
digest = hashlib.sha256()
nets = [(32, 28, 1, 6, 3, 1), (32, 28, 6, 12, 6, 2), (16, 32, 3, 64, 3, 1), (8, 32, 128, 128, 3, 1)]
nets += [(128, 32, 16, 16, 3, 1), (128, 32, 16, 32, 3, 2), (128, 16, 32, 32, 3, 1), (128, 7, 64, 64, 1, 1)]
for b, n, c, o, k, s in nets:
    x = jax.random.normal(jax.random.key(0), (b, n, n, c))
    w = jax.random.normal(jax.random.key(1), (k, k, c, o))
    y, back = jax.vjp(lambda x, w: conv(x, w, (s, s)), x, w)
    for a in (y, *jax.jit(back)(y)):
        digest.update(np.asarray(a).tobytes())
print(digest.hexdigest())
"""


@pytest.mark.slow
def test_bits_do_not_depend_on_the_number_of_devices():
    runs = [
        subprocess.run([sys.executable, "-c", _BITS, n], capture_output=True, text=True, check=True).stdout
        for n in ("1", "8")
    ]
    assert runs[0] == runs[1]
