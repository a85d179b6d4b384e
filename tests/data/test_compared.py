"""How far each kind of data is compared when a run goes on, and what is said of it."""

import itertools
import json
import os
import random
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

import chipwise as cw
from chipwise.data import compared as module
from chipwise.data.compared import changed_data, compared
from chipwise.data.synthetic import Synthetic
from refusals import refused


def changed(before, now):
    """The parts in which two sources differ."""
    before, now = ({"training": compared(source).text or None} for source in (before, now))
    return dict(changed_data(json.loads(json.dumps(before)), now)).get("training", [])


def said(source):
    """The fact of a run's first lines, if there is one."""
    return compared(source).told("training")


@pytest.fixture
def photos(tmp_path):
    """A folder of 12 pictures of 3 classes, whose files all have one size."""
    for name in "abc":
        (tmp_path / name).mkdir()
        for i in range(4):
            pixels = np.full((6, 6, 3), 16 * i + ord(name), np.uint8)
            Image.fromarray(pixels).save(tmp_path / name / f"{i}.bmp")
    return tmp_path


def swapped(folder):
    a, b = folder / "b" / "1.bmp", folder / "c" / "1.bmp"
    a.rename(folder / "kept")
    b.rename(a)
    (folder / "kept").rename(b)


def with_a_byte(folder):
    file = folder / "b" / "2.bmp"
    content = bytearray(file.read_bytes())
    content[-4] ^= 1
    file.write_bytes(content)


FOLDERS = {
    "labels swapped": (swapped, ["contents"]),
    "a class renamed": (lambda folder: (folder / "b").rename(folder / "bb"), ["classes", "files"]),
    "a file renamed": (lambda folder: (folder / "b" / "3.bmp").rename(folder / "b" / "33.bmp"), ["files"]),
    "contents of one size": (with_a_byte, ["contents"]),
    "another size": (lambda folder: (folder / "c" / "0.bmp").write_bytes(png()), ["sizes", "contents"]),
    "only touched": (lambda folder: os.utime(folder / "a" / "0.bmp", (0, 0)), []),
}


def png():
    import io

    stream = io.BytesIO()
    Image.new("RGB", (6, 6)).save(stream, "png")
    return stream.getvalue()


@pytest.mark.parametrize("what", FOLDERS)
def test_an_image_folder_by_names_classes_sizes_and_contents(photos, what):
    change, parts = FOLDERS[what]
    before = cw.data.ImageFolder(photos, size=4)
    kept = compared(before)
    assert kept.whole and kept.told("training") is None
    change(photos)
    now = {"training": compared(cw.data.ImageFolder(photos, size=4)).text}
    assert dict(changed_data({"training": kept.text}, now)).get("training", []) == parts


def test_of_a_large_folder_some_contents_by_counts_of_files_and_bytes(photos, monkeypatch):
    source = cw.data.ImageFolder(photos, size=4)
    monkeypatch.setattr(module, "_READ", 5)
    assert "contents/5:" in compared(source).text == compared(source).text
    monkeypatch.setattr(module, "_READ_BYTES", 400)  # two files
    told = said(source)
    assert told.code == "data-compared" and told["what"] == ["classes", "files", "sizes"]
    assert (told["read"], told["examples"]) == (2, 12) and "2 of 12" in str(told)
    swapped(photos)  # files that are not among these
    assert changed(source, cw.data.ImageFolder(photos, size=4)) == []


class Own:
    """A data set as for PyTorch: 6 examples, whose `[i]` draws."""

    def __init__(self, label=0, flip=False, n=6):
        self.label, self.flip, self.n = label, flip, n

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        x = np.full(3, i + random.random() * self.flip, np.float32)
        return {"x": x, "label": np.int32(self.label if i == 4 else i % 2)}


class Labelled(Own):
    @property
    def targets(self):
        return [self.label if i == 4 else i % 2 for i in range(self.n)]


class Stated(Own):
    def __init__(self, stated, **options):
        super().__init__(**options)
        self.stated = stated

    def digest(self):
        return self.stated


@pytest.mark.parametrize("flip", [False, True])
def test_a_small_source_of_ones_own_is_read(flip):
    assert changed(Own(flip=flip), Own(flip=flip)) == [] and said(Own()) is None
    assert changed(Own(flip=flip), Own(1, flip=flip)) == ["labels"]
    assert changed(Own(), Own(flip=True)) == ["examples"]


def test_a_large_one_by_the_labels_that_it_knows(monkeypatch):
    monkeypatch.setattr(module, "_READ", 2)
    assert changed(Labelled(), Labelled(1)) == ["labels"]
    assert said(Labelled()).code == "data-compared" and said(Labelled())["what"] == ["labels"]
    assert changed(Own(), Own(1)) == []  # example 4 is not among those that were read
    told = said(Own())
    assert (told.code, told["read"], told["examples"], told["source"]) == ("data-sampled", 2, 6, "Own")


