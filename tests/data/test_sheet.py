"""Contact sheets: the examples that are in the pack, with their classes."""

import numpy as np
import pytest
from PIL import Image

from chipwise.data import PackedFolder, write_packed
from chipwise.data.sheet import caption, sheet, write_picture
from chipwise.errors import DataError, RecipeError
from refusals import refused


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
        y, x = 4 + 48 + cell // 10 * 114, 4 + 48 + cell % 10 * 100
        assert page[y, x].tolist() == ([255, 0, 0] if index % 2 == 0 else [0, 255, 0])
        assert (page[y + 48 : y + 60, x - 48 : x + 40] < 128).any()  # its class, in black
    assert (page[-1] == 255).all()


def test_labels_of_every_kind():
    names = ("sun", "snow")
    assert caption(np.int32(1), names) == "snow" and caption(np.int32(1), ()) == "1"
    assert caption(np.uint8([1, 1]), names) == "sun snow" and caption(np.uint8([0, 0]), names) == ""
    assert caption(np.float32(2.5), ()) == "2.5" and caption(np.float32([1, 0.25]), ()) == "1 0.25"
    assert caption(None, ()) == ""


def test_the_file_appears_whole_or_not_at_all(tmp_path):
    source = packed(tmp_path, names=("a class with a rather long name", "日本"))
    page = sheet(source)
    assert write_picture(page, tmp_path / "new" / "sheet.png", "--sheet") == tmp_path / "new" / "sheet.png"
    with Image.open(tmp_path / "new" / "sheet.png") as image:
        assert image.size == (7 * 100 + 4, 114 + 4)
    with refused(RecipeError, "picture-suffix", option="--sheet", suffix=".txt", stem="sheet"):
        write_picture(page, tmp_path / "new" / "sheet.txt", "--sheet")
    assert [p.name for p in (tmp_path / "new").iterdir()] == ["sheet.png"]


def test_large_images_are_made_small(tmp_path):
    image = np.zeros((2, 100, 400, 3), np.uint8)
    source = PackedFolder(write_packed(tmp_path / "p", [{"image": image}]).parent)
    assert sheet(source).size == (2 * 100 + 4, 4 + 24 + 14 + 4)


def test_a_pack_without_images(tmp_path):
    write_packed(tmp_path / "p", [{"token": np.zeros((3, 5), np.int32)}])
    with refused(DataError, "sheet-no-images", columns=["token"]):
        sheet(PackedFolder(tmp_path / "p"))
