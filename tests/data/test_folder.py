"""Image folders: on disk and in archives, every common format, and what is wrong with a file is said."""

import io
import tarfile

import numpy as np
import pytest
from PIL import Image

from chipwise.base.errors import DataError
from chipwise.data import ImageFolder
from chipwise.data.images import decode
from chipwise.data.sources import materialize, nbytes, take
from refusals import refused


def smooth(seed=0, size=(16, 24)):
    """An image that JPEG keeps to a few levels."""
    y, x = np.mgrid[: size[0], : size[1]]
    return np.stack([(x * 9 + 20 * seed) % 200, y * 5 + 50, np.full(size, 100 + seed)], -1).astype(np.uint8)


def encoded(pixels, kind="JPEG", mode="RGB", **options):
    buffer = io.BytesIO()
    Image.fromarray(pixels).convert(mode).save(buffer, kind, **options)
    return buffer.getvalue()


def write(root, per_class=3, size=(16, 24), kind="PNG"):
    for c, name in enumerate(["cat", "ant", "bee"]):
        (root / name).mkdir(parents=True)
        for i in range(per_class):
            (root / name / f"{i}.{kind.lower()}").write_bytes(encoded(smooth(c * 10 + i, size), kind))
    return root


def pack(path, root, under=""):
    with tarfile.open(path, "w:" + path.suffix[1:].replace("tar", "")) as archive:
        archive.add(root, under or root.name)
    return path


def test_order_labels_and_pixels(tmp_path):
    source = ImageFolder(write(tmp_path / "data"))
    assert source.names == ("ant", "bee", "cat") and source.classes == 3 and len(source) == 9
    assert source.labels.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2] and source.labels.dtype == np.int32
    np.testing.assert_array_equal(source[0]["image"], smooth(10))  # PNG is exact
    np.testing.assert_array_equal(source[8]["image"], smooth(2))
    assert source.spec["image"].shape == (16, 24, 3) and nbytes(source) == 9 * (16 * 24 * 3 + 4)


@pytest.mark.parametrize("n", [0, 1, 9, 129])
def test_batches_are_the_examples(tmp_path, n):
    source = ImageFolder(write(tmp_path / "data"))
    indices = np.random.default_rng(n).integers(0, 9, n)
    got = take(source, indices)
    assert got["image"].shape == (n, 16, 24, 3)
    for row, index in enumerate(indices):
        np.testing.assert_array_equal(got["image"][row], source[index]["image"])
        assert got["label"][row] == source[index]["label"]


@pytest.mark.parametrize("suffix", [".tar", ".tar.gz", ".tar.xz"])
def test_archives_hold_the_same_images(tmp_path, suffix):
    root = write(tmp_path / "data" / "train")
    write(tmp_path / "data" / "test", per_class=1)
    (root / "ant" / ".hidden.png").write_bytes(b"?")
    (root / "readme.txt").write_bytes(b"?")
    loose = ImageFolder(tmp_path / "data", split="train")
    path = pack(tmp_path / f"x{suffix}", tmp_path / "data")
    packed = ImageFolder(path, split="train")
    assert packed.names == loose.names and len(packed) == 9
    for name, column in materialize(loose).items():
        np.testing.assert_array_equal(materialize(packed)[name], column)
    assert len(ImageFolder(path, split="test")) == 3
    with refused(DataError, "classes-in-several-places", path=path):
        ImageFolder(path)
    assert len(ImageFolder(pack(tmp_path / f"y{suffix}", root, "."))) == 9


@pytest.mark.parametrize("name", ["/etc/ant/1.png", "data/../../ant/1.png", "../ant/1.png"])
def test_members_outside_the_folder_are_refused(tmp_path, name):
    path = tmp_path / "x.tar"
    with tarfile.open(path, "w") as archive:
        archive.addfile(tarfile.TarInfo(name), io.BytesIO())
    with refused(DataError, "member-refused", path=path):
        ImageFolder(path)


def test_links_and_damaged_archives_are_refused(tmp_path):
    path = tmp_path / "x.tar"
    with tarfile.open(path, "w") as archive:
        link = tarfile.TarInfo("data/ant/1.png")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)
    with refused(DataError, "member-refused"):
        ImageFolder(path)
    path = pack(tmp_path / "y.tar.xz", write(tmp_path / "data"))
    whole = path.read_bytes()
    for content in (whole[: len(whole) // 2], b"no tar", b""):
        path.write_bytes(content)
        with refused(DataError, "file-damaged", path=path):
            ImageFolder(path)


@pytest.mark.parametrize(
    ("kind", "mode", "options"),
    [
        ("JPEG", "RGB", {"quality": 95}),
        ("JPEG", "RGB", {"quality": 95, "progressive": True}),
        ("JPEG", "L", {"quality": 95}),
        ("JPEG", "CMYK", {"quality": 95}),
        ("PNG", "RGB", {}),
        ("PNG", "RGBA", {}),
        ("PNG", "P", {}),
        ("PNG", "L", {}),
        ("GIF", "P", {}),
        ("BMP", "RGB", {}),
        ("TIFF", "RGB", {}),
        ("PPM", "RGB", {}),
        ("WEBP", "RGB", {"lossless": True}),
    ],
)
def test_every_format_becomes_rgb(kind, mode, options):
    pixels = smooth()
    data = encoded(pixels, kind, mode, **options)
    got = decode(data)
    theirs = np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))
    assert got.dtype == np.uint8 and got.shape == (16, 24, 3)
    # two JPEG decoders may differ by a few levels in chroma upsampling
    limit = 12 if kind == "JPEG" else 0
    assert np.abs(got.astype(int) - theirs).max() <= limit


