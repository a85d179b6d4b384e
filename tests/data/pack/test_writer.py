"""Writing packs: whatever the cuts and wherever it is killed, the same bytes come out."""

import errno
import hashlib
import itertools
import json
import os
import signal
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import simplejpeg
from hypothesis import given, settings
from hypothesis import strategies as st

import chipwise as cw
from chipwise.base.errors import DataError
from chipwise.data import PackedFolder
from chipwise.data.pack import Writer, write_packed
from chipwise.data.pack.shards import Moments
from refusals import refused

N, SIZE = 13, 6 * 5 * 3 + 4


def examples(store):
    """(name, columns) or (name, reason) of a listing with two entries that cannot be packed."""
    rng = np.random.default_rng(3)
    for i in range(N):
        image = rng.integers(0, 256, (6, 5 + i % 2 * (store == "jpeg"), 3)).astype(np.uint8)
        if i in (4, 9):
            yield f"b/{i}.jpg", "not an image"
        elif store == "jpeg":
            data = simplejpeg.encode_jpeg(image, 90)
            yield f"a/{i}.jpg", {"image": data, "label": np.int32(i % 3)}
        else:
            yield f"a/{i}.jpg", {"image": image, "label": np.int32(i % 3)}


def writer(folder, store="raw", **changes):
    shard = 4 * SIZE if store == "raw" else 2500
    expected = {"names": ["a", "b", "c"], "below": {"label": 3}, "settings": {"quality": 90}}
    return Writer(
        folder,
        **{"store": store, "identity": "1", "name_bytes": 8, "shard_bytes": shard, **expected, **changes},
    )


def write(folder, store="raw", stop=N, several=1, **changes):
    """Goes on to entry `stop` of the listing, `several` records a call, and finishes it at the last."""
    made = writer(folder, store, **changes)
    run: list = []

    def add():
        for start in range(0, len(run), several):
            names, columns = zip(*run[start : start + several], strict=True)
            made.add(names, {column: [c[column] for c in columns] for column in columns[0]})
        run.clear()

    try:
        for name, what in list(examples(store))[made.consumed : stop]:
            if isinstance(what, str):
                add()
                made.skip(name, what)
            else:
                run.append((name, what))
        add()
        if stop == N:
            made.finish({"fingerprint": "f", "examples": N})
    finally:
        made.close()


def files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    made = {}
    for store in ("raw", "jpeg"):
        folder = tmp_path_factory.mktemp("whole") / store
        write(folder, store)
        made[store] = files(folder)
    return made


