"""Models as Hugging Face's transformers keeps them: weights with its names, `config.json` and the
tokenizer. `weight_names.toml` has the names; here is what `config.json` says, for writing and for reading.

Nets with equal shapes may compute different things: with other heads, say, or another activation. So what a
family's `unseen` says is written from the net, and what a folder says is compared with it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..atomic import read_regular
from ..data.pack.tokenise import BYTES, TOKENIZER, tokenizer_of
from ..data.packed import PackedFolder
from ..engine.checkpoint import flatten
from ..errors import DataError, RecipeError, library
from ..interop.nnx import module_of
from ..models.bert import BERT
from ..models.llama import TURNED, Llama
from ..models.resnet50 import ResNet50
from ..models.transformer import GPT2, ViT
from ..recipe.task import Task
from ..words.figures import one_line
from .model import Trained
from .weight_names import translated_back

HUB = "hf://"
CONFIG, INDEX = "config.json", "model.safetensors.index.json"


@dataclass(frozen=True)
class Family:
    """A `model_type` of transformers.

    *Fields:* `names` in `weight_names.toml`; `fits`: whether a net here is of it; `head`: the class there;
    `recipe`: the built-in recipe; `settings` of that: what they are called there; `sizes`: settings there
    that shapes tell; `unseen`: those that change what is computed from equal arrays."""

    names: str
    fits: Callable[[Any], bool]
    head: str
    recipe: str
    settings: Mapping[str, str]
    sizes: Callable[[Any], dict[str, Any]]
    unseen: Callable[[Any], dict[str, Any]]


def _encoder(net: Any) -> dict[str, Any]:
    depth, width, hidden = net.blocks.stack.hidden.kernel.shape
    return {"hidden_size": width, "num_hidden_layers": depth, "intermediate_size": hidden}


def _stages(net: ResNet50) -> tuple[int, ...]:
    """The number of blocks in each stage."""
    widths = [block.conv1.kernel.shape[-1] for block in net.blocks]
    return tuple(widths.count(width) for width in sorted(set(widths)))


def _llama_sizes(net: Llama) -> dict[str, Any]:
    layers, (words, width) = net.blocks.stack, net.words.embedding.shape
    return {
        "vocab_size": words, "hidden_size": width, "num_hidden_layers": layers.gate.kernel.shape[0],
        "intermediate_size": layers.gate.kernel.shape[2], "tie_word_embeddings": not hasattr(net, "head"),
        "head_dim": layers.attention.q.kernel.shape[2] // layers.attention.heads,
    }  # fmt: skip


def _llama_unseen(net: Llama) -> dict[str, Any]:
    one = net.blocks.stack.attention
    rope: dict[str, Any] = {"rope_theta": one.rope_theta, "rope_type": "default"}
    if one.rope_factor != 1:
        rope |= {"rope_type": "llama3", "factor": one.rope_factor, "low_freq_factor": 1.0}
        rope |= {"high_freq_factor": 4.0, "original_max_position_embeddings": TURNED}
    return rope | {
        "num_attention_heads": one.heads, "num_key_value_heads": one.kv_heads, "attention_bias": False,
        "rms_norm_eps": net.norm.epsilon, "hidden_act": "silu", "mlp_bias": False,
        "use_sliding_window": False,
    }  # fmt: skip


_ENCODER = {"depth": "num_hidden_layers", "width": "hidden_size", "heads": "num_attention_heads"}
_LLAMA = {
    **_ENCODER, "vocabulary": "vocab_size", "kv_heads": "num_key_value_heads", "hidden": "intermediate_size",
    "rope_theta": "rope_theta", "rope_factor": "factor", "epsilon": "rms_norm_eps", "head_dim": "head_dim",
    "tied": "tie_word_embeddings", "qk_norm": "qk_norm",
}  # fmt: skip
_ROPE = ("rope_type", "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")

FAMILIES = {
    "gpt2": Family(
        "gpt2", lambda net: type(net) is GPT2, "GPT2LMHeadModel", "gpt2-124m",
        {
            "vocabulary": "vocab_size", "context": "n_positions", "width": "n_embd", "depth": "n_layer",
            "heads": "n_head",
        },
        lambda net: {
            "vocab_size": net.words.embedding.shape[0], "n_positions": net.places.embedding.shape[0],
            "n_embd": net.words.embedding.shape[1], "n_layer": net.blocks.stack.norm1.scale.shape[0],
            "n_inner": net.blocks.stack.hidden.kernel.shape[2],
        },
        lambda net: {
            "n_head": net.blocks.stack.attention.heads, "layer_norm_epsilon": net.norm.epsilon,
            "activation_function": "gelu_new", "scale_attn_weights": True, "tie_word_embeddings": True,
            "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False,
        },
    ),
    "llama": Family(
        "llama", lambda net: type(net) is Llama and not net.blocks.stack.attention.normed, "LlamaForCausalLM",
        "llama-8b", _LLAMA, _llama_sizes, _llama_unseen,
    ),
    "qwen3": Family(
        "llama", lambda net: type(net) is Llama and net.blocks.stack.attention.normed, "Qwen3ForCausalLM",
        "llama-8b", _LLAMA, _llama_sizes, _llama_unseen,
    ),
    "bert": Family(
        "bert", lambda net: type(net) is BERT, "BertForSequenceClassification", "bert-base",
        {**_ENCODER, "vocabulary": "vocab_size"},
        lambda net: {
            **_encoder(net), "vocab_size": net.words.embedding.shape[0], "pad_token_id": 0,
            "max_position_embeddings": net.places.embedding.shape[0],
            "type_vocab_size": net.kinds.embedding.shape[0],
        },
        lambda net: {
            "num_attention_heads": net.blocks.stack.attention.heads, "layer_norm_eps": net.norm.epsilon,
            "hidden_act": "gelu", "position_embedding_type": "absolute", "is_decoder": False,
        },
    ),
    "vit": Family(
        "vit", lambda net: type(net) is ViT, "ViTForImageClassification", "vit-s16",
        {**_ENCODER, "image": "image_size", "patch": "patch_size"},
        lambda net: {
            **_encoder(net), "patch_size": net.patches.kernel.shape[0], "num_channels": 3,
            "image_size": net.patches.kernel.shape[0] * math.isqrt(net.places.shape[1] - 1),
        },
        lambda net: {
            "num_attention_heads": net.blocks.stack.attention.heads, "layer_norm_eps": net.norm.epsilon,
            "hidden_act": "gelu_pytorch_tanh" if net.blocks.stack.tanh else "gelu", "qkv_bias": True,
        },
    ),
    "resnet": Family(
        "resnet50", lambda net: type(net) is ResNet50, "ResNetForImageClassification", "imagenet-resnet50",
        {"width": "embedding_size", "blocks": "depths"},
        lambda net: {
            "embedding_size": net.norm.scale.shape[0], "num_channels": 3, "depths": list(_stages(net)),
            "hidden_sizes": [4 * net.norm.scale.shape[0] << stage for stage in range(len(_stages(net)))],
        },
        lambda net: {
            "layer_type": "bottleneck", "hidden_act": "relu", "downsample_in_first_stage": False,
            "downsample_in_bottleneck": False,
        },
    ),
}  # fmt: skip
"""`model_type` in `config.json` to what is here of it."""
_TANH = ("gelu_new", "gelu_pytorch_tanh")  # names of one function


# ---- writing


def kind_of(task: Task) -> tuple[str | None, Any]:
    """The `model_type` of a task's net, None for one of no family, and the net with shapes for arrays."""
    net: Any = module_of(task.init)
    return next((kind for kind, one in FAMILIES.items() if one.fits(net)), None), net


