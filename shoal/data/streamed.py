"""A corpus that is tokenized while the model trains, of which a few windows are on disk.

Text is cut into chunks (`chunks.py`), whose tokens are made when they are needed and deleted later
(`chunk_store.py`). A sample is a window of the tokens of one chunk, and what is left at a chunk's end is left
out. Samples have an order of their own (`window_order.py`), since how many there are is known only after all
chunks were tokenized once. An index of a sample holds its chunk in the high bits and its row in the low ones.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from typing import final

import numpy as np
import torch
from numpy.typing import NDArray

from shoal.data.cache import default_directory
from shoal.data.chunk_store import ChunkStore
from shoal.data.chunks import plan_chunks
from shoal.data.config import DataConfig
from shoal.data.corpus import Corpus, Split, require_end, require_split
from shoal.data.corpus import prepare as prepare_whole
from shoal.data.packed import Packed, PackedSamples, kept_apart
from shoal.data.samples import TokenSamples
from shoal.data.sources import find_files
from shoal.data.tokenizer import Tokenizer, open_tokenizer
from shoal.data.window_order import Mark, WindowOrder
from shoal.errors import ConfigError, DataError
from shoal.units import parse_bytes

__all__ = ["StreamedCorpus", "StreamedSamples", "prepare_streamed"]

_FORMAT = 1  # version of chunks and of their order; a new version makes other data
_CHUNKS = 16  # chunks in a window
_KEPT_WINDOWS = 3  # the one that is read, the one that is made, and one for ranks that are behind
_ROW_BITS = 32


def prepare_streamed(config: DataConfig) -> StreamedCorpus:
    """Find the sources of `config` and cut them into chunks; tokenize only the validation data.

    Raises:
        DataError: A source or the tokenizer is missing, empty or unreadable, or cannot be streamed.
        MissingExtraError: A format or the tokenizer needs an optional package.
    """
    tokenizer = open_tokenizer(config.tokenizer)
    require_end(config, tokenizer)
    files = find_files(config.sources, config.suffixes)
    chunks = plan_chunks(files, max(1, parse_bytes(config.window) // _CHUNKS))
    data = [
        _FORMAT,
        tokenizer.identity,
        config.field,
        parse_bytes(config.window),
        [(file.name, file.size) for file in files],
    ]
    fingerprint = hashlib.sha256(json.dumps(data).encode()).hexdigest()
    places = [(str(file.path), file.modified) for file in files]
    key = hashlib.sha256(json.dumps([fingerprint, places]).encode()).hexdigest()[:32]
    try:
        directory = config.cache.expanduser() if config.cache else default_directory()
    except OSError as error:
        raise DataError(
            f"there is no folder for tokens: {error}",
            possible="a folder that this user may write",
            change="set data.cache",
        ) from error
    store = ChunkStore(directory / f"stream-{key}", chunks, config, _KEPT_WINDOWS * _CHUNKS)
    held_out = config.model_copy(
        update={"source": config.validation, "validation": "", "validation_fraction": 0.0}
    )
    end = tokenizer.end_of_text if config.boundaries else None
    return StreamedCorpus(store, prepare_whole(held_out), fingerprint, tokenizer, end)


@final
class StreamedCorpus:
    """Training data that is tokenized while the model trains, and validation data that is tokenized before.

    Args:
        store: The chunks of the training data.
        held_out: The validation data.
        fingerprint: Equal for equal data: names and sizes of files, the tokenizer and the chunks.
        tokenizer: The tokenizer.
        end: The id that ends each document, if samples keep documents apart.
    """

    labels: tuple[str, ...] = ()
    """Streamed texts have no labels."""

    def __init__(
        self, store: ChunkStore, held_out: Corpus, fingerprint: str, tokenizer: Tokenizer, end: int | None
    ) -> None:
        self._store = store
        self._held_out = held_out
        self.fingerprint = fingerprint
        self.tokenizer = tokenizer
        self._end = end

    def samples(self, split: Split, sequence: int) -> StreamedSamples | TokenSamples | PackedSamples:
        """Return the samples of a split.

        Args:
            split: "train" or "validation".
            sequence: Tokens that the model sees at once.

        Raises:
            ConfigError: There is no such split, or `sequence` is not positive.
            DataError: The split has no sample.
        """
        require_split(split)
        if split == "train":
            return StreamedSamples(self._store, sequence, self._end)
        samples = TokenSamples(self._held_out.tokens, sequence)
        return samples if self._end is None else PackedSamples(samples, self._end)


@final
class StreamedSamples:
    """Samples of chunks that are made when they are reached, one window of chunks ahead.

    Args:
        store: The chunks.
        sequence: Tokens that the model sees at once.
        end: The id that ends each document, if samples keep documents apart.
        width: Number of chunks in a window.

    Raises:
        ConfigError: `sequence` is not positive.
        DataError: No chunk has as many tokens as one sample.
    """

    deterministic = True

    def __init__(
        self, store: ChunkStore, sequence: int, end: int | None = None, width: int = _CHUNKS
    ) -> None:
        if sequence < 1:
            raise ConfigError(
                f"the sequence length is {sequence}",
                possible="a positive number of tokens",
                change="set the sequence length to 1 or more",
            )
        self._store = store
        self._end = end
        self._width = width
        self._within = np.arange(sequence + 1)
        self.sequence = sequence
        self.all_targets_count = end is None
        self._orders: dict[int, WindowOrder] = {}
        self._reached: int | None = None
        self._mutex = threading.RLock()
        if not any(self._size(store.length(number)) for number in range(len(store))):
            raise DataError(
                f"no chunk of the text has the {sequence + 1} tokens of one sample",
                possible="a data.window that is many times a sample",
                change="give more data, a shorter sequence length, or a larger data.window",
            )

    def __len__(self) -> int:
        """Return the number of samples in the chunks that were tokenized so far."""
        return int(self._size(self._store.lengths).sum())

    def ordered(self, seed: int, position: int, count: int) -> NDArray[np.int64]:
        """Return the indices of the samples at the global positions `[position, position + count)`.

        Raises:
            DataError: A chunk cannot be made.
        """
        with self._mutex:
            order = self._order(seed)
            window = order.window_at(position)
            if window != self._reached:
                self._reached = window
                self._store.make(order.chunks(window))
                ahead = threading.Thread(
                    target=self._make_ahead, args=(order.chunks(window + 1),), daemon=True
                )
                ahead.start()
            chunks, rows = order.places(position, count)
        return chunks << _ROW_BITS | rows

    def mark(self, seed: int, position: int) -> Mark:
        """Return where the window of a position begins, from which `take` lets another process go on."""
        with self._mutex:
            return self._order(seed).mark(position)

    def take(self, seed: int, mark: tuple[int, int]) -> None:
        """Take note of where a window begins, so that nothing before it has to be tokenized."""
        with self._mutex:
            self._order(seed).take(Mark(*mark))

    def batch(self, indices: NDArray[np.int64]) -> tuple[torch.Tensor | Packed, torch.Tensor]:
        """Return inputs and targets of the samples at `indices`, int64 `[batch, seq]` each."""
        chunks, rows = indices >> _ROW_BITS, indices & ((1 << _ROW_BITS) - 1)
        windows = np.empty((len(indices), self.sequence + 1), dtype=np.int64)
        for chunk in np.unique(chunks):
            here = chunks == chunk
            tokens = self._store.tokens(int(chunk))
            windows[here] = tokens[rows[here][:, None] * self.sequence + self._within]
        inputs = torch.from_numpy(windows[:, :-1].copy())
        targets = torch.from_numpy(windows[:, 1:].copy())
        return (inputs, targets) if self._end is None else kept_apart(inputs, targets, self._end)

    def _order(self, seed: int) -> WindowOrder:
        if seed not in self._orders:
            self._orders[seed] = WindowOrder(seed, len(self._store), self._width, self._sizes)
        return self._orders[seed]

    def _sizes(self, chunks: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the number of samples of some chunks, which are made if it is not known."""
        if (self._store.lengths[chunks] < 0).any():
            self._store.make(chunks)
        return self._size(np.array([self._store.length(int(chunk)) for chunk in chunks]))

    def _size(self, lengths: int | NDArray[np.int64]) -> NDArray[np.int64]:
        size: NDArray[np.int64] = np.maximum(0, np.asarray(lengths) - 1) // self.sequence
        return size

    def _make_ahead(self, chunks: NDArray[np.int64]) -> None:
        with contextlib.suppress(Exception):  # who needs these chunks meets the error again
            self._store.make(chunks, wait=False)
