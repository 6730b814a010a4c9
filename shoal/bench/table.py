"""Formats rows as lines of text: one contestant in the form of nccl-tests, or several side by side."""

from __future__ import annotations

from collections.abc import Sequence

from shoal.bench.row import Row, ratio

_GAP = "  "
_BAR = "|"


def heading(collective: str, backends: Sequence[str], ranks: int, *, fresh: bool = False) -> str:
    """Return the lines above a collective's rows, for fresh or for reused tensors."""
    title = f"{collective}, {ranks} {'rank' if ranks == 1 else 'ranks'}{', fresh tensors' * fresh}"
    names, units = _what("size", "count", "type", "op"), _what("(B)", "", "", "")
    if len(backends) == 1:
        alone = (("time", 8), ("range", 15), ("algbw", 7), ("busbw", 7), ("check", 7))
        names += [f"{name:>{width}}" for name, width in alone]
        measures = ("(us)", "(us)", "(GB/s)", "(GB/s)", "(wrong)")
        units += [f"{unit:>{width}}" for unit, (_, width) in zip(measures, alone, strict=True)]
        return "\n".join([f"{title}, {backends[0]}", _join(names), _join(units)])
    tops = _what("", "", "", "")
    for backend in backends:
        columns = [("time", "(us)", 8), ("range", "(us)", 15), ("busbw", "(GB/s)", 7)]
        if backend != backends[0]:
            columns.append(("ratio", "", 6))
        names += [_BAR, *(f"{name:>{width}}" for name, _, width in columns)]
        units += [_BAR, *(f"{unit:>{width}}" for _, unit, width in columns)]
        tops += [_BAR, backend.center(sum(width + len(_GAP) for _, _, width in columns) - len(_GAP))]
    tops.append(_BAR)
    names += [_BAR, f"{'check':>7}"]
    units += [_BAR, f"{'(wrong)':>7}"]
    title += f"; ratio: time over that of {backends[0]}"
    return "\n".join([title, _join(tops), _join(names), _join(units)])


def line(rows: Sequence[Row]) -> str:
    """Return the line of one size: the row of each contestant, in the order of the heading."""
    first = rows[0]
    if first.bytes:
        cells = _what(str(first.bytes), str(first.count), first.dtype, first.op or "-")
    else:
        cells = _what("-", "-", "-", "-")
    if len(rows) == 1:
        return _join([*cells, *_times(first), _rate(first, "algbw"), _rate(first, "busbw"), _check(rows)])
    for row in rows:
        cells += [_BAR, *_times(row), _rate(row, "busbw")]
        if row is not first:
            times = ratio(row, first)
            cells.append(f"{'-' if times is None else _digits(times):>6}")
    return _join([*cells, _BAR, _check(rows)])


def _what(size: str, count: str, dtype: str, op: str) -> list[str]:
    return [f"{size:>10}", f"{count:>9}", f"{dtype:>8}", f"{op:>7}"]


def _times(row: Row) -> list[str]:
    if not row.seconds:
        return [f"{'-':>8}", f"{'-':>15}"]
    low, high = (_digits(seconds * 1e6) for seconds in (min(row.seconds), max(row.seconds)))
    return [f"{_digits(row.median * 1e6):>8}", f"{f'{low}-{high}':>15}"]


def _rate(row: Row, name: str) -> str:
    return f"{_digits(getattr(row, name) / 1e9) if row.seconds and row.bytes else '-':>7}"


def _check(rows: Sequence[Row]) -> str:
    """Return the number of wrong elements of all contestants; remarks below the table name them."""
    checked = [row.wrong for row in rows if row.wrong is not None]
    return f"{sum(checked) if checked else '-':>7}"


def _digits(value: float) -> str:
    """Format a number with four digits, or as a whole number if that has more.

    >>> _digits(0.01234), _digits(12.345), _digits(123456.7)
    ('0.0123', '12.35', '123457')
    """
    whole = len(str(int(value)))
    return f"{value:.{max(0, 4 - whole) + (value < 0.1)}f}"


def _join(cells: Sequence[str]) -> str:
    return _GAP.join(cells).rstrip()
