"""Tables of measurements as CSV files: find columns by name, read cells, and name what is wrong.

Tables come from many authors: an empty cell may say so in words (`BLANKS`), a whole number may be written as
8.0, and a word in capitals. The error of a row that cannot be used is passed to a `Refuse`. It raises the
error (`strictly`), or keeps it so that later rows are still read.

The names that tables by other authors use for the words of this package.

Case, spaces and punctuation do not matter: "ZeRO-3", "zero_3" and "Zero 3" are equal. A row keeps the words
of the table's schema, which distinguish more than a Plan's: a row in fp16 is not one in bf16.

The year of a program, and the attention that programs had then.

A program's age counts once: by its fused attention, which became two to four times as quick in four years.
The column `year` says it; where that is blank, the words of `source` and `note` may, by an arXiv number, a
version or date, or the name of a program. A row of which nothing is known is taken for a present one.

- until 2023: Triton's kernels and FlashAttention's first version, at `FLASH1` of FlashAttention 2
  (arXiv:2307.08691, figures 4 to 6: 1.7 to 3.0 times as quick);
- until 2024, torch's programs: FlashAttention 2, at the device's `flash2_share`
  (arXiv:2407.08608, figure 5: 370 and 648 TFLOP/s on H100). Others called cuDNN, about as quick as any;
- since: torch calls cuDNN too (pytorch/pytorch issue 141133; measured with torch 2.11).
"""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean, median, quantiles
from types import MappingProxyType
from typing import Any, NoReturn, TypeVar

from shoal.errors import DataError, UserError, nearest
from shoal.spec.cluster import Device

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


SHARDING_NAMES: Mapping[str, tuple[str, ...]] = {
    "none": ("no", "off", "false", "0", "stage 0", "zero 0", "ddp", "dp", "replicated", "no_shard"),
    "zero1": ("1", "stage 1", "distributed optimizer", "dist opt", "sharded optimizer"),
    "zero2": ("2", "stage 2", "shard_grad_op"),
    "zero3": ("3", "stage 3", "fsdp", "fsdp1", "fsdp2", "full_shard"),
    "zero3-once": ("fsdp no_sync", "fsdp2 no_sync", "full_shard no_sync"),
    "hsdp": ("hybrid_shard", "hybrid sharding", "hybrid"),
}
"""Names of shardings: the states that data-parallel ranks share; hsdp is zero3 within each node."""

RECOMPUTES: Mapping[str, tuple[str, ...]] = {
    "none": ("no", "off", "false", "0", "no ac"),
    "selective": ("sac", "selective ac", "core attention", "core_attn"),
    "per-op SAC": ("op sac", "selective op"),
    "full": (
        *("yes", "on", "true", "1", "ac", "full ac", "ckpt", "checkpointing", "activation checkpointing"),
        *("gradient checkpointing", "full recompute", "full uniform", "full block", "uniform", "block"),
    ),
}
"""Names of recompute policies."""

ATTENTIONS: Mapping[str, tuple[str, ...]] = {
    "flash": (
        *("flash 1", "flash 2", "flash 3", "flash attention", "flash attention 2", "flash attention 3"),
        *("flash attn", "flash attn 2", "flash attn 3", "fa", "fa1", "fa2", "fa3", "fused", "sdpa", "cudnn"),
        *("xformers", "memory efficient", "mem efficient", "te", "transformer engine", "flex", "triton"),
        *("ring", "ring flash"),
    ),
    "unfused": ("standard", "naive", "eager", "math", "core", "local", "vanilla", "baddbmm", "no flash"),
}
"""Names of attention kernels: whether scores are written to memory."""

PRECISIONS: Mapping[str, tuple[str, ...]] = {
    "bf16": ("bfloat16", "mixed", "mixed precision", "amp", "16", "bf16 mixed", "bf16 amp", "bf16/fp32"),
    "fp16": ("float16", "half", "fp16 mixed", "fp16 amp", "fp16/fp32"),
    "fp32": ("float32", "float", "single", "full", "32"),
    "tf32": ("tensorfloat32", "tensor float 32"),
    "fp8": ("float8", "fp8 mixed", "fp8 hybrid", "fp8/bf16", "bf16/fp8", "mxfp8", "te fp8"),
}
"""Names of the type that products compute in."""


