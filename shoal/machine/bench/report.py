"""The report of rank 0: lines as they are measured and facts below them, or one JSON object at the end."""

from __future__ import annotations

import importlib
import json
import os
import platform
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from shoal.collectives.ctypes_core import load_core
from shoal.errors import ConfigError, MissingExtraError
from shoal.machine.bench.collective import Row, ratio
from shoal.machine.bench.settings import Settings
from shoal.units import format_bytes, format_seconds

_COPY_BYTES = 256 << 20  # well beyond any cache
_COPIES = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """The machine that the bench ran on.

    Attributes:
        cpu: Model of the processor.
        cores: Number of cores that this process may use.
        memory: Bytes of memory.
        load: Load average of the last minute, before the measurement.
        python: Version of Python.
        torch: Version of torch.
        flag_seconds: Seconds for a flag in shared memory to get from one core to another, one way; None if it
            cannot be measured. On virtual machines it changes up to ten times with the placement of the
            cores, and the time of small messages with it.
        copy_rate: Bytes a second that one core copies from memory to memory.
    """

    cpu: str
    cores: int
    memory: int
    load: float
    python: str
    torch: str
    flag_seconds: float | None
    copy_rate: float

    def __str__(self) -> str:
        cores = "1 core" if self.cores == 1 else f"{self.cores} cores"
        flag = "not measured" if self.flag_seconds is None else format_seconds(self.flag_seconds)
        return (
            f"{self.cpu}, {cores}, {format_bytes(self.memory)}; "
            f"load average before {self.load:.2f}\n"
            f"a flag from core to core, one way: {flag}; one core copies {self.copy_rate / 1e9:.1f} GB/s\n"
            f"Python {self.python}, torch {self.torch}"
        )


def describe() -> Machine:
    """Return the facts about this machine; measures for about half a second, on this core alone."""
    load = os.getloadavg()[0]
    return Machine(
        cpu=_cpu_model(),
        cores=len(os.sched_getaffinity(0)),
        memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        load=load,
        python=platform.python_version(),
        torch=torch.__version__,
        flag_seconds=flag_latency(),
        copy_rate=copy_rate(),
    )


def flag_latency() -> float | None:
    """Return the seconds for a flag in shared memory to get from one core to another, one way.

    The native core measures it. None if the native core is not built, or there is one CPU core only.
    """
    core, cores = load_core(), sorted(os.sched_getaffinity(0))
    if core is None or len(cores) < 2:
        return None
    nanoseconds: float = core.flag_latency(cores[0], cores[1])
    return nanoseconds * 1e-9 if nanoseconds >= 0 else None


def copy_rate() -> float:
    """Return the bytes a second that this core copies from memory to memory: the median of a few copies."""
    source = torch.ones(_COPY_BYTES, dtype=torch.uint8)
    target = torch.zeros_like(source)
    seconds = []
    for _ in range(_COPIES):
        start = time.perf_counter()
        target.copy_(source)
        seconds.append(time.perf_counter() - start)
    return _COPY_BYTES / median(seconds)


def _cpu_model() -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """Facts that hold for all rows.

    Attributes:
        settings: What is measured.
        ranks: Number of ranks.
        machine: The machine that the bench runs on.
        versions: Name and version of each contestant's library, by contestant.
    """

    settings: Settings
    ranks: int
    machine: Machine
    versions: Mapping[str, str]


def report_table(points: Iterable[tuple[Row, ...]], facts: Facts) -> None:
    """Print each size when it is measured, and the facts at the end."""
    shown = None
    remarks: dict[str, None] = {}
    for point in points:
        first = point[0]
        if (first.collective, first.fresh) != shown:
            title = heading(first.collective, facts.settings.backends, facts.ranks, fresh=first.fresh)
            print(("\n" if shown else "") + title)
            shown = first.collective, first.fresh
        print(line(point), flush=True)
        remarks |= dict.fromkeys(remark for row in point if (remark := _remark(row)))
    method = (
        "time: one operation on the slowest rank; "
        f"median and range of {facts.settings.rounds} interleaved rounds"
    )
    print(
        "\n" + "\n".join([*remarks, method, str(facts.machine), "; ".join(facts.versions.values())]),
        flush=True,
    )


