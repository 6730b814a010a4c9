"""Where a command gets the processes of its local ranks from."""

from __future__ import annotations

import argparse
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shoal.launch import Nursery

__all__ = ["nursery_for"]


def nursery_for(args: argparse.Namespace, module: str) -> AbstractContextManager[Nursery | None]:
    """Return a context in which there is a nursery, if this process is the program itself.

    A program that calls `main` as a function may have threads, and threads do not survive a fork.

    Args:
        args: The command line.
        module: What the nursery imports for the ranks.
    """
    from shoal.launch import open_nursery

    return open_nursery(module) if args.is_program else nullcontext()
