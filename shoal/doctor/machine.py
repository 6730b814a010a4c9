"""What can be read of a machine: files, folders, links, file systems and the output of commands.

All checks read through a `Machine`, so that they also run on a machine that was recorded (`recorded.py`).
Nothing here raises because something is absent: a machine without GPUs, or a user without rights, is normal.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, final

_COMMAND_SECONDS = 20.0
_MOST = 4 << 20  # characters of a file or an output that are read

_PREFIXES = ("NCCL_", "UCX_", "FI_", "OMPI_MCA_btl", "SHOAL_", "TORCH_NCCL_", "GLOO_", "OMP_", "CUDA_VISIBLE")


class Space(NamedTuple):
    """Bytes of a file system."""

    total: int
    free: int


class Machine(ABC):
    """A machine, at one moment."""

    @property
    @abstractmethod
    def environment(self) -> Mapping[str, str]:
        """The environment variables that matter to communication."""

    @abstractmethod
    def read(self, path: str) -> str | None:
        """Return the text of a file; None if it is absent or may not be read."""

    @abstractmethod
    def names(self, path: str) -> Sequence[str]:
        """Return the sorted names in a folder; empty if it is absent."""

    @abstractmethod
    def resolve(self, path: str) -> str:
        """Return the absolute path that a path with links leads to; empty if it is absent."""

    @abstractmethod
    def run(self, *command: str) -> str | None:
        """Return what a command prints; None if it is not installed or fails."""

    @abstractmethod
    def space(self, path: str) -> Space | None:
        """Return the space of the file system that holds a path; None if it is absent."""

    def exists(self, path: str) -> bool:
        """Return whether a file or folder is there."""
        return bool(self.resolve(path))


@final
class LiveMachine(Machine):
    """The machine that this process runs on."""

    @property
    def environment(self) -> Mapping[str, str]:
        """The environment of this process."""
        return relevant(os.environ)

    def read(self, path: str) -> str | None:
        """Read a file."""
        try:
            with open(path, encoding="utf-8", errors="replace") as file:
                return file.read(_MOST)
        except OSError:
            return None

    def names(self, path: str) -> Sequence[str]:
        """List a folder."""
        try:
            return sorted(os.listdir(path))
        except OSError:
            return []

    def resolve(self, path: str) -> str:
        """Follow links."""
        return os.path.realpath(path) if os.path.exists(path) else ""

    def run(self, *command: str) -> str | None:
        """Run a command, at most some seconds."""
        if shutil.which(command[0]) is None:
            return None
        try:
            done = subprocess.run(
                command,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=_COMMAND_SECONDS,
                check=False,
                stdin=subprocess.DEVNULL,
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout[:_MOST] if done.returncode == 0 else None

    def space(self, path: str) -> Space | None:
        """Ask the file system."""
        try:
            found = os.statvfs(Path(path))
        except OSError:
            return None
        return Space(found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize)


def relevant(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of an environment that matter to communication."""
    return {name: value for name, value in sorted(environment.items()) if name.startswith(_PREFIXES)}


def number(text: str | None) -> int | None:
    """Return a text as a whole number; None if it is none.

    >>> number(" 42\\n"), number("max"), number(None)
    (42, None, None)
    """
    try:
        return int((text or "").strip())
    except ValueError:
        return None
