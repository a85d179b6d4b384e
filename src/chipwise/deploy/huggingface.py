"""Models in the format of Hugging Face's transformers: weights with its names, `config.json` and
the tokenizer. `weight_names.toml` has the names, `huggingface.toml` the families. This module
writes and reads `config.json`.

Nets with equal shapes may compute different things, for example with other heads or another
activation. So the settings that shapes do not show are written from the net. When a folder is read,
its settings are compared with the net's.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ..base import DataError, RecipeError, library
from ..base.figures import known, one_line
from ..base.files import read_regular, toml_beside
from ..base.json_types import part
from ..data.pack.tokenise import TOKENIZER, TOKENIZER_CONFIG, Tokenizer, tokenizer_of
from ..interop.nnx import module_of
from ..models.bert import BERT
from ..models.llama import TURNED, Llama
from ..models.resnet50 import ResNet50
from ..models.transformer import GPT2, ViT
from ..recipe.task import Task
from ..run.folder.checkpoint import flatten
from .model import Trained
from .weight_names import NamedArrays, model_tree, translated_back

HUB = "hf://"
CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
GENERATION = "generation_config.json"
_TEMPLATE = "chat_template.jinja"
_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


Config = dict[str, Any]
"""A `config.json`, or a part of one."""
Settings = tuple[Config, Config]
"""What a `config.json` has of a net: what follows from its shapes, and what they do not show."""


@dataclass(frozen=True)
class Family:
    """A `model_type` of transformers."""

    names: str
    """The table of `weight_names.toml`."""
    head: str
    """The class in transformers."""
    recipe: str
    """The built-in recipe."""
    settings: Mapping[str, str]
    """The recipe's settings, mapped to their names in `config.json`."""
    fixed: Config
    """The settings of `config.json` that change what is computed from equal arrays, and that all
    nets here share."""
    stated: Config = field(default_factory=dict)
    """Other settings to write."""


FAMILIES = {kind: Family(**family) for kind, family in toml_beside(__file__).items()}
"""`model_type` in `config.json` to its `Family`."""


# ---- the settings of each net


def _gpt2(net: GPT2) -> Settings:
    layers, (words, width) = net.blocks.stack, net.words.embedding.shape
    sizes = {
        "vocab_size": words,
        "n_positions": net.places.embedding.shape[0],
        "n_embd": width,
        "n_layer": layers.norm1.scale.shape[0],
        "n_inner": layers.hidden.kernel.shape[2],
    }
    return sizes, {"n_head": layers.attention.heads, "layer_norm_epsilon": net.norm.epsilon}


def _llama(net: Llama) -> Settings:
    layers, (words, width) = net.blocks.stack, net.words.embedding.shape
    one = layers.attention
    sizes = {
        "vocab_size": words,
        "hidden_size": width,
        "num_hidden_layers": layers.gate.kernel.shape[0],
        "intermediate_size": layers.gate.kernel.shape[2],
        "tie_word_embeddings": not hasattr(net, "head"),
        "head_dim": one.q.kernel.shape[2] // one.heads,
    }
    rope = {"rope_theta": one.rope_theta, "rope_type": "default"}
    if one.rope_factor != 1:
        rope |= {
            "rope_type": "llama3",
            "factor": one.rope_factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": TURNED,
        }
    heads = {"num_attention_heads": one.heads, "num_key_value_heads": one.kv_heads}
    return sizes, {**rope, **heads, "rms_norm_eps": net.norm.epsilon}


def _encoder(net: Any) -> Settings:
    depth, width, hidden = net.blocks.stack.hidden.kernel.shape
    return {"hidden_size": width, "num_hidden_layers": depth, "intermediate_size": hidden}, {
        "num_attention_heads": net.blocks.stack.attention.heads,
        "layer_norm_eps": net.norm.epsilon,
    }


def _bert(net: BERT) -> Settings:
    sizes, unseen = _encoder(net)
    sizes |= {
        "vocab_size": net.words.embedding.shape[0],
        "max_position_embeddings": net.places.embedding.shape[0],
        "type_vocab_size": net.kinds.embedding.shape[0],
    }
    return sizes, unseen


def _vit(net: ViT) -> Settings:
    (sizes, unseen), patch = _encoder(net), net.patches.kernel.shape[0]
    sizes |= {"patch_size": patch, "image_size": patch * math.isqrt(net.places.shape[1] - 1)}
    tanh = net.blocks.stack.tanh
    return sizes, {**unseen, "hidden_act": "gelu_pytorch_tanh" if tanh else "gelu"}


