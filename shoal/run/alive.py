"""Whether a run is going on: its first rank holds a lock on a file while it trains.

The system gives the lock back however the process ends, so that no file is left that says otherwise.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from pathlib import Path
from typing import final

from shoal.errors import RunError

__all__ = ["AliveLock", "is_alive"]

_TRIES, _PAUSE = 20, 0.005  # a reader that asks holds the lock for a moment


@final
class AliveLock:
    """Hold the lock of a run; where the file system has no locks, hold nothing.

    Args:
        path: The file, in the run's directory; made if absent.
        waits: Whether a process that holds it may be ending, as a rank of an older generation does. If not,
            it trains the run.

    Raises:
        RunError: Another process trains the run.
    """

    def __init__(self, path: Path, *, waits: bool = True) -> None:
        self._held: int | None = None
        is_of_another = False
        with contextlib.suppress(OSError):
            self._held = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            for _ in range(_TRIES):
                try:
                    fcntl.flock(self._held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    is_of_another = False
                    break
                except BlockingIOError:
                    is_of_another = True
                    time.sleep(_PAUSE)
        if is_of_another and not waits:
            self.close()
            raise RunError(
                f"another process trains the run {path.parent}",
                possible="one process for a run at a time; `shoal watch` shows how far it is",
                change="wait for its end or stop it, or give another --run",
            )

    def close(self) -> None:
        """Give the lock back, also if forked processes have the file open."""
        held, self._held = self._held, None
        if held is not None:
            with contextlib.suppress(OSError):
                fcntl.flock(held, fcntl.LOCK_UN)
            os.close(held)


def is_alive(path: Path) -> bool | None:
    """Return whether a process holds the lock; None if there is no such file, or it cannot be locked."""
    try:
        opened = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(opened, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return None
    finally:
        os.close(opened)
    return False
