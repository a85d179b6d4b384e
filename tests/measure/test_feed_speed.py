"""Measuring the host alone: what the record holds, and what the verdict makes of it. No speed is asserted."""

import dataclasses
import json
import threading

import numpy as np
import pytest
from PIL import Image

import chipwise as cw
from chipwise.cli import main
from chipwise.data import write_packed
from chipwise.data.pack import pack
from chipwise.data.stages import stage
from chipwise.machine.record import Record, Series
from chipwise.measure import feed_speed as feed
from chipwise.measure.feed_speed import measure_feed, verdict
from chipwise.words.facts import fact
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


def test_a_record_has_the_figures_of_one_worker_and_of_all():
    source = Watched(70)
    record = measure_feed(source, 64, seconds=0.2, workers=2, name="mine", described={"store": "raw"})
    rates = record.figures
    assert set(rates) == {
        *(f"{kind}.{n}" for kind in ("examples_per_second", "copy_bytes_per_second") for n in (1, 2)),
        *(f"seconds_per_example.{name}" for name in ("read", "decode", "transform")),
    }
    assert all(len(series.runs) == feed.ROUNDS for series in rates.values())
    assert min(rates["examples_per_second.2"].runs) > 0 and min(rates["copy_bytes_per_second.2"].runs) > 0
    assert rates["seconds_per_example.decode"].median > 0 == rates["seconds_per_example.transform"].median
    told = record.measured
    assert (told["examples"], told["bytes_per_example"], told["batch"]) == (70, 4 * 4 * 3 + 4, 64)
    assert (told["source"], told["store"], told["workers"]) == ("Watched", "raw", [1, 2])
    assert told["columns"]["image"] == {"dtype": "uint8", "shape": [4, 4, 3]}
    assert record.kind == "feed" and record.name == "mine" and record.machine.accelerators == 0
    assert Record.from_json(json.loads(json.dumps(record.to_json()))) == record


def test_examples_are_read_in_the_order_of_training_and_all_of_them():
    source = Watched(70)
    measure_feed(source, 32, seconds=0.1, workers=1, rounds=1)
    asked = np.concatenate(source.asked)
    assert np.array_equal(asked[:70], feed.order.indices(0, 0, 70, 70)) and len(source.threads) == 1
    assert set(asked[70:].tolist()) <= set(range(70))


def test_slow_examples_are_read_fewer_at_a_time():
    class Slow(Watched):
        def fill(self, indices, out):
            for _ in indices:
                threading.Event().wait(0.02)
            super().fill(indices, out)

    record = measure_feed(Slow(70), 64, seconds=0.1, workers=1, rounds=1)
    assert record.measured["examples_a_read"] == [1]
    assert record.figures["examples_per_second.1"].median < 60


def test_processes_count_as_workers():
    class Plain:
        def __len__(self):
            return 3

        def __getitem__(self, index):
            return {"x": np.full(2, index, np.float32)}

    record = measure_feed(Plain(), 2, seconds=0.05, rounds=1)  # nobody promised that threads may call it
    assert record.measured["workers"] == [1] and record.measured["worker_kind"] == "threads"


@pytest.mark.parametrize("n", [1, 63, 64, 65])
def test_sources_around_one_batch(n):
    record = measure_feed(cw.Arrays(**images(n)), 64, seconds=0.02, rounds=1)
    assert record.figures["examples_per_second.1"].median > 0


def test_what_cannot_be_measured_is_told():
    with refused(cw.errors.DataError, "feed-source-empty"):
        measure_feed([], 4)
    for wrong in ({"batch": 0}, {"batch": 4, "seconds": 0}, {"batch": 4, "rounds": 0}):
        with refused(cw.errors.RecipeError, "feed-nothing-to-time", **wrong):
            measure_feed(cw.Arrays(**images(8)), **wrong)
    with pytest.raises(cw.errors.RecipeError, match="workers=many"):
        measure_feed(cw.Arrays(**images(8)), 4, workers="many")

    class Broken(Watched):
        def fill(self, indices, out):
            raise cw.errors.DataError("image 3 is damaged")

    with pytest.raises(cw.errors.DataError, match="image 3 is damaged"):
        measure_feed(Broken(8), 4, seconds=0.1)