def test_what_is_in_a_pack(tmp_path, whole):
    write(tmp_path / "train")
    source = PackedFolder(tmp_path)
    kept = [(name, c) for name, c in examples("raw") if not isinstance(c, str)]
    images = np.stack([c["image"] for _, c in kept])
    np.testing.assert_array_equal(source.take(np.arange(11))["image"], images)
    np.testing.assert_allclose(source.mean, images.mean((0, 1, 2)), rtol=1e-12)
    np.testing.assert_allclose(source.std, images.std((0, 1, 2)), rtol=1e-12)
    assert [source.record_name(i) for i in range(11)] == [name for name, _ in kept]
    manifest = source.manifest
    assert manifest["counts"] == np.bincount([int(c["label"]) for _, c in kept], minlength=3).tolist()
    assert [shard["examples"] for shard in manifest["shards"]] == [4, 4, 3]
    assert manifest["settings"] == {"quality": 90} and manifest["examples"] == 11
    skipped = [{"name": f"b/{i}.jpg", "reason": "not an image"} for i in (4, 9)]
    assert manifest["source"] == {"fingerprint": "f", "examples": N, "skipped": skipped}
    for shard in manifest["shards"]:
        for file in shard["files"].values():
            data = whole["raw"][file["name"]]
            assert (file["bytes"], file["sha256"]) == (len(data), hashlib.sha256(data).hexdigest())
    assert set(whole["raw"]) == {"manifest.json"} | {
        f"{column}-0000{i}.npy" for column in ("image", "label", "record") for i in range(3)
    }


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(
    stops=st.lists(st.integers(0, N), max_size=4),
    several=st.integers(1, N),
    store=st.sampled_from(["raw", "jpeg"]),
)
def test_stops_and_calls_do_not_show(stops, several, store, whole, tmp_path_factory):
    folder = tmp_path_factory.mktemp("stops") / "train"
    for stop in [*sorted(stops), N]:
        write(folder, store, stop, several)
    assert files(folder) == whole[store]


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_the_cuts_of_calls_do_not_change_a_byte(data, tmp_path_factory):
    n = data.draw(st.integers(1, 12))
    shape = tuple(data.draw(st.lists(st.integers(1, 4), max_size=3)))
    dtype = data.draw(st.sampled_from(["bool", "uint8", "int16", "int32", "float16", "float32"]))
    image = np.random.default_rng(n).integers(0, 2, (n, *shape)).astype(dtype)
    per_shard = data.draw(st.sampled_from([1, max(1, n - 1), n, n + 1]))
    cuts = sorted({0, n, *data.draw(st.lists(st.integers(0, n), max_size=4))})
    root = tmp_path_factory.mktemp("cuts")
    options = {"below": {}, "names": (), "shard_bytes": per_shard * image[:1].nbytes}
    one, many = writer(root / "one", **options), writer(root / "many", **options)
    for i in range(n):
        one.add([f"{i}"], {"image": image[i : i + 1]})
    for a, b in itertools.pairwise(cuts):
        many.add([f"{i}" for i in range(a, b)], {"image": image[a:b]})
    for made in (one, many):
        made.finish({"fingerprint": "f", "examples": n})
    assert files(root / "one") == files(root / "many")
    source = PackedFolder(root, "one")
    assert len(source.manifest["shards"]) == -(-n // per_shard)
    source.verify()


class Killed(BaseException):
    """Nothing more reaches the disk."""


def kill_at(monkeypatch, call, share=0.5):
    """The `call`-th change to the disk does not happen, or of a write only a part. Returns the count."""
    count = itertools.count()

    def dying(name):
        real = getattr(os, name)

        def change(*args, **more):
            if next(count) == call:
                if name == "write":
                    real(args[0], args[1][: int(len(args[1]) * share)])
                raise Killed
            return None if name == "fsync" else real(*args, **more)  # syncing costs the test seconds

        monkeypatch.setattr(os, name, change)

    for name in ("write", "fsync", "replace", "open", "unlink", "mkdir"):
        dying(name)
    return count


@pytest.mark.parametrize("store", ["raw", pytest.param("jpeg", marks=pytest.mark.slow)])
def test_killed_between_any_two_changes_to_the_disk(store, whole, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        count = kill_at(patch, -1)
        write(tmp_path / "count", store)
    calls = next(count)
    assert calls > 60
    for call in range(calls):
        folder = tmp_path / str(call)
        with monkeypatch.context() as patch:
            kill_at(patch, call)
            with pytest.raises(Killed):
                write(folder, store)
            kill_at(patch, -1)
            write(folder, store)
        assert files(folder) == whole[store], call


_KILLER = """
    import os, random, signal, sys, time
    from pathlib import Path

    sys.path[:0] = [sys.argv[1], str(Path(sys.argv[1]).parents[1])]
    import test_writer

    for seed in map(int, sys.argv[3:]):
        for store in ("raw", "jpeg"):
            random.seed(seed)
            folder, kills = Path(sys.argv[2]) / f"{store}-{seed}", 0
            began = time.perf_counter()
            if not (child := os.fork()):
                test_writer.write(folder.with_name(f"timed-{store}-{seed}"), store)
                os._exit(0)
            os.waitpid(child, 0)
            took = time.perf_counter() - began
            while True:
                child = os.fork()
                if not child:
                    test_writer.write(folder, store)
                    os._exit(0)
                time.sleep(random.uniform(0, took))
                os.kill(child, signal.SIGKILL)
                _, status = os.waitpid(child, 0)
                if os.WIFEXITED(status):
                    break
                kills += 1
            print(store, seed, kills, os.WEXITSTATUS(status))
"""


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [range(2), range(2, 30)])
def test_processes_that_are_killed_at_random(seeds, whole, tmp_path):
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            textwrap.dedent(_KILLER),
            os.path.dirname(__file__),
            tmp_path,
            *map(str, seeds),
        ],
        capture_output=True,
        text=True,
        check=True,
        timeout=240,
    )
    lines = [line.split() for line in done.stdout.splitlines()]
    assert len(lines) == 2 * len(seeds) and all(status == "0" for *_, status in lines)
    assert sum(int(kills) for _, _, kills, _ in lines) > 0
    for store, seed, *_ in lines:
        assert files(tmp_path / f"{store}-{seed}") == whole[store]


