"""A corpus that is tokenized while the model trains, of which a few windows are on disk.

The data is cut into chunks, whose tokens are made when they are needed and deleted later
(`chunk_store.py`). A sample is a window of the tokens of one chunk, and what is left at a chunk's end is left
out; or it is a row with a label, or a conversation. Samples have an order of their own,
since how many there are is known only after all chunks were tokenized once. An index of a sample holds its
chunk in the high bits and its row in the low ones.

Turns: which of several sources gives the sample at each position, in the shares of their weights.

Of the first n positions, the first source has floor(n * w), where w is its share. The second source takes its
part of those that are left in the same way, and so on; the last one has the rest. So the number of positions
that a source had before any n is a formula, and never more than one off for each source before it. Positions
are taken in blocks; within a block a permutation mixes the sources.

The order of streamed samples: chunks in a shuffled order, and samples shuffled within windows of chunks.

In each epoch the chunks are permuted. Each `width` chunks that follow each other are a window, and the
samples of a window are permuted. So each sample comes once an epoch, and the order depends on the seed and
the number of samples of each chunk only. How many samples a chunk has is asked when its window is reached.

What a stream sets aside for validation if no other data is given for it.

A stream is never read whole before the training, so a few chunks give all of the validation data: 16 that
are spread evenly over the data, or all if there are fewer. Each gives its last tokens or rows, as many as
make up `data.validation_fraction` of all data, and at most the whole chunk. The classes of labelled rows are
those that are found in these chunks.
"""

from __future__ import annotations

import bisect
import contextlib
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, final

import numpy as np
import torch
from numpy.typing import NDArray

from shoal.collectives.thread_device import on_callers_device
from shoal.data.bounds import text_bounds
from shoal.data.cache import Entry, read_or_write_entry
from shoal.data.chat import ChatSamples
from shoal.data.chunk_store import Chunk, ChunkStore
from shoal.data.config import DataConfig
from shoal.data.corpus import Corpus, Split, require_split
from shoal.data.labelled import LabelledSamples, Labels
from shoal.data.packed import MixedSamples, PackedSamples, joined
from shoal.data.permutation import order
from shoal.data.rows import read_rows
from shoal.data.samples import TokenSamples
from shoal.data.token_writer import StreamInfo, first_end, write_documents
from shoal.data.tokenizer import Tokenizer
from shoal.errors import ConfigError, DataError

_BLOCK = 1024


