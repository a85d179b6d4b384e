"""Contact sheets: the examples that are in the pack, with their classes."""

import numpy as np
import pytest
from PIL import Image

from chipwise.data import PackedFolder, write_packed
from chipwise.data.pack.contact import _told, sheet, write_sheet
from chipwise.errors import DataError


def packed(tmp_path, n=7, names=("red", "green"), **columns):
    image = np.zeros((n, 4, 4, 3), np.uint8)
    label = np.arange(n) % 2
    image[np.arange(n), :, :, label] = 255
    return PackedFolder(
        write_packed(tmp_path / "p", [{"image": image, "label": label}], classes=2, names=names).parent
    )


@pytest.mark.parametrize("n", [1, 7, 99, 101])
def test_every_cell_shows_its_example(tmp_path, n):
    source = packed(tmp_path, n)
    page = np.asarray(sheet(source))
    shown = np.unique(np.linspace(0, n - 1, min(n, 100)).astype(int))
    assert page.shape[0] > 96 * -(-len(shown) // 10)
    for cell, index in enumerate(shown):
        y, x = 6 + 48 + cell // 10 * 116, 6 + 48 + cell % 10 * 102
        assert page[y, x].tolist() == ([255, 0, 0] if index % 2 == 0 else [0, 255, 0])
        assert (page[y + 48 : y + 60, x - 40 : x + 40] < 128).any()  # its class, in black
    assert (page[-1] == 255).all()


def test_labels_of_every_kind():
    names = ("sun", "snow")
    assert _told(np.int32(1), names) == "snow" and _told(np.int32(1), ()) == "1"
    assert _told(np.uint8([1, 1]), names) == "sun snow" and _told(np.uint8([0, 0]), names) == ""
    assert _told(np.float32(2.5), ()) == "2.5" and _told(np.float32([1, 0.25]), ()) == "1 0.25"
    assert _told(None, ()) == ""


def test_the_file_appears_whole_or_not_at_all(tmp_path):
    source = packed(tmp_path, names=("a class with a rather long name", "日本"))
    assert write_sheet(source, tmp_path / "new" / "sheet.png") == tmp_path / "new" / "sheet.png"
    with Image.open(tmp_path / "new" / "sheet.png") as image:
        assert image.size == (10 * 102 + 6, 116 + 6)
    with pytest.raises(
        DataError, match=r"sheet.txt: the sheet cannot be written there .*Give --sheet FILE.png"
    ):
        write_sheet(source, tmp_path / "new" / "sheet.txt")
    assert [p.name for p in (tmp_path / "new").iterdir()] == ["sheet.png"]


def test_a_pack_without_images(tmp_path):
    write_packed(tmp_path / "p", [{"token": np.zeros((3, 5), np.int32)}])
    with pytest.raises(DataError, match=r"has no images \(columns token\): leave --sheet out"):
        sheet(PackedFolder(tmp_path / "p"))
