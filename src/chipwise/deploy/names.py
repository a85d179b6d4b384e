"""Translates parameters from the names and layouts of other libraries to those of the built-in models.

Each model's table has rules from a module's name there to its name here. Common to all models: PyTorch's
kernels are `(out, in, height, width)` and `(out, in)`, here they are `(height, width, in, out)` and `(in,
out)`; separate arrays for queries, keys and values are joined to one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from ..errors import RecipeError, near

_LEAVES = {"bias": "bias", "beta": "bias", "running_mean": "mean", "running_var": "var"}
_WEIGHTS = ("weight", "gamma")
_PARTS = re.compile(r"(.*)\.(query|key|value)\.(kernel|bias)")
_STAGED = re.compile(r"blocks\.(\d+)-(\d+)\.(.*)")
_NUMBERED = re.compile(r"blocks\.(\d+)\.(.*)")


@dataclass(frozen=True)
class Table:
    """*Fields:* `rules`: a pattern of the whole module name to its name here; the first match counts. Block 1
    of stage 2 is `blocks.2-1`; blocks are then numbered over all stages. A name here that ends with
    "embedding" is an array's. `stacked`: arrays of all blocks are stacked along a leading axis; `turned`:
    matrices are `(out, in)` there."""

    rules: tuple[tuple[str, str], ...]
    stacked: bool = False
    turned: bool = True


def _hugging_face_resnet() -> Iterator[tuple[str, str]]:
    yield r"(?:resnet\.)?embedder\.embedder\.convolution", "stem"
    yield r"(?:resnet\.)?embedder\.embedder\.normalization", "norm"
    yield r"classifier\.1", "classifier"
    block = r"(?:resnet\.)?encoder\.stages\.(\d+)\.layers\.(\d+)"
    for place, number in (("shortcut", 0), *((rf"layer\.{i}", i + 1) for i in range(3))):
        yield rf"{block}\.{place}\.convolution", rf"blocks.\1-\2.conv{number}"
        yield rf"{block}\.{place}\.normalization", rf"blocks.\1-\2.norm{number}"


TABLES = {
    # torchvision and timm, then Hugging Face
    "resnet50": Table(
        (
            (r"conv1", "stem"),
            (r"bn1", "norm"),
            (r"fc", "classifier"),
            (r"layer(\d+)\.(\d+)\.downsample\.0", r"blocks.\1-\2.conv0"),
            (r"layer(\d+)\.(\d+)\.downsample\.1", r"blocks.\1-\2.norm0"),
            (r"layer(\d+)\.(\d+)\.conv(\d)", r"blocks.\1-\2.conv\3"),
            (r"layer(\d+)\.(\d+)\.bn(\d)", r"blocks.\1-\2.norm\3"),
            *_hugging_face_resnet(),
        )
    ),
    # timm, whose first block has no expansion, so its numbers are shifted; then efficientnet-lite-pytorch
    "efficientnet-lite0": Table(
        (
            (r"conv_stem|_conv_stem", "stem"),
            (r"bn1", "norm"),
            (r"conv_head|_conv_head", "head"),
            (r"bn2", "head_norm"),
            (r"classifier|_fc", "classifier"),
            (r"blocks\.0\.(\d+)\.conv_dw", r"blocks.0-\1.conv1"),
            (r"blocks\.0\.(\d+)\.bn1", r"blocks.0-\1.norm1"),
            (r"blocks\.0\.(\d+)\.conv_pw", r"blocks.0-\1.conv2"),
            (r"blocks\.0\.(\d+)\.bn2", r"blocks.0-\1.norm2"),
            (r"blocks\.(\d+)\.(\d+)\.conv_pw", r"blocks.\1-\2.conv0"),
            (r"blocks\.(\d+)\.(\d+)\.bn1", r"blocks.\1-\2.norm0"),
            (r"blocks\.(\d+)\.(\d+)\.conv_dw", r"blocks.\1-\2.conv1"),
            (r"blocks\.(\d+)\.(\d+)\.bn2", r"blocks.\1-\2.norm1"),
            (r"blocks\.(\d+)\.(\d+)\.conv_pwl", r"blocks.\1-\2.conv2"),
            (r"blocks\.(\d+)\.(\d+)\.bn3", r"blocks.\1-\2.norm2"),
            (r"_bn0", "norm"),
            (r"_bn1", "head_norm"),
            (r"_blocks\.(\d+)\._expand_conv", r"blocks.\1.conv0"),
            (r"_blocks\.(\d+)\._depthwise_conv", r"blocks.\1.conv1"),
            (r"_blocks\.(\d+)\._project_conv", r"blocks.\1.conv2"),
            (r"_blocks\.(\d+)\._bn(\d)", r"blocks.\1.norm\2"),
        )
    ),
    # timm, then Hugging Face
    "vit": Table(
        (
            (r"cls_token", "token"),
            (r"pos_embed", "places"),
            (r"patch_embed\.proj", "patches"),
            (r"blocks\.(\d+)\.(norm\d)", r"blocks.\1.\2"),
            (r"blocks\.(\d+)\.attn\.qkv", r"blocks.\1.attention.qkv"),
            (r"blocks\.(\d+)\.attn\.proj", r"blocks.\1.attention.out"),
            (r"blocks\.(\d+)\.mlp\.fc1", r"blocks.\1.hidden"),
            (r"blocks\.(\d+)\.mlp\.fc2", r"blocks.\1.out"),
            (r"norm", "norm"),
            (r"head", "classifier"),
            (r"(?:vit\.)?embeddings\.cls_token", "token"),
            (r"(?:vit\.)?embeddings\.position_embeddings", "places"),
            (r"(?:vit\.)?embeddings\.patch_embeddings\.projection", "patches"),
            (r"(?:vit\.)?encoder\.layer\.(\d+)\.layernorm_before", r"blocks.\1.norm1"),
            (r"(?:vit\.)?encoder\.layer\.(\d+)\.layernorm_after", r"blocks.\1.norm2"),
            (
                r"(?:vit\.)?encoder\.layer\.(\d+)\.attention\.attention\.(query|key|value)",
                r"blocks.\1.attention.\2",
            ),
            (r"(?:vit\.)?encoder\.layer\.(\d+)\.attention\.output\.dense", r"blocks.\1.attention.out"),
            (r"(?:vit\.)?encoder\.layer\.(\d+)\.intermediate\.dense", r"blocks.\1.hidden"),
            (r"(?:vit\.)?encoder\.layer\.(\d+)\.output\.dense", r"blocks.\1.out"),
            (r"(?:vit\.)?layernorm", "norm"),
            (r"classifier", "classifier"),
        ),
        stacked=True,
    ),
    # Hugging Face
    "bert": Table(
        (
            (r"(?:bert\.)?embeddings\.word_embeddings", "words.embedding"),
            (r"(?:bert\.)?embeddings\.position_embeddings", "places.embedding"),
            (r"(?:bert\.)?embeddings\.token_type_embeddings", "kinds.embedding"),
            (r"(?:bert\.)?embeddings\.LayerNorm", "norm"),
            (
                r"(?:bert\.)?encoder\.layer\.(\d+)\.attention\.self\.(query|key|value)",
                r"blocks.\1.attention.\2",
            ),
            (r"(?:bert\.)?encoder\.layer\.(\d+)\.attention\.output\.dense", r"blocks.\1.attention.out"),
            (r"(?:bert\.)?encoder\.layer\.(\d+)\.attention\.output\.LayerNorm", r"blocks.\1.norm1"),
            (r"(?:bert\.)?encoder\.layer\.(\d+)\.intermediate\.dense", r"blocks.\1.hidden"),
            (r"(?:bert\.)?encoder\.layer\.(\d+)\.output\.dense", r"blocks.\1.out"),
            (r"(?:bert\.)?encoder\.layer\.(\d+)\.output\.LayerNorm", r"blocks.\1.norm2"),
            (r"(?:bert\.)?pooler\.dense", "pooler"),
            (r"classifier", "classifier"),
        ),
        stacked=True,
    ),
    # Hugging Face, whose GPT-2 stores matrices as (in, out), as here
    "gpt2": Table(
        (
            (r"(?:transformer\.)?wte", "words.embedding"),
            (r"(?:transformer\.)?wpe", "places.embedding"),
            (r"(?:transformer\.)?ln_f", "norm"),
            (r"(?:transformer\.)?h\.(\d+)\.ln_(\d)", r"blocks.\1.norm\2"),
            (r"(?:transformer\.)?h\.(\d+)\.attn\.c_attn", r"blocks.\1.attention.qkv"),
            (r"(?:transformer\.)?h\.(\d+)\.attn\.c_proj", r"blocks.\1.attention.out"),
            (r"(?:transformer\.)?h\.(\d+)\.mlp\.c_fc", r"blocks.\1.hidden"),
            (r"(?:transformer\.)?h\.(\d+)\.mlp\.c_proj", r"blocks.\1.out"),
        ),
        stacked=True,
        turned=False,
    ),
    # transformers' LlamaForCausalLM
    "llama": Table(
        (
            (r"model\.embed_tokens", "words.embedding"),
            (r"lm_head", "head.embedding"),
            (r"model\.norm", "norm"),
            (r"model\.layers\.(\d+)\.self_attn\.([qkv])_proj", r"blocks.\1.attention.\2"),
            (r"model\.layers\.(\d+)\.self_attn\.o_proj", r"blocks.\1.attention.out"),
            (r"model\.layers\.(\d+)\.mlp\.(gate|up|down)_proj", r"blocks.\1.\2"),
            (r"model\.layers\.(\d+)\.input_layernorm", r"blocks.\1.norm1"),
            (r"model\.layers\.(\d+)\.post_attention_layernorm", r"blocks.\1.norm2"),
        ),
        stacked=True,
    ),
}
"""The built-in model to the names that its weights have elsewhere."""


def translate(arrays: Mapping[str, np.ndarray], model: str) -> dict[str, np.ndarray]:
    """`arrays` with the names and layouts of the built-in `model`.

    Arrays without a rule keep their names, so that `Weights.match` shows them. PyTorch's counters of batches
    are dropped. Raises `RecipeError` for a model without a table.
    """
    if model not in TABLES:
        raise RecipeError("weights-names", given=model, known=list(TABLES), near=near(model, TABLES))
    table = TABLES[model]
    translated = dict(
        _translated(table, name, array)
        for name, array in arrays.items()
        if not name.endswith(".num_batches_tracked")
    )
    translated = _counted_through(_joined(translated))
    return _stacked(translated) if table.stacked else translated


def _translated(table: Table, name: str, array: np.ndarray) -> tuple[str, np.ndarray]:
    """The name and layout of one array here."""
    module, _, leaf = name.rpartition(".")
    of_module = bool(module) and leaf in {*_WEIGHTS, *_LEAVES}
    whole = module if of_module else name  # else an array of the model itself
    fits = ((re.fullmatch(pattern, whole), here) for pattern, here in table.rules)
    new = next((at.expand(here) for at, here in fits if at), None)
    if new is None:
        return name, array
    if not of_module or new.endswith(".embedding"):
        return new, array
    if leaf not in _WEIGHTS:
        return f"{new}.{_LEAVES[leaf]}", array
    if array.ndim == 4:
        return f"{new}.kernel", array.transpose(2, 3, 1, 0)
    if array.ndim == 2:
        return f"{new}.kernel", array.T if table.turned else array
    return f"{new}.scale", array


def _joined(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Joins `attention.query.kernel`, `.key` and `.value` to one `attention.qkv.kernel`."""
    whole: dict[str, np.ndarray] = {}
    for name, array in arrays.items():
        at = _PARTS.fullmatch(name)
        parts = [arrays.get(f"{at[1]}.{part}.{at[3]}") for part in ("query", "key", "value")] if at else []
        if at and all(part is not None for part in parts):
            whole[f"{at[1]}.qkv.{at[3]}"] = np.concatenate(parts, axis=-1)  # type: ignore[arg-type]
        else:  # if one is missing, the others keep their names
            whole[name] = array
    return whole