def folder_files(model: Trained) -> tuple[dict[str, bytes], dict[str, np.ndarray]]:
    """The files beside the weights by name, and the arrays in float32 by their names there.

    Raises `RecipeError` for a model of another kind than those of `FAMILIES`.
    """
    task = model.recipe.task
    kind, net = kind_of(task)
    if kind is None:
        named = "functions" if net is None else type(net).__name__
        raise RecipeError("huggingface-model", recipe=model.recipe.name, net=named, known=list(FAMILIES))
    family, flat = FAMILIES[kind], flatten({"params": model.params, "state": model.state})
    arrays = {name.partition(".")[2]: np.asarray(array, np.float32) for name, array in flat.items()}
    config: dict[str, Any] = {"model_type": kind, "architectures": [family.head], "dtype": "float32"}
    config |= family.sizes(net) | family.unseen(net)
    files: dict[str, bytes] = {}
    if "rope_theta" in config:  # which older readers look for there
        config["max_position_embeddings"] = task.context
        rope = {name: config.pop(name) for name in _ROPE if name in config}
        config["rope_parameters"] = {**rope, "rope_theta": config["rope_theta"]}
    if task.decode is not None:
        files, end = _tokenizer(task)
        config |= {"bos_token_id": end, "eos_token_id": end}
    elif "classifier.bias" in arrays:
        names = model.class_names or [f"LABEL_{i}" for i in range(len(arrays["classifier.bias"]))]
        config["id2label"] = {str(i): name for i, name in enumerate(names)}
        config["label2id"] = {name: i for i, name in enumerate(names)}
    else:
        config["architectures"] = ["BertModel"]
    files[CONFIG] = _json(config)
    return files, translated_back(arrays, family.names, _stages(net) if kind == "resnet" else ())


