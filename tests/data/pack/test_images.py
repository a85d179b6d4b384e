"""From what a source holds to what is stored."""

import io

import numpy as np
import pytest
import simplejpeg
from PIL import Image

from chipwise.data.pack.images import Form, make
from chipwise.errors import DataError
from pictures import encoded, smooth

JPEG, RAW = Form(store="jpeg"), Form(store="raw")


@pytest.mark.parametrize("form", [JPEG, Form(16, True, "jpeg"), Form(16, False, "jpeg")])
@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"mode": "L"}, {"subsampling": 0}])
def test_a_jpeg_that_needs_no_change_is_kept_byte_for_byte(form, options):
    data = encoded(smooth(size=(16, 16)), quality=83, **options)
    made = make(data, form)
    assert made.stored == data and not made.enlarged
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
        (encoded(smooth()), Form(8, True, "jpeg")),
        (encoded(smooth()), Form(8, False, "jpeg")),
        (encoded(smooth()), Form(16, True, "jpeg")),
    ],
    ids=["png", "cmyk", "turned", "cut smaller", "scaled smaller", "cut"],
)
def test_what_needs_a_change_is_encoded_and_seen_as_it_is_stored(data, form):
    made = make(data, form)
    assert made.stored != data
    np.testing.assert_array_equal(made.pixels, simplejpeg.decode_jpeg(made.stored, "RGB"))
    raw = make(data, Form(form.size, form.crop, "raw"))
    assert raw.pixels is raw.stored and raw.pixels.shape == made.pixels.shape
    assert np.abs(raw.pixels.astype(int) - made.pixels).mean() < 4


def test_quality_and_chroma():
    pixels = np.random.default_rng(0).integers(0, 255, (32, 32, 3), np.uint8)
    sizes = [len(make(pixels, Form(store="jpeg", quality=q)).stored) for q in (10, 90, 100)]
    assert sizes == sorted(set(sizes))
    assert simplejpeg.decode_jpeg_header(make(pixels, JPEG).stored)[3] == "420"


@pytest.mark.parametrize(("size", "enlarged"), [(15, False), (16, False), (17, True)])
@pytest.mark.parametrize(
    "value", [encoded(smooth()), encoded(smooth(), "PNG"), smooth(), Image.fromarray(smooth())]
)
def test_enlarging_is_noticed(size, enlarged, value):
    for crop in (True, False):
        assert make(value, Form(size, crop, "jpeg")).enlarged == enlarged
    assert not make(value, JPEG).enlarged


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
        np.testing.assert_array_equal(make(value, RAW).stored, pixels)
    for value in (Tensor(channels_first), Tensor(channels_first / np.float32(255)), pixels / np.float32(255)):
        np.testing.assert_array_equal(make(value, RAW).stored, pixels)
    grey = pixels[..., 0]
    for value in (grey, grey[..., None]):
        np.testing.assert_array_equal(make(value, RAW).stored, value)
        assert make(value, Form(8)).stored.shape == (8, 8, *value.shape[2:])
        np.testing.assert_array_equal(make(value, JPEG).pixels[..., 0], make(value, JPEG).pixels[..., 2])


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (
            np.full((4, 4, 3), -1.5),
            "from -1.5 to -1.5: expected uint8, or floats from 0 to 1; normalise after",
        ),
        (np.full((4, 4), 300, np.int64), "pixels of int64 from 300 to 300"),
        (np.zeros((4, 4, 5), np.uint8), r"shape \(4, 4, 5\): expected \(h, w\)"),
        (np.zeros((0, 4), np.uint8), r"shape \(0, 4\)"),
        (np.zeros(4, np.uint8), r"shape \(4,\)"),
        (Image.fromarray(np.full((4, 4), 40_000, np.uint16)), "more than 8 bits"),
        (b"", "the file is empty"),
    ],
)
def test_what_is_no_image(value, expected):
    with pytest.raises(DataError, match=expected):
        make(value, RAW)


def test_a_side_longer_than_a_jpeg_can_have():
    line = encoded(np.zeros((1, 65_501, 3), np.uint8), "PNG")
    assert make(line, RAW).stored.shape == (1, 65_501, 3)
    with pytest.raises(DataError, match=r"1×65501 .*a JPEG has at most 65,500 pixels a side"):
        make(line, JPEG)


@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
def test_a_thin_line_is_not_enlarged_to_gigabytes(kind):
    line = encoded(np.zeros((2, 60_000, 3), np.uint8), kind)
    assert make(line, Form(224)).stored.shape == (224, 224, 3)
    for value in (line, np.zeros((60_000, 2), np.uint8)):
        with pytest.raises(DataError, match=r"would become .*6720000.*, more than 178,956,970 pixels"):
            make(value, Form(224, False, "jpeg"))


def test_a_pillow_image_that_is_read_late():
    buffer = io.BytesIO(encoded(smooth(), "PNG", "RGBA"))
    with Image.open(buffer) as image:
        np.testing.assert_array_equal(make(image, RAW).stored, smooth())
