"""Models in Hugging Face's folders, both ways: transformers computes the same logits from what is
written, and what transformers saved gives the same logits here."""

import dataclasses
import json
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import chipwise as cw
import published_texts as published
from chipwise.base.errors import DataError, RecipeError
from chipwise.data.pack.tokenise import TextForm, tokenizer_of
from chipwise.deploy.huggingface import ends_of, folder_files, settings_of
from chipwise.deploy.model import Trained
from chipwise.interop.nnx import functional
from chipwise.models.bert import BERT
from chipwise.models.resnet50 import ResNet50
from chipwise.models.transformer import ViT
from refusals import refused

RNG = np.random.default_rng(0)
SIZES = {"vocabulary": 20, "context": 16, "depth": 2, "width": 8, "heads": 2}
TOKENS = RNG.integers(1, 20, (3, 16)).astype(np.int32)
PADDED = np.where(np.arange(16) < [[16], [9], [12]], TOKENS, 0)
IMAGES = RNG.normal(size=(2, 32, 32, 3)).astype(np.float32)


def built_in(name, **more):
    return cw.load(
        name, [f"{k}={v}" for k, v in (SIZES | {"precision": "f32"} | more).items()], synthetic=True
    )


def own(make, x, classes):
    """A recipe of a net that takes `x` as it is."""
    init, apply = functional(make)
    data = cw.Arrays(x=np.repeat(x[:1], 8, 0), label=np.zeros(8, np.int32))
    task = cw.Task(
        init=init, loss=lambda *given: None, train=data, classes=classes,
        predict=lambda params, state, inputs: apply(params, state, inputs["x"], None, False)[0],
    )  # fmt: skip
    return cw.Recipe(task=task, batch=8, duration="1ep", optimizer=cw.sgd(lr=0.1))


VIT = partial(ViT, image=32, patch=8, depth=2, width=8, heads=2, classes=3)
MODELS = {
    "gpt2": (partial(built_in, "gpt2-124m"), TOKENS),
    "llama": (partial(built_in, "llama-8b", kv_heads=1, hidden=24, shards=1), TOKENS),
    "llama, tied and stretched": (
        partial(built_in, "llama-8b", kv_heads=1, hidden=24, shards=1, tied=True, rope_factor=8),
        TOKENS,
    ),
    "qwen3": (
        partial(
            built_in, "llama-8b", kv_heads=1, hidden=24, shards=1, head_dim=6, qk_norm=True, epsilon=1e-6
        ),
        TOKENS,
    ),
    "bert": (lambda: own(lambda rngs: BERT(**SIZES, classes=3, rngs=rngs), PADDED, 3), PADDED),
    "vit": (lambda: own(lambda rngs: VIT(tanh=True, rngs=rngs), IMAGES, 3), IMAGES),
    "resnet": (
        lambda: own(lambda rngs: ResNet50(blocks=(1, 2, 1, 1), width=4, classes=3, rngs=rngs), IMAGES, 3),
        IMAGES,
    ),
}


def moved(recipe, task=None, shift=0.3):
    """As if trained: no array is 0 or 1 as it begins."""
    params, state = jax.jit((task or recipe.task).init)(jax.random.key(0))
    rng = np.random.default_rng(0)
    params, state = jax.tree.map(
        lambda a: np.asarray(a) + shift * rng.random(a.shape, np.float32), (params, state)
    )
    return Trained(recipe, params, state)


def ours(recipe, params, state, x):
    task = recipe.task
    if task.decode is not None:
        start = jnp.zeros(len(x), jnp.int32)
        return np.asarray(jax.jit(lambda p: task.decode(p, {}, x, None, start)[0])(params))
    return np.asarray(jax.jit(task.predict)(params, state, {"x": x}))


def theirs(torch, net, x):
    with torch.no_grad():
        if x.ndim == 4:
            return net.eval()(torch.from_numpy(x.transpose(0, 3, 1, 2).copy())).logits.numpy()
        tokens = torch.from_numpy(x).long()
        return net.eval()(tokens, attention_mask=(tokens != 0).long()).logits.numpy()


@pytest.fixture(scope="module")
def gpt2():
    return moved(MODELS["gpt2"][0]())


