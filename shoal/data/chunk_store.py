"""Keeps the tokens of a few chunks on disk, and makes those that are missing.

Each chunk is an entry of the cache, written once on a host by whichever process needs it first: others wait
on its lock. Only the entries that were used last are kept. A file beside them holds the length of each chunk
that was ever made, 8 bytes a chunk, so that later runs know where a sample lies without its tokens. The
length is the number of rows if these have labels or are conversations, and else the number of tokens. An
entry that is deleted while it is mapped stays readable there, and any chunk can be made again: what is kept
decides how much work is done, and never which tokens a sample has.

Cuts files of text into chunks of about one size, which are tokenized independently of each other.

A chunk is a list of files or parts of files. Text, .jsonl and .tsv files are cut at line ends: a line belongs
to the part in which it begins. Parquet is cut between row groups, a dataset between rows, and a file of ids
anywhere. A .csv file is not cut, because only a reader from its beginning knows whether a line end is within
quotes. Small files share a chunk, in their order. Only sizes are read, and the metadata of parquet and .npy.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import BinaryIO, final

import numpy as np
from numpy.typing import NDArray

from shoal.data.cache import read_or_write_entry
from shoal.data.config import DataConfig
from shoal.data.encoding import holds_ids, open_ids
from shoal.data.labelled import Labels
from shoal.data.rows import row_groups
from shoal.data.sources import SourceFile
from shoal.data.token_writer import StreamInfo, first_end, write_documents
from shoal.data.tokenizer import open_tokenizer
from shoal.data.workers import Workers
from shoal.errors import DataError

Chunk = tuple[SourceFile, ...]


def plan_chunks(files: Iterable[SourceFile], size: int, dtype: str = "uint16") -> list[Chunk]:
    """Return the files in chunks of about `size` bytes.

    Args:
        files: The files.
        size: Bytes of a chunk.
        dtype: Type of the ids in .bin files.

    Raises:
        DataError: A file cannot be read.
    """
    chunks: list[Chunk] = []
    current: list[SourceFile] = []
    held = 0
    for file in files:
        for part, length in _parts(file, size, dtype):
            if current and held + length > size:
                chunks.append(tuple(current))
                current, held = [], 0
            current.append(part)
            held += length
    if current:
        chunks.append(tuple(current))
    return chunks


def _parts(file: SourceFile, size: int, dtype: str) -> Iterator[tuple[SourceFile, int]]:
    """Yield the parts of a file, and the bytes of each."""
    if file.table is not None or holds_ids(file):
        count = len(open_ids(file, dtype) if file.table is None else file.table)
        step = max(1, size * count // max(1, file.size))
        for begin in range(0, count, step):
            end = min(begin + step, count)
            yield replace(file, part=(begin, end)), file.size * (end - begin) // count
    elif file.path.suffix == ".parquet":
        for number, length in enumerate(row_groups(file)):
            yield replace(file, part=(number, number + 1)), length
    elif file.size > size and file.path.suffix != ".csv":
        for begin in range(0, file.size, size):
            end = min(begin + size, file.size)
            yield replace(file, part=(begin, end)), end - begin
    else:
        yield file, file.size


_LOCKS = 64  # files of locks, which chunks share
_UNKNOWN = -1


@final
class ChunkStore:
    """The tokens of chunks, by the numbers of the chunks. Threads may share it.

    Args:
        directory: Directory of this data alone.
        chunks: All chunks, in their order.
        config: The configuration, which says how to read them, with how many workers.
        keep: Number of chunks whose tokens are kept on disk.
        labels: The labels that rows may have, if the configuration names a column of labels.

    Raises:
        DataError: The directory cannot be used.
    """

    def __init__(
        self,
        directory: Path,
        chunks: Sequence[Chunk],
        config: DataConfig,
        keep: int,
        labels: Sequence[str] = (),
    ) -> None:
        self._chunks = chunks
        self._maker = _Maker(directory, config, keep, labels)
        self._workers: Workers[tuple[int, Chunk], int | None] | None = None
        if config.workers:
            self._workers = Workers(config.workers, partial(_Maker, directory, config, keep, labels))
        self._open: OrderedDict[int, NDArray[np.integer]] = OrderedDict()
        self._keep = keep
        self._mutex = threading.RLock()
        with naming_directory(directory):
            self._lengths = _open_lengths(directory, len(chunks))

    def __len__(self) -> int:
        return len(self._chunks)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Lengths of all chunks, `[chunks]`; -1 for those that were never made."""
        return self._lengths

    def length(self, number: int) -> int:
        """Return the length of a chunk, which is made if it is not known.

        Raises:
            DataError: It cannot be made.
        """
        if self._lengths[number] == _UNKNOWN:
            self.tokens(number)
        return int(self._lengths[number])

    def tokens(self, number: int) -> NDArray[np.integer]:
        """Return the tokens of a chunk, `[length]`, memory-mapped.

        Raises:
            DataError: It cannot be made.
        """
        with self._mutex:
            if number not in self._open:
                self._open[number] = self._maker.tokens(number, self._chunks[number])
                self._lengths[number] = self._maker.length(self._open[number])
                if len(self._open) > self._keep:
                    self._open.popitem(last=False)
            self._open.move_to_end(number)
            return self._open[number]

    def make(self, numbers: Iterable[int], *, wait: bool = True) -> None:
        """Make those of some chunks that are not on disk, by the workers if there are any.

        Args:
            numbers: The chunks.
            wait: Whether to wait for chunks that other processes make.

        Raises:
            DataError: One cannot be made.
        """
        missing = [number for number in numbers if not self._maker.has(number)]
        asked = ((number, self._chunks[number]) for number in missing)
        made = map(self._maker, asked) if self._workers is None else self._workers.map(asked)
        busy = []
        for number, length in zip(missing, made, strict=True):
            if length is None:
                busy.append(number)
            else:
                self._lengths[number] = length
        if wait:
            for number in busy:
                self.tokens(number)

    def close(self) -> None:
        """End the workers."""
        if self._workers is not None:
            self._workers.close()


