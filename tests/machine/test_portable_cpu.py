"""Portable mode: asked for in time, refused elsewhere, and what it does to a program."""

import json
import platform
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import chipwise as cw
from chipwise.machine.fingerprint import this_machine
from chipwise.machine.products import apart

RNG = np.random.default_rng(0)


def normal(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


def child(code, environment):
    left_out = ("JAX_DISABLE_MOST_OPTIMIZATIONS", "JAX_COMPILATION_CACHE_DIR")  # as users compile
    environment = {name: value for name, value in environment.items() if name not in left_out}
    run = [sys.executable, "-c", code]
    done = subprocess.run(run, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


# ---- the process


@pytest.mark.skipif(platform.machine() != "x86_64", reason="a mode of x86-64 CPUs")
def test_nothing_is_contracted_and_the_chip_says_so(clean_environment):
    code = """
import json, os
import chipwise as cw
from chipwise.machine import detect, portable_cpu
cw.machine.portable(); cw.machine.portable()
machine = detect.detect(platform="cpu")
flags = os.environ["XLA_FLAGS"]
print(json.dumps([machine.chip, portable_cpu.active(machine.devices[0]), flags.count("max_isa")]))
"""
    assert child(code, clean_environment) == [f"{this_machine().cpu}, portable", True, 1]


@pytest.mark.skipif(platform.machine() != "x86_64", reason="a mode of x86-64 CPUs")
def test_flags_that_come_late_are_refused(clean_environment):
    code = """
import json, os
import jax
import chipwise as cw
from chipwise.machine import detect, portable_cpu
jax.jit(lambda x: x + 1)(1.0)  # XLA reads its flags
codes = []
for call in (cw.machine.portable, lambda: detect.detect(platform="cpu").chip):
    try:
        call()
    except cw.errors.DeviceError as error:
        codes.append(error.code)
    os.environ["XLA_FLAGS"] = " ".join(portable_cpu.FLAGS)  # as another part of the program may do
print(json.dumps(codes))
"""
    assert child(code, clean_environment) == ["portable-too-late"] * 2


@pytest.mark.parametrize(("name", "value"), [("machine", "aarch64"), ("system", "Windows")])
def test_another_processor_or_system_is_refused(monkeypatch, name, value):
    monkeypatch.setattr(platform, name, lambda: value)
    with pytest.raises(cw.errors.DeviceError) as caught:
        cw.machine.portable()
    assert (caught.value.code, caught.value.facts[name]) == ("portable-elsewhere", value)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="a mode of x86-64 CPUs")
def test_the_first_state_is_portable_too(clean_environment):
    code = """
import json
import jax, jax.numpy as jnp, numpy as np
import chipwise as cw
cw.machine.portable()
task = cw.Task(
    init=lambda key: ({"w": jax.nn.initializers.orthogonal()(key, (4, 4))}, {}),
    loss=lambda params, state, batch, key, train: (
        {"loss": cw.Sum.of(jnp.square(batch["x"] @ params["w"]).sum(1))}, state
    ),
    train=cw.Arrays(x=np.ones((8, 4), np.float32)),
)
try:
    cw.fit(cw.Recipe(task=task, batch=4, replicas=1, duration="1st", optimizer=cw.sgd(0.1)), progress="none")
except cw.errors.DeviceError as error:
    print(json.dumps([error.code, error.facts["operation"]]))
"""
    assert child(code, clean_environment | {"JAX_PLATFORMS": "cpu"})[0] == "portable-operation"


# ---- the programs


def equations(jaxpr):
    for one in jaxpr.eqns:
        yield one
        for value in one.params.values():
            for each in value if isinstance(value, tuple) else (value,):
                inner = getattr(each, "jaxpr", each)
                if hasattr(inner, "eqns"):
                    yield from equations(inner)


def close(function, *arguments):
    expected, made = jax.jit(function)(*arguments), jax.jit(apart(function))(*arguments)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-4), expected, made)
    assert jax.tree.map(lambda a: a.dtype, expected) == jax.tree.map(lambda a: a.dtype, made)


