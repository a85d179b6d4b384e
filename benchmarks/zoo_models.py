"""The candidates of the zoo, found by program, and each of them made small.

    python -m benchmarks.zoo_models > benchmarks/zoo_candidates.csv

`timm` and `torchvision`: the smallest model of each file of models. `transformers`: each
kind of configuration that has a head for classes, for tokens or for sequences, with sizes cut by their names.
`keras`: the smallest model of each file of `keras.applications`. `torch`: `zoo_idioms.py`. A candidate is
kept if its own framework makes it, calls it in both modes, and differentiates it.
"""

from __future__ import annotations

import collections
import contextlib
import csv
import dataclasses
import functools
import importlib
import json
import re
import signal
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from chipwise.interop.keras import keras_library

SOURCES = ("timm", "torchvision", "transformers", "keras", "torch")
PACKAGES = Path(__file__).parents[1] / "build/zoo"
"""Where timm and torchvision may lie beside an environment whose PyTorch has other operators."""
BATCH, CLASSES, LENGTH, WORDS = 6, 10, 16, 99
LARGEST = 120_000_000
"""Parameters of a candidate."""
PIXELS = ("fcn", "deeplab", "lraspp")
HEADS = {
    "ImageClassification": "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
    "SequenceClassification": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
    "CausalLM": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "MaskedLM": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "Seq2SeqLM": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
}


@dataclass(frozen=True)
class Candidate:
    source: str
    name: str
    given: str = "{}"
    """What its maker is given, as JSON; `size`: the pixels of a side."""

    @property
    def settings(self) -> dict[str, Any]:
        return json.loads(self.given)

    @property
    def key(self) -> str:
        return f"{self.source}:{self.name}"


@dataclass(frozen=True)
class Model:
    """A model with data for it.

    *Fields:* `make`: makes it, with the same weights each time. `columns`: the arguments by name.
    `label`: what `loss`, a function of (outputs, target), compares the outputs with.
    """

    make: Callable[[], Any]
    columns: Mapping[str, np.ndarray]
    label: np.ndarray
    loss: Any

    def rows(self) -> dict[str, np.ndarray]:
        return {**self.columns, "label": self.label}


def made(candidate: Candidate) -> Model:
    return globals()[f"_{candidate.source}"](candidate.name, **candidate.settings)


def stored() -> list[Candidate]:
    with (Path(__file__).parent / "zoo_candidates.csv").open() as file:
        return [Candidate(**row) for row in csv.DictReader(file)]


# ---- making


def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def images(size: int, last: bool = False) -> np.ndarray:
    shape = (BATCH, size, size, 3) if last else (BATCH, 3, size, size)
    return rng().normal(size=shape).astype(np.float32)


def labels(*shape: int, most: int = CLASSES) -> np.ndarray:
    return rng().integers(0, most, (BATCH, *shape)).astype(np.int32)


def tokens(least: int = 5) -> np.ndarray:
    return rng().integers(least, WORDS, (BATCH, LENGTH)).astype(np.int32)


def logits(outputs: Any) -> Any:
    """The main outputs of what a model returns."""
    if isinstance(outputs, Mapping):
        outputs = outputs["logits"] if "logits" in outputs else outputs["out"]
    while isinstance(outputs, tuple | list):
        outputs = outputs[0]
    return outputs


def of_classes(outputs: Any, target: Any) -> Any:
    """Cross-entropy of classes `(b, c)`, of pixels `(b, c, h, w)`, or of tokens `(b, n, words)`."""
    import torch

    values = logits(outputs)
    if values.ndim == 3:
        values, target = values.flatten(0, 1), target.flatten()
    return torch.nn.functional.cross_entropy(values, target)


def seeded(make: Callable[[], Any]) -> Callable[[], Any]:
    """`make`, with the same weights each time, and with none that are 0: a zero hides what is behind it."""
    import torch

    def again() -> Any:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            module = make()
            for parameter in module.parameters():
                if parameter.is_floating_point() and not parameter.detach().any():
                    torch.nn.init.normal_(parameter, std=0.02)
        return module

    again.__wrapped__ = make
    return again


