"""Of several splits to evaluate on the user says which: none is merged or dropped without a word."""

import tarfile
from pathlib import Path

import numpy as np
import pytest

import chipwise as cw
from chipwise.base.errors import DataError
from chipwise.base.facts import fact
from chipwise.data import ImageFolder, PackedFolder
from chipwise.data.pack.packing import Packing, pack
from chipwise.data.pack.splits import evaluated, splits_of
from chipwise.data.pack.tokenise import TextForm
from refusals import refused
from row_files import IMAGES, example, framed, parquet

SIZES = {"train": 6, "validation": 3, "test": 2}
"""Split to its number of examples."""


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("CHIPWISE_CACHE", str(tmp_path / "cache"))


def image(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(IMAGES[0])


def a_folder(root):
    for split, count in SIZES.items():
        for i in range(count):
            image(root / split / "ab"[i % 2] / f"{i}.jpg")
    return root


def an_archive(root):
    with tarfile.open(root.with_suffix(".tar"), "w") as archive:
        archive.add(a_folder(root), "data")
    return root.with_suffix(".tar")


def a_table(root):
    rows = [f"{split}-{i}.jpg,{'ab'[i % 2]},{split}" for split, count in SIZES.items() for i in range(count)]
    for row in rows:
        image(root / row.partition(",")[0])
    (root / "labels.csv").write_text("\n".join(["file,label,split", *rows]))
    return root / "labels.csv"


def parquets(root):
    root.mkdir()
    for split, count in SIZES.items():
        parquet(root / f"{split}-00000-of-00001.parquet", IMAGES[:1] * count, [i % 2 for i in range(count)])
    return root


def tfrecords(root):
    root.mkdir()
    for split, count in SIZES.items():
        rows = [framed(example(image=IMAGES[0], label=i % 2)) for i in range(count)]
        (root / f"{split}.tfrecord").write_bytes(b"".join(rows))
    return root


def objects(root):
    return {split: [{"x": np.float32(i), "label": i % 2} for i in range(n)] for split, n in SIZES.items()}


def data_sets(root):
    datasets = pytest.importorskip("datasets")
    return {
        split: datasets.Dataset.from_dict(
            {"x": [float(i) for i in range(n)], "label": [0, 1, 0, 1, 0, 1][:n]}
        )
        for split, n in SIZES.items()
    }


def texts(root):
    for split, count in SIZES.items():
        for i in range(count):
            (root / split).mkdir(parents=True, exist_ok=True)
            (root / split / f"{i}.txt").write_text(split[0])
    return root


def tables_of_text(root):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    pytest.importorskip("datasets")
    root.mkdir()
    for split, count in SIZES.items():
        pq.write_table(pa.table({"text": [split[0]] * count}), root / f"{split}.parquet")
    return root


def text_of_the_hub(root):
    """With `hub.from_hub` replaced."""
    return "hf://datasets/me/texts"


SOURCES = [a_folder, an_archive, a_table, parquets, tfrecords, objects, data_sets]
TEXTS = [texts, tables_of_text, text_of_the_hub]


@pytest.mark.parametrize("make", [*SOURCES, *TEXTS])
def test_of_several_splits_one_is_declared(make, tmp_path, monkeypatch):
    rows = {split: [{"text": split[0]}] * n for split, n in SIZES.items()}
    monkeypatch.setattr("chipwise.data.pack.documents.from_hub", lambda name: rows)
    source, of_text = make(tmp_path / "data"), make in TEXTS
    options = {"text": TextForm(3), "columns": {"text": "text"}} if make is text_of_the_hub else {}
    options = {"text": TextForm(3)} if make in (texts, tables_of_text) else options
    with refused(DataError, "splits-several", splits=["validation", "test"], first="validation"):
        pack(source, tmp_path / "none", **options)
    with refused(DataError, "split-unknown", split="dev"):
        pack(source, tmp_path / "none", eval_split="dev", **options)
    for split, other in (("validation", "test"), ("test", "validation")):
        job = Packing(source, tmp_path / split, eval_split=split, **options)
        told = {fact.code: dict(fact.numbers) for fact in job.listing.told}
        assert told["split-read"] == {"split": split} and told["splits-left"] == {"splits": [other]}
        job.run()
        made = {name: PackedFolder(tmp_path / split, name) for name in ("train", "eval")}
        if of_text:  # one letter a document, and the end of each
            assert {
                token for i in range(len(made["eval"])) for token in made["eval"][i]["token"].tolist()
            } <= {
                ord(split[0]),
                256,
            }
        else:
            assert {name: len(one) for name, one in made.items()} == {"train": 6, "eval": SIZES[split]}


@pytest.mark.parametrize("make", [a_folder, an_archive, parquets, tfrecords, texts, tables_of_text])
def test_a_split_of_another_name_is_no_part_of_train(make, tmp_path, monkeypatch):
    monkeypatch.setattr(f"{__name__}.SIZES", {"train": 6, "dev": 3})
    source = make(tmp_path / "data")
    options = {"text": TextForm(3)} if make in (texts, tables_of_text) else {}
    with refused(DataError, "split-unstated") as caught:
        pack(source, tmp_path / "none", **options)
    assert [name.partition("-")[0].partition(".")[0] for name in caught.value.facts["names"]] == ["dev"]
    job = Packing(source, tmp_path / "out", eval_split="dev", **options)
    assert {"split-read"} <= {fact.code for fact in job.listing.told}
    job.run()
    assert len(PackedFolder(tmp_path / "out", "eval")) == 3
    if make is a_folder:
        with refused(DataError, "split-unstated", names=["dev"]):
            ImageFolder(source)


def named(make, root, labels):
    """A source of `make` whose splits have these labels, as text."""
    if make is a_table:
        rows = [
            f"{split}-{i}.jpg,{of},{split}" for split, some in labels.items() for i, of in enumerate(some)
        ]
        for row in rows:
            image(root / row.partition(",")[0])
        (root / "labels.csv").write_text("\n".join(["file,label,split", *rows]))
        return root / "labels.csv"
    if make is data_sets:
        datasets = pytest.importorskip("datasets")
        return {
            split: datasets.Dataset.from_dict({"x": [0.0] * len(some), "label": [*some]})
            for split, some in labels.items()
        }
    root.mkdir()
    for split, some in labels.items():
        if make is parquets:
            parquet(root / f"{split}.parquet", IMAGES[:1] * len(some), [*some])
        else:
            rows = [framed(example(image=IMAGES[0], label=of.encode())) for of in some]
            (root / f"{split}.tfrecord").write_bytes(b"".join(rows))
    return root


@pytest.mark.parametrize(
    ("make", "labels"),
    [
        (a_table, "abab"),
        (a_table, ["a|b", "a", "b"]),  # several classes in a cell
        (parquets, "abab"),
        (tfrecords, "abab"),
        (data_sets, "abab"),
    ],
)
def test_the_classes_of_text_are_those_of_train(make, labels, tmp_path):
    options = {"labels": "several"} if "a|b" in labels else {}
    source = named(make, tmp_path / "data", {"train": labels, "validation": "bc", "test": "ba"})
    with refused(DataError, "classes-unjoined", classes=["c"]):
        pack(source, tmp_path / "none", eval_split="validation", **options)
    pack(source, tmp_path / "out", eval_split="test", **options)
    train, held = (PackedFolder(tmp_path / "out", split) for split in ("train", "eval"))
    assert train.names == held.names == ("a", "b")
    assert np.array_equal(held[0]["label"], [0, 1] if options else 1)


@pytest.mark.parametrize("make", [a_folder, an_archive])
def test_a_source_of_images_has_one_split(make, tmp_path):
    source = make(tmp_path / "data")
    with refused(DataError, "splits-several", first="validation"):
        ImageFolder(source)
    assert len(ImageFolder(source, split="test")) == 2


@pytest.mark.parametrize("make", [a_folder, parquets, objects, texts])
def test_a_share_beside_a_split_is_refused(make, tmp_path):
    source = make(tmp_path / "data")
    options = {"text": TextForm(3)} if make is texts else {}
    with refused(DataError, "split-twice", share=0.5):
        pack(source, tmp_path / "out", split=0.5, eval_split="test", **options)


@pytest.mark.parametrize("given", ["validation", "train", "eval"])
def test_a_split_that_is_not_there(given, tmp_path):
    source = [{"x": np.float32(i)} for i in range(4)]
    for one in (source, {"train": source, "test": source}):
        with refused(DataError, "split-unknown", split=given):
            pack(one, tmp_path / "out", eval_split=given)


@pytest.mark.parametrize(
    ("there", "given", "roles", "codes"),
    [
        (["train"], None, {"train": "train"}, []),
        (["train", "val"], None, {"train": "train", "val": "eval"}, ["split-read"]),
        (["train", "test", "unsupervised"], None, {"train": "train", "test": "eval"}, None),
        (["train", "dev"], None, {"train": "train", "dev": "eval"}, ["split-read"]),
        (["train", "dev", "test"], "dev", {"train": "train", "dev": "eval"}, None),
        (["test"], None, {"test": "eval"}, ["split-read"]),
    ],
)
def test_splits_that_are_known_by_their_names(there, given, roles, codes):
    found, told = evaluated(there, given, "data")
    assert found == roles
    assert [fact.code for fact in told] == (["split-read", "splits-left"] if codes is None else codes)


@pytest.mark.parametrize("there", [["train", "a", "b"], ["val", "test"], ["train", "eval", "valid"]])
def test_splits_that_are_not(there):
    with refused(DataError, "splits-several", splits=[name for name in there if name != "train"]):
        evaluated(there, None, "data")


@pytest.mark.parametrize(
    ("name", "split"),
    [
        ("train-00000-of-00002.parquet", "train"),
        ("validation-00000-of-00001", "validation"),
        ("cats_test.tfrecord", "test"),
        ("VAL.parquet", "val"),
        ("testament.jsonl", "train"),
        ("cats-dev.jsonl", "dev"),
    ],
)
def test_splits_of_file_names(name, split):
    assert splits_of([Path(name)], "dev") == {Path(name): split}


def test_a_file_without_a_split_is_of_train_beside_one_to_evaluate_on():
    files = [Path("a.parquet"), Path("a-test.parquet")]
    assert [*splits_of(files, None).values()] == ["train", "test"]


RARE = np.asarray([0] * 90 + [1] * 10, np.int32)
ROWS = {"x": np.arange(100, dtype=np.float32), "label": RARE}


@pytest.mark.parametrize(
    "source",
    [
        cw.Arrays(**ROWS, classes=2),
        cw.data.Renamed(cw.Arrays(**ROWS), ("common", "rare")),
        cw.data.Lazy(100, cw.Arrays(**ROWS).spec, lambda: ROWS, classes=2),
        [{"x": x, "label": label} for x, label in zip(ROWS["x"], RARE, strict=True)],
        cw.Arrays(x=ROWS["x"], label=RARE.astype(np.float32)),
        cw.Arrays(**ROWS),
    ],
    ids=["arrays", "renamed", "lazy", "list", "values", "numbers"],
)
def test_a_share_of_an_object_is_of_each_class_or_said_not_to_be(source, tmp_path, request):
    job = Packing(source, tmp_path / "out", split=0.1)
    told = [one for one in job.listing.told if one.code.startswith("split-")]
    job.run()
    held = PackedFolder(tmp_path / "out", "eval")
    if request.node.callspec.id in ("list", "values", "numbers"):
        assert told == [fact("split-of-all", train=90, eval=10)]
    else:
        assert told == [fact("split-of-each", classes=2, train=[9, 81], eval=[1, 9])]
        assert np.bincount([held[i]["label"] for i in range(10)]).tolist() == [9, 1]
    assert all(held[i]["label"] == RARE[int(held[i]["x"])] for i in range(10))
