"""Labels of two sources are joined by names of classes, where data is evaluated, predicted or packed."""

import dataclasses
import pickle

import numpy as np
import pytest

import chipwise as cw
from chipwise.base.errors import DataError, RecipeError
from chipwise.data import ImageFolder, Renamed, materialize, take, write_packed
from chipwise.data.class_names import joined, names_of, told
from chipwise.data.compared import compared
from chipwise.data.synthetic import like
from chipwise.deploy.model import Trained
from chipwise.interop.adapter import Data
from named_classes import ONE, THINGS, columns, every_pair, lacking, parts, recipe, source
from pictures import smooth
from refusals import refused


def model(known):
    made = recipe(source(known))
    return Trained(made, *made.task.init(None))


@every_pair
def test_the_evaluation_of_a_task(known, own, missing):
    known, own, missing = parts(known, own, missing)
    if missing:
        with lacking(missing):
            recipe(source(known), source(own))
        return
    made = recipe(source(known), source(own))
    given = {"progress": "none", "on": ONE}
    assert cw.fit(made, **given).metrics["eval/accuracy"] == 1


@every_pair
def test_any_data_of_a_trained_model(known, own, missing):
    known, own, missing = parts(known, own, missing)
    for use in (
        lambda data: cw.evaluate(model(known), data, on=ONE)["accuracy"],
        lambda data: cw.predict(model(known), data, on=ONE).accuracy,
    ):
        if missing:
            with lacking(missing):
                use(source(own))
        else:
            assert use(source(own)) == 1


@every_pair
def test_splits_that_are_packed(known, own, missing, tmp_path):
    known, own, missing = parts(known, own, missing)
    splits = {"train": source(known), "eval": source(own)}
    if missing:
        with lacking(missing):
            cw.pack(splits, tmp_path / "out")
        return
    packed = cw.PackedFolder(cw.pack(splits, tmp_path / "out"), "eval")
    assert packed.names == (known or own)
    for i, thing in enumerate(columns(own or THINGS[:3])["x"].argmax(1)):
        assert packed.names[packed[i]["label"]] == THINGS[thing]
    assert sum(packed.manifest["counts"]) == 12


def test_a_source_with_the_same_names_is_the_same_object():
    train, evaluation = source(THINGS), source(THINGS)
    assert recipe(train, evaluation).task.eval is evaluation
    other = source(THINGS[1:])
    task = recipe(train, other).task
    assert task.eval.own == THINGS[1:] and task.joined(task.eval).source is other
    assert names_of(task.eval) == THINGS


@pytest.mark.parametrize(
    ("known", "given", "wrong"),
    [
        ("cat dog", "dog cat", ["cat", "dog"]),
        ("cat dog eel", "cat eel fox", ["eel"]),
        ("caf\u00e9 dog", "dog cafe\u0301", ["caf\u00e9", "dog"]),
        ("cat dog", "cat dog", []),
        ("caf\u00e9 dog", "cafe\u0301 dog", []),
        ("n1 n2", "tench goldfish", []),  # as people read them
        ("crane crane", "crane bird", []),
        ("", "dog cat", []),
    ],
)
def test_names_of_a_task_that_contradict_those_of_its_data(known, given, wrong):
    train, given = cw.Arrays(**columns(THINGS[:2])), tuple(given.split())
    known = tuple(known.split())
    task = recipe(Renamed(train, known)).task
    if not wrong:
        assert dataclasses.replace(task, classes=None, class_names=given).class_names == given
        return
    facts = {"classes": wrong, "class_names": given, "training": known}
    with refused(RecipeError, "class-names-contradict", **facts):
        dataclasses.replace(task, classes=None, class_names=given)


CAT_DOG = ("cat", "dog")
BY_NUMBER = {"code": "labels-by-number", "numbers": ["cat=0", "dog=1"]}
BY_NAME = {"code": "labels-joined-all", "own": ["dog", "cat"]}