def beside() -> None:
    """Lets the packages in `PACKAGES` be imported."""
    if PACKAGES.exists() and str(PACKAGES) not in sys.path:
        sys.path.append(str(PACKAGES))


@functools.cache
def torchvision() -> Any:
    """torchvision. The operators of its detectors may be compiled for another PyTorch: then they are
    declared."""
    import torch

    beside()
    library = torch.library.Library("torchvision", "FRAGMENT")
    try:
        import torchvision
    except RuntimeError:
        for name in [name for name in sys.modules if name.startswith("torchvision")]:
            del sys.modules[name]
        for name in ("nms", "qnms"):
            with contextlib.suppress(RuntimeError):
                library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        import torchvision
    torchvision.declared = library  # for as long as the process lives
    return torchvision


def _timm(name: str, size: int, **given: Any) -> Model:
    torchvision()
    import timm

    make = seeded(lambda: timm.create_model(name, num_classes=CLASSES, **given))
    return Model(make, {"image": images(size)}, labels(), of_classes)


def torchvision_model(name: str, **given: Any) -> Any:
    fresh = {"weights_backbone": None} if name.startswith(PIXELS) else {}
    return torchvision().models.get_model(name, num_classes=CLASSES, **given, **fresh)


def _torchvision(name: str, size: int, **given: Any) -> Model:
    pixels = name.startswith(PIXELS)
    make = seeded(functools.partial(torchvision_model, name, **given))
    label = labels(size, size) if pixels else labels()
    image = images(size)
    if torchvision().models.get_model_builder(name).__module__.startswith("torchvision.models.video"):
        image = np.repeat(image[:, :, None], given.get("frames", 16), axis=2)
    return Model(make, {"image": image}, label, of_classes)


def _torch(name: str) -> Model:
    from . import zoo_idioms as idioms

    if name in idioms.IMAGES:
        return Model(seeded(idioms.IMAGES[name]), {"x": images(16)}, labels(), of_classes)
    if name in idioms.TOKENS:
        return Model(seeded(idioms.TOKENS[name]), {"x": tokens(1)[:, :12]}, labels(), of_classes)
    rows = rng().normal(size=(BATCH, 12, 16)).astype(np.float32)
    return Model(seeded(idioms.ROWS[name]), {"x": rows}, labels(), of_classes)


def _keras(name: str, size: int) -> Model:
    keras = keras_library()

    def make() -> Any:
        keras.utils.set_random_seed(0)
        maker = getattr(keras.applications, name)
        return maker(weights=None, classes=CLASSES, input_shape=(size, size, 3))

    return Model(
        make, {"image": images(size, last=True)}, labels(), keras.losses.SparseCategoricalCrossentropy()
    )


# ---- transformers

SMALL = {
    "vocab": WORDS,
    "width": 32,
    "heads": 4,
    "kv_heads": 2,
    "head": 8,
    "layers": 2,
    "inner": 64,
    "positions": 64,
    "experts": 4,
    "chosen": 2,
    "groups": 1,
    "one": 1,
}
NAMES = {
    "vocab": "vocab_size text_vocab_size decoder_vocab_size src_vocab_size tgt_vocab_size",
    "width": (
        "hidden_size d_model n_embd dim embed_dim emb_dim embedding_size d_embed word_embed_proj_dim "
        "encoder_hidden_size decoder_hidden_size cross_attention_hidden_size projection_dim"
    ),
    "heads": (
        "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads "
        "num_encoder_attention_heads num_decoder_attention_heads mamba_n_heads"
    ),
    "kv_heads": "num_key_value_heads num_kv_heads",
    "head": (
        "head_dim d_kv kv_channels d_head attention_head_size qk_nope_head_dim qk_rope_head_dim v_head_dim "
        "global_head_dim"
    ),
    "layers": (
        "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_encoder_layers "
        "num_decoder_layers"
    ),
    "inner": (
        "intermediate_size ffn_dim d_ff n_inner encoder_ffn_dim decoder_ffn_dim moe_intermediate_size "
        "hidden_dim ffn_hidden_size shared_expert_intermediate_size shared_intermediate_size d_inner "
        "mlp_hidden_size intermediate_size_mlp moe_shared_expert_intermediate_size"
    ),
    "positions": (
        "max_position_embeddings n_positions max_seq_len max_sequence_length max_source_positions "
        "max_target_positions seq_length max_encoder_position_embeddings max_decoder_position_embeddings"
    ),
    "experts": "num_local_experts num_experts n_routed_experts moe_num_experts",
    "chosen": "num_experts_per_tok num_experts_per_token moe_topk top_k_experts moe_k",
    "groups": "n_group topk_group",
    "one": "n_shared_experts num_shared_experts first_k_dense_replace",
}
FEW = ("vocab", "layers", "positions")
"""What is cut if a model with all of its sizes cut does not work."""
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}


