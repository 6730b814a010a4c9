"""The account of a run that goes on: what was appended to its events is read, the rest is kept."""

from __future__ import annotations

from typing import final

from shoal.run.account import Account, Ledger
from shoal.run.directory import Run
from shoal.run.events import parse_events
from shoal.run.follow import FollowedFile

__all__ = ["FollowedAccount"]


@final
class FollowedAccount:
    """Follow the events of a run.

    Args:
        run: The run.
    """

    def __init__(self, run: Run) -> None:
        self._files = [FollowedFile(run.events_file), FollowedFile(run.members_file)]
        self._ledger = Ledger()

    def look(self) -> Account | None:
        """Read what is new, and return the account; None for a run without events."""
        for event in parse_events([line for file in self._files for line in file.lines()]):
            self._ledger.take(event)
        return self._ledger.account()