def report_json(points: Iterable[tuple[Row, ...]], facts: Facts) -> None:
    """Print one JSON object when all is measured; until then, print the progress on stderr."""
    rows = []
    for point in points:
        what = f"{point[0].collective}, {point[0].bytes} bytes{', fresh' * point[0].fresh}"
        print(f"measured: {what}", file=sys.stderr, flush=True)
        rows += [row.as_json() for row in point]
    content = {
        "machine": asdict(facts.machine),
        "settings": {**asdict(facts.settings), "ranks": facts.ranks},
        "versions": dict(facts.versions),
        "rows": rows,
    }
    print(json.dumps(content, indent=1), flush=True)


def _remark(row: Row) -> str:
    if row.problem:
        return f"{row.backend} does not do {row.collective}: {row.problem}"
    if row.wrong:
        return f"{row.backend} is wrong in {row.collective}, {row.bytes} bytes: {row.wrong} elements"
    return ""


_INCHES = (6.0, 4.2)  # size of one picture in the grid


def require_plot(path: Path) -> None:
    """Check that a picture can be written, before minutes of measurement.

    Raises:
        MissingExtraError: matplotlib is not installed.
        ConfigError: matplotlib does not write files with this ending, or the directory does not exist.
    """
    endings = sorted(_figure_class()().canvas.get_supported_filetypes())
    if path.suffix.removeprefix(".") not in endings:
        raise ConfigError(
            f"--plot {path}: {path.suffix or 'no ending'} is not a kind of picture",
            possible=", ".join(f".{ending}" for ending in endings),
            change="give the file one of these endings",
        )
    if not path.absolute().parent.is_dir():
        raise ConfigError(
            f"--plot {path}: the directory {path.parent} does not exist",
            possible="a file in a directory that exists",
            change="make the directory, or give another FILE",
        )


def plot(rows: Sequence[Row], path: Path) -> None:
    """Draw two plots side by side for each collective that has sizes; both axes are logarithmic.

    Args:
        rows: The rows, in the order of measurement.
        path: The file; its ending sets the kind of picture.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    measured = [row for row in rows if row.seconds and row.bytes]
    collectives = list(dict.fromkeys(row.collective for row in measured))
    grid = max(1, len(collectives))
    figure = _figure_class()(figsize=(2 * _INCHES[0], grid * _INCHES[1]), layout="constrained")
    for (times, rates), collective in zip(figure.subplots(grid, 2, squeeze=False), collectives, strict=False):
        of_collective = [row for row in measured if row.collective == collective]
        for backend, fresh in dict.fromkeys((row.backend, row.fresh) for row in of_collective):
            drawn = [row for row in of_collective if (row.backend, row.fresh) == (backend, fresh)]
            _draw(drawn, f"{backend}, fresh" if fresh else backend, times, rates)
        for axes, label in ((times, "time, us"), (rates, "busbw, GB/s")):
            axes.set(title=collective, xlabel="size, bytes", ylabel=label, xscale="log", yscale="log")
            axes.set_xscale("log", base=2)
            axes.grid(visible=True, which="major", alpha=0.3)
            axes.legend()
    figure.savefig(path, dpi=120)


def _draw(rows: Sequence[Row], label: str, times: Any, rates: Any) -> None:
    """Draw one contestant's lines, dashed for fresh tensors, and the range of its rounds."""
    style = {"marker": ".", "label": label, "linestyle": "--" if rows[0].fresh else "-"}
    sizes = [row.bytes for row in rows]
    (drawn,) = times.plot(sizes, [row.median * 1e6 for row in rows], **style)
    low, high = [min(row.seconds) * 1e6 for row in rows], [max(row.seconds) * 1e6 for row in rows]
    times.fill_between(sizes, low, high, color=drawn.get_color(), alpha=0.15)
    rates.plot(sizes, [row.busbw / 1e9 for row in rows], color=drawn.get_color(), **style)


def _figure_class() -> Any:
    try:
        return importlib.import_module("matplotlib.figure").Figure
    except ImportError as error:
        raise MissingExtraError("a plot", package="matplotlib", extra="plot") from error
