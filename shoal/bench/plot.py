"""Draws rows as a picture: time, with the range of its rounds, and busbw, over size."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shoal.bench.row import Row
from shoal.errors import ConfigError, MissingExtraError

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