@pytest.mark.parametrize(
    ("known", "own", "given", "facts"),
    [
        (CAT_DOG, (), (), {**BY_NUMBER, "side": "eval"}),
        ((), CAT_DOG, (), {**BY_NUMBER, "side": "train"}),
        (CAT_DOG, CAT_DOG[::-1], (), BY_NAME),
        ((), CAT_DOG[::-1], CAT_DOG, BY_NAME),
        (CAT_DOG, CAT_DOG, (), None),
        ((), CAT_DOG, CAT_DOG, None),
        ((), (), CAT_DOG, None),
        ((), (), (), None),
    ],
)
def test_how_the_classes_of_an_evaluation_count_is_told(known, own, given, facts):
    arrays = cw.Arrays(**columns(THINGS[:2]))
    sides = {"train": Renamed(arrays, known), "eval": Renamed(arrays, own)}
    task = dataclasses.replace(recipe(arrays).task, classes=None, class_names=given, **sides)
    said = told(task)
    assert said is None if facts is None else facts.items() <= said.json().items()
    assert told(dataclasses.replace(task, eval=None)) is None


def test_a_run_says_at_its_start_that_its_evaluation_counts_by_number(capfd):
    made = recipe(source(THINGS), source(()))
    cw.fit(made, progress="lines", on=ONE)
    said = "".join(capfd.readouterr())
    assert 0 < said.index(str(told(made.task))) < said.index("step 1/1")


def test_names_that_are_declared_and_none_that_are_guessed(tmp_path):
    class Files:
        names = ("1.jpg", "2.jpg")

    torch_data = pytest.importorskip("torch.utils.data")
    packed = write_packed(tmp_path / "a", [columns(THINGS)], classes=5, names=THINGS)
    own = cw.PackedFolder(tmp_path / "a")
    assert packed.exists() and names_of(own) == THINGS
    assert names_of(Torchvision(["bee", "ant"])) == ("bee", "ant")
    for unknown in (Files(), cw.Arrays(**columns(THINGS), classes=5), [columns(THINGS)], None):
        assert names_of(unknown) == ()
    for around in (cw.data.Padded(own, 5), cw.data.Cached(own), torch_data.Subset(own, [0])):
        assert names_of(around) == THINGS
    assert names_of(Renamed(own, ())) == ()


class Torchvision:
    """A data set whose `classes` are names, as torchvision's are."""

    def __init__(self, names, last=0):
        self.classes = list(names)
        self.rows = columns(names)
        self.rows["label"][-1] += last

    def __len__(self):
        return 12

    def __getitem__(self, index):
        return {name: column[index] for name, column in self.rows.items()}


def test_data_whose_classes_are_a_list_of_names():
    train = Torchvision(THINGS)
    for around in (train, cw.data.Cached(train)):
        for evaluation in (train, Torchvision(("eel", "bee"))):
            assert cw.fit(recipe(around, evaluation), on=ONE).metrics["eval/accuracy"] == 1
    task = Data(train=train).task("flax", "Net", lambda key: ({}, {}), lambda *of: of)
    assert task.classes == 5
    assert like(train).below == {"label": 5}
    with refused(DataError, "label-out-of-range", example=11, label=2, last=1):
        materialize(Torchvision(("eel", "bee"), last=1))


def test_class_labels_of_hugging_face():
    datasets = pytest.importorskip("datasets")

    def rows(names):
        given = {name: column.tolist() for name, column in columns(names).items()}
        data = datasets.Dataset.from_dict(given).cast_column("label", datasets.ClassLabel(names=list(names)))
        return data.with_format("numpy")

    made = recipe(rows(THINGS), rows(("eel", "bee")))
    assert names_of(rows(THINGS)) == THINGS and made.task.eval[0]["label"] == 4
    known = Trained(made, *made.task.init(None))
    assert known.class_names == THINGS
    assert (
        cw.evaluate(known, on=ONE)["accuracy"] == cw.evaluate(known, rows(("dog",)), on=ONE)["accuracy"] == 1
    )
    assert cw.predict(known, rows(("cat", "ant")), on=ONE).accuracy == 1
    with lacking(["fox"]):
        joined(THINGS, rows(("ant",)).cast_column("label", datasets.ClassLabel(names=["fox"])))