def smaller(kind: Any, size: int, cut: tuple[str, ...] = tuple(NAMES), **more: Any) -> Any:
    """A configuration of `kind` with the sizes `cut` whose names are known."""
    sizes = {name: SMALL[kind] for kind in cut for name in NAMES[kind].split()}
    known = kind()
    given: dict[str, Any] = {}
    for name in {field.name for field in dataclasses.fields(kind)} | set(kind.sub_configs):
        value = getattr(known, name, None)
        if name in kind.sub_configs:
            part = type(value) if value is not None else kind.sub_configs[name]
            if part.__name__ != "AutoConfig":
                given[name] = smaller(part, size, cut)
        elif name in SPECIAL and value is not None:
            given[name] = SPECIAL[name]
        elif name.endswith("_token_id") and isinstance(value, int) and value >= WORDS:
            given[name] = 3
        elif name in sizes and type(value) is int:
            given[name] = min(value, sizes[name])
        elif name == "image_size" and value is not None:
            given[name] = size
        elif name == "patch_size" and type(value) is int and value > 8:
            given[name] = 8
        elif name == "depths" and value:
            given[name] = [1 for _ in value]
    heads, pairs = given.get("num_attention_heads"), getattr(known, "num_key_value_heads", None)
    if heads and pairs and pairs == getattr(known, "num_attention_heads", None):
        given["num_key_value_heads"] = heads
    return kind(**given | more)


@functools.cache
def quiet_transformers() -> Any:
    import transformers

    transformers.logging.set_verbosity_error()
    return transformers


def _transformers(name: str, size: int = 0, few: bool = False, **more: Any) -> Model:
    transformers = quiet_transformers()
    from transformers.models.auto import modeling_auto

    kind, head = name.split("/")
    cut = FEW if few else tuple(NAMES)
    config = smaller(transformers.models.auto.CONFIG_MAPPING[kind], size, cut, **more)
    if "Classification" in head:
        config.num_labels = CLASSES
    if head == "SequenceClassification" and getattr(config, "pad_token_id", 0) is None:
        config.pad_token_id = 0
    model = getattr(modeling_auto, HEADS[head])[kind]
    model = getattr(transformers, model if isinstance(model, str) else model[0])
    make = seeded(lambda: model(config))
    if head == "ImageClassification":
        return Model(make, {"pixel_values": images(size)}, labels(), of_classes)
    taken = model.forward.__code__.co_varnames
    mask = np.ones((BATCH, LENGTH), np.int32)
    mask[1::2, 12:] = 0
    columns = {"input_ids": np.where(mask, tokens(), 0).astype(np.int32), "attention_mask": mask}
    if head == "Seq2SeqLM":
        columns["decoder_input_ids"] = tokens()
    columns = {n: c for n, c in columns.items() if n in taken or "kwargs" in taken}
    return Model(make, columns, labels() if "Class" in head else tokens(), of_classes)


# ---- finding


