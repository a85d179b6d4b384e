"""Text as tokens: no token lost, the same pack from every kind of file."""

import errno
import gc
import io
import json
import os
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import published_texts as published
from chipwise.base.errors import DataError, RecipeError
from chipwise.data import PackedFolder
from chipwise.data.deadline import TooSlow
from chipwise.data.pack import documents as documents_of
from chipwise.data.pack import packing, tokenise
from chipwise.data.pack.packing import Packing, pack
from chipwise.data.pack.tokenise import TextForm, read_tokenizer, tokenizer_of
from chipwise.data.sources import materialize, take
from chipwise.recipes.tokens import start_of
from refusals import refused

END = 256
DOCUMENTS = ["one two\nthree", "", "four", "five six seven eight" * 3]


@pytest.fixture(autouse=True)
def library():
    pytest.importorskip("datasets")


def tokens(folder, split="train", column="token"):
    packed = PackedFolder(folder, split)
    packed.verify()
    return packed, materialize(packed)[column]


def stream(documents):
    return [token for text in documents for token in [*text.encode(), END]]


def lines(path, documents, **more):
    rows = [
        {"text": text, **{name: column[i] for name, column in more.items()}}
        for i, text in enumerate(documents)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def folder(path, documents):
    path.mkdir(parents=True)
    for i, text in enumerate(documents):
        (path / f"{i}.txt").write_text(text)
    return path


@settings(max_examples=8, deadline=None)
@given(st.lists(st.text("ab\n\u00e9", max_size=9), min_size=1, max_size=5), st.integers(2, 9))
def test_every_token_is_there_once_and_predicted_once(tmp_path_factory, documents, length):
    root = tmp_path_factory.mktemp("text")
    src = lines(root / "a.jsonl", documents)
    packed, rows = tokens(pack(src, root / "out", text=TextForm(tokens=length)))
    assert rows.dtype == np.uint16 and packed.below == {"token": 257}
    whole = stream(documents)
    flat = np.concatenate([rows[:1, 0], rows[:, 1:].ravel()])  # each begins with the last of the one before
    assert (rows[1:, 0] == rows[:-1, -1]).all()
    assert flat[: len(whole)].tolist() == whole and (flat[len(whole) :] == END).all()
    assert len(flat) - len(whole) < max(2, length - 1)


def test_a_file_a_folder_and_columns_are_the_same_text(tmp_path):
    pytest.importorskip("pyarrow")
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"body": DOCUMENTS, "n": [1, 2, 3, 4]}), tmp_path / "a.parquet", row_group_size=2)
    (tmp_path / "a.csv").write_text("text\n" + "".join(json.dumps(text) + "\n" for text in DOCUMENTS[2:]))
    form = TextForm(tokens=8)
    _, expected = tokens(pack(lines(tmp_path / "a.jsonl", DOCUMENTS), tmp_path / "0", text=form))
    sources = [
        (folder(tmp_path / "texts", DOCUMENTS), None),
        (tmp_path / "a.parquet", {"text": "body"}),
    ]
    for i, (src, columns) in enumerate(sources, 1):
        _, found = tokens(pack(src, tmp_path / str(i), text=form, columns=columns))
        np.testing.assert_array_equal(found, expected)
    _, found = tokens(pack(tmp_path / "a.csv", tmp_path / "9", text=form))
    assert found.ravel()[:5].tolist() == stream(["four"])


@pytest.mark.parametrize("documents", [DOCUMENTS * 20, ["only one, and long enough " * 40]])
def test_a_share_goes_to_eval_and_no_document_is_in_both(tmp_path, documents):
    out = pack(lines(tmp_path / "a.jsonl", documents), tmp_path / "out", text=TextForm(tokens=8), split=0.25)
    (_, train), (_, held) = tokens(out), tokens(out, "eval")
    assert 0.1 < len(held) / (len(train) + len(held)) < 0.5
    ends = sum(int((rows[:, 1:] == END).sum()) for rows in (train, held))
    assert ends >= len(documents)


