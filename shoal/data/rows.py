"""Reads files of rows: .jsonl, .csv, .tsv and .parquet, and datasets of the package `datasets`.

The first line of a .csv or .tsv file names its columns. A .csv file is as RFC 4180 says: quotes may surround
a value, which may then hold commas, quotes and line ends. A .tsv file has no quotes: a tab ends each value.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, BinaryIO

from shoal.data.remote import naming_remote, open_remote
from shoal.data.sources import SourceFile, Table
from shoal.errors import DataError, MissingExtraError, nearest

_LONGEST_VALUE = 1 << 30
"""Characters of a value in a .csv file; the default of the module `csv` would refuse long texts."""

_TEXTS = "field", "pair"
"""Keys of the configuration that name columns of texts."""

_Rows = Iterator[tuple[int, Mapping[str, Any]]]
"""Numbers of rows, and the values of each by column."""


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a file.

    Attributes:
        place: Place of the row, such as "line 3 of 'a.csv'".
        number: Number of its line, or of its row in .parquet, from 1; in a part of a .jsonl or .tsv file, the
            byte at which its line begins.
        text: Its text.
        label: Value of its label; None if there is none.
        second: Its second text; None if only one was asked for.
    """

    place: str
    number: int
    text: str
    label: Any
    second: str | None = None


def holds_rows(file: SourceFile) -> bool:
    """Return whether this is a file or a dataset of rows, to read with `read_rows`."""
    return file.table is not None or file.path.suffix in SUFFIXES


def read_rows(file: SourceFile, field: str, label: str = "", pair: str = "") -> Iterator[Row]:
    """Yield the rows of a file.

    Args:
        file: The file, of which `holds_rows` is true.
        field: The column, or the field of a .jsonl line, that holds the text.
        label: The column that holds the label; "" for rows without labels.
        pair: The column that holds the second text; "" for rows of one text.

    Raises:
        DataError: The file cannot be read, or a row has no such column, or no text.
        MissingExtraError: Parquet needs the package `pyarrow`.
    """
    keys = {field: "field", pair: "pair", label: "label"}
    wanted = {name: key for name, key in keys.items() if name}
    for place, number, values in _read(file, wanted):
        for name in (field, pair) if pair else (field,):
            if not isinstance(values.get(name), str):
                texts = [name for name, value in values.items() if isinstance(value, str)]
                raise _no_text_in_field(place, name, texts, wanted[name])
        if label and label not in values:
            raise _no_column(place, label, list(values), "label")
        yield Row(place, number, values[field], values.get(label), values[pair] if pair else None)


def read_conversations(file: SourceFile, field: str) -> Iterator[tuple[str, int, Any]]:
    """Yield the messages of each row of a file, with its place and its number; see `Row`.

    Args:
        file: The file, of which `holds_rows` is true.
        field: The column, or the field of a .jsonl line, that holds the messages.

    Raises:
        DataError: The file cannot be read, or a row has no such column.
        MissingExtraError: Parquet needs the package `pyarrow`.
    """
    for place, number, values in _read(file, {field: "messages"}):
        if field not in values:
            raise _no_column(place, field, list(values), "messages")
        yield place, number, values[field]


def _read(file: SourceFile, wanted: Mapping[str, str]) -> Iterator[tuple[str, int, Mapping[str, Any]]]:
    """Yield the place, the number and the values of each row.

    Args:
        file: The file.
        wanted: The key of the configuration that names each wanted column.
    """
    unit, name = "row", file.place
    if file.table is not None:
        rows, name = _read_table(file, file.table, wanted), file.name
    elif file.path.suffix == ".parquet":
        rows = _read_parquet(file, wanted)
    else:
        unit = "line" if file.part is None else "the line at byte"
        rows = _READERS[file.path.suffix](file, unit)
    return ((f"{unit} {number} of {name!r}", number, values) for number, values in rows)


def _read_table(file: SourceFile, table: Table, wanted: Mapping[str, str]) -> _Rows:
    """Yield the wanted columns of each row of a dataset; rows are left out as in parquet."""
    _require_columns(repr(table.name), wanted, table.columns, table.texts)
    first = 1 if file.part is None else file.part[0] + 1
    return _with_text(enumerate(table.rows(wanted, file.part), first), wanted)


def _with_text(rows: _Rows, wanted: Mapping[str, str]) -> _Rows:
    """Leave out the rows whose text is null, if only a text is wanted."""
    if list(wanted.values()) != ["field"]:
        return rows
    (text,) = wanted
    return ((number, values) for number, values in rows if values[text] is not None)


def _read_jsonl(file: SourceFile, unit: str) -> _Rows:
    for number, line in _lines(file):
        if not line.strip():
            continue
        try:
            row = json.loads(line.decode("utf-8-sig", errors="replace"))
        except ValueError as error:
            raise DataError(
                f"{unit} {number} of {file.place!r} is not JSON: {error}",
                possible="one JSON object a line",
                change="correct the line, or name the file .txt to read it as text",
            ) from error
        yield number, row if isinstance(row, dict) else {}


