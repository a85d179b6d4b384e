"""Names of Hugging Face's BERT and GPT-2 here; `test_huggingface.py` compares the logits."""

from functools import partial

import jax
import numpy as np
import pytest

import chipwise as cw
from chipwise.deploy.pretrained import Weights
from chipwise.deploy.weight_names import translate
from chipwise.interop.nnx import functional
from chipwise.models.bert import BERT
from chipwise.models.transformer import GPT2

RNG = np.random.default_rng(0)
SIZES = {"vocabulary": 20, "context": 16, "depth": 2, "width": 8, "heads": 2}
TOKENS = RNG.integers(1, 20, (3, 12)).astype(np.int32)
TOKENS[1, 7:] = 0  # padding


def task_of(make):
    init, apply = functional(lambda rngs: make(rngs=rngs))

    def predict(params, state, inputs):
        return apply(params, state, inputs["x"], None, False)[0]

    data = cw.Arrays(x=np.zeros((8, 2), np.int32), label=np.zeros(8, np.int32))
    return cw.Task(init=init, loss=lambda *given: None, train=data, predict=predict)


def outputs(task, x):
    params, state = jax.jit(task.init)(jax.random.key(0))
    return np.asarray(jax.jit(task.predict)(params, state, {"x": x}))


def drawn(shapes):
    return {name: RNG.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def of_bert(prefix="bert."):
    shapes = {f"{prefix}embeddings.{n}_embeddings.weight": (rows, 8) for n, rows in (
        ("word", 20), ("position", 16), ("token_type", 2)
    )}  # fmt: skip
    layers = {"embeddings.LayerNorm": (8,), "pooler.dense": (8, 8)}
    for i in range(2):
        at = f"encoder.layer.{i}"
        layers |= {f"{at}.attention.self.{part}": (8, 8) for part in ("query", "key", "value")}
        layers |= {f"{at}.attention.output.dense": (8, 8), f"{at}.attention.output.LayerNorm": (8,)}
        layers |= {f"{at}.intermediate.dense": (32, 8), f"{at}.output.dense": (8, 32)}
        layers |= {f"{at}.output.LayerNorm": (8,)}
    for name, shape in {**{prefix + n: s for n, s in layers.items()}, "classifier": (3, 8)}.items():
        shapes |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    return drawn(shapes)


def of_gpt2():
    shapes = {"wte.weight": (20, 8), "wpe.weight": (16, 8), "h.0.attn.bias": (1, 1, 16, 16)}
    layers = {"ln_f": (8,)}
    for i in range(2):
        layers |= {f"h.{i}.ln_1": (8,), f"h.{i}.ln_2": (8,), f"h.{i}.attn.c_attn": (8, 24)}
        layers |= {f"h.{i}.attn.c_proj": (8, 8), f"h.{i}.mlp.c_fc": (8, 32), f"h.{i}.mlp.c_proj": (32, 8)}
    for name, shape in layers.items():
        shapes |= {f"{name}.weight": shape, f"{name}.bias": shape[-1:]}
    return drawn(shapes)


@pytest.mark.parametrize("prefix", ["bert.", ""])
def test_a_bert_is_whole_stacked_turned_and_joined(prefix):
    arrays = of_bert(prefix)
    made = translate(arrays, "bert")
    found = Weights("w", made, "0" * 64).match(task_of(partial(BERT, **SIZES, classes=3)))
    assert (found.missing, found.unused, found.shapes) == ([], [], {})
    self_attention = f"{prefix}encoder.layer.1.attention.self"
    for i, part in enumerate(("query", "key", "value")):
        own = np.s_[8 * i : 8 * (i + 1)]
        kernel, bias = (made[f"blocks.stack.attention.qkv.{n}"][1] for n in ("kernel", "bias"))
        np.testing.assert_array_equal(kernel[:, own], arrays[f"{self_attention}.{part}.weight"].T)
        np.testing.assert_array_equal(bias[own], arrays[f"{self_attention}.{part}.bias"])
    words = arrays[f"{prefix}embeddings.word_embeddings.weight"]
    np.testing.assert_array_equal(made["words.embedding"], words)  # a table is no matrix to turn


def test_old_names_of_norms_are_known():
    arrays = {"bert.embeddings.LayerNorm.gamma": np.ones(8), "bert.embeddings.LayerNorm.beta": np.zeros(8)}
    assert set(translate(arrays, "bert")) == {"norm.scale", "norm.bias"}


def test_a_part_that_is_missing_leaves_the_others_as_they_are():
    arrays = of_bert()
    del arrays["bert.encoder.layer.0.attention.self.key.weight"]
    weights = Weights("w", translate(arrays, "bert"), "0" * 64)
    found = weights.match(task_of(partial(BERT, **SIZES, classes=3)))
    assert found.missing == ["params.blocks.stack.attention.qkv.kernel"]
    assert set(found.unused) == {"blocks.1.attention.qkv.kernel"} | {
        f"blocks.stack.attention.{part}.kernel" for part in ("query", "value")
    }


def test_a_gpt2_is_whole_and_its_matrices_stay():
    arrays = of_gpt2()
    made = translate(arrays, "gpt2")
    found = Weights("w", made, "0" * 64).match(task_of(partial(GPT2, **SIZES)))
    assert (found.missing, found.unused, found.shapes) == ([], ["h.0.attn.bias"], {})
    np.testing.assert_array_equal(made["blocks.stack.hidden.kernel"][0], arrays["h.0.mlp.c_fc.weight"])


@pytest.mark.slow
def test_padding_is_not_seen_and_text_is():
    task = task_of(partial(BERT, **SIZES, classes=3))
    task = Weights("w", translate(of_bert(), "bert"), "0" * 64).start(task)
    short, more = TOKENS[1:2, :7], TOKENS[1:2].copy()
    whole = outputs(task, TOKENS)[1]
    np.testing.assert_allclose(outputs(task, short)[0], whole, rtol=1e-5)
    more[0, 7] = 5
    assert np.abs(outputs(task, more)[0] - whole).max() > 1e-4
