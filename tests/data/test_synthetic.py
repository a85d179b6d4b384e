"""Made-up examples, and data that was never given."""

import tracemalloc

import jax
import numpy as np
import pytest

import chipwise as cw
from chipwise.data.sources import materialize, spec_of, take
from chipwise.data.synthetic import Absent, Synthetic, like
from refusals import refused

SPEC = {
    "image": jax.ShapeDtypeStruct((48, 48, 3), np.uint8),
    "label": jax.ShapeDtypeStruct((), np.int32),
    "token": jax.ShapeDtypeStruct((5,), np.uint16),
    "x": jax.ShapeDtypeStruct((2,), np.float32),
    "yes": jax.ShapeDtypeStruct((3,), np.bool_),
}
BELOW = {"label": 7, "token": 300}


def test_an_example_is_a_function_of_seed_and_index():
    first, again = Synthetic(10**9, SPEC, BELOW), Synthetic(10**9, SPEC, BELOW)
    indices = np.array([5, 999_999_999, 0, 5])
    batch = first.take(indices)
    for name, column in again.take(indices[::-1]).items():
        np.testing.assert_array_equal(column[::-1], batch[name])
        np.testing.assert_array_equal(first[5][name], batch[name][0])
        assert column.shape == (4, *SPEC[name].shape) and column.dtype == SPEC[name].dtype
    for name in ("image", "token", "x"):
        assert (batch[name][0] != batch[name][1]).any()
        assert (Synthetic(9, SPEC, BELOW, seed=1)[5][name] != batch[name][0]).any()


def test_the_content_never_changes():
    """Two machines, and next year's, see the same examples."""
    example = Synthetic(3, SPEC, BELOW)[1]
    assert example["label"] == 0
    assert example["token"].tolist() == [93, 164, 27, 170, 32]
    assert example["image"].reshape(-1)[:4].tolist() == [99, 6, 117, 218]


def test_numbers_lie_where_they_were_declared():
    columns = materialize(Synthetic(2000, {k: v for k, v in SPEC.items() if k != "image"}, BELOW))
    assert set(columns["label"]) == set(range(7))
    assert columns["token"].max() == 299 and columns["token"].min() == 0
    assert 0 <= columns["x"].min() < 0.01 and 0.99 < columns["x"].max() < 1
    assert columns["yes"].mean() == pytest.approx(0.5, abs=0.05)


def test_it_is_a_source_like_any_other():
    source = Synthetic(3, SPEC, BELOW)
    assert len(source) == 3 and spec_of(source) == SPEC and source.classes == 7
    assert take(source, np.arange(3))["image"].shape == (3, 48, 48, 3)
    with pytest.raises(IndexError):
        source[3]
    with refused(cw.errors.DataError, "length-not-positive", length=0):
        Synthetic(0, SPEC)


def test_like_takes_length_shapes_and_ranges_without_reading():
    def load():
        raise AssertionError("read")

    lazy = cw.data.Lazy(60_000, {"label": SPEC["label"]}, load, classes=10)
    assert len(like(lazy)) == 60_000 and like(lazy).classes == 10
    assert like(cw.Arrays(x=np.zeros((4, 2), np.float32))).below == {}
    assert like(Absent(5, SPEC, "Text", BELOW)).below == BELOW


def test_labels_of_unknown_range_are_not_made_up():
    source = cw.Arrays(label=np.arange(4))
    with refused(cw.errors.DataError, "classes-unknown"):
        like(source)
    assert like(source, classes=4).below == {"label": 4}


def test_absent_data_say_what_to_give():
    absent = Absent(5, SPEC, "ImageNet")
    assert len(absent) == 5 and spec_of(absent) == SPEC
    with refused(cw.errors.DataError, "data-not-given", data="ImageNet"):
        take(absent, np.arange(2))


@pytest.mark.parametrize(
    "name",
    [
        "digits",
        "cifar10-davidnet",
        *(pytest.param(n, marks=pytest.mark.slow) for n in ("imagenet-resnet50", "vit-s16", "gpt2-124m")),
    ],
)
def test_a_recipe_on_made_up_data_costs_nothing_to_make(name):
    cw.load(name)  # imports
    tracemalloc.start()
    recipe = cw.load(name, synthetic=True)
    recipe.rows(), recipe.describe(), recipe.warnings()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 20e6
    real = cw.load(name)
    assert recipe.name == f"{name}-synthetic"
    assert recipe.clock == real.clock
    for made, known in zip(
        (recipe.task.train, recipe.task.eval), (real.task.train, real.task.eval), strict=True
    ):
        assert isinstance(made, Synthetic)
        assert len(made) == len(known) and spec_of(made) == spec_of(known)
    example = recipe.task.train[len(recipe.task.train) - 1]
    assert {k: v.shape for k, v in example.items()} == {
        k: v.shape for k, v in spec_of(real.task.train).items()
    }
    assert (recipe.task.train[0][next(iter(example))] != recipe.task.eval[0][next(iter(example))]).any()


def test_made_up_data_and_a_folder_exclude_each_other():
    with refused(cw.errors.RecipeError, "synthetic-and-data", data="somewhere"):
        cw.load("mnist", data="somewhere", synthetic=True)
