"""The published rows as programs: sizes as published, every line accounted for, programs that trace."""

import math
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.plan_accuracy import rows as table
from benchmarks.plan_accuracy.flash import flash_attention, kernel_flops, stand_in
from benchmarks.plan_accuracy.nets_transformer import GPT, causal_attention
from benchmarks.plan_accuracy.rows import PUBLISHED, RUNS, rows

from chipwise.planner.operations import trace

PARAMETERS = {  # line: as torchvision, timm, llm-foundry, llm.c and the model cards state
    2: 25_557_032,
    20: 336_232_258,
    47: 11_689_512,
    49: 60_192_808,
    50: 22_050_664,
    51: 5_288_548,
    52: 59_880_472,
    53: 68_883_240,
    54: 21_458_488,
    56: 6_738_415_616,
    60: 125_311_488,
    61: 355_985_408,
    62: 1_315_950_592,
    66: 2_651_837_440,
    67: 6_658_859_008,
    68: 760_470_528,
    89: 68_976_648_192,
    90: 70_553_706_496,
    95: 8_030_261_248,
    100: 405_853_388_800,
    127: 6_573_120,
    130: 250_698,
}
NAMED = {77: 22e9, 78: 52e9, 79: 16e9, 80: 32e9, 81: 64e9, 82: 128e9, 87: 256e9, 88: 1024e9}  # "GPT 22B"


@pytest.fixture(scope="module")
def by_line():
    return {row.line: row for row in rows()}


def test_every_line_of_the_file_is_accounted_for(by_line):
    lines = len(PUBLISHED.read_text(encoding="utf-8").splitlines())
    assert set(by_line) == set(RUNS) == set(range(2, lines + 1))
    for row in by_line.values():
        assert row.usable != bool(row.why_not)
        assert row.usable <= (row.program is not None and row.measured > 0 and row.per_device_batch > 0)


def test_parameters_are_the_published_ones(by_line):
    assert {line: by_line[line].parameters for line in PARAMETERS} == PARAMETERS


def test_models_named_by_their_size_have_about_that(by_line):
    for line, size in NAMED.items():
        assert by_line[line].parameters == pytest.approx(size, rel=0.03)


def test_gpt2_has_124_439_808_parameters():
    assert GPT(12, 768, 12, 3072, 50257, 1024, tied=True).parameters == 124_439_808


def test_throughputs_are_converted_into_examples(by_line):
    assert by_line[60].measured == pytest.approx(1_090_678 / 2048)
    assert by_line[95].measured == pytest.approx(7243.378 * 16 / 8192)
    assert by_line[117].measured == pytest.approx(50_000 * 24 / 79)
    # 3.393 s a step in the recipe's log, of 48 sequences
    assert by_line[95].measured == pytest.approx(48 / 3.393, rel=1e-3)


def test_flops_are_counted_as_in_the_recipes_logs():
    # "TFLOP/s/device: 419.485, Tokens/s/device: 7243.378" on v6e; on 7x after attention was halved
    for model, tokens, tflops, causal in (
        (table.LLAMA3_8B, 7243.378, 419.485, False),
        (table.LLAMA3_70B, 920.965, 443.385, False),
        (table.LLAMA2_70B, 905.021, 402.274, False),
        (table.LLAMA3_70B, 2670.55, 1199.7, True),
        (table.LLAMA3_405B, 499.77, 1261.4, True),
    ):
        assert model.training_flops_per_token(causal=causal) * tokens / 1e12 == pytest.approx(
            tflops, rel=1e-4
        )


@pytest.mark.parametrize("line", [20, 50, 60, 82, 95, 105, 127])
def test_programs_trace(by_line, line):
    for part in by_line[line].parts:
        function, specs = part.program()
        out = jax.eval_shape(function, *specs)
        assert all(math.prod(leaf.shape) >= 0 for leaf in jax.tree.leaves(out))


@pytest.mark.slow
def test_attention_in_blocks_is_attention():
    keys = jax.random.split(jax.random.key(0), 3)
    args = [jax.random.normal(key, (2, 64, heads, 8)) for key, heads in zip(keys, (4, 2, 2), strict=True)]

    def gradients(attend):
        return jax.grad(lambda *qkv: jnp.sum(jnp.sin(attend(*qkv))), (0, 1, 2))(*args)

    for got, want in zip(gradients(flash_attention), gradients(causal_attention), strict=True):
        assert jnp.allclose(got, want, atol=1e-5)


def test_a_stand_in_leaves_out_the_attention_of_a_kernel_and_nothing_else():
    spec = jax.ShapeDtypeStruct((2, 512, 2, 64), jnp.bfloat16)

    def flops(attend):
        def gradients(*qkv):
            y, back = jax.vjp(attend, *qkv)
            return y, back(y)

        return trace(gradients, spec, spec, spec).flops

    # Four blocks of queries compute five eighths of the square; a kernel of many blocks half of it.
    assert flops(flash_attention) == pytest.approx(2 * kernel_flops(2, 512, 64, 1) * 5 / 4)
    assert flops(stand_in) == 0


def test_split_layers_have_an_equal_share_of_the_matrices():
    whole = GPT(1, 256, 8, 512, 1000, 256, kind="llama", tpu=True)
    split = GPT(1, 256, 8, 512, 1000, 256, kind="llama", tpu=True, tensor=4)

    def sizes(model):
        params, _, _ = model.layer_program(1)[1]
        return sum(math.prod(p.shape) for p in params if len(p.shape) > 1)

    assert sizes(whole) == 4 * sizes(split)