def test_a_tokenizer_cuts_text_into_its_words(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    words = {"<|endoftext|>": 0, "one": 1, "two": 2, "?": 3}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="?"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "t.json"))
    src = lines(tmp_path / "a.jsonl", ["one two", "two three"])
    packed, rows = tokens(pack(src, tmp_path / "out", text=TextForm(tokens=7, tokenizer=tmp_path / "t.json")))
    assert rows.tolist() == [[1, 2, 0, 2, 3, 0, 0]] and packed.below == {"token": 4}
    with refused(RecipeError, "tokenizer-without-end"):
        pack(src, tmp_path / "x", text=TextForm(tokenizer=tmp_path / "t.json", end="</s>"))
    (tmp_path / "t.json").write_text("{}")
    with refused(DataError, "tokenizer-damaged"):
        pack(src, tmp_path / "x", text=TextForm(tokenizer=tmp_path / "t.json"))


@pytest.mark.parametrize("operation", ["write", "flush"])
def test_a_disk_that_fails_before_anything_is_packed_is_told(tmp_path, monkeypatch, operation):
    (tmp_path / "text.txt").write_text("a a a a a a a a")
    made = tempfile.TemporaryFile

    def failing(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    def opened(**named):
        file = made(**named)
        own = {name: getattr(file, name) for name in ("write", "flush", "close")}
        return SimpleNamespace(**own | {operation: failing})

    monkeypatch.setattr("chipwise.data.pack.tokenise.tempfile.TemporaryFile", opened)
    with refused(DataError, "pack-unwritable", reason=os.strerror(errno.EIO)):
        pack(tmp_path / "text.txt", tmp_path / "out", text=TextForm(tokens=3))


def test_a_pack_that_was_killed_while_its_tokenizer_was_copied_is_finished(tmp_path, monkeypatch):
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"</s>": 0, "a": 1}, unk_token="a"))
    made.save(str(tmp_path / "t.json"))
    (tmp_path / "text.txt").write_text("a a a a a a a a")
    form = TextForm(tokens=3, tokenizer=tmp_path / "t.json")

    def killed(path, content):
        path.with_name(f".{path.name}.0123abcd.part").write_bytes(content[:9])
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr("chipwise.data.pack.packing.put_inside", killed)
        pack(tmp_path / "text.txt", tmp_path / "out", text=form)
    pack(tmp_path / "text.txt", tmp_path / "out", text=form)
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (tmp_path / "t.json").read_bytes()
    assert not list(tmp_path.rglob("*.part")) and not list(tmp_path.glob(".out*"))


@pytest.mark.parametrize("line", ["null", "3", "[1]", "[" * 5000, "{"])
def test_a_line_that_is_no_object_is_refused(tmp_path, line):
    """pyarrow's reader of JSON ends the process at a line `null`."""
    (tmp_path / "a.jsonl").write_text(f'{{"text": "one"}}\n\n{line}\n')
    with refused(DataError, "rows-unreadable"):
        pack(tmp_path / "a.jsonl", tmp_path / "x")


def test_bad_text_is_refused_with_its_place(tmp_path):
    cut = lines(tmp_path / "cut.jsonl", ["one", "two"])
    cut.write_bytes(cut.read_bytes()[:-4])
    with refused(DataError, "rows-unreadable", path=cut):
        pack(cut, tmp_path / "x")
    (tmp_path / "c.jsonl").write_text('{"a": 1}\n')
    with refused(DataError, "text-column", columns=["a"]):
        pack(tmp_path / "c.jsonl", tmp_path / "y")
    with refused(DataError, "text-row", row=0, kind="int"):
        pack(tmp_path / "c.jsonl", tmp_path / "y", columns={"text": "a"})
    with refused(DataError, "rows-column", role="text", column="b"):
        pack(tmp_path / "c.jsonl", tmp_path / "y", columns={"text": "b"})
    with refused(RecipeError, "pack-tokens", tokens=1):
        TextForm(tokens=1)
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "a.csv").write_text("text\none\n")
    with refused(DataError, "text-empty"):
        pack(tmp_path / "empty", tmp_path / "y", text=TextForm())
    assert not (tmp_path / "y").exists()