def written(model, path):
    pytest.importorskip("safetensors")
    return cw.export(model, "huggingface", path).file


@pytest.mark.slow  # with what `make test-slow` installs
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", MODELS)
def test_the_same_logits_both_ways(torch, tmp_path, kind):
    transformers = pytest.importorskip("transformers")
    make, x = MODELS[kind]
    model = moved(make())
    folder = written(model, tmp_path / "m")
    config = json.loads((folder / "config.json").read_text())
    assert config["model_type"] == kind.partition(",")[0]
    net, told = getattr(transformers, config["architectures"][0]).from_pretrained(
        folder, output_loading_info=True
    )
    assert not any(told.values()), told
    here = ours(model.recipe, model.params, model.state, x)
    assert np.ptp(here) > 0.1
    np.testing.assert_allclose(theirs(torch, net, x), here, rtol=0, atol=1e-5 * max(1, np.abs(here).max()))
    torch.manual_seed(0)
    for tensor in net.state_dict().values():  # other weights, saved by transformers, come here
        if tensor.is_floating_point():
            tensor.mul_(0.8).add_(0.1 * torch.rand(tensor.shape))
    net.save_pretrained(tmp_path / "theirs", max_shard_size="8KB")
    task = cw.pretrained(tmp_path / "theirs").start(model.recipe.task)
    params, state = jax.jit(task.init)(jax.random.key(1))
    want = theirs(torch, net, x)
    atol = 1e-5 * max(1, np.abs(want).max())
    np.testing.assert_allclose(ours(model.recipe, params, state, x), want, rtol=0, atol=atol)


@pytest.mark.slow
def test_what_is_written_without_transformers(gpt2, tmp_path):
    folder = written(gpt2, tmp_path / "m")
    assert {file.name for file in folder.iterdir()} == {"config.json", "model.safetensors"}
    arrays = cw.pretrained(folder / "model.safetensors").arrays
    stack = gpt2.params["blocks"]["stack"]
    np.testing.assert_array_equal(arrays["transformer.h.1.mlp.c_fc.weight"], stack["hidden"]["kernel"][1])
    again = cw.pretrained(folder).start(gpt2.recipe.task).init(jax.random.key(1))[0]
    assert all(jax.tree.leaves(jax.tree.map(np.array_equal, again, gpt2.params)))


@pytest.mark.slow
def test_another_use_of_equal_arrays_is_refused(gpt2, tmp_path):
    folder = written(gpt2, tmp_path / "m")
    weights, config = cw.pretrained(folder), json.loads((folder / "config.json").read_text())
    with refused(RecipeError, "huggingface-setting", setting="n_head", there=2, here=4):
        weights.start(built_in("gpt2-124m", heads=4).task)
    with refused(RecipeError, "weights-of-another-model") as caught:
        weights.start(built_in("gpt2-124m", context=12).task)
    assert "params.places.embedding (16, 8) for (12, 8)" in caught.value.facts["some"]
    for change, setting in (
        ({"activation_function": "relu"}, "activation_function"),
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
        ({"layer_norm_epsilon": None}, "layer_norm_epsilon"),
    ):
        (folder / "config.json").write_text(json.dumps(config | change))
        with refused(RecipeError, "huggingface-setting", setting=setting):
            cw.pretrained(folder).start(gpt2.recipe.task)
    (folder / "config.json").write_text(json.dumps(config | {"activation_function": "gelu_pytorch_tanh"}))
    assert cw.pretrained(folder).start(gpt2.recipe.task)


@pytest.mark.slow
def test_positions_of_a_llama_are_compared_and_tied_tables_are_read(tmp_path):
    model = moved(MODELS["llama"][0]())
    folder = written(model, tmp_path / "m")
    config = json.loads((folder / "config.json").read_text())
    numpy = pytest.importorskip("safetensors.numpy")
    arrays = numpy.load_file(folder / "model.safetensors")
    del arrays["lm_head.weight"]
    numpy.save_file(arrays, folder / "model.safetensors")
    task = model.recipe.task
    with refused(RecipeError, "weights-of-another-model", missing=["params.head.embedding"]):
        cw.pretrained(folder).start(task)

    def starts(**changes):
        (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True} | changes))
        return cw.pretrained(folder).start(task).init(jax.random.key(0))[0]

    read = starts()
    np.testing.assert_array_equal(read["head"]["embedding"], model.params["words"]["embedding"])
    for rope in ({"type": "linear", "factor": 2.0}, {"rope_type": "llama3", "rope_theta": 5e5}, "yarn"):
        with refused(RecipeError, "huggingface-setting", setting="rope_type"):
            starts(rope_parameters=None, rope_scaling=rope)
    starts(rope_parameters=None, rope_scaling=None)  # an older file: rope_theta stands alone
    del config["rope_theta"]
    with refused(RecipeError, "huggingface-setting", setting="rope_theta", there=1e4):
        starts(rope_parameters=None)