@pytest.mark.parametrize("named", [(), ("ant", "bee", "cat", "dog")])
def test_data_sets_of_hugging_face_are_packed_by_name(tmp_path, named):
    datasets = pytest.importorskip("datasets")

    def rows(names, labels):
        data = datasets.Dataset.from_dict({"x": [float(i) for i in labels], "label": labels})
        return data.cast_column("label", datasets.ClassLabel(names=names))

    known = rows(["bee", "ant", "cat"], [0, 1, 2])
    cw.pack({"train": known, "test": rows(["ant", "cat"], [1, 0])}, tmp_path / "out", names=named)
    train, evaluation = (cw.PackedFolder(tmp_path / "out", split) for split in ("train", "eval"))
    assert train.names == evaluation.names == (named or ("bee", "ant", "cat"))
    assert [evaluation.names[evaluation[i]["label"]] for i in range(2)] == ["cat", "ant"]
    assert [train.names[train[i]["label"]] for i in range(3)] == ["bee", "ant", "cat"]
    with lacking(["fox"]):
        cw.pack({"train": known, "test": rows(["ant", "fox"], [1, 0])}, tmp_path / "more", names=named)


NAMED = ("pos", "neg", "odd")


def texts(labels=("neg", "pos", "neg")):
    datasets = pytest.importorskip("datasets")
    return datasets.Dataset.from_dict({"x": [float(len(label)) for label in labels], "label": list(labels)})


def test_labels_of_text_are_joined_to_the_names_that_are_given(tmp_path):
    """Sorted by themselves, 0 were called by the first of the names, which is another's."""
    cw.pack({"train": texts(), "test": texts(("pos",))}, tmp_path / "out", names=NAMED)
    train, evaluation = (cw.PackedFolder(tmp_path / "out", split) for split in ("train", "eval"))
    assert train.names == evaluation.names == NAMED
    assert [train.names[train[i]["label"]] for i in range(3)] == ["neg", "pos", "neg"]
    assert evaluation.names[evaluation[0]["label"]] == "pos"
    with lacking(["neg"]):
        cw.pack(texts(), tmp_path / "more", names=("pos", "odd"))


@pytest.mark.parametrize("labels", [("neg", "pos", "neg"), (0, 1, 0)])
def test_files_of_rows_number_their_classes_whatever_names_are_given(tmp_path, monkeypatch, labels):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    pytest.importorskip("datasets")
    monkeypatch.setenv("CHIPWISE_CACHE", str(tmp_path / "cache"))
    table = pa.table({"x": [1.0, 2.0, 3.0], "label": list(labels)})
    (tmp_path / "rows").mkdir()
    pq.write_table(table, tmp_path / "rows" / "train-00000-of-00001.parquet")
    cw.pack(tmp_path / "rows", tmp_path / "out", names=NAMED[:2])
    train = cw.PackedFolder(tmp_path / "out", "train")
    assert train.names == tuple(map(str, sorted(set(labels))))
    assert [train.names[train[i]["label"]] for i in range(3)] == [str(label) for label in labels]


def test_splits_with_all_their_classes_named(tmp_path):
    """`names` has the classes of both."""
    splits = {"train": source(("dog", "bee")), "eval": source(("cat",))}
    cw.pack(splits, tmp_path / "all", names=("bee", "cat", "dog"))
    train, evaluation = (cw.PackedFolder(tmp_path / "all", split) for split in ("train", "eval"))
    assert train.manifest["counts"] == [6, 0, 6] and evaluation.manifest["counts"] == [0, 12, 0]


def folder(path, names):
    from PIL import Image

    for number, name in enumerate(names):
        (path / name).mkdir(parents=True)
        Image.fromarray(smooth(number, (8, 8))).save(path / name / "0.png")
    return ImageFolder(path)