@final
class _Maker:
    """Makes chunks in a directory, in this process; in a worker, it is what answers."""

    def __init__(self, directory: Path, config: DataConfig, keep: int, labels: Sequence[str]) -> None:
        self._directory = directory
        self._config = config
        self._keep = keep
        self._tokenizer = open_tokenizer(config.tokenizer)
        self._labels = Labels(config.label, labels) if config.label else None

    def __call__(self, numbered: tuple[int, Chunk]) -> int | None:
        """Make a chunk if it is not on disk, and return its length; None if another process makes it."""
        try:
            return self.length(self._entry(*numbered, wait=False))
        except BlockingIOError:
            return None

    def length(self, tokens: NDArray[np.integer]) -> int:
        """Return the length of a chunk with these tokens."""
        first = first_end(self._config, self._tokenizer)
        return len(tokens) if first is None else int(np.count_nonzero(tokens >= first))

    def has(self, number: int) -> bool:
        """Return whether a chunk is on disk."""
        return self._path(number).exists()

    def tokens(self, number: int, files: Chunk) -> NDArray[np.integer]:
        """Return the tokens of a chunk, which is made if it is not on disk."""
        return self._entry(number, files, wait=True)

    def _path(self, number: int) -> Path:
        return self._directory / f"chunk-{number}.tokens"

    def _entry(self, number: int, files: Chunk, *, wait: bool) -> NDArray[np.integer]:
        is_made = False

        def write(output: BinaryIO, _: BinaryIO) -> StreamInfo:
            nonlocal is_made
            is_made = True
            return write_documents(files, self._config, self._tokenizer, output, self._labels)

        with naming_directory(self._directory):
            path = self._path(number)
            lock = f"lock-{number % _LOCKS}"
            _, tokens = read_or_write_entry(self._directory, path.stem, write, lock=lock, wait=wait)
            with contextlib.suppress(FileNotFoundError):  # another process may have deleted it by now
                os.utime(path)
            if is_made:
                self._delete_oldest()
        return tokens

    def _delete_oldest(self) -> None:
        """Delete the entries that were used longest ago, if there are more than are kept."""
        used: list[tuple[int, Path]] = []
        for path in self._directory.glob("chunk-*.tokens"):
            with contextlib.suppress(FileNotFoundError):
                used.append((path.stat().st_mtime_ns, path))
        for _, path in sorted(used)[: max(0, len(used) - self._keep)]:
            path.unlink(missing_ok=True)


def _open_lengths(directory: Path, count: int) -> NDArray[np.int64]:
    """Map the file of the lengths. Processes may write it at once, since they write equal numbers."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "lengths.npy"
    if not path.exists():
        unfinished = directory / f"lengths-{os.getpid()}.tmp"
        with open(unfinished, "wb") as file:
            np.save(file, np.full(count, _UNKNOWN, dtype=np.int64))
        with contextlib.suppress(FileExistsError):
            os.link(unfinished, path)  # one process of several wins
        unfinished.unlink()
    lengths: NDArray[np.int64] = np.load(path, mmap_mode="r+")
    return lengths


@contextlib.contextmanager
def naming_directory(directory: Path) -> Iterator[None]:
    """Turn an error of the operating system about a directory into a DataError."""
    try:
        yield
    except BlockingIOError:
        raise
    except OSError as error:
        raise DataError(
            f"tokens cannot be kept in {str(directory)!r}: {error.strerror or error}",
            possible="a folder that this user may write, with room for about three windows of each source",
            change="set data.cache to another folder, or data.window to a smaller size",
        ) from error
