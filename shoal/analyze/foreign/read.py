"""Find out what a path holds, and read it."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from shoal.analyze.foreign.chrome import read_traces
from shoal.analyze.foreign.table import read_table
from shoal.errors import RunError
from shoal.spec.timeline import Timeline

_TRACES = (".json", ".json.gz")
_TABLES = (".csv", ".parquet")


def is_foreign(path: str | os.PathLike[str]) -> bool:
    """Return whether a path is a table, a trace, or a folder with such files that is no Run."""
    given = Path(path)
    if given.is_dir():
        return not (given / "run.json").exists() and bool(_inside(given, (*_TRACES, *_TABLES)))
    return given.is_file() and given.name.endswith((*_TRACES, *_TABLES))


def read_foreign(path: str | os.PathLike[str], tell: Callable[[str], object] = lambda text: None) -> Timeline:
    """Read the Timeline of another program.

    A folder holds traces of PyTorch's profiler, one a rank, or one table of operations.

    Args:
        path: The folder or the file.
        tell: Gets a sentence if only a part of a large table is used.

    Raises:
        RunError: There is no such file, or not one that can be read; the message names the place in it.
        MissingExtraError: Parquet needs the package `pyarrow`.
    """
    given = Path(path)
    tables = _inside(given, _TABLES) if given.is_dir() else [given] if _ends(given, _TABLES) else []
    traces = _inside(given, _TRACES) if given.is_dir() else [given] if _ends(given, _TRACES) else []
    if len(tables) == 1:
        return read_table(tables[0], tell)
    if traces and not tables:
        return read_traces(traces)
    raise RunError(
        f"{given} holds {len(traces)} traces and {len(tables)} tables",
        possible=f"traces ({', '.join(_TRACES)}), one a rank, or one table ({', '.join(_TABLES)})",
        change="give a folder with the traces of one run only, or the path of the table",
    )


def _inside(folder: Path, endings: Sequence[str]) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_file() and _ends(path, endings))


def _ends(path: Path, endings: Sequence[str]) -> bool:
    return path.name.endswith(tuple(endings))