def test_the_byte_that_is_no_text_is_counted_in_the_file(tmp_path, monkeypatch):
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"</s>": 0, "a": 5}, unk_token="a"))
    made.save(str(tmp_path / "t.json"))
    monkeypatch.setattr(documents_of, "_PIECE", 64)
    (tmp_path / "A.TXT").write_bytes(b"word\n" * 40 + b"\xff")
    form = TextForm(tokens=7, tokenizer=tmp_path / "t.json")
    with refused(DataError, "text-not-utf8", byte=200):
        pack(tmp_path / "A.TXT", tmp_path / "x", text=form)
    lines(tmp_path / "B.JSONL", ["one"])
    packed, rows = tokens(pack(tmp_path / "B.JSONL", tmp_path / "y", text=form))
    assert packed.below == {"token": 6} and rows.tolist() == [[5, 0, 0, 0, 0, 0, 0]]  # numbers with a gap


def test_no_line_is_too_long(tmp_path, monkeypatch):
    monkeypatch.setattr(documents_of, "_PIECE", 64)
    text = "aé€😀" * 500  # one line, of characters of 1 to 4 bytes
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    pieces = list(documents_of._pieces(tmp_path / "a.txt"))
    assert len(pieces) > 1 and "".join(piece.decode() for piece in pieces) == text


def test_a_pipe_in_a_folder_is_left_out(tmp_path):
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("one")
    os.mkfifo(tmp_path / "texts" / "b.txt")
    left = []
    found = documents_of.documents(tmp_path / "texts", {}, left_out=left)
    assert [one.name for one in found] == ["a.txt"] and left == ["b.txt"]


def test_what_a_folder_of_text_has_besides_is_read_or_named(tmp_path):
    src = folder(tmp_path / "texts", DOCUMENTS[:2])
    lines(src / "more.jsonl", DOCUMENTS[2:])
    (src / "table.csv").write_text("text\none\n")
    (src / "b").mkdir()
    (src / "b" / "photo.JPG").write_bytes(b"")
    job = Packing(src, tmp_path / "out", text=TextForm(tokens=8))
    assert sorted(job.listing.left_out) == ["b/photo.JPG", "table.csv"]
    job.run()
    _, expected = tokens(
        pack(lines(tmp_path / "a.jsonl", DOCUMENTS), tmp_path / "all", text=TextForm(tokens=8))
    )
    np.testing.assert_array_equal(tokens(tmp_path / "out")[1], expected)


@pytest.mark.parametrize("ending", ["txt", "jsonl"])
def test_files_of_text_that_all_state_a_split_are_splits(tmp_path, ending):
    (tmp_path / "wiki").mkdir()
    for name in ("train", "valid"):
        (tmp_path / "wiki" / f"wiki.{name}.{ending}").write_text(json.dumps({"text": name}) + "\n")
    out = pack(tmp_path / "wiki", tmp_path / "out", text=TextForm(tokens=4))
    assert all(len(PackedFolder(out, split)) for split in ("train", "eval"))
    (tmp_path / "wiki" / "wiki.test.txt").write_text("test")
    with refused(DataError, "splits-several", splits=["valid", "test"]):
        pack(tmp_path / "wiki", tmp_path / "more", text=TextForm(tokens=4))
    (tmp_path / "wiki" / "README.md").write_text("of the texts")
    with refused(DataError, "split-unstated", path=tmp_path / "wiki", names=["README.md"]):
        pack(tmp_path / "wiki", tmp_path / "more", text=TextForm(tokens=4), eval_split="test")


def test_documents_whose_names_state_one_split_are_documents(tmp_path):
    folder(tmp_path / "docs", DOCUMENTS)
    for name in ("how-to-train.md", "train.md"):
        (tmp_path / "docs" / name).write_text("a document")
    job = Packing(tmp_path / "docs", tmp_path / "out", text=TextForm(tokens=8))
    assert set(job.listing.splits) == {"train"}


