"""A corpus that is tokenized while the model trains, of which a few windows are on disk.

The data is cut into chunks (`chunks.py`), whose tokens are made when they are needed and deleted later
(`chunk_store.py`). A sample is a window of the tokens of one chunk, and what is left at a chunk's end is left
out; or it is a row with a label, or a conversation. Samples have an order of their own (`stream_order.py`),
since how many there are is known only after all chunks were tokenized once. An index of a sample holds its
chunk in the high bits and its row in the low ones.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray

from shoal.collectives.thread_device import on_callers_device
from shoal.data.chat import ChatSamples
from shoal.data.chunk_store import ChunkStore
from shoal.data.corpus import Corpus, Split, require_split
from shoal.data.joined import joined
from shoal.data.labelled import LabelledSamples
from shoal.data.mixed_samples import MixedSamples
from shoal.data.packed import PackedSamples
from shoal.data.samples import TokenSamples
from shoal.data.set_aside import length_aside
from shoal.data.stream_order import StreamOrder
from shoal.data.tokenizer import Tokenizer
from shoal.data.window_order import Mark
from shoal.errors import ConfigError, DataError

CHUNKS = 16
"""Number of chunks in a window."""

_ROW_BITS = 32


@dataclass(frozen=True, kw_only=True, eq=False)
class Layout:
    """Which chunks belong to which source, and how much of each chunk is set aside."""

    ends: tuple[int, ...]
    """The chunk behind the last of each source."""
    weights: tuple[float, ...]
    """The weight of each source."""
    shares: NDArray[np.float64]
    """The share of each chunk that is set aside for validation, `[chunks]`."""


@dataclass(frozen=True, kw_only=True, eq=False)
class StreamedCorpus:
    """Training data that is tokenized while the model trains, and validation data that already is."""

    store: ChunkStore
    """The chunks of the training data."""
    layout: Layout
    """What the chunks are."""
    held_out: tuple[Corpus, ...]
    """The validation data: one corpus, or one for each source."""
    fingerprint: str
    """Equal for equal data: names and sizes of files, the tokenizer and the chunks."""

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer."""
        return self.held_out[0].tokenizer

    @property
    def labels(self) -> tuple[str, ...]:
        """The labels of the validation data, which are those of all data; empty if rows have none."""
        return self.held_out[0].labels

    @property
    def classes(self) -> tuple[str, ...]:
        """The classes that labels name, in the order of their numbers."""
        return self.held_out[0].classes

    def with_classes(self, classes: tuple[str, ...]) -> StreamedCorpus:
        """Return the corpus with its classes in this order."""
        return replace(self, held_out=tuple(each.with_classes(classes) for each in self.held_out))

    def with_types(self, has_types: bool) -> StreamedCorpus:
        """Return the corpus for a model that takes `token_type_ids`, or for one that takes none."""
        return replace(self, held_out=tuple(each.with_types(has_types) for each in self.held_out))

    def samples(
        self, split: Split, sequence: int
    ) -> StreamedSamples | MixedSamples | TokenSamples | PackedSamples | LabelledSamples | ChatSamples:
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
            return StreamedSamples(self.store, self.layout, self.held_out[0], sequence)
        try:
            parts = [each.samples_of(each.tokens, sequence, seed=0) for each in self.held_out]
        except DataError as error:
            raise DataError(
                f"of the data for validation: {error.given}",
                possible=error.possible,
                change="give more data, or a shorter sequence length; or name other data in data.validation",
            ) from error
        if isinstance(parts[0], ChatSamples):
            parts[0].require_answers()
        if len(parts) == 1:
            return parts[0]
        texts = [each for each in parts if isinstance(each, TokenSamples | PackedSamples)]
        return MixedSamples(texts, self.layout.weights)


