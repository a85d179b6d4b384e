import io
import os
import tarfile
import zipfile

import jax
import numpy as np
import pytest
from PIL import Image

import chipwise as cw
import tasks
from chipwise.base.errors import DataError
from chipwise.data.class_names import names_of
from chipwise.deploy import inputs
from chipwise.deploy.inputs import open_data, with_evaluation
from named_classes import THINGS, columns, recipe, source
from refusals import refused

RGB = {"image": jax.ShapeDtypeStruct((8, 8, 3), np.uint8)}
GREY = {"image": jax.ShapeDtypeStruct((8, 8), np.uint8)}


@pytest.fixture
def photos(tmp_path):
    folder = tmp_path / "photos"
    (folder / "more").mkdir(parents=True)
    for number, name in enumerate(["b.png", "more/a.png", "a.png"]):
        pixels = np.full((12, 16, 3), 50 * number, np.uint8)
        pixels[..., 0] = 200
        Image.fromarray(pixels).save(folder / name)
    (folder / "notes.txt").write_text("no image")
    return folder


def test_images_at_any_depth_by_path_and_without_classes(photos):
    source = open_data(photos, RGB)
    assert [source.record_name(i) for i in range(len(source))] == ["a.png", "b.png", "more/a.png"]
    assert source[0]["image"].shape == (8, 8, 3)
    assert [source[i]["image"][0, 0].tolist() for i in range(3)] == [
        [200, 100, 100],
        [200, 0, 0],
        [200, 50, 50],
    ]


def test_a_name_that_is_no_utf_8_can_be_written(photos):
    os.rename(photos / "a.png", os.fsencode(photos) + b"/\xe9.png")
    source = open_data(photos, RGB)
    names = [source.record_name(i) for i in range(len(source))]
    assert names == ["b.png", "more/a.png", "\N{REPLACEMENT CHARACTER}.png"]


def test_a_model_of_grey_images_sees_grey_ones(photos):
    source = open_data(photos, GREY)
    image = source[1]["image"]
    assert image.shape == (8, 8) and set(image.ravel().tolist()) == {60}  # 0.299 x 200
    pillow = np.asarray(Image.open(photos / "b.png").convert("L"))
    assert abs(int(pillow[0, 0]) - 60) <= 1


def test_a_tar_is_read_in_place(photos, tmp_path):
    with tarfile.open(tmp_path / "p.tar", "w") as tar:
        tar.add(photos, "photos")
    source = open_data(tmp_path / "p.tar", RGB)
    assert source.record_name(0) == "photos/a.png"
    assert np.array_equal(source[0]["image"], open_data(photos, RGB)[0]["image"])


def test_arrays_and_packed_folders(photos, tmp_path):
    images = np.arange(2 * 8 * 8 * 3, dtype=np.uint8).reshape(2, 8, 8, 3)
    np.save(tmp_path / "x.npy", images)
    np.savez(tmp_path / "x.npz", image=images, label=np.asarray([1, 0], np.int32))
    assert np.array_equal(open_data(tmp_path / "x.npy", RGB)[1]["image"], images[1])
    assert open_data(tmp_path / "x.npz", RGB)[0]["label"] == 1
    classes = tmp_path / "classes"
    for name in ("cat", "dog"):
        (classes / name).mkdir(parents=True)
        for i in range(2):
            Image.fromarray(images[i]).save(classes / name / f"{i}.png")
    cw.pack(classes, tmp_path / "packed", size=8, split=0.5)
    with refused(DataError, "predict-which-split"):
        open_data(tmp_path / "packed", RGB)
    source = open_data(tmp_path / "packed" / "eval", RGB)
    assert source.record_name(0) and len(source) == 2


def test_what_holds_nothing_to_predict_is_one_line(tmp_path, photos):
    with refused(DataError, "data-absent"):
        open_data(tmp_path / "gone", RGB)
    (tmp_path / "empty").mkdir()
    with refused(DataError, "no-images"):
        open_data(tmp_path / "empty", RGB)
    with refused(DataError, "predict-data-unknown"):
        open_data(photos, {"token": jax.ShapeDtypeStruct((9,), np.uint16)})
    (photos / "c.png").write_bytes(b"no picture at all")
    with refused(DataError, "image-unreadable", file="c.png"):
        open_data(photos, RGB)[2]


