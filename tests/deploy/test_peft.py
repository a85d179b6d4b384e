"""Adapters as PEFT reads them: the arrays give the merged weights, and PEFT computes the same logits."""

import dataclasses
import json

import jax
import numpy as np
import pytest

import chipwise as cw
from chipwise.deploy.model import Trained
from chipwise.step.freeze import whole_params
from chipwise.step.state import init_state
from refusals import refused

SIZES = ["context=16", "vocabulary=20", "depth=2", "width=8", "heads=2"]
MODELS = {
    "gpt2": ("gpt2-124m", [], ("*qkv/kernel", "*/hidden/kernel")),
    "llama": (
        "llama-8b",
        ["kv_heads=1", "hidden=24", "shards=1"],
        ("*/q/kernel", "*/v/kernel", "*down/kernel"),
    ),
}
SCALE = 3 / 2


def model(name, weights=None, **changes):
    """As if trained: B is not zero."""
    built_in, settings, on = MODELS[name]
    recipe = cw.load(built_in, [*SIZES, *settings], synthetic=True)
    task = recipe.task if weights is None else cw.pretrained(weights, names=name).start(recipe.task)
    adapters = cw.recipe.lora(rank=2, alpha=3, on=on)
    recipe = dataclasses.replace(recipe, task=task, precision="f32", **{"adapters": adapters} | changes)
    state = jax.jit(lambda: init_state(recipe, {"token": jax.ShapeDtypeStruct((17,), np.uint32)}))()
    rng = np.random.default_rng(0)
    apart = jax.tree.map(lambda x: rng.normal(size=x.shape).astype(np.float32) / 4, state.params)
    frozen = jax.tree.map(np.asarray, state.frozen)
    return Trained(recipe, whole_params(apart, frozen), {}, apart=apart), frozen


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_its_arrays_give_the_merged_weights(name, tmp_path):
    numpy = pytest.importorskip("safetensors.numpy")
    made, base = model(name)
    folder = cw.export(made, "peft", tmp_path / "a").file
    (folder / "adapter_config.json").write_text("old")
    assert cw.export(made, "peft", folder, fresh=True).bytes > 1000
    config = json.loads((folder / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["fan_in_fan_out"]) == (2, 3, name == "gpt2")
    arrays = numpy.load_file(folder / "adapter_model.safetensors")
    begin, part, there = {
        "gpt2": ("transformer.h.1", "hidden", "mlp.c_fc"),
        "llama": ("model.layers.1", "down", "mlp.down_proj"),
    }[name]
    a, b = (arrays[f"base_model.model.{begin}.{there}.lora_{x}.weight"] for x in "AB")
    assert there in config["target_modules"] and len(arrays) == 2 * 2 * len(MODELS[name][2])
    whole, frozen = (tree["blocks"]["stack"][part]["kernel"][1] for tree in (made.params, base))
    np.testing.assert_allclose(frozen + SCALE * (b @ a).T, whole, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_what_peft_has_no_place_for(tmp_path):
    made, _ = model("gpt2")
    of_functions = dataclasses.replace(
        made.recipe, task=dataclasses.replace(made.recipe.task, init=lambda key: ({}, {}))
    )
    for code, other in (
        ("peft-without-adapters", dataclasses.replace(made, apart=None)),
        ("peft-names", dataclasses.replace(made, recipe=of_functions)),
        ("peft-names", model("gpt2", frozen=("*", "!places/*"))[0]),
    ):
        with refused(cw.errors.RecipeError, code):
            cw.export(other, "peft", tmp_path / "a")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow  # with what `make test-slow` installs
@pytest.mark.filterwarnings("ignore::FutureWarning")  # of transformers, which asks itself by an old name
@pytest.mark.parametrize("name", MODELS)
def test_peft_computes_the_same_logits(name, tmp_path):
    torch = pytest.importorskip("torch")
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    torch.manual_seed(0)
    if name == "gpt2":
        settings = transformers.GPT2Config(vocab_size=20, n_positions=16, n_embd=8, n_layer=2, n_head=2)
        net = transformers.GPT2LMHeadModel(settings)
    else:
        settings = transformers.LlamaConfig(
            vocab_size=20, hidden_size=8, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, rms_norm_eps=1e-5, tie_word_embeddings=False,
            rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
        )  # fmt: skip
        net = transformers.LlamaForCausalLM(settings)
    net.save_pretrained(tmp_path / "base")
    made, _ = model(name, tmp_path / "base")
    cw.export(made, "peft", tmp_path / "adapters")
    tokens = np.random.default_rng(0).integers(0, 20, (3, 17))
    ours = jax.jit(made.recipe.task.predict)(made.params, {}, {"token": tokens.astype(np.uint32)})
    with torch.no_grad():
        whole = peft.PeftModel.from_pretrained(net.eval(), tmp_path / "adapters")
        theirs = whole(torch.from_numpy(tokens[:, -16:])).logits[:, -1].numpy()
    np.testing.assert_allclose(np.asarray(ours), theirs, rtol=0, atol=2e-5 * np.abs(theirs).max())
