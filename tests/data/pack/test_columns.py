"""Which columns of a table are read, as what, and which are left out. None is chosen of two."""

import json

import numpy as np
import pytest

from chipwise.base.errors import DataError, RecipeError
from chipwise.base.facts import fact
from chipwise.data import PackedFolder
from chipwise.data.pack.packing import Packing
from chipwise.data.pack.tokenise import TextForm
from refusals import refused
from row_files import IMAGES, example, framed

LABELS = [0, 1, 0]
NUMBERS = [0.5, 1.5, 2.5]
TEXT = ["a cat", "a dog", "a cow"]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("CHIPWISE_CACHE", str(tmp_path / "cache"))


def parquet(root, **columns):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    pytest.importorskip("datasets")
    pq.write_table(pa.table(columns), root / "rows.parquet")
    return root / "rows.parquet"


def data_set(root, **columns):
    return pytest.importorskip("datasets").Dataset.from_dict(columns)


def tfrecord(root, **columns):
    rows = [{n: as_feature(c[i]) for n, c in columns.items()} for i in range(3)]
    (root / "rows.tfrecord").write_bytes(b"".join(framed(example(**row)) for row in rows))
    return root / "rows.tfrecord"


def as_feature(value):
    value = value.encode() if isinstance(value, str) else value
    return np.asarray([value], np.float32) if isinstance(value, float) else value


def packed(source, out, **options):
    job = Packing(source, out, **options)
    job.run()
    return PackedFolder(out), [one for one in job.listing.told if one.code.startswith("columns-")]


OF_ROWS = pytest.mark.parametrize("make", [parquet, data_set, tfrecord])


@OF_ROWS
@pytest.mark.parametrize(
    ("columns", "declared", "read", "left", "stored"),
    [
        # Beside an image nothing else is read
        (
            {"image": IMAGES[:3], "label": LABELS, "caption": TEXT, "width": NUMBERS},
            {},
            ["image from image", "label from label"],
            ["caption", "width"],
            {"image", "label"},
        ),
        (
            {"photo": IMAGES[:3], "kind": LABELS, "label": [5, 6, 7]},
            {"image": "photo", "label": "kind"},
            ["image from photo", "label from kind"],
            ["label"],
            {"image", "label"},
        ),
        # Without one, text is left out, and numbers keep their names
        (
            {"x": NUMBERS, "label": LABELS, "note": TEXT, "other": TEXT},
            {},
            ["label from label", "x"],
            ["note", "other"],
            {"x", "label"},
        ),
        ({"x": NUMBERS, "y": NUMBERS, "name": TEXT}, {}, ["x", "y"], ["name"], {"x", "y"}),
        ({"x": NUMBERS, "target": LABELS}, {}, ["label from target", "x"], None, {"x", "label"}),
        ({"x": NUMBERS, "breed": TEXT}, {"label": "breed"}, ["label from breed", "x"], None, {"x", "label"}),
    ],
    ids=["image", "declared", "numbers", "unlabelled", "usual name", "text label"],
)
def test_what_is_read_and_left_out_is_said(make, columns, declared, read, left, stored, tmp_path):
    made, told = packed(make(tmp_path, **columns), tmp_path / "out", columns=declared)
    expected = [fact("columns-read", columns=read)]
    assert told == expected + ([fact("columns-left", columns=left)] if left else [])
    assert set(made.spec) == stored and len(made) == 3


@OF_ROWS
@pytest.mark.parametrize(
    ("role", "there", "others"),
    [
        ("label", ["label", "target"], {"image": IMAGES[:3]}),
        ("label", ["label", "fine_label"], {"x": NUMBERS}),
        ("image", ["image", "img"], {"label": LABELS}),
        ("image", ["jpg", "png"], {"cls": LABELS}),
    ],
)
def test_of_several_usual_names_one_is_declared(make, role, there, others, tmp_path):
    values = {"label": [LABELS, [1, 2, 1]], "image": [IMAGES[:3]] * 2}[role]
    source = make(tmp_path, **dict(zip(there, values, strict=True)), **others)
    with refused(DataError, "rows-columns-several", role=role, columns=there, first=there[0]):
        Packing(source, tmp_path / "out")
    for name in there:
        made, told = packed(source, tmp_path / name, columns={role: name})
        assert f"{role} from {name}" in told[0]["columns"]
        if role == "label":  # the other one does not take its place
            kept = [made[i]["label"].tolist() for i in range(3)]
            assert kept == [value + (name != there[0]) for value in LABELS]