def judged(read=0.0, decode=0.0, transform=0.0, rate=1e4, source="ImageFolder", kind="threads", workers=2):
    base = measure_feed(cw.Arrays(**images(8)), 4, seconds=0.02, rounds=1, workers=1)
    figures = {
        f"examples_per_second.{workers}": rate,
        "examples_per_second.1": rate / workers,
        f"copy_bytes_per_second.{workers}": 1e10,
        "seconds_per_example.read": read,
        "seconds_per_example.decode": decode,
        "seconds_per_example.transform": transform,
    }
    measured = {
        **base.measured,
        **{"source": source, "worker_kind": kind, "workers": sorted({1, workers})},
        **{"examples": 10_000, "bytes_per_example": 150_000},
    }
    return verdict(
        dataclasses.replace(
            base, measured=measured, figures={name: Series("", (value,)) for name, value in figures.items()}
        )
    )


def test_the_verdict_names_the_stage_and_what_would_help():
    speed = fact(
        "feed-speed",
        workers=2, kind="threads", examples_per_second=1e4, bytes_per_second=1.5e9, share_of_copy=0.15,
    )  # fmt: skip
    raw = 1_500_000_000
    for slow, took in (("decode", 18e-5), ("read", 18e-5), ("transform", 18e-5)):
        slowest, advice = (
            fact(f"feed-slowest-{slow}", share=0.9),
            fact(f"feed-advice-{slow}", raw_bytes=raw),
        )
        assert judged(**{slow: took}) == [speed, slowest, advice]
        assert all(map(str, judged(**{slow: took})))
    assert judged(read=18e-5, source="PackedFolder") == [speed, fact("feed-slowest-read", share=0.9)]
    (fast,) = judged(read=2e-5, rate=5e4)
    assert (fast["share_of_copy"], fast["bytes_per_second"]) == (0.75, 7.5e9)
    one = judged(read=0.4, rate=2.5, kind="processes", workers=1)[0]
    assert (one["workers"], one["kind"], one["examples_per_second"]) == (1, "processes", 2.5)


def test_the_command_measures_a_pack_and_saves_the_record(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_packed(tmp_path / "tiny", [images()], classes=7)
    assert main(["bench", "tiny", "--feed-only", "--seconds", "0.1"]) == 0
    out = capsys.readouterr().out
    (file,) = tmp_path.glob("feed-tiny-*.json")
    record = Record.from_json(json.loads(file.read_text()), kind="feed")
    assert file.name == f"feed-tiny-{record.machine.hash}.json" and file.name in out
    assert record.measured["source"] == "PackedFolder" and record.measured["batch"] == 256
    assert all(str(finding) in " ".join(out.split()) for finding in verdict(record))


def test_a_pack_of_photographs_is_decoded_to_one_size(tmp_path, capsys):
    for number, side in enumerate((24, 40)):
        (tmp_path / "in" / "a").mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (side, side + 8)).save(tmp_path / "in" / "a" / f"{number}.jpg")
    pack(tmp_path / "in", tmp_path / "pack", store="jpeg")
    command = [
        "bench",
        "--feed-only",
        str(tmp_path / "pack"),
        "--seconds",
        "0.05",
        "--out",
        str(tmp_path / "r.json"),
    ]
    assert main(command) == 3 and "differ in size" in capsys.readouterr().err
    assert main([*command, "--size", "16", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["measured"]["columns"]["image"]["shape"] == [16, 16, 3]
    assert told["measured"]["store"] == "jpeg"
    assert told["figures"]["seconds_per_example.decode"]["median"] > 0


def test_the_command_measures_a_recipe_as_one_json_object(tmp_path, capsys):
    file = tmp_path / "d.json"
    arguments = [
        "bench",
        "digits",
        "--feed-only",
        "--seconds",
        "0.1",
        "--workers",
        "1",
        "--batch",
        "48",
        "--json",
    ]
    assert main([*arguments, "--out", str(file)]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (
        told["schema"] == "chipwise.record/1" and told["name"] == "digits" and told["measured"]["batch"] == 48
    )
    assert told["written"] == str(file)
    assert (told["verdict"][0]["code"], told["verdict"][0]["workers"]) == ("feed-speed", 1)
    assert json.loads(file.read_text())["figures"] == told["figures"]


@pytest.mark.parametrize(
    "arguments, code, words",
    [
        (["no-such-recipe"], 2, "no-such-recipe"),
        (["."], 3, "manifest.json"),
        ([".", "--data", "."], 2, ". is a packed folder"),
        (["digits", "--size", "8"], 2, "--size"),
        (["digits", "--workers", "0"], 2, "workers=0"),
        (["digits", "--seconds", "0.05", "--out", "file/x.json"], 3, "file/x.json"),
    ],
)
def test_wrong_arguments_are_one_line(tmp_path, monkeypatch, capsys, arguments, code, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    assert main(["bench", "--feed-only", *arguments]) == code
    said = capsys.readouterr().err
    assert str(words) in said and said.startswith("error: ") and said.count("\n") == 1
