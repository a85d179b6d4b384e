"""Archives: the same entries as from the folder, bounded memory, and members that are refused."""

import gzip
import io
import tarfile

import pytest

from chipwise.base.errors import DataError
from chipwise.data import folder
from chipwise.data.pack.packing import pack
from chipwise.data.pack.recognise import listing_of
from chipwise.data.pack.tokenise import TextForm
from pictures import write
from refusals import refused


def archive(path, root, under=""):
    with tarfile.open(path, "w:" + path.suffix[1:].replace("tar", "")) as made:
        made.add(root, under or root.name)
    return path


def member(path, name, data=b"", **fields):
    with tarfile.open(path, "w") as made:
        info = tarfile.TarInfo(name)
        info.size = len(data)
        for field, value in fields.items():
            setattr(info, field, value)
        made.addfile(info, io.BytesIO(data))
    return path


@pytest.mark.parametrize("suffix", [".tar", ".tar.gz", ".tar.xz", ".tar.bz2"])
@pytest.mark.parametrize("under", [".", "data", "deep/data"])
def test_an_archive_has_the_entries_of_its_folder(tmp_path, suffix, under):
    write(tmp_path / "data" / "train")
    write(tmp_path / "data" / "test", per_class=1)
    (tmp_path / "data" / "train" / "ant" / ".hidden.jpg").write_bytes(b"?")
    loose, packed = (
        listing_of(tmp_path / "data"),
        listing_of(archive(tmp_path / f"x{suffix}", tmp_path / "data", under)),
    )
    assert packed.names == loose.names and packed.below == loose.below
    for name, split in loose.splits.items():
        assert split.fingerprint() == packed.splits[name].fingerprint()
        assert [split.read(i) for i in range(len(split))] == [
            packed.splits[name].read(i) for i in range(len(split))
        ]


@pytest.mark.parametrize("name", ["/etc/ant/1.png", "data/../../ant/1.png", "../ant/1.png", "../notes.txt"])
def test_members_outside_the_folder_are_refused(tmp_path, name):
    with refused(DataError, "member-refused"):
        listing_of(member(tmp_path / "x.tar", name))


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE])
def test_links_and_devices_are_refused(tmp_path, kind):
    with refused(DataError, "member-refused"):
        listing_of(member(tmp_path / "x.tar", "data/ant/1.png", type=kind, linkname="/etc/passwd"))


@pytest.mark.parametrize("mode", ["w", "w:gz"])
def test_two_members_of_one_name(tmp_path, mode):
    path = tmp_path / ("x.tar.gz" if "gz" in mode else "x.tar")
    with tarfile.open(path, mode) as made:
        for name in ("data/ant/1.png", "data/bee/1.png", "./data/ant//1.png"):
            made.addfile(tarfile.TarInfo(name), io.BytesIO())
    with refused(DataError, "duplicate-name", name="data/ant/1.png"):
        listing_of(path)


