"""`chipwise pack`, of sources and of packs: what people see, what programs get, and errors of one line."""

import json
import os
import shutil
import signal
import tarfile

import fsspec
import pytest

from chipwise.base.errors import DataError
from chipwise.base.facts import fact
from chipwise.base.figures import printable
from chipwise.data import PackedFolder
from chipwise.data.images import decode
from chipwise.data.pack import packing as job
from pictures import encoded, files, smooth, write


def why_not(content):
    """What is said of an image that cannot be decoded."""
    with pytest.raises(DataError) as caught:
        decode(content)
    return str(caught.value)


@pytest.fixture
def src(tmp_path):
    write(tmp_path / "src" / "train", 5)
    write(tmp_path / "src" / "val", 2)
    (tmp_path / "src" / "train" / "bee" / "003.jpeg").write_bytes(b"broken")
    (tmp_path / "src" / "train" / "bee" / "notes.txt").write_text("bees")
    return tmp_path / "src"


def test_pack_packs_and_reports(chipwise, src, tmp_path):
    said = chipwise("pack", src, tmp_path / "out", "--size", 20)
    assert said.code == 0, said.err
    for text in (
        fact("pack-packing", src=src, dst=tmp_path / "out", total=21),
        fact("pack-left-out", counts=["1 .txt"]),
        fact("pack-split-skipped", count=1, split="train"),
        fact("pack-skipped-entry", name="bee/003.jpeg", reason=why_not(b"broken")),
    ):  # fmt: skip
        assert str(text) in said.out
    source = PackedFolder(tmp_path / "out", "eval")
    assert source.names == ("ant", "bee", "cat") and source[0]["image"].shape == (20, 20, 3)


def test_a_table_says_how_it_was_read(chipwise, src, tmp_path):
    table = src / "train" / "labels.csv"
    table.write_text("bee/000.jpeg,31\nbee/001.jpeg,2.5\n")
    options = ["--heading", "photo,age", "--columns", "image=photo"]
    said = chipwise("pack", table, tmp_path / "out", *options)
    assert said.refused(3, "table-labels-mixed", line=2, one="numbers", other="classes")
    said = chipwise("pack", table, tmp_path / "out", *options, "--labels", "numbers", "--size", 8)
    assert said.code == 0, said.err
    about = {"file": "photo", "columns": ["age"], "kind": "numbers", "values": ["2.5 to 31"]}
    assert str(fact("table-read", **about)) in said.out
    assert PackedFolder(tmp_path / "out")[1]["label"] == 2.5
    twice = ["--columns", "label=age,label=photo"]
    assert chipwise("pack", table, tmp_path / "more", *twice).refused(2, "pack-columns-option")


def test_json_is_one_object(chipwise, src, tmp_path):
    said = chipwise(
        "pack",
        src,
        tmp_path / "out",
        "--json",
        "--store",
        "jpeg",
        "--size",
        8,
        "--quality",
        80,
    )
    answer = json.loads(said.out)
    train = answer["splits"]["train"]
    assert train["examples"] == 14 and train["names"] == ["ant", "bee", "cat"]
    assert [s["name"] for s in train["source"]["skipped"]] == ["bee/003.jpeg"]
    assert answer["images"] == 21 and answer["left_out"] == ["train/bee/notes.txt"]
    shown = json.loads(chipwise("pack", tmp_path / "out", "--json").out)
    assert answer["splits"] == shown["splits"] and shown["verified"] is None