SIZED = {k: make for k, (make, x) in MODELS.items() if x is TOKENS}


@pytest.mark.slow
@pytest.mark.parametrize("kind", SIZED)
def test_a_folders_sizes_make_the_recipe(tmp_path, kind):
    """Of weights in bfloat16, as most are published."""
    model = moved(SIZED[kind]())
    folder = written(model, tmp_path / "m")
    numpy = pytest.importorskip("safetensors.numpy")
    narrow = {n: a.astype(jnp.bfloat16) for n, a in numpy.load_file(folder / "model.safetensors").items()}
    numpy.save_file(narrow, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    made = cw.pretrained(folder).recipe(settings=["context=16", "lr=0.5"])
    assert made.optimizer.settings["lr"] != model.recipe.optimizer.settings["lr"] and made.task.context == 16
    read = jax.jit(made.task.init)(jax.random.key(2))[0]
    same = jax.tree.map(lambda a, b: np.array_equal(a, b.astype(jnp.bfloat16)), read, model.params)
    assert all(jax.tree.leaves(same)) and made.task.weights
    told = config | {"num_hidden_layers": "two", "n_layer": "two"}
    (folder / "config.json").write_text(json.dumps(told))
    with refused(RecipeError, "set-not-whole", name="depth", given="two"):
        cw.pretrained(folder).recipe()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "config", "generation"),
    [
        ("gpt2", {"attn_pdrop": 0.1, "embd_pdrop": 0.0, "resid_pdrop": 0.2}, {"top_p": 0.9, "num_beams": 4}),
        ("llama", {"attention_dropout": 0.1}, {"temperature": 0.6, "do_sample": True}),
        ("qwen3", {"attention_dropout": 0.0}, {"repetition_penalty": 1.1}),
        ("bert", {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}, {}),
        ("vit", {"hidden_dropout_prob": 0.3}, {}),
    ],
)
def test_what_a_folder_says_of_training_and_drawing_is_told_by_name(tmp_path, kind, config, generation):
    """The built-in nets have their own dropout, and `generate` takes its own arguments."""
    model = moved(MODELS[kind][0]())
    folder = written(model, tmp_path / "m")
    files = {"config.json": config, "generation_config.json": generation}
    expected = {}
    for name, settings in files.items():
        old = json.loads((folder / name).read_text()) if (folder / name).exists() else {}
        (folder / name).write_text(json.dumps(old | settings))
        if any(settings.values()):
            said = ", ".join(f"{key}={value}" for key, value in sorted(settings.items()) if value)
            expected[f"not read in {name}"] = said
    read = cw.pretrained(folder).start(model.recipe.task).read
    assert {name: ", ".join(sorted(text.split(", "))) for name, text in read.items()} == expected


@pytest.mark.parametrize("kind", ["bert", "vit", "resnet"])
def test_a_folder_of_another_loss_is_refused(kind):
    for one in (None, "single_label_classification"):
        assert settings_of("m", {"model_type": kind, "problem_type": one})
    for one in ("multi_label_classification", "regression"):
        with refused(RecipeError, "huggingface-loss", kind=one):
            settings_of("m", {"model_type": kind, "problem_type": one})


@pytest.mark.slow
@pytest.mark.parametrize("there,here", [("qwen3", "llama"), ("llama", "qwen3")])
def test_norms_of_queries_are_not_left_out(tmp_path, there, here):
    folder = written(moved(SIZED[there](head_dim=6)), tmp_path / "m")
    task = SIZED[here](head_dim=6, epsilon=1e-6 if there == "qwen3" else 1e-5).task
    code = "huggingface-setting" if there == "qwen3" else "weights-of-another-model"
    with refused(RecipeError, code):
        cw.pretrained(folder).start(task)