def test_text_beside_the_folders_of_splits_is_named(tmp_path):
    for split in ("train", "test"):
        folder(tmp_path / "texts" / split, DOCUMENTS)
    (tmp_path / "texts" / "README.md").write_text("of the texts")
    folder(tmp_path / "texts" / "unsup", DOCUMENTS)
    job = Packing(tmp_path / "texts", tmp_path / "out", text=TextForm(tokens=8))
    assert job.listing.left_out[0] == "README.md" and len(job.listing.left_out) == 1 + len(DOCUMENTS)


def test_a_document_in_a_table_may_be_long(tmp_path):
    (tmp_path / "a.csv").write_text(f"text\n{'x' * 200_000}\n")
    made, found = tokens(pack(tmp_path / "a.csv", tmp_path / "out", text=TextForm(tokens=1001)))
    assert len(made) == 200 and found[0, 0] == ord("x")


def test_text_of_an_object_is_not_passed_over(tmp_path):
    with refused(RecipeError, "pack-text-of-object", kind="list"):
        pack([{"text": "one"}], tmp_path / "out", text=TextForm(tokens=8))


def test_a_tokenizer_file_without_end_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(tokenise, "_MOST_TOKENIZER", 100)
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "t.json").write_bytes(bytes(101))
    with refused(DataError, "tokenizer-damaged", path=tmp_path / "t.json"):
        pack(tmp_path / "a.txt", tmp_path / "x", text=TextForm(tokenizer=tmp_path / "t.json"))


@pytest.fixture
def odd(tmp_path):
    """A tokenizer of which a step takes any time, or doubles the text forty times, one way or both."""
    tokenizers = pytest.importorskip("tokenizers")

    def made(kind):
        made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"</s>": 0, "x": 1}, unk_token="x"))
        if kind == "slow":
            made.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex("(x+x+)+y"), "isolated")
        steps = {"encodes": tokenizers.normalizers, "decodes": tokenizers.decoders}.get(kind)
        if steps is not None:
            doubled = steps.Sequence([steps.Replace("x", "xx")] * 40)
            setattr(made, "normalizer" if kind == "encodes" else "decoder", doubled)
        made.save(str(tmp_path / "t.json"))
        return tokenise.read_tokenizer(tmp_path / "t.json")

    return made


@pytest.mark.parametrize("kind", ["plain", "slow"])
def test_every_tokenizer_has_a_time(odd, kind, monkeypatch):
    """Some never end; here the clock says so at once."""
    cut, asked = odd(kind), []

    def ended(call, given_up):
        asked.append([given_up(seconds) is not None for seconds in (4.9, 6)])
        raise TooSlow("late")

    monkeypatch.setattr(tokenise, "in_time", ended)
    for call in (lambda: cut.encode(b"x x"), lambda: cut.decode([1])):
        with refused(DataError, "tokenizer-damaged", reason="late"):
            call()
    assert asked == [[False, True]] * 2
    monkeypatch.undo()
    assert cut.decode([1]) == "x"  # in another process


@pytest.mark.slow
def test_a_text_that_is_never_cut_ends_within_its_time(odd, monkeypatch):
    monkeypatch.setattr(tokenise.tokenizer_process, "SECONDS", (1.0, 2e5))
    cut = odd("slow")
    with refused(DataError, "tokenizer-damaged"):
        cut.encode(b"x" * 200)
    assert list(cut.encode(b"x")) == [1]


@pytest.mark.parametrize("kind", ["encodes", "decodes"])
def test_a_tokenizer_has_a_memory_of_its_own(odd, kind):
    """What it would take ends its process, and no other."""
    cut = odd(kind)
    with refused(DataError, "tokenizer-damaged"):
        cut.encode(b"x") if kind == "encodes" else cut.decode([1])
    assert list(cut.encode(b"")) == [] and cut.decode([]) == ""


def test_a_tokenizer_leaves_no_process(odd):
    cut = odd("plain")
    assert list(cut.encode(b"x")) == [1]
    process = cut.encode_all.__closure__[0].cell_contents._process
    del cut
    gc.collect()
    assert process.poll() is not None


def test_threads_share_a_tokenizer(odd):
    """Each has its own answers."""
    cut = odd("plain")

    def differing(length):
        return [n for n in range(200) if len(cut.encode_all([b"x"] * length)) != length]

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(differing, (1, 2))) == [[], []]


