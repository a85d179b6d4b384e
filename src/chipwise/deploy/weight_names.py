"""Translates parameters from the names and layouts of other libraries to those of the built-in models.

`TABLES` has each library's names for the parts of a model and of its blocks. Common to all models: PyTorch's
kernels are `(out, in, height, width)` and `(out, in)`, here they are `(height, width, in, out)` and `(in,
out)`; separate arrays for queries, keys and values are joined to one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ..errors import RecipeError, near

_LEAVES = {"bias": "bias", "beta": "bias", "running_mean": "mean", "running_var": "var"}
_WEIGHTS = ("weight", "gamma")
_PARTS = re.compile(r"(.*)\.(query|key|value)\.(kernel|bias)")
_STAGED = re.compile(r"blocks\.(\d+)-(\d+)\.(.*)")
_NUMBERED = re.compile(r"blocks\.(\d+)\.(.*)")


@dataclass(frozen=True)
class WeightNames:
    """A library's names for the parts of a model, as pairs: the name there and the name here.

    *Fields:* `whole`: parts outside of blocks; `block`: a pattern for a block, whose groups are its number,
    or its stage and its number in that (here blocks are numbered over all stages); `parts`: those of a block;
    `prefix`: an optional prefix of all names; `stacked`: arrays of all blocks are stacked along a leading
    axis here; `turned`: matrices are `(out, in)` there. A name here that ends with "embedding" is an array's.
    """

    whole: str
    block: str
    parts: str
    prefix: str = ""
    stacked: bool = False
    turned: bool = True

    def find(self, name: str) -> str | None:
        """The name here of a module or an array; block 1 of stage 2 is `blocks.2-1`."""
        name, pairs = name.removeprefix(self.prefix), self.whole
        place = re.match(rf"{self.block}\.", name)
        if place:
            name, pairs = name[place.end() :], self.parts
        words = pairs.split()
        new = dict(zip(words[::2], words[1::2], strict=True)).get(name)
        return new if new is None or not place else f"blocks.{'-'.join(place.groups())}.{new}"


TABLES = {
    "resnet50": (
        WeightNames(  # torchvision and timm
            "conv1 stem  bn1 norm  fc classifier",
            r"layer(\d+)\.(\d+)",
            """downsample.0 conv0  conv1 conv1  conv2 conv2  conv3 conv3
               downsample.1 norm0  bn1   norm1  bn2   norm2  bn3   norm3""",
        ),
        WeightNames(  # Hugging Face
            """embedder.embedder.convolution stem  embedder.embedder.normalization norm
               classifier.1 classifier""",
            r"encoder\.stages\.(\d+)\.layers\.(\d+)",
            """shortcut.convolution conv0  shortcut.normalization norm0
               layer.0.convolution  conv1  layer.0.normalization  norm1
               layer.1.convolution  conv2  layer.1.normalization  norm2
               layer.2.convolution  conv3  layer.2.normalization  norm3""",
            prefix="resnet.",
        ),
    ),
    "efficientnet-lite0": (
        # timm, whose first block has no expansion, so its numbers are shifted
        WeightNames("", r"blocks\.(0)\.(\d+)", "conv_dw conv1  bn1 norm1  conv_pw conv2  bn2 norm2"),
        WeightNames(
            "conv_stem stem  bn1 norm  conv_head head  bn2 head_norm  classifier classifier",
            r"blocks\.(\d+)\.(\d+)",
            "conv_pw conv0  bn1 norm0  conv_dw conv1  bn2 norm1  conv_pwl conv2  bn3 norm2",
        ),
        WeightNames(  # efficientnet-lite-pytorch
            "_conv_stem stem  _bn0 norm  _conv_head head  _bn1 head_norm  _fc classifier",
            r"_blocks\.(\d+)",
            """_expand_conv conv0  _depthwise_conv conv1  _project_conv conv2
               _bn0         norm0  _bn1            norm1  _bn2          norm2""",
        ),
    ),
    "vit": (
        WeightNames(  # timm
            "cls_token token  pos_embed places  patch_embed.proj patches  norm norm  head classifier",
            r"blocks\.(\d+)",
            """norm1 norm1  attn.qkv attention.qkv  attn.proj attention.out
               norm2 norm2  mlp.fc1  hidden         mlp.fc2   out""",
            stacked=True,
        ),
        WeightNames(  # Hugging Face
            """embeddings.cls_token token  embeddings.position_embeddings places
               embeddings.patch_embeddings.projection patches  layernorm norm  classifier classifier""",
            r"encoder\.layer\.(\d+)",
            """layernorm_before          norm1            intermediate.dense         hidden
               layernorm_after           norm2            output.dense               out
               attention.attention.query attention.query  attention.attention.value  attention.value
               attention.attention.key   attention.key    attention.output.dense     attention.out""",
            prefix="vit.",
            stacked=True,
        ),
    ),
    "bert": (
        WeightNames(  # Hugging Face
            """embeddings.word_embeddings       words.embedding   embeddings.LayerNorm  norm
               embeddings.position_embeddings   places.embedding  pooler.dense          pooler
               embeddings.token_type_embeddings kinds.embedding   classifier            classifier""",
            r"encoder\.layer\.(\d+)",
            """attention.self.query   attention.query  attention.output.LayerNorm norm1
               attention.self.key     attention.key    intermediate.dense         hidden
               attention.self.value   attention.value  output.dense               out
               attention.output.dense attention.out    output.LayerNorm           norm2""",
            prefix="bert.",
            stacked=True,
        ),
    ),
    "gpt2": (
        WeightNames(  # Hugging Face, whose GPT-2 stores matrices as (in, out), as here
            "wte words.embedding  wpe places.embedding  ln_f norm",
            r"h\.(\d+)",
            """ln_1 norm1  attn.c_attn attention.qkv  attn.c_proj attention.out
               ln_2 norm2  mlp.c_fc    hidden         mlp.c_proj  out""",
            prefix="transformer.",
            stacked=True,
            turned=False,
        ),
    ),
    "llama": (
        WeightNames(  # transformers' LlamaForCausalLM
            "model.embed_tokens words.embedding  lm_head head.embedding  model.norm norm",
            r"model\.layers\.(\d+)",
            """self_attn.q_proj attention.q  self_attn.o_proj attention.out  mlp.gate_proj gate
               self_attn.k_proj attention.k  input_layernorm  norm1          mlp.up_proj   up
               self_attn.v_proj attention.v  post_attention_layernorm norm2  mlp.down_proj down""",
            stacked=True,
        ),
    ),
}
"""The built-in model to the names that its weights have elsewhere."""


def translate(arrays: Mapping[str, np.ndarray], model: str) -> dict[str, np.ndarray]:
    """`arrays` with the names and layouts of the built-in `model`.

    Arrays without a rule keep their names, so that `Weights.match` shows them. PyTorch's counters of batches
    are dropped. Raises `RecipeError` for a model without a table.
    """
    if model not in TABLES:
        text = "names={given!r}: expected {known:or}.{near:near}"
        raise RecipeError("weights-names", text, given=model, known=list(TABLES), near=near(model, TABLES))
    libraries = TABLES[model]
    translated = dict(
        _translated(libraries, name, array)
        for name, array in arrays.items()
        if not name.endswith(".num_batches_tracked")
    )
    translated = _counted_through(_joined(translated))
    return _stacked(translated) if libraries[0].stacked else translated


def _translated(libraries: tuple[WeightNames, ...], name: str, array: np.ndarray) -> tuple[str, np.ndarray]:
    """The name and layout of one array here."""
    module, _, leaf = name.rpartition(".")
    of_module = bool(module) and leaf in {*_WEIGHTS, *_LEAVES}
    whole = module if of_module else name  # else an array of the model itself
    of, new = next(((of, new) for of in libraries if (new := of.find(whole)) is not None), (None, None))
    if of is None or new is None:
        return name, array
    if not of_module or new.endswith(".embedding"):
        return new, array
    if leaf not in _WEIGHTS:
        return f"{new}.{_LEAVES[leaf]}", array
    if array.ndim == 4:
        return f"{new}.kernel", array.transpose(2, 3, 1, 0)
    if array.ndim == 2:
        return f"{new}.kernel", array.T if of.turned else array
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
