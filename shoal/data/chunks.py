"""Cuts files of text into chunks of about one size, which are tokenized independently of each other.

A chunk is a list of files or parts of files. Text and .jsonl files are cut at line ends: a line belongs to
the part in which it begins. Parquet is cut between row groups, and a dataset between rows. Other files are
not cut. Small files share a chunk, in their order. Only sizes are read, and the metadata of parquet.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from shoal.data.documents import holds_ids
from shoal.data.rows import holds_rows, row_groups
from shoal.data.sources import SourceFile
from shoal.errors import DataError

__all__ = ["Chunk", "plan_chunks"]

Chunk = tuple[SourceFile, ...]


def plan_chunks(files: Iterable[SourceFile], size: int) -> list[Chunk]:
    """Return the files in chunks of about `size` bytes.

    Raises:
        DataError: A file holds ids, or cannot be read.
    """
    chunks: list[Chunk] = []
    current: list[SourceFile] = []
    held = 0
    for file in files:
        for part, length in _parts(file, size):
            if current and held + length > size:
                chunks.append(tuple(current))
                current, held = [], 0
            current.append(part)
            held += length
    if current:
        chunks.append(tuple(current))
    return chunks


def _parts(file: SourceFile, size: int) -> Iterator[tuple[SourceFile, int]]:
    """Yield the parts of a file, and the bytes of each."""
    if holds_ids(file):
        raise DataError(
            f"{str(file.path)!r} holds ids, and data.streaming=true was given",
            possible="text; files of ids are mapped into memory, so they need neither time nor space",
            change="leave out data.streaming, or leave such files out with data.suffixes",
        )
    if file.table is not None:
        rows = len(file.table)
        step = max(1, size * rows // max(1, file.size))
        for begin in range(0, rows, step):
            end = min(begin + step, rows)
            yield replace(file, part=(begin, end)), file.size * (end - begin) // rows
    elif file.path.suffix == ".parquet":
        for number, length in enumerate(row_groups(file)):
            yield replace(file, part=(number, number + 1)), length
    elif file.size > size and (file.path.suffix == ".jsonl" or not holds_rows(file)):
        for begin in range(0, file.size, size):
            end = min(begin + size, file.size)
            yield replace(file, part=(begin, end)), end - begin
    else:
        yield file, file.size
