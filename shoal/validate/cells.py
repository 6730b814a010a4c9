"""Tables of measurements as CSV files: find columns by name, read cells, and name what is wrong.

Tables come from many authors: an empty cell may say so in words (`BLANKS`), a whole number may be written as
8.0, and a word in capitals. The error of a row that cannot be used is passed to a `Refuse`. It raises the
error (`strictly`), or keeps it so that later rows are still read.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn, TypeVar

from shoal.errors import DataError, UserError, nearest

BLANKS = frozenset(["", "-", "?", "n/a", "na", "nan", "null"])
"""The content of an empty cell, in any case."""

Refuse = Callable[[UserError], None]
"""The handler of the error of a row that cannot be used."""

_T = TypeVar("_T")


def strictly(error: UserError) -> None:
    """Refuse a row by raising its error, so that no later row is read."""
    raise error


@dataclass(frozen=True, slots=True)
class Row:
    """The requested cells of one line.

    Attributes:
        line: Line of the file.
        path: Path of the file.
        values: Values by column; None if the cell is blank or the column absent.
    """

    line: int
    path: Path
    values: Mapping[str, Any]

    def __getitem__(self, column: str) -> Any:
        """Return the value of a cell."""
        return self.values[column]

    def refuse(self, wrong: str, *, possible: str, change: str = "correct the row") -> NoReturn:
        """Raise a DataError that names the line."""
        raise DataError(f"line {self.line} of {self.path} {wrong}", possible=possible, change=change)

    def located(self, error: UserError) -> UserError:
        """Return the error with the line named."""
        given = f"line {self.line} of {self.path}: {error.given}"
        return type(error)(given, possible=error.possible, change=error.change)


@dataclass(frozen=True, slots=True)
class Table:
    """A CSV file.

    Attributes:
        path: Path of the file.
        columns: Names in the first line.
        lines: Line numbers, with the cells of each line by column.
    """

    path: Path
    columns: tuple[str, ...]
    lines: tuple[tuple[int, dict[str, str]], ...] = field(repr=False)

    @classmethod
    def open(cls, path: str | Path) -> Table:
        """Read a file.

        Raises:
            DataError: It is missing, unreadable, not text, or empty.
        """
        path = Path(path)
        try:
            text = path.read_text("utf-8-sig")
            reader = csv.DictReader(io.StringIO(text, newline=""), restval="")
            columns = tuple(name.strip() for name in reader.fieldnames or ())
            reader.fieldnames = columns
            lines = tuple((reader.line_num, _stripped(cells)) for cells in reader)
        except (OSError, UnicodeDecodeError, csv.Error) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not CSV in UTF-8"
            raise DataError(
                f"the table {path} cannot be read: {reason}",
                possible="a CSV file with the columns of docs/guides/validate.md",
                change="correct the path",
            ) from None
        if not lines:
            raise DataError(
                f"the table {path} has no rows",
                possible="a first line of column names, and a line for each measurement",
                change="add rows, or correct the path",
            )
        return cls(path, columns, lines)

    def read(
        self,
        readers: Mapping[str, Callable[[str], Any]],
        optional: frozenset[str],
        make: Callable[[Row], _T],
        refuse: Refuse,
        instead: Mapping[str, str] = MappingProxyType({}),
    ) -> Iterator[_T]:
        """Yield the result of `make` for each row, with its cells read; skip rows that are refused.

        Args:
            readers: For each column, a function that reads a cell or raises a ValueError that names the valid
                values.
            optional: Columns that may be absent, and whose cells may be blank.
            make: Makes a result from a row, or raises a UserError.
            refuse: Called with the error of each row that cannot be used.
            instead: For a column, an alternative column: cells of the first may be blank if the other's are
                filled.

        Raises:
            DataError: A column is missing or appears twice.
        """
        twice = [name for name in readers if self.columns.count(name) > 1]
        if twice:
            raise DataError(
                f"the table {self.path} has the column {twice[0]!r} {self.columns.count(twice[0])} times",
                possible="each column once",
                change="rename or remove the others",
            )
        missing = [name for name in readers if name not in self.columns and name not in optional]
        if missing:
            raise DataError(
                f"the table {self.path} has no column {missing[0]!r}{nearest(missing[0], self.columns)}",
                possible="the columns " + ", ".join(readers),
                change="add " + ", ".join(missing),
            )
        for line, cells in self.lines:
            try:
                told = {name for name, other in instead.items() if not _is_blank(cells.get(other, ""))}
                made = make(Row(line, self.path, self._values(line, cells, readers, optional | told)))
            except UserError as error:
                refuse(error)
            else:
                yield made

    def _values(
        self,
        line: int,
        cells: Mapping[str, str],
        readers: Mapping[str, Callable[[str], Any]],
        optional: frozenset[str],
    ) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for name, read in readers.items():
            cell = cells.get(name, "")
            try:
                is_blank = _is_blank(cell)
                values[name] = None if is_blank and name in optional else read("" if is_blank else cell)
            except ValueError as error:
                raise DataError(
                    f"line {line} of {self.path} has {name}={cell!r}",
                    possible=str(error),
                    change="correct the cell",
                ) from None
        return values


def count(cell: str) -> int:
    """Read a whole number of at least 1, which may be written as 8.0."""
    whole, _, fraction = cell.partition(".")
    if not (whole.isdecimal() and int(whole) > 0) or fraction.strip("0"):
        raise ValueError("a whole number of at least 1")
    return int(whole)


def measured(cell: str) -> float:
    """Read a number above 0."""
    wanted = "a number above 0"
    try:
        value = float(cell)
    except ValueError:
        raise ValueError(wanted) from None
    if not (math.isfinite(value) and value > 0):
        raise ValueError(wanted)
    return value


def word(*possible: str) -> Callable[[str], str]:
    """Return a reader of one of these words, in any case, or of any text if there are none."""
    known = {each.lower(): each for each in possible}

    def read(cell: str) -> str:
        found = known.get(cell.lower()) if possible else cell
        if not found:
            raise ValueError(f"one of {', '.join(possible)}" if possible else "a text")
        return found

    return read


def _is_blank(cell: str) -> bool:
    return cell.lower() in BLANKS


def _stripped(cells: Mapping[str | None, Any]) -> dict[str, str]:
    """Return the cells by column, without those beyond the columns."""
    return {name: value.strip() for name, value in cells.items() if name is not None}
