"""Pictures with captions on a page."""

import numpy as np
from PIL import Image

from chipwise.data.sheet import Tile, caption, grid, picture_of, write_picture
from chipwise.errors import RecipeError
from refusals import refused


def test_labels_of_every_kind():
    names = ("sun", "snow")
    assert caption(np.int32(1), names) == "snow" and caption(np.int32(1), ()) == "1"
    assert caption(np.uint8([1, 1]), names) == "sun snow" and caption(np.uint8([0, 0]), names) == ""
    assert caption(np.float32(2.5), ()) == "2.5" and caption(np.float32([1, 0.25]), ()) == "1 0.25"
    assert caption(None, ()) == ""
    assert caption(np.float32([0.7, 0, 0.3])) == "0.70 × 0 + 0.30 × 2" and caption(np.float32([0, 1])) == "1"


def test_the_file_appears_whole_or_not_at_all(tmp_path):
    tiles = [
        [Tile(picture_of(np.zeros((4, 4, 3), np.uint8)), text)]
        for text in ("a rather long name of a class", "日本")
    ]
    page = grid(tiles * 3 + tiles[:1])
    assert write_picture(page, tmp_path / "new" / "sheet.png", "--images") == tmp_path / "new" / "sheet.png"
    with Image.open(tmp_path / "new" / "sheet.png") as image:
        assert image.size == (7 * 100 + 4, 114 + 4)
    with refused(RecipeError, "picture-suffix", option="--images", suffix=".txt", stem="sheet"):
        write_picture(page, tmp_path / "new" / "sheet.txt", "--images")
    assert [p.name for p in (tmp_path / "new").iterdir()] == ["sheet.png"]