def _lines(file: SourceFile) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of a file with their numbers, or of a part with the bytes at which they begin."""
    with opened(file) as (source, end):
        if end is None:
            yield from enumerate(source, start=1)
            return
        while (begin := source.tell()) < end and (line := source.readline()):
            yield begin, line


def _read_csv(file: SourceFile, unit: str) -> _Rows:
    csv.field_size_limit(_LONGEST_VALUE)
    with opened(file) as (source, _), io.TextIOWrapper(source, "utf-8-sig", "replace", newline="") as text:
        reader = csv.reader(text, strict=True)
        lines = ((reader.line_num, values) for values in reader)
        try:
            yield from _by_column(file, unit, lines)
        except csv.Error as error:
            raise DataError(
                f"{unit} {reader.line_num} of {file.place!r} is not CSV: {error}",
                possible='values with commas between them; "a ""quoted"" value" with double quotes around it',
                change="correct the line, or write the file again",
            ) from error


def _read_tsv(file: SourceFile, unit: str) -> _Rows:
    lines = ((number, _values(line)) for number, line in _lines(file))
    if file.part is not None and file.part[0]:
        with opened(replace(file, part=None)) as (source, _):
            names = _values(source.readline())
        yield from _by_column(file, unit, lines, names)
    else:
        yield from _by_column(file, unit, lines)


def _values(line: bytes) -> list[str]:
    """Return the values of a line of a .tsv file; none if it is empty."""
    text = line.decode("utf-8-sig", errors="replace").rstrip("\r\n")
    return text.split("\t") if text else []


def _by_column(
    file: SourceFile, unit: str, lines: Iterator[tuple[int, list[str]]], names: list[str] | None = None
) -> _Rows:
    """Yield each line's values by the columns that the first line names, if `names` does not."""
    for number, values in lines:
        if not values:
            continue
        if names is None:
            names = values
        elif len(values) != len(names):
            raise DataError(
                f"{unit} {number} of {file.place!r} has {len(values)} columns",
                possible=f"{len(names)} columns, which its first line names: {', '.join(names)}",
                change="correct the line, or write the file again",
            )
        else:
            yield number, dict(zip(names, values, strict=True))


def _read_parquet(file: SourceFile, wanted: Mapping[str, str]) -> _Rows:
    """Yield the wanted columns of each row; if only a text is wanted, rows where it is null are left out."""
    with _parquet(file) as source:
        import pyarrow.types as types

        columns = source.schema_arrow
        texts = [one.name for one in columns if types.is_string(one.type) or types.is_large_string(one.type)]
        _require_columns(repr(file.place), wanted, columns.names, texts)
        groups = None if file.part is None else range(*file.part)
        before = range(0 if file.part is None else file.part[0])
        first = 1 + sum(source.metadata.row_group(group).num_rows for group in before)
        batches = source.iter_batches(batch_size=1024, columns=list(wanted), row_groups=groups)
        rows = (values for batch in batches for values in batch.to_pylist())
        yield from _with_text(enumerate(rows, first), wanted)


def row_groups(file: SourceFile) -> list[int]:
    """Return the bytes of each row group of a .parquet file.

    Raises:
        DataError: It is not a parquet file.
        MissingExtraError: Parquet needs the package `pyarrow`.
    """
    with _parquet(file) as source:
        about = source.metadata
        return [about.row_group(number).total_byte_size for number in range(about.num_row_groups)]


@contextmanager
def _parquet(file: SourceFile) -> Iterator[Any]:
    """Open a .parquet file, and name it in errors."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise MissingExtraError("reading parquet", package="pyarrow", extra="parquet") from error
    with _opened_whole(file) as whole:
        try:
            with pyarrow.parquet.ParquetFile(whole) as source:
                yield source
        except pyarrow.ArrowException as error:
            raise DataError(
                f"{file.place!r} cannot be read as parquet: {error}",
                possible="a parquet file",
                change="write the file again, or give another",
            ) from error


_READERS: Mapping[str, Callable[[SourceFile, str], _Rows]] = {
    ".jsonl": _read_jsonl,
    ".csv": _read_csv,
    ".tsv": _read_tsv,
}

SUFFIXES = (*_READERS, ".parquet")
"""The suffixes of files of rows."""


@contextmanager
def opened(file: SourceFile) -> Iterator[tuple[BinaryIO, int | None]]:
    """Open a file at the first line that begins in its part; give also where the part ends, or None.

    Raises:
        DataError: The file cannot be read.
    """
    with _opened_whole(file) as source:
        if file.part is not None and file.part[0]:
            source.seek(file.part[0] - 1)
            source.readline()
        yield source, None if file.part is None else file.part[1]


@contextmanager
def _opened_whole(file: SourceFile) -> Iterator[BinaryIO]:
    if file.url:
        with naming_remote(file.url), open_remote(file.url) as source:
            yield source
    else:
        with naming(file), open(file.path, "rb") as source:
            yield source


@contextmanager
def naming(file: SourceFile) -> Iterator[None]:
    """Turn an error of the operating system about a file into a DataError that names its path."""
    try:
        yield
    except OSError as error:
        raise DataError(
            f"the data file {file.place!r} cannot be read: {error.strerror or error}",
            possible="a file that this user may read",
            change="correct its permissions, or give another file",
        ) from error


def _require_columns(where: str, wanted: Mapping[str, str], columns: list[str], texts: list[str]) -> None:
    for name, key in wanted.items():
        if key in _TEXTS and name not in texts:
            raise _no_text_in_field(where, name, texts, key)
        if name not in columns:
            raise _no_column(where, name, columns, key)


def _no_text_in_field(where: str, field: str, texts: list[str], key: str) -> DataError:
    return DataError(
        f"{where} has no text in the field {field!r}{nearest(field, texts)}",
        possible="fields that hold text: " + (", ".join(texts) or "none here"),
        change=f"name the field in data.{key}, or leave such files out with data.suffixes",
    )


def _no_column(where: str, name: str, names: list[str], key: str) -> DataError:
    return DataError(
        f"{where} has no column {name!r}{nearest(name, names)}",
        possible="the columns there: " + (", ".join(names) or "none"),
        change=f"name the column in data.{key}",
    )
