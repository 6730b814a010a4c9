"""Writes the token stream of a corpus: every training document, then every validation document."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from shoal.data.config import DataConfig
from shoal.data.documents import Document, holds_ids, open_ids, read_documents
from shoal.data.sources import SourceFile
from shoal.data.tokenizer import Tokenizer
from shoal.errors import DataError

__all__ = ["StreamInfo", "in_validation", "write_stream"]

_BLOCK = 1 << 20  # ids of a memory map that are copied at a time


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
) -> StreamInfo:
    """Write the tokens of `files` to `output`, with no more than a piece of them in memory.

    Args:
        files: The files to read.
        config: The configuration, which says how to read them.
        tokenizer: The tokenizer, which gives the ids and the id that ends each document.
        output: Binary file that gets the stream, from its current position.
        validation_output: Binary, seekable, empty file that holds the validation documents until the training
            documents are written.

    Raises:
        DataError: A file cannot be read, or all files are empty.
        MissingExtraError: A format needs an optional package.
    """
    dtype = _smallest_dtype(tokenizer.vocab_size)
    train = _Part(output, dtype)
    validation = _Part(validation_output, dtype)
    for file in files:
        if holds_ids(file):
            _append_ids(file, config, tokenizer, train, validation)
            continue
        for document in read_documents(file, config.field):
            held_out = in_validation(document.name, config.validation_fraction)
            _append_document(document, tokenizer, validation if held_out else train)
    if train.length + validation.length == 0:
        raise DataError(
            f"there is no text in {', '.join(map(repr, config.sources))}",
            possible="files that are not empty",
            change="give other data, or correct data.field",
        )
    validation_output.seek(0)
    shutil.copyfileobj(validation_output, output)
    hashes = f"{train.length} {train.digest.hexdigest()} {validation.digest.hexdigest()}"
    return StreamInfo(
        dtype=dtype.str,
        tokens=train.length + validation.length,
        boundary=train.length,
        fingerprint=hashlib.sha256(hashes.encode()).hexdigest(),
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


def _append_document(document: Document, tokenizer: Tokenizer, part: _Part) -> None:
    """Add a document and the id that ends it; an empty document adds nothing."""
    if tokenizer.end_of_text is None:
        raise DataError(
            f"{document.name!r} is text, and the tokenizer {tokenizer.name!r} does not read text",
            possible="'bytes' or a tokenizer file for text; 'ids:N' for .npy and .bin files",
            change="set data.tokenizer to the tokenizer that reads this text",
        )
    before = part.length
    for piece in document.pieces:
        part.append(tokenizer.encode(piece))
    if part.length > before:
        part.append(np.array([tokenizer.end_of_text]))


def _append_ids(
    file: SourceFile, config: DataConfig, tokenizer: Tokenizer, train: _Part, validation: _Part
) -> None:
    """Add a memory map; it does not say where documents end, so its tail is for validation."""
    ids = open_ids(file, config.dtype)
    boundary = len(ids) - round(config.validation_fraction * len(ids))
    for part, first, last in ((train, 0, boundary), (validation, boundary, len(ids))):
        for start in range(first, last, _BLOCK):
            block = ids[start : min(start + _BLOCK, last)]
            smallest, largest = int(block.min()), int(block.max())
            if smallest < 0 or largest >= tokenizer.vocab_size:
                wrong = smallest if smallest < 0 else largest
                raise DataError(
                    f"{str(file.path)!r} holds the id {wrong}, and the tokenizer {tokenizer.name!r} "
                    f"has ids from 0 to {tokenizer.vocab_size - 1}",
                    possible="the tokenizer that made these ids, or 'ids:N' for ids below N",
                    change="set data.tokenizer to it, and data.dtype to the type of a .bin file",
                )
            part.append(block)


def _smallest_dtype(vocab_size: int) -> np.dtype[np.unsignedinteger]:
    for dtype in ("<u1", "<u2", "<u4"):
        if vocab_size <= 1 << 8 * np.dtype(dtype).itemsize:
            return np.dtype(dtype)
    raise AssertionError("tokenizers have at most 2**32 ids")
