"""Packed folders: what is written is read, whatever the cut; anything else is refused in one line."""

import functools
import itertools
import json
import mmap
import pickle
import re
import threading
from pathlib import Path

import jax
import numpy as np
import pytest
import simplejpeg
from hypothesis import given, settings
from hypothesis import strategies as st

import chipwise as cw
from chipwise.data import PackedFolder, materialize, packed, take, write_packed
from chipwise.data.compared import changed_data, compared
from chipwise.data.images import decode
from chipwise.data.manifest import header, render
from chipwise.data.pack import Writer
from chipwise.data.sources import empty, spec_of
from chipwise.data.stages import Stages
from refusals import refused

DOCS = Path(__file__).parents[2] / "docs" / "format.md"


def columns(n, seed=0):
    rng = np.random.default_rng(seed)
    return {
        "image": rng.integers(0, 256, (n, 40, 36, 3)).astype(np.uint8),
        "label": rng.integers(0, 4, n).astype(np.int32),
    }


def pack(path, n=7, **changes):
    made = columns(n)
    size = 40 * 36 * 3 + 4
    batches = ({k: v[i : i + 2] for k, v in made.items()} for i in range(0, n, 2))
    return made, write_packed(path, batches, **{"classes": 4, "shard_bytes": 3 * size, **changes})


def photos(path, n=7, sizes=((16, 24),), split="train", **changes):
    """A jpeg pack of `n` images of these sizes in turn, 3 a shard or so: their bytes."""
    rng = np.random.default_rng(5)
    writer = Writer(
        path / split,
        store="jpeg",
        names=["cat", "dog"],
        below={"label": 2},
        settings={},
        identity="1",
        name_bytes=12,
        **{"shard_bytes": 3600, **changes},
    )
    made = []
    for i in range(n):
        smooth = np.linspace(0, 1, sizes[i % len(sizes)][1]) * rng.integers(0, 256, (3, 1))
        image = np.broadcast_to(smooth.T.astype(np.uint8), (*sizes[i % len(sizes)], 3))
        made.append(simplejpeg.encode_jpeg(np.ascontiguousarray(image), 95))
        writer.add([f"cät/{i}.jpg"], {"image": [made[-1]], "label": [i % 2]})
    writer.finish({"fingerprint": "f", "examples": n})
    return made


@settings(max_examples=20, deadline=None, derandomize=True)
@given(data=st.data())
def test_what_is_packed_comes_back(data, tmp_path_factory):
    n = data.draw(st.integers(1, 12))
    dtype = data.draw(st.sampled_from(["bool", "uint8", "int16", "uint16", "int32", "float16", "float32"]))
    shape = tuple(data.draw(st.lists(st.integers(1, 4), max_size=3)))
    values = np.random.default_rng(n).integers(0, 2, (n, *shape)).astype(dtype)
    cuts = sorted({0, n, *data.draw(st.lists(st.integers(0, n), max_size=4))})
    batches = [{"x": values[a:b]} for a, b in itertools.pairwise(cuts)]
    per_shard = data.draw(st.integers(1, n + 1))
    path = tmp_path_factory.mktemp("packed")
    write_packed(path, batches, shard_bytes=per_shard * values[:1].nbytes)
    source = PackedFolder(path)
    assert len(source) == n and spec_of(source) == {"x": jax.ShapeDtypeStruct(shape, values.dtype)}
    assert len(list((path / "train").glob("x-*.npy"))) == -(-n // per_shard)
    np.testing.assert_array_equal(materialize(source)["x"], values)
    indices = np.asarray(data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=9)))
    np.testing.assert_array_equal(take(source, indices)["x"], values[indices])
    np.testing.assert_array_equal(source[n - 1]["x"], values[n - 1])
    source.verify()


