"""Text as examples of tokens: joined documents for a language model, or single documents with a label.

    one two | three <end> four | <end> five ...      every token but the first is predicted once
    one two three . . .   cat                        a document is an example, truncated or padded (`each`)

Tokens are bytes, or those of a `tokenizers` JSON file. Text is read once, in pieces, and its tokens are kept
in an unnamed temporary file next to the pack; memory holds a label and an offset for each document.
"""

from __future__ import annotations

import contextlib
import hashlib
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import DataError, RecipeError
from .columns import labels_of
from .documents import Document, documents
from .folders import Listing, Numbered, Split, divided

_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")


@dataclass(frozen=True)
class TextForm:
    """How text becomes examples.

    *Fields:*

    - `tokens`: of an example; `tokenizer`: a JSON file of the `tokenizers` library, or None for bytes.
    - `each`: an example is a document with its label, truncated or padded, with its `length`. Otherwise
      documents are joined with `end`, and an example begins with the last token of the previous one.
    - `boundaries`: add a column `document` that counts the documents within an example.
    - `end`: the tokenizer's token after a document, by default one of the usual ones; 256 for bytes.
    """

    tokens: int = 1025
    tokenizer: str | Path | None = None
    each: bool = False
    boundaries: bool = False
    end: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.tokens, int) or self.tokens < 2:
            wrong = "{tokens} tokens an example: give at least 2."
            raise RecipeError("pack-tokens", wrong, tokens=self.tokens)


@dataclass(frozen=True)
class _Tokens:
    """*Fields:* `encode`: a piece of text to its tokens; `kinds`: size of the vocabulary; `end`; `dtype`."""

    encode: Callable[[bytes], Any]
    kinds: int
    end: int

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(np.uint16 if self.kinds <= 1 << 16 else np.uint32)


def text_listing(
    path: Path,
    form: TextForm,
    where: Path,
    columns: Mapping[str, str] | None = None,
    share: float | None = None,
) -> Listing:
    """The examples of the text at `path`: a file, a folder of files, or a column of a table.

    *Arguments:* `where`: a folder with space for the tokens; `share`: of the documents for eval, selected by
    name, or the last part of a single document.

    Raises `DataError` with the file and the byte for damaged text.
    """
    tokens = _tokens_of(form)
    spools = {split: _Spool(where, tokens.dtype) for split in ("train", "eval")}
    labels: dict[str, list[Any]] = {split: [] for split in spools}
    lengths: dict[str, list[int]] = {split: [] for split in spools}
    with contextlib.ExitStack() as closing:
        for spool in spools.values():
            closing.callback(spool.close)
        for document in documents(path, dict(columns or {}), form.each):
            split = document.split
            if share is not None and not form.each and _drawn(document.name) < share:
                split = "eval"
            lengths[split].append(_encoded(path, document, form, tokens, spools[split]))
            labels[split].append(document.label)
        used = {split: some for split, some in lengths.items() if some}
        if not used:
            wrong = "{path} holds no text: give a .txt, .md, .jsonl, .csv or .parquet, or a folder of these."
            raise DataError("text-empty", wrong, path=path)
        if form.each:
            listing = _one_each(form, tokens, spools, {s: labels[s] for s in used}, lengths)
            return listing if share is None else divided(listing, share)
        return _joined(path, form, tokens, spools, sum(map(len, lengths.values())), share)


def _drawn(name: str) -> float:
    """A number from 0 to 1, a function of the name."""
    return int.from_bytes(hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest()[:8]) / 2.0**64


def _encoded(path: Path, document: Document, form: TextForm, tokens: _Tokens, spool: _Spool) -> int:
    """Writes the document's tokens to `spool`. *Returns* their number, without truncated ones."""
    row: list[int] = []
    found = at = 0
    for piece in document.pieces:
        try:
            made = tokens.encode(piece)
        except UnicodeDecodeError as error:
            byte = at + error.start
            wrong = "{path}: {name:plain} is not UTF-8 (byte {byte:,}): convert it, or pack bytes."
            raise DataError("text-not-utf8", wrong, path=path, name=document.name, byte=byte) from error
        at += len(piece)
        if not form.each:
            found += spool.write(made)
            continue
        row += list(made)[: form.tokens - len(row)]
        if len(row) == form.tokens:
            break
    if not form.each:
        return found + spool.write([tokens.end])
    spool.write(row + [tokens.end] * (form.tokens - len(row)))
    return len(row)


