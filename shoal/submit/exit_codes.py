"""Exit codes of a training by which a scheduler decides what becomes of it."""

from __future__ import annotations

EXIT_STOPPED = 75
"""Exit code of a run that a signal stopped and that saved its state to be resumed; BSD's EX_TEMPFAIL."""

EXIT_WRONG_INPUT = 2
"""Exit code of a run that was given what cannot work, however often it is started."""
