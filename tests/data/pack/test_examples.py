"""From what a source holds to what is stored."""

import io
import threading

import numpy as np
import pytest
import simplejpeg
from PIL import Image

from chipwise.base.errors import DataError
from chipwise.data import Arrays, PackedFolder
from chipwise.data import images as decoding
from chipwise.data.pack import examples
from chipwise.data.pack.examples import stored_image
from chipwise.data.pack.folders import Split
from chipwise.data.pack.pack_settings import PackSettings
from chipwise.data.pack.packing import pack
from pictures import encoded, smooth
from refusals import refused

JPEG, RAW = PackSettings(store="jpeg"), PackSettings(store="raw")


@pytest.mark.parametrize("form", [JPEG, PackSettings(16, "jpeg")])
@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"mode": "L"}, {"subsampling": 0}])
def test_a_jpeg_that_needs_no_change_is_kept_byte_for_byte(form, options):
    data = encoded(smooth(size=(16, 16)), quality=83, **options)
    made = stored_image(data, form)
    assert made.data == data
    np.testing.assert_array_equal(made.pixels, simplejpeg.decode_jpeg(data, "RGB"))


def turned(turn):
    exif = Image.Exif()
    exif[274] = turn
    return encoded(smooth(), exif=exif.tobytes())


@pytest.mark.parametrize(
    ("data", "form"),
    [
        (encoded(smooth(), "PNG"), JPEG),
        (encoded(smooth(), mode="CMYK"), JPEG),
        (turned(6), JPEG),
        (encoded(smooth()), PackSettings(8, "jpeg")),
        (encoded(smooth()), PackSettings(16, "jpeg")),
    ],
    ids=["png", "cmyk", "turned", "smaller", "cut"],
)
def test_what_needs_a_change_is_encoded_and_seen_as_it_is_stored(data, form):
    made = stored_image(data, form)
    assert made.data != data
    np.testing.assert_array_equal(made.pixels, simplejpeg.decode_jpeg(made.data, "RGB"))
    raw = stored_image(data, PackSettings(form.size, "raw"))
    assert raw.pixels is raw.data and raw.pixels.shape == made.pixels.shape
    assert np.abs(raw.pixels.astype(int) - made.pixels).mean() < 4


def test_quality_and_chroma():
    pixels = np.random.default_rng(0).integers(0, 255, (32, 32, 3), np.uint8)
    sizes = [len(stored_image(pixels, PackSettings(store="jpeg", quality=q)).data) for q in (10, 90, 100)]
    assert sizes == sorted(set(sizes))
    assert simplejpeg.decode_jpeg_header(stored_image(pixels, JPEG).data)[3] == "420"


class Tensor:
    """What tells a PyTorch tensor from an array, without 3 seconds of import."""

    def __init__(self, array):
        self.array = array

    def detach(self):
        return self

    def __array__(self, dtype=None, copy=None):
        return np.array(self.array, dtype)


def test_values_of_python_objects():
    pixels = smooth()
    channels_first = pixels.transpose(2, 0, 1)
    for value in (pixels, Image.fromarray(pixels), Tensor(pixels), encoded(pixels, "PNG")):
        np.testing.assert_array_equal(stored_image(value, RAW).data, pixels)
    np.testing.assert_array_equal(stored_image(Tensor(channels_first), RAW).data, pixels)
    for made in (lambda x: x, Tensor):
        for black, white in ((0, 1), (-1, 1), (0, 255), (1, 0), (0, 65535)):
            image = channels_first if made is Tensor else pixels
            value = made(black + image / np.float32(255) * (white - black))
            form = PackSettings(pixels=(black, white))
            np.testing.assert_array_equal(stored_image(value, form).data, pixels)
            np.testing.assert_array_equal(stored_image(pixels, form).data, pixels)
    grey = pixels[..., 0]
    for value in (grey, grey[..., None]):
        np.testing.assert_array_equal(stored_image(value, RAW).data, value)
        assert stored_image(value, PackSettings(8)).data.shape == (8, 8, *value.shape[2:])
        np.testing.assert_array_equal(
            stored_image(value, JPEG).pixels[..., 0], stored_image(value, JPEG).pixels[..., 2]
        )


@pytest.mark.parametrize(
    ("value", "code", "facts"),
    [
        (np.full((4, 4, 3), -1.5), "image-array-values", {"dtype": "float64", "low": -1.5, "high": -1.5}),
        (np.full((4, 4), 300, np.int64), "image-array-values", {"dtype": "int64", "low": 300, "high": 300}),
        (np.full((4, 4), 0.5, np.float32), "image-array-values", {"low": 0.5, "high": 0.5}),
        (np.zeros((4, 4)), "image-array-values", {"low": 0, "high": 0}),
        (np.zeros((4, 4, 5), np.uint8), "image-array-shape", {"shape": (4, 4, 5)}),
        (np.zeros((0, 4), np.uint8), "image-array-shape", {"shape": (0, 4)}),
        (np.zeros(4, np.uint8), "image-array-shape", {"shape": (4,)}),
        (Image.fromarray(np.full((4, 4), 40_000, np.uint16)), "image-depth", {}),
        (b"", "image-empty", {}),
    ],
)
def test_what_is_no_image(value, code, facts):
    with refused(DataError, code, **facts):
        stored_image(value, RAW)


