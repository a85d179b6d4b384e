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
from ..models.llama import Llama
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

    *Fields:* `names` in `weight_names.toml`; `net`: the class here; `head`: the class there; `sizes`:
    settings there that shapes tell; `unseen`: those that change what is computed from equal arrays."""

    names: str
    net: type
    head: str
    sizes: Callable[[Any], dict[str, Any]]
    unseen: Callable[[Any], dict[str, Any]]


def _encoder(net: Any) -> dict[str, Any]:
    depth, width, hidden = net.blocks.stack.hidden.kernel.shape
    return {"hidden_size": width, "num_hidden_layers": depth, "intermediate_size": hidden}


def _stages(net: ResNet50) -> tuple[int, ...]:
    """The number of blocks in each stage."""
    widths = [block.conv1.kernel.shape[-1] for block in net.blocks]
    return tuple(widths.count(width) for width in sorted(set(widths)))


FAMILIES = {
    "gpt2": Family(
        "gpt2", GPT2, "GPT2LMHeadModel",
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
        "llama", Llama, "LlamaForCausalLM",
        lambda net: {
            "vocab_size": net.words.embedding.shape[0], "hidden_size": net.words.embedding.shape[1],
            "num_hidden_layers": net.blocks.stack.gate.kernel.shape[0],
            "intermediate_size": net.blocks.stack.gate.kernel.shape[2], "tie_word_embeddings": False,
        },
        lambda net: {
            "num_attention_heads": net.blocks.stack.attention.heads, "rms_norm_eps": net.norm.epsilon,
            "num_key_value_heads": net.blocks.stack.attention.kv_heads, "hidden_act": "silu",
            "rope_theta": net.blocks.stack.attention.base, "rope_type": "default",
            "attention_bias": False, "mlp_bias": False,
        },
    ),
    "bert": Family(
        "bert", BERT, "BertForSequenceClassification",
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
        "vit", ViT, "ViTForImageClassification",
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
        "resnet50", ResNet50, "ResNetForImageClassification",
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
    return next((kind for kind, one in FAMILIES.items() if type(net) is one.net), None), net


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
    if kind == "llama":  # "rope_theta" is what older readers look for
        config["max_position_embeddings"] = task.context
        config["rope_parameters"] = {"rope_type": config.pop("rope_type"), "rope_theta": config["rope_theta"]}
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


def check_config(path: str, config: Mapping[str, Any], task: Task) -> None:
    """Raises `RecipeError` if a folder's `config.json` says that its arrays are used in another way than by
    the built-in model of `task`."""
    family, net = FAMILIES.get(str(config.get("model_type"))), module_of(task.init)
    if family is None or type(net) is not family.net:
        return
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    rope = rope if isinstance(rope, Mapping) else {"rope_type": rope}
    rope = {"rope_theta": 1e4, "rope_type": rope.get("type", "default")} | dict(config) | dict(rope)
    given = {"num_key_value_heads": config.get("num_attention_heads")} | rope
    for setting, here in family.unseen(net).items():
        needed = isinstance(here, int | float) and not isinstance(here, bool)
        there = given.get(setting, None if needed else here)  # a text or a flag is left out at its default
        if there != here and not (there in _TANH and here in _TANH):
            raise RecipeError("huggingface-setting", path=path, setting=setting, there=there, here=here)