@pytest.mark.parametrize("code", ["ENOSPC", "EDQUOT"])
def test_a_full_disk_says_what_to_free_and_goes_on(code, whole, tmp_path, monkeypatch):
    folder = tmp_path / "train"
    real, left = os.write, 1500

    def write_some(handle, data):
        nonlocal left
        if not left:
            raise OSError(getattr(errno, code), "No space left on device")
        taken = min(left, len(data))
        left -= taken
        return real(handle, data[:taken])

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", write_some)
        with refused(cw.errors.DataError, "pack-disk-full", folder=folder, kept=4, needed=100e6):
            write(folder, total=11)
    assert json.loads((folder / "progress.json").read_text())["identity"] == "1"
    write(folder)
    assert files(folder) == whole["raw"]


def test_a_limit_on_files_is_told_and_goes_on(whole, tmp_path):
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (400, before[1]))  # also of the journal
        with refused(cw.errors.DataError, "pack-write", reason=os.strerror(errno.EFBIG)):
            write(tmp_path / "train")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    write(tmp_path / "train")
    assert files(tmp_path / "train") == whole["raw"]


def test_other_settings_do_not_go_on_with_a_folder(tmp_path):
    write(tmp_path, stop=5)
    for identity in ("2", ""):
        with refused(cw.errors.DataError, "pack-other-settings", folder=tmp_path):
            writer(tmp_path, identity=identity)
    write(tmp_path)
    with refused(cw.errors.DataError, "pack-other-settings", folder=tmp_path):
        writer(tmp_path, identity="2")
    again = writer(tmp_path)
    assert again.complete and (again.written, again.consumed) == (11, N)
    before = files(tmp_path)
    again.finish({"fingerprint": "f", "examples": N})
    assert files(tmp_path) == before


def test_what_a_killed_program_left_is_not_gone_on_with(tmp_path, monkeypatch):
    def killed():
        yield {"x": np.arange(4, dtype=np.int32)}
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr("chipwise.base.locks.shutil.rmtree", lambda *a, **k: None)
        write_packed(tmp_path / "p", killed(), shard_bytes=8)
    made = PackedFolder(write_packed(tmp_path / "p", [{"x": np.arange(9, 12)}], shard_bytes=8), None)
    assert made.take(np.arange(len(made)))["x"].tolist() == [9, 10, 11]


def test_a_folder_of_something_else_is_left_alone(tmp_path):
    (tmp_path / "thesis-00001.npy").write_text("years of work")
    with refused(cw.errors.DataError, "pack-folder-not-empty", name="thesis-00001.npy"):
        writer(tmp_path)
    assert files(tmp_path) == {"thesis-00001.npy": b"years of work"}


@pytest.mark.parametrize("text", ["{", '{"identity": "1"}', '{"identity": "1", "moments": {}, "rows": 3}'])
def test_a_damaged_beginning_is_refused(text, tmp_path):
    write(tmp_path, stop=3)
    (tmp_path / "progress.json").write_text(text)
    with refused(cw.errors.DataError, "pack-progress-damaged", path=tmp_path / "progress.json"):
        writer(tmp_path)