def test_one_of_several_texts_is_refused_as_it_is_alone(odd, monkeypatch):
    """Several that are late together have the time of each."""
    cut, asked, within = odd("plain"), [], tokenise.in_time

    def late(call, given_up):
        asked.append(call)
        if len(asked) == 1:
            raise TooSlow("late")
        return within(call, given_up)

    monkeypatch.setattr(tokenise, "in_time", late)
    assert [*map(list, cut.encode_all([b"x", b"</s>", b""]))] == [[1], [0], []]
    assert len(asked) == 4


@pytest.mark.parametrize("parts", [1, 2, 5, 768])
def test_texts_are_cut_together_as_alone(tmp_path, odd, monkeypatch, parts):
    odd("plain")
    words, asked = ["x x", "", "</s>", "x"] * 9, []
    src = chats(tmp_path / "a.jsonl", words[::-1], words)
    ask = tokenise._Elsewhere.ask
    monkeypatch.setattr(tokenise, "_BATCH_PARTS", parts)
    monkeypatch.setattr(tokenise._Elsewhere, "ask", lambda *given: asked.append(len(given[2])) or ask(*given))
    form = TextForm(tokens=3, tokenizer=tmp_path / "t.json")
    tokens_of = {"x x": [1], "": [], "</s>": [0], "x": [1]}
    pack(src, tmp_path / "out", columns={"prompt": "question"}, text=form)
    whole = [
        (token, kind)
        for prompt, word in zip(words[::-1], words, strict=True)
        for kind, cut in ((0, tokens_of[prompt]), (1, [*tokens_of[word], 0]))
        for token in cut
    ]
    whole += [(0, 0)] * (-(len(whole) - 1) % 2)
    rows = [whole[at : at + 3] for at in range(0, len(whole) - 1, 2)]
    rows = [row for row in rows if any(kind for _, kind in row[1:])]
    found = [tokens(tmp_path / "out", column=column)[1].tolist() for column in ("token", "mask")]
    assert [list(zip(*pair, strict=True)) for pair in zip(*found, strict=True)] == rows
    assert (len(asked) == 1) == (parts == 768)


@pytest.mark.parametrize("error", [ValueError, OSError])
def test_a_limit_that_the_system_refuses_is_left_out(monkeypatch, error):
    """As macOS does, of memory below what is mapped."""
    kept = []

    def refusing(kind, limits):
        if kind == "memory":
            raise error("current limit exceeds maximum limit")
        kept.append(kind)

    fake = SimpleNamespace(
        RLIMIT_AS="memory",
        RLIMIT_CPU="time",
        RLIMIT_CORE="core",
        RUSAGE_SELF=0,
        getrusage=lambda who: SimpleNamespace(ru_utime=0.0, ru_stime=0.0),
        getrlimit=lambda kind: (-1, -1),
        setrlimit=refusing,
    )
    monkeypatch.setitem(sys.modules, "resource", fake)
    tokenise.tokenizer_process.limit(0, 0)
    assert kept == ["time", "core"]


def test_the_memory_of_a_text_is_not_taken_back(odd, tmp_path, monkeypatch):
    """What a long one has mapped may stay mapped."""
    odd("plain")
    process, given, limits = tokenise.tokenizer_process, io.BytesIO(), []
    monkeypatch.setattr(process, "limit", lambda file, text: limits.append(text))
    process.write(given, (tmp_path / "t.json").read_bytes())
    for text in (b"x", b"x " * 99, b"x"):
        process.write(given, b"e" + process.joined([text]))
    given.seek(0)
    with pytest.raises(EOFError):
        process.serve(given, io.BytesIO())
    assert limits[0] < limits[1] == limits[2]


def test_an_answer_that_nobody_waited_for_is_lost(odd, monkeypatch):
    """The next text would have it."""
    cut = odd("plain")

    def interrupted(call, given_up):
        raise KeyboardInterrupt

    assert list(cut.encode(b"x")) == [1]
    process = cut.encode_all.__closure__[0].cell_contents._process
    monkeypatch.setattr(tokenise, "in_time", interrupted)
    with pytest.raises(KeyboardInterrupt):
        cut.encode(b"</s>")
    assert process.poll() is not None
    monkeypatch.undo()
    assert list(cut.encode(b"x")) == [1]


