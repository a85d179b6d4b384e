"""How data was read when it was packed is kept in the pack, and said in the first lines of a run."""

import dataclasses
import json

import numpy as np
import pytest

import chipwise as cw
from chipwise.base.facts import fact
from chipwise.data import PackedFolder, Renamed, write_packed
from chipwise.data.class_names import names_of
from chipwise.data.manifest import MANIFEST, render
from chipwise.data.pack.packing import Packing
from chipwise.data.readings import classes_of, readings
from chipwise.run.folder.run_folder import recorded
from chipwise.run.training_loop import _first_lines
from named_classes import ONE, THINGS, columns, recipe, source
from row_files import IMAGES, parquet


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("CHIPWISE_CACHE", str(tmp_path / "cache"))


def folders(root):
    for split in ("train", "val", "test"):
        for name in "ab":
            (root / split / name).mkdir(parents=True)
            (root / split / name / "0.jpg").write_bytes(IMAGES[0])
    return root, {"eval_split": "val"}, ["split-read", "splits-left", "classes-read"]


def table(root):
    root.mkdir()
    for i in range(3):
        (root / f"{i}.jpg").write_bytes(IMAGES[i])
    rows = [f"{i}.jpg,{'ab'[i % 2]},{i},note" for i in range(3)]
    (root / "t.csv").write_text("\n".join(["file,kind,age,note", *rows]))
    return root / "t.csv", {"columns": {"image": "file", "label": "kind"}}, ["table-read", "columns-left"]


def rows(root):
    root.mkdir()
    path = parquet(root / "rows.parquet", IMAGES[:3], ["b", "a", "b"], note=["x", "y", "z"])
    return path, {}, ["columns-read", "columns-left", "classes-read"]


def numbers(root):
    root.mkdir()
    path = parquet(root / "rows.parquet", IMAGES[:3], [0.5, 1.5, 2.5])
    return path, {}, ["columns-read", "labels-read"]


def classes_of_a_library(root):
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_dict({"x": [0.0, 1.0], "label": [1, 0]})
    data = data.cast_column("label", datasets.ClassLabel(names=["cat", "dog"]))
    return data, {}, ["columns-read", "classes-read"]


def objects(root):
    return source(THINGS), {}, ["classes-read"]


def one_side_named(root):
    given = {"train": source(THINGS[:3]), "eval": source(())}
    return given, {}, ["labels-by-number", "classes-read"]


def other_side_named(root):
    given = {"train": source(()), "eval": source(THINGS[:3])}
    return given, {}, ["labels-by-number", "classes-read"]


def both_named(root):
    given = {"train": source(()), "eval": source(())}
    return given, {"names": THINGS[:3]}, ["classes-read"]


@pytest.mark.parametrize(
    "make",
    [
        folders,
        table,
        rows,
        numbers,
        classes_of_a_library,
        objects,
        one_side_named,
        other_side_named,
        both_named,
    ],
)
def test_what_was_read_is_kept_and_said(make, tmp_path):
    given, options, codes = make(tmp_path / "data")
    job = Packing(given, tmp_path / "out", **options)
    job.run()
    sides = {split: PackedFolder(tmp_path / "out", split) for split in job.listing.splits}
    for side in sides.values():
        kept = side.manifest["read"]
        assert "read" not in side.manifest["settings"]  # or another wording were another pack
        assert [one["code"] for one in kept] == codes
        assert side.readings == tuple(str(one) for one in job.listing.told)
        assert str(tmp_path) not in json.dumps(kept)  # or the same source elsewhere gave other bytes
    train = cw.data.Cached(sides["train"])  # also below what stands around it
    task = cw.Task(init=lambda key: ({}, {}), loss=lambda *given: None, train=train, eval=sides.get("eval"))
    mine = cw.Recipe(task=task, batch=2, duration="1st", optimizer=cw.sgd(lr=0.1))
    said = [str(one) for one in _first_lines(mine.task) if one is not None]
    for text in sides["train"].readings:
        assert sum(text in line for line in said) == 1
    names = sides["train"].names
    known = [str(fact("classes-known", count=len(names), names=names))] if names else []
    assert said[: len(known)] == known
    stored = recorded(mine)["readings"]
    assert [one["text"] for one in stored] == [str(one) for one in readings(mine.task)]


@pytest.mark.parametrize("made", [source(THINGS), Renamed(source(()), THINGS[:3]), source(())])
def test_the_classes_of_a_run_are_said(made, capfd):
    mine = recipe(made)
    cw.fit(mine, progress="lines", on=ONE)
    said = "".join(capfd.readouterr())
    (known,) = classes_of(mine.task) or [None]
    assert (known is None) == (not names_of(made))
    assert known is None or 0 < said.index(f"classes: {len(known['names'])} (ant, bee, cat") < said.index(
        "step 1/1"
    )


def test_a_run_of_a_pack_says_and_stores_how_it_was_read(tmp_path, capfd):
    given = {"train": source(THINGS), "validation": source(THINGS[:2]), "test": source(())}
    cw.pack(given, tmp_path / "pack", eval_split="validation")
    mine = recipe(*(PackedFolder(tmp_path / "pack", split) for split in ("train", "eval")))
    cw.fit(mine, tmp_path / "run", progress="lines", on=ONE)
    said = "".join(capfd.readouterr())
    for text in ("eval is the split validation", "left out: the splits test", "classes: 5"):
        assert 0 < said.index(text) < said.index("step 1/1")
    stored = json.loads((tmp_path / "run" / "recipe.json").read_text())["readings"]
    assert [one["text"] for one in stored[:2]] == [
        "packed: eval is the split validation",
        "packed: left out: the splits test",
    ]
    assert cw.result(tmp_path / "run", mine).steps == 1


def test_a_pack_that_was_begun_with_another_wording_is_finished(tmp_path):
    given = {"train": source(THINGS), "eval": source(THINGS)}

    def stop(done):
        if done.split == "eval":
            raise KeyboardInterrupt

    whole, begun, finished = (Packing(given, tmp_path / name) for name in ("whole", "out", "out"))
    whole.run()
    begun.listing = dataclasses.replace(begun.listing, told=())
    with pytest.raises(KeyboardInterrupt):
        begun.run(stop)
    finished.run()
    for split, said in (("train", ()), ("eval", PackedFolder(tmp_path / "whole", "eval").readings)):
        made, known = (PackedFolder(tmp_path / name, split) for name in ("out", "whole"))
        assert made.readings == said and made.manifest["identity"] == known.manifest["identity"]
        assert made.manifest["shards"] == known.manifest["shards"]


def test_a_pack_with_what_was_read_among_its_settings(tmp_path):
    Packing(source(THINGS), tmp_path / "a").run()
    made = PackedFolder(tmp_path / "a")
    older = dict(made.manifest)
    older["settings"] = {**older["settings"], "read": older.pop("read")}
    (tmp_path / "a" / "train" / MANIFEST).write_text(render(older))
    again = PackedFolder(tmp_path / "a")
    assert again.readings == made.readings != () and "read" not in again.manifest


def test_a_pack_of_before_says_nothing(tmp_path):
    write_packed(tmp_path / "a", [columns(THINGS)], classes=5, names=THINGS)
    older = dict(PackedFolder(tmp_path / "a").manifest)
    assert older.pop("read") == []
    (tmp_path / "a" / "train" / MANIFEST).write_text(render(older))
    made = PackedFolder(tmp_path / "a")
    assert made.readings == () and "read" not in made.manifest
    assert readings(recipe(made).task) == []
    assert np.shape(made[0]["x"]) == (5,)
