"""The Timeline that a path of the command line names: of a Run, or of another program."""

from __future__ import annotations

import sys
from pathlib import Path

from shoal.foreign import is_foreign, read_foreign
from shoal.run import Run
from shoal.simulate import mark_bubbles, measured_timeline
from shoal.timeline import Timeline


def timeline_at(path: Path) -> Timeline:
    """Return the measured timeline of a Run, of a folder of traces or of a table, with bubbles marked.

    Raises:
        RunError: The path is none of these, or a file cannot be read.
        ShoalError: A file of the Run is malformed.
    """
    if is_foreign(path):
        return mark_bubbles(read_foreign(path, lambda text: print(f"shoal: {text}", file=sys.stderr)))
    return measured_timeline(Run.open(path))
