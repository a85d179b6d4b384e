"""What a remat keeps, counted in the programs of its gradient, for the marks of every transformer."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

import chipwise as cw
from chipwise.chips.targets import parse
from chipwise.compile.exports import cudnn_assumed, export_program
from chipwise.interop.nnx import functional
from chipwise.models import bert, llama, transformer
from chipwise.models.attention import attention
from chipwise.models.chip_traits import traced_for
from chipwise.models.llama import Llama
from chipwise.models.remat import inside
from chipwise.models.transformer import GPT2
from refusals import refused

TINY_GPT = partial(GPT2, vocabulary=11, context=6, depth=2, width=8, heads=2)
TINY_LLAMA = partial(Llama, vocabulary=11, depth=2, width=8, heads=2, kv_heads=1, hidden=16)
LARGER = {"vocabulary": 11, "depth": 2, "width": 128, "heads": 2}  # for which chips have kernels
NETS = {
    "gpt": partial(GPT2, context=512, **LARGER),
    "llama": partial(Llama, kv_heads=1, hidden=16, keep="nothing_saveable", **LARGER),
}


def gradient(net, tokens=(2, 6)):
    """The gradient of a net, and its arguments' shapes."""
    init, apply = functional(lambda rngs: net(rngs=rngs))
    params, state = jax.eval_shape(init, jax.random.key(0))
    params = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.bfloat16), params)

    def loss(params, tokens):
        return jnp.sum(apply(params, state, tokens, None, True)[0].astype(jnp.float32))

    return jax.grad(loss), (params, jax.ShapeDtypeStruct(tokens, jnp.int32))


def operations(net, name):
    function, shapes = gradient(net)
    made = jax.make_jaxpr(function)(*shapes).jaxpr
    return sum(equation.primitive.name == name for one in inside(made) for equation in one.eqns)


# A block without remat: 7 products, 2 for the gradient of each, and 2 + 5 of attention.
@pytest.mark.slow
@pytest.mark.parametrize(
    "keep, products",
    [
        ("nothing_saveable", 7 + 14 + 7 + 6 + 2),  # `down` is not asked for again
        ("query_proj", 7 + 14 + 7 + 5 + 2),
        ("query_proj+key_proj+value_proj", 7 + 14 + 7 + 3 + 2),
        ("context", 7 + 14 + 7 + 6),
        ("query_proj+value_proj+context+mlpwi_0", 7 + 14 + 7 + 3),  # keys, `out` and `up`
        (("out_proj", "mlpwi_0", "mlpwi_1"), 7 + 14 + 7 + 3 + 2),
        ("query_proj+key_proj+value_proj+context+out_proj+mlpwi_0+mlpwi_1+mlpwo", 7 + 14 + 7),
        ("dots_with_no_batch_dims_saveable", 7 + 14 + 7),
    ],
)
@pytest.mark.drawn(share=0.25)
def test_products_that_are_kept_are_not_computed_again(keep, products):
    assert operations(partial(TINY_LLAMA, keep=keep), "dot_general") == products


@pytest.mark.slow
@pytest.mark.parametrize(
    "keep, products",
    [
        ("nothing_saveable", 4 + 8 + 7 + 3 + 2),
        ("query_proj", 4 + 8 + 7 + 3 + 2),  # as one product with keys and values
        ("context+mlpwi", 4 + 8 + 7 + 2),
        ("query_proj+key_proj+value_proj+context+out_proj+mlpwi+mlpwo", 4 + 8 + 7),
    ],
)
@pytest.mark.drawn(share=0.25)
def test_products_of_gpt_that_are_kept(keep, products):
    assert operations(partial(TINY_GPT, keep=keep), "dot_general") == products


KERNELS = {
    "a100": ("cuda", "@__cudnn$fmhaSoftmax("),
    "v5e-1": ("tpu", 'kernel_name = "splash_mha_fwd'),
    "v100": ("cuda", "stablehlo.while"),
}


def every_net_and_chip(*quick):
    """All pairs; those that are not `quick` are slow."""
    pairs = [(net, chip) for net in NETS for chip in KERNELS]
    slow = [pytest.param(*pair, marks=pytest.mark.slow) for pair in pairs if pair not in quick]
    return pytest.mark.parametrize("net, chip", [*quick, *slow])


