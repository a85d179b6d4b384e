"""Parquet and TFRecord: the same images and labels as a folder's, and what damage is told of."""

import contextlib
import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chipwise.base.errors import DataError
from chipwise.data import PackedFolder
from chipwise.data.pack import hub, tfrecord
from chipwise.data.pack.columns import labels_of
from chipwise.data.pack.pack_settings import USUAL
from chipwise.data.pack.packing import pack
from chipwise.data.sources import materialize
from refusals import refused
from row_files import IMAGES, example, field, framed, parquet, varint

LABELS = [2, 0, 1, 0, 2]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("CHIPWISE_CACHE", str(tmp_path / "cache"))


def packed(folder):
    made = PackedFolder(folder)
    made.verify()
    return made, materialize(made)


@pytest.fixture
def expected(tmp_path):
    _, columns = packed(pack(list(zip(IMAGES, LABELS, strict=True)), tmp_path / "expected", names="abc"))
    return columns


def test_the_checksum_is_tfrecord_s_masked_castagnoli():
    assert tfrecord._masked(b"123456789") == (((0xE3069283 >> 15) | (0xE3069283 << 17)) + 0xA282EAD8) % 2**32


@given(
    st.dictionaries(
        st.text("abc/", min_size=1, max_size=4),
        st.one_of(
            st.binary(max_size=300), st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=4)
        ),
        max_size=4,
    )
)
def test_an_example_is_read_as_it_was_written(features):
    found = tfrecord.example(example(**features))
    assert list(found) == list(features)
    for name, value in features.items():
        assert list(found[name]) == ([value] if isinstance(value, bytes) else value)


@given(st.binary(max_size=60))
def test_bytes_that_are_no_example_end_in_a_value_error(data):
    with contextlib.suppress(ValueError):
        assert isinstance(tfrecord.example(data), dict)


@pytest.mark.parametrize("names", [("image/encoded", "image/class/label"), ("photo", "kind")])
def test_tfrecords_of_images(tmp_path, expected, names):
    image, label = names
    for shard, rows in enumerate((range(3), range(3, 5))):
        data = [framed(example(**{image: IMAGES[i], label: LABELS[i], "w": np.ones(2)})) for i in rows]
        (tmp_path / f"train-0000{shard}-of-00002").write_bytes(b"".join(data))
    (tmp_path / "validation-00000-of-00001").write_bytes(framed(example(**{image: IMAGES[0], label: 1})))
    columns = None if "/" in image else {"image": image, "label": label}
    made, found = packed(pack(tmp_path, tmp_path.parent / f"{tmp_path.name}-out", columns=columns))
    np.testing.assert_array_equal(found["image"], expected["image"])
    assert found["label"].tolist() == LABELS and made.names == ("0", "1", "2")
    assert len(PackedFolder(made.path.parent, "eval")) == 1


def test_tfrecords_of_numbers(tmp_path):
    rows = [example(x=np.arange(3) + i, label=i % 2) for i in range(4)]
    (tmp_path / "a.tfrecord").write_bytes(b"".join(map(framed, rows)))
    _, found = packed(pack(tmp_path / "a.tfrecord", tmp_path / "out"))
    assert found["x"].tolist() == [[i, i + 1, i + 2] for i in range(4)] and found["label"].tolist() == [
        0,
        1,
        0,
        1,
    ]


@pytest.mark.parametrize(
    ("at", "code"), [(3, "tfrecord-damaged"), (-9, "tfrecord-damaged"), (None, "tfrecord-cut")]
)
def test_a_damaged_tfrecord_is_refused_with_its_place(tmp_path, at, code):
    first, second = (framed(example(x=np.ones(3), label=i)) for i in range(2))
    data = bytearray(first + second)
    if at is None:
        data = data[:-5]
    else:
        data[len(first) + at if at > 0 else at] ^= 1
    (tmp_path / "a.tfrecord").write_bytes(data)
    with refused(DataError, code, path=tmp_path / "a.tfrecord") as error:
        pack(tmp_path / "a.tfrecord", tmp_path / "out")
    assert len(first) <= error.value.facts["offset"] <= len(first) + 12