def test_what_an_incomplete_shard_left_is_removed(tmp_path, whole):
    write(tmp_path, stop=7)
    (tmp_path / "image-00009.npy").write_bytes(b"?")
    write(tmp_path)
    assert files(tmp_path) == whole["raw"]


IMAGE = np.zeros((2, 2, 3), np.uint8)
GOOD = {"image": IMAGE, "label": 0}


@pytest.mark.parametrize(
    "records, code",
    [
        ([], "pack-nothing"),
        ([("é" * 5, {"image": IMAGE, "label": 0})], "pack-name-long"),
        ([("a", {"image": IMAGE, "label": 3})], "value-out-of-range"),
        ([("a", {"image": IMAGE, "label": "cat"})], "column-not-numbers"),
        ([("a", {"image": IMAGE})], "pack-columns"),
        (
            [("a", GOOD), ("b", {"image": IMAGE[:1], "label": 0})],
            "pack-column-changed",
        ),
        ([("a", GOOD), ("b", {"image": IMAGE})], "pack-columns"),
        ([("a", {"record": IMAGE, "label": 0})], "pack-column-name"),
        ([("a", {"../x": IMAGE, "label": 0})], "pack-column-name"),
    ],
)
def test_records_that_do_not_fit_are_refused(records, code, tmp_path):
    made = writer(tmp_path)
    with refused(cw.errors.DataError, code):
        for name, columns in records:
            made.add([name], {column: [value] for column, value in columns.items()})
        made.finish({})
    made.close()


def test_columns_of_another_length_and_nothing_but_skipped_entries_are_refused(tmp_path):
    made = writer(tmp_path)
    made.skip("a", "no image")
    with refused(cw.errors.DataError, "pack-nothing-left", count=1, name="a", reason="no image"):
        made.finish({})
    with refused(cw.errors.DataError, "pack-column-length", column="label", rows=2, expected=1):
        made.add(["a"], {"image": IMAGE[None], "label": [0, 1]})
    made.close()


def test_several_labels_are_counted(tmp_path):
    made = writer(tmp_path / "train", below={"label": 2})
    made.add(["x", "y"], {"label": np.array([[1, 0, 1], [0, 0, 1]], np.uint8)})
    made.finish({"fingerprint": "f", "examples": 2})
    source = PackedFolder(tmp_path)
    assert source.manifest["counts"] == [1, 0, 2] and source.classes == 3
    assert source.mean == () and "mean" not in source.manifest


@given(
    shape=st.tuples(st.integers(1, 70), st.integers(1, 70)),
    channels=st.integers(1, 4),
    cut=st.integers(0, 70),
)
@settings(max_examples=30, deadline=None)
def test_sums_are_exact(shape, channels, cut):
    pixels = (
        np.random.default_rng(cut).integers(200, 256, (shape[0], shape[1] * 40, channels)).astype(np.uint8)
    )
    made = Moments()
    for part in (pixels[:cut], pixels[cut:]):
        made.add(part, channels)
    wide = pixels.reshape(-1, channels).astype(np.int64)
    assert (made.count, made.sums, made.squares) == (len(wide), [*wide.sum(0)], [*(wide**2).sum(0)])
    np.testing.assert_allclose(made.std, wide.std(0), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("more", [0, 1])
def test_a_manifest_that_no_reader_takes_is_not_written(tmp_path, monkeypatch, more):
    write(tmp_path / "known")
    size = (tmp_path / "known" / "manifest.json").stat().st_size
    monkeypatch.setattr("chipwise.data.pack.writer.MOST_BYTES", size - more)
    if more:
        with refused(DataError, "pack-manifest-large", bytes=size, most=size - 1):
            write(tmp_path / "out")
        assert not (tmp_path / "out" / "manifest.json").exists()
    else:
        write(tmp_path / "out")
