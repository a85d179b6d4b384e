"""What a share leaves of each class on both sides, and copies that lie on both."""

import numpy as np
import pytest

from chipwise.base.facts import fact
from chipwise.data import Arrays, PackedFolder
from chipwise.data.pack.copies import copies
from chipwise.data.pack.folders import divided
from chipwise.data.pack.packing import pack
from chipwise.data.pack.recognise import listing_of
from pictures import encoded, smooth


def images(root, classes):
    """`root/<class>/<name>.png` of the numbers of pictures."""
    for name, pictures in classes.items():
        (root / name).mkdir(parents=True)
        for i, number in enumerate(pictures):
            (root / name / f"{i:02}.png").write_bytes(encoded(smooth(number, (6, 5)), "PNG"))
    return root


@pytest.mark.parametrize(
    ("counts", "share", "expected"),
    [
        ({"a": 10, "b": 10}, 0.2, [("split-of-each", 2, [8, 8], [2, 2])]),
        ({"a": 20, "b": 10}, 0.1, [("split-of-each", 2, [9, 18], [1, 2])]),
        (
            {"a": 20, "b": 2, "c": 1},
            0.1,
            [("split-of-each", 3, [1, 18], [0, 2]), ("eval", ["b", "c"])],
        ),
        (
            {"a": 20, "b": 1},
            0.9,
            [("split-of-each", 2, [0, 2], [1, 18]), ("train", ["b"])],
        ),
    ],
)
def test_a_share_of_each_class_is_told(counts, share, expected, tmp_path):
    whole = listing_of(images(tmp_path, {name: range(n) for name, n in counts.items()}))
    told = [one for one in divided(whole, share).told if one.code.startswith("split-")]
    (code, classes, train, held), *without = expected
    assert told[0] == fact(code, classes=classes, train=train, eval=held)
    assert [(one["side"], one["classes"]) for one in told[1:]] == without
    assert all(map(str, told))


@pytest.mark.parametrize("store", ["raw", "jpeg"])
@pytest.mark.parametrize("shards", ["auto", 3])
@pytest.mark.parametrize(
    ("held", "pairs"),
    [
        ({"a": [7, 8], "b": [9]}, []),
        ({"a": [0, 8], "b": [9]}, [("a/00.png", "a/00.png")]),
        # With another label, and twice
        (
            {"a": [3, 8], "b": [1, 1]},
            [("a/00.png", "b/01.png"), ("b/00.png", "a/01.png"), ("b/01.png", "a/01.png")],
        ),
    ],
    ids=["none", "one", "of other classes"],
)  # fmt: skip
def test_copies_of_images(store, shards, held, pairs, tmp_path):
    images(tmp_path / "data" / "train", {"a": [0, 1, 1], "b": [2, 3]})
    images(tmp_path / "data" / "test", held)
    made = pack(tmp_path / "data", tmp_path / "out", store=store, shards=shards)
    assert copies(made) == pairs


@pytest.mark.parametrize("dtype", [np.float32, np.uint8])
def test_copies_without_images(dtype, tmp_path):
    def rows(numbers, label):
        return Arrays(x=np.asarray(numbers, dtype)[:, None], label=np.asarray(label))

    sides = {"train": rows([0, 1, 2], [0, 1, 0]), "eval": rows([1, 2, 3], [1, 1, 0])}
    made = pack(sides, tmp_path / "out")
    assert copies(made) == [("0", "1")]  # the other has another label


def test_equal_checksums_are_compared(tmp_path, monkeypatch):
    """A checksum of 32 bits is no proof."""
    images(tmp_path / "data" / "train", {"a": [0, 1]})
    images(tmp_path / "data" / "test", {"a": [1, 2]})
    made = pack(tmp_path / "data", tmp_path / "out")
    alike = "chipwise.data.pack.copies._keys"
    monkeypatch.setattr(alike, lambda source: np.zeros(len(source), np.uint32))
    assert copies(made) == [("a/00.png", "a/01.png")]
    assert PackedFolder(made, "eval").stored(0) == PackedFolder(made).stored(1)
