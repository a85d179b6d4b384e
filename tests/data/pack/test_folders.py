"""Folders: which files are entries, of which split and class, in which order, and what is wrong with them."""

import math
import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chipwise.base.errors import DataError, RecipeError
from chipwise.data import folder
from chipwise.data.pack.folders import Listing, Split, divided
from chipwise.data.pack.pack_settings import PackSettings
from chipwise.data.pack.recognise import listing_of
from pictures import write
from refusals import refused


def touch(root, *names):
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(name.encode())
    return root


def test_classes_are_folders_and_entries_sorted_by_class_then_file(tmp_path):
    # As text "a-b/1.jpg" comes before "a/2.jpg", but the class "a" comes first
    found = listing_of(
        touch(tmp_path, "a-b/1.jpg", "a/2.jpg", "a/10.PNG", "b/deep/er/1.jpg", "b/.hidden.jpg")
    )
    train = found.splits["train"]
    assert found.names == ("a", "a-b", "b") and found.below == {"label": 3} and found.left_out == ()
    assert train.names == ["a/10.PNG", "a/2.jpg", "a-b/1.jpg", "b/deep/er/1.jpg"]
    assert train.labels["label"].tolist() == [0, 0, 1, 2] and train.labels["label"].dtype == np.int32
    assert train.read(1) == {"image": b"a/2.jpg"} and train.sizes.tolist() == [8, 7, 9, 15]


@pytest.mark.parametrize("other", ["test", "val", "valid", "validation", "eval"])
@pytest.mark.parametrize("above", ["", "data/photos/"])
def test_train_beside_another_becomes_train_and_eval(tmp_path, other, above):
    touch(tmp_path, f"{above}train/b/1.jpg", f"{above}train/a/1.jpg", f"{above}{other}/b/2.jpg")
    found = listing_of(tmp_path)
    assert {name: split.names for name, split in found.splits.items()} == {
        "train": ["a/1.jpg", "b/1.jpg"],
        "eval": ["b/2.jpg"],
    }
    assert found.splits["eval"].labels["label"].tolist() == [1]


def test_what_is_not_packed_is_told(tmp_path):
    touch(tmp_path, "train/a/1.jpg", "val/a/1.jpg", "test/a/1.jpg", "train/a/notes.txt")
    found = listing_of(tmp_path, PackSettings(eval_split="val"))
    assert found.left_out == ("test/", "train/a/notes.txt")
    assert found.splits["eval"].names == ["a/1.jpg"]


def test_classes_may_be_called_train_and_test(tmp_path):
    found = listing_of(touch(tmp_path, "train/1.jpg", "test/1.jpg", "bus/1.jpg"))
    assert found.names == ("bus", "test", "train") and list(found.splits) == ["train"]


@pytest.mark.parametrize(
    ("names", "code", "facts"),
    [
        (["notes.txt"], "folder-no-images", {}),
        (["1.jpg", "a/1.jpg"], "folder-images-outside", {"names": ["1.jpg"]}),
        (["train/a/1.jpg", "test/1.jpg"], "folder-images-outside", {"names": ["test/1.jpg"]}),
        (["a/1.jpg", "b/notes.txt"], "class-folder-empty", {"folder": "b"}),
        (
            ["train/a/1.jpg", "test/a/1.jpg", "test/b/x.txt"],
            "class-folder-empty",
            {"folder": "test/b"},
        ),
    ],
)
def test_folders_that_cannot_be_packed(tmp_path, names, code, facts):
    with refused(DataError, code, path=tmp_path, **facts):
        listing_of(touch(tmp_path, *names))


def test_classes_that_train_lacks(tmp_path):
    given = {"data": f"eval of {tmp_path}", "classes": ["b"], "training": ("a",)}
    with refused(DataError, "classes-unjoined", **given):
        listing_of(touch(tmp_path, "train/a/1.jpg", "test/b/1.jpg"))


def test_no_such_source(tmp_path):
    with refused(DataError, "pack-source-missing", path=tmp_path / "none"):
        listing_of(tmp_path / "none")
    (tmp_path / "x.zip").write_bytes(b"PK")
    with refused(DataError, "pack-source-unknown", path=tmp_path / "x.zip"):
        listing_of(tmp_path / "x.zip")


def test_links_are_followed_and_circles_are_not(tmp_path):
    write(tmp_path / "elsewhere", classes=("cat",))
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "feline").symlink_to(tmp_path / "elsewhere" / "cat")
    assert listing_of(tmp_path / "data").names == ("feline",)
    (tmp_path / "data" / "loop").symlink_to(tmp_path / "data")
    with refused(DataError, "link-loop"):
        listing_of(tmp_path / "data")


