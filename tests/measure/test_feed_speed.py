"""Measuring the host alone: what is told, and what would help. No speed is asserted."""

import json
import threading

import numpy as np
import pytest
from PIL import Image

import chipwise as cw
from chipwise.cli import main
from chipwise.data import order, write_packed
from chipwise.data.pack import pack
from chipwise.data.stages import stage
from chipwise.measure.feed_speed import measure_feed
from compilers import no_gpu_compiler as no_gpu_compiler
from refusals import refused

RNG = np.random.default_rng(0)


def images(n=70, side=4):
    image = RNG.integers(0, 256, (n, side, side, 3), np.uint8)
    return {"image": image, "label": np.arange(n, dtype=np.int32) % 7}


class Watched(cw.Arrays):
    """Remembers who asked for which rows, and says that it decodes."""

    def __init__(self, n):
        super().__init__(**images(n))
        self.asked, self.threads, self.lock = [], set(), threading.Lock()

    def fill(self, indices, out):
        with stage("decode"), self.lock:
            self.asked.append(np.array(indices))
            self.threads.add(threading.get_ident())
            super().fill(indices, out)


def test_it_tells_the_speed_the_slowest_stage_and_what_would_help():
    source = Watched(70)
    told = measure_feed(source, 64, seconds=0.1, workers=2)
    assert told.workers == "2 threads" and told.example_bytes == 4 * 4 * 3 + 4
    assert told.examples_per_second > 0 and told.seconds >= 0.1
    assert set(told.seconds_per_example) == {"read", "decode", "transform"}
    assert told.seconds_per_example["decode"] > 0 == told.seconds_per_example["transform"]
    speed, slowest = told.findings
    assert speed["examples_per_second"] == told.examples_per_second and speed["workers"] == "2 threads"
    assert slowest["stage"] == "decode" and slowest["advice"].code == "feed-try-raw"
    assert json.loads(json.dumps(told.to_json()))["findings"][1]["code"] == "feed-slowest"


def test_examples_are_read_in_the_order_of_training_and_all_of_them():
    source = Watched(70)
    measure_feed(source, 32, seconds=0.05, workers=1)
    asked = np.concatenate(source.asked)
    assert np.array_equal(asked[:70], order.indices(0, 0, 70, 70)) and len(source.threads) == 1


def test_what_nobody_said_threads_may_read_is_read_by_one():
    class Plain:
        def __len__(self):
            return 3

        def __getitem__(self, index):
            return {"x": np.full(2, index, np.float32)}

    told = measure_feed(Plain(), 2, seconds=0.05)
    assert told.workers == "1 thread" and told.findings[1]["advice"].code.startswith("feed-try")


@pytest.mark.parametrize("n", [1, 63, 64, 65])
def test_sources_around_one_batch(n):
    assert measure_feed(cw.Arrays(**images(n)), 64, seconds=0.02).examples_per_second > 0


def test_what_cannot_be_measured_is_told():
    with refused(cw.errors.DataError, "feed-source-empty"):
        measure_feed([], 4)
    for wrong in ({"batch": 0}, {"batch": 4, "seconds": 0}):
        with refused(cw.errors.RecipeError, "feed-nothing-to-time", **wrong):
            measure_feed(cw.Arrays(**images(8)), **wrong)
    with refused(cw.errors.RecipeError, "workers-unknown", workers="many"):
        measure_feed(cw.Arrays(**images(8)), 4, workers="many")

    class Broken(Watched):
        def fill(self, indices, out):
            raise cw.errors.DataError("image 3 is damaged")

    with pytest.raises(cw.errors.DataError, match="image 3 is damaged"):
        measure_feed(Broken(8), 4, seconds=0.1)


def test_the_command_measures_a_pack_and_writes_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_packed(tmp_path / "tiny", [images()], classes=7)
    before = sorted(tmp_path.iterdir())
    assert main(["bench", "tiny", "--feed-only", "--seconds", "0.1"]) == 0
    assert "examples/s" in capsys.readouterr().out and sorted(tmp_path.iterdir()) == before


def test_a_pack_of_photographs_is_decoded_to_one_size(tmp_path, capsys):
    for number, side in enumerate((24, 40)):
        (tmp_path / "in" / "a").mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (side, side + 8)).save(tmp_path / "in" / "a" / f"{number}.jpg")
    pack(tmp_path / "in", tmp_path / "pack", store="jpeg")
    command = ["bench", "--feed-only", str(tmp_path / "pack"), "--seconds", "0.05"]
    assert main(command) == 3 and "differ in size" in capsys.readouterr().err
    assert main([*command, "--size", "16", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["example_bytes"] == 16 * 16 * 3 + 4 and told["seconds_per_example"]["decode"] > 0


def test_the_command_measures_a_recipe_as_one_json_object(capsys):
    command = ["bench", "digits", "--feed-only", "--seconds", "0.1", "--workers", "1", "--json"]
    assert main(command) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["workers"], told["findings"][0]["code"]) == ("1 thread", "feed-speed")


@pytest.mark.parametrize(
    "arguments, code, words",
    [
        (["no-such-recipe"], 2, "no-such-recipe"),
        (["."], 3, "manifest.json"),
        ([".", "--data", "."], 2, ". is a packed folder"),
        (["digits", "--size", "8"], 2, "--size"),
        (["digits", "--workers", "0"], 2, "workers=0"),
        (["digits", "--out", "x.json"], 2, "--out"),
    ],
)
def test_wrong_arguments_are_one_line(tmp_path, monkeypatch, capsys, arguments, code, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    assert main(["bench", "--feed-only", *arguments]) == code
    said = capsys.readouterr().err
    assert str(words) in said and said.startswith("error: ") and said.count("\n") == 1