@final
class StreamedSamples:
    """Samples of chunks that are made when they are reached, one window of chunks ahead.

    Args:
        store: The chunks.
        layout: What the chunks are.
        form: A corpus that makes samples of the tokens of a chunk.
        sequence: Tokens that the model sees at once.
        width: Number of chunks in a window.

    Raises:
        ConfigError: `sequence` is not positive.
        DataError: A source has no chunk with one sample.
    """

    deterministic = True

    def __init__(
        self, store: ChunkStore, layout: Layout, form: Corpus, sequence: int, width: int = CHUNKS
    ) -> None:
        if sequence < 1:
            raise ConfigError(
                f"the sequence length is {sequence}",
                possible="a positive number of tokens",
                change="set the sequence length to 1 or more",
            )
        self._store = store
        self._layout = layout
        self._form = form
        self._width = width
        self._has_rows = bool(form.labels) or form.has_conversations
        self.sequence = sequence
        self.all_targets_count = form.end is None and not form.has_conversations
        self.is_packed = form.end is not None
        self._orders: dict[int, StreamOrder] = {}
        self._reached: dict[int, int] = {}
        self._mutex = threading.RLock()
        self._open = lru_cache(2 * width * len(layout.ends))(self._open_chunk)
        begin = 0
        for end in layout.ends:
            if not any(self._size(number, store.length(number)) for number in range(begin, end)):
                raise DataError(
                    "no chunk of the data has a row"
                    if self._has_rows
                    else f"no chunk of the text has the {sequence + 1} tokens of one sample",
                    possible="a data.window that is many times a sample",
                    change="give more data, a shorter sequence length, or a larger data.window",
                )
            begin = end

    def __len__(self) -> int:
        """Return the number of samples in the chunks that were tokenized so far."""
        return int(self._size(np.arange(len(self._store)), np.maximum(0, self._store.lengths)).sum())

    def ordered(self, seed: int, position: int, count: int) -> NDArray[np.int64]:
        """Return the indices of the samples at the global positions `[position, position + count)`.

        Raises:
            DataError: A chunk cannot be made.
        """
        with self._mutex:
            order = self._order(seed)
            for source in range(len(self._layout.ends)):
                window = order.window_at(source, position)
                if window != self._reached.get(source):
                    self._reached[source] = window
                    self._store.make(order.chunks(source, window))
                    following = order.chunks(source, window + 1)
                    make = on_callers_device(self._make_ahead)  # with a user's tokenizer
                    threading.Thread(target=make, args=(following,), daemon=True).start()
            chunks, rows = order.places(position, count)
        return chunks << _ROW_BITS | rows

    def mark(self, seed: int, position: int) -> list[Mark]:
        """Return where the windows of a position begin, from which `take` lets another process go on."""
        with self._mutex:
            return self._order(seed).mark(position)

    def take(self, seed: int, mark: Sequence[Sequence[int]]) -> None:
        """Take note of where windows begin, so that nothing before them has to be tokenized."""
        with self._mutex:
            self._order(seed).take(mark)

    def batch(self, indices: NDArray[np.int64]) -> tuple[Any, torch.Tensor]:
        """Return inputs and targets of the samples at `indices`, as the samples of a whole corpus do."""
        rows = indices & ((1 << _ROW_BITS) - 1)
        return joined(indices >> _ROW_BITS, lambda chunk, here: self._open(chunk).batch(rows[here]))

    def _open_chunk(self, chunk: int) -> TokenSamples | PackedSamples | LabelledSamples | ChatSamples:
        return self._form.samples_of(self._store.tokens(chunk), self.sequence)

    def _order(self, seed: int) -> StreamOrder:
        if seed not in self._orders:
            layout = self._layout
            self._orders[seed] = StreamOrder(seed, layout.ends, layout.weights, self._width, self._sizes)
        return self._orders[seed]

    def _sizes(self, chunks: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the number of samples of some chunks, which are made if it is not known."""
        if (self._store.lengths[chunks] < 0).any():
            self._store.make(chunks)
        return self._size(chunks, np.array([self._store.length(int(chunk)) for chunk in chunks]))

    def _size(self, chunks: int | NDArray[np.int64], lengths: int | NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the number of samples of chunks with these lengths."""
        kept = np.asarray(lengths - length_aside(lengths, self._layout.shares[chunks]))
        return kept if self._has_rows else np.maximum(0, kept - 1) // self.sequence

    def _make_ahead(self, chunks: NDArray[np.int64]) -> None:
        with contextlib.suppress(Exception):  # who needs these chunks meets the error again
            self._store.make(chunks, wait=False)