def tried(candidate: Candidate) -> Candidate:
    """`candidate`. Raises if its framework fails."""
    model = made(candidate)
    if candidate.source == "keras":
        model.make()
        return candidate
    import torch

    count = on_meta(model.make.__wrapped__)
    if count > LARGEST:
        raise ValueError(f"{count} parameters")
    if candidate.source == "timm":  # without numbers: shapes alone show what it takes
        with torch.device("meta"):
            net = model.make.__wrapped__()
            for train in (False, True):
                net.train(train)
                net(torch.zeros(model.columns["image"].shape))
        return candidate
    net = model.make()
    target = torch.from_numpy(model.label).long()
    for train in (False, True):
        loss = model.loss(called(net, model.columns, train), target)
    loss.backward()
    if not torch.isfinite(loss):
        raise ValueError("a loss that is not finite")
    return candidate


def called(net: Any, columns: Mapping[str, np.ndarray], train: bool) -> Any:
    """The outputs of eager PyTorch."""
    import torch

    kind = next(p.dtype for p in net.parameters() if p.is_floating_point())

    def tensor(column: np.ndarray) -> Any:
        whole = column.dtype.kind == "i"
        return torch.from_numpy(column).to(torch.int64 if whole else kind)

    net.train(train)
    given = {name: tensor(column) for name, column in columns.items()}
    return net(*given.values()) if len(given) == 1 else net(**given)


def first_of(ways: list[Candidate]) -> Candidate | str:
    """The first of the `ways` to make a candidate that works, or why the last one does not."""
    why = ""
    for way in ways:
        try:
            limited(90)
            return tried(way)
        except Exception as error:
            why = f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
        finally:
            limited(0)
    return why


def limited(seconds: int) -> None:
    """Raises `TimeoutError` in this process after so long, 0 for not at all."""

    def ended(*_: Any) -> None:
        raise TimeoutError(f"more than {seconds} s")

    signal.signal(signal.SIGALRM, ended)
    signal.alarm(seconds)


def ways(source: str, name: str, sizes: tuple[int, ...], settings: list[dict]) -> list[Candidate]:
    return [
        Candidate(source, name, json.dumps(s | ({"size": n} if n else {}))) for s in settings for n in sizes
    ]


def smallest(counts: Mapping[str, tuple[str, int]]) -> list[str]:
    """Of names with their group and size, the smallest name of each group."""
    best: dict[str, tuple[int, str]] = {}
    for name, (group, size) in counts.items():
        best[group] = min(best.get(group, (size, name)), (size, name))
    return sorted(name for _, name in best.values())


def on_meta(make: Callable[[], Any]) -> int:
    import torch

    try:
        with torch.device("meta"):
            return sum(p.numel() for p in make().parameters())
    except NotImplementedError:  # it reads a value of a tensor that it makes
        return sum(p.numel() for p in make().parameters())


WORDS_OF_SIZE = "atto femto pico nano zepto xxt xx_small xxs xs extra_small xtiny tiny mini mobile small"
MORE_WORDS = "medium base large huge giant gigantic enormous so400m"


def by_name(name: str) -> tuple:
    """A guess at how large a model is, by the words and the numbers in its name."""
    small, large = WORDS_OF_SIZE.split(), MORE_WORDS.split()
    word = next((i - len(small) for i, word in enumerate(small) if word in name), 0)
    word = next((i + 1 for i, word in enumerate(large) if word in name), word)
    return word, [int(n) for n in re.findall(r"\d+", name)], name


def timm_names() -> list[str]:
    """Of each file, the smallest of the four that seem small by their names."""
    torchvision()
    import timm

    counts = {}
    for module in timm.models._registry._module_to_models:
        names = [name for name in timm.list_models(module=module) if not name.startswith("test_")]
        for name in sorted(names, key=by_name)[:4]:
            with contextlib.suppress(Exception):
                make = functools.partial(timm.create_model, name, num_classes=CLASSES)
                counts[name] = (module, on_meta(make))
    return smallest(counts)