@pytest.mark.parametrize("cut", [3, 40, 200, -60, -1])
def test_a_damaged_archive_is_one_line(tmp_path, cut):
    file = tmp_path / "x.npz"
    np.savez(file, image=np.zeros((2, 8, 8, 3), np.uint8), classes=np.asarray(["a", "b"]))
    assert set(open_data(file, RGB).spec) == {"image"}
    file.write_bytes(file.read_bytes()[:cut])
    with refused(DataError, "npy-damaged", path=file):
        open_data(file, RGB)


def test_a_pickle_in_an_array_is_not_opened(tmp_path):
    class Harm:
        def __reduce__(self):
            return (open, (str(tmp_path / "harm"), "w"))

    buffer = io.BytesIO()
    np.save(buffer, np.asarray([Harm()], dtype=object), allow_pickle=True)
    (tmp_path / "x.npy").write_bytes(buffer.getvalue())
    with refused(DataError, "npy-damaged"):
        open_data(tmp_path / "x.npy", RGB)
    np.savez(tmp_path / "x.npz", image=np.asarray([Harm()], dtype=object))
    with refused(DataError, "npy-damaged"):
        open_data(tmp_path / "x.npz", RGB)
    assert not (tmp_path / "harm").exists()


def test_an_archive_that_expands_to_more_than_the_memory_is_not_read(tmp_path, monkeypatch):
    read, file = [], tmp_path / "x.npz"
    monkeypatch.setattr(np.lib.npyio.NpzFile, "__getitem__", lambda archive, name: read.append(name))
    monkeypatch.setattr(inputs, "_MOST_EXPANDED", 1000)
    np.savez_compressed(file, image=np.zeros((1 << 14, 8, 8), np.uint8))
    with refused(DataError, "npy-damaged", path=file):
        open_data(file, RGB)
    assert not read


@pytest.mark.parametrize("rows", [1 << 24, 1 << 40])
def test_a_header_that_states_more_than_there_is_takes_no_memory(tmp_path, rows):
    header = io.BytesIO()
    shape = {"descr": "<f4", "fortran_order": False, "shape": (rows, 8, 8)}
    np.lib.format.write_array_header_1_0(header, shape)
    with zipfile.ZipFile(tmp_path / "x.npz", "w") as archive:
        archive.writestr("image.npy", header.getvalue() + bytes(64))
    with refused(DataError, "npy-damaged", path=tmp_path / "x.npz"):
        open_data(tmp_path / "x.npz", RGB)


@pytest.mark.parametrize(
    ("classes", "names"),
    [
        (["eel", "ant", "bee"], ("eel", "ant", "bee")),
        ([b"eel", b"ant", b"bee"], ("eel", "ant", "bee")),
        (["eel", "ant", "bee"] * 4, ()),  # of each example
        ([["eel", "ant", "bee"]], ()),
        ([0, 1, 2], ()),
    ],
)
def test_arrays_that_state_the_names_of_their_classes(tmp_path, classes, names):
    known = recipe(source(THINGS))
    np.savez(tmp_path / "x.npz", **columns(("eel", "ant", "bee")), classes=classes)
    held_out = with_evaluation(known, tmp_path / "x.npz").task.eval
    assert names_of(held_out) == (THINGS if names else ())
    assert held_out[0]["label"] == (4 if names else 0) and set(held_out.spec) == {"x", "label"}


def test_names_of_classes_that_only_a_pickle_has_are_no_numbers(tmp_path):
    np.savez(tmp_path / "x.npz", **columns(THINGS), classes=np.asarray(THINGS, object))
    with refused(DataError, "npy-damaged"):
        open_data(tmp_path / "x.npz", RGB)


@pytest.mark.parametrize(
    ("x", "label", "wrong"),
    [
        (np.uint8, np.uint8, []),
        (np.int16, np.int32, []),  # the same numbers, in another width
        (np.float32, np.int32, ["x float32[12]"]),  # from 0 to 1, perhaps
        (np.bool_, np.float32, ["x bool[12]", "label float32[]"]),
    ],
)
def test_data_to_evaluate_have_the_kinds_of_numbers_of_the_training(x, label, wrong):
    data = cw.Arrays(x=np.ones((3, tasks.FEATURES), x), label=np.zeros(3, label))
    known = tasks.quick()
    if not wrong:
        assert with_evaluation(known, data).task.eval is data
        return
    with refused(DataError, "evaluation-columns", wrong=[one.split()[0] for one in wrong]) as caught:
        with_evaluation(known, data)
    assert set(wrong) <= set(caught.value.facts["columns"])
    assert "x uint8[12]" in caught.value.facts["expected"]
