"""Text as examples of tokens for a language model: documents are joined, and cut into examples.

    one two | three <end> four | <end> five ...      every token but the first is predicted once

Tokens are bytes, or those of a `tokenizers` JSON file. A tokenizer may put tokens before each text:

    <begin> one two | three <end> <begin> four ...

`Tokenizer.begun` says how a text begins, wherever one is read: to pack, to generate and to export.
Text is read once, in pieces, and its tokens are stored in an unnamed temporary file next to the
pack.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from ...base import DataError, Fact, RecipeError, library
from ...base.files import read_regular
from ...base.json_types import json_object
from ..deadline import TooSlow, in_time
from ..manifest import TOKENIZER as TOKENIZER, TOKENIZER_CONFIG as TOKENIZER_CONFIG
from ..packed import PackedFolder
from . import tokenizer_process
from .documents import Document, documents
from .folders import Listing, Split
from .pack_settings import PackSettings, TextForm

_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")
_MOST_TOKENIZER = 1 << 28  # bytes of its file
# What is cut in one go: a message to the tokenizer's process takes as long as 20 short texts
_BATCH_BYTES, _BATCH_PARTS = 1 << 20, 768


@dataclass(frozen=True)
class Tokenizer:
    """Converts text to tokens and back."""

    encode: Callable[[bytes], Any]
    """Converts UTF-8 to its tokens."""
    decode: Callable[[Sequence[int]], str]
    """Converts tokens to their text."""
    kinds: int
    """The size of the vocabulary."""
    end: int | None
    """The token after a document, or `None`."""
    begin: tuple[int, ...] = ()
    """The tokens before a document."""
    names: Mapping[str, Any] = field(default_factory=dict)
    """What a pack and a run store: the texts of these tokens, as `begin` and `end`."""
    json: Callable[[], str] | None = None
    """The tokenizer's file, by whose template a text begins as here. `None` for bytes."""
    encode_all: Callable[[Sequence[bytes]], list[Any]] | None = None
    """Converts several texts of UTF-8, faster than one by one. `None` for bytes."""

    def begun(self, text: bytes = b"") -> list[int]:
        """The tokens of a document that begins with `text`."""
        return [*self.begin, *(map(int, self.encode(text)) if text else ())]


BYTES = Tokenizer(
    lambda piece: np.frombuffer(piece, np.uint8),
    lambda tokens: bytes(token for token in tokens if token < 256).decode("utf-8", "replace"),
    257,
    256,
)
"""A byte is a token, and 256 ends a document."""


def text_listing(path: Path | str, form: TextForm, where: Path, settings: PackSettings) -> Listing:
    """The examples of the text at `path`: a file, a folder of files, or a column of a table. A
    string names a data set of the Hub, whose column is read. With a column "prompt" the examples
    have a `mask`, 1 for tokens of the answers.

    *Arguments:* `where`: a folder with space for the tokens. `settings`: of these, `split` is the
    share of the documents for eval, selected by name, or the last part of a single document.

    Raises `DataError` with the file and the byte for damaged text.
    """
    columns = dict(settings.columns or {})
    share = settings.split
    tokens = _tokens_of(form)
    dtype = np.dtype(np.uint16 if tokens.kinds <= 1 << 16 else np.uint32)
    masked = "prompt" in columns
    spools = {split: _Spool(where, dtype, masked) for split in ("train", "eval")}
    count = 0
    begun = set()
    told: list[Fact] = []
    left: list[str] = []

    def parts() -> Iterator[_Part]:
        nonlocal count
        for document in documents(path, columns, settings.eval_split, told.append, left):
            if share is not None and document.split == "eval":
                raise DataError("split-twice", share=share, splits=["train", "eval"])
            digest = hashlib.sha256(document.name.encode("utf-8", "surrogateescape")).digest()
            drawn = int.from_bytes(digest[:8]) / 2.0**64  # from 0 to 1, a function of the name
            split = "eval" if share is not None and drawn < share else document.split
            # The document before has written a token that is begin and end
            begin = () if split in begun and tokens.begin == (tokens.end,) else tokens.begin
            yield from _parts(path, document, tokens, begin, spools[split])
            begun.add(split)
            count += 1

    with contextlib.ExitStack() as closing:
        for spool in spools.values():
            closing.callback(spool.close)
        for batch in _batches(parts()):
            texts = [text for _, text, _ in batch if isinstance(text, bytes)]
            cut = iter(tokens.encode_all(texts) if tokens.encode_all else map(tokens.encode, texts))
            for spool, text, counted in batch:
                spool.write(next(cut) if isinstance(text, bytes) else text, counted)
        if not count:
            wrong = (
                "{path} holds no text: give a .txt, .md, .jsonl, .csv or .parquet, or a folder "
                "of .txt, .md and .jsonl, or of .parquet."
            )
            raise DataError("text-empty", wrong, path=path)
        listing = _joined(path, form, tokens, spools, count, share)
        return replace(listing, told=tuple(told), left_out=tuple(left))