def torchvision_names() -> list[str]:
    models, counts = torchvision().models, {}
    for name in models.list_models():
        module = models.get_model_builder(name).__module__
        if not any(part in module for part in ("detection", "optical_flow", "quantization")):
            with contextlib.suppress(TypeError):
                counts[name] = (module, on_meta(functools.partial(torchvision_model, name)))
    return smallest(counts)


def keras_names() -> list[str]:
    """By the numbers and the words of sizes in their names: to make all of them takes minutes."""
    keras = keras_library()
    words = ("Tiny", "Small", "Mobile", "Base", "Large", "XLarge")
    counts = {}
    for name in dir(keras.applications):
        maker = getattr(keras.applications, name)
        if callable(maker):
            word = next((i for i, word in enumerate(words) if name.endswith(word)), 0)
            number = int(re.sub(r"V\d|\D", "", name) or 0)
            counts[name] = (maker.__module__, 1000 * word + number)
    return smallest(counts)


def transformers_names() -> list[str]:
    quiet_transformers()
    auto = importlib.import_module("transformers.models.auto.modeling_auto")
    return [f"{kind}/{head}" for head, names in HEADS.items() for kind in getattr(auto, names)]


def all_ways(sources: tuple[str, ...]) -> Iterator[list[Candidate]]:
    if "torch" in sources:
        from . import zoo_idioms as idioms

        for name in (*idioms.IMAGES, *idioms.ROWS, *idioms.TOKENS):
            yield [Candidate("torch", name)]
    if "timm" in sources:
        sizes = (64, 96, 128)
        dropped = [{"drop_path_rate": 0.1}, {}]
        sized = [d | {"img_size": n} for d in dropped for n in sizes]
        for name in timm_names():
            given = ways("timm", name, sizes, dropped[:1])
            given += [Candidate("timm", name, json.dumps(s | {"size": s["img_size"]})) for s in sized[:3]]
            given += ways("timm", name, (160, 192, 224, 256), dropped[:1])
            given += ways("timm", name, sizes, dropped[1:])
            given += [Candidate("timm", name, json.dumps(s | {"size": s["img_size"]})) for s in sized[3:]]
            yield given + ways("timm", name, (160, 192, 224, 256), dropped[1:])
    if "torchvision" in sources:
        for name in torchvision_names():
            given = ways("torchvision", name, (64, 96, 128), [{}])
            given += [Candidate("torchvision", name, json.dumps({"size": 64, "image_size": 64}))]
            yield given + ways("torchvision", name, (224, 299), [{}])
    if "keras" in sources:
        for name in keras_names():
            yield ways("keras", name, (32, 75, 96, 224), [{}])
    if "transformers" in sources:
        for name in transformers_names():
            picture = name.endswith("/ImageClassification")
            yield ways("transformers", name, (32, 64, 128, 224) if picture else (0,), [{}, {"few": True}])


def load(sources: Iterable[str]) -> None:
    """Imports what many candidates share, before processes are forked."""
    import torch

    torch.set_num_threads(1)
    for name in ("torch._dynamo", "torchax.tensor", "chipwise.run.fit"):
        importlib.import_module(name)
    if "transformers" in sources:
        importlib.import_module("transformers.modeling_utils")
        quiet_transformers()
    if {"timm", "torchvision"} & set(sources):
        torchvision()
        importlib.import_module("timm")


def main() -> None:
    sources = tuple(sys.argv[1:]) or SOURCES
    load(sources)
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow([field.name for field in dataclasses.fields(Candidate)])
    left = collections.Counter()
    warnings.simplefilter("ignore")
    for each in all_ways(sources):
        answer = first_of(each)
        if isinstance(answer, str):
            left[each[0].source] += 1
            print(f"{each[0].key}: {answer}", file=sys.stderr, flush=True)
        else:
            writer.writerow(dataclasses.astuple(answer))
            sys.stdout.flush()
    print(f"left out: {dict(left)}", file=sys.stderr)


if __name__ == "__main__":
    main()