def test_a_split_of_few_documents_says_what_it_holds_out(chipwise, tmp_path):
    (tmp_path / "books").mkdir()
    for name, words in (("a.md", 200), ("l.txt", 300)):
        (tmp_path / "books" / name).write_text("word " * words)
    rows = "".join(json.dumps({"text": f"{n} " * 40}) + "\n" for n in range(200))
    (tmp_path / "lines.jsonl").write_text(rows)
    shown = {}
    for src in ("books", "lines.jsonl"):
        said = chipwise("pack", tmp_path / src, tmp_path / f"{src}-packed", "--tokens", 33, "--split", "0.1")
        assert said.code == 0, said.err
        splits = json.loads(chipwise("pack", tmp_path / f"{src}-packed", "--json").out)["splits"]
        held = splits["eval"]["examples"] / sum(split["examples"] for split in splits.values())
        shown[src] = str(fact("pack-split-uneven", share=0.1, held=held)) in said.out
    assert shown == {"books": True, "lines.jsonl": False}


def test_of_several_splits_one_is_named(chipwise, tmp_path):
    for split in ("train", "val", "test"):
        write(tmp_path / "photos" / split, per_class=1)
    assert chipwise("pack", tmp_path / "photos", tmp_path / "out").refused(3, "splits-several", first="val")
    said = chipwise("pack", tmp_path / "photos", tmp_path / "out", "--eval-split", "test")
    assert said.code == 0, said.err
    for code, numbers in (("split-read", {"split": "test"}), ("splits-left", {"splits": ["val"]})):
        assert str(fact(code, **numbers)) in said.out


def test_a_share_says_what_it_leaves_of_each_class_and_copies(chipwise, tmp_path):
    write(tmp_path / "photos", per_class=8)
    copied = (tmp_path / "photos" / "cat" / "000.jpeg").read_bytes()
    for i in range(20):  # on both sides, whichever are drawn
        (tmp_path / "photos" / "ant" / f"copy{i}.jpeg").write_bytes(copied)
    (tmp_path / "photos" / "few").mkdir()
    (tmp_path / "photos" / "few" / "1.jpeg").write_bytes(encoded(smooth(99)))
    said = chipwise("pack", tmp_path / "photos", tmp_path / "out", "--split", 0.2, "--json")
    pairs = json.loads(said.out)["copies"]
    assert pairs and all(held.startswith("ant/copy") for held, _ in pairs)
    said = chipwise("pack", tmp_path / "photos", tmp_path / "again", "--split", 0.2)
    for one in (
        fact("split-of-each", classes=4, train=[1, 22], eval=[0, 6]),
        fact("split-without", side="eval", classes=["few"]),
        fact("pack-copies", count=len(pairs), pairs=[f"{held} = {there}" for held, there in pairs]),
    ):
        assert str(one) in said.out
    for folder in ("ant", "few"):
        shutil.rmtree(tmp_path / "photos" / folder)
    said = chipwise("pack", tmp_path / "photos", tmp_path / "apart", "--split", 0.2)
    assert str(fact("pack-no-copies")) in said.out


def test_split_shards_and_limits(chipwise, src, tmp_path):
    out = tmp_path / "out"
    rest = ("--split", "0.4", "--shards", 2, "--workers", 1)
    said = chipwise("pack", src / "train", out, *rest, "--max-skipped", 0)
    assert said.code == 3 and said.err.count("\n") == 1, said.err
    numbers = {"src": str(src / "train"), "name": "bee/003.jpeg", "partial": tmp_path / ".out.partial"}
    assert said.error.code == "pack-skipped-many"
    assert {name: said.error.facts[name] for name in numbers} == numbers and said.error.facts["limit"] == 0
    assert chipwise("pack", src / "train", out, *rest, "--max-skipped", 0).code == 3
    assert chipwise("pack", out).refused(3, "pack-not-finished", path=out)
    said = chipwise("pack", src / "train", out, *rest)
    assert said.code == 0, said.err
    manifest = json.loads(chipwise("pack", out, "--json").out)["splits"]
    assert manifest["train"]["examples"] + manifest["eval"]["examples"] == 14
    assert len(manifest["train"]["shards"]) == 2