def test_of_a_slow_one_as_many_as_a_second_allows(monkeypatch):
    now, seconds = itertools.count(), 0.0
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: next(now) * seconds))
    fast = compared(Own(n=600))
    seconds = 2.0
    slow = compared(Own(n=600))
    assert (fast.read, slow.read) == (600, 8) and slow.told("training").code == "data-sampled"

    def between(one, other):
        return dict(changed_data({"training": one.text}, {"training": other.text})).get("training", [])

    assert between(slow, fast) == between(fast, slow) == []
    assert between(slow, compared(Own(n=600, flip=True))) == ["examples"]


@pytest.mark.parametrize("a, b", [("v1", "v2"), (b"1", b"2")])
def test_one_that_states_its_digest(a, b):
    assert changed(Stated(a), Stated(b)) == ["digest"] and changed(Stated(a), Stated(a)) == []
    assert said(Stated(a, n=10**9)) is None  # and nothing of it is read
    with refused(cw.errors.DataError, "source-digest", source="Stated", kind="int"):
        compared(Stated(7))


class Unkeyed(Own):
    def __getitem__(self, i):
        return {"x": np.random.default_rng().normal(size=3)}


class Broken(Own):
    def __getitem__(self, i):
        raise OSError("no disk")


@pytest.mark.parametrize("kind", [Unkeyed, Broken])
def test_nothing_is_compared_of_what_cannot_be_read_twice(kind):
    told = said(kind())
    assert told.code == "data-uncompared" and kind.__name__ in str(told)
    assert changed(kind(), kind()) == []


def test_arrays_are_compared_whole_or_by_their_labels(monkeypatch):
    def arrays(last):
        return cw.Arrays(x=np.zeros((9, 2), np.float32), label=np.array([*range(7), last, 8], np.int32))

    assert changed(arrays(0), arrays(1)) == ["examples"]
    monkeypatch.setattr(module, "_WHOLE_BYTES", 10)
    monkeypatch.setattr(module, "_READ", 3)
    assert changed(arrays(0), arrays(1)) == ["labels"]


def test_wrappers_pass_it_through():
    for wrap in (
        cw.data.Cached,
        lambda source: cw.data.Weighted(source, np.arange(6)),
        lambda source: cw.data.Padded(source, 4, ["x"]),
    ):
        assert changed(wrap(Own()), wrap(Own(1))) == ["labels"] and changed(wrap(Own()), wrap(Own())) == []
    assert changed(cw.data.Cached(Stated("a")), cw.data.Cached(Stated("b"))) == ["digest"]
    one, other = (cw.data.Weighted(Own(), [1, 1, 1, 1, 1, last]) for last in (1, 2))
    assert changed(one, other) == ["weights"]


def test_lists_and_random_examples():
    rows = [{"token": [1] * (i % 9 + 1), "label": i} for i in range(600)]
    other = [*rows[:333], {"token": [1], "label": -1}, *rows[334:]]
    assert changed(cw.data.Padded(rows, 8), cw.data.Padded(other, 8)) == ["labels"]
    assert changed(rows[::9], [*rows[:-9:9], {"token": [2], "label": 594}]) == ["examples"]
    one, other = (Synthetic(10, even_spec(), seed=seed) for seed in (0, 1))
    assert changed(one, one) == [] and changed(one, other) == ["digest"]


def even_spec():
    return cw.Arrays(x=np.zeros((1, 2), np.float32)).spec


@pytest.mark.slow
def test_data_sets_of_hugging_face():
    datasets = pytest.importorskip("datasets")

    def made(label):
        columns = {"x": [[0.0, 1.0]] * 600, "label": [i if i != 333 else label for i in range(600)]}
        return datasets.Dataset.from_dict(columns).with_format("numpy")

    assert changed(made(0), made(0)) == [] and changed(made(0), made(1)) == ["labels"]


def test_other_records_are_compared_by_what_both_have(photos):
    source = cw.data.ImageFolder(photos, size=4)

    def against(before):
        return list(changed_data({"training": before}, {"training": compared(source).text}))

    for before in (None, "manifest:ab", "ab" * 32, "contents/7:ab"):
        assert against(before) == []
    assert list(changed_data({}, {"training": "examples:a"})) == []
    assert list(changed_data({"training": "examples:b"}, {"training": "examples:a"})) == [
        ("training", ["examples"])
    ]
    assert list(changed_data({"training": "pack:b"}, {"training": "pack:a records/raw:c"})) == [
        ("training", ["pack"])
    ]