def test_shards_are_plain_numpy_files_and_rows_may_come_in_any_order(tmp_path):
    made, folder = pack(tmp_path)
    assert folder == tmp_path / "train"
    np.testing.assert_array_equal(np.load(folder / "image-00002.npy"), made["image"][6:])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["train"]  # nothing half-made beside it
    source = PackedFolder(tmp_path)
    assert source.classes == 4 and source.names == ()
    for indices in ([6, 0, 3, 3, 5], [4, 3], [2, 2, 0], []):
        indices = np.array(indices, np.int64)
        got, room = source.take(indices), empty(source.spec, len(indices) + 2)
        source.fill(indices, {name: column[1:-1] for name, column in room.items()})
        for name in made:
            np.testing.assert_array_equal(got[name], made[name][indices])
            np.testing.assert_array_equal(room[name][1:-1], made[name][indices])
    for outside in (7, -1):
        with pytest.raises(IndexError):
            source[outside]


def test_names_and_other_ranges_are_kept(tmp_path):
    tokens = np.arange(12, dtype=np.uint16).reshape(3, 4)
    write_packed(tmp_path, [{"token": tokens}], below={"token": 12}, split="eval")
    source = PackedFolder(tmp_path, split="eval")
    assert source.below == {"token": 12} and source.classes is None
    pack(tmp_path, names=list("abcd"))
    assert PackedFolder(tmp_path / "train", split=None).names == tuple("abcd")


def test_nothing_is_left_of_a_pack_that_failed(tmp_path):
    def batches():
        yield columns(4)
        raise RuntimeError("the source broke")

    with pytest.raises(RuntimeError):
        write_packed(tmp_path / "out", batches(), classes=4)
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize(
    "batches, changes, expected",
    [
        ([], {}, "pack-nothing"),
        ([columns(2), {"image": columns(2)["image"]}], {}, "pack-columns"),
        ([{**columns(2), "label": np.zeros(3, np.int32)}], {}, "pack-column-length"),
        ([columns(9)], {"classes": 3}, "value-out-of-range"),
        (
            [{"token": np.full((2, 3), 9, np.uint16)}],
            {"classes": None, "below": {"token": 9}},
            "value-out-of-range",
        ),
        ([columns(2)], {"below": {"token": 9}}, "pack-columns"),
        ([{"x": np.array(["a"])}], {"classes": None}, "column-not-numbers"),
        ([{"x": np.array([2**40])}], {"classes": None}, "column-overflows"),
    ],
)
def test_what_cannot_be_packed_is_refused(tmp_path, batches, changes, expected):
    with pytest.raises(cw.errors.DataError) as error:
        write_packed(tmp_path, batches, **{"classes": 4, **changes})
    assert error.value.code == expected or expected in str(error.value)
    assert "\n" not in str(error.value)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_is_never_overwritten(tmp_path):
    pack(tmp_path)
    with refused(cw.errors.DataError, "pack-exists", folder=tmp_path / "train"):
        pack(tmp_path)


def _manifest(edit):
    """Damage by somebody who also renews the manifest's own checksum."""

    def change(folder):
        path = folder / "manifest.json"
        manifest = json.loads(path.read_text())
        edit(manifest)
        path.write_text(render(manifest))

    return change


def _change(**changes):
    return _manifest(lambda manifest: manifest.update(changes))


def _shard(edit):
    return _manifest(lambda manifest: edit(manifest["shards"][0]))


def _column(name, shape):
    return _manifest(lambda manifest: manifest["columns"][name].update(shape=shape))


def _cut(folder):
    (folder / "image-00000.npy").write_bytes((folder / "image-00000.npy").read_bytes()[:-1])


def _edit(path, old, new):
    assert old in path.read_bytes()
    path.write_bytes(path.read_bytes().replace(old, new, 1))