@pytest.mark.parametrize(
    ("code", "error", "arguments"),
    [
        (2, "pack-option", ["--quality", "101"]),
        (2, "pack-option", ["--store", "png"]),
        (2, "pack-option", ["--pixels", "0"]),
        (2, "pack-option", ["--pixels", "black,white"]),
        (2, "pack-option", ["--pixels", "1,1"]),
        (2, "pack-option", ["--pixels", "0,nan"]),
        (3, "split-twice", ["--split", "0.1"]),
        (2, "pack-option", ["--split", "1.5"]),
        (2, "pack-option", ["--size", "20000"]),
    ],
)
def test_errors_are_one_line(chipwise, src, tmp_path, code, error, arguments):
    said = chipwise("pack", src, tmp_path / "out", *arguments)
    assert (said.code, said.error.code) == (code, error) and said.err.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_pack_is_shown_and_checked(chipwise, src, tmp_path):
    chipwise("pack", src, tmp_path / "out", "--size", 8)
    said = chipwise("pack", tmp_path / "out", "--verify")
    assert said.code == 0, said.err
    for text in (
        "image uint8[8, 8, 3]",
        "label int32[] below 3",
        "classes: 3",
        "size 8, fit crop, store raw",
    ):
        assert text in said.out
    skipped = fact("pack-skipped-entry", name="bee/003.jpeg", reason=why_not(b"broken"))
    assert f"{fact('pack-split-skipped', count=1, split='train')}\n{skipped}" in said.out
    assert str(fact("pack-verified", records=20)) in said.out
    one = chipwise("pack", tmp_path / "out" / "eval", "--json")
    assert list(json.loads(one.out)["splits"]) == ["eval"]
    for place in (tmp_path / "nowhere", src):
        assert chipwise("pack", place).refused(3, "pack-not-found", path=place)


def test_a_pack_of_many_sizes_and_classes(chipwise, tmp_path):
    for i in range(25):
        (tmp_path / "src" / f"class{i:02}").mkdir(parents=True)
        (tmp_path / "src" / f"class{i:02}" / "1.png").write_bytes(encoded(smooth(i, (8 + i, 9)), "PNG"))
    assert chipwise("pack", tmp_path / "src", tmp_path / "out", "--store", "jpeg").code == 0
    said = chipwise("pack", tmp_path / "out")
    assert said.code == 0, said.err
    assert "image uint8[sizes vary]" in said.out
    assert str(fact("pack-classes-some", classes=25, shown=10)) in said.out


def test_names_that_are_no_text_and_look_like_markup(chipwise, tmp_path):
    write(tmp_path / "src", 2, classes=("[red]", "b"))
    folder = os.fsencode(tmp_path / "src" / "b")
    os.rename(folder + b"/000.jpeg", folder + b"/\xfe.jpg")
    with open(folder + b"/\xff.jpg", "wb"):
        pass
    said = chipwise("pack", tmp_path / "src", tmp_path / "out")
    assert said.code == 0 and f"b/?.jpg: {why_not(b'')}" in said.out
    said = chipwise("pack", tmp_path / "out", "--verify")
    assert said.code == 0 and "[red]" in said.out and f"b/?.jpg: {why_not(b'')}" in said.out


def test_control_characters_in_names_are_escaped(chipwise, tmp_path):
    write(tmp_path / "src", 2, classes=("a",))
    for name in ("x\n\x1b[31m.jpg", "y\u202e"):
        (tmp_path / "src" / "a" / name).write_bytes(b"?")
    said = chipwise("pack", tmp_path / "src", tmp_path / "out")
    assert said.code == 0 and f"a/x\\n\\x1b[31m.jpg: {why_not(b'?')}" in said.out
    assert printable("1 a/y\u202e") in said.out and "\u202e" not in said.out
    assert "a/x\\n\\x1b[31m.jpg" in chipwise("pack", tmp_path / "out").out
    said = chipwise("pack", tmp_path / "src", tmp_path / "other", "--max-skipped", 0)
    assert said.err.count("\n") == 1 and "\x1b" not in said.err


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 75)])
def test_a_signal_ends_with_one_line_and_the_same_command_goes_on(
    chipwise, src, tmp_path, monkeypatch, number, code
):
    before = signal.getsignal(signal.SIGTERM)
    # A shell starts what runs behind it with SIGINT ignored
    interrupted = signal.signal(signal.SIGINT, signal.default_int_handler)
    with monkeypatch.context() as patch:
        patch.setattr(job.Packing, "_write", lambda *_: signal.raise_signal(number))
        said = chipwise("pack", src, tmp_path / "out")
    signal.signal(signal.SIGINT, interrupted)
    assert said.code == code and said.err.count("\n") == 1, said.err
    assert said.error.code == "pack-interrupted" and said.error.facts["partial"] == tmp_path / ".out.partial"
    assert signal.getsignal(signal.SIGTERM) == before
    assert chipwise("pack", src, tmp_path / "out").code == 0


