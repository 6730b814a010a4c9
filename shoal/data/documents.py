"""Reads the contents of source files: documents of text, and arrays of ids."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.data.sources import SourceFile
from shoal.errors import DataError, MissingExtraError, nearest

__all__ = ["Document", "holds_ids", "open_ids", "read_documents"]

PIECE_BYTES = 1 << 20
"""Longer files of text are read in pieces of about this size, each ending with a line."""


@dataclass(frozen=True)
class Document:
    """One text: a file, or a row of one."""

    name: str
    """Name, equal whenever the data is read; it decides between train and validation."""
    pieces: Iterator[str | bytes]
    """The text, cut at line ends; its bytes where the file is plain text, so that none are lost."""


def holds_ids(file: SourceFile) -> bool:
    """Return whether this is a memory map of ids (.npy, .bin), to read with `open_ids`."""
    return file.path.suffix in (".npy", ".bin")


def open_ids(file: SourceFile, dtype: str) -> NDArray[np.integer]:
    """Memory-map the ids of a .npy or .bin file, `[length]`.

    Args:
        file: The file.
        dtype: Type of the ids in a .bin file, which does not state it.

    Raises:
        DataError: The file is not a one-dimensional array of integers.
    """
    if file.path.suffix == ".npy":
        with _naming(file.path):
            try:
                ids: NDArray[Any] = np.lib.format.open_memmap(file.path, mode="r")
            except ValueError as error:
                raise _wrong_ids(file, f"is not a .npy file: {error}") from error
        if ids.ndim != 1 or ids.dtype.kind not in "iu":
            raise _wrong_ids(file, f"holds {ids.dtype} of shape {list(ids.shape)}")
        return ids
    item = np.dtype(dtype).newbyteorder("<")
    if file.size % item.itemsize:
        raise _wrong_ids(file, f"is {file.size} bytes long, which is not a whole number of {dtype} values")
    with _naming(file.path):
        return np.memmap(file.path, dtype=item, mode="r")


def read_documents(file: SourceFile, field: str) -> Iterator[Document]:
    """Yield the documents of a file: one per line of .jsonl, one per row of .parquet, else the whole file.

    Read the pieces of a document before you ask for the next document.

    Args:
        file: The file.
        field: The field of a line, or the column, that holds the text.

    Raises:
        DataError: The file cannot be read, or does not hold text in `field`.
        MissingExtraError: Parquet needs the package `pyarrow`.
    """
    if file.path.suffix == ".jsonl":
        rows = _read_jsonl(file.path, field)
    elif file.path.suffix == ".parquet":
        rows = _read_parquet(file.path, field)
    else:
        yield Document(file.name, _read_text(file.path))
        return
    for row, text in rows:
        yield Document(f"{file.name}#{row}", iter((text,)))


def _read_text(path: Path) -> Iterator[bytes]:
    with _naming(path), open(path, "rb") as file:
        while piece := file.read(PIECE_BYTES):
            yield piece if piece.endswith(b"\n") else piece + file.readline()


def _read_jsonl(path: Path, field: str) -> Iterator[tuple[int, str]]:
    with _naming(path), open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line.decode("utf-8-sig", errors="replace"))
            except ValueError as error:
                raise DataError(
                    f"line {number} of {str(path)!r} is not JSON: {error}",
                    possible="one JSON object a line",
                    change="correct the line, or name the file .txt to read it as text",
                ) from error
            fields = row if isinstance(row, dict) else {}
            texts = {key: value for key, value in fields.items() if isinstance(value, str)}
            if field not in texts:
                raise _no_text_in_field(f"line {number} of {str(path)!r}", field, list(texts))
            yield number, texts[field]


def _read_parquet(path: Path, column: str) -> Iterator[tuple[int, str]]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise MissingExtraError("reading parquet", package="pyarrow", extra="parquet") from error
    row = 0
    with _naming(path):
        try:
            with pyarrow.parquet.ParquetFile(path) as file:
                types = pyarrow.types
                texts = [
                    one.name
                    for one in file.schema_arrow
                    if types.is_string(one.type) or types.is_large_string(one.type)
                ]
                if column not in texts:
                    raise _no_text_in_field(repr(str(path)), column, texts)
                for batch in file.iter_batches(batch_size=1024, columns=[column]):
                    for text in batch.column(0).to_pylist():
                        row += 1
                        if text is not None:
                            yield row, text
        except pyarrow.ArrowException as error:
            raise DataError(
                f"{str(path)!r} cannot be read as parquet: {error}",
                possible="a parquet file",
                change="write the file again, or give another",
            ) from error


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Turn an error of the operating system about `path` into a DataError that names the path."""
    try:
        yield
    except OSError as error:
        raise DataError(
            f"the data file {str(path)!r} cannot be read: {error.strerror or error}",
            possible="a file that this user may read",
            change="correct its permissions, or give another file",
        ) from error


def _no_text_in_field(where: str, field: str, texts: list[str]) -> DataError:
    return DataError(
        f"{where} has no text in the field {field!r}{nearest(field, texts)}",
        possible="fields that hold text: " + (", ".join(texts) or "none here"),
        change="name the field in data.field",
    )


def _wrong_ids(file: SourceFile, reason: str) -> DataError:
    return DataError(
        f"{str(file.path)!r} {reason}",
        possible="a one-dimensional .npy array of integers, or a raw .bin file of data.dtype",
        change="write the ids as one flat array, or correct data.dtype",
    )