def _resnet(net: ResNet50) -> Settings:
    width = net.norm.scale.shape[0]
    stages = _stages(net)
    hidden = [4 * width << stage for stage in range(len(stages))]
    return {"embedding_size": width, "depths": list(stages), "hidden_sizes": hidden}, {}


def _stages(net: ResNet50) -> tuple[int, ...]:
    """The number of blocks in each stage."""
    widths = [block.conv1.kernel.shape[-1] for block in net.blocks]
    return tuple(widths.count(width) for width in sorted(set(widths)))


_NETS: dict[str, tuple[type, Callable[[Any], Settings]]] = {
    "gpt2": (GPT2, _gpt2),
    "llama": (Llama, _llama),
    "bert": (BERT, _bert),
    "vit": (ViT, _vit),
    "resnet": (ResNet50, _resnet),
}
_ROPE = (
    "rope_type",
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "original_max_position_embeddings",
)


def _settings(kind: str, net: Any) -> Settings:
    """The settings of `config.json` for a net: those that its shapes show, and those that change
    what is computed from equal arrays."""
    sizes, unseen = _NETS["llama" if kind == "qwen3" else kind][1](net)
    return {**sizes, **FAMILIES[kind].stated}, {**unseen, **FAMILIES[kind].fixed}


_DROPOUT = (
    "attention_dropout",
    "attention_probs_dropout_prob",
    "attn_pdrop",
    "classifier_dropout",
    "embd_pdrop",
    "hidden_dropout_prob",
    "resid_pdrop",
)
"""Rates of dropout in training. The built-in nets have their own."""
_DRAWS = (
    "do_sample",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "typical_p",
    "repetition_penalty",
    "no_repeat_ngram_size",
    "num_beams",
    "max_length",
    "max_new_tokens",
)
"""How transformers draws tokens. `generate` takes its own arguments."""
_ONE_LABEL = "single_label_classification"
_TANH = ("gelu_new", "gelu_pytorch_tanh")  # names of one function


# ---- writing


def kind_of(task: Task) -> tuple[str | None, Any]:
    """The `model_type` of a task's net, None for one of no family, and the net with shapes for
    arrays."""
    net: Any = module_of(task.init)
    kind = next((kind for kind, (of, _) in _NETS.items() if type(net) is of), None)
    if kind == "llama" and net.blocks.stack.attention.normed:
        kind = "qwen3"
    return kind, net


def folder_files(model: Trained) -> tuple[dict[str, bytes], NamedArrays]:
    """The files beside the weights by name, and the arrays in float32 by their names there.

    Raises `RecipeError` for a model of another kind than those of `FAMILIES`.
    """
    task = model.recipe.task
    kind, net = kind_of(task)
    if kind is None:
        named = "functions" if net is None else type(net).__name__
        raise RecipeError(
            "huggingface-model", recipe=model.recipe.name, net=named, known=list(FAMILIES)
        )
    family = FAMILIES[kind]
    flat = flatten(model_tree(model.params, model.state))
    arrays = {name.partition(".")[2]: np.asarray(array, np.float32) for name, array in flat.items()}
    config: Config = {
        "model_type": kind,
        "architectures": [family.head],
        "dtype": "float32",
    }
    sizes, unseen = _settings(kind, net)
    config |= sizes | unseen
    files: dict[str, bytes] = {}
    if "rope_theta" in config:  # which older readers look for there
        config["max_position_embeddings"] = task.context
        rope = {name: config.pop(name) for name in _ROPE if name in config}
        config["rope_parameters"] = {**rope, "rope_theta": config["rope_theta"]}
    if task.decode is not None:
        cut = tokenizer_of(task.train, task.known_texts, vocabulary=config["vocab_size"])
        files, ids = _texts(task, cut)
        config |= ids
    elif "classifier.bias" in arrays:
        names = model.class_names or [f"LABEL_{i}" for i in range(len(arrays["classifier.bias"]))]
        config["id2label"] = {str(i): name for i, name in enumerate(names)}
        config["label2id"] = {name: i for i, name in enumerate(names)}
    else:
        config["architectures"] = ["BertModel"]
    files[CONFIG] = _json(config)
    return files, translated_back(arrays, family.names, _stages(net) if kind == "resnet" else ())


