"""`examples/plan_tokens.py`: the two programs of a text, on absent chips."""

import runpy
from pathlib import Path

import jax
import pytest

import chipwise as cw
from compilers import no_gpu_compiler as no_gpu_compiler

PLANS = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "plan_tokens.py"))
SIZES = {"depth": 2, "width": 32, "heads": 4, "context": 128, "vocabulary": 257}
SET = [f"{name}={value}" for name, value in SIZES.items()]
ASKED = ["gpt2-124m", *(word for one in SET for word in ("--set", one)), "--prompt", "40", "--tokens", "20"]


def nbytes(tree):
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def test_memory_is_weights_and_cache():
    recipe = cw.load("gpt2-124m", SET, synthetic=True)
    weights = sum(x.size for x in jax.tree.leaves(jax.eval_shape(recipe.task.init, jax.random.key(0))[0]))
    _, (_, model, cache, *rows) = PLANS["programs"](recipe, 8, 40, 60)
    assert nbytes(model[0]) == 2 * weights  # in bfloat16, as they are computed with
    assert nbytes(cache) == 2 * SIZES["depth"] * 8 * 60 * SIZES["width"] * 2  # keys and values, in bfloat16
    assert [row.shape for row in rows] == [(8,), (8,)]


@pytest.mark.slow
def test_the_programs_write_a_text():
    recipe = cw.load("gpt2-124m", SET, synthetic=True)
    (prefill, *before), (token, *after) = PLANS["programs"](recipe, 2, 40, 60)
    cache = jax.eval_shape(prefill, *before)
    again, drawn, position = jax.eval_shape(token, *after)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), cache) == jax.tree.map(
        lambda x: (x.shape, x.dtype), again
    )
    assert drawn.shape == position.shape == (2,)


@pytest.mark.slow
def test_a_line_for_each_number_of_texts_and_chip(capsys):
    PLANS["main"]([*ASKED, "--on", "t4=3600,l4,a100:8", "--texts", "2,4"])
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split()[-1] == "$/M" and len(lines) == 6
    rows = [line.split() for line in lines]
    assert [row[:2] for row in rows] == [[chip, n] for n in "24" for chip in ("t4", "l4", "a100:8")]
    rate, dollars = (float(cell.replace(",", "")) for cell in rows[0][-2:])
    assert dollars == pytest.approx(1e6 / rate, rel=0.02)
    assert rows[1][-1] == "-" and "type a100" in lines[2]


@pytest.mark.parametrize(
    "asked", [["mnist"], [*ASKED, "--tokens", "100"]], ids=["no decode", "above the context"]
)
def test_impossible_lengths_are_refused(asked, capsys):
    with pytest.raises(SystemExit):
        PLANS["main"](asked)
    assert "has no decode for" in capsys.readouterr().err
