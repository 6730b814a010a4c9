"""Tables of measurements as CSV files: columns found by name, cells read, and what is wrong named.

Tables come from many hands: a cell that was not filled in may say so in words (`BLANKS`), a whole number may
be written as 8.0 and a word in capitals. The error of a row that cannot be used is given to a `Refuse`, which
raises it (`strictly`) or keeps it, and the rows after it are read all the same.
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

__all__ = ["BLANKS", "Refuse", "Row", "Table", "count", "measured", "strictly", "word"]

BLANKS = frozenset(["", "-", "?", "n/a", "na", "nan", "null"])
"""What a cell holds, whatever its case, if it holds nothing."""

Refuse = Callable[[UserError], None]
"""What is done with the error of a row that cannot be used."""

_T = TypeVar("_T")


def strictly(error: UserError) -> None:
    """Refuses a row by raising its error, so that no row after it is read."""
    raise error


@dataclass(frozen=True, slots=True)
class Row:
    """The cells of one line that were asked for.

    Attributes:
        line: Of the file.
        path: Of the file.
        values: By column; None where the cell is blank or the column absent.
    """

    line: int
    path: Path
    values: Mapping[str, Any]

    def __getitem__(self, column: str) -> Any:
        """The value of a cell."""
        return self.values[column]

    def refuse(self, wrong: str, *, possible: str, change: str = "correct the row") -> NoReturn:
        """Raises a DataError that names the line."""
        raise DataError(f"line {self.line} of {self.path} {wrong}", possible=possible, change=change)

    def located(self, error: UserError) -> UserError:
        """Return the error with the line named."""
        given = f"line {self.line} of {self.path}: {error.given}"
        return type(error)(given, possible=error.possible, change=error.change)


@dataclass(frozen=True, slots=True)
class Table:
    """A CSV file.

    Attributes:
        path: Of the file.
        columns: Names in its first line.
        lines: Of the file, with their cells by column.
    """

    path: Path
    columns: tuple[str, ...]
    lines: tuple[tuple[int, dict[str, str]], ...] = field(repr=False)

    @classmethod
    def open(cls, path: str | Path) -> Table:
        """Reads a file.

        Raises:
            DataError: It is missing, unreadable, no text, or empty.
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
        """What `make` makes of each row, its cells read; of rows that it refuses nothing.

        Args:
            readers: By column, what makes a value of a cell or raises a ValueError that says what it wants.
            optional: Columns that may be absent, and whose cells may be blank.
            make: From a row, or raises a UserError.
            refuse: Is given the error of each row that cannot be used.
            instead: By column, another one: cells of the first may be blank where those of the other are not.

        Raises:
            DataError: A column is missing or there twice.
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
    """Reads a whole number of at least 1, which may be written as 8.0."""
    whole, _, fraction = cell.partition(".")
    if not (whole.isdecimal() and int(whole) > 0) or fraction.strip("0"):
        raise ValueError("a whole number of at least 1")
    return int(whole)


def measured(cell: str) -> float:
    """Reads a number above 0."""
    wanted = "a number above 0"
    try:
        value = float(cell)
    except ValueError:
        raise ValueError(wanted) from None
    if not (math.isfinite(value) and value > 0):
        raise ValueError(wanted)
    return value


def word(*possible: str) -> Callable[[str], str]:
    """What reads one of these words, whatever their case, or any text if there are none."""
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
    """By column; what a line has beyond the columns is left out."""
    return {name: value.strip() for name, value in cells.items() if name is not None}
