"""The words of `shoal train` that a launcher starts, checked before anything is started or submitted."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Self

from shoal.cli.commands import add_command
from shoal.cli.nodes import given_run
from shoal.errors import ConfigError


@dataclass(frozen=True, slots=True)
class TrainWords:
    """The arguments of the program that a launcher starts.

    Attributes:
        words: The arguments, from `train` on.
        parsed: What `shoal train` reads in them.
    """

    words: tuple[str, ...]
    parsed: argparse.Namespace

    @classmethod
    def of(cls, words: Sequence[str]) -> Self:
        """Check the words as `shoal train` does.

        Raises:
            ConfigError: They are those of another command.
        """
        if words[0] != "train":
            raise ConfigError(
                f"shoal launch was to start `{words[0]}`",
                possible="train, with its options",
                change="write: shoal launch TARGET [options] -- train [options of shoal train]",
            )
        parser = argparse.ArgumentParser(prog="shoal launch TARGET --")
        add_command(parser.add_subparsers(), "train")
        return cls(tuple(words), parser.parse_args(words))

    @property
    def run(self) -> Path:
        """The directory of the run, as far as the words say; that of a run that goes on is not in them."""
        return given_run(self.parsed) or Path("runs")

    @property
    def grace(self) -> float | None:
        """Seconds from a signal until the ranks must have ended."""
        given: float | None = self.parsed.grace
        return given

    def without(self, *options: str) -> Self:
        """Return these words; they must not have options that the launcher has itself.

        Raises:
            ConfigError: They have one.
        """
        for option in options:
            if any(word == option or word.startswith(f"{option}=") for word in self.words):
                raise ConfigError(
                    f"{option} was given to train, and the launcher decides it",
                    possible=f"{option} before --",
                    change=f"give {option} to shoal launch",
                )
        return self

    def resumable(self) -> Self:
        """Return words with which a second start goes on where the first one ended."""
        added: list[str] = []
        if self.parsed.directory is None and self.parsed.resume in (None, "auto"):
            added += ["--run", f"runs/{datetime.now():%Y%m%d-%H%M%S}"]
        if self.parsed.resume is None:
            added += ["--resume", "auto"]
        return type(self).of([*self.words, *added])

    def with_grace(self, seconds: float) -> Self:
        """Return words that say how long the system waits after a signal."""
        return type(self).of([*self.words, "--grace", f"{seconds:g}"])


def add_words(parser: argparse.ArgumentParser) -> None:
    """Add what all targets have: the words to start, and --dry-run."""
    parser.add_argument(
        "--dry-run", action="store_true", help="print what would be run or submitted, and do nothing"
    )
    parser.add_argument(
        "words",
        metavar="WORD",
        nargs="+",
        help="what to start, after --: train, with its options",
    )
