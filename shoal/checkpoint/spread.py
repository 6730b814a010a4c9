"""Checkpoints that no file system holds in full: each host keeps some of the files, in its own directory."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from shoal.checkpoint.manifest import Manifest

__all__ = ["Spread"]


class Spread(Protocol):
    """How the checkpoints of one directory are spread over hosts."""

    @property
    def directory(self) -> Path:
        """This host's directory."""

    @property
    def is_first(self) -> bool:
        """Whether this rank acts for its host."""

    @property
    def first(self) -> int:
        """The rank that acts for this rank's host."""

    def copy(self, staging: Path, manifest: Manifest) -> None:
        """Copy files that other hosts have written, whose checkpoint is not complete yet."""

    def require(self, path: Path, manifest: Manifest, names: Iterable[str]) -> None:
        """Get files of a checkpoint that this host lacks, verified, from others.

        Raises:
            CorruptCheckpointError: No other host has a file as the manifest says.
        """