def test_a_missing_split_and_damage_are_told(chipwise, src, tmp_path):
    out = tmp_path / "out"
    chipwise("pack", src, out)
    assert PackedFolder(out).manifest["splits"] == ["train", "eval"]
    path = out / "train" / "label-00000.npy"
    path.write_bytes(b"?" + path.read_bytes()[1:])
    said = chipwise("pack", out, "--verify")
    assert said.error.code == "pack-damaged"
    assert said.error.facts == {"path": out / "train", "files": ["label-00000.npy"]}
    shutil.rmtree(out / "eval")
    for options in ([], ["--verify"]):
        said = chipwise("pack", out, *options)
        assert said.code == 3 and str(out / "eval") in said.err
    assert chipwise("pack", out / "train").code == 0


def test_urls_are_fetched(chipwise, tmp_path, monkeypatch):
    monkeypatch.setenv("CHIPWISE_CACHE", str(tmp_path / "cache"))
    write(tmp_path / "src", 4)
    with tarfile.open(tmp_path / "src.tar", "w") as archive:
        archive.add(tmp_path / "src", "src")
    far = fsspec.filesystem("memory")
    far.pipe("/urls/src.tar", (tmp_path / "src.tar").read_bytes())
    said = chipwise("pack", "memory://urls/src.tar", tmp_path / "out")
    assert said.code == 0 and "memory://urls/src.tar to " in said.out, said.err
    for name, data in files(tmp_path / "out").items():
        far.pipe(f"/urls/out/{name}", data)
    said = chipwise("pack", "memory://urls/out", "--verify")
    assert said.code == 0 and str(fact("pack-verified", records=12)) in said.out, said.err


def test_no_tokens_are_refused_and_not_taken_for_the_default(chipwise, tmp_path):
    (tmp_path / "a.txt").write_text("one two")
    said = chipwise("pack", tmp_path / "a.txt", tmp_path / "out", "--tokens", 0)
    assert said.error.code == "pack-tokens" and not (tmp_path / "out").exists()


def test_options_of_the_other_use_are_refused(chipwise, src, tmp_path):
    code = "pack-option-unused"
    assert chipwise("pack", src, tmp_path / "out", "--verify").refused(2, code, options=["--verify"])
    assert chipwise("pack", src, "--size", 8, "--workers", 1).refused(
        2, code, options=["--size", "--workers"]
    )
    assert not (tmp_path / "out").exists()


def test_names_alike_and_what_is_left_out_are_in_the_first_lines(chipwise, tmp_path):
    write(tmp_path / "src", 1, classes=("Cat", "cat", "dog"))
    for name in ("a.heic", "b.HEIC", "notes.txt", "README"):
        (tmp_path / "src" / "dog" / name).write_text("x")
    said = chipwise("pack", tmp_path / "src", tmp_path / "out", "--size", 8)
    assert said.code == 0, said.err
    first = said.out.splitlines()[:4]
    assert first[2] == str(fact("classes-alike", names=["Cat", "cat"]))
    assert first[3] == str(fact("pack-left-out", counts=["2 .heic", "1 dog/README", "1 .txt"]))
