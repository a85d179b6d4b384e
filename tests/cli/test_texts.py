"""A published language model comes, learns and goes out again: everywhere its texts are the same tokens."""

import json

import jax
import numpy as np
import pytest

import published_texts as published
from chipwise.data.pack import tokenise
from chipwise.data.pack.packing import Packing
from chipwise.deploy.model import trained as trained_model

pytestmark = pytest.mark.slow
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "max_position_embeddings": 64}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
TRAINING = ["context=64", "batch=8", "replicas=2", "duration=4st", "precision=f32", "shards=1"]
PROMPTS = ["Where is the", "Who", "", "<|im_start|>How old</s>"]


def source(torch, transformers, path, kind, tied):
    """A folder as transformers writes it."""
    made = published.tokenizer(kind)
    told = {**SIZES, **published.ids(kind, made), "vocab_size": made.get_vocab_size()}
    names = ("Qwen3Config", "Qwen3ForCausalLM") if kind == "qwen3" else ("LlamaConfig", "LlamaForCausalLM")
    config, net = (getattr(transformers, name) for name in names)
    torch.manual_seed(0)
    net = net(config(**told, tie_word_embeddings=tied))
    with torch.no_grad():
        for tensor in net.parameters():
            if tensor.ndim > 1:
                tensor.mul_(4)  # as large as it takes to say different things
    net.save_pretrained(path)
    published.folder(path, kind)


def packed(chipwise, path, src):
    rows = [json.dumps({"text": text}) + "\n" for text in published.TEXTS]
    (path / "texts.jsonl").write_text("".join(rows))
    words = ["pack", path / "texts.jsonl", path / "tokens", "--tokens", 65, "--split", 0.2]
    told = chipwise(*words, "--tokenizer", src / "tokenizer.json")
    assert told.code == 0, told.err
    return told.out


def trained(chipwise, path, src):
    words = [word for setting in TRAINING for word in ("--set", setting)]
    told = chipwise(
        "train", "llama-8b", "--from", src, "--data", path / "tokens", "--run", path / "run", *words,
        "--devices", 1,
    )  # fmt: skip
    assert told.code == 0, told.err
    return told.err


def goes_on_as_theirs(torch, transformers, run, out):
    """Asserts that transformers makes the same tokens of a text, computes the same logits from them, and
    goes on with the same greedy ones. *Returns* its tokenizer."""
    import chipwise as cw

    net = transformers.AutoModelForCausalLM.from_pretrained(out).eval()
    cut = transformers.AutoTokenizer.from_pretrained(out)
    known = trained_model(run)
    found = cw.deploy.generate(known, PROMPTS, tokens=20, temperature=0, on=cw.On(devices=1))
    decode, start = known.recipe.task.decode, np.zeros(1, np.int32)
    logits = jax.jit(lambda params, tokens: decode(params, {}, tokens, None, start)[0])
    ends = net.generation_config.eos_token_id
    ends = ends if isinstance(ends, list) else [ends]
    for text, prompt, new in zip(PROMPTS, found.prompts, found.tokens, strict=True):
        given = torch.tensor([cut(text).input_ids]).long()
        if not text and not given.numel():
            continue  # a text without a beginning: theirs needs a token
        assert given[0].tolist() == list(prompt)
        here = logits(known.params, given.numpy().astype(np.int32))
        with torch.no_grad():
            mask = torch.ones_like(given)
            there = net(given, attention_mask=mask).logits.numpy()
            whole = net.generate(given, attention_mask=mask, max_new_tokens=20, do_sample=False)
        np.testing.assert_allclose(here, there, rtol=0, atol=1e-5 * np.abs(there).max())
        assert [t for t in whole[0, given.shape[1] :].tolist() if t not in ends] == list(new)
    assert len(set(found.tokens)) > 1
    return cut


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", published.KINDS)
def test_what_came_goes_out_again(chipwise, tmp_path, kind, tied):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    src, out = tmp_path / "src", tmp_path / "out"
    source(torch, transformers, src, kind, tied)
    ends = f"begin {' '.join(published.BEGIN[kind]) or 'none'}, end {published.END[kind]}"
    assert f"documents: {ends}\n" in packed(chipwise, tmp_path, src)
    assert ends in trained(chipwise, tmp_path, src)
    stored = json.loads((tmp_path / "run" / "recipe.json").read_text())["texts"]
    assert (stored["begin"], stored["end"]) == (published.BEGIN[kind], published.END[kind])
    before = transformers.AutoTokenizer.from_pretrained(src)
    sent = transformers.GenerationConfig.from_pretrained(src).to_dict()
    config = json.loads((src / "config.json").read_text())
    for file in src.iterdir():  # the run needs the folder no more
        file.unlink()
    assert chipwise("export", tmp_path / "run", "--to", "huggingface", "--out", out).code == 0
    after = goes_on_as_theirs(torch, transformers, tmp_path / "run", out)
    for text in [*PROMPTS, "a house"]:
        assert after(text).input_ids == before(text).input_ids
        assert after(text, "years").input_ids == before(text, "years").input_ids
    assert (
        len(after("Who").input_ids) > len(after("Who", add_special_tokens=False).input_ids) or kind == "qwen3"
    )
    for name in ("bos_token", "eos_token", "pad_token", "chat_template"):
        assert getattr(after, name) == getattr(before, name), name
    chat = [{"role": "user", "content": "Who is there?"}]
    assert after.apply_chat_template(chat, tokenize=False) == "[user] Who is there?\n"
    assert transformers.GenerationConfig.from_pretrained(out).to_dict() == sent
    made = json.loads((out / "config.json").read_text())
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        assert made.get(name) == config.get(name), name


@pytest.mark.filterwarnings("ignore")
def test_a_pack_of_before_has_no_template_and_neither_has_its_export(chipwise, tmp_path, monkeypatch):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    src, out = tmp_path / "src", tmp_path / "out"
    source(torch, transformers, src, "llama3", False)
    settings, read = Packing.settings, tokenise.read_tokenizer

    def older(job, split):
        text = settings(job, split)["text"] | {"end": None}
        del text["begin"]
        return settings(job, split) | {"text": text}

    monkeypatch.setattr(Packing, "settings", older)
    monkeypatch.setattr(tokenise, "read_tokenizer", lambda path, end: read(path, end, begin=()))
    packed(chipwise, tmp_path, src)
    monkeypatch.undo()
    assert "begin none, end as usual" in trained(chipwise, tmp_path, src)
    assert chipwise("export", tmp_path / "run", "--to", "huggingface", "--out", out).code == 0
    cut = goes_on_as_theirs(torch, transformers, tmp_path / "run", out)
    assert cut("Who").input_ids == cut("Who", add_special_tokens=False).input_ids
    assert cut("Who", "is").input_ids == cut("Who", "is", add_special_tokens=False).input_ids