def _counted_through(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Renames `blocks.2-1.conv` to `blocks.4.conv`: blocks are numbered over all stages."""
    staged = {name: at for name in arrays if (at := _STAGED.fullmatch(name))}
    pairs = sorted({(int(at[1]), int(at[2])) for at in staged.values()})
    index = {pair: i for i, pair in enumerate(pairs)}

    def counted(name: str) -> str:
        at = staged.get(name)
        return name if at is None else f"blocks.{index[int(at[1]), int(at[2])]}.{at[3]}"

    return {counted(name): array for name, array in arrays.items()}


def _stacked(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Stacks `blocks.3.norm.bias` of all blocks to `blocks.stack.norm.bias`, along a leading axis."""
    rest = {name: array for name, array in arrays.items() if not _NUMBERED.fullmatch(name)}
    layers: dict[str, dict[int, np.ndarray]] = {}
    for name, array in arrays.items():
        if at := _NUMBERED.fullmatch(name):
            layers.setdefault(at[2], {})[int(at[1])] = array
    for name, one in layers.items():
        if sorted(one) == list(range(len(one))) and len({a.shape for a in one.values()}) == 1:
            rest[f"blocks.stack.{name}"] = np.stack([one[i] for i in range(len(one))])
        else:  # blocks that differ keep their names
            rest |= {f"blocks.{i}.{name}": array for i, array in one.items()}
    return rest
