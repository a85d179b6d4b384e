"""Arrays and objects as sources: data sets of this library and others."""

import io

import numpy as np
import pytest
from PIL import Image

from chipwise.base.errors import DataError
from chipwise.data import Arrays
from chipwise.data.pack.packing import pack
from chipwise.data.packed import PackedFolder
from pictures import encoded, smooth
from refusals import refused


class Torchvision:
    """The shape of torchvision's data sets: pairs, `classes` and `targets`."""

    classes = ["ant", "bee"]  # noqa: RUF012
    targets = [0, 1, 1, 0] * 5

    def __len__(self):
        return 20

    def __getitem__(self, index):
        return Image.fromarray(smooth(index)), self.targets[index]


@pytest.mark.parametrize(
    "source",
    [
        Torchvision(),
        Arrays(image=np.stack([smooth(i) for i in range(20)]), label=np.asarray(Torchvision.targets)),
        [{"image": smooth(i), "label": np.int64(Torchvision.targets[i])} for i in range(20)],
    ],
)
@pytest.mark.parametrize("store", ["raw", "jpeg"])
def test_anything_with_len_and_items(tmp_path, source, store):
    pack(source, tmp_path / "out", store=store, names=("ant", "bee"))
    made = PackedFolder(tmp_path / "out")
    assert made.names == ("ant", "bee") and made.manifest["counts"] == [10, 10]
    for i in range(20):
        assert made[i]["label"] == Torchvision.targets[i] and made[i]["label"].dtype == np.int32
        limit = 0 if store == "raw" else 12
        assert np.abs(made[i]["image"].astype(int) - smooth(i)).max() <= limit


def test_labels_known_beforehand_make_a_stratified_split(tmp_path):
    for source in (Torchvision(),):
        out = tmp_path / type(source).__name__
        pack(source, out, split=0.2)
        assert [PackedFolder(out, split).manifest["counts"] for split in ("train", "eval")] == [
            [8, 8],
            [2, 2],
        ]


def test_masked_values_are_refused_or_left_out_by_name(tmp_path):
    rows = np.ma.masked_equal(np.arange(8.0), 7)[:, None]
    with refused(DataError, "column-masked", column="x"):
        pack([{"x": row} for row in rows], tmp_path / "last")
    pack([{"x": row} for row in rows[[0, 7, 1, 2, 3]]], tmp_path / "second")
    (left,) = PackedFolder(tmp_path / "second").manifest["source"]["skipped"]
    assert left["name"] == "1" and "masked" in left["reason"]


def test_a_dict_of_sources_by_split_and_columns_that_are_no_images(tmp_path):
    rows = [{"token": np.arange(i, i + 5)} for i in range(9)]
    pack({"train": rows[:6], "validation": rows[6:]}, tmp_path / "out")
    assert PackedFolder(tmp_path / "out", "eval")[1]["token"].tolist() == [7, 8, 9, 10, 11]
    with refused(DataError, "objects-by-split", splits=["image", "label"]):
        pack({"image": rows, "label": rows}, tmp_path / "other")
    for number, options in enumerate(({"store": "jpeg"}, {"size": 8})):
        with refused(DataError, "pack-skipped-many") as caught:
            pack(rows, tmp_path / str(number), max_skipped=0, **options)
        assert "token" in caught.value.facts["reason"]


class Broken(Torchvision):
    """Reads its files when asked, and some are no images."""

    def __getitem__(self, index):
        if index in (0, 7):
            Image.open(io.BytesIO(b"no"))
        if index == 9:
            whole = encoded(smooth(size=(99, 99)), "PNG")
            return Image.open(io.BytesIO(whole[: len(whole) // 2])), 0
        return super().__getitem__(index)


def test_an_object_whose_examples_cannot_be_read(tmp_path):
    pack(Broken(), tmp_path / "out")
    made = PackedFolder(tmp_path / "out")
    skipped = made.manifest["source"]["skipped"]
    assert [s["name"] for s in skipped] == ["00", "07", "09"] and len(made) == 17
    assert made.record_name(0) == "01" and made[0]["label"] == 1


@pytest.mark.parametrize(
    ("source", "code", "facts"),
    [
        (iter([]), "object-no-source", {"kind": "list_iterator"}),
        ([3, 4], "object-example", {"index": 0, "source": "list", "kind": "int"}),
        ([], "pack-split-no-examples", {"split": "train"}),
        ([{"image": smooth(), "caption": "a cat"}], "column-not-numbers", {"column": "caption"}),
    ],
)
def test_objects_that_cannot_be_packed(tmp_path, source, code, facts):
    with refused(DataError, code, **facts):
        pack(source, tmp_path / "out")
