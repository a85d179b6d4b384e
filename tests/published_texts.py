"""Tokenizers like published ones, and what their folders say beside them, without the network."""

import json

import pytest

TEXTS = [
    "Where is the book? It is here on the table.",
    "How old is the house? Very old, a hundred years.",
    "What is two and two? Four.",
    "Who is there? Nobody is here.",
] * 30
KINDS = {
    "qwen3": ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
    "llama3": ["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"],
    "mistral": ["<s>", "</s>", "[INST]"],
}
CHAT = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
CHATS = {
    "qwen3": {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "add_bos_token": False},
    "llama3": {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"},
    "mistral": {"bos_token": "<s>", "eos_token": {"__type": "AddedToken", "content": "</s>"}},
}
BEGIN = {"qwen3": [], "llama3": ["<|begin_of_text|>"], "mistral": ["<s>"]}
END = {"qwen3": "<|im_end|>", "llama3": "<|eot_id|>", "mistral": "</s>"}


def tokenizer(kind, template=None):
    """Byte pairs learnt from `TEXTS`. `template`: the tokens before and after a text. By default Llama 3 and
    Mistral have one before."""
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    letters = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=290, initial_alphabet=letters, show_progress=False)
    made.train_from_iterator(TEXTS, trainer)
    made.add_special_tokens(KINDS[kind])
    level = tokenizers.processors.ByteLevel(trim_offsets=False)
    begin, after = template or (BEGIN[kind], [])
    if not begin and not after:
        made.post_processor = level
        return made
    template = tokenizers.processors.TemplateProcessing(
        single=[*begin, "$A", *after],
        pair=[*begin, "$A", *begin, "$B:1"],
        special_tokens=[(name, made.token_to_id(name)) for name in {*begin, *after}],
    )
    made.post_processor = tokenizers.processors.Sequence([level, template])
    return made


def ids(kind, made):
    """The numbers of `config.json`, as such models have them."""
    number = made.token_to_id
    if kind == "qwen3":
        bos, eos, pad = None, number("<|im_end|>"), number("<|endoftext|>")
    elif kind == "llama3":
        bos, eos, pad = number("<|begin_of_text|>"), [number("<|end_of_text|>"), number("<|eot_id|>")], None
    else:
        bos, eos, pad = number("<s>"), number("</s>"), None
    return {"bos_token_id": bos, "eos_token_id": eos, "pad_token_id": pad}


def folder(path, kind):
    """A folder with the tokenizer, its settings and those of generation. *Returns* the tokenizer."""
    made = tokenizer(kind)
    path.mkdir(exist_ok=True)
    made.save(str(path / "tokenizer.json"))
    told = {"tokenizer_class": "PreTrainedTokenizerFast", **CHATS[kind]}
    told |= {} if kind == "llama3" else {"chat_template": CHAT}
    if kind == "llama3":
        (path / "chat_template.jinja").write_text(CHAT)
    (path / "tokenizer_config.json").write_text(json.dumps(told))
    generation = {**ids(kind, made), "temperature": 0.6, "do_sample": True}
    (path / "generation_config.json").write_text(json.dumps(generation))
    return made
