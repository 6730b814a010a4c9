"""Temporary folders of processes that may be killed: later ones remove what is left.

A process locks its folder (flock) while it uses it, and the kernel lets go of the lock when the process, and
all that it forked, have ended. So who gets the lock knows that the owner is gone, in whatever container or
PID namespace it ran. What is in doubt stays: folders of other users, of another boot or another host, links,
and all on file systems that have no such locks.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from shoal.proc import boot_id

__all__ = ["scratch_folder"]

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW


@contextlib.contextmanager
def scratch_folder(prefix: str = "shoal-", parent: Path | None = None) -> Iterator[Path]:
    """Make a folder that only this user can read, and remove it after the context.

    Remove such folders too whose owner is gone.

    Args:
        prefix: The beginning of their names.
        parent: Where they are; by default the folder for temporary files.
    """
    parent = parent or Path(tempfile.gettempdir())
    _remove_left(prefix, parent)
    folder, lock = _make(prefix, parent)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _make(prefix: str, parent: Path) -> tuple[Path, int]:
    """Return a new folder and the descriptor that holds its lock."""
    name = f"{prefix}{os.getpid()}-{_boot()}-"
    while True:
        folder = Path(tempfile.mkdtemp(prefix=name, dir=parent))
        lock = os.open(folder, _FOLDER)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if os.path.samestat(folder.lstat(), os.fstat(lock)):
                return folder, lock
        except FileNotFoundError:  # who removes what is left came before the lock
            pass
        except OSError:  # no locks here: this name is not looked for
            folder.rmdir()
            name = f"{prefix}{os.getpid()}-unlocked-"
            os.close(lock)
            folder = Path(tempfile.mkdtemp(prefix=name, dir=parent))
            return folder, os.open(folder, _FOLDER)
        os.close(lock)


def _remove_left(prefix: str, parent: Path) -> None:
    """Remove the folders of this user, made since the machine's start, of which nobody holds the lock."""
    pattern = re.compile(rf"{re.escape(prefix)}\d+-{_boot()}-\w+")
    with contextlib.suppress(OSError):
        for name in os.listdir(parent):
            if pattern.fullmatch(name):
                with contextlib.suppress(OSError):
                    _remove_if_left(parent / name)


def _remove_if_left(folder: Path) -> None:
    lock = os.open(folder, _FOLDER)
    try:
        if os.fstat(lock).st_uid == os.getuid():
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder)
    finally:
        os.close(lock)


def _boot() -> str:
    """Return what this start of the machine is called; a new word where it has no name."""
    return boot_id().partition("-")[0] or os.urandom(4).hex()
