"""Text as examples of tokens for a language model: joined documents, cut.

    one two | three <end> four | <end> five ...      every token but the first is predicted once

Tokens are bytes, or those of a `tokenizers` JSON file. Text is read once, in pieces, and its tokens are kept
in an unnamed temporary file next to the pack.
"""

from __future__ import annotations

import contextlib
import hashlib
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...atomic import read_regular
from ...errors import DataError, RecipeError, library
from ..deadline import in_time
from ..packed import PackedFolder
from .documents import Document, documents
from .folders import Listing, Split

_MOST = 1 << 22  # tokens of an example
TOKENIZER = "tokenizer.json"  # beside the splits of a pack: what packed it
_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")
_MOST_TOKENIZER = 1 << 28  # bytes of its file
_LEAST_SECONDS, _SLOWEST = 5.0, 2e5  # for a text, and bytes a second; usual are millions


@dataclass(frozen=True)
class TextForm:
    """How text becomes examples. Documents are joined with `end`, and an example begins with the last token
    of the previous one.

    *Fields:* `tokens`: of an example; `tokenizer`: a JSON file of the `tokenizers` library, or None for
    bytes; `end`: the tokenizer's token after a document, by default one of the usual ones; 256 for bytes.
    """

    tokens: int = 1025
    tokenizer: str | Path | None = None
    end: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.tokens, int) or not 2 <= self.tokens <= _MOST:
            wrong = "{tokens} tokens an example: expected 2 to {most}."
            raise RecipeError("pack-tokens", wrong, tokens=self.tokens, most=_MOST)


@dataclass(frozen=True)
class Tokenizer:
    """*Fields:* `encode`: UTF-8 to its tokens; `decode`: tokens to the text that they are; `kinds`: size of
    the vocabulary; `end`: the token after a document, or None."""

    encode: Callable[[bytes], Any]
    decode: Callable[[Sequence[int]], str]
    kinds: int
    end: int | None


BYTES = Tokenizer(
    lambda piece: np.frombuffer(piece, np.uint8),
    lambda tokens: bytes(token for token in tokens if token < 256).decode("utf-8", "replace"), 257, 256,
)  # fmt: skip
"""A byte is a token; 256 ends a document."""


def text_listing(
    path: Path | str, form: TextForm, where: Path, columns: Mapping[str, str] | None = None,
    share: float | None = None,
) -> Listing:  # fmt: skip
    """The examples of the text at `path`: a file, a folder of files, or a column of a table or, named by a
    string, of a data set of the Hub. With a column "prompt" they have a `mask`, 1 for tokens of the answers.

    *Arguments:* `where`: a folder with space for the tokens; `share`: of the documents for eval, selected by
    name, or the last part of a single document.

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
            wrong = "{path} holds no text: give a .txt, .md, .jsonl, .csv or .parquet, or a folder of these."
            raise DataError("text-empty", wrong, path=path)
        return _joined(path, form, tokens, spools, count, share)


def _encode(path: Path | str, document: Document, tokens: Tokenizer, spool: _Spool) -> None:
    """Writes the document's tokens, and the end, to `spool`. A prompt is cut alone, as to generate from."""
    at = 0
    if document.prompt:
        spool.write(tokens.encode(document.prompt), counted=False)
    for piece in document.pieces:
        try:
            spool.write(tokens.encode(piece))
        except UnicodeDecodeError as error:
            byte = at + error.start
            wrong = "{path}: {name:plain} is not UTF-8 (byte {byte:,}): convert it, or pack bytes."
            raise DataError("text-not-utf8", wrong, path=path, name=document.name, byte=byte) from error
        at += len(piece)
    spool.write([tokens.end])


def _joined(
    path: Path | str, form: TextForm, tokens: Tokenizer, spools: dict[str, _Spool], documents: int,
    share: float | None,
) -> Listing:  # fmt: skip
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
    return Listing(splits, (), {"token": tokens.kinds})


def _sequences(spool: _Spool, form: TextForm, first: int, stop: int) -> Split:
    step, streams, rows = form.tokens - 1, {"token": spool.array()}, np.arange(first, stop)
    content = spool.digest
    if spool.mask is not None:
        content, streams["mask"] = content + spool.mask.digest, spool.mask.array()
        # An example in which nothing counts has nothing to learn, and a step of such ones no mean
        rows = rows[streams["mask"][1:].reshape(-1, step)[first:stop].any(axis=1)]

    def read(i: int) -> dict[str, Any]:
        begin = int(rows[i]) * step
        return {name: np.asarray(stream[begin : begin + form.tokens]) for name, stream in streams.items()}

    return Split.numbered(len(rows), read, {}, content=content)


