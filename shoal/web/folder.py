"""The runs that the pages show: one run, or all in a folder."""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict
from pathlib import Path

from shoal.diagnosis.run_follower import RunFollower
from shoal.errors import RunError, nearest
from shoal.run import Run

_KEPT = 8
"""Runs whose columns stay in memory."""
_MOST_LISTED = 500


class Folder:
    """A run, or a folder of runs. A run is named by its directory, and only names that are there open one.

    Args:
        path: The run or the folder.

    Raises:
        RunError: The path does not exist, or is a file.
    """

    def __init__(self, path: Path) -> None:
        if not path.is_dir():
            raise RunError(
                f"{path} {'is a file' if path.exists() else 'does not exist'}",
                possible="a run, or a folder of runs such as runs/",
                change="give such a path; without runs there are the pages that need none: shoal web .",
            )
        self.path = path
        self._is_run = (path / "run.json").is_file()
        self._watched: OrderedDict[str, RunFollower] = OrderedDict()
        self._lock = threading.Lock()

    def names(self) -> list[str]:
        """Return the names of the runs, the newest first."""
        return [path.name for path in self._paths()]

    def open(self, name: str = "") -> RunFollower | None:
        """Return the run with a name; without a name the newest, or None if there is none.

        Raises:
            RunError: No run has this name.
        """
        paths = {path.name: path for path in self._paths()}
        if not name:
            name = next(iter(paths), "")
        if not name:
            return None
        if name not in paths:
            raise RunError(
                f"there is no run {name[:80]!r} here{nearest(name, paths)}",
                possible=", ".join(itertools.islice(paths, 5)) or "none: the folder holds no run",
                change="choose one of these",
            )
        with self._lock:
            watched = self._watched.pop(name, None) or RunFollower(Run.open(paths[name]))
            self._watched[name] = watched
            while len(self._watched) > _KEPT:
                self._watched.popitem(last=False)
        return watched

    def _paths(self) -> list[Path]:
        if self._is_run:
            return [self.path.resolve()]
        described = []
        for path in self.path.glob("*/run.json"):
            try:
                described.append((path.stat().st_mtime_ns, path.parent))
            except OSError:
                continue
        return [path for _, path in sorted(described, reverse=True)[:_MOST_LISTED]]