def test_of_several_columns_of_images_one_is_declared(tmp_path):
    datasets = pytest.importorskip("datasets")
    one = [{"bytes": image, "path": None} for image in IMAGES[:3]]
    features = {"left": datasets.Image(), "right": datasets.Image(), "label": datasets.Value("int64")}
    rows = {"left": one, "right": one, "label": LABELS}
    made = datasets.Dataset.from_dict(rows, features=datasets.Features(features))
    with refused(DataError, "rows-columns-several", role="image", columns=["left", "right"]):
        Packing(made, tmp_path / "out")
    _, told = packed(made, tmp_path / "out", columns={"image": "right"})
    assert told[1] == fact("columns-left", columns=["left"])


@pytest.mark.parametrize("make", [parquet, data_set])
def test_lists_of_numbers_are_numbers_and_lists_of_text_are_not(make, tmp_path):
    rows = {"x": [[1.0, 2.0]] * 3, "tags": [TEXT] * 3, "on": [True, False, True]}
    made, told = packed(make(tmp_path, **rows), tmp_path / "out")
    assert set(made.spec) == {"x", "on"} and told[1] == fact("columns-left", columns=["tags"])


@OF_ROWS
@pytest.mark.parametrize(
    ("labels", "declared", "stored", "names"),
    [
        ([31, 40, 31], "numbers", [31.0, 40.0, 31.0], ()),
        ([2, 0, 2], "classes", [2, 0, 2], ("0", "1", "2")),
        ([2, 0, 2], None, [2, 0, 2], ("0", "1", "2")),
        (["b", "a", "b"], "classes", [1, 0, 1], ("a", "b")),
        (NUMBERS, "numbers", NUMBERS, ()),
        (NUMBERS, None, NUMBERS, ()),
    ],
)
def test_labels_are_what_is_declared(make, labels, declared, stored, names, tmp_path):
    source = make(tmp_path, x=NUMBERS, label=labels)
    job = Packing(source, tmp_path / "out", labels=declared)
    job.run()
    made = PackedFolder(tmp_path / "out")
    assert [made[i]["label"].tolist() for i in range(3)] == stored and made.names == names
    code = "classes-read" if names else "labels-read"
    assert job.listing.told[-1].code == code


@OF_ROWS
@pytest.mark.parametrize(
    ("labels", "declared", "error", "code"),
    [
        (TEXT, "numbers", DataError, "rows-label-declared"),
        (NUMBERS, "classes", DataError, "rows-label-declared"),
        ([2, 0, 2], "several", RecipeError, "pack-labels-several"),
    ],
)
def test_labels_that_are_not_what_is_declared(make, labels, declared, error, code, tmp_path):
    with refused(error, code):
        Packing(make(tmp_path, x=NUMBERS, label=labels), tmp_path / "out", labels=declared)


@OF_ROWS
def test_text_alone_is_refused(make, tmp_path):
    code = "rows-column-bytes" if make is tfrecord else "column-not-numbers"
    with pytest.raises(DataError) as caught:
        packed(make(tmp_path, note=TEXT), tmp_path / "out", max_skipped=0)
    assert code in (caught.value.code, "rows-column-bytes")


def test_columns_of_a_table_that_are_not_read(tmp_path):
    for i in range(3):
        (tmp_path / f"{i}.jpg").write_bytes(IMAGES[i])
    rows = [f"{i}.jpg,{'ab'[i % 2]},{i},note" for i in range(3)]
    (tmp_path / "t.csv").write_text("\n".join(["file,kind,age,note", *rows]))
    _, told = packed(tmp_path / "t.csv", tmp_path / "out", columns={"image": "file", "label": "kind"})
    assert told == [fact("columns-left", columns=["age", "note"])]


@pytest.mark.parametrize("ending", ["jsonl", "csv", "parquet"])
def test_columns_of_tables_of_text(ending, tmp_path):
    rows = [{"text": text, "id": str(i), "source": "web"} for i, text in enumerate(TEXT)]
    path = tmp_path / f"rows.{ending}"
    if ending == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif ending == "csv":
        path.write_text("\n".join(["text,id,source", *(",".join(row.values()) for row in rows)]))
    else:
        parquet(tmp_path, **{name: [row[name] for row in rows] for name in rows[0]})
    pytest.importorskip("datasets")
    _, told = packed(path, tmp_path / "out", text=TextForm(4))
    left = fact("columns-left", columns=["id", "source"])
    assert told == [fact("columns-read", columns=["text from text"]), left]
    two = path.with_name("two.jsonl")
    two.write_text(json.dumps({"text": "a", "content": "b"}) + "\n")
    with refused(DataError, "rows-columns-several", role="text", columns=["text", "content"]):
        Packing(two, tmp_path / "more", text=TextForm(4))