def test_weights_without_sizes_make_no_recipe(gpt2, tmp_path):
    weights = cw.pretrained(written(gpt2, tmp_path / "m") / "model.safetensors", names="gpt2")
    with refused(DataError, "huggingface-family", kind="None"):
        weights.recipe()


def test_bad_folders_are_one_line(gpt2, tmp_path):
    folder = written(gpt2, tmp_path / "m")
    config = folder / "config.json"
    good = config.read_text()
    for kind in ("qwen2", "gemma3_text", ["gpt2"], None):
        config.write_text(json.dumps({"model_type": kind, "vocab_size": 20}))
        with refused(DataError, "huggingface-family", kind=str(kind)):
            cw.pretrained(folder)
    for text in ("[]", "{", '{"model_type": '):
        config.write_text(text)
        with refused(DataError, "weights-damaged"):
            cw.pretrained(folder)
    config.write_text(good)
    (folder / "generation_config.json").write_text("[]")
    with refused(DataError, "weights-damaged", reason="generation_config.json is no JSON object"):
        cw.pretrained(folder)
    (folder / "generation_config.json").unlink()
    config.unlink()  # nothing says what the names mean
    with refused(RecipeError, "weights-of-another-model", matched=0):
        cw.pretrained(folder).start(gpt2.recipe.task)
    config.write_text(good)
    index = folder / "model.safetensors.index.json"
    for file in ("model-00002-of-00002.safetensors", "../m/model.safetensors", ".."):
        index.write_text(json.dumps({"weight_map": {"wte.weight": "model.safetensors", "wpe.weight": file}}))
        with refused(DataError, "weights-shard", file=file):
            cw.pretrained(folder)
    for text in ("{}", '{"weight_map": []}', '{"weight_map": {"wte.weight": 3}}'):
        index.write_text(text)
        with refused(DataError, "weights-damaged"):
            cw.pretrained(folder)
    index.unlink()
    whole = (folder / "model.safetensors").read_bytes()
    header = json.loads(whole[8 : 8 + int.from_bytes(whole[:8], "little")])
    header["transformer.wpe.weight"]["shape"] = [1 << 30, 8]
    lie = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(lie).to_bytes(8, "little") + lie + whole[-100:])
    with refused(DataError, "weights-damaged"):
        cw.pretrained(folder)


def test_other_models_are_refused_and_leave_nothing(gpt2, tmp_path):
    image = np.zeros((8, 4), np.float32)
    plain = dataclasses.replace(gpt2.recipe.task, init=lambda key: ({}, {}))
    other = own(lambda rngs: nnx.Linear(4, 3, rngs=rngs), image, 3)
    for recipe, net in ((other, "Linear"), (dataclasses.replace(gpt2.recipe, task=plain), "functions")):
        with refused(RecipeError, "huggingface-model", net=net):
            cw.export(Trained(recipe, {}, {}), "huggingface", tmp_path / "m")
    assert not list(tmp_path.iterdir())


def test_a_name_of_the_hub_is_taken_from_its_cache_or_refused(gpt2, tmp_path, monkeypatch):
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    with refused(DataError, "weights-hub", name="some/gpt2"):
        cw.pretrained("hf://some/gpt2")
    kept = tmp_path / "hub" / "models--some--gpt2"
    (kept / "refs").mkdir(parents=True)
    (kept / "refs" / "main").write_text("0" * 40)
    (kept / "snapshots").mkdir()
    written(gpt2, kept / "snapshots" / ("0" * 40))
    assert cw.pretrained("hf://some/gpt2").start(gpt2.recipe.task).weights


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_packs_tokenizer_goes_along(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    words = {word: i for i, word in enumerate(["<eos>", "one", "two", "three"])}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<eos>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "t.json"))
    (tmp_path / "book.txt").write_text("one two three " * 60)
    form = TextForm(tokens=17, tokenizer=tmp_path / "t.json")
    cw.pack(tmp_path / "book.txt", tmp_path / "pack", text=form, split=0.2)
    settings = [f"{k}={v}" for k, v in (SIZES | {"vocabulary": 4}).items()]
    model = moved(cw.load("gpt2-124m", settings, str(tmp_path / "pack")))
    folder = written(model, tmp_path / "m")
    config = json.loads((folder / "config.json").read_text())
    assert (config["bos_token_id"], config["eos_token_id"]) == (0, 0)
    assert json.loads((folder / "tokenizer_config.json").read_text())["eos_token"] == "<eos>"
    transformers = pytest.importorskip("transformers")
    cut = transformers.AutoTokenizer.from_pretrained(folder)
    assert cut("two one").input_ids == [2, 1] and cut.eos_token_id == 0