@final
class Turns:
    """The source of each position.

    Args:
        seed: Seed of the order of the sources within a block.
        weights: The weight of each source, positive.
    """

    def __init__(self, seed: int, weights: Sequence[float]) -> None:
        exact = [Fraction(weight) for weight in weights]
        self._seed = seed
        self._parts = [weight / sum(exact[place:]) for place, weight in enumerate(exact)]
        self._block = lru_cache(4)(self._make_block)

    def before(self, position: int) -> NDArray[np.int64]:
        """Return how many positions below this one each source has, `[sources]`."""
        block, offset = divmod(position, _BLOCK)
        within = np.bincount(self._block(block)[:offset], minlength=len(self._parts))
        return self._counts(block * _BLOCK) + within

    def sources(self, position: int, count: int) -> NDArray[np.int64]:
        """Return the source of each of the positions `[position, position + count)`."""
        first, last = position // _BLOCK, (position + count) // _BLOCK
        blocks = np.concatenate([self._block(block) for block in range(first, last + 1)])
        return blocks[position - first * _BLOCK :][:count]

    def _counts(self, position: int) -> NDArray[np.int64]:
        counts = []
        for part in self._parts:
            counts.append(position * part.numerator // part.denominator)
            position -= counts[-1]
        return np.array(counts, dtype=np.int64)

    def _make_block(self, block: int) -> NDArray[np.int64]:
        begin = block * _BLOCK
        counts = self._counts(begin + _BLOCK) - self._counts(begin)
        sources = np.repeat(np.arange(len(counts)), counts)
        return sources[order(self._seed, block, _BLOCK, np.arange(_BLOCK))]


class Mark(NamedTuple):
    """Where a window begins.

    Attributes:
        position: Global position of its first sample.
        window: Its number, counted over all epochs.
    """

    position: int
    window: int


@final
class WindowOrder:
    """The chunk and the row of the sample at each global position.

    Args:
        seed: Seed of the order.
        chunks: Number of chunks.
        width: Number of chunks in a window.
        sizes: Function that returns the number of samples of some chunks; in all chunks together there is at
            least one.
    """

    def __init__(
        self, seed: int, chunks: int, width: int, sizes: Callable[[NDArray[np.int64]], NDArray[np.int64]]
    ) -> None:
        self._seed = seed
        self._chunks = chunks
        self._width = width
        self._per_epoch = -(-chunks // width)
        self._sizes = sizes
        self._marks = [Mark(0, 0)]
        self._last: tuple[int, NDArray[np.int64], NDArray[np.int64]] | None = None

    def chunks(self, window: int) -> NDArray[np.int64]:
        """Return the chunks of a window, `[width]` or fewer."""
        epoch, place = divmod(window, self._per_epoch)
        begin = place * self._width
        return order(
            self._seed, epoch, self._chunks, np.arange(begin, min(begin + self._width, self._chunks))
        )

    def places(self, position: int, count: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the chunk, and the row in it, at each position `[position, position + count)`."""
        parts = [(np.empty(0, dtype=np.int64),) * 2]
        end = position + count
        while position < end:
            mark = self._mark_at(position)
            chunks, ends = self._window(mark.window)
            size = int(ends[-1])
            first = position - mark.position
            stop = min(size, first + end - position)
            # The complement of the seed: the seed itself permutes the chunks.
            rows = order(~self._seed, mark.window, size, np.arange(first, stop, dtype=np.int64))
            sources = np.searchsorted(ends, rows, side="right")
            begins = np.concatenate(([0], ends[:-1]))
            parts.append((chunks[sources], rows - begins[sources]))
            position += stop - first
        chunks, rows = (np.concatenate(each) for each in zip(*parts, strict=True))
        return chunks, rows

    def window_at(self, position: int) -> int:
        """Return the number of the window that holds a position."""
        return self._mark_at(position).window

    def mark(self, position: int) -> Mark:
        """Return the last window that is known to begin at a position or before it."""
        return self._marks[bisect.bisect_right(self._marks, (position, np.inf)) - 1]

    def take(self, mark: Mark) -> None:
        """Take note of where a window begins, as `mark` of the same order told."""
        place = bisect.bisect_left(self._marks, mark)
        if self._marks[place : place + 1] != [mark]:
            self._marks.insert(place, mark)

    def _mark_at(self, position: int) -> Mark:
        mark = self.mark(position)
        while True:
            following = Mark(mark.position + int(self._window(mark.window)[1][-1]), mark.window + 1)
            if position < following.position:
                return mark
            self.take(following)
            mark = following

    def _window(self, window: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the chunks of a window, and where the samples of each end among those of the window."""
        if self._last is None or self._last[0] != window:
            chunks = self.chunks(window)
            self._last = window, chunks, np.cumsum(self._sizes(chunks))
        return self._last[1:]


_STEP = 0x9E3779B97F4A7C15  # between the seeds of sources

Sizes = Callable[[NDArray[np.int64]], NDArray[np.int64]]


@final
class StreamOrder:
    """The chunk and the row of the sample at each global position.

    Args:
        seed: Seed of the order.
        ends: The chunk behind the last of each source: each has at least one chunk, and one sample.
        weights: The weight of each source.
        width: Number of chunks in a window.
        sizes: Function that returns the number of samples of some chunks.
    """

    def __init__(
        self, seed: int, ends: Sequence[int], weights: Sequence[float], width: int, sizes: Sizes
    ) -> None:
        self._begins = [0, *ends[:-1]]
        self._turns = Turns(seed, weights)
        self._orders = [
            WindowOrder(seed + number * _STEP, end - begin, width, _moved(sizes, begin))
            for number, (begin, end) in enumerate(zip(self._begins, ends, strict=True))
        ]

    def places(self, position: int, count: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the chunk, and the row in it, at each position `[position, position + count)`."""
        sources, before = self._turns.sources(position, count), self._turns.before(position)
        chunks, rows = np.empty((2, count), dtype=np.int64)
        for source in np.unique(sources):
            here = np.flatnonzero(sources == source)
            found, rows[here] = self._orders[source].places(int(before[source]), len(here))
            chunks[here] = found + self._begins[source]
        return chunks, rows

    def window_at(self, source: int, position: int) -> int:
        """Return the number of the window that a source has reached at a global position."""
        return self._orders[source].window_at(int(self._turns.before(position)[source]))

    def chunks(self, source: int, window: int) -> NDArray[np.int64]:
        """Return the chunks of a window of a source."""
        return self._orders[source].chunks(window) + self._begins[source]

    def mark(self, position: int) -> list[Mark]:
        """Return, for each source, the last window that is known to begin at a position or before it."""
        before = self._turns.before(position).tolist()
        return [order.mark(each) for order, each in zip(self._orders, before, strict=True)]

    def take(self, marks: Sequence[Sequence[int]]) -> None:
        """Take note of where windows begin, as `mark` of the same order told."""
        for each, (position, window) in zip(self._orders, marks, strict=True):
            each.take(Mark(position, window))


def _moved(sizes: Sizes, begin: int) -> Sizes:
    return lambda chunks: sizes(chunks + begin)


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