@pytest.mark.parametrize("form", ["bytes", "hugging face"])
def test_parquet_of_images(tmp_path, expected, form):
    images = IMAGES if form == "bytes" else [{"bytes": image, "path": "x.jpeg"} for image in IMAGES]
    (tmp_path / "data").mkdir()
    parquet(tmp_path / "data" / "train-00000-of-00001.parquet", images, LABELS)
    parquet(tmp_path / "data" / "test-00000-of-00001.parquet", images[:2], LABELS[:2])
    made, found = packed(pack(tmp_path, tmp_path.parent / f"{tmp_path.name}-out"))
    np.testing.assert_array_equal(found["image"], expected["image"])
    assert found["label"].tolist() == LABELS
    assert len(PackedFolder(made.path.parent, "eval")) == 2


@pytest.mark.parametrize("label", [b"\xff\xd8\xff", IMAGES[0]])
def test_a_label_of_bytes_that_are_no_text_is_refused(tmp_path, label):
    (tmp_path / "a.tfrecord").write_bytes(framed(example(image=IMAGES[0], label=label)))
    with refused(DataError, "rows-label-kind", label=str(label)[:60]):
        pack(tmp_path / "a.tfrecord", tmp_path / "out")


def test_whole_numbers_that_are_no_classes_are_refused():
    labels = [0, (1 << 20) - 1]
    assert len(labels_of({"train": labels})[1]) == 1 << 20
    with refused(DataError, "rows-label-range", low=0, high=1 << 20):
        labels_of({"train": [0, 1 << 20]})
    assert labels_of({"train": [0, 1 << 20]}, "numbers")[0]["train"]["label"].tolist() == [0, 1 << 20]


def test_a_row_without_a_label_is_counted_in_its_split():
    with refused(DataError, "rows-label-missing", row=1, split="eval"):
        labels_of({"train": ["a", "b"], "eval": ["b", None]})


def test_spellings_of_a_name_are_one_class():
    found, classes = labels_of({"train": ["caf\u00e9", "a"], "eval": ["cafe\u0301"]})
    assert classes == ("a", "caf\u00e9") and found["eval"]["label"].tolist() == [1]


def test_labels_of_several_numbers_are_vectors_and_of_several_lengths_are_refused():
    pairs = [np.asarray([1, 2]), np.asarray([3, 4])]
    found, classes = labels_of({"train": pairs})
    assert found["train"]["label"].tolist() == [[1, 2], [3, 4]] and classes == ()
    with refused(DataError, "rows-label-kind"):
        labels_of({"train": [*pairs, np.asarray([5])]})


def test_floats_that_are_none_are_no_example():
    feature = field(2, varint(1 << 3) + varint(5))  # a list of floats with a varint in it
    data = field(1, field(1, field(1, b"x") + field(2, feature)))
    with contextlib.suppress(ValueError):
        assert tfrecord.example(data)["x"].size == 0


@pytest.mark.parametrize("damage", ["the footer", "the labels"])
def test_a_damaged_parquet_is_refused(tmp_path, damage):
    path = parquet(tmp_path / "a.parquet", IMAGES, [str(label) * 40 for label in LABELS])
    whole = bytearray(path.read_bytes())
    if damage == "the footer":
        del whole[-20:]
    else:
        for at in range(4, len(whole) - 8 - int.from_bytes(whole[-8:-4], "little")):
            whole[at] = 0xFF
    path.write_bytes(whole)
    with refused(DataError, "rows-unreadable", path=path):
        pack(path, tmp_path / "out")


def test_labels_that_are_missing_and_columns_that_are_not_there(tmp_path):
    path = parquet(tmp_path / "a.parquet", IMAGES, [1, 2, None, 0, 1])
    with refused(DataError, "rows-label-missing", row=2):
        pack(path, tmp_path / "out")
    with refused(DataError, "rows-column", column="z"):
        pack(path, tmp_path / "out", columns={"label": "z"})


def test_a_parquet_that_states_more_rows_than_bytes_is_refused(tmp_path, monkeypatch):
    """Each row costs disk before the first one is packed, and a footer may state any number."""
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    pytest.importorskip("datasets")
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"x": np.zeros(30_000, np.int32)}), path)
    assert path.stat().st_size < 30_000
    monkeypatch.setattr(hub, "_FEWEST_ROWS", 29_999)
    with refused(DataError, "rows-unreadable", path=path):
        pack(path, tmp_path / "out")
    monkeypatch.setattr(hub, "_FEWEST_ROWS", 30_000)
    assert len(hub.from_parquet([path], USUAL).splits["train"].names) == 30_000


