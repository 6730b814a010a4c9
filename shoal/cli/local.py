"""What commands that start ranks share: where processes come from, and how numbers are read."""

from __future__ import annotations

import argparse
import math
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shoal.launch.local import Nursery


def nursery_for(args: argparse.Namespace, module: str) -> AbstractContextManager[Nursery | None]:
    """Return a context in which there is a nursery, if this process is the program itself.

    A program that calls `main` as a function may have threads, and threads do not survive a fork.

    Args:
        args: The command line.
        module: What the nursery imports for the ranks.
    """
    from shoal.launch.local import open_nursery

    return open_nursery(module) if args.is_program else nullcontext()


def positive_seconds(text: str) -> float:
    """Return a number of seconds above 0, for argparse."""
    seconds = float(text)
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is no number of seconds above 0")
    return seconds


def positive_whole(text: str) -> int:
    """Return a whole number above 0, for argparse."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is no whole number above 0")
    return number


def whole(text: str) -> int:
    """Return a whole number from 0, for argparse."""
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"{text} is below 0")
    return number


def least_and_most(text: str) -> tuple[int, int] | None:
    """Return the numbers of `N` or `MIN:MAX`; N is both. None if they are no whole numbers."""
    least, between, most = text.partition(":")
    try:
        return int(least), int(most if between else least)
    except ValueError:
        return None
