"""Members that end because another is lost: their groups report nothing, and cannot be left (NCCL).

They end by themselves once a generation without members is announced, or by SIGABRT if NCCL's watchdog was
quicker. Neither is a failure of theirs: they are started again at once, and none of the restarts is used up.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from typing import final

from shoal.launch.outcome import EXIT_AGAIN
from shoal.launch.roster import Roster

_ENDS = 30.0  # seconds in which a survivor ends: the driver may take some to free the memory of a device
_STARTS = 300.0  # seconds in which a survivor that is started again becomes ready
_OTHERS = 5.0  # seconds after the last one came, for members that are started for another reason


@final
class Survivors:
    """The members that were left when another was lost, until they are ready again.

    Args:
        roster: The generations.
    """

    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        self._ending: set[int] = set()
        self._warned: set[int] = set()  # members to which a broken generation was announced
        self._late: set[int] = set()
        self._again: set[int] = set()
        self._since = 0.0

    def announce(
        self, members: Sequence[int], present: Collection[int], *, is_broken: bool, starting: int = 0
    ) -> None:
        """Make a generation; if that of the members that are present is broken, they may end by themselves.

        Args:
            members: The members of the generation.
            present: The members of the one before that have not ended.
            is_broken: Whether a member of the one before was lost.
            starting: Number of members that are being started.
        """
        self._warned = {member for member in self._warned if not self._roster.is_here(member)}
        if is_broken:
            self._warned.update(present)
        self._roster.announce(members, is_broken=is_broken, starting=starting)

    def end(self, members: Collection[int]) -> None:
        """Note that members are to end, because their group is lost."""
        self._ending, self._late, self._since = set(members), set(), time.monotonic()
        text = "shoal: all ranks start again, since a group of NCCL that has lost one cannot go on"
        print(text, file=sys.stderr, flush=True)

    def take(self, codes: Mapping[int, int]) -> set[int]:
        """Return which of some members that ended did so because another is lost.

        An abort of a member that waited for nobody is a failure of its own. So is `EXIT_AGAIN` of one to
        which no broken generation was announced: any program may end with this code.

        Args:
            codes: The exit code of each.
        """
        if not self._roster.starts_again:
            return set()
        again = {each for each, code in codes.items() if code == EXIT_AGAIN and self._is_warned(each)}
        again |= self._late.intersection(codes)
        aborted = {each for each, code in codes.items() if code == -signal.SIGABRT}
        has_cause = len(again | aborted) < len(codes)
        found = again | {each for each in aborted if has_cause or each in self._ending}
        self._ending.difference_update(codes)
        self._warned.difference_update(codes)
        self._again = (self._again - codes.keys()) | found
        return found

    def late(self) -> set[int]:
        """Return the members that have not ended in time, and must be killed."""
        # One that was between two groups has nothing to end.
        self._ending = {member for member in self._ending if not self._roster.is_here(member)}
        if self._ending and time.monotonic() - self._since > _ENDS and not self._late:
            self._late = set(self._ending)
            named = ", ".join(map(str, sorted(self._late)))
            text = f"shoal: of the other ranks {named} did not end within {_ENDS:g} s, and are killed"
            print(text, file=sys.stderr, flush=True)
        return self._late & self._ending

    def _is_warned(self, member: int) -> bool:
        return member in self._ending or (member in self._warned and not self._roster.is_here(member))

    def are_awaited(self, starting: Collection[int], came: float) -> bool:
        """Return whether the next generation waits for more members.

        Args:
            starting: The members that are being started.
            came: When a member became ready last.
        """
        now = time.monotonic()
        if self._ending or (not self._again.isdisjoint(starting) and now - self._since < _STARTS):
            return True
        return bool(starting) and now - max(came, self._since) < _OTHERS