def _tokenizer(task: Task) -> tuple[dict[str, bytes], int | None]:
    """The tokenizer's files if the pack that trained the model is here, and the token after a document."""
    cut, pack = tokenizer_of(task.train), task.train
    if cut is None or cut is BYTES or not isinstance(pack, PackedFolder):
        return {}, None if cut is None else cut.end
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": task.context}
    if cut.end is not None:
        config |= {"bos_token": cut.decode([cut.end]), "eos_token": cut.decode([cut.end])}
    file = read_regular(pack.path.parent / TOKENIZER)
    return {TOKENIZER: file, "tokenizer_config.json": _json(config)}, cut.end


def _json(value: Any) -> bytes:
    return (json.dumps(value, indent=2) + "\n").encode()


# ---- reading


def from_hub(name: str) -> Path:
    """The folder of `hf://OWNER/NAME`, from `huggingface_hub`'s cache where the network does not answer."""
    hub = library("huggingface_hub", "export-library", extra="pack")
    bare = name.removeprefix(HUB)
    try:
        return Path(hub.snapshot_download(bare, allow_patterns=["*.json", "*.safetensors"]))
    except Exception as error:  # its errors, and those of HTTP, have no common base class
        raise DataError("weights-hub", path=name, name=bare, reason=one_line(error, 160)) from error


def read_config(folder: Path) -> dict[str, Any]:
    """`config.json` of a folder, `{}` where there is none. Raises `ValueError` if it is no JSON object."""
    file = folder / CONFIG
    found = json.loads(read_regular(file)) if file.is_file() else {}
    if not isinstance(found, dict):
        raise ValueError(f"{CONFIG} is no JSON object")
    return found


def names_of(path: Path, config: Mapping[str, Any]) -> str:
    """The table of `weight_names.toml` for a folder with this `config.json`."""
    kind = str(config.get("model_type"))
    if kind not in FAMILIES:
        raise DataError("huggingface-family", path=path, kind=kind, known=list(FAMILIES))
    return FAMILIES[kind].names


def weight_files(folder: Path) -> Sequence[Path]:
    """The files of a folder that hold weights: those that its index names. Raises `DataError` if one is
    missing."""
    if not (folder / INDEX).is_file():
        return sorted(folder.glob("*.safetensors"))
    names = sorted(set(json.loads(read_regular(folder / INDEX))["weight_map"].values()))
    for name in names:
        if Path(name).name != name or not (folder / name).is_file():
            raise DataError("weights-shard", path=folder, index=INDEX, file=name)
    return [folder / name for name in names]


def _flat(config: Mapping[str, Any]) -> dict[str, Any]:
    """A `config.json` with what its rotary positions say beside the rest, and the defaults that matter."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    rope = rope if isinstance(rope, Mapping) else {"rope_type": rope}
    usual = {"rope_theta": 1e4, "rope_type": rope.get("type", "default")}
    return {"num_key_value_heads": config.get("num_attention_heads")} | usual | dict(config) | dict(rope)


def settings_of(path: str, config: Mapping[str, Any]) -> tuple[str, list[str]]:
    """The built-in recipe of the model that `config.json` of a folder describes, and its settings as typed.
    Raises `DataError` if it describes none."""
    names_of(Path(path), config)
    family, given = FAMILIES[str(config["model_type"])], _flat(config)
    given |= {"qk_norm": config["model_type"] == "qwen3"}
    there = [(name, given[there]) for name, there in family.settings.items() if given.get(there) is not None]
    return family.recipe, [f"{name}={value}" for name, value in there]


def check_config(path: str, config: Mapping[str, Any], task: Task) -> None:
    """Raises `RecipeError` if a folder's `config.json` says that its arrays are used in another way than by
    the built-in model of `task`."""
    family, (kind, net), given = FAMILIES.get(str(config.get("model_type"))), kind_of(task), _flat(config)
    if family is None or kind is None or FAMILIES[kind].recipe != family.recipe:
        return
    for setting, here in {"model_type": kind, **FAMILIES[kind].unseen(net)}.items():
        needed = isinstance(here, int | float) and not isinstance(here, bool)
        there = given.get(setting, None if needed else here)  # a text or a flag is left out at its default
        if there != here and not (there in _TANH and here in _TANH):
            raise RecipeError("huggingface-setting", path=path, setting=setting, there=there, here=here)
