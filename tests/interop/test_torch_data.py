"""PyTorch's data sets as sources, and sources in PyTorch's DataLoader."""

import pickle

import numpy as np
import pytest
from PIL import Image

from chipwise.base.errors import DataError
from chipwise.data import Arrays, ImageFolder, spec_of, take
from chipwise.data.compared import changed_data, compared
from chipwise.recipe.source import as_columns
from refusals import refused

torch = pytest.importorskip("torch")
data = pytest.importorskip("torch.utils.data")

IMAGES = np.arange(7 * 4 * 5 * 3, dtype=np.uint8).reshape(7, 4, 5, 3)
LABELS = np.arange(7, dtype=np.int32) % 3


class Pictures(data.Dataset):
    """(PIL picture, int), as torchvision's data sets give them."""

    def __len__(self):
        return len(IMAGES)

    def __getitem__(self, index):
        return Image.fromarray(IMAGES[index]), int(LABELS[index])


# PyTorch's data sets as sources


def test_a_tensor_data_set_and_a_subset_of_it():
    tensors = data.TensorDataset(torch.from_numpy(IMAGES), torch.from_numpy(LABELS).long())
    spec = spec_of(tensors)
    assert (spec["image"].shape, spec["image"].dtype) == ((4, 5, 3), np.uint8)
    assert (spec["label"].shape, spec["label"].dtype) == ((), np.int32)
    columns = take(tensors, [6, 0, 3])
    np.testing.assert_array_equal(columns["image"], IMAGES[[6, 0, 3]])
    np.testing.assert_array_equal(columns["label"], LABELS[[6, 0, 3]])
    columns = take(data.Subset(tensors, [5, 1]), [1, 0])
    np.testing.assert_array_equal(columns["image"], IMAGES[[1, 5]])


class Known(data.Dataset):
    """600 examples, whose labels are known without reading them."""

    def __init__(self, label):
        self.targets = [0] * 333 + [label] + [0] * 266

    def __len__(self):
        return 600

    def __getitem__(self, index):
        return torch.zeros(2), self.targets[index]


TENSORS = lambda last: data.TensorDataset(torch.zeros(600, 2), torch.tensor([0] * 599 + [last]))  # noqa: E731


@pytest.mark.slow
@pytest.mark.parametrize(
    "made, what",
    [
        (TENSORS, "examples"),
        (Known, "labels"),
        (lambda label: data.Subset(Known(label), range(1, 600)), "labels"),
        (lambda label: data.ConcatDataset([Known(0), Known(label)]), "labels"),
    ],
)
def test_changed_labels_are_found_when_a_run_goes_on(made, what):
    one, same, other = ({"": compared(made(label)).text} for label in (0, 0, 1))
    assert list(changed_data(one, same)) == [] and what in dict(changed_data(one, other))[""]


def test_pictures_and_numbers():
    columns = take(Pictures(), np.arange(7))
    np.testing.assert_array_equal(columns["image"], IMAGES)
    np.testing.assert_array_equal(columns["label"], LABELS)
    assert columns["image"].dtype == np.uint8 and columns["label"].dtype == np.int32


def test_a_dict_of_everything():
    class Mixed(data.Dataset):
        def __len__(self):
            return 7

        def __getitem__(self, i):
            return {
                "image": Image.fromarray(IMAGES[i]),
                "tensor": torch.full((2,), i, dtype=torch.float64, requires_grad=True),
                "half": torch.full((2,), i, dtype=torch.bfloat16),
                "array": IMAGES[i, 0],
                "number": i / 2,
                "flag": i == 1,
            }

    columns = take(Mixed(), [1, 2])
    np.testing.assert_array_equal(columns["image"], IMAGES[1:3])
    np.testing.assert_array_equal(columns["array"], IMAGES[1:3, 0])
    for name, dtype, expected in [
        ("tensor", np.float32, [[1, 1], [2, 2]]),
        ("half", np.float32, [[1, 1], [2, 2]]),
        ("number", np.float32, [0.5, 1]),
        ("flag", np.bool_, [True, False]),
    ]:
        assert columns[name].dtype == dtype
        np.testing.assert_array_equal(columns[name], expected)


def test_a_pair_of_one_and_a_triple():
    np.testing.assert_array_equal(
        take(data.TensorDataset(torch.from_numpy(IMAGES)), [2])["image"], IMAGES[2:3]
    )
    three = data.TensorDataset(*[torch.from_numpy(LABELS)] * 3)
    with refused(DataError, "example-kind", example=0, kind="a tuple of 3"):
        take(three, [4])  # the first example says what all are


