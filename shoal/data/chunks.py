"""Cuts files of text into chunks of about one size, which are tokenized independently of each other.

A chunk is a list of files or parts of files. Text, .jsonl and .tsv files are cut at line ends: a line belongs
to the part in which it begins. Parquet is cut between row groups, a dataset between rows, and a file of ids
anywhere. A .csv file is not cut, because only a reader from its beginning knows whether a line end is within
quotes. Small files share a chunk, in their order. Only sizes are read, and the metadata of parquet and .npy.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from shoal.data.documents import holds_ids, open_ids
from shoal.data.rows import row_groups
from shoal.data.sources import SourceFile

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
