"""Trained language models go on with prompts, by `decode` of the task."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import chipwise as cw
from chipwise.base.errors import DataError, DivergedError, RecipeError, RunError
from chipwise.data.pack.tokenise import BYTES, TextForm
from chipwise.deploy.generation import Completion
from refusals import refused

pytestmark = pytest.mark.slow

PROMPTS = [[5, 6, 7], [9], [1, 2, 3, 4, 5, 6, 7, 8]]
SIZES = {"depth": 2, "width": 32, "heads": 4, "context": 24, "vocabulary": 257}
SETTINGS = {"gpt2-124m": SIZES, "llama-8b": SIZES | {"kv_heads": 2, "hidden": 48, "shards": 1}}
ONE = cw.On(devices=1)
generate = cw.deploy.generate


def settings(name, precision="f32", **more):
    return [f"{k}={v}" for k, v in (SETTINGS[name] | more | {"precision": precision}).items()]


def model(name="gpt2-124m", precision="f32", **more):
    """A model with random weights that are large enough to say different things."""
    recipe = cw.load(name, settings(name, precision=precision, **more), synthetic=True)
    params, state = recipe.task.init(jax.random.key(3))
    params = jax.tree.map(lambda x: np.asarray(x) * (8 if x.ndim > 1 else 1), params)
    return cw.deploy.Trained(recipe, params, state)


@pytest.fixture(scope="module")
def gpt2():
    return model()


@pytest.fixture(scope="module")
def said(gpt2):
    return generate(gpt2, PROMPTS, tokens=12, seed=7, on=ONE)


@pytest.mark.parametrize("name", SETTINGS)
def test_greedy_is_the_whole_forward_pass_token_by_token(name):
    known = model(name)
    task, found = known.recipe.task, generate(known, PROMPTS, tokens=8, temperature=0, on=ONE, batch=2)
    texts = np.zeros((3, SIZES["context"]), np.int32)
    for row, both in enumerate(zip(found.prompts, found.tokens, strict=True)):
        texts[row, : len(sum(both, ()))] = sum(both, ())
    whole, _ = jax.jit(lambda p: task.decode(p, {}, texts, None, jnp.zeros(3, jnp.int32)))(known.params)
    last = jax.jit(task.predict)(known.params, {}, {"token": texts})  # by the net as it is trained
    np.testing.assert_allclose(whole[:, -1], last, rtol=1e-4, atol=1e-4)
    for row, (prompt, new) in enumerate(zip(found.prompts, found.tokens, strict=True)):
        places = np.arange(len(prompt) - 1, len(prompt) + 7)
        assert new == tuple(np.argmax(whole[row, places], axis=-1).tolist())
    assert len({token for tokens in found.tokens for token in tokens}) > 4


def test_other_prompts_and_more_devices_change_no_token(gpt2, said):
    assert generate(gpt2, PROMPTS, tokens=12, seed=7, on=cw.On(devices=3)).tokens == said.tokens
    beside = generate(gpt2, [PROMPTS[0], [40] * 20, PROMPTS[2], [3]], tokens=12, seed=7, on=ONE)
    assert [beside.tokens[0], beside.tokens[2]] == [said.tokens[0], said.tokens[2]]
    together = generate(gpt2, PROMPTS, tokens=12, seed=7, on=ONE, batch=2)
    assert together.tokens == said.tokens  # float32: another block rounds too little to change a draw


def test_the_seed_and_the_number_of_a_prompt_change_the_draw(gpt2, said):
    other = generate(gpt2, [PROMPTS[0]] * 2, tokens=12, seed=8, on=ONE)
    assert len({*other.tokens, said.tokens[0]}) == 3


def test_the_most_probable_of_one_is_greedy(gpt2):
    greedy = generate(gpt2, PROMPTS[:1], tokens=6, temperature=0, on=ONE)
    assert generate(gpt2, PROMPTS[:1], tokens=6, top_k=1, temperature=3.0, on=ONE).tokens == greedy.tokens


def test_pieces_are_the_text_and_a_stop_ends_it(gpt2, said):
    pieces = {0: "", 1: "", 2: ""}
    end = said.tokens[1][4]

    def show(number, piece):
        pieces[number] += piece

    found = generate(gpt2, PROMPTS, tokens=12, seed=7, on=ONE, stop=[end], show=show)
    for number, tokens in enumerate(found.tokens):
        assert list(tokens) == list(said.tokens[number])[: [*said.tokens[number], end].index(end)]
    assert list(pieces.values()) == found.texts and 0 < found.first_seconds <= found.seconds


@pytest.mark.parametrize("length", [23, 24])
def test_the_context_ends_a_text(gpt2, length):
    found = generate(gpt2, [[1] * length], tokens=9, on=ONE)
    assert [len(tokens) for tokens in found.tokens] == [24 - length + 1]


def test_bad_input_is_refused_in_a_line(gpt2, tmp_path):
    for prompt, code in (([1] * 25, "prompt-above-context"), ([257], "prompt-tokens"), ([], "prompt-tokens")):
        with refused(RecipeError, code):
            generate(gpt2, [prompt], on=ONE)
    for name, value in (("tokens", 0), ("temperature", -1.0), ("top_k", 0), ("batch", 0), ("seed", -1)):
        with refused(RecipeError, "generate-argument", **{name: value}):
            generate(gpt2, ["a"], on=ONE, **{name: value})
    with refused(RunError, "not-a-run"):
        generate(tmp_path / "nowhere", ["a"])
    with refused(RecipeError, "task-without-decode"):
        digits = cw.load("digits", synthetic=True)
        generate(cw.deploy.Trained(digits, *digits.task.init(jax.random.key(0))), ["a"], on=ONE)
    broken = jax.tree.map(lambda x: x * np.nan, gpt2.params)
    with refused(DivergedError, "logits-not-finite"):
        generate(dataclasses.replace(gpt2, params=broken), ["a"], on=ONE)


def test_numbers_without_a_tokenizer():
    known = model(vocabulary=300, depth=1)
    found = generate(known, ["12 7", [12, 7]], tokens=2, temperature=0, on=ONE)
    assert found.prompts == [(12, 7), (12, 7)]
    assert found.texts == ["".join(f" {token}" for token in tokens) for tokens in found.tokens]
    with refused(RecipeError, "prompt-without-tokenizer"):
        generate(known, ["Once"], on=ONE)


class Bigrams(nnx.Module):
    """The least decoder: the last two tokens choose the next one. It keeps the tokens."""

    def __init__(self, rngs):
        self.table = nnx.Embed(512, 16, rngs=rngs)

    def decode(self, tokens, cache, position):
        kept = jnp.zeros_like(tokens) if cache is None else cache
        places = position[:, None] + jnp.arange(tokens.shape[1])[None]
        rows = jnp.arange(len(tokens))[:, None]
        kept = kept.at[rows, places].set(tokens)
        before = jnp.where(places > 0, kept[rows, places - 1], 0)
        return self.table(16 * before + tokens % 16), kept


def test_an_own_decoder_and_a_wrong_one():
    init, _ = cw.nnx.functional(Bigrams)
    decode = cw.nnx.decoder(Bigrams)
    data = cw.Arrays(token=np.zeros((4, 9), np.uint16))
    task = cw.Task(init=init, loss=lambda *_: ({}, {}), train=data, decode=decode, context=100)
    recipe = cw.Recipe(task=task, batch=4, duration="1ep", optimizer=cw.sgd(lr=0.1))
    params, state = init(jax.random.key(0))
    known = cw.deploy.Trained(recipe, jax.tree.map(np.asarray, params), state)
    prompt, table = [3, 5], np.asarray(params["table"]["embedding"])
    expected = list(prompt)
    for _ in range(70):
        expected.append(int(np.argmax(table[16 * expected[-2] + expected[-1] % 16])))
    found = generate(known, [prompt], tokens=70, temperature=0, on=ONE)
    assert list(found.tokens[0]) == expected[2:]
    with refused(RecipeError, "task-context"):
        dataclasses.replace(task, context=None)


def test_a_text_that_ends_it_is_neither_returned_nor_shown(gpt2):
    letters = [ord(c) for c in "on\u00e9 ab. c"]  # é has two tokens
    letters[2:3] = "\u00e9".encode()
    pieces = []
    said = Completion(0, (65,), 50, BYTES.decode, [". x", ". c", 256], lambda _, piece: pieces.append(piece))
    for token in letters:
        said.take(token)
    assert (said.text, said.end, "".join(pieces)) == ("on\u00e9 ab", "stop", "on\u00e9 ab")
    assert not any("\ufffd" in piece or "." in piece for piece in pieces) and len(pieces) > 3
    cut = Completion(0, (65,), 3, BYTES.decode, [], lambda _, piece: pieces.append(piece))
    for token in letters[:3]:
        cut.take(token)
    assert (cut.text, cut.end, cut.new) == ("on\ufffd", "length", letters[:3])


def test_half_precision_keeps_half_a_cache():
    known = model(precision="bf16", depth=1)
    found = generate(known, PROMPTS, tokens=6, temperature=0, on=ONE)
    assert all(len(tokens) == 6 for tokens in found.tokens)
    kinds = jax.eval_shape(
        lambda p: known.recipe.task.decode(
            p, {}, jnp.zeros((1, 4), jnp.int32), None, jnp.zeros(1, jnp.int32)
        ),
        jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16), known.params),
    )
    assert kinds[0].dtype == jnp.float32 and {x.dtype for x in kinds[1]} == {jnp.dtype(jnp.bfloat16)}


def tokenizer(path, *words):
    tokenizers = pytest.importorskip("tokenizers")
    kinds = {word: number for number, word in enumerate(["<eos>", "one", "two", "three", *words])}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(kinds, unk_token="<eos>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(path))
    return path


def test_text_is_cut_by_a_tokenizer(tmp_path):
    known, four = model(vocabulary=4, depth=1), tokenizer(tmp_path / "4.json")
    found = generate(known, ["one two", ""], tokens=3, temperature=0, on=ONE, tokenizer=four)
    assert found.prompts == [(1, 2), (0,)] and all(0 not in tokens for tokens in found.tokens)
    words = ["<eos>", "one", "two", "three"]
    assert found.texts[0].split() == [words[i] for i in found.tokens[0]]
    with refused(DataError, "tokenizer-vocabulary", kinds=5, expected=4):
        generate(known, ["one"], tokenizer=tokenizer(tmp_path / "5.json", "four"), on=ONE)


def test_the_pack_keeps_its_tokenizer_and_another_is_refused(tmp_path):
    (tmp_path / "text.txt").write_text("one two three one " * 20)
    text = TextForm(tokens=9, tokenizer=tokenizer(tmp_path / "4.json"))
    cw.pack(tmp_path / "text.txt", tmp_path / "pack", text=text, split=0.2)
    small = [f"{k}={v}" for k, v in (SIZES | {"context": 8, "vocabulary": 16, "depth": 1}).items()]
    recipe = cw.load("gpt2-124m", small, str(tmp_path / "pack"))  # a vocabulary may be padded
    params, state = recipe.task.init(jax.random.key(0))
    known = cw.deploy.Trained(recipe, jax.tree.map(np.asarray, params), state)
    (tmp_path / "4.json").unlink()
    assert generate(known, ["one three"], tokens=1, on=ONE).prompts == [(1, 3)]
    with refused(DataError, "tokenizer-vocabulary", kinds=6, expected=4):
        generate(known, ["one"], tokenizer=tokenizer(tmp_path / "6.json", "four", "five"), on=ONE)


# ---- beside Hugging Face's own


def theirs(name):
    """A net of Hugging Face, and the recipe of the same net."""
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 257, "bos_token_id": None, "eos_token_id": None}
    if name == "gpt2-124m":
        config = transformers.GPT2Config(n_positions=256, n_embd=32, n_layer=2, n_head=4, **sizes)
        return transformers.GPT2LMHeadModel(config), cw.load(
            name, settings(name, context=256), synthetic=True
        )
    about = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "rms_norm_eps": 1e-5}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0}}
    if name == "qwen3":
        config = transformers.Qwen3Config(
            tie_word_embeddings=True, head_dim=16, **about, **heads, **rope, **sizes
        )
        return transformers.Qwen3ForCausalLM(config), None  # the folder says what its recipe is
    config = transformers.LlamaConfig(tie_word_embeddings=False, **about, **heads, **rope, **sizes)
    return transformers.LlamaForCausalLM(config), cw.load(name, settings(name, context=256), synthetic=True)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [*SETTINGS, "qwen3"])
def test_200_greedy_tokens_are_those_of_transformers(torch, tmp_path, name):
    torch.manual_seed(0)
    net, recipe = theirs(name)
    for part, tensor in net.state_dict().items():
        if tensor.ndim > 1:  # as large as it takes to say different things
            tensor.mul_(60 if "wpe" in part else 4 if "wte" in part or "embed" in part else 20)
    net.save_pretrained(tmp_path)
    if recipe is None:
        recipe = cw.pretrained(tmp_path).recipe(settings=["precision=f32", "context=256", "shards=1"])
        task = recipe.task
    else:
        task = cw.pretrained(tmp_path, names=name.split("-")[0]).start(recipe.task)
    params, state = jax.jit(task.init)(jax.random.key(0))
    known = cw.deploy.Trained(recipe, jax.tree.map(np.asarray, params), state)
    found = generate(known, PROMPTS, tokens=200, temperature=0, on=ONE, batch=3)
    for prompt, tokens in zip(PROMPTS, found.tokens, strict=True):
        given = {"max_new_tokens": 200, "do_sample": False, "attention_mask": torch.ones(1, len(prompt))}
        with torch.no_grad():
            want = net.eval().generate(torch.tensor([prompt]), **given)[0, len(prompt) :]
        assert list(tokens) == want.tolist()
    assert len({token for tokens in found.tokens for token in tokens}) > 20


@pytest.mark.parametrize("temperature", [1e-31, 1e-39, 5e-324])
def test_a_temperature_of_next_to_nothing_takes_the_most_probable_token(gpt2, temperature):
    greedy, low = (generate(gpt2, PROMPTS, tokens=6, temperature=t, on=ONE) for t in (0, temperature))
    assert low.tokens == greedy.tokens


@pytest.mark.parametrize("wrong", [{"seed": 1.5}, {"prompts": [[2.2]]}, {"top_k": 2.5}, {"stop": [1.5]}])
def test_no_number_is_cut(gpt2, wrong):
    with refused(RecipeError, "wrong-kind", what=next(iter(wrong))):
        generate(gpt2, **{"prompts": ["a"], "tokens": 1, "on": ONE} | wrong)