@pytest.mark.parametrize(
    ("mode", "shape"),
    [("L", (4, 5)), ("RGB", (4, 5, 3)), ("RGBA", (4, 5, 4)), ("CMYK", (4, 5, 4)), ("1", (4, 5))],
)
def test_the_modes_of_a_picture(mode, shape):
    picture = Image.fromarray(IMAGES[0]).convert(mode)
    array = as_columns((picture, 1), 0)["image"]
    assert array.shape == shape
    np.testing.assert_array_equal(array, np.asarray(picture))


def test_a_palette_becomes_its_colours():
    colours = Image.fromarray(IMAGES[0]).convert("P", palette=Image.Palette.ADAPTIVE)
    np.testing.assert_array_equal(as_columns((colours, 1), 0)["image"], np.asarray(colours.convert("RGB")))
    colours.info["transparency"] = 0
    assert as_columns((colours, 1), 0)["image"].shape == (4, 5, 4)


@pytest.mark.parametrize("example", [5, "text", None, {}, (), [1, 2, 3], IMAGES])
def test_what_is_no_example(example):
    with refused(DataError, "example-kind", example=3):
        as_columns(example, 3)


def test_a_picture_that_is_cut_short(tmp_path):
    Image.fromarray(np.zeros((64, 64, 3), np.uint8)).save(tmp_path / "a.png")
    (tmp_path / "b.png").write_bytes((tmp_path / "a.png").read_bytes()[:60])
    with (
        Image.open(tmp_path / "b.png") as picture,
        refused(DataError, "example-unreadable", example=3, column="image"),
    ):
        as_columns((picture, 1), 3)


class Hooked(Pictures):
    """Read a batch at a time, as PyTorch's own fetcher does."""

    def __init__(self, short=0):
        self.asked, self.short = [], short

    def __getitems__(self, indices):
        self.asked.append(list(indices))
        return [Pictures.__getitem__(self, i) for i in indices[self.short :]]


def test_the_batch_hook_is_used():
    source = Hooked()
    columns = take(source, [6, 0, 3])
    assert source.asked == [[6, 0, 3]]
    np.testing.assert_array_equal(columns["image"], IMAGES[[6, 0, 3]])
    np.testing.assert_array_equal(columns["label"], LABELS[[6, 0, 3]])
    with refused(DataError, "batch-hook-length", source="Hooked", examples=2, indices=3):
        take(Hooked(short=1), [6, 0, 3])


def test_a_hugging_face_data_set_on_arrow():
    arrow = pytest.importorskip("datasets")
    with arrow.Dataset.from_dict({"image": IMAGES.tolist(), "label": LABELS.tolist()}) as made:
        for source in (made, made.with_format("numpy")):
            columns = take(source, [5, 1])
            np.testing.assert_array_equal(columns["image"], IMAGES[[5, 1]])
            assert columns["label"].dtype == np.int32 and list(columns["label"]) == list(LABELS[[5, 1]])


# Sources in PyTorch's DataLoader


def jpegs(tmp_path):
    for label, name in enumerate(("cat", "dog")):
        (tmp_path / name).mkdir()
        for i in range(4):
            Image.fromarray(IMAGES[label + i]).save(tmp_path / name / f"{i}.png")
    return ImageFolder(tmp_path)


SOURCES = {"arrays": lambda path: Arrays(image=IMAGES, label=LABELS, classes=3), "folder": jpegs}


@pytest.fixture(params=SOURCES)
def source(request, tmp_path):
    return SOURCES[request.param](tmp_path)


def check(source, workers: int, context: str | None):
    loader = data.DataLoader(
        source,
        batch_size=3,
        num_workers=workers,
        multiprocessing_context=context,
        timeout=60 if workers else 0,
    )
    batches = list(loader)
    assert [len(batch["label"]) for batch in batches] == [3, 3, len(source) - 6]
    for name, expected in take(source, np.arange(len(source))).items():
        got = torch.cat([batch[name] for batch in batches]).numpy()
        assert got.dtype == expected.dtype
        np.testing.assert_array_equal(got, expected)


def test_a_source_in_a_data_loader(source):
    check(source, 0, None)


# JAX and Python 3.12 warn of processes copied from one with threads; it is what PyTorch does
@pytest.mark.filterwarnings("ignore:.*fork:RuntimeWarning", "ignore:.*fork:DeprecationWarning")
def test_a_source_in_a_data_loader_with_workers(source):
    check(source, 2, "fork")


@pytest.mark.slow  # each worker imports everything
@pytest.mark.parametrize("context", ["forkserver", "spawn"])
def test_a_source_in_a_data_loader_with_workers_that_begin_anew(source, context):
    check(source, 2, context)


def test_a_source_can_be_sent_to_a_worker(source):
    take(source, [0])  # with whatever it has opened by now
    again = pickle.loads(pickle.dumps(source))
    for name, column in take(source, np.arange(len(source))).items():
        np.testing.assert_array_equal(take(again, np.arange(len(source)))[name], column)
