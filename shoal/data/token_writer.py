"""Writes the token stream of a corpus: every training document, then every validation document.

A document ends with the tokenizer's id for the end of a text. Labelled texts and conversations end with ids
of their own: see `shoal.data.labelled` and `shoal.data.chat`.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterable, Iterator, Sized
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from shoal.data.config import DataConfig
from shoal.data.encoding import Conversation, Payload, encoded, holds_ids, open_ids, read_documents
from shoal.data.labelled import MOST_CLASSES, Labels
from shoal.data.rows import SUFFIXES, holds_rows, read_conversations, read_rows
from shoal.data.sources import SourceFile
from shoal.data.tokenizer import Tokenizer
from shoal.errors import DataError

_BLOCK = 1 << 20  # ids of a memory map that are read at a time


@dataclass(frozen=True, kw_only=True)
class StreamInfo:
    """Facts about a token stream."""

    dtype: str
    """The smallest of uint8, uint16 and uint32 that holds the vocabulary, as numpy writes it."""
    tokens: int
    """The length of the stream."""
    boundary: int
    """Where the training documents end and the validation documents begin."""
    fingerprint: str
    """A hash of the tokens and the boundary: equal for equal corpora, wherever their files are."""
    labels: tuple[str, ...] = ()
    """The labels in the order in which they appear; empty if documents have none."""
    is_mapped: bool = False
    """Whether the ids stay in the files of the sources, and the stream is not written."""


def in_validation(name: str, fraction: float) -> bool:
    """Return whether a document is in validation; a hash of its name decides, not other documents."""
    digest = hashlib.blake2b(name.encode("utf-8", errors="surrogateescape"), digest_size=8).digest()
    return int.from_bytes(digest, "big") < fraction * 2.0**64


def write_stream(
    files: Iterable[SourceFile],
    config: DataConfig,
    tokenizer: Tokenizer,
    output: BinaryIO,
    validation_output: BinaryIO,
    validation_files: Iterable[SourceFile] = (),
) -> StreamInfo:
    """Write the tokens of `files` to `output`, with no more than a piece of them in memory.

    Args:
        files: The files to read.
        config: The configuration, which says how to read them.
        tokenizer: The tokenizer, which gives the ids and the id that ends each document.
        output: Binary file that gets the stream, from its current position.
        validation_output: Binary, seekable, empty file that holds the validation documents until the training
            documents are written.
        validation_files: Files for validation only; if there are none, a share of the documents is.

    Raises:
        DataError: A file cannot be read, all files are empty, or labels are no classes.
        MissingExtraError: A format needs an optional package.
    """
    labels = Labels(config.label) if config.label else None
    dtype = _dtype(config, tokenizer)
    train, validation = _Part(output, dtype), _Part(validation_output, dtype)
    held_out = list(validation_files)
    split = _Split(0.0 if held_out else config.validation_fraction, train, validation)
    only_validation = _Split(1.0, train, validation)

    def items() -> Iterator[tuple[_Entry, Payload]]:
        for some, where in ((files, split), (held_out, only_validation)):
            for file in some:
                yield from _items(file, config, tokenizer, labels, where)

    for entry, ids in encoded(items(), config, tokenizer, config.workers):
        entry.take(ids)
    if train.length + validation.length == 0:
        raise DataError(
            f"there is no text in {', '.join(map(repr, config.sources))}",
            possible="files that are not empty",
            change="give other data, or correct data.field",
        )
    if labels is not None:
        labels.require_classes()
    validation_output.seek(0)
    shutil.copyfileobj(validation_output, output)
    hashes = f"{train.length} {train.digest.hexdigest()} {validation.digest.hexdigest()}"
    if labels is not None:
        hashes += f" {list(labels.places)}"
    return StreamInfo(
        dtype=dtype.str,
        tokens=train.length + validation.length,
        boundary=train.length,
        fingerprint=hashlib.sha256(hashes.encode()).hexdigest(),
        labels=() if labels is None else tuple(labels.places),
    )


def write_documents(
    files: Iterable[SourceFile],
    config: DataConfig,
    tokenizer: Tokenizer,
    output: BinaryIO,
    labels: Labels | None = None,
) -> StreamInfo:
    """Write the tokens of the documents of `files`, all for training, to `output`; no workers encode them.

    Args:
        files: The files, or parts of them.
        config: The configuration, which says how to read them.
        tokenizer: The tokenizer.
        output: Binary file that gets the tokens, from its current position.
        labels: The labels of the data, if its rows have labels.

    Raises:
        DataError: A file cannot be read.
        MissingExtraError: A format needs an optional package.
    """
    dtype = _dtype(config, tokenizer)
    part = _Part(output, dtype)
    split = _Split(0.0, part, part)
    items = (item for file in files for item in _items(file, config, tokenizer, labels, split))
    for entry, ids in encoded(items, config, tokenizer):
        entry.take(ids)
    return StreamInfo(
        dtype=dtype.str, tokens=part.length, boundary=part.length, fingerprint=part.digest.hexdigest()
    )


class _Part:
    """The training or the validation part, as it grows."""

    def __init__(self, file: BinaryIO, dtype: np.dtype[np.unsignedinteger]) -> None:
        self._file = file
        self._dtype = dtype
        self.length = 0
        self.digest = hashlib.sha256()

    def append(self, ids: NDArray[np.integer]) -> None:
        data = np.ascontiguousarray(ids, dtype=self._dtype).data
        self._file.write(data)
        self.digest.update(data)
        self.length += len(ids)


@dataclass(frozen=True, slots=True)
class _Split:
    """Where documents go: a share of them to validation, the others to train."""

    share: float
    train: _Part
    validation: _Part

    def part(self, name: str) -> _Part:
        """Return the part of a document."""
        return self.validation if in_validation(name, self.share) else self.train


@dataclass(slots=True)
class _Entry:
    """A document or a row on its way to a part.

    Attributes:
        part: The part that gets its ids.
        end: The id that ends it; None if none does.
        empty: The error if one of its texts has no ids; None if it may be empty, and then adds nothing.
        length: The number of its ids so far.
    """

    part: _Part
    end: int | None
    empty: DataError | None = None
    length: int = 0

    def take(self, ids: NDArray[np.integer] | None) -> None:
        """Add ids; None: it ends."""
        if ids is None:
            if self.length and self.end is not None:
                self.part.append(np.array([self.end]))
            return
        if self.empty is not None and not len(ids):
            raise self.empty
        self.part.append(ids)
        self.length += len(ids)


def _items(
    file: SourceFile, config: DataConfig, tokenizer: Tokenizer, labels: Labels | None, split: _Split
) -> Iterator[tuple[_Entry, Payload]]:
    """Yield what a file holds, as the configuration says how to read it."""
    if labels is not None:
        return _labelled(file, config, tokenizer, labels, split)
    if config.messages:
        return _conversations(file, config, tokenizer, split)
    if holds_ids(file):
        return _ids(file, config, tokenizer, split)
    return _documents(file, config, tokenizer, split)


def _documents(
    file: SourceFile, config: DataConfig, tokenizer: Tokenizer, split: _Split
) -> Iterator[tuple[_Entry, Payload]]:
    """Yield the documents of a file."""
    for document in read_documents(file, config.field):
        if tokenizer.end_of_text is None:
            raise DataError(
                f"{document.name!r} is text, and the tokenizer {tokenizer.name!r} does not read text",
                possible="'bytes' or a tokenizer file for text; 'ids:N' for .npy and .bin files",
                change="set data.tokenizer to the tokenizer that reads this text",
            )
        entry = _Entry(split.part(document.name), tokenizer.end_of_text)
        for piece in document.pieces:
            yield entry, piece
        if not document.ends:
            entry.end = None
        yield entry, None


def _labelled(
    file: SourceFile, config: DataConfig, tokenizer: Tokenizer, labels: Labels, split: _Split
) -> Iterator[tuple[_Entry, Payload]]:
    """Yield the rows of a file, each with the id of its label, and with an id between two texts."""
    require_rows(file, "label")
    for row in read_rows(file, config.field, config.label, config.pair):
        label, place = labels.place(row)
        part = split.part(f"{file.name}#{row.number}")
        if part is split.train:
            labels.trained.add(label)
        texts = {config.field: row.text} | ({} if row.second is None else {config.pair: row.second})
        for column, text in texts.items():
            if not text.strip():
                raise _empty(row.place, column)
        entry = _Entry(part, tokenizer.vocab_size + 1 + place, _empty(row.place, " or ".join(texts)))
        yield entry, row.text
        if row.second is not None:
            yield entry, np.array([tokenizer.vocab_size])
            yield entry, row.second
        yield entry, None


def _conversations(
    file: SourceFile, config: DataConfig, tokenizer: Tokenizer, split: _Split
) -> Iterator[tuple[_Entry, Payload]]:
    """Yield the conversations of a file."""
    require_rows(file, "messages")
    for place, number, messages in read_conversations(file, config.messages):
        entry = _Entry(split.part(f"{file.name}#{number}"), 2 * tokenizer.vocab_size)
        yield entry, Conversation(messages, place)
        yield entry, None


def _empty(place: str, column: str) -> DataError:
    return DataError(
        f"{place} has an empty text in {column!r}",
        possible="a text of at least one token in each row",
        change="remove the row",
    )


def require_rows(file: SourceFile, key: str) -> None:
    """Refuse a file without columns, where `data.key` names one.

    Raises:
        DataError: It has none.
    """
    if not holds_rows(file):
        raise DataError(
            f"{file.place!r} has no columns, and data.{key} names one",
            possible=", ".join(SUFFIXES) + " files, and datasets:PATH",
            change=f"give such files, and leave others out with data.suffixes; or leave out data.{key}",
        )


def id_parts(
    files: Iterable[SourceFile], config: DataConfig, validation_files: Iterable[SourceFile]
) -> list[NDArray[np.integer]]:
    """Return the ids of .npy and .bin files, memory-mapped, in the order of the stream.

    Args:
        files: The files, of which `holds_ids` is true, on this machine.
        config: The configuration, which says how to read them.
        validation_files: Files for validation only, of which `holds_ids` is true too.

    Raises:
        DataError: A file cannot be read.
    """
    trained = [_map_ids(file, config) for file in files]
    held_out = [_map_ids(file, config) for file in validation_files]
    if held_out or len(trained) == 1:
        return [*trained, *held_out]
    bounds = [_boundary(ids, config.validation_fraction) for ids in trained]
    cut = list(zip(trained, bounds, strict=True))
    return [*(ids[:bound] for ids, bound in cut), *(ids[bound:] for ids, bound in cut)]


def _map_ids(file: SourceFile, config: DataConfig) -> NDArray[np.integer]:
    ids = open_ids(file, config.dtype)
    assert isinstance(ids, np.ndarray)  # on this machine
    return ids


def _boundary(ids: Sized, share: float) -> int:
    """Return where the tail begins that is for validation: nothing says where documents end."""
    return len(ids) - round(share * len(ids))


def _ids(
    file: SourceFile, config: DataConfig, tokenizer: Tokenizer, split: _Split
) -> Iterator[tuple[_Entry, Payload]]:
    """Yield the ids of a file, block by block."""
    ids = open_ids(file, config.dtype)
    boundary = _boundary(ids, split.share)
    parts = (split.train, 0, boundary), (split.validation, boundary, len(ids))
    for part, first, last in parts if file.part is None else ((split.train, *file.part),):
        entry = _Entry(part, None)
        for start in range(first, last, _BLOCK):
            block = ids[start : min(start + _BLOCK, last)]
            smallest, largest = int(block.min()), int(block.max())
            if smallest < 0 or largest >= tokenizer.vocab_size:
                wrong = smallest if smallest < 0 else largest
                raise DataError(
                    f"{file.place!r} holds the id {wrong}, and the tokenizer {tokenizer.name!r} "
                    f"has ids from 0 to {tokenizer.vocab_size - 1}",
                    possible="the tokenizer that made these ids, or 'ids:N' for ids below N",
                    change="set data.tokenizer to it, and data.dtype to the type of a .bin file",
                )
            yield entry, block


def first_end(config: DataConfig, tokenizer: Tokenizer) -> int | None:
    """Return the smallest id that ends a row; None if the stream is one of texts, not of rows."""
    if config.messages:
        return 2 * tokenizer.vocab_size
    return tokenizer.vocab_size + 1 if config.label else None


def _dtype(config: DataConfig, tokenizer: Tokenizer) -> np.dtype[np.unsignedinteger]:
    """Return the type of a stream, which holds the ids that end rows beside those of the tokenizer."""
    size = tokenizer.vocab_size
    if config.messages:
        return _smallest_dtype(2 * size + 1)
    return _smallest_dtype(size + 1 + MOST_CLASSES if config.label else size)


def _smallest_dtype(vocab_size: int) -> np.dtype[np.unsignedinteger]:
    for dtype in ("<u1", "<u2", "<u4"):
        if vocab_size <= 1 << 8 * np.dtype(dtype).itemsize:
            return np.dtype(dtype)
    raise AssertionError("tokenizers have at most 2**32 ids")