@pytest.mark.parametrize(
    ("value", "pixels"),
    [
        (np.full((4, 4), 1.01), (0, 1)),
        (np.full((4, 4), -0.5, np.float32), (0, 1)),
        (np.full((4, 4), np.nan), (0, 1)),
        (np.full((4, 4), 256, np.int32), (0, 255)),
        (np.full((4, 4), np.inf, np.float16), (-1, 1)),
    ],
)
def test_pixels_outside_of_what_is_declared(value, pixels):
    with refused(DataError, "image-array-outside", black=pixels[0], white=pixels[1]):
        stored_image(value, PackSettings(pixels=pixels))


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("kind", ["bool", "int8", "uint16", "int16", "int32", "uint32", "int64", "float16"])
def test_pixels_of_every_kind_of_number(kind, turned):
    """Also those whose differences the kind itself cannot hold."""
    if np.dtype(kind).kind in "bf":
        ends = (0, 1)
    else:
        ends = (np.iinfo(kind).min, np.iinfo(kind).max)
    value = np.array([ends, ends[::-1]], kind)
    low, high = (255, 0) if turned else (0, 255)
    made = stored_image(value, PackSettings(pixels=ends[::-1] if turned else ends))
    np.testing.assert_array_equal(made.data, [[low, high], [high, low]])
    if kind == "bool":
        with refused(DataError, "image-array-values", dtype="bool"):
            stored_image(value, RAW)


def test_dark_images_of_floats_are_not_taken_for_others(tmp_path):
    """From 0 to 255: one of them is nearly black, and would be from 0 to 1."""
    images = np.stack([np.full((4, 4, 3), value, np.float32) for value in (0, 1, 120, 255)])
    source = Arrays(image=images, label=np.arange(4))
    with refused(DataError, "pack-nothing-left"):
        pack(source, tmp_path / "none")
    pack(source, tmp_path / "out", pixels=(0, 255))
    made = PackedFolder(tmp_path / "out")
    assert [int(made[i]["image"].max()) for i in range(4)] == [0, 1, 120, 255]
    assert made.manifest["settings"]["pixels"] == [0, 255]


def test_a_side_longer_than_a_jpeg_can_have():
    line = encoded(np.zeros((1, 65_501, 3), np.uint8), "PNG")
    assert stored_image(line, RAW).data.shape == (1, 65_501, 3)
    with refused(DataError, "image-jpeg-side", height=1, width=65_501, limit=65_500):
        stored_image(line, JPEG)


@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
def test_a_thin_line_is_not_enlarged_to_gigabytes(kind):
    line = encoded(np.zeros((2, 60_000, 3), np.uint8), kind)
    assert stored_image(line, PackSettings(224)).data.shape == (224, 224, 3)


def test_a_pillow_image_that_is_read_late():
    buffer = io.BytesIO(encoded(smooth(), "PNG", "RGBA"))
    with Image.open(buffer) as image:
        np.testing.assert_array_equal(stored_image(image, RAW).data, smooth())


@pytest.mark.parametrize("form", [RAW, JPEG])
def test_workers_share_the_memory_of_images_that_wait(form, monkeypatch):
    """However many workers begin at once: without it each of them makes its image before one is written."""
    images, each = 24, 24 * 16 * 3
    data = [encoded(smooth(i), "PNG") for i in range(images)]
    monkeypatch.setattr(examples, "_HELD_BYTES", 2 * each)
    held, most, seen, began = [], [], set(), threading.Barrier(6, timeout=10)

    class Counted(examples.Held):
        def __init__(self):
            super().__init__()
            held.append(self)

        def take(self, nbytes, always):
            super().take(nbytes, always)
            most.append(self.bytes)

    monkeypatch.setattr(examples, "Held", Counted)

    def read(i):
        if i < 6 and i not in seen:  # so many workers, at once
            seen.add(i)
            began.wait()
        return {"image": data[i]}

    split = Split([str(i) for i in range(images)], np.zeros(images), {}, read)
    made = [e for part in examples.records(split, ([i] for i in range(images)), form, 6) for e in part]
    assert [entry.name for entry in made] == split.names and not any(entry.error for entry in made)
    assert max(most) <= 3 * each + 2000  # and the first one's, which is always taken
    assert held[0].bytes == 0


def test_encoding_takes_its_part_of_the_memory(monkeypatch):
    taken, original = [], simplejpeg.encode_jpeg

    def counted(*arguments):
        taken.append(decoding._taken)
        return original(*arguments)

    monkeypatch.setattr(decoding, "_SMALL_BYTES", 0)
    monkeypatch.setattr(simplejpeg, "encode_jpeg", counted)
    stored_image(encoded(smooth(), "PNG"), JPEG)
    assert taken == [16 * 24 * 6] and decoding._taken == 0