class _Spool:
    """Tokens in an unnamed temporary file, which is deleted with the process; and, if `masked`, which of them
    count, in another, `mask`."""

    def __init__(self, where: Path, dtype: np.dtype, masked: bool = False):
        self.where, self.dtype, self.tokens = where, dtype, 0
        self.mask = _Spool(where, np.dtype(np.uint8)) if masked else None
        self._file: Any = None
        self._sha = hashlib.sha256()

    def write(self, tokens: Any, counted: bool = True) -> None:
        """Appends `tokens`."""
        block = np.asarray(tokens, self.dtype)
        try:
            if self._file is None:
                self.where.mkdir(parents=True, exist_ok=True)
                self._file = tempfile.TemporaryFile(dir=self.where)  # noqa: SIM115 (as long as the spool)
            self._file.write(block.data)
        except OSError as error:
            raise DataError("pack-unwritable", path=self.where, reason=error) from error
        self._sha.update(block.data)
        self.tokens += len(block)
        if self.mask is not None:
            self.mask.write(np.full(len(block), counted))

    def array(self) -> np.ndarray:
        """All tokens as a memory-mapped array; no more may be written."""
        self._file.flush()
        return np.memmap(self._file, self.dtype, "r", shape=(self.tokens,))  # valid without the file's name

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


def read_tokenizer(path: str | Path, end: str | None = None) -> Tokenizer:
    """The tokenizer of a file; `end`: the token after a document, by default the first usual one. Raises
    `DataError` for a file that is missing or damaged, and the functions for text that takes too long."""
    tokenizers = library("tokenizers", "pack-library")
    path = Path(path)
    if not path.is_file():
        wrong = "{path} does not exist: expected a tokenizer.json of the tokenizers library."
        raise DataError("tokenizer-missing", wrong, path=path)
    with _damage(path):
        text = read_regular(path, _MOST_TOKENIZER).decode()
        tokenizer = tokenizers.Tokenizer.from_str(text)
        tokenizer.no_truncation()
        tokenizer.no_padding()
        kinds = 1 + max(tokenizer.get_vocab(with_added_tokens=True).values(), default=0)
        if kinds > 1 << 31:
            raise ValueError(f"a token has the number {kinds - 1:,}")
    ends = (tokenizer.token_to_id(name) for name in (_ENDS if end is None else (end,)))

    regular = '"Regex"' in text  # whose expressions can take for ever

    def encode(piece: bytes) -> list[int]:
        given = piece.decode("utf-8")
        with _damage(path):
            if not regular:
                return tokenizer.encode(given, add_special_tokens=False).ids
            most = _LEAST_SECONDS + len(piece) / _SLOWEST
            why = f"its regular expressions take more than {most:.0f} s for a text"
            return in_time(
                lambda: tokenizer.encode(given, add_special_tokens=False).ids,
                lambda seconds: why if seconds > most else None,
            )

    def decode(tokens: Sequence[int]) -> str:
        with _damage(path):
            return tokenizer.decode(list(tokens), skip_special_tokens=False)

    return Tokenizer(encode, decode, kinds, next((token for token in ends if token is not None), None))


def tokenizer_of(source: Any, file: str | Path | None = None) -> Tokenizer | None:
    """The tokenizer in `file`, by default the one that cut the tokens of the packed folder `source`; None if
    it is not known. Its `end` is that of the pack."""
    pack = source if isinstance(source, PackedFolder) else None
    if file is None and pack is not None and (pack.path.parent / TOKENIZER).is_file():
        file = pack.path.parent / TOKENIZER
    if file is not None:
        text = pack.manifest["settings"].get("text") if pack is not None else None
        return read_tokenizer(file, (text or {}).get("end"))
    return BYTES if pack is not None and pack.below.get("token") == BYTES.kinds else None


@contextlib.contextmanager
def _damage(path: Path) -> Iterator[None]:
    """Errors of the library, which has no class for them, become a `DataError`."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:  # also its panics, which are no `Exception`
        wrong = "{path} is not a tokenizer that can be used: {reason:plain}"
        reason = " ".join(str(error).split())[:160]
        raise DataError("tokenizer-damaged", wrong, path=path, reason=reason) from error
