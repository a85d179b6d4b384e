"""Decoding: every kind of picture to upright RGB, at reduced scale where it suffices, bombs not at all."""

import io
import struct
import zlib
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import simplejpeg
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, PngImagePlugin

from chipwise.base.errors import DataError
from chipwise.data import images
from chipwise.data.images import MAX_PIXELS, Encoded, covering, decode, decode_into
from pictures import encoded, smooth
from refusals import refused


def png(height, width, pixels=b""):
    """A PNG whose header promises so many pixels."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", head)
        + chunk(b"IDAT", zlib.compress(pixels))
        + chunk(b"IEND", b"")
    )


def jpeg(height, width):
    """A JPEG of one pixel whose header promises more."""
    data = bytearray(encoded(smooth(size=(8, 8)), quality=95))
    at = data.index(b"\xff\xc0")
    data[at + 5 : at + 9] = struct.pack(">HH", height, width)
    return bytes(data)


@pytest.mark.parametrize("make", [png, jpeg])
def test_a_decompression_bomb_is_refused_by_its_header(make, monkeypatch):
    side = int(MAX_PIXELS**0.5) + 1
    bomb, smallest = make(30_000, 30_000), make(side, side)

    def never(*_, **__):
        raise AssertionError("decoded")

    monkeypatch.setattr(simplejpeg, "decode_jpeg", never)
    monkeypatch.setattr(Image.Image, "load", never)
    for data in (bomb, smallest):
        with refused(DataError, "image-too-large"):
            decode(data)


def test_the_largest_image_is_not_a_bomb():
    assert Encoded(jpeg(MAX_PIXELS // 60_000, 60_000)).width == 60_000


TURNED = Image.Exif()
TURNED[274] = 6


@pytest.mark.parametrize(
    ("cost", "kind"),
    [
        (11, {"kind": "PNG"}),
        (15, {"kind": "PNG", "exif": TURNED}),
        (21, {"kind": "WEBP"}),
        (9, {"progressive": True}),
    ],
)
def test_what_takes_more_memory_may_have_fewer_pixels(cost, kind, monkeypatch):
    data = encoded(smooth(size=(64, 64)), **kind)
    monkeypatch.setattr(images, "MAX_BYTES", 64 * 64 * cost)
    monkeypatch.setattr(images, "_SMALL_BYTES", 0)
    assert decode(data).shape == (64, 64, 3)
    monkeypatch.setattr(images, "MAX_BYTES", 64 * 64 * cost - 1)
    with refused(DataError, "image-too-large", limit=64 * 64 - 1):
        decode(data)


def test_large_images_share_the_memory(monkeypatch):
    monkeypatch.setattr(images, "MAX_BYTES", 64 * 64 * 11)
    monkeypatch.setattr(images, "_SMALL_BYTES", 0)
    seen, original = [], images._from_pillow

    def counted(*arguments):
        seen.append(images._taken)
        return original(*arguments)

    monkeypatch.setattr(images, "_from_pillow", counted)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(decode, [encoded(smooth(size=(40, 40)), "PNG")] * 40))
    assert set(seen) <= {40 * 40 * 11, 2 * 40 * 40 * 11} and len(seen) == 40 and images._taken == 0


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "P", "L", "LA", "CMYK", "1"])
@pytest.mark.parametrize("height", [2, 3, 4])
def test_rows_that_are_converted_apart_are_all_there(mode, height, monkeypatch):
    """A million pixels at a time: here two rows of 100, and one more."""
    monkeypatch.setattr(images, "_ROWS_OF", 200)
    image = Image.effect_noise((100, height), 90).convert(mode)
    white = Image.new("RGBA", image.size, "white")
    white.alpha_composite(image.convert("RGBA"))
    expected = white.convert("RGB") if mode in ("RGBA", "LA") else image.convert("RGB")
    np.testing.assert_array_equal(images.from_pillow(image), np.asarray(expected))


def test_of_a_png_the_header_is_read_alone_though_it_may_be_turned(monkeypatch):
    """Its orientation may stand behind the pixels, where Pillow looks for it; they have no room yet."""
    plain, early = (encoded(smooth(), "PNG", exif=exif) for exif in (Image.Exif(), TURNED))
    start, end = early.index(b"eXIf") - 4, early.index(b"IDAT") - 4
    late = early[:start] + early[end:-12] + early[start:end] + early[-12:]
    loads, original = [], PngImagePlugin.PngImageFile.load
    monkeypatch.setattr(
        PngImagePlugin.PngImageFile, "load", lambda im: loads.append(images._taken) or original(im)
    )
    monkeypatch.setattr(images, "_SMALL_BYTES", 0)
    assert [Encoded(data).height for data in (plain, early, late)] == [16] * 3 and not loads
    shapes = [decode(data).shape[:2] for data in (plain, early, late)]
    assert shapes == [(16, 24), (24, 16), (24, 16)] and all(loads)  # in the room


def test_a_jpeg_of_endless_scans_is_refused(monkeypatch):
    data = encoded(smooth(size=(8, 8)), progressive=True)
    last = data[data.rindex(b"\xff\xda") : -2]
    monkeypatch.setattr(images, "_MOST_SCANNED", 64 * 100)
    assert decode(data).shape == (8, 8, 3)
    with refused(DataError, "image-scans"):
        decode(data[:-2] + 100 * last + data[-2:])


def shown(data):
    with Image.open(io.BytesIO(data)) as image:
        return np.asarray(image.convert("RGB"))


def segments(data):
    """Where the segments of a JPEG's header begin, the pixels' last."""
    at = 2
    while data[at + 1] != 0xDA:
        yield at
        at += 2 + int.from_bytes(data[at + 2 : at + 4], "big")
    yield at


@pytest.mark.parametrize("junk", [b"\x00", b"\x00\x11\x22", b"Photo", b"\xff\x00\x13", bytes(300)])
def test_bytes_between_the_segments_of_a_jpeg_change_no_pixel(junk):
    """Viewers skip them; but a file with other damage is refused, though viewers show something of it."""
    data = encoded(smooth(), quality=95)
    for at in list(segments(data))[1:]:  # three bytes say that a file is a JPEG
        untidy = data[:at] + junk + data[at:]
        np.testing.assert_array_equal(decode(untidy), decode(data))
        np.testing.assert_array_equal(decode(untidy, (8, 8)), decode(data, (8, 8)))
        out = np.zeros((16, 24, 3), np.uint8)
        assert decode_into(untidy, out) == out.shape
        np.testing.assert_array_equal(out, decode(data))
    half = (at + len(data)) // 2
    for damaged in (untidy[:-40], untidy[:half] + b"\xff\xd9" + untidy[half:]):
        with refused(DataError, "image-damaged"):
            decode(damaged)


@pytest.mark.parametrize("kind", ["EPS", "PDF", "ICO", "TGA", "SGI", "JPEG2000", "PCX", "DDS"])
def test_only_the_formats_that_are_named_are_opened(kind, monkeypatch):
    """Whatever the file is called. Pillow would give PostScript to Ghostscript, which runs what is in it."""
    monkeypatch.setattr("subprocess.Popen", None)
    stream = io.BytesIO()
    Image.new("RGB", (16, 16)).save(stream, kind)
    with refused(DataError, "image-damaged"):
        decode(stream.getvalue())


def test_transparency_is_laid_on_white():
    pixels = np.dstack([smooth(), np.full((16, 24), 255, np.uint8)])
    pixels[:8, :, 3] = 0
    pixels[8, :, 3] = 128
    for kind in ("PNG", "WEBP", "TIFF"):
        buffer = io.BytesIO()
        Image.fromarray(pixels).save(buffer, kind, lossless=True)
        got = decode(buffer.getvalue())
        assert (got[:8] == 255).all()
        np.testing.assert_array_equal(got[9:], pixels[9:, :, :3])
        assert np.abs(got[8].astype(int) - (pixels[8, :, :3].astype(int) + 255) // 2).max() <= 2


@pytest.mark.parametrize("mode", ["P", "L", "RGB"])
def test_a_transparent_colour_is_white_too(mode):
    image = Image.fromarray(np.uint8([[0, 0], [200, 200]]), "L").convert(mode)
    buffer = io.BytesIO()
    color = image.getpixel((0, 0))
    image.save(buffer, "PNG", transparency=color)
    assert decode(buffer.getvalue())[:, 0].tolist() == [[255] * 3, [200] * 3]


@pytest.mark.parametrize("turn", range(1, 9))
@pytest.mark.parametrize("size", [None, (8, 8), (8, 12)])
def test_reduced_scale_gives_what_full_scale_would(turn, size):
    exif = Image.Exif()
    exif[274] = turn
    data = encoded(smooth(size=(64, 96)), quality=97, exif=exif.tobytes())
    with Image.open(io.BytesIO(data)) as image:
        from PIL import ImageOps

        theirs = ImageOps.exif_transpose(image).convert("RGB")
    if size is not None:
        theirs = ImageOps.fit(theirs, size[::-1], Image.Resampling.BILINEAR)
    got = decode(data, size)
    assert got.shape == np.asarray(theirs).shape
    assert np.abs(got.astype(int) - np.asarray(theirs)).mean() < 6
    assert Encoded(data).plain == (turn == 1)


@given(st.integers(1, 300), st.integers(1, 300), st.integers(1, 60), st.integers(1, 60))
def test_covering_touches_one_side_and_keeps_the_aspect(height, width, to_height, to_width):
    got = covering((height, width), (to_height, to_width))
    assert got[0] >= to_height and got[1] >= to_width
    assert got[0] == to_height or got[1] == to_width
    scale = max(to_height / height, to_width / width)
    assert abs(got[0] - height * scale) <= 0.5 + 1e-6 and abs(got[1] - width * scale) <= 0.5 + 1e-6


def test_sixteen_bits_are_not_silently_cut():
    for pixels in (np.full((4, 4), 40_000, np.uint16), np.full((4, 4), 0.5, np.float32)):
        buffer = io.BytesIO()
        Image.fromarray(pixels).save(buffer, "TIFF")
        with refused(DataError, "image-depth"):
            decode(buffer.getvalue())
    wide = png(1, 1)[:24] + b"\x10" + png(1, 1)[25:29]  # 16 bits a channel in color
    wide += struct.pack(">I", zlib.crc32(wide[12:29])) + png(1, 1, b"\0" * 7)[33:]
    with refused(DataError, "image-depth"):
        decode(wide)


def test_reasons_are_the_same_each_time():
    whole = [encoded(smooth(), kind) for kind in ("JPEG", "PNG", "GIF", "TIFF")]
    for data in (b"", b"<html>", b"\xff\xd8\xff", *(data[: len(data) // 2] for data in whole)):
        said = set()
        for _ in range(2):
            with pytest.raises(DataError) as caught:
                decode(bytes(data))
            said.add((caught.value.code, str(caught.value)))
        ((code, reason),) = said
        assert "0x" not in reason and "\n" not in reason
        assert code == ("image-damaged" if data else "image-empty")