def _joined(
    path: Path,
    form: TextForm,
    tokens: _Tokens,
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
        spool.write([tokens.end] * (rows * step + 1 - spool.tokens))
        splits[name] = _sequences(spool, form, tokens.end, 0, rows)
        if share is not None and documents == 1 and rows > 1:
            first = min(rows - 1, max(1, round(rows * (1 - share))))
            splits = {"train": _sequences(spool, form, tokens.end, 0, first)}
            splits["eval"] = _sequences(spool, form, tokens.end, first, rows)
            break
    if share is not None and len(splits) < 2:
        raise DataError(
            "split-empty", share=share, examples=documents, empty=({"train", "eval"} - set(splits)).pop()
        )
    if "train" not in splits:
        raise DataError("pack-no-train", src=str(path), splits=list(splits))
    return Listing(splits, (), {"token": tokens.kinds})


def _sequences(spool: _Spool, form: TextForm, end: int, first: int, stop: int) -> Split:
    step, stream = form.tokens - 1, spool.array()
    counted = np.uint16 if form.tokens <= 1 << 16 else np.uint32

    def read(i: int) -> dict[str, Any]:
        begin = (first + i) * step
        example = {"token": np.asarray(stream[begin : begin + form.tokens])}
        if form.boundaries:
            ends = np.cumsum(example["token"][:-1] == end)
            example["document"] = np.concatenate([[0], ends]).astype(counted)
        return example

    return Split(Numbered(stop - first), np.zeros(stop - first, np.int64), {}, read, spool.digest)


def _one_each(
    form: TextForm, tokens: _Tokens, spools: dict[str, _Spool], labels: dict[str, list[Any]],
    lengths: dict[str, list[int]],
) -> Listing:  # fmt: skip
    labelled, classes = labels_of(labels)
    splits = {}
    for name in labels:
        rows = spools[name].array().reshape(-1, form.tokens)
        columns = {**labelled[name], "length": np.asarray(lengths[name], np.int32)}

        def read(i: int, rows: np.ndarray = rows) -> dict[str, Any]:
            return {"token": np.asarray(rows[i])}

        content = spools[name].digest
        splits[name] = Split(Numbered(len(rows)), np.zeros(len(rows), np.int64), columns, read, content)
    below = {"label": len(classes)} if classes else {}
    return Listing(splits, classes, {"token": tokens.kinds, **below})


class _Spool:
    """Tokens in an unnamed temporary file, which is deleted with the process."""

    def __init__(self, where: Path, dtype: np.dtype):
        self.where, self.dtype, self.tokens = where, dtype, 0
        self._file: Any = None
        self._sha = hashlib.sha256()

    def write(self, tokens: Any) -> int:
        """Appends `tokens`, and returns their number."""
        block = np.asarray(tokens, self.dtype)
        try:
            if self._file is None:
                self.where.mkdir(parents=True, exist_ok=True)
                self._file = tempfile.TemporaryFile(dir=self.where)  # noqa: SIM115 (as long as the spool)
            self._file.write(block.data)
        except OSError as error:
            raise DataError(
                "pack-unwritable", path=self.where, reason=error.strerror or str(error)
            ) from error
        self._sha.update(block.data)
        self.tokens += len(block)
        return len(block)

    def array(self) -> np.ndarray:
        """All tokens as a memory-mapped array; no more may be written."""
        self._file.flush()
        return np.memmap(self._file, self.dtype, "r", shape=(self.tokens,))  # valid without the file's name

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    @property
    def digest(self) -> str:
        return self._sha.hexdigest()


def _tokens_of(form: TextForm) -> _Tokens:
    if form.tokenizer is None:
        if form.end is not None:
            wrong = "--end {end:plain} needs --tokenizer FILE.json: bytes end with 256."
            raise RecipeError("pack-end-of-bytes", wrong, end=form.end)
        return _Tokens(lambda piece: np.frombuffer(piece, np.uint8), 257, 256)
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise RecipeError("pack-library", library="tokenizers") from error
    path = Path(form.tokenizer)
    if not path.is_file():
        wrong = "{path} does not exist: expected a tokenizer.json of the tokenizers library."
        raise DataError("tokenizer-missing", wrong, path=path)
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library has no exception class
        wrong = "{path} is not a tokenizer: {reason:plain}"
        raise DataError(
            "tokenizer-damaged", wrong, path=path, reason=" ".join(str(error).split())[:160]
        ) from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    ends = [form.end] if form.end is not None else _ENDS
    end = next((token for name in ends if (token := tokenizer.token_to_id(name)) is not None), None)
    if end is None:
        wrong = "{path} has none of the tokens {names:list}: give --end TOKEN."
        raise RecipeError("tokenizer-without-end", wrong, path=path, names=list(ends))

    def encode(piece: bytes) -> list[int]:
        return tokenizer.encode(piece.decode("utf-8"), add_special_tokens=False).ids

    return _Tokens(encode, 1 + max(tokenizer.get_vocab(with_added_tokens=True).values()), end)
