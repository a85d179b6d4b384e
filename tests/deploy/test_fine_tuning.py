"""A published model is planned by its `config.json` alone."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from chipwise.base.errors import DataError, RecipeError
from chipwise.cli import main
from chipwise.deploy import fine_tuning as module
from chipwise.deploy.fine_tuning import fine_tuning, is_described
from chipwise.recipe.source import spec_of
from chipwise.step.state import abstract_state
from refusals import refused

QWEN3 = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 96,
    "vocab_size": 1000,
    "tie_word_embeddings": True,
    "rope_theta": 1000000,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 40960,
    "attention_bias": False,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
}
VIT = {
    "model_type": "vit",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 256,
    "image_size": 32,
    "patch_size": 8,
    "layer_norm_eps": 1e-12,
    "hidden_act": "gelu",
}


def folder(tmp_path, config, name="Qwen3-tiny"):
    (tmp_path / name).mkdir()
    (tmp_path / name / "config.json").write_text(json.dumps(config))
    return str(tmp_path / name)


def test_the_sizes_are_those_of_the_config_and_settings_come_after_them(tmp_path):
    path = folder(tmp_path, QWEN3)
    recipe = fine_tuning(path)
    assert (recipe.name, recipe.batch, recipe.replicas, recipe.shards) == ("Qwen3-tiny", 8, 8, 1)
    assert spec_of(recipe.task.train)["token"].shape == (module.CONTEXT + 1,)
    params = abstract_state(recipe).params
    attention = params["blocks"]["stack"]["attention"]
    assert attention["q"]["kernel"].shape == (3, 64, 4 * 32) and "head" not in params
    other = fine_tuning(path, ["context=128", "batch=16"])
    assert other.batch == 16 and spec_of(other.task.train)["token"].shape == (129,)
    short = fine_tuning(folder(tmp_path, QWEN3 | {"max_position_embeddings": 64}, "short"))
    assert spec_of(short.task.train)["token"].shape == (65,)


@pytest.mark.parametrize(("stated", "dtype"), [*module.TYPES.items(), (None, jnp.float32)])
def test_adapters_alone_are_trained_beside_weights_as_stated(tmp_path, stated, dtype):
    path = folder(tmp_path, QWEN3 | {"torch_dtype": stated})
    recipe = fine_tuning(path, ["context=16"], rank=2)
    state = abstract_state(recipe)
    trained, frozen = (jax.tree.leaves(tree) for tree in (state.params, state.frozen))
    assert {leaf.dtype for leaf in trained} == {np.dtype(np.float32)}
    assert {leaf.dtype for leaf in frozen} == {np.dtype(dtype)}
    inside = 4 * 32 + 2 * 32 * 2 + 64  # of the outputs of q, k, v and out
    assert sum(leaf.size for leaf in trained) == 3 * 2 * (3 * 64 + 4 * 32 + inside + 3 * (64 + 96))


def test_an_epsilon_costs_nothing_and_an_activation_does(tmp_path):
    assert fine_tuning(folder(tmp_path, VIT, "vit")).batch == 64
    with refused(RecipeError, "huggingface-setting", setting="hidden_act", there="relu"):
        fine_tuning(folder(tmp_path, VIT | {"hidden_act": "relu"}, "relu"))


@pytest.mark.parametrize(
    "more", [{"torch_dtype": "float8_e4m3fn"}, {"dtype": {"text": "bfloat16"}}, {"quantization_config": {}}]
)
def test_weights_of_a_type_that_is_not_planned_are_refused(tmp_path, more):
    path = folder(tmp_path, QWEN3 | more)
    with refused(DataError, "config-type", known=list(module.TYPES)):
        fine_tuning(path, rank=2)


@pytest.mark.parametrize("context", ["40960", [4], 0, True])
def test_a_context_is_a_number_of_tokens(tmp_path, context):
    with refused(DataError, "config-context"):
        fine_tuning(folder(tmp_path, QWEN3 | {"max_position_embeddings": context}))


RESNET = {"model_type": "resnet", "embedding_size": 64, "depths": [3, 4, 6, 3], "layer_type": "bottleneck"}
BERT = {"model_type": "bert", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
GPT2 = {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 32, "vocab_size": 100}


@pytest.mark.parametrize("config", [RESNET, BERT, GPT2, VIT, QWEN3], ids=lambda one: one["model_type"])
def test_every_family_is_planned_for_a_short_run(tmp_path, config):
    assert fine_tuning(folder(tmp_path, config)).duration == "1000st"


def test_a_built_in_recipe_is_not_hidden_by_a_folder(tmp_path, monkeypatch):
    folder(tmp_path, GPT2, "gpt2-124m")
    monkeypatch.chdir(tmp_path)
    assert not is_described("gpt2-124m") and is_described("./gpt2-124m")
    assert not is_described("x" * 300)


def test_other_families_and_damaged_files_are_refused(tmp_path):
    with refused(DataError, "huggingface-family", kind="gemma3_text"):
        fine_tuning(folder(tmp_path, {"model_type": "gemma3_text"}, "gemma"))
    damaged = folder(tmp_path, [], "damaged")
    assert is_described(damaged) and not is_described(str(tmp_path)) and not is_described("digits")
    with refused(DataError, "weights-damaged"):
        fine_tuning(damaged)


def test_the_config_alone_is_asked_of_the_hub(tmp_path, monkeypatch):
    hub = pytest.importorskip("huggingface_hub")
    path, asked = folder(tmp_path, QWEN3), []

    def snapshot_download(name, allow_patterns):
        asked.append((name, allow_patterns))
        return path

    monkeypatch.setattr(hub, "snapshot_download", snapshot_download)
    assert fine_tuning("hf://Qwen/Qwen3-0.6B").name == "Qwen3-0.6B"
    assert asked == [("Qwen/Qwen3-0.6B", ["config.json"])]

    def offline(name, allow_patterns):
        raise OSError("no network")

    monkeypatch.setattr(hub, "snapshot_download", offline)
    with refused(DataError, "weights-hub", name="Qwen/Qwen3-0.6B config.json"):
        fine_tuning("hf://Qwen/Qwen3-0.6B")


@pytest.mark.slow
def test_a_plan_of_one_says_what_is_planned(tmp_path, capsys):
    path = folder(tmp_path, QWEN3)
    assert main(["plan", path, "--on", "v5e-1", "--set", "context=128", "--lora", "4", "--json"]) == 0
    shown = capsys.readouterr()
    assert "adapters of rank 4" in shown.err and "uint16[129]" in shown.err
    (plan,) = json.loads(shown.out)["plans"]
    assert plan["problem"] is None and plan["memory"]["fits"]


@pytest.mark.parametrize(
    ("words", "code"), [(["digits", "--lora", "4"], "--lora 4"), (["FOLDER", "--synthetic"], "--synthetic")]
)
def test_what_a_plan_of_one_cannot_take_is_a_line(tmp_path, capsys, words, code):
    path = folder(tmp_path, QWEN3)
    assert main(["plan", *(path if one == "FOLDER" else one for one in words), "--on", "t4"]) == 2
    assert code in capsys.readouterr().err