PRODUCTS = [
    "ij,jk->ik",
    "ji,jk->ik",
    "ij,kj->ik",
    "ji,kj->ki",
    "bqhd,bkhd->bhqk",
    "bhqk,bkhd->bqhd",
    "abij,abjk->aik",
]


@pytest.mark.parametrize("form", PRODUCTS)
def test_products_are_the_same_products(form):
    sizes = dict(zip("ijkbqhdake", (5, 7, 4, 2, 3, 4, 6, 3, 4, 2), strict=True))
    left, right = ([sizes[axis] for axis in part] for part in form.split("->")[0].split(","))
    close(lambda x, y: jnp.einsum(form, x, y), normal(*left), normal(*right))


def test_a_convolution_without_output_stays():
    f = lambda x, k: lax.conv_general_dilated(x, k, (1, 1), "VALID")  # noqa: E731
    close(f, normal(2, 3, 2, 2), normal(4, 3, 3, 3))


@pytest.mark.parametrize("seed", range(4))
def test_convolutions_and_their_gradients_are_the_same(seed):
    rng = np.random.default_rng(seed)
    dimensions, groups = 1 + seed % 3, int(rng.choice([1, 2, 3]))
    inputs, outputs = groups * int(rng.integers(1, 4)), groups * int(rng.integers(1, 4))
    draw = lambda low, high: [int(n) for n in rng.integers(low, high, dimensions)]  # noqa: E731
    how = {
        "window_strides": draw(1, 3),
        "padding": [(int(a), int(b)) for a, b in rng.integers(0, 3, (dimensions, 2))],
        "lhs_dilation": draw(1, 3),
        "rhs_dilation": draw(1, 3),
        "feature_group_count": groups,
    }
    x, k = normal(2, inputs, *draw(5, 9)), normal(outputs, inputs // groups, *draw(1, 4))
    f = lambda x, k: lax.conv_general_dilated(x, k, **how)  # noqa: E731
    close(f, x, k)
    close(jax.grad(lambda x, k: jnp.sin(f(x, k)).sum(), (0, 1)), x, k)


def test_what_stands_in_loops_and_branches_is_found():
    def f(x):
        def body(carry, y):
            return lax.cond(y.sum() > 0, lambda c: c.T @ x, lambda c: jnp.sin(c).T @ x, carry), y[0]

        return jax.checkpoint(lambda s: lax.scan(body, s, x)[0])(x)

    square = normal(6, 6)
    close(f, square)
    close(jax.grad(lambda x: f(x).sum()), square)
    solved = lambda x: jax.scipy.sparse.linalg.cg(lambda v: x.T @ (x @ v) + v, x[0])[0]  # noqa: E731
    close(solved, square)
    left = [
        one.invars[0]
        for function in (f, solved)
        for one in equations(jax.make_jaxpr(apart(function))(square).jaxpr)
        if one.primitive.name == "dot_general"
        and one.params["dimension_numbers"][0][0] != (one.invars[0].aval.ndim - 1,)
    ]
    assert left == []


@pytest.mark.parametrize(
    ("function", "code"),
    [
        (lambda x: jnp.linalg.qr(x)[0], "portable-operation"),
        (lambda x: jax.jit(jnp.linalg.eigh)(x)[0], "portable-operation"),
        (lambda x: jax.scipy.linalg.solve_triangular(x, x[0]), "portable-operation"),
        (lambda x: jax.lax.ragged_dot(x, x[None], jnp.asarray([4])), "portable-operation"),
        (lambda x: x.astype(jnp.float16) + 1, "portable-float16"),
    ],
)
def test_what_differs_between_processors_is_refused(function, code):
    with pytest.raises(cw.errors.DeviceError) as caught:
        jax.make_jaxpr(apart(function))(normal(4, 4))
    assert caught.value.code == code