def test_what_is_no_regular_file_is_left_out(tmp_path):
    touch(tmp_path, "a/1.jpg")
    os.mkfifo(tmp_path / "a" / "2.jpg")  # reading one would wait for a writer without end
    (tmp_path / "a" / "3.jpg").symlink_to("2.jpg")
    (tmp_path / "a" / "4.jpg").symlink_to("nowhere")  # told as skipped when it is read
    found = listing_of(tmp_path)
    assert found.splits["train"].names == ["a/1.jpg", "a/4.jpg"]
    assert found.left_out == ("a/2.jpg", "a/3.jpg")
    (tmp_path / "x.csv").write_text("file,label\na/1.jpg,x\na/2.jpg,y\n")
    with refused(DataError, "table-irregular-file", name="a/2.jpg"):
        listing_of(tmp_path / "x.csv")


def test_the_current_folder_has_a_name_in_messages(tmp_path, monkeypatch):
    monkeypatch.chdir(touch(tmp_path, "notes.txt"))
    with refused(DataError, "folder-no-images", path=tmp_path):
        listing_of(".")


def test_an_unreadable_folder_is_named(tmp_path, monkeypatch):
    write(tmp_path)
    scandir = os.scandir

    def refuse(path):  # root, as in containers, may read everything
        if os.path.basename(path) == "bee":
            raise PermissionError(13, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with refused(DataError, "unreadable", reason="Permission denied"):
        listing_of(tmp_path)


# ---- the share that goes to eval


def numbered(labels):
    label = np.asarray(labels, np.int32)
    names = [f"{value}/{i}.jpg" for i, value in enumerate(labels)]
    return Split(names, np.full(len(names), 7), {"label": label}, lambda i: {"image": names[i].encode()})


@given(st.lists(st.integers(0, 3), min_size=2, max_size=60), st.floats(0.05, 0.95))
def test_a_share_of_each_class_goes_to_eval_in_exact_numbers(labels, share):
    whole = numbered(labels)
    counts = np.bincount(labels, minlength=4)
    expected = np.floor(counts * share + 0.5).astype(int)
    if expected.sum() in (0, len(labels)):
        with refused(DataError, "split-empty"):
            divided(Listing({"train": whole}), share)
        return
    made = divided(Listing({"train": whole}), share).splits
    assert np.bincount(made["eval"].labels["label"], minlength=4).tolist() == expected.tolist()
    assert sorted([*made["train"].names, *made["eval"].names]) == sorted(whole.names)
    for split in made.values():  # order, labels and what is read stay together
        assert list(split.names) == sorted(split.names, key=whole.names.index)
        for i, name in enumerate(split.names):
            assert split.read(i) == {"image": name.encode()} and name[0] == str(split.labels["label"][i])


def test_who_goes_to_eval_depends_on_names_alone():
    whole = numbered([0] * 20)
    first = set(divided(Listing({"train": whole}), 0.25).splits["eval"].names)
    shuffled = whole.only(np.random.default_rng(0).permutation(20))
    assert set(divided(Listing({"train": shuffled}), 0.25).splits["eval"].names) == first


def test_a_split_that_cannot_be():
    whole = numbered([0, 1])
    for share in (0, -0.5, 1.0, 1.5, math.inf, "0.1"):
        with refused(
            RecipeError, "pack-option", given=f"--split {share!r}"
        ):  # also of text, which is not divided here
            PackSettings(split=share)
    with refused(DataError, "split-twice", splits=["train", "eval"]):
        divided(Listing({"train": whole, "eval": whole}), 0.5)


def test_a_fingerprint_tells_names_sizes_labels_and_content_apart():
    base = {
        "names": ["a", "b"],
        "sizes": np.array([1, 2]),
        "labels": {"label": np.array([0, 1])},
        "read": dict,
    }
    changes = [
        {},
        {"names": ["a", "c"]},
        {"sizes": np.array([1, 3])},
        {"labels": {"label": np.array([1, 1])}},
        {"labels": {"label": np.array([0.0, 1.0])}},
        {"content": "x"},
    ]
    assert len({Split(**{**base, **change}).fingerprint() for change in changes}) == len(changes)


def test_folders_without_end_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(folder, "DEEPEST", 3)
    deepest = touch(tmp_path, "a/b/c/d/1.jpg") / "a/b/c/d"
    assert listing_of(tmp_path).splits["train"].names == ["d/1.jpg"]
    (deepest / "e").mkdir()
    with refused(DataError, "folder-too-deep", path=str(deepest / "e"), deep=3):
        listing_of(tmp_path)


def test_links_that_fan_out_are_refused(tmp_path, monkeypatch):
    """Ten ways in each of six folders are a million paths to one image."""
    monkeypatch.setattr(folder, "MOST_WAYS", 4)
    root, below = tmp_path / "root", touch(tmp_path, "below/ant/1.jpg") / "below"
    root.mkdir()
    for way in range(4):
        (root / f"way{way}").symlink_to(below)
    assert len(listing_of(root).splits["train"]) == 4
    (root / "way4").symlink_to(below)
    with refused(DataError, "folder-too-deep", ways=4):
        listing_of(root)