def spelled(words: Mapping[str, tuple[str, ...]]) -> Callable[[str], str]:
    """Return a function that reads a cell as one of these words, given the other names of each."""
    known = {_bare(each): word for word, others in words.items() for each in (word, *others)}

    def read(cell: str) -> str:
        found = known.get(_bare(cell))
        if found is None:
            raise ValueError(f"one of {', '.join(words)}, or a usual name of one of these")
        return found

    return read


def _bare(words: str) -> str:
    return re.sub(r"[^a-z0-9]", "", words.lower())


FLASH1 = 0.66
"""Share of the rate of FlashAttention 2 that attention reached before it."""

_LAST_FLASH1, _LAST_FLASH2 = 2023, 2025

_DATES = (
    r"arXiv:(?P<short>\d\d)\d\d\.",
    r"\b(?P<year>20[12]\d)\b",
    r"\bv?(?P<short>2[1-9])\.(?:0\d|1[0-2])\b",
)
"""An arXiv number, a year, and a version that is a year and a month."""

_PROGRAMS: Mapping[str, int] = {
    "MegatronLMV1": 2019,
    "megatron-turing": 2021,
    "bigscience": 2022,
    "llm-foundry": 2023,
    "vTrain": 2023,
    "TinyLlama": 2023,
    "fms-fsdp": 2024,
    "torchtitan": 2024,
    "FlagPerf": 2024,
    "Megatron-Core 0.8": 2024,
}
"""Years of programs, or of the tables that they published."""


def year_of(row: Row) -> int | None:
    """Return the year of the program of a row; None if nothing tells it."""
    if row["year"]:
        return int(row["year"])
    said = f"{row['source'] or ''} {row['note'] or ''}"
    for pattern in _DATES:
        found = re.search(pattern, said, re.IGNORECASE)
        if found is not None:
            named = found.groupdict()
            return int(named["year"]) if named.get("year") else 2000 + int(named["short"])
    return next((year for name, year in _PROGRAMS.items() if name.lower() in said.lower()), None)


def attention_of(year: int | None, *, is_torch: bool) -> str:
    """Return the fused attention of a program: "flash1", "flash2" or "newest".

    Args:
        year: Year of the program; None if it is not known.
        is_torch: Whether it calls torch's attention, or else a library's.
    """
    if year is None:
        return "newest"
    if year <= _LAST_FLASH1:
        return "flash1"
    return "flash2" if is_torch and year < _LAST_FLASH2 else "newest"


def with_attention(device: Device, attention: str) -> Device:
    """Return the device with the rates of an attention, a result of `attention_of`."""
    if attention == "newest":
        return device
    older = device.with_flash2
    if attention == "flash2":
        return older
    return replace(
        older,
        attention_share=older.attention_share * FLASH1,
        attention_backward_share=older.attention_backward_share * FLASH1,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One quantity, measured and predicted.

    Attributes:
        line: Line of the table.
        family: Family of the row.
        name: The thing measured, such as a model on so many devices.
        quantity: "step", "memory", "forward", "backward", or a collective.
        plan: The Plan of the prediction, if it has one; the best one if the row leaves some settings open.
        measured: Measured seconds, or bytes of memory.
        predicted: Predicted seconds, or bytes of memory.
        fitted: Whether constants may have been fitted to the row.
    """

    line: int
    family: str
    name: str
    quantity: str
    plan: str = ""
    measured: float
    predicted: float
    fitted: bool

    @property
    def error(self) -> float:
        """Error relative to the measurement: above 0 if the prediction is too large."""
        return self.predicted / self.measured - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Accuracy:
    """Errors of several predictions, as shares of the measurements.

    Attributes:
        rows: Number of predictions.
        median: Median of the absolute errors.
        mean: Mean of the absolute errors.
        ninth_decile: The value that nine in ten absolute errors are below.
        bias: Mean of the errors with their signs.
    """

    rows: int
    median: float
    mean: float
    ninth_decile: float
    bias: float


def accuracy_of(comparisons: Iterable[Comparison]) -> Accuracy | None:
    """Return the accuracy of these predictions; None if there are none."""
    errors = [each.error for each in comparisons]
    if not errors:
        return None
    absolute = sorted(map(abs, errors))
    return Accuracy(
        rows=len(errors),
        median=median(absolute),
        mean=fmean(absolute),
        ninth_decile=_ninth_decile(absolute),
        bias=fmean(errors),
    )


def _ninth_decile(values: Sequence[float]) -> float:
    """Return the ninth decile, by linear interpolation between the values, as numpy does."""
    return quantiles(values, n=10, method="inclusive")[-1] if len(values) > 1 else values[0]
