"""What a stream sets aside for validation if no other data is given for it.

A stream is never read whole before the training, so a few chunks give all of the validation data: 16 that
are spread evenly over the data, or all if there are fewer. Each gives its last tokens or rows, as many as
make up `data.validation_fraction` of all data, and at most the whole chunk. The classes of labelled rows are
those that are found in these chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from shoal.data.bounds import text_bounds
from shoal.data.cache import Entry, read_or_write_entry
from shoal.data.chunks import Chunk
from shoal.data.config import DataConfig
from shoal.data.labels import Labels
from shoal.data.rows import read_rows
from shoal.data.stream import StreamInfo, first_end, write_documents
from shoal.data.tokenizer import Tokenizer

_POOL = 16


def shares_aside(chunks: int, fraction: float) -> NDArray[np.float64]:
    """Return the share of each chunk that is set aside, `[chunks]`; `fraction` is that of all data."""
    pool = min(_POOL, chunks)
    shares = np.zeros(chunks)
    shares[(2 * np.arange(pool) + 1) * chunks // (2 * pool)] = min(1.0, fraction * chunks / pool)
    return shares


def length_aside(lengths: int | NDArray[np.int64], shares: float | NDArray[np.float64]) -> NDArray[np.int64]:
    """Return how many tokens, or rows, of chunks of these lengths are set aside: a part is one at least.

    Of a chunk that is not set aside whole, one at least is left.
    """
    lengths, shares = np.asarray(lengths), np.asarray(shares)
    part = np.minimum(np.ceil(lengths * shares), np.maximum(0, lengths - 1))
    aside: NDArray[np.int64] = np.where(shares < 1, part, lengths).astype(np.int64)
    return aside


def tokens_aside(
    directory: Path,
    key: str,
    chunks: Sequence[Chunk],
    shares: NDArray[np.float64],
    config: DataConfig,
    tokenizer: Tokenizer,
) -> Entry:
    """Return what is set aside, from the cache if it is there: its tokens, and the labels of the data.

    Args:
        directory: Directory of the entry.
        key: Name of the entry.
        chunks: All chunks.
        shares: The share of each that is set aside, `[chunks]`.
        config: The configuration, which says how to read them.
        tokenizer: The tokenizer.

    Raises:
        DataError: A chunk cannot be read, or its labels are no classes.
        OSError: The directory cannot be used.
    """
    pool = [(chunks[number], float(shares[number])) for number in np.flatnonzero(shares).tolist()]

    def write(output: BinaryIO, scratch: BinaryIO) -> StreamInfo:
        labels = _labels([chunk for chunk, _ in pool], config) if config.label else None
        dtype, count = "<u1", 0
        for chunk, share in pool:
            scratch.seek(0)
            scratch.truncate()
            info = write_documents(chunk, config, tokenizer, scratch, labels)
            scratch.flush()
            if info.tokens:
                tokens = np.memmap(scratch, dtype=info.dtype, mode="r", shape=(info.tokens,))
                aside = _last(tokens, share, first_end(config, tokenizer))
                output.write(aside.tobytes())
                count += len(aside)
            dtype = info.dtype
        return StreamInfo(
            dtype=dtype,
            tokens=count,
            boundary=0,
            fingerprint="",
            labels=() if labels is None else tuple(labels.places),
        )

    return read_or_write_entry(directory, key, write)


def _labels(chunks: Sequence[Chunk], config: DataConfig) -> Labels:
    labels = Labels(config.label)
    for chunk in chunks:
        for file in chunk:
            for row in read_rows(file, config.field, config.label, config.pair):
                labels.trained.add(labels.place(row)[0])
    labels.require_classes()
    return labels


def _last(tokens: NDArray[np.integer], share: float, first: int | None) -> NDArray[np.integer]:
    """Return the last tokens of a chunk, or those of its last rows if ids from `first` on end rows."""
    if first is None:
        return tokens[len(tokens) - int(length_aside(len(tokens), share)) :]
    starts, _ = text_bounds(tokens, first)
    aside = int(length_aside(len(starts), share))
    return tokens[starts[len(starts) - aside] :] if aside else tokens[:0]
