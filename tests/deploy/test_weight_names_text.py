"""Weights of Hugging Face's BERT, GPT-2, ViT, ResNet and Llama in the built-in models."""

from functools import partial

import jax
import numpy as np
import pytest

import chipwise as cw
from chipwise.deploy.pretrained import Weights, pretrained
from chipwise.deploy.weight_names import translate
from chipwise.interop.nnx import functional
from chipwise.models.bert import BERT
from chipwise.models.llama import Llama
from chipwise.models.resnet50 import ResNet50
from chipwise.models.transformer import GPT2, ViT

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


def test_padding_is_not_seen_and_text_is():
    task = task_of(partial(BERT, **SIZES, classes=3))
    task = Weights("w", translate(of_bert(), "bert"), "0" * 64).start(task)
    short, more = TOKENS[1:2, :7], TOKENS[1:2].copy()
    whole = outputs(task, TOKENS)[1]
    np.testing.assert_allclose(outputs(task, short)[0], whole, rtol=1e-5)
    more[0, 7] = 5
    assert np.abs(outputs(task, more)[0] - whole).max() > 1e-4


# ---- against Hugging Face's own

theirs = pytest.mark.filterwarnings("ignore")


def compared(torch, tmp_path, net, names, make, x, call):
    for tensor in net.state_dict().values():
        if tensor.is_floating_point():
            tensor.mul_(0.9).add_(0.05 * torch.rand(tensor.shape))
    net.save_pretrained(tmp_path)  # files have other names than modules, since transformers 5
    weights = pretrained(tmp_path, names=names)
    with torch.no_grad():
        want = call(net.eval()).numpy()
    ours = outputs(weights.start(task_of(make)), x)
    np.testing.assert_allclose(ours, want, rtol=0, atol=2e-5 * np.abs(want).max())


@theirs
def test_berts_logits(torch, tmp_path):
    pytest.importorskip("transformers")
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    settings = dict(hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32)
    net = BertForSequenceClassification(
        BertConfig(vocab_size=20, max_position_embeddings=16, num_labels=3, **settings)
    )
    tokens = torch.from_numpy(TOKENS).long()
    make, mask = partial(BERT, **SIZES, classes=3), (tokens != 0).long()
    compared(torch, tmp_path, net, "bert", make, TOKENS, lambda n: n(tokens, attention_mask=mask).logits)


@theirs
def test_gpt2s_states(torch, tmp_path):
    pytest.importorskip("transformers")
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    net = GPT2LMHeadModel(GPT2Config(vocab_size=20, n_positions=16, n_embd=8, n_layer=2, n_head=2))
    tokens = torch.from_numpy(TOKENS).long()
    make = partial(GPT2, **SIZES)
    compared(torch, tmp_path, net, "gpt2", make, TOKENS, lambda n: n.transformer(tokens).last_hidden_state)


@theirs
def test_vits_logits(torch, tmp_path):
    pytest.importorskip("transformers")
    from transformers import ViTConfig, ViTForImageClassification

    torch.manual_seed(0)
    settings = dict(hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32)
    net = ViTForImageClassification(
        ViTConfig(image_size=16, patch_size=4, layer_norm_eps=1e-6, num_labels=5, **settings)
    )
    images = RNG.normal(size=(3, 16, 16, 3)).astype(np.float32)
    make = partial(ViT, image=16, patch=4, depth=2, width=8, heads=2, classes=5)
    first = torch.from_numpy(images.transpose(0, 3, 1, 2).copy())
    compared(torch, tmp_path, net, "vit", make, images, lambda n: n(first).logits)


@theirs
def test_resnets_logits(torch, tmp_path):
    pytest.importorskip("transformers")
    from transformers import ResNetConfig, ResNetForImageClassification

    torch.manual_seed(0)
    net = ResNetForImageClassification(
        ResNetConfig(
            embedding_size=64, hidden_sizes=[256, 512, 1024, 2048], depths=[2, 1, 1, 1], num_labels=5
        )
    )
    images = RNG.normal(size=(2, 40, 40, 3)).astype(np.float32)
    make = partial(ResNet50, blocks=(2, 1, 1, 1), classes=5)
    first = torch.from_numpy(images.transpose(0, 3, 1, 2).copy())
    compared(torch, tmp_path, net, "resnet50", make, images, lambda n: n(first).logits)


@theirs
def test_llamas_states(torch, tmp_path):
    pytest.importorskip("transformers")
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"vocabulary": 20, "depth": 2, "width": 16, "heads": 4, "kv_heads": 2, "hidden": 24}
    net = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=20, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, rms_norm_eps=1e-5, tie_word_embeddings=False,
            rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
        )
    )  # fmt: skip
    tokens = torch.from_numpy(TOKENS).long()
    make = partial(Llama, **sizes, keep="nothing_saveable")
    compared(torch, tmp_path, net, "llama", make, TOKENS, lambda n: n.model(tokens).last_hidden_state)
