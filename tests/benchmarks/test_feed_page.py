"""The feed benchmark's data, contenders and page, without its competitors and without timing anything."""

import dataclasses
import itertools
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.feed import __main__ as benchmark
from benchmarks.feed import page
from benchmarks.feed.contenders import CASES, LIMIT_BYTES, Contender, chipwise, permutations, plain_copy
from benchmarks.feed.data import prepare, sets

from chipwise.machine.fingerprint import this_machine
from chipwise.machine.record import Record, Series


def answers(rate, grown=1 << 20):
    return [{"rate": rate * factor, "memory": 3 << 20, "grown": grown} for factor in (0.9, 1.0, 1.2)]


def a_record(**grown):
    options = benchmark.argparse.Namespace(rounds=3, seconds=0.1, photographs=16)
    results = {
        case.name: {c.name: answers(1000.0 + number) for number, c in enumerate(case.contenders)}
        for case in CASES
    }
    results["raw32"]["chipwise, 2 threads"] = answers(1e6)
    results["raw32"]["bagz's reader, 2 threads"] = "not installed: bagz"
    return benchmark.record(results, options)


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    folder = tmp_path_factory.mktemp("feed")
    rng = np.random.default_rng(0)
    for split, name, number in itertools.product(("train", "test"), ("cat", "dog"), range(5)):
        (folder / "cifar" / split / name).mkdir(parents=True, exist_ok=True)
        pixels = rng.integers(0, 256, (32, 32, 3), np.uint8)
        Image.fromarray(pixels).save(folder / "cifar" / split / name / f"{number}.jpg")
    prepare(folder / "work", folder / "cifar", 6, records=False)
    return folder / "work"


def test_chipwise_reads_the_same_images_from_every_format(work):
    images = dataclasses.replace(sets(work, 6)["small"], batch=20)
    assert len(images.files()) == 20 and images.classes == ["cat", "dog"]
    loose, raw = (next(chipwise(images, store)) for store in ("loose", "raw"))
    assert np.array_equal(loose[0], raw[0]) and np.array_equal(loose[1], raw[1])
    large = dataclasses.replace(sets(work, 6)["large"], batch=6)
    jpeg, raw = (next(chipwise(large, store)) for store in ("jpeg", "raw"))
    assert np.array_equal(jpeg[0], raw[0]) and sorted(raw[1].tolist()) == [0, 0, 0, 1, 1, 1]
    assert plain_copy(images, "raw", 2)(0.001) > 0


def test_everyone_else_reads_in_permutations():
    rows = np.concatenate(list(itertools.islice(permutations(7, 4), 7)))
    for epoch in range(4):
        assert sorted(rows[7 * epoch : 7 * epoch + 7].tolist()) == list(range(7))
    assert not np.array_equal(rows[:7], rows[7:14])


def test_what_is_not_installed_is_named():
    assert Contender("x", chipwise, {}, ("numpy", "no_such_module")).missing() == ["no_such_module"]


def test_the_page_has_every_contender_the_aims_and_the_absent(tmp_path):
    made = Record.from_json(a_record().to_json())
    page.write(made, tmp_path / "feed.md", tmp_path / "feed.svg")
    text = (tmp_path / "feed.md").read_text()
    for case in CASES:
        assert case.title in text and all(c.name in text for c in case.contenders)
    assert "| bagz's reader, 2 threads | - |" in text and "not installed: bagz" in text and "FFCV" in text
    assert "| **chipwise, 2 threads** | 1,000,000 | 950,000 to 1,100,000 | 3.08 |" in text
    aims = page.targets(made)
    assert any("against PyTorch on loose files" in line and "| met |" in line for line in aims)
    assert any("packed JPEGs" in line and "**missed**" in line for line in aims)
    assert (tmp_path / "feed.svg").read_text().startswith("<?xml")


def test_chipwise_beyond_its_memory_fails_the_run():
    made = a_record()
    benchmark.check_memory(made)
    most = LIMIT_BYTES + benchmark.SLACK_BYTES
    for grown in (most, most + 1):
        name = "raw224/chipwise, 2 threads"
        measured = {**made.measured, "grown": {**made.measured["grown"], name: grown}}
        changed = dataclasses.replace(made, measured=measured)
        if grown > most:
            with pytest.raises(AssertionError, match="raw224/chipwise, 2 threads took"):
                benchmark.check_memory(changed)
        else:
            benchmark.check_memory(changed)
    assert made.machine.hash == this_machine().hash and isinstance(
        made.figures["loose/chipwise, 1 thread"], Series
    )