def packed(path, tokenizer):
    (path / "book.txt").write_text(" ".join(published.TEXTS))
    cw.pack(path / "book.txt", path / "pack", text=TextForm(tokens=17, tokenizer=tokenizer), split=0.2)
    return str(path / "pack")


@pytest.mark.parametrize("kind", published.KINDS)
def test_what_a_folder_says_of_texts_is_written_again(tmp_path, kind):
    made = published.folder(tmp_path / "there", kind)
    there, sizes = (
        tmp_path / "there",
        SIZES | {"vocabulary": made.get_vocab_size(), "kv_heads": 1, "hidden": 24},
    )
    first = moved(
        cw.load("llama-8b", [f"{k}={v}" for k, v in (sizes | {"shards": 1}).items()], synthetic=True)
    )
    for file in written(first, tmp_path / "m").iterdir():
        file.rename(there / file.name)
    config = json.loads((there / "config.json").read_text()) | published.ids(kind, made)
    (there / "config.json").write_text(json.dumps(config))
    told = json.loads((there / "tokenizer_config.json").read_text()) | {"auto_map": {"AutoTokenizer": "x.py"}}
    (there / "tokenizer_config.json").write_text(json.dumps(told))
    own = there / "tokenizer.json"
    recipe = cw.pretrained(there).recipe(packed(tmp_path, own), ["context=16", "shards=1"])
    files, _ = folder_files(dataclasses.replace(first, recipe=recipe))
    assert files["tokenizer.json"] == own.read_bytes()
    again = {
        name: json.loads(files[f"{name}.json"])
        for name in ("config", "tokenizer_config", "generation_config")
    }
    assert again["generation_config"] == json.loads((there / "generation_config.json").read_text())
    assert {name: again["config"][name] for name in published.ids(kind, made)} == published.ids(kind, made)
    del told["auto_map"]
    adds = {"add_bos_token": kind != "qwen3", "add_eos_token": False, "model_max_length": 16}
    assert again["tokenizer_config"] == told | adds
    assert files.get("chat_template.jinja") == (published.CHAT.encode() if kind == "llama3" else None)
    ends = published.ids(kind, made)["eos_token_id"]
    cut = tokenizer_of(recipe.task.train, recipe.task.known_texts)
    assert ends_of(recipe.task.texts, cut) == (ends if isinstance(ends, list) else [ends])


def test_the_end_of_the_pack_ends_texts_beside_those_of_the_folder(tmp_path):
    """A tokenizer alone, whose end is found by its name: the model learns that one."""
    made = published.tokenizer("qwen3")
    made.save(str(tmp_path / "t.json"))
    sizes = SIZES | {"vocabulary": made.get_vocab_size()}
    recipe = cw.load(
        "gpt2-124m", [f"{k}={v}" for k, v in sizes.items()], packed(tmp_path, tmp_path / "t.json")
    )
    said, end = made.token_to_id("<|im_end|>"), made.token_to_id("<|endoftext|>")
    told = {"bos_token_id": None, "eos_token_id": said}
    texts = {"config.json": told, "generation_config.json": told}
    task = dataclasses.replace(recipe.task, texts=texts)
    files, _ = folder_files(moved(dataclasses.replace(recipe, task=task)))
    for name in texts:
        assert json.loads(files[name])["eos_token_id"] == [said, end], name
        assert json.loads(files[name])["bos_token_id"] is None
    plain = json.loads(folder_files(moved(recipe))[0]["config.json"])
    assert (plain["bos_token_id"], plain["eos_token_id"]) == (end, end)