def _texts(task: Task, cut: Tokenizer | None) -> tuple[dict[str, bytes], Config]:
    """The files that say how text becomes tokens and how it is generated, and the numbers of
    special tokens for `config.json`. They are those of the folder that the weights came from.
    Without one, `cut` says them."""
    told = {name: part(task.texts, name) for name in (CONFIG, GENERATION, TOKENIZER_CONFIG)}
    end = None if cut is None else cut.end
    begin = end if cut is None or not cut.begin else cut.begin[0]
    ids = told[CONFIG] if CONFIG in task.texts else {"bos_token_id": begin}
    ids = {name: ids[name] for name in _IDS if name in ids} | {"eos_token_id": _and(ids, end)}
    files: dict[str, bytes] = {}
    if generation := told[GENERATION]:
        files[GENERATION] = _json({**generation, "eos_token_id": _and(generation, end)})
    if isinstance(template := task.texts.get(_TEMPLATE), str):
        files[_TEMPLATE] = template.encode()
    if cut is None or cut.json is None:
        return files, ids
    config = told[TOKENIZER_CONFIG]
    if not config:
        first = {name: n[0] if isinstance(n, list) else n for name, n in ids.items()}
        given = {name[:-3]: token for name, token in first.items() if token is not None}
        config = {name: cut.decode([token]) for name, token in given.items()}
    config |= {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": task.context}
    # With these two, transformers makes a template of its own, of the one token. Without them, the
    # one in the tokenizer's file says what is before a text.
    before = list(cut.names["begin"])
    for name, added in (("add_bos_token", bool(before)), ("add_eos_token", False)):
        config.pop(name, None)
        if before in ([], [config.get("bos_token")]):
            config[name] = added
    files[TOKENIZER_CONFIG] = _json(config)
    files[TOKENIZER] = cut.json().encode()
    return files, ids


def _and(config: Config, end: int | None) -> Any:
    """The tokens that end a text as in `config`, and `end`."""
    told = config.get("eos_token_id")
    ends = told if isinstance(told, list) else [told]
    if end is None or end in ends:
        return told
    return end if told is None else [*ends, end]


def ends_of(texts: Mapping[str, Any], cut: Tokenizer) -> list[int]:
    """The tokens that end a text, for a task's `texts`: those of transformers for the exported
    model."""
    told = _and(part(texts, GENERATION) or part(texts, CONFIG), cut.end)
    return told if isinstance(told, list) else [told] * (told is not None)


def _json(value: Any) -> bytes:
    return (json.dumps(value, indent=2) + "\n").encode()


# ---- reading


def from_hub(name: str, file: str | None = None) -> Path:
    """The folder of `hf://OWNER/NAME`, with `file` alone if one is named, from `huggingface_hub`'s
    cache where the network does not answer."""
    hub = library("huggingface_hub", "export-library", extra="pack")
    bare = name.removeprefix(HUB)
    try:
        wanted = ["*.json", "*.safetensors", _TEMPLATE] if file is None else [file]
        return Path(hub.snapshot_download(bare, allow_patterns=wanted))
    except Exception as error:  # its errors, and those of HTTP, have no common base class
        typed = bare if file is None else f"{bare} {file}"
        raise DataError(
            "weights-hub", path=name, name=typed, reason=one_line(error, 160)
        ) from error


def read_config(folder: Path, name: str = CONFIG) -> dict[str, Any]:
    """`config.json` of a folder, or another file of it, `{}` where there is none. Raises
    `ValueError` if it is no JSON object."""
    file = folder / name
    found = json.loads(read_regular(file)) if file.is_file() else {}
    if not isinstance(found, dict):
        raise ValueError(f"{name} is no JSON object")
    return found


def read_texts(folder: Path) -> dict[str, Any]:
    """What a folder says of texts, besides its tokenizer, for `Task.texts`: file to its content.
    Raises `ValueError` as `read_config`."""
    found: dict[str, Any] = {
        name: read_config(folder, name) for name in (CONFIG, GENERATION, TOKENIZER_CONFIG)
    }
    found[CONFIG] = {name: found[CONFIG][name] for name in _IDS if name in found[CONFIG]}
    found[TOKENIZER_CONFIG].pop("auto_map", None)  # code, which the tokenizer's file needs not
    if (folder / _TEMPLATE).is_file():
        found[_TEMPLATE] = read_regular(folder / _TEMPLATE).decode()
    return {name: content for name, content in found.items() if content}


def names_of(path: Path, config: Config) -> str:
    """The table of `weight_names.toml` for a folder with this `config.json`."""
    kind = str(config.get("model_type"))
    if kind not in FAMILIES:
        raise DataError("huggingface-family", path=path, kind=kind, known=list(FAMILIES))
    return FAMILIES[kind].names


def classes_in(config: Config) -> tuple[str, ...]:
    """The names of the classes that a `config.json` states for the numbers from 0 on, in their
    order, or `()`. Those that transformers puts for none are none."""
    stated = part(config, "id2label")
    numbers = range(len(stated))
    if {*stated} != {*map(str, numbers)}:
        return ()
    names = tuple(str(stated[str(i)]) for i in numbers)
    return () if names == tuple(f"LABEL_{i}" for i in numbers) else names


def weight_files(folder: Path) -> Iterator[tuple[Path, set[str] | None]]:
    """The files of a folder that hold weights, each with the names that are read from it: those
    that the folder's index gives it, all if there is no index. Raises `DataError` if a file is
    missing."""
    if not (folder / INDEX).is_file():
        yield from ((file, None) for file in sorted(folder.glob("*.safetensors")))
        return
    places = json.loads(read_regular(folder / INDEX))["weight_map"]
    for name in sorted(set(places.values())):
        if Path(name).name != name or not (folder / name).is_file():
            raise DataError("weights-shard", path=folder, index=INDEX, file=name)
        yield folder / name, {array for array, file in places.items() if file == name}


def _flat(config: Config) -> Config:
    """A `config.json` with its rotary settings beside the rest, and the defaults that matter."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    rope = rope if isinstance(rope, Mapping) else {"rope_type": rope}
    usual = {"rope_theta": 1e4, "rope_type": rope.get("type", "default")}
    return (
        {"num_key_value_heads": config.get("num_attention_heads")}
        | usual
        | dict(config)
        | dict(rope)
    )


def settings_of(path: str, config: Config) -> tuple[str, list[str]]:
    """The built-in recipe of the model that `config.json` of a folder describes, and its settings
    as typed.
    Raises `DataError` if it describes none, and `RecipeError` if its loss is another one."""
    names_of(Path(path), config)
    family = FAMILIES[str(config["model_type"])]
    if (kind := config.get("problem_type")) not in (None, _ONE_LABEL):  # of another loss
        raise RecipeError("huggingface-loss", path=path, kind=kind, recipe=family.recipe)
    given = _flat(config)
    given |= {"qk_norm": config["model_type"] == "qwen3"}
    there = [
        (name, given[there])
        for name, there in family.settings.items()
        if given.get(there) is not None
    ]
    return family.recipe, [f"{name}={_typed(value)}" for name, value in there]


def _typed(value: Any) -> str:
    """A value of `config.json` as `--set` takes it: a list by its commas."""
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def unread(config: Config, texts: Mapping[str, Any]) -> dict[str, str]:
    """What a folder says of training and of generating that nothing here reads, for `Task.read`."""
    files = {CONFIG: (config, _DROPOUT), GENERATION: (part(texts, GENERATION), _DRAWS)}
    return {
        f"not read in {file}": ", ".join(f"{name}={given[name]}" for name in there)
        for file, (given, names) in files.items()
        if (there := [name for name in names if given.get(name)])
    }


def check_config(path: str, config: Config, task: Task, ignored: Sequence[str] = ()) -> None:
    """Raises `RecipeError` for the first setting, but the `ignored` ones, by which a `config.json`
    uses its arrays in another way than the built-in model of `task`."""
    family = FAMILIES.get(str(config.get("model_type")))
    kind, net = kind_of(task)
    given = _flat(config)
    if family is None or kind is None or FAMILIES[kind].recipe != family.recipe:
        return
    for setting, here in {"model_type": kind, **_settings(kind, net)[1]}.items():
        # A text or a flag is left out at its default
        there = given.get(setting, None if known(here) else here)
        alike = there == here or (there in _TANH and here in _TANH)
        if not alike and setting not in ignored:
            facts = {"setting": setting, "there": there, "here": here}
            raise RecipeError("huggingface-setting", path=path, **facts)