_Part = tuple["_Spool", bytes | Sequence[int | None], bool]
"""Where tokens are written, the text that is cut or its tokens, and whether they count."""


def _parts(
    path: Path | str, document: Document, tokens: Tokenizer, begin: Sequence[int], spool: _Spool
) -> Iterator[_Part]:
    """Yields the document's parts and the end. A prompt is tokenised alone, as for generating from
    it."""
    at = 0
    yield spool, begin, False
    if document.prompt:
        yield spool, document.prompt, False
    for piece in document.pieces:
        try:
            if tokens.encode_all is not None:
                piece.decode()  # says which byte is none
        except UnicodeDecodeError as error:
            byte = at + error.start
            wrong = "{path}: {name:plain} is not UTF-8 (byte {byte:,}): convert it, or pack bytes."
            raise DataError(
                "text-not-utf8", wrong, path=path, name=document.name, byte=byte
            ) from error
        yield spool, piece, True
        at += len(piece)
    yield spool, [tokens.end], True


def _batches(parts: Iterable[_Part]) -> Iterator[list[_Part]]:
    """Yields parts in order, in lists with a limit of parts and bytes."""
    batch: list[_Part] = []
    held = 0
    for part in parts:
        size = len(part[1])
        if batch and (len(batch) == _BATCH_PARTS or held + size > _BATCH_BYTES):
            yield batch
            batch, held = [], 0
        batch.append(part)
        held += size
    yield batch