def test_text_in_folders_without_end_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(documents_of, "DEEPEST", 3)
    (tmp_path / "a/b/c").mkdir(parents=True)
    (tmp_path / "a/b/c/x.txt").write_text("one")
    assert [one.name for one in documents_of.documents(tmp_path, {})] == ["a/b/c/x.txt"]
    (tmp_path / "a/b/c/d").mkdir()
    with refused(DataError, "folder-too-deep", deep=3):
        list(documents_of.documents(tmp_path, {}))


def chats(path, prompts, answers):
    return lines(path, answers, question=prompts)


def test_prompts_are_there_and_do_not_count(tmp_path):
    prompts, answers = ["one ", "", "a long question of many words "], ["two", "alone", "yes"]
    src = chats(tmp_path / "a.jsonl", prompts, answers)
    packed, rows = tokens(
        pack(src, tmp_path / "out", columns={"prompt": "question"}, text=TextForm(tokens=6))
    )
    _, mask = tokens(tmp_path / "out", column="mask")
    assert mask.dtype == np.uint8 and mask.shape == rows.shape and packed.below == {"token": 257}
    whole = [(byte, kind) for q, a in zip(prompts, answers, strict=True) for kind, text in ((0, q), (1, a))
             for byte in text.encode() + b"\0" * (kind == 1)]  # fmt: skip
    whole = [(END if byte == 0 else byte, kind) for byte, kind in whole]
    whole += [(END, 0)] * (-(len(whole) - 1) % 5)  # padding, which nobody has said
    cuts = [whole[at : at + 6] for at in range(0, len(whole) - 1, 5)]
    learnt = [cut for cut in cuts if any(kind for _, kind in cut[1:])]
    assert len(learnt) < len(cuts)  # of the long question, some rows have nothing to learn
    assert [
        list(zip(*pair, strict=True)) for pair in zip(rows.tolist(), mask.tolist(), strict=True)
    ] == learnt
    again = chats(tmp_path / "b.jsonl", ["one t", *prompts[1:]], ["wo", *answers[1:]])
    pack(again, tmp_path / "other", columns={"prompt": "question"}, text=TextForm(tokens=6))
    first, second = (PackedFolder(tmp_path / name, "train").manifest["source"] for name in ("out", "other"))
    assert first != second  # the same tokens, but other ones count