@pytest.mark.parametrize("suffix", [".tar", ".tar.xz", ".tar.gz", ".tar.bz2"])
def test_damage_is_said_in_one_line(tmp_path, suffix):
    path = archive(tmp_path / f"y{suffix}", write(tmp_path / "data", per_class=9))
    whole = path.read_bytes()
    flipped = bytearray(whole)
    # Of a plain one only the headers have sums
    flipped[len(whole) // 2 if suffix != ".tar" else whole.index(b"ustar", len(whole) // 2)] ^= 0xFF
    bad = [b"no tar", b"", bytes(flipped)]
    # Between two members as well, where tarfile sees the end of the archive
    bad += [whole[:n] for n in range(512, len(whole) - 10_240 if suffix == ".tar" else len(whole), 512)]
    for content in bad:
        path.write_bytes(content)
        with refused(DataError, "file-damaged", path=path):
            listing_of(path)


def test_members_that_are_no_images_count_too(tmp_path, monkeypatch):
    path = tmp_path / "x.tar.gz"
    with tarfile.open(path, "w:gz") as made:
        for number in range(100):
            made.addfile(tarfile.TarInfo(f"{number}.txt"), io.BytesIO())
    monkeypatch.setattr(folder, "MAX_BYTES", 10_500)
    with refused(DataError, "archive-too-large", path=path, limit_bytes=10_500):
        folder.list_tar(path)


@pytest.mark.parametrize("where", ["before", "in", "after"])
def test_a_small_archive_that_expands_without_end_is_given_up(tmp_path, where, monkeypatch):
    """Zeros, of which gzip has a thousand in a byte, as the only content, in a member, and after the end."""
    zeros, path = bytes(4 << 20), tmp_path / "x.tar.gz"
    monkeypatch.setattr(folder, "_MOST_EXPANDED", 2 << 20)
    with gzip.open(path, "wb") as file:
        if where != "before":
            with tarfile.open(fileobj=file, mode="w|") as made:
                made.addfile(tarfile.TarInfo("data/ant/1.png"), io.BytesIO())
                info = tarfile.TarInfo("data/notes.txt")
                info.size = len(zeros) * (where == "in")
                made.addfile(info, io.BytesIO(zeros))
        if where != "in":
            file.write(zeros)
    with refused(DataError, "file-damaged", reason=f"it expands to more than {2 << 20:,} bytes"):
        folder.list_tar(path)
    monkeypatch.undo()  # as large an archive as a usual one may be
    assert len(folder.list_tar(path).paths) == (where != "before")


@pytest.mark.parametrize("tokens", [None, 8])
def test_an_archive_of_nothing_is_refused_before_it_is_read(tmp_path, tokens):
    """8 GB of holes, which take no disk: an archive that ends at once, or minutes of text."""
    with open(tmp_path / "x.TAR", "wb") as file:
        file.truncate(8 << 30)
    with refused(DataError, "folder-no-images" if tokens is None else "text-archive"):
        pack(tmp_path / "x.TAR", tmp_path / "out", text=tokens and TextForm(tokens=tokens))
    assert [path.name for path in tmp_path.iterdir()] == ["x.TAR"]


@pytest.mark.parametrize("kind", [tarfile.GNUTYPE_LONGNAME, tarfile.XHDTYPE, tarfile.XGLTYPE])
def test_a_member_with_an_endless_name(tmp_path, kind):
    """Of zeros, which a compressed archive has in no space."""
    path = tmp_path / "x.tar.gz"
    with tarfile.open(path, "w:gz") as made:
        info = tarfile.TarInfo("long")
        info.type, info.size = kind, 2 << 20
        made.addfile(info, io.BytesIO(bytes(info.size)))
        made.addfile(tarfile.TarInfo("data/ant/1.png"), io.BytesIO())
    with refused(DataError, "file-damaged", reason=f"an extended header of {2 << 20} bytes"):
        folder.list_tar(path)


def headers(path, name, form=tarfile.GNU_FORMAT, **fields):
    info = tarfile.TarInfo(name)
    for field, value in fields.items():
        setattr(info, field, value)
    path.write_bytes(info.tobuf(form) + bytes(20 * 512))
    return path


@pytest.mark.parametrize(
    "sparse",
    [
        {"type": tarfile.GNUTYPE_SPARSE},
        {"pax_headers": {"GNU.sparse.map": "0,1"}, "form": tarfile.PAX_FORMAT},
        {"pax_headers": {"GNU.sparse.size": "99"}, "form": tarfile.PAX_FORMAT},
        {"pax_headers": {"GNU.sparse.major": "1", "GNU.sparse.minor": "0"}, "form": tarfile.PAX_FORMAT},
    ],
)
def test_sparse_files_are_refused_before_their_parts_are_read(tmp_path, sparse):
    path = headers(tmp_path / "x.tar", "d/1.jpeg", **sparse)
    with refused(DataError, "member-refused", path=path):
        listing_of(path)


@pytest.mark.parametrize(
    "size",
    [
        {"size": -1024},
        {"size": -1024, "type": tarfile.XHDTYPE},
        {"pax_headers": {"size": "-1024"}, "form": tarfile.PAX_FORMAT},
    ],
)
def test_a_negative_size_is_damage_not_a_circle(tmp_path, size):
    path = headers(tmp_path / "x.tar", "d/1.jpeg", **size)
    with refused(DataError, "file-damaged", path=path):
        listing_of(path)


def test_what_memory_cannot_hold_is_refused_with_the_way_out(tmp_path, monkeypatch):
    root = write(tmp_path / "data")
    monkeypatch.setattr(folder, "MAX_BYTES", 1000)
    with refused(DataError, "archive-too-large", path=tmp_path / "x.tar.xz", limit_bytes=1000):
        listing_of(archive(tmp_path / "x.tar.xz", root))
    assert len(listing_of(archive(tmp_path / "x.tar", root)).splits["train"]) == 9  # read in place: no limit