def _joined(
    path: Path | str,
    form: TextForm,
    tokens: Tokenizer,
    spools: dict[str, _Spool],
    documents: int,
    share: float | None,
) -> Listing:
    step = form.tokens - 1
    splits: dict[str, Split] = {}
    for name, spool in spools.items():
        if not spool.tokens:
            continue
        rows = max(1, -(-(spool.tokens - 1) // step))
        spool.write([tokens.end] * (rows * step + 1 - spool.tokens), counted=False)
        splits[name] = _sequences(spool, form, 0, rows)
        if share is not None and documents == 1 and rows > 1:
            first = min(rows - 1, max(1, round(rows * (1 - share))))
            splits = {"train": _sequences(spool, form, 0, first)}
            splits["eval"] = _sequences(spool, form, first, rows)
            break
    if share is not None and (empty := {"train", "eval"} - set(splits)):
        raise DataError("split-empty", share=share, examples=documents, empty=empty.pop())
    if "train" not in splits:
        raise DataError("pack-no-train", src=str(path), splits=list(splits))
    beside: dict[str, bytes] = {}
    if tokens.json is not None:  # a text that is packed by this copy begins and ends as here
        beside[TOKENIZER] = tokens.json().encode()
        beside[TOKENIZER_CONFIG] = json.dumps({"eos_token": tokens.names["end"]}).encode()
    return Listing(splits, (), {"token": tokens.kinds}, texts=tokens.names, beside=beside)


def _sequences(spool: _Spool, form: TextForm, first: int, stop: int) -> Split:
    step, streams, rows = form.tokens - 1, {"token": spool.array()}, np.arange(first, stop)
    content = spool.digest
    if spool.mask is not None:
        content, streams["mask"] = content + spool.mask.digest, spool.mask.array()
        # An example in which nothing counts has nothing to learn, and a step of such ones no mean
        rows = rows[streams["mask"][1:].reshape(-1, step)[first:stop].any(axis=1)]

    def read(i: int) -> dict[str, Any]:
        begin = int(rows[i]) * step
        return {
            name: np.asarray(stream[begin : begin + form.tokens])
            for name, stream in streams.items()
        }

    return Split.numbered(len(rows), read, {}, content=content)


class _Spool:
    """Tokens in an unnamed temporary file, which is deleted with the process. If `masked`, a second
    file, `mask`, has which of them count."""

    def __init__(self, where: Path, dtype: np.dtype, masked: bool = False):
        self.where, self.dtype, self.tokens = where, dtype, 0
        self.mask = _Spool(where, np.dtype(np.uint8)) if masked else None
        self._file: Any = None
        self._sha = hashlib.sha256()

    def write(self, tokens: Any, counted: bool = True) -> None:
        """Appends `tokens`."""
        block = np.asarray(tokens, self.dtype)
        with self._writing():
            if self._file is None:
                self.where.mkdir(parents=True, exist_ok=True)
                # Open as long as the spool
                self._file = tempfile.TemporaryFile(dir=self.where)  # noqa: SIM115
            self._file.write(block.data)
        self._sha.update(block.data)
        self.tokens += len(block)
        if self.mask is not None:
            self.mask.write(np.full(len(block), counted))

    def array(self) -> np.ndarray:
        """All tokens as a memory-mapped array. No more may be written."""
        with self._writing():
            self._file.flush()
            # Valid without the file's name
            return np.memmap(self._file, self.dtype, "r", shape=(self.tokens,))

    def _writing(self) -> AbstractContextManager[None]:
        return DataError.of_system("pack-unwritable", path=self.where)

    def close(self) -> None:
        if self._file is not None:
            with self._writing():  # it writes what is left
                self._file.close()
        if self.mask is not None:
            self.mask.close()

    @property
    def digest(self) -> str:
        return self._sha.hexdigest()


def _tokens_of(form: TextForm) -> Tokenizer:
    if form.tokenizer is None:
        if form.end is not None:
            wrong = "--end {end:plain} needs --tokenizer FILE.json: bytes end with 256."
            raise RecipeError("pack-end-of-bytes", wrong, end=form.end)
        return BYTES
    tokens = read_tokenizer(form.tokenizer, form.end)
    if tokens.end is None:
        names = list(_ENDS) if form.end is None else [form.end]
        wrong = "{path} has none of the tokens {names:list}: give --end TOKEN."
        raise RecipeError("tokenizer-without-end", wrong, path=form.tokenizer, names=names)
    return tokens


def read_tokenizer(
    path: str | Path, end: str | None = None, begin: Sequence[str] | None = None
) -> Tokenizer:
    """The tokenizer in a file.

    *Arguments:* `end`: the token after a document, by default as in `TextForm`. `begin`: those
    before it, by default those of the file's template, with or without the `bos_token` of the
    `tokenizer_config.json` beside it as its `add_bos_token` says.

    Raises `DataError` for a file that is missing or damaged, and `RecipeError` for a template with
    other tokens than `end` after a text. The tokenizer's functions raise `DataError` for text that
    takes too long.
    """
    tokenizers = library("tokenizers", "pack-library")
    path = Path(path)
    if not path.is_file():
        wrong = "{path} does not exist: expected a tokenizer.json of the tokenizers library."
        raise DataError("tokenizer-missing", wrong, path=path)
    beside = _beside(path) if begin is None else {}
    with _damage(path):
        text = read_regular(path, _MOST_TOKENIZER).decode()
        tokenizer = tokenizers.Tokenizer.from_str(text)
        tokenizer.no_truncation()
        tokenizer.no_padding()
        kinds = 1 + max(tokenizer.get_vocab(with_added_tokens=True).values(), default=0)
        if kinds > 1 << 31:
            raise ValueError(f"a token has the number {kinds - 1:,}")
        before, after = _template(tokenizers, tokenizer)
        names, bos = before, beside.get("bos_token")
        if begin is not None:
            names = list(begin)
        elif (added := beside.get("add_bos_token")) is not None and bos is not None:
            names = [bos] * bool(added) + [name for name in before if name != bos]
        ids = [tokenizer.token_to_id(name) for name in names]
        if begin is not None and None in ids:
            raise ValueError(f"it has no token {names[ids.index(None)]}")
        stated = (beside.get("eos_token") or "", *(after if len(after) == 1 else ()), *_ENDS)
        ends = ((name, tokenizer.token_to_id(name)) for name in ([end] if end else stated))
        last_name, last = next((one for one in ends if one[1] is not None), (None, None))
    if None in ids:
        wrong = (
            "{config} says that a text begins with {token}, which {path} does not have: correct "
            "its add_bos_token or bos_token."
        )
        facts = {"token": names[ids.index(None)], "config": path.with_name(TOKENIZER_CONFIG)}
        raise RecipeError("tokenizer-begin", wrong, path=path, **facts)
    if begin is None and end is None and after not in ([], [last_name]):
        wrong = "{path} puts {after:list} after a text, and {end} ends one here: give --end TOKEN."
        raise RecipeError("tokenizer-template", wrong, path=path, after=after, end=str(last_name))

    elsewhere = _Elsewhere(path, text)

    def encode(piece: bytes) -> Any:
        piece.decode("utf-8")  # says which byte is none
        return encode_all([piece])[0]

    def encode_all(pieces: Sequence[bytes]) -> list[Any]:
        return [np.frombuffer(cut, np.uint32) for cut in elsewhere.ask(b"e", pieces)]

    def decode(tokens: Sequence[int]) -> str:
        return elsewhere.ask(b"d", [np.asarray(tokens, np.uint32).tobytes()])[0].decode()

    def file() -> str:
        if before == names and not after:
            return text
        with _damage(path):
            tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
                single=[*names, "$A"],
                pair=[*names, "$A", *names, "$B:1"],
                special_tokens=list(zip(names, ids, strict=True)),
            )
            return tokenizer.to_str()

    texts = {"begin": names, "end": last_name}
    return Tokenizer(encode, decode, kinds, last, tuple(ids), texts, file, encode_all)


class _Elsewhere:
    """A tokenizer in a process of its own, see `tokenizer_process`. Begins with the first text.
    Threads may share it."""

    def __init__(self, path: Path, text: str):
        self.path, self.text = path, text
        self._process: subprocess.Popen | None = None
        self._close: Callable[[], Any] = lambda: None
        self._alone = threading.Lock()

    def ask(self, kind: bytes, contents: Sequence[bytes]) -> list[bytes]:
        """The answers. Raises `DataError` for one that takes too much time or memory."""
        with _damage(self.path), self._alone:
            try:
                return self._answers(kind, contents)
            except (TooSlow, ValueError):
                if len(contents) == 1:
                    raise
            # The limits are those of a text
            return [self._answers(kind, [content])[0] for content in contents]

    def _answers(self, kind: bytes, contents: Sequence[bytes]) -> list[bytes]:
        most = tokenizer_process.seconds_for(sum(map(len, contents)))
        why = f"it takes more than {most:.0f} s for a text"
        process = self._process = self._process or self._started()
        assert process.stdin is not None and process.stdout is not None
        given, answers = process.stdin, process.stdout

        def exchange() -> bytes:
            tokenizer_process.write(given, kind + tokenizer_process.joined(contents))
            return tokenizer_process.read(answers)

        try:
            answer = in_time(exchange, lambda seconds: why if seconds > most else None)
        except BaseException as error:  # also Ctrl-C: the next answer would be this one's
            self._end()
            if isinstance(error, (EOFError, OSError)) and not isinstance(error, TooSlow):
                raise ValueError("a text takes more memory than it may, or ends it") from error
            raise
        if answer[:1] != b"=":
            raise ValueError(answer[1:].decode())
        return tokenizer_process.divided(answer[1:])

    def _started(self) -> subprocess.Popen:
        process = subprocess.Popen(
            [sys.executable, "-P", tokenizer_process.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "TOKENIZERS_PARALLELISM": "false"},
            start_new_session=True,  # Ctrl-C is for chipwise, which still needs it
        )
        self._close = weakref.finalize(self, _ended, process)
        assert process.stdin is not None
        tokenizer_process.write(process.stdin, self.text.encode())
        return process

    def _end(self) -> None:
        """Ends the process. The next text begins another."""
        self._close()
        self._process = None


def _ended(process: subprocess.Popen) -> None:
    process.kill()
    process.communicate()


def _template(tokenizers: Any, tokenizer: Any) -> tuple[list[str], list[str]]:
    """The tokens that a tokenizer's template puts before and after a text."""
    word = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a")).encode("a")
    whole = tokenizer.post_process(word)
    at = whole.special_tokens_mask.index(0)  # of the word, whatever the tokenizer makes of one
    names = [tokenizer.id_to_token(token) for token in whole.ids]
    return names[:at], names[at + 1 :]


def _beside(path: Path) -> dict[str, Any]:
    """The `tokenizer_config.json` beside a `tokenizer.json`, its tokens as texts. `{}` without
    one."""
    file = path.with_name(TOKENIZER_CONFIG)
    if path.name != TOKENIZER or not file.is_file():
        return {}
    with _damage(file):
        told = json_object(read_regular(file))
        # A token may be written with how it is found in text
        return {k: v.get("content") if isinstance(v, dict) else v for k, v in told.items()}


def tokenizer_of(
    source: Any,
    texts: Mapping[str, Any],
    file: str | Path | None = None,
    vocabulary: int | None = None,
) -> Tokenizer | None:
    """The tokenizer in `file`, by default the one that produced the tokens of the packed folder
    `source`, or `None` if it is not known.

    *Arguments:* `texts`: `Task.known_texts`, which say how a document begins and ends.
    `vocabulary`: the model's. If nothing else is known, 257 are bytes.

    Raises `DataError` for a tokenizer of another vocabulary.
    """
    below = getattr(source, "below", {}).get("token")
    if file is None and isinstance(source, PackedFolder):
        kept = source.path.parent / TOKENIZER
        file = kept if kept.is_file() else None
    if file is None:
        return BYTES if BYTES.kinds in (below, vocabulary) else None
    found = read_tokenizer(file, texts.get("end"), texts.get("begin", ()))
    if found.kinds > (vocabulary or found.kinds) or below not in (None, found.kinds):
        wrong = (
            "{path} has {kinds:,} kinds of tokens, and the model {expected:,}: give the one "
            "of its pack."
        )
        about = {"path": file, "kinds": found.kinds, "expected": below or vocabulary}
        raise DataError("tokenizer-vocabulary", wrong, **about)
    return found


@contextlib.contextmanager
def _damage(path: Path) -> Iterator[None]:
    """A context in which errors of the library, which has no class for them, become a
    `DataError`."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:  # also its panics, which are no `Exception`
        wrong = "{path} is not a tokenizer that can be used: {reason:plain}"
        reason = " ".join(str(error).split())[:160]
        raise DataError("tokenizer-damaged", wrong, path=path, reason=reason) from error