def test_prompts_of_the_hub_and_of_tables(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    rows = {"question": ["one ", "three "], "text": ["two", "four"]}
    made = datasets.Dataset.from_dict(rows)
    splits = {"train": made, "validation": made.select([0]), "test": made.select([1])}
    monkeypatch.setattr(datasets, "load_dataset", lambda name, **_: splits if name == "me/mine" else None)
    columns, form = {"prompt": "question", "text": "text"}, TextForm(tokens=4)
    declared = {"columns": columns, "text": form, "eval_split": "validation"}
    pack("hf://datasets/me/mine", tmp_path / "hub", **declared)
    monkeypatch.undo()
    (tmp_path / "a.csv").write_text("question,text\none ,two\nthree ,four\n")
    pack(tmp_path / "a.csv", tmp_path / "table", columns=columns, text=form)
    for column in ("token", "mask"):
        found = [tokens(tmp_path / name, column=column)[1].tolist() for name in ("hub", "table")]
        assert found[0] == found[1]
    assert tokens(tmp_path / "hub", "eval")[1][0].tolist() == [*b"one ", *b"two", END][3:7]


@pytest.mark.parametrize(
    ("columns", "code"), [({"prompt": "ask"}, "rows-column"), ({"prompt": "number"}, "text-row")]
)
def test_prompts_that_are_none_are_refused(tmp_path, columns, code):
    src = lines(tmp_path / "a.jsonl", ["two", "four"], number=[1, 2])
    with refused(DataError, code):
        pack(src, tmp_path / "out", columns=columns)


def test_the_end_of_an_answer_counts(tmp_path):
    src = chats(tmp_path / "a.jsonl", ["x" * 40], [""])
    _, rows = tokens(pack(src, tmp_path / "out", columns={"prompt": "question"}, text=TextForm(tokens=9)))
    assert rows.tolist() == [[*b"x" * 8, END]]


# ---- begin and end, as a published tokenizer says


@pytest.mark.parametrize("kind", published.KINDS)
def test_a_document_begins_and_ends_as_its_tokenizer_says(tmp_path, kind):
    made = published.folder(tmp_path / "there", kind)
    begin, end = map(made.token_to_id, published.BEGIN[kind]), made.token_to_id(published.END[kind])
    src, form = (
        lines(tmp_path / "a.jsonl", published.TEXTS[:3]),
        TextForm(9, tmp_path / "there/tokenizer.json"),
    )
    packed, rows = tokens(pack(src, tmp_path / "out", text=form))
    flat, begin = np.concatenate([rows[:1, 0], rows[:, 1:].ravel()]).tolist(), list(begin)
    whole = [token for text in published.TEXTS[:3] for token in [*made.encode(text).ids, end]]
    bare = made.encode(published.TEXTS[0], add_special_tokens=False).ids
    assert whole[: len(begin)] == begin and whole[len(begin) : len(begin) + len(bare)] == bare
    assert flat[: len(whole)] == whole and set(flat[len(whole) :]) <= {end}
    assert packed.document_ends == {"begin": published.BEGIN[kind], "end": published.END[kind]}
    told = packed.manifest["settings"]["text"]
    assert told["begin"] == published.BEGIN[kind] and told["end"] == published.END[kind]
    cut = tokenizer_of(packed, packed.document_ends)
    assert cut.begun(b"Who is") == made.encode("Who is").ids and cut.begun() == begin
    assert cut.json() == made.to_str(pretty=True)  # nothing to change
    assert start_of(tmp_path / "out", 400) == (begin or [end])[0]


def test_what_begins_an_answer_does_not_count(tmp_path):
    made = published.folder(tmp_path / "there", "llama3")
    src = chats(tmp_path / "a.jsonl", ["Who ", ""], ["is", "there"])
    form = TextForm(4, tmp_path / "there/tokenizer.json")
    _, rows = tokens(pack(src, tmp_path / "out", columns={"prompt": "question"}, text=form))
    _, mask = tokens(tmp_path / "out", column="mask")
    counted = [int(t) for t in rows[:, 1:][mask[:, 1:] != 0]]
    (begin, end), bare = (
        map(made.token_to_id, ("<|begin_of_text|>", "<|eot_id|>")),
        {"add_special_tokens": False},
    )
    assert counted == [*made.encode("is", **bare).ids, end, *made.encode("there", **bare).ids, end]
    assert (rows == begin).sum() == 2


@pytest.mark.parametrize(
    ("template", "added", "begin"),
    [(([], []), True, ["<s>"]), ((["<s>"], []), False, []), ((["[INST]", "<s>"], []), False, ["[INST]"])],
)
def test_add_bos_token_is_added_or_left_out(tmp_path, template, added, begin):
    """And what is exported says so in its template."""
    tokenizers = pytest.importorskip("tokenizers")
    published.folder(tmp_path, "mistral")
    made, file = published.tokenizer("mistral", template), tmp_path / "tokenizer.json"
    made.save(str(file))
    told = {**published.CHATS["mistral"], "add_bos_token": added}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(told))
    cut = read_tokenizer(file)
    assert cut.names == {"begin": begin, "end": "</s>"}
    again = tokenizers.Tokenizer.from_str(cut.json())
    assert cut.begun(b"Who") == again.encode("Who").ids
    assert cut.begun(b"Who")[len(begin) :] == made.encode("Who", add_special_tokens=False).ids
    assert again.encode("Who", "is").ids == [*cut.begun(b"Who"), *cut.begun(b"is")]
    file.rename(tmp_path / "other.json")  # the settings are of tokenizer.json
    assert read_tokenizer(tmp_path / "other.json").names["begin"] == template[0]


