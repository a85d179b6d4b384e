"""Tables of labels: every kind of label, and rows and files that do not fit together."""

import numpy as np
import pytest

from chipwise.base.errors import DataError
from chipwise.data.pack import tables
from chipwise.data.pack.folders import divided
from chipwise.data.pack.pack_settings import PackSettings
from chipwise.data.pack.packing import Packing
from chipwise.data.pack.recognise import listing_of
from chipwise.data.pack.tables import read_table
from refusals import refused


def table(tmp_path, text, name="labels.csv"):
    (tmp_path / name).write_text(text)
    return tmp_path / name


def touch(root, *names):
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(b"x")


@pytest.mark.parametrize(
    ("text", "declared", "labels", "classes"),
    [
        ("file,label\na.jpg,cat\nb.jpg,ant\n", None, np.int32([1, 0]), ("ant", "cat")),
        ("label,file\n10,a.jpg\n9,b.jpg\n", None, np.int32([1, 0]), ("9", "10")),
        ("﻿Filename,Label\n a.jpg , 0 \n\nb.jpg,1\n", None, np.int32([0, 1]), ("0", "1")),
        (
            "file,label\na.jpg,x|y\nb.jpg,\nc.jpg,z\n",
            "several",
            np.uint8([[1, 1, 0], [0, 0, 0], [0, 0, 1]]),
            ("x", "y", "z"),
        ),
        ("file,label\na.jpg,x; z\nb.jpg,z\n", "several", np.uint8([[1, 1], [0, 1]]), ("x", "z")),
        ("file,sun,snow\na.jpg,1,0\nb.jpg,1,1\n", None, np.uint8([[1, 0], [1, 1]]), ("sun", "snow")),
        ("file,age\na.jpg,31\nb.jpg,2.5\n", "numbers", np.float32([31, 2.5]), ()),
        ("file,x,y\na.jpg,0.5,2\nb.jpg,-1,1\n", None, np.float32([[0.5, 2], [-1, 1]]), ()),
    ],
)
def test_every_kind_of_label(tmp_path, text, declared, labels, classes):
    found = read_table(table(tmp_path, text), PackSettings(labels=declared))
    np.testing.assert_array_equal(found.labels, labels)
    assert found.labels.dtype == labels.dtype and found.classes == classes
    assert found.below == ({"label": len(classes)} if labels.dtype == np.int32 else {})
    assert found.files[:2] == ["a.jpg", "b.jpg"]


@pytest.mark.parametrize(
    ("text", "code", "facts"),
    [
        ("", "table-row", {}),
        ("file,label\n", "table-row", {}),
        ("file\na.jpg\n", "table-row", {}),
        ("file,split\na.jpg,train\n", "table-row", {"given": ["file", "split"]}),
        ("file,label\na.jpg\n", "table-row", {"line": 2, "given": ["a.jpg"]}),
        ("file,label\n\na.jpg,x\n\nb.jpg,\n", "table-row", {"line": 5, "given": ""}),
        ("file,label\n../a.jpg,x\n", "table-row", {"line": 2, "given": "../a.jpg"}),
        ("file,label\n/etc/a.jpg,x\n", "table-row", {"line": 2, "given": "/etc/a.jpg"}),
        (
            "file,x,y\na.jpg,1,0\nb.jpg,1,no\n",
            "table-row",
            {"line": 3, "given": "no"},
        ),
        ("file,label,split\na.jpg,1,later\n", "table-row", {"line": 2, "given": "later"}),
    ],
)
def test_tables_that_cannot_be_understood(tmp_path, text, code, facts):
    with refused(DataError, code, path=tmp_path / "labels.csv", **facts):
        read_table(table(tmp_path, text))


def test_a_name_given_twice(tmp_path):
    with refused(DataError, "duplicate-name", path=tmp_path / "labels.csv", name="a.jpg"):
        read_table(table(tmp_path, "file,label\na.jpg,x\na.jpg,y\n"))


def test_bytes_that_are_no_text(tmp_path):
    (tmp_path / "x.csv").write_bytes(b"file,label\n\xff.jpg,1\n")
    with refused(DataError, "table-no-text", byte=11):
        read_table(tmp_path / "x.csv")
    with refused(DataError, "unreadable", path=tmp_path / "none.csv"):
        read_table(tmp_path / "none.csv")


@pytest.mark.parametrize(
    ("what", "most", "text"),
    [
        ("file", 400, "file,label\n" + "".join(f"{i}.jpg,x\n" for i in range(50))),
        ("rows", 1999, "file," + ",".join("abcdefghij") + "\n" + ("a.jpg" + ",1" * 10 + "\n") * 10),
        ("multi-hot labels", 300 * 301 - 1, "file,label\n" + "".join(f"{i}.jpg,{i}|x\n" for i in range(300))),
    ],
)
def test_a_table_that_would_fill_the_memory_is_refused(tmp_path, what, most, text, monkeypatch):
    path = table(tmp_path, text)
    monkeypatch.setattr(tables, "_MOST_BYTES", most)
    with refused(DataError, "table-too-large", path=path, what=what, limit=most):
        read_table(path)
    if what != "rows":
        monkeypatch.setattr(tables, "_MOST_BYTES", 300 * 301)
        assert len(read_table(path).files) >= 50


def test_a_table_is_a_source_in_its_own_order(tmp_path):
    touch(tmp_path, "im/b.jpg", "im/a.jpg", "other.jpg")
    found = listing_of(table(tmp_path, "file,label\nim/b.jpg,dog\nim/a.jpg,cat\n"))
    assert found.splits["train"].names == ["im/b.jpg", "im/a.jpg"] and found.names == ("cat", "dog")
    assert found.splits["train"].labels["label"].tolist() == [1, 0]
    assert found.splits["train"].read(0) == {"image": b"x"}
    found = listing_of(table(tmp_path, "file,label,split\nim/b.jpg,dog,train\nim/a.jpg,dog,val\n"))
    assert {k: v.names for k, v in found.splits.items()} == {"train": ["im/b.jpg"], "eval": ["im/a.jpg"]}
    with refused(DataError, "table-files-absent", count=2, names=["1.jpg", "2.jpg"]):
        listing_of(table(tmp_path, "file,label\n1.jpg,x\n2.jpg,x\nother.jpg,x\n"))
    with refused(DataError, "split-twice", splits=["train", "eval"]):
        divided(found, 0.5)


def test_eval_alone_is_nothing_to_train_on(tmp_path):
    touch(tmp_path, "1.jpg")
    with refused(DataError, "pack-no-train", splits=["eval"]):
        Packing(table(tmp_path, "file,label,split\n1.jpg,x,test\n"), tmp_path / "out")