DAMAGE = {
    "no manifest": (lambda f: (f / "manifest.json").unlink(), "not-packed", {}),
    "half a manifest": (lambda f: (f / "manifest.json").write_text('{"format'), "manifest-damaged", {}),
    "another format": (_change(format="tar"), "manifest-format", {}),
    "newer": (_change(version=3), "manifest-newer", {"version": 3, "known": 2}),
    "older": (_change(version=1), "manifest-older", {"version": 1, "known": 2}),
    "another store": (_change(store="zip"), "manifest-damaged", {}),
    "no images": (
        _change(store="jpeg", columns={"label": {"dtype": "int32", "shape": []}}),
        "manifest-damaged",
        {},
    ),
    "no records": (_shard(lambda s: s["files"].pop("record")), "shard-columns", {"columns": ["record"]}),
    "own checksum": (
        lambda f: _edit(f / "manifest.json", b'"examples": 7', b'"examples": 8'),
        "manifest-damaged",
        {"reason": "SHA-256"},
    ),
    "no version": (_change(version=None), "manifest-newer", {"version": None}),
    "wrong count": (_change(examples=8), "manifest-damaged", {}),
    "no shards": (_change(shards=[]), "manifest-damaged", {}),
    "objects": (_change(columns={"image": {"dtype": "object", "shape": []}}), "manifest-damaged", {}),
    "endless counts": (_change(counts=[float("inf")]), "manifest-damaged", {}),
    "a mean beyond floats": (_change(mean=[10**400]), "manifest-damaged", {}),
    "splits without names": (_change(splits=[7]), "manifest-damaged", {}),
    "no checksum": (_shard(lambda s: s["files"]["label"].pop("sha256")), "manifest-damaged", {}),
    "a huge column": (_column("image", [1 << 20, 1 << 20, 3]), "manifest-damaged", {}),
    "a negative one": (_column("image", [-1, 6, 3]), "manifest-damaged", {}),
    "nonsense": (_change(columns=[1]), "manifest-damaged", {}),
    "missing shard": (lambda f: (f / "label-00001.npy").unlink(), "file-missing", {}),
    "wrong size": (_cut, "file-size", {"bytes": 13_087, "expected": 13_088}),
    "unknown column": (
        _shard(lambda s: s["files"].update(mask=s["files"]["label"])),
        "shard-columns",
        {"columns": ["mask"]},
    ),
    "missing column": (_shard(lambda s: s["files"].pop("label")), "shard-columns", {"columns": ["label"]}),
    "outside": (
        _shard(lambda s: s["files"]["label"].update(name="../label.npy")),
        "file-outside",
        {"name": "../label.npy"},
    ),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_refused_before_anything_is_read(tmp_path, kind):
    _, folder = pack(tmp_path)
    damage, code, facts = DAMAGE[kind]
    damage(folder)
    with refused(cw.errors.DataError, code, **facts):
        PackedFolder(tmp_path)


def test_a_missing_split_is_refused(tmp_path):
    pack(tmp_path)
    with refused(cw.errors.DataError, "not-packed", path=tmp_path / "eval"):
        PackedFolder(tmp_path, split="eval")


def _as_is(folder, array):
    """Puts `array` in the place of the first labels, with a manifest that admits its size."""
    path = folder / "label-00000.npy"
    np.save(path, array, allow_pickle=True)
    _shard(lambda s: s["files"]["label"].update(bytes=path.stat().st_size))(folder)


@pytest.mark.parametrize(
    "array, code, facts",
    [
        (np.array([print] * 3, object), "npy-damaged", {}),
        (np.zeros(2, np.int32), "npy-unlike", {"shape": [2], "expected_shape": [3]}),
        (np.int32(2), "npy-unlike", {"shape": [], "expected_shape": [3]}),
        (np.zeros(3, np.int64), "npy-unlike", {"dtype": "int64", "expected_dtype": "int32"}),
        (np.array([0, 4, 0], np.int32), "value-out-of-range", {"example": 1, "value": 4, "last": 3}),
        (np.array([0, -1, 0], np.int32), "value-out-of-range", {"column": "label", "value": -1}),
    ],
)
def test_a_shard_that_is_not_what_was_declared_is_refused(tmp_path, array, code, facts):
    _, folder = pack(tmp_path)
    _as_is(folder, array)
    with refused(cw.errors.DataError, code, **facts):
        PackedFolder(tmp_path).take(np.arange(7))


@functools.cache
def _flippable(root, store):
    """A pack, and the names of its files."""
    path = root / store
    if store == "raw":
        pack(path)
    else:
        photos(path, sizes=((16, 24), (9, 8)))
    source = PackedFolder(path, size=None if store == "raw" else 8)
    files = [file["name"] for shard in source.manifest["shards"] for file in shard["files"].values()]
    return source, ["manifest.json", *files]


@pytest.mark.parametrize("store", ["raw", "jpeg"])
@settings(max_examples=40, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_changed_byte_is_found_in_its_file(store, data, tmp_path_factory):
    root = tmp_path_factory.getbasetemp() / "flips"
    source, files = _flippable(root, store)
    name = data.draw(st.sampled_from(sorted(files)))
    path = source.path / name
    before = path.read_bytes()
    place = data.draw(st.integers(0, len(before) - 1))
    after = bytearray(before)
    after[place] ^= data.draw(st.integers(1, 255))
    try:
        path.write_bytes(after)
        with pytest.raises(cw.errors.DataError) as error:
            source.verify()
    finally:
        path.write_bytes(before)
    assert name in str(error.value) and "\n" not in str(error.value)


def test_every_damaged_file_is_named(tmp_path):
    made = np.arange(60, dtype=np.uint8).reshape(30, 2)
    write_packed(tmp_path, [{"x": made}], shard_bytes=40)
    source = PackedFolder(tmp_path)
    source.verify()
    for number in (0, 1):
        path = tmp_path / "train" / f"x-0000{number}.npy"
        path.write_bytes(path.read_bytes()[:-20] + b"\xff" * 20)
    files = ["x-00000.npy", "x-00001.npy"]
    with refused(cw.errors.DataError, "pack-damaged", files=files):
        source.verify()
    (tmp_path / "train" / "x-00001.npy").write_bytes(b"")
    with refused(cw.errors.DataError, "pack-damaged", files=files):
        source.verify()
    (tmp_path / "train" / "record-00001.npy").unlink()
    with refused(cw.errors.DataError, "unreadable", path=tmp_path / "train" / "record-00001.npy"):
        source.verify()


def test_encoded_images_come_back_as_they_were_and_decoded(tmp_path):
    made = photos(tmp_path)
    source = PackedFolder(tmp_path)
    assert (len(source), source.classes, source.names, source.store) == (7, 2, ("cat", "dog"), "jpeg")
    assert len(source.manifest["shards"]) > 1
    assert source.spec["image"].shape == (16, 24, 3)
    pixels = np.stack([decode(data) for data in made])
    np.testing.assert_allclose(source.mean, pixels.mean((0, 1, 2)), rtol=1e-12)
    for indices in ([3, 0, 6, 3], [1], []):
        got = take(source, np.array(indices, np.int64))
        np.testing.assert_array_equal(got["image"], pixels[indices])
        np.testing.assert_array_equal(got["label"], np.array(indices, np.int64) % 2)
    np.testing.assert_array_equal(materialize(source)["image"], pixels)
    np.testing.assert_array_equal(source[6]["image"], pixels[6])
    assert [source.encoded(i) for i in range(7)] == made
    assert [source.record_name(i) for i in range(7)] == [f"cät/{i}.jpg" for i in range(7)]
    for outside in (7, -1):
        with pytest.raises(IndexError):
            source.encoded(outside)
    source.verify()


def unlike(before, now):
    """The parts in which the texts of two packs differ."""
    return dict(changed_data({"": before}, {"": now})).get("", [])


def test_packs_of_the_same_images_agree_and_others_do_not(tmp_path):
    from PIL import Image

    from chipwise.data.pack.packing import Packing

    for name in ("a/1", "a/2", "b/3"):
        (tmp_path / "photos" / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (16, 16), (9, 9, 9)).save(tmp_path / "photos" / f"{name}.jpg")

    def digest(name, **options):
        Packing(tmp_path / "photos", tmp_path / name, workers=1, **options).run()
        return compared(PackedFolder(tmp_path / name)).text

    photos(tmp_path / "cut"), photos(tmp_path / "whole", shard_bytes=1 << 20)
    cut, whole = (PackedFolder(tmp_path / name) for name in ("cut", "whole"))
    assert cut.manifest["shards"] != whole.manifest["shards"] and compared(cut) == compared(whole)
    raw = digest("raw", size=8)
    assert raw.startswith("pack:") and not unlike(raw, digest("jpeg", store="jpeg"))
    assert unlike(raw, digest("larger", size=12)) == ["records"]
    assert not unlike(raw.partition(" ")[0], raw)  # of an earlier version
    (tmp_path / "photos" / "b" / "4.jpg").write_bytes((tmp_path / "photos" / "b" / "3.jpg").read_bytes())
    more = digest("more", size=8)
    (tmp_path / "photos" / "b" / "4.jpg").rename(tmp_path / "photos" / "a" / "4.jpg")
    moved = digest("moved", size=8)
    assert "pack" in unlike(more, moved) and len({raw, more, moved}) == 3
    Image.new("RGB", (16, 16), (200, 9, 9)).save(tmp_path / "photos" / "a" / "4.jpg")
    assert unlike(moved, digest("repainted", size=8)) == ["records"]


def test_without_names_packs_agree_by_their_bytes(tmp_path):
    pack(tmp_path / "one"), pack(tmp_path / "same"), pack(tmp_path / "other", n=6)
    one, same, other = (compared(PackedFolder(tmp_path / n)).text for n in ("one", "same", "other"))
    assert one == same != other


def test_images_of_several_sizes_are_cut_to_one(tmp_path):
    made = photos(tmp_path, sizes=((16, 24), (40, 33), (8, 8)))
    source = PackedFolder(tmp_path)
    assert source.manifest["columns"]["image"]["shape"] is None and len(source) == 7
    with refused(cw.errors.DataError, "pack-sizes-differ", folder=str(tmp_path), split="train"):
        source.spec  # noqa: B018
    assert source.encoded(1) == made[1]
    cut = PackedFolder(tmp_path, size=(8, 10))
    assert cut.spec["image"].shape == (8, 10, 3)
    wanted = np.stack([decode(data, (8, 10)) for data in made])
    np.testing.assert_array_equal(cut.take(np.arange(7))["image"], wanted)


@pytest.mark.parametrize("size, code", [(0, "size-not-positive"), (39, "pack-size-fixed")])
def test_a_size_that_cannot_be_is_refused(size, code, tmp_path):
    pack(tmp_path)
    with refused(cw.errors.DataError, code, size=[size, size]):
        PackedFolder(tmp_path, size=size)
    assert PackedFolder(tmp_path, size=(40, 36)).spec["image"].shape == (40, 36, 3)


def test_pixels_have_no_encoded_form(tmp_path):
    pack(tmp_path)
    with refused(cw.errors.DataError, "pack-not-encoded", example=0):
        PackedFolder(tmp_path).encoded(0)
    assert PackedFolder(tmp_path).record_name(0) == ""


def test_an_image_that_cannot_be_decoded_is_named(tmp_path):
    photos(tmp_path)
    begin = len(header(np.dtype(np.uint8), (0,)))
    for path in (tmp_path / "train").glob("image-*.npy"):
        data = path.read_bytes()
        path.write_bytes(data[:begin] + bytes(len(data) - begin))
    with refused(cw.errors.DataError, "packed-record-unreadable", record=2, name="cät/2.jpg") as error:
        PackedFolder(tmp_path).take(np.array([2]))
    assert error.value.facts["problem"].code == "image-damaged"


def test_an_end_outside_the_file_is_refused(tmp_path):
    photos(tmp_path, n=2)
    path = tmp_path / "train" / "record-00000.npy"
    table = np.load(path)
    table["end"] = -5, 1 << 40
    np.save(path, table)
    for index in (0, 1):
        with refused(cw.errors.DataError, "packed-record-unreadable", record=index) as error:
            PackedFolder(tmp_path).take(np.array([index]))
        assert error.value.facts["problem"].code == "record-bytes"


@pytest.mark.parametrize("store", ["raw", "jpeg"])
def test_asking_for_pages_ahead_covers_the_records_and_changes_nothing(store, tmp_path, monkeypatch):
    monkeypatch.setattr(packed, "_PREFETCHED", 100)
    pack(tmp_path) if store == "raw" else photos(tmp_path)
    source = PackedFolder(tmp_path)
    before = source.take(np.arange(7))
    asked = []

    class Map(mmap.mmap):
        def madvise(self, option, start, length):
            asked.append((start, length))
            super().madvise(option, start, length)

    monkeypatch.setattr(mmap, "mmap", Map)  # what NumPy maps files with
    source = PackedFolder(tmp_path)
    source.prefetch(np.array([6, 0, 6]))
    assert len(asked) == 3 and all(start % mmap.PAGESIZE == 0 for start, _ in asked)
    begin = len(header(np.dtype(np.uint8), (0,)))
    size = len(source.encoded(0)) if store == "jpeg" else 40 * 36 * 3
    assert (0, begin + size) in asked
    for name, column in source.take(np.arange(7)).items():
        np.testing.assert_array_equal(column, before[name])
    with pytest.raises(IndexError):
        source.prefetch(np.array([7]))


def test_the_time_is_told_by_stage(tmp_path):
    photos(tmp_path)
    stages = Stages()
    with stages.watch():
        PackedFolder(tmp_path).take(np.arange(7))
    assert stages.seconds["read"] > 0 and stages.seconds["decode"] > 0


def test_several_threads_may_read_at_once(tmp_path):
    made, _ = pack(tmp_path, n=60)
    source, room = PackedFolder(tmp_path), {k: np.zeros_like(v) for k, v in made.items()}

    def read(start):
        indices = np.arange(start, 60, 6)
        part = empty(source.spec, 10)
        for _ in range(20):
            source.fill(indices, part)
        for name, column in part.items():
            room[name][indices] = column

    threads = [threading.Thread(target=read, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for name in made:
        np.testing.assert_array_equal(room[name], made[name])


@pytest.mark.parametrize("make", [lambda path: pack(path)[0], photos])
def test_a_source_can_be_pickled(make, tmp_path):
    make(tmp_path)
    source = PackedFolder(tmp_path)
    before = source.take(np.arange(7))
    data = pickle.dumps(source)
    assert len(data) < 8000  # no pixels
    for name, column in pickle.loads(data).take(np.arange(7)).items():
        np.testing.assert_array_equal(column, before[name])


# JAX warns of any fork, since a child that used JAX could hang; these children use NumPy only
@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning", "ignore:.*multi-threaded:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")  # of a machine with one core
@pytest.mark.parametrize("start", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_pytorch_reads_it_in_two_processes(start, tmp_path):
    data = pytest.importorskip("torch.utils.data")
    made, _ = pack(tmp_path)
    loader = data.DataLoader(
        PackedFolder(tmp_path), batch_size=3, shuffle=False, num_workers=2, multiprocessing_context=start
    )
    batches = list(loader)
    for name in made:
        found = np.concatenate([batch[name].numpy() for batch in batches])
        np.testing.assert_array_equal(found, made[name])


@pytest.mark.parametrize("store", ["raw", "jpeg"])
def test_the_lines_of_the_documentation_read_a_pack(store, tmp_path, monkeypatch):
    labels = [int(i) for i in photos_or_pixels(store, tmp_path / "PACK")]
    monkeypatch.chdir(tmp_path)
    code = re.findall(rf"```python\n# {store}\n(.*?)```", DOCS.read_text(encoding="utf-8"), re.DOTALL)
    assert len(code) == 1 and len(code[0].splitlines()) == 5
    names: dict = {}
    exec(code[0].replace("PACK_OF_JPEGS", "PACK"), names)
    source = PackedFolder(tmp_path / "PACK")
    np.testing.assert_array_equal(names["pixels"], source[2]["image"])
    assert names["label"] == labels[2]


def photos_or_pixels(store, path):
    """Makes a pack of one shard: its labels."""
    if store == "raw":
        return pack(path, shard_bytes=1 << 20)[0]["label"]
    photos(path, shard_bytes=1 << 20)
    return [i % 2 for i in range(7)]