def test_what_a_template_puts_after_a_text_is_its_end(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    file = tmp_path / "tokenizer.json"
    published.tokenizer("mistral", (["<s>"], ["</s>"])).save(str(file))
    cut = read_tokenizer(file)
    assert cut.names == {"begin": ["<s>"], "end": "</s>"}
    assert tokenizers.Tokenizer.from_str(cut.json()).encode("Who").ids == cut.begun(b"Who")  # which goes on
    published.tokenizer("mistral", (["<s>"], ["[INST]"])).save(str(file))
    assert read_tokenizer(file).names["end"] == "[INST]"
    published.tokenizer("mistral", (["<s>"], ["[INST]", "<s>"])).save(str(file))
    with refused(RecipeError, "tokenizer-template", after=["[INST]", "<s>"], end="</s>"):
        read_tokenizer(file)
    assert read_tokenizer(file, "[INST]").names["end"] == "[INST]"
    beside = tmp_path / "tokenizer_config.json"
    beside.write_text('{"add_bos_token": true, "bos_token": "<bos>"}')
    with refused(RecipeError, "tokenizer-begin", token="<bos>", config=beside):
        read_tokenizer(file, "[INST]")
    beside.unlink()
    with refused(DataError, "tokenizer-damaged"):
        read_tokenizer(file, begin=["<|begin_of_text|>"])
    (tmp_path / "tokenizer_config.json").write_text("[1]")
    with refused(DataError, "tokenizer-damaged", path=tmp_path / "tokenizer_config.json"):
        read_tokenizer(file)


def test_a_token_that_begins_and_ends_stands_once_between_two(tmp_path):
    published.tokenizer("mistral", (["</s>"], [])).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "texts.jsonl").write_text('{"text": "Who"}\n{"text": "Where"}\n')
    pack(tmp_path / "texts.jsonl", tmp_path / "out", text=TextForm(9, tmp_path / "tokenizer.json"))
    cut = read_tokenizer(tmp_path / "tokenizer.json")
    tokens = take(PackedFolder(tmp_path / "out", "train"), np.arange(1))["token"][0]
    expected = [*cut.begun(b"Who"), *cut.begun(b"Where"), cut.end]
    assert tokens[: len(expected)].tolist() == expected[:9]


def test_a_text_packed_by_the_tokenizer_of_a_pack_is_the_same_tokens(tmp_path):
    """Although its beginning and its end were those of the settings beside the tokenizer."""
    published.folder(tmp_path / "there", "llama3")
    beside = tmp_path / "there/tokenizer_config.json"
    beside.write_text('{"add_bos_token": false, "bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"}')
    (tmp_path / "texts.jsonl").write_text('{"text": "Who"}\n')
    pack(tmp_path / "texts.jsonl", tmp_path / "one", text=TextForm(9, tmp_path / "there/tokenizer.json"))
    pack(tmp_path / "texts.jsonl", tmp_path / "two", text=TextForm(9, tmp_path / "one/tokenizer.json"))
    one, two = (
        take(PackedFolder(tmp_path / name, "train"), np.arange(1))["token"] for name in ("one", "two")
    )
    np.testing.assert_array_equal(one, two)


def test_a_pack_of_before_begins_with_nothing(tmp_path, monkeypatch):
    published.folder(tmp_path / "there", "llama3")
    settings = packing.Packing.settings

    def older(job, split):
        made = settings(job, split)
        return made | {"text": {"tokens": "9", "tokenizer": made["text"]["tokenizer"], "end": None}}

    monkeypatch.setattr(packing.Packing, "settings", older)
    form = TextForm(9, tmp_path / "there/tokenizer.json")
    pack(lines(tmp_path / "a.jsonl", published.TEXTS[:3]), tmp_path / "out", text=form)
    packed = PackedFolder(tmp_path / "out")
    assert packed.document_ends == {"begin": [], "end": None}
    cut = tokenizer_of(packed, packed.document_ends)
    assert cut.names == {"begin": [], "end": "<|end_of_text|>"}  # found by its name, as it was
    assert cut.begun(b"Who") == list(cut.encode(b"Who"))
    assert json.loads(cut.json())["post_processor"]["special_tokens"] == {}
