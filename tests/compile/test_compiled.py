"""`cw.compile.on`: any function, for one device of a chip that is not here."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import chipwise as cw
from chipwise.base.errors import DeviceError, RecipeError
from chipwise.base.facts import fact
from chipwise.compile import compiled, processes
from chipwise.compile.absent_device import UNTUNED
from chipwise.compile.answers import Answer
from chipwise.compile.hlo.kernel import Kernel
from compilers import answer
from refusals import refused

X = jax.ShapeDtypeStruct((512, 1024), jnp.bfloat16)
W = jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16)


def chain(x, *weights):
    for w in weights:
        x = jnp.tanh(x @ w)
    return x


def compiler(platform):
    """A mark for a test that needs the compiler."""
    try:
        processes.COMPILERS[platform]()
    except DeviceError:
        return pytest.mark.skip(reason=f"needs the compiler of {platform}")
    return ()


REAL = [pytest.param("v5e", marks=compiler("tpu")), pytest.param("t4", marks=compiler("cuda"))]


@pytest.mark.parametrize("target", REAL)
def test_the_chips_own_compiler_answers(target):
    made = cw.compile.on(target, chain, X, W, W)
    assert made.function == "chain" and made.flops == 2 * 2 * 512 * 1024 * 1024
    assert made.memory_bytes["arguments"] == 2 * (512 + 2 * 1024) * 1024
    assert made.memory_bytes["outputs"] == 2 * 512 * 1024
    assert made.needed_bytes == sum(made.memory_bytes.values()) < made.available_bytes
    assert 0 < made.seconds.low < made.seconds.value < made.seconds.high
    assert sum(one.seconds for one in made.kernels) == pytest.approx(made.seconds.value)
    assert sum(one.count * one.flops for one in made.kernels) == made.flops
    assert made.hlo.startswith("HloModule") and "bf16[1024,1024]" in made.hlo


@pytest.mark.slow
@pytest.mark.parametrize("target", REAL)
def test_a_larger_product_takes_longer_and_a_donated_argument_no_memory(target):
    large = jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16)
    assert cw.compile.on(target, chain, large, large).seconds.low > 0
    seconds = [cw.compile.on(target, chain, one, one).seconds.value for one in (W, large)]
    assert 20 * seconds[0] < seconds[1]
    double = jax.jit(lambda x: x * 2, donate_argnums=0)
    assert cw.compile.on(target, double, large).memory_bytes["outputs"] == 0


# ---- without a compiler


@pytest.fixture
def asked(monkeypatch):
    """The requests, which get a made-up answer."""
    requests = []

    def compile_each(given):
        requests.extend(given)
        for i, request in enumerate(given):
            yield i, answer(request)

    monkeypatch.setattr(compiled, "compile_each", compile_each)
    return requests


def test_a_jitted_function_is_asked_about_as_it_is(asked):
    step = jax.jit(lambda state, x: state["w"] + x["a"] @ x["b"], donate_argnums=0)
    made = cw.compile.on("a100", step, {"w": W}, {"a": W, "b": np.zeros((1024, 1024), jnp.bfloat16)})
    (request,) = asked
    assert request.donate == (0,) and request.text and request.platform == "cuda"
    assert request.options == UNTUNED and request.topology["topology"] == "1x1x1"
    assert made.chip.startswith("A100") and made.seconds.value > 0
    assert [one.seconds for one in made.kernels] == sorted((k.seconds for k in made.kernels), reverse=True)


def test_a_question_with_the_text_has_a_key_of_its_own(asked):
    cw.compile.on("t4", chain, X, W)
    (request,) = asked
    assert request.key("1") != type(request)(**{**vars(request), "text": False}).key("1")


@pytest.mark.parametrize(
    "target, topology",
    [("v5e", "v5e:1x1"), ("v5e-1", "v5e:1x1"), ("v4", "v4:2x2x1"), ("tpu7x", "tpu7x:1x1x1")],
)
def test_a_tpu_is_its_smallest_slice(monkeypatch, target, topology):
    requests = []

    def compile_each(given):
        requests.extend(given)
        kernel = Kernel("fusion", "matmul", seconds=1e-3, flops=1e9, bytes=1e6)
        yield 0, Answer("chain", argument_bytes=3, output_bytes=4, kernels=[kernel], hlo="HloModule")

    monkeypatch.setattr(compiled, "compile_each", compile_each)
    made = cw.compile.on(target, chain, X, W)
    (request,) = requests
    assert request.topology["topology_name"] == topology and request.chip == made.chip
    assert request.clock_GHz and request.memory_GBps and request.options is None
    assert made.needed_bytes == 7 and made.hlo == "HloModule"
    assert [note.code for note in made.notes] == ["compiled-by-own-compiler"]


def test_it_is_printed_and_is_json(asked):
    made = cw.compile.on("t4", chain, X, W)
    text = str(made)
    assert "chain on one device of T4" in text and "matmul f32" in text and "net.py:1" in text
    assert "matmul f32" in made._repr_html_() and "hlo=" not in repr(made)
    told = json.loads(json.dumps(made.to_json()))
    assert told["needed_bytes"] == made.needed_bytes and told["kernels"][0]["name"]
    assert told["seconds"].keys() == {"value", "low", "high"} and "hlo" in told


def test_numbers_and_arrays_are_arguments(asked):
    cw.compile.on("t4", functools.partial(chain), jnp.ones((4, 4)), np.ones((4, 4), np.float32))
    cw.compile.on("t4", lambda x, factor: x * factor, X, 2.0)
    assert len(asked) == 2


@pytest.mark.parametrize("wrong", ["text", object(), lambda: 1])
def test_another_argument_is_named(asked, wrong):
    with refused(RecipeError, "compile-argument", what="args[1]['key']"):
        cw.compile.on("t4", lambda x, y: x, X, {"key": wrong})
    assert not asked


def test_an_unknown_chip_is_refused(asked):
    with refused(DeviceError, "target-unknown", target="v55"):
        cw.compile.on("v55", chain, X, W)


@pytest.mark.parametrize("target, chip", [("v5e-8", "v5e"), ("a100:8", "a100")])
def test_several_devices_are_refused(asked, target, chip):
    with refused(DeviceError, "compile-devices", target=target, devices=8, chip=chip):
        cw.compile.on(target, chain, X, W)


def test_a_function_over_devices_of_this_machine_is_refused(asked):
    mesh = Mesh(np.array(jax.devices()[:2]), ("d",))
    cut = NamedSharding(mesh, PartitionSpec("d"))
    with refused(DeviceError, "compile-devices", function="spread", devices=2):

        def spread(x):
            return jax.lax.with_sharding_constraint(x, cut) + 1

        cw.compile.on("t4", spread, X)
    assert not asked
    cw.compile.on("t4", jnp.tanh, jax.device_put(np.ones((4, 4), np.float32), cut))  # only its shape counts
    assert len(asked) == 1


def test_a_functions_own_error_passes_through(asked):
    with pytest.raises(jax.errors.TracerBoolConversionError):
        cw.compile.on("t4", lambda x: x if x.sum() > 0 else -x, X)
    assert not asked


def test_a_callback_to_the_host_is_refused(asked):
    def calls(x):
        return jax.pure_callback(np.tanh, x, x)

    with refused(DeviceError, "refused-callback", program="calls"):
        cw.compile.on("t4", calls, X)


def test_what_the_compiler_refuses_is_an_error(monkeypatch):
    problem = fact("refused-for-memory", program="chain", needed=3, available=2, message="no")
    monkeypatch.setattr(compiled, "compile_each", lambda given: iter([(0, Answer("chain", problem))]))
    with refused(DeviceError, "refused-for-memory", needed=3, available=2):
        cw.compile.on("v5e", chain, X, W)


@pytest.mark.parametrize("target, extra", [("v5e", "plan-tpu"), ("t4", "plan-gpu")])
def test_without_the_compiler_the_line_to_type_is_said(monkeypatch, tmp_path, target, extra):
    monkeypatch.setenv("CHIPWISE_CACHE", str(tmp_path))
    monkeypatch.setattr(processes, "installed", lambda package: None)
    with refused(DeviceError, "compiler-missing", install=f"pip install 'chipwise[{extra}]'"):
        cw.compile.on(target, chain, X, W)


def test_fused_attention_needs_no_cudnn_here(asked):
    q = jax.ShapeDtypeStruct((2, 128, 4, 64), jnp.bfloat16)
    cw.compile.on("a100", lambda q: cw.models.attention(q, q, q, causal=True), q)
    (request,) = asked
    assert "fmha" in jax.export.deserialize(bytearray(request.program.body)).mlir_module()
