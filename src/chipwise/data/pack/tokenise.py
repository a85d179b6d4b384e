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
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ...base import DataError, RecipeError, library
from ...base.files import read_regular
from ..deadline import TooSlow, in_time
from ..packed import PackedFolder
from . import tokenizer_process
from .documents import Document, documents
from .folders import Listing, Split

_MOST = 1 << 22  # tokens of an example
TOKENIZER = "tokenizer.json"  # beside the splits of a pack: what packed it
TOKENIZER_CONFIG = "tokenizer_config.json"  # beside a published tokenizer: its begin and end
_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")
_MOST_TOKENIZER = 1 << 28  # bytes of its file


@dataclass(frozen=True)
class TextForm:
    """How text becomes examples. Each document begins as the tokenizer says, documents are joined
    with `end`, and an example begins with the last token of the previous one. A token that is both
    begin and end is written once between two documents."""

    tokens: int = 1025
    """The number of tokens of an example."""
    tokenizer: str | Path | None = None
    """A JSON file of the `tokenizers` library, or `None` for bytes."""
    end: str | None = None
    """The tokenizer's token after a document, by default the `eos_token` of the
    `tokenizer_config.json` beside it, else the one that its template puts there, else one of the
    usual ones. With bytes it is 256."""

    def __post_init__(self) -> None:
        if not isinstance(self.tokens, int) or not 2 <= self.tokens <= _MOST:
            wrong = "{tokens} tokens an example: expected 2 to {most}."
            raise RecipeError("pack-tokens", wrong, tokens=self.tokens, most=_MOST)


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


def text_listing(
    path: Path | str,
    form: TextForm,
    where: Path,
    columns: Mapping[str, str] | None = None,
    share: float | None = None,
) -> Listing:
    """The examples of the text at `path`: a file, a folder of files, or a column of a table. A
    string names a data set of the Hub, whose column is read. With a column "prompt" the examples
    have a `mask`, 1 for tokens of the answers.

    *Arguments:* `where`: a folder with space for the tokens. `share`: the share of the documents
    for eval, selected by name, or the last part of a single document.

    Raises `DataError` with the file and the byte for damaged text.
    """
    tokens = _tokens_of(form)
    dtype = np.dtype(np.uint16 if tokens.kinds <= 1 << 16 else np.uint32)
    masked = "prompt" in (columns or {})
    spools = {split: _Spool(where, dtype, masked) for split in ("train", "eval")}
    count = 0
    with contextlib.ExitStack() as closing:
        for spool in spools.values():
            closing.callback(spool.close)
        for document in documents(path, dict(columns or {})):
            digest = hashlib.sha256(document.name.encode("utf-8", "surrogateescape")).digest()
            drawn = int.from_bytes(digest[:8]) / 2.0**64  # from 0 to 1, a function of the name
            held_out = share is not None and drawn < share
            _encode(path, document, tokens, spools["eval" if held_out else document.split])
            count += 1
        if not count:
            wrong = (
                "{path} holds no text: give a .txt, .md, .jsonl, .csv or .parquet, or a folder "
                "of these."
            )
            raise DataError("text-empty", wrong, path=path)
        return _joined(path, form, tokens, spools, count, share)


def _encode(path: Path | str, document: Document, tokens: Tokenizer, spool: _Spool) -> None:
    """Writes the document's tokens, and the end, to `spool`. A prompt is tokenised alone, as for
    generating from it."""
    at, begun = 0, tokens.begun(document.prompt)
    if spool.tokens and tokens.begin == (tokens.end,):  # which the document before has written
        begun = begun[1:]
    spool.write(begun, counted=False)
    for piece in document.pieces:
        try:
            spool.write(tokens.encode(piece))
        except UnicodeDecodeError as error:
            byte = at + error.start
            wrong = "{path}: {name:plain} is not UTF-8 (byte {byte:,}): convert it, or pack bytes."
            raise DataError(
                "text-not-utf8", wrong, path=path, name=document.name, byte=byte
            ) from error
        at += len(piece)
    spool.write([tokens.end])


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
        with self._telling():
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
        with self._telling():
            self._file.flush()
            # Valid without the file's name
            return np.memmap(self._file, self.dtype, "r", shape=(self.tokens,))

    @contextlib.contextmanager
    def _telling(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise DataError("pack-unwritable", path=self.where, reason=error) from error

    def close(self) -> None:
        if self._file is not None:
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
        return np.frombuffer(elsewhere.ask(b"e" + piece), np.uint32)

    def decode(tokens: Sequence[int]) -> str:
        return elsewhere.ask(b"d" + np.asarray(tokens, np.uint32).tobytes()).decode()

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
    return Tokenizer(encode, decode, kinds, last, tuple(ids), texts, file)


class _Elsewhere:
    """A tokenizer in a process of its own, see `tokenizer_process`. Begins with the first text."""

    def __init__(self, path: Path, text: str):
        self.path, self.text = path, text
        self._process: subprocess.Popen | None = None
        self._close: Callable[[], Any] = lambda: None

    def ask(self, what: bytes) -> bytes:
        """The answer. Raises `DataError` for one that takes too much time or memory."""
        most = tokenizer_process.seconds_for(len(what))
        why = f"it takes more than {most:.0f} s for a text"
        with _damage(self.path):
            process = self._process = self._process or self._started()
            assert process.stdin is not None and process.stdout is not None
            given, answers = process.stdin, process.stdout

            def exchange() -> bytes:
                tokenizer_process.write(given, what)
                return tokenizer_process.read(answers)

            try:
                answer = in_time(exchange, lambda seconds: why if seconds > most else None)
            except TooSlow:
                self._end()
                raise
            except (EOFError, OSError) as error:
                self._end()
                raise ValueError("a text takes more memory than it may, or ends it") from error
            if answer[:1] != b"=":
                raise ValueError(answer[1:].decode())
        return answer[1:]

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
        told = dict(json.loads(read_regular(file)))
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