@pytest.mark.parametrize("kind", ["binary", "text", "in a list"])
def test_a_parquet_whose_dictionary_repeats_long_values_is_refused(tmp_path, kind, monkeypatch):
    """2 kB of which each row is 20 kB: counted by their lengths, not by expanding them."""
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    pytest.importorskip("datasets")
    value, path, rows = "x" * 20_000, tmp_path / "a.parquet", 200
    values = [value.encode() if kind == "binary" else [value] if kind == "in a list" else value] * rows
    pq.write_table(pa.table({"x": pa.array(values)}), path, compression="zstd")
    monkeypatch.setattr(hub, "_MOST_EXPANDED", rows * len(value) - 1)
    with refused(DataError, "rows-unreadable", path=path):
        pack(path, tmp_path / "out")
    if kind == "text":
        with refused(DataError, "rows-unreadable", path=path):
            next(hub.text_rows(path))
    monkeypatch.setattr(hub, "_MOST_EXPANDED", rows * len(value))
    hub._refuse_expanding(path)


@pytest.mark.parametrize("ending", ["jsonl", "csv"])
def test_a_line_without_end_is_refused_before_it_is_read(tmp_path, ending, monkeypatch):
    """Of one that is twice the limit a whole piece has no line break; the library would hold it in memory."""
    pytest.importorskip("datasets")
    monkeypatch.setattr(hub, "_LONGEST_LINE", 1 << 16)
    path, row = tmp_path / f"a.{ending}", '{"text": "%s"}\n' if ending == "jsonl" else "%s\n"
    path.write_text("text\n" * (ending == "csv") + row % ("x" * 60_000) * 3)
    assert [len(one["text"]) for one in hub.text_rows(path)] == [60_000] * 3
    path.write_text("text\n" * (ending == "csv") + row % "x" + row % ("x" * (3 << 16)))
    with refused(DataError, "rows-unreadable", path=path):
        next(hub.text_rows(path))


def test_a_file_that_was_replaced_is_read_again(tmp_path):
    """The library remembers a file by its time of change, which a copy may keep."""
    for labels in ([0, 1], [1, 1]):
        path = parquet(tmp_path / "a.parquet", IMAGES[:2], labels)
        os.utime(path, (1.7e9, 1.7e9))
        assert hub.from_parquet([path], USUAL).splits["train"].labels["label"].tolist() == labels


@pytest.mark.parametrize("name", ["a*", "a?", "a[b]", "a[!x]", "**"])
def test_a_name_is_no_pattern(tmp_path, name):
    """The library takes patterns: of a file `a*` it would read `ab` too."""
    parquet(tmp_path / "ab.parquet", IMAGES, LABELS)
    path = parquet(tmp_path / f"{name}.parquet", IMAGES[:2], LABELS[:2])
    assert len(hub.from_parquet([path], USUAL).splits["train"].names) == 2
    for file, rows in ((tmp_path / "ab.csv", 3), (tmp_path / f"{name}.csv", 2)):
        file.write_text("text\n" + "x\n" * rows)
    assert len(list(hub.text_rows(file))) == 2


def test_a_path_in_a_table_opens_no_file(tmp_path):
    (tmp_path / "secret.png").write_bytes(IMAGES[0])
    rows = [{"bytes": None, "path": str(tmp_path / "secret.png")}] * 2
    path = parquet(tmp_path / "a.parquet", rows, [0, 1])
    with refused(DataError, "pack-skipped-many"):
        pack(path, tmp_path / "out", max_skipped=0)


def test_a_data_set_of_the_library_is_packed_by_its_splits(tmp_path, expected, monkeypatch):
    datasets = pytest.importorskip("datasets")
    names = datasets.ClassLabel(names=["a", "b", "c"])
    features = datasets.Features({"img": datasets.Image(), "label": names})
    images = [{"bytes": image, "path": None} for image in IMAGES]
    made = datasets.Dataset.from_dict({"img": images, "label": LABELS}, features=features)
    whole = {"train": made, "validation": made.select([0]), "test": made.select([1, 2])}
    monkeypatch.setattr(datasets, "load_dataset", lambda name, **_: whole if name == "me/mine" else None)
    for number, source in enumerate((made, whole, "hf://datasets/me/mine")):
        split = None if source is made else "validation"
        pack_, found = packed(pack(source, tmp_path / str(number), store="jpeg", eval_split=split))
        np.testing.assert_array_equal(found["image"], expected["image"])
        assert found["label"].tolist() == LABELS and pack_.names == ("a", "b", "c")
        assert pack_.encoded(1) == IMAGES[1]
        assert source is made or len(PackedFolder(pack_.path.parent, "eval")) == 1
