"""The bundled table of published figures: every row is usable, and says where it comes from."""

import re

import pytest

from chipwise.chips.targets import parse
from chipwise.explain.compare.comparison import document
from chipwise.explain.published import rows_for, table
from chipwise.explain.row_sources import read
from chipwise.recipes import BUILT_IN
from chipwise.study.stats import NO_DIFFERENCE
from explain import comparisons


def test_every_row_has_a_speed_and_a_source_with_its_date():
    assert len(table()) > 40
    for row in table():
        assert row.examples_per_second > 0
        assert row.source and re.search(r"20\d\d|commit [0-9a-f]{7}", row.date), row
        assert row.recipe in BUILT_IN and row.batch and row.replicas and row.framework and row.precision
        assert all(0.5 < a < 1 for a in row.accuracy)


def test_labels_are_unique_and_targets_are_names_that_one_types():
    for recipe in {row.recipe for row in table()}:
        labels = [row.label for row in rows_for(recipe)]
        assert len(set(labels)) == len(labels)
    for row in table():
        assert not row.target or parse(row.target).name == row.target


def test_steps_per_second_of_the_notebooks():
    """F4 and F5 of the old documents: 18 times on CIFAR-10 at one batch, 4.1 times on MNIST."""
    t4, tpu = rows_for("mnist", "t4")[0], rows_for("mnist", "v2-8")[0]
    assert (t4.examples_per_second, tpu.examples_per_second) == (157 * 256, 651 * 256)
    tpu, t4, *_ = (row for row in rows_for("cifar10-davidnet") if row.batch == 512)
    assert tpu.examples_per_second / t4.examples_per_second == pytest.approx(18, abs=0.1)


def test_ranges_that_sources_state(tmp_path):
    """157 steps/s of 84 to 167, 651 of 651 to 741: a ratio to such a figure has its interval too."""
    t4, tpu = rows_for("mnist", "t4")[0], rows_for("mnist", "v2-8")[0]
    assert (t4.low, t4.high) == (84 * 256, 167 * 256) and (tpu.low, tpu.high) == (651 * 256, 741 * 256)
    assert all(row.low <= row.examples_per_second <= row.high for row in table() if row.low is not None)
    made = comparisons.record(tmp_path / "cpu.json", 30e3, 0.01)
    found = document(read([str(made), "published:t4"]))
    assert found["rows"][1]["ratio"]["verdict"] == NO_DIFFERENCE
    made = comparisons.record(tmp_path / "gpu.json", 4000, 0.01, name="cifar10-davidnet", batch=512)
    found = document(read([str(made), "published:2019-05-23"]))
    assert [f["label"] for f in found["sentences"]["headline"] if f["code"] == "interval-of-one"] == ["gpu"]


def test_words_narrow_the_rows():
    assert rows_for("imagenet-resnet50", "V100 F32")
    assert all(
        "v100" in row.target and row.precision == "f32" for row in rows_for("imagenet-resnet50", "v100 f32")
    )
    assert rows_for("mnist", "abacus") == () and rows_for("digits") == ()


def test_similar_models_say_so(tmp_path):
    made = comparisons.record(tmp_path / "a.json", name="gpt2-124m", batch=512, parameters=None)
    found = document(read([str(made), "published:llm-foundry"]))
    assert len(found["rows"]) == 3
    similar = [f["how"] for f in found["sentences"]["speed"] if f["code"] == "row-similar"]
    assert similar and any("MPT-125M" in how for how in similar)
