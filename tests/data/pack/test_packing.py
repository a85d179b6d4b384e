"""Whole packs: what is in them, that workers, archives and kills change no byte, and bad input."""

import errno
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest

from chipwise.base.errors import DataError, RecipeError
from chipwise.base.facts import fact
from chipwise.base.locks import Lock
from chipwise.data import ImageFolder, PackedFolder
from chipwise.data.images import decode
from chipwise.data.pack import examples
from chipwise.data.pack.packing import Packing, pack
from chipwise.data.sources import materialize
from pictures import encoded, files, smooth, write
from refusals import refused


def split_folder(root):
    write(root / "train", 5)
    write(root / "test", 2)
    return root


@pytest.mark.parametrize("size", [None, 8, 20])
@pytest.mark.parametrize("store", ["raw", "jpeg"])
def test_a_pack_holds_what_the_folder_holds(tmp_path, size, store):
    src = split_folder(tmp_path / "src")
    assert pack(src, tmp_path / "out", size=size, store=store) == tmp_path / "out"
    assert len(files(tmp_path / "out")) == 8
    for split, folder in (("train", "train"), ("eval", "test")):
        made, loose = PackedFolder(tmp_path / "out", split), ImageFolder(src, split=folder, size=size)
        made.verify()
        assert made.names == loose.names == ("ant", "bee", "cat")
        assert made.manifest["counts"] == [len(loose) // 3] * 3
        ours, theirs = materialize(made), materialize(loose)
        np.testing.assert_array_equal(ours["label"], theirs["label"])
        if (
            store == "raw" or size is None
        ):  # the same bits: an image that needs no change is not encoded again
            np.testing.assert_array_equal(ours["image"], theirs["image"])
        else:
            assert np.abs(ours["image"].astype(int) - theirs["image"]).mean() < 4
        pixels = ours["image"].reshape(-1, 3).astype(np.float64)
        np.testing.assert_allclose(made.mean, pixels.mean(0))
        np.testing.assert_allclose(made.std, pixels.std(0))
        assert made.record_name(len(made) - 1) == f"cat/{len(made) // 3 - 1:03}.jpeg"
    if store == "jpeg" and size is None:
        assert made.encoded(0) == (src / "test" / "ant" / "000.jpeg").read_bytes()


@pytest.mark.parametrize("store", ["raw", "jpeg"])
def test_neither_workers_nor_pieces_nor_archives_change_a_byte(tmp_path, monkeypatch, store):
    src = split_folder(tmp_path / "src")
    options = {"size": 12, "store": store, "shards": 2}
    (src / "train" / "bee" / "001.jpeg").write_bytes(b"broken")
    expected = files(pack(src, tmp_path / "one", workers=1, **options))
    for suffix in ("", ".xz"):
        with tarfile.open(tmp_path / f"src.tar{suffix}", f"w:{suffix[1:]}") as archive:
            archive.add(src, "deep/src")
        assert files(pack(tmp_path / f"src.tar{suffix}", tmp_path / f"tar{suffix}", **options)) == expected
    monkeypatch.setattr(examples, "_HELD_BYTES", 800)  # two images: pieces come in parts
    assert files(pack(src, tmp_path / "parts", workers=3, **options)) == expected
    monkeypatch.setattr(examples, "PIECE_ENTRIES", 2)
    assert files(pack(src, tmp_path / "three", workers=3, **options)) == expected
    assert len([name for name in expected if name.startswith("train/image")]) == 2


def test_of_two_packs_to_one_place_the_second_leaves_nothing(tmp_path):
    late, early = (Packing(src, tmp_path / "out") for src in [write(tmp_path / "src", 2)] * 2)
    os.mkdir(late.partial)
    held = Lock(tmp_path / ".out.partial.lock")
    with refused(DataError, "pack-in-use"):
        early.run()
    held.close()
    early.run()
    with refused(DataError, "pack-exists"):
        late.run()
    assert sorted(os.listdir(tmp_path)) == ["out", "src"]


def kill(tmp_path, store, seed):
    src, out = tmp_path / "src", tmp_path / f"out-{store}-{seed}"
    if not src.exists():
        write(src, 16)
        (src / "ant" / "003.jpeg").write_bytes(b"broken")
        (src / "cat" / "005.jpeg").write_bytes(b"")
        for kind in ("raw", "jpeg"):
            pack(src, tmp_path / f"whole-{kind}", store=kind, size=12, split=0.25, shards=6)
    command = [
        sys.executable,
        "-W",
        "ignore",
        Path(__file__).parent / "killed.py",
        src,
        out,
        store,
        str(seed),
    ]
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
    assert files(out) == files(tmp_path / f"whole-{store}")
    assert [p.name for p in tmp_path.glob(".*.partial")] == []
    return [int(count) for count in done.stdout.split()]


@pytest.mark.slow
def test_sigkill_changes_no_byte(tmp_path):
    killed, went_on = kill(tmp_path, "jpeg", 1)
    assert killed > 2 and went_on > 0


@pytest.mark.slow
def test_sigkill_at_many_moments_changes_no_byte(tmp_path):
    counts = np.array([kill(tmp_path, store, seed) for store in ("raw", "jpeg") for seed in range(2, 7)])
    assert counts.sum(axis=0).min() > 10


def why_not(content):
    """What is said of an image that cannot be decoded."""
    with pytest.raises(DataError) as caught:
        decode(content)
    return str(caught.value)


def test_what_cannot_be_packed_is_skipped_and_told(tmp_path):
    src = write(tmp_path / "src", 5)
    whole = (src / "bee" / "000.jpeg").read_bytes()
    bad = {"ant/001": b"", "ant/004": b"<html>no", "bee/002": whole[: len(whole) // 2], "cat/000": whole[:40]}
    for name, content in bad.items():
        (src / f"{name}.jpeg").write_bytes(content)
    (src / "cat" / "004.jpeg").unlink()
    (src / "cat" / "004.jpeg").symlink_to("nowhere")
    assert Packing(src, tmp_path / "out").run() == 15
    reasons = {f"{name}.jpeg": why_not(content) for name, content in bad.items()}
    reasons["cat/004.jpeg"] = str(fact("entry-unreadable", reason=os.strerror(errno.ENOENT)))
    made = PackedFolder(tmp_path / "out")
    skipped = [{"name": name, "reason": reason} for name, reason in reasons.items()]
    assert made.manifest["source"]["skipped"] == skipped
    assert len(made) == 10 and made.manifest["source"]["examples"] == 15
    assert [made.record_name(i) for i in range(3)] == ["ant/000.jpeg", "ant/002.jpeg", "ant/003.jpeg"]
    np.testing.assert_array_equal(made[9]["image"], decode((src / "cat" / "003.jpeg").read_bytes()))


@pytest.mark.parametrize("store", ["raw", "jpeg"])
def test_the_limit_of_skipped_files(tmp_path, store):
    src = write(tmp_path / "src", 5)
    originals = {}
    for name in ("ant/003", "bee/000", "cat/002"):
        originals[name] = (src / f"{name}.jpeg").read_bytes()
        (src / f"{name}.jpeg").write_bytes(b"?")
    out = tmp_path / "out"
    reason, partial = why_not(b"?"), tmp_path / ".out.partial"
    with refused(DataError, "pack-skipped-many", name="ant/003.jpeg", limit=0, partial=partial):
        pack(src, out, store=store, shards=4, max_skipped=0)
    names = ["cat/002.jpeg", "bee/000.jpeg", "ant/003.jpeg"]
    for _ in range(2):
        with refused(
            DataError, "pack-skipped-many", limit=2, name="cat/002.jpeg", reason=reason, names=names
        ):
            pack(src, out, store=store, shards=4, max_skipped=2)
    assert not out.exists()
    done = []
    pack(src, out, store=store, shards=4, max_skipped=3, progress=lambda now: done.append(now.done))
    assert 0 < done[0] < 12  # complete shards were not lost by the error
    assert len(PackedFolder(out)) == 12


def test_a_smaller_limit_does_not_let_earlier_skips_through(tmp_path):
    src = write(tmp_path / "src", 2)
    (src / "ant" / "001.jpeg").write_bytes(b"?")
    (src / "cat" / "001.jpeg").write_bytes(b"?")
    with refused(DataError, "pack-skipped-many", name="cat/001.jpeg"):
        pack(src, tmp_path / "out", max_skipped=1, shards=4)
    with refused(DataError, "pack-skipped-many", name="ant/001.jpeg", reason=why_not(b"?")):
        pack(src, tmp_path / "out", max_skipped=0, shards=4)
    pack(src, tmp_path / "out", shards=4)


def test_examples_whose_columns_differ_are_named(tmp_path):
    for number, odd in enumerate(({"x": 1.0, "y": 2.0}, {"y": 1.0}, {"x": np.zeros(3)})):
        with refused(DataError, "examples-differ", first="0", expected=["x []"], name="2"):
            pack([{"x": 1.0}, {"x": 2.0}, odd], tmp_path / str(number))


def test_a_pack_is_not_made_at_a_url(tmp_path):
    with refused(RecipeError, "pack-to-url", dst="s3://bucket/out"):
        pack(write(tmp_path / "src"), "s3://bucket/out")
    with refused(RecipeError, "path-impossible"):
        pack(write(tmp_path / "other"), tmp_path / "a\0b")


def test_the_default_limit_is_one_percent_and_at_least_ten(tmp_path):
    src = write(tmp_path / "src", 5)
    assert Packing(src, tmp_path / "out").max_skipped == 10
    assert Packing([{"x": 1.0}] * 1100, tmp_path / "out").max_skipped == 11
    for name in src.rglob("*.jpeg"):
        name.write_bytes(b"?")
    with refused(DataError, "pack-skipped-many", limit=10):
        pack(src, tmp_path / "out")


def test_a_full_disk_stops_and_room_goes_on(tmp_path, monkeypatch):
    src = split_folder(tmp_path / "src")
    expected = files(pack(src, tmp_path / "whole"))
    fsync, left = os.fsync, iter(range(3))

    def full(file):
        if next(left, None) is None:
            raise OSError(errno.ENOSPC, "No space left on device")
        fsync(file)

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with refused(DataError, "pack-disk-full", folder=tmp_path / ".out.partial" / "train", kept=0):
            pack(src, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert files(pack(src, tmp_path / "out")) == expected


def test_images_of_two_sizes(tmp_path):
    src = write(tmp_path / "src", 2)
    (src / "bee" / "001.jpeg").write_bytes(encoded(smooth(size=(8, 8))))
    sizes = {"first_height": 16, "first_width": 24, "height": 8, "width": 8, "size": 16}
    with refused(DataError, "pack-image-sizes", first="ant/000.jpeg", name="bee/001.jpeg", **sizes):
        pack(src, tmp_path / "out")
    pack(src, tmp_path / "out", store="jpeg")
    assert PackedFolder(tmp_path / "out", size=8)[3]["image"].shape == (8, 8, 3)


def test_what_was_begun_of_two_sizes_is_gone(tmp_path):
    src = write(tmp_path / "src", 3)
    (src / "bee" / "001.jpeg").write_bytes(encoded(smooth(size=(8, 8))))
    with refused(DataError, "pack-image-sizes", first="ant/000.jpeg", name="bee/001.jpeg"):
        pack(src, tmp_path / "out")
    pack(src, tmp_path / "out", size=8)  # what was begun does not stand in the way


def test_other_settings_do_not_go_on_with_a_pack(tmp_path):
    src = write(tmp_path / "src", 5)
    (src / "ant" / "003.jpeg").write_bytes(b"?")
    with refused(DataError, "pack-skipped-many"):
        pack(src, tmp_path / "out", max_skipped=0)
    for change in ({"size": 8}, {"split": 0.5}):
        with refused(DataError, "pack-other-settings", folder=tmp_path / ".out.partial" / "train"):
            pack(src, tmp_path / "out", **change)
    (src / "cat" / "009.jpeg").write_bytes(encoded(smooth()))
    with refused(DataError, "pack-other-settings"):
        pack(src, tmp_path / "out")


def test_places_that_cannot_be(tmp_path):
    src = write(tmp_path / "src", 1)
    with refused(DataError, "pack-exists", folder=src):
        pack(src, src)
    with refused(DataError, "pack-inside-source", dst=src / "packed"):
        pack(src, src / "packed")
    (tmp_path / "file").write_text("")
    with refused(DataError, "pack-unwritable"):
        pack(src, tmp_path / "file" / "out")


@pytest.mark.parametrize(
    ("settings", "code"),
    [
        ({"store": "png"}, "pack-option"),
        ({"size": 0}, "pack-option"),
        ({"size": "64"}, "pack-option"),
        ({"size": 13_378}, "pack-option"),
        ({"quality": 9.5}, "pack-option"),
        ({"quality": 101}, "pack-option"),
        ({"shards": "few"}, "pack-option"),
        ({"shards": 0}, "pack-option"),
        ({"max_skipped": -1}, "pack-option"),
        ({"workers": 0}, "pack-option"),
        ({"pixels": (0, 1, 2)}, "pack-option"),
        ({"pixels": (1, 1)}, "pack-option"),
    ],
)
def test_settings_that_cannot_be(tmp_path, settings, code):
    with refused(RecipeError, code):
        pack(tmp_path, tmp_path / "out", **settings)