def test_folders_that_are_read_in_any_way(tmp_path):
    """Whole, by rows, one by one and in another process: images stay, labels are those of training."""
    own = folder(tmp_path / "own", ("bee", "cat"))
    made = joined(("ant", "bee", "cat"), own)
    whole = materialize(made)
    assert whole["label"].tolist() == [1, 2] and whole["label"].dtype == np.int32
    np.testing.assert_array_equal(whole["image"], materialize(own)["image"])
    again = pickle.loads(pickle.dumps(made))
    for reader in (made, again):
        assert take(reader, [1, 0])["label"].tolist() == [2, 1] and reader[1]["label"] == 2
    assert own[1]["label"] == 1 and made.spec == own.spec and len(made) == 2


def test_a_run_names_classes_that_are_alike(capfd):
    for names, both in ((THINGS, False), (("Ant", "ant", *THINGS[2:]), True)):
        cw.fit(recipe(Renamed(source(THINGS), names)), progress="lines", on=ONE)
        said = "".join(capfd.readouterr())
        assert ("['Ant', 'ant']" in said) == both


def test_digests_state_the_names(tmp_path):
    own = folder(tmp_path / "own", ("bee", "cat"))
    tables = [("ant", "bee", "cat"), ("bee", "cat", "dog"), ("cat", "bee")]
    texts = {compared(joined(names, own)).text for names in tables}
    assert len(texts) == 3 and all(compared(own).text in text for text in texts)


@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
def test_vectors_of_classes_are_permuted(tmp_path, dtype):
    """`(classes,)` of 0 and 1, as of several labels an example, for all classes of the training."""
    hot = np.asarray([[1, 0], [0, 1], [1, 1]], dtype)
    write_packed(tmp_path / "own", [{"x": np.zeros((3, 2), np.float32), "label": hot}], names=("cat", "ant"))
    made = joined(("ant", "bee", "cat"), cw.PackedFolder(tmp_path / "own"))
    assert made.spec["label"].shape == (3,) and made.spec["label"].dtype == dtype
    assert take(made, [0, 1, 2])["label"].tolist() == [[0, 0, 1], [1, 0, 0], [1, 0, 1]]
    assert made[2]["label"].tolist() == [1, 0, 1]


def test_labels_of_other_kinds():
    """Masks, and a narrow type for many classes. What is no number of a class is refused."""
    many = tuple(f"c{i}" for i in range(300))

    def of(label, names=("c299", "c1")):
        return joined(many, Renamed(cw.Arrays(x=np.zeros(2), label=np.asarray(label)), names))

    assert take(of(np.asarray([0, 1], np.uint8)), [0, 1])["label"].tolist() == [299, 1]
    masks = of(np.asarray([[[0, 1, 1]], [[1, 0, 0]]], np.uint8))
    assert masks.spec["label"].shape == (1, 3) and masks.spec["label"].dtype == np.int32
    assert materialize(masks)["label"].tolist() == [[[299, 1, 1]], [[1, 299, 299]]]
    for wrong in (2, -1, 255):
        with refused(DataError, "label-out-of-range", label=wrong, last=1):
            take(of(np.asarray([0, wrong])), [0, 1])
    with refused(DataError, "labels-not-integers"):
        take(of(np.asarray([0.5, 1])), [0, 1])


def test_a_name_of_two_classes_is_refused():
    own = cw.Arrays(x=np.zeros(2), label=np.arange(2))
    with refused(DataError, "classes-unjoined", classes=["crane"]):
        joined(("crane", "bird", "crane"), Renamed(own, ("bird", "crane")))
    twice = ("crane", "crane")
    assert joined(twice, other := Renamed(own, twice)) is other
    assert joined(("bird", "crane"), Renamed(own, twice))[0]["label"] == 1


def test_a_source_without_fast_methods_keeps_its_own():
    """Pairs are read one by one."""

    class Rows:
        def __len__(self):
            return 3

        def __getitem__(self, index):
            return np.full(2, index, np.float32), index % 2

    rows = Rows()
    made = joined(("ant", "bee", "cat"), Renamed(rows, ("cat", "ant")))
    read = take(made, [0, 1, 2])
    assert read["label"].tolist() == [2, 0, 2]
    assert read["image"].tolist() == [[0, 0], [1, 1], [2, 2]]
    assert not hasattr(made, "fill") and not hasattr(made, "take")
