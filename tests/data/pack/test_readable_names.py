"""Names that a person reads as one, the litter of file systems, and every suffix of an image."""

import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from chipwise.data.class_names import alike, numbers_of
from chipwise.data.folder import SUFFIXES
from chipwise.data.images import FORMATS, decode
from chipwise.data.pack.documents import documents
from chipwise.data.pack.hub import files_at
from chipwise.data.pack.recognise import listing_of
from pictures import encoded, smooth

NFC, NFD = "caf\u00e9", "cafe\u0301"


def touch(root, *names):
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(b"x")
    return root


def archive(root):
    with tarfile.open(root.with_suffix(".tar"), "w") as made:
        made.add(root, "data")
    return root.with_suffix(".tar")


@pytest.mark.parametrize(
    ("names", "classes", "labels"),
    [
        (["b/1.jpg", "a/1.jpg", "c/1.jpg"], ("a", "b", "c"), [0, 1, 2]),
        ([f"{NFC}/1.jpg", f"{NFD}/1.jpg", "tea/1.jpg"], (NFC, "tea"), [0, 0, 1]),
        ([f"{NFD}/2.jpg", f"{NFD}/1.jpg"], (NFC,), [0, 0]),
        ([f"{NFD}/1.jpg", f"{NFC}/2.jpg", f"{NFD}/3.jpg"], (NFC,), [0, 0, 0]),
        (["Cat/1.jpg", "cat/1.jpg"], ("Cat", "cat"), [0, 1]),
        (["dog/1.jpg", "dog /1.jpg"], ("dog", "dog "), [0, 1]),
        (["a/1.jpg", "a/2.JPE", "a/3.jfif", "a/4.Jpeg"], ("a",), [0] * 4),
        (["a/1.jpg", "@eaDir/a/1.jpg"], ("a",), [0]),
        (["a/1.jpg", "a/@eaDir/1.jpg/SYNOPHOTO_THUMB_M.jpg"], ("a",), [0]),
        (["a/1.jpg", "__MACOSX/a/._1.jpg", "__MACOSX/a/1.jpg"], ("a",), [0]),
        (["a/1.jpg", "a/._1.jpg", "a/.DS_Store", ".ipynb_checkpoints/1-checkpoint.jpg"], ("a",), [0]),
        (["a/1.jpg", "Thumbs.db", "a/Thumbs.db", "desktop.ini"], ("a",), [0]),
        (["a/1.jpg", "#recycle/old/1.jpg", "$RECYCLE.BIN/1.jpg"], ("a",), [0]),
    ],
)
def test_classes_of_folders_and_archives(tmp_path, names, classes, labels):
    root = touch(tmp_path / "data", *names)
    for found in (listing_of(root), listing_of(archive(root))):
        assert found.names == classes and found.left_out == ()
        assert found.splits["train"].labels["label"].tolist() == labels


def test_splits_are_joined_however_names_are_spelled(tmp_path):
    found = listing_of(touch(tmp_path, f"train/{NFC}/1.jpg", "train/tea/1.jpg", f"val/{NFD}/1.jpg"))
    assert found.splits["eval"].labels["label"].tolist() == [0]
    assert numbers_of((NFD, "tea"), ("tea", NFC), "data").tolist() == [1, 0]


@pytest.mark.parametrize(
    ("names", "told"),
    [
        (("a", "b", "c"), []),
        ((NFC, "cafe"), []),
        (("Cat", "cat", "dog"), [["Cat", "cat"]]),
        (("dog", "dog ", "DOG", "Elk", "elk"), [["dog", "dog ", "DOG"], ["Elk", "elk"]]),
        ((NFC.upper(), NFD), [[NFC.upper(), NFD]]),
        (("ice cream", "Ice  cream"), [["ice cream", "Ice  cream"]]),
    ],
)
def test_names_that_differ_only_in_case_or_spaces(names, told):
    facts = alike(names)
    assert [fact["names"] for fact in facts] == told
    assert all(repr(name) in str(fact) for fact in facts for name in fact["names"])


def test_every_suffix_of_the_formats_is_read():
    theirs = {ending for ending, kind in Image.registered_extensions().items() if kind in FORMATS}
    assert theirs - SUFFIXES == {".pfm"} and not SUFFIXES - theirs  # .pfm holds 32 bits a channel


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "PPM"])
def test_bits_of_black_and_white(kind):
    """A `.pbm` is a bit a pixel."""
    pixels = decode(encoded(smooth(), kind, "1"))
    assert pixels.shape == (16, 24, 3) and (kind == "JPEG" or set(np.unique(pixels)) <= {0, 255})


def test_litter_is_no_text_and_no_rows(tmp_path):
    touch(tmp_path, "a.txt", "._a.txt", "__MACOSX/a.txt", "@eaDir/b.md", ".git/c.md")
    assert [one.name for one in documents(tmp_path, {})] == ["a.txt"]
    assert files_at(touch(tmp_path / "rows", "train.parquet", "._train.parquet")) == (
        "parquet",
        [Path(tmp_path / "rows" / "train.parquet")],
    )