def runs(text, kernel):
    """How often a module's text runs `kernel`, the body of a loop once. JAX 0.10 lowers the blocks of an
    unrolled loop to calls of one function, and JAX 0.12 to copies of it."""
    parts = re.split(r"func\.func \w+ @([\w.]+)\(", text)
    functions = dict(zip(parts[1::2], parts[2::2], strict=True))

    def of(name):
        called = re.findall(r"\bcall @([\w.]+)\(", functions[name])
        return functions[name].count(kernel) + sum(of(one) for one in called if one in functions)

    return of("main")


@pytest.mark.slow
@every_net_and_chip(("gpt", "a100"))
@pytest.mark.drawn(share=0.25)
def test_a_kept_attention_runs_once_and_its_output_is_kept_once(net, chip):
    platform, kernel = KERNELS[chip]

    def counted(keep):
        """The kernel's runs, and the arrays as large as the inputs of all blocks that the forward pass
        makes."""
        function, shapes = gradient(partial(NETS[net], keep=keep), (2, 512))
        with traced_for(parse(chip).chip):
            made = export_program(function, shapes, platform)
            with cudnn_assumed(False):
                jaxpr = jax.make_jaxpr(function)(*shapes).jaxpr
        text = jax.export.deserialize(bytearray(made.body)).mlir_module()
        loops = (e for one in inside(jaxpr) for e in one.eqns if e.primitive.name == "scan")
        forward = next(e for e in loops if e.params["length"] == 2)
        return runs(text, kernel), sum(v.aval.size == 2 * 2 * 512 * 128 for v in forward.outvars)

    (again, inputs), (once, kept) = counted("nothing_saveable"), counted("context")
    blocks = 2 if platform == "cuda" else 1  # which are unrolled there, and elsewhere are one loop
    assert once == again - blocks and (inputs, kept) == (1, 2)


@every_net_and_chip()
@pytest.mark.drawn(share=0.25)
def test_marks_do_not_change_a_program(net, chip, monkeypatch):
    """On GPUs with a policy that does not choose by them, as the usual one does there."""
    platform = KERNELS[chip][0]
    policy = {"keep": "dots_saveable"} if platform == "cuda" else {}

    def key():
        with traced_for(parse(chip).chip):
            function, shapes = gradient(partial(NETS[net], **policy), (2, 512))
            return export_program(function, shapes, platform).key

    marked = key()
    for module in (transformer, llama, bert):
        monkeypatch.setattr(module, "checkpoint_name", lambda x, name: x)
    jax.clear_caches()
    assert key() == marked


@pytest.mark.parametrize(
    "policy, name, near",
    [
        ("contxt", "contxt", "context"),
        ("out+contex", "contex", "context"),
        (["out", "value_proj"], "value_proj", None),
        ("dots_savable", "dots_savable", "dots_saveable"),
        ("", "", None),
    ],
)
def test_a_name_that_nothing_has_is_refused(policy, name, near):
    x = jnp.ones((1, 6, 2, 8))
    function = cw.models.remat(lambda x: checkpoint_name(jnp.sin(attention(x, x, x)), "out"), policy)
    with refused(cw.errors.RecipeError, "remat-policy", name=name, near=near):
        jax.grad(lambda x: jnp.sum(function(x)))(x)


@pytest.mark.slow
def test_a_remat_of_names_is_the_same_function():
    init, _ = functional(lambda rngs: TINY_LLAMA(keep="context", rngs=rngs))
    params, _ = jax.jit(init)(jax.random.key(0))
    tokens = jnp.asarray(np.arange(12).reshape(2, 6) % 11, jnp.int32)
    found = []
    for keep in ("everything_saveable", "value_proj+context+mlpwi_0"):
        apply = functional(lambda rngs, keep=keep: TINY_LLAMA(keep=keep, rngs=rngs))[1]
        found.append(
            jax.jit(jax.grad(lambda p, apply=apply: jnp.sum(apply(p, {}, tokens, None, True)[0] ** 3)))(
                params
            )
        )
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5), *found)


def test_a_setting_of_a_recipe_may_be_names():
    sizes = ("depth=2", "width=8", "heads=2", "context=6", "vocabulary=11", "batch=2", "replicas=1")
    tokens = {"token": jax.ShapeDtypeStruct((2, 7), jnp.uint16)}

    def traced(remat):
        task = cw.load("gpt2-124m", [*sizes, f"remat={remat}"], synthetic=True).task
        params, state = jax.eval_shape(task.init, jax.random.key(0))
        jax.eval_shape(lambda *given: task.loss(*given, None, True), params, state, tokens)

    traced("query_proj+mlpwo")
    with refused(cw.errors.RecipeError, "remat-policy", name="mlpwo_0", near="mlpwo"):
        traced("query_proj+mlpwo_0")