@pytest.mark.parametrize("turn", range(1, 9))
def test_cameras_turn_their_pictures(turn):
    exif = Image.Exif()
    exif[274] = turn
    pixels = smooth(size=(16, 32))
    got = decode(encoded(pixels, quality=95, exif=exif.tobytes()))
    undo = [np.s_[:, :], np.s_[:, ::-1], np.s_[::-1, ::-1], np.s_[::-1, :]]
    upright = {5: lambda a: a, 6: lambda a: a[:, ::-1], 7: lambda a: a[::-1, ::-1], 8: lambda a: a[::-1]}
    expected = pixels[undo[turn - 1]] if turn < 5 else upright[turn](pixels.transpose(1, 0, 2))
    assert got.shape == expected.shape
    assert np.abs(got.astype(int) - expected).mean() < 6


@pytest.mark.parametrize("size", [(16, 24), (8, 12), (7, 7), (33, 40), (1, 1)])
@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_size_covers_and_cuts_around_the_centre(size, kind):
    got = decode(encoded(smooth(), kind), size)
    assert got.shape == (*size, 3)
    whole = Image.fromarray(decode(encoded(smooth(), kind)))
    from PIL import ImageOps

    theirs = np.asarray(ImageOps.fit(whole, size[::-1], Image.Resampling.BILINEAR))
    assert np.abs(got.astype(int) - theirs).mean() < 8


def test_two_sizes_name_two_files(tmp_path):
    root = write(tmp_path / "data")
    (root / "bee" / "1.png").write_bytes(encoded(smooth(size=(8, 8)), "PNG"))
    with refused(DataError, "image-sizes-differ", first="ant/0.png", file="bee/1.png", size=[8, 8]):
        materialize(ImageFolder(root))
    assert materialize(ImageFolder(root, size=8))["image"].shape == (9, 8, 8, 3)


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_damaged_images_are_named(tmp_path, kind):
    root = write(tmp_path / "data", kind=kind)
    victim = root / "bee" / f"1.{kind.lower()}"
    whole = victim.read_bytes()
    for content in (whole[: len(whole) // 2], whole[:20], b"", b"<html>", whole[:3] + b"\0" * 50):
        victim.write_bytes(content)
        for read in (materialize, lambda source: source[4]):
            with refused(DataError, "image-unreadable", file=f"bee/1.{kind.lower()}") as caught:
                read(ImageFolder(root))
            assert caught.value.facts["problem"].code == ("image-damaged" if content else "image-empty")
    victim.unlink()
    source = ImageFolder(root)
    (root / "bee" / f"2.{kind.lower()}").unlink()
    with refused(DataError, "unreadable", reason="No such file or directory"):
        materialize(source)


def test_an_archive_that_ends_early_is_not_called_an_image(tmp_path):
    root = pack(tmp_path / "data.tar", write(tmp_path / "data"))
    source = ImageFolder(root, size=8)
    with open(root, "r+b") as file:
        file.truncate(600)
    for read in (materialize, lambda source: source[4], lambda source: source.compared()):
        with refused(DataError, "file-damaged", path=root):
            read(source)


def test_sixteen_bits_are_not_silently_cut():
    buffer = io.BytesIO()
    Image.fromarray(np.full((4, 4), 40_000, np.uint16)).save(buffer, "PNG")
    with refused(DataError, "image-depth"):
        decode(buffer.getvalue())


def test_folders_that_hold_nothing(tmp_path):
    with refused(DataError, "unreadable", path=tmp_path / "none"):
        ImageFolder(tmp_path / "none")
    with refused(DataError, "folder-no-images", path=tmp_path):
        ImageFolder(tmp_path)
    (write(tmp_path / "data") / "dog").mkdir()
    with refused(DataError, "class-folder-empty", folder="dog"):
        ImageFolder(tmp_path / "data")
    with refused(DataError, "unreadable"):
        ImageFolder(tmp_path / "data", split="train")
    with refused(DataError, "size-not-positive", size=[0, 0]):
        ImageFolder(tmp_path / "data", size=0)
