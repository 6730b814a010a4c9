"""The launcher's side of generations of members: makes them, in the store of the ranks.

See `shoal.launch.elastic.elastic_rank`, the side of a member.

Members that end because another is lost: their groups report nothing, and cannot be left (NCCL).

They end by themselves once a generation without members is announced, or by SIGABRT if NCCL's watchdog was
quicker. Neither is a failure of theirs: they are started again at once, and none of the restarts is used up.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import final

from torch.distributed.distributed_c10d import PrefixStore, Store

from shoal.launch.local.outcome import EXIT_AGAIN

PREFIX = "members"
NEWEST = "newest"
OVER = "over"
STARTS_AGAIN = "starts again"
"""Keys of the store, and what stands before them."""

_DUMP = "exception_dump"  # what NCCL's watchdog sets if it fails; every later group that saw it would end


@dataclass(frozen=True, slots=True)
class Generation:
    """The members that train together.

    Attributes:
        number: Its number, from 0.
        members: The members, by rank.
        since: For each member, the first generation that its process was announced for.
        is_broken: Whether a member of the generation before was lost, so that its group cannot go on.
        starting: Number of members that are being started, and will be in a later generation.
    """

    number: int
    members: Sequence[int]
    since: Sequence[int] = ()
    is_broken: bool = False
    starting: int = 0


@final
class Roster:
    """The launcher's side: makes generations.

    Args:
        store: The store of the ranks.
    """

    def __init__(self, store: Store) -> None:
        self._all = store
        self._store = PrefixStore(PREFIX, store)
        self._members: Sequence[int] = ()
        self._since: dict[int, int] = {}
        self._awaited: set[int] = (
            set()
        )  # members that have not come to the newest generation, as far as known
        self.newest = -1

    def announce(self, members: Sequence[int], *, is_broken: bool, starting: int = 0) -> None:
        """Make a generation of these members."""
        self.newest += 1
        self._members, self._awaited = tuple(members), set(members)
        since = [self._since.setdefault(member, self.newest) for member in members]
        made = Generation(self.newest, self._members, since, is_broken, starting)
        self._all.delete_key(_DUMP)
        self._store.set(generation_key(self.newest), json.dumps(asdict(made)))
        self._store.set(NEWEST, str(self.newest))

    def end(self) -> None:
        """Tell all members that no other generation will come: the training has failed."""
        self._store.set(OVER, "")

    def expect(self, member: int) -> None:
        """Forget that a member was ready: it is started again."""
        self._since.pop(member, None)
        self._store.delete_key(ready_key(member))

    def is_ready(self, member: int) -> bool:
        """Whether a member that was started has come."""
        return bool(self._store.check([ready_key(member)]))

    def absent(self) -> list[int]:
        """Return the members of the newest generation that others wait for; empty if none has come yet."""
        for member in [each for each in self._awaited if self._store.check([here_key(self.newest, each)])]:
            self._awaited.discard(member)
        return sorted(self._awaited) if len(self._awaited) < len(self._members) else []

    @property
    def awaits(self) -> bool:
        """Whether a member has not come to the newest generation, as far as known."""
        return bool(self._awaited)

    @property
    def is_numbered_by_rank(self) -> bool:
        """Whether each member's number is its rank."""
        return list(self._members) == list(range(len(self._members)))

    def is_told_broken(self) -> bool:
        """Whether a member of the newest generation has told that its group has failed."""
        return bool(self._store.check([broken_key(self.newest)]))

    def steps_when_broken(self) -> int:
        """Return the steps that were made when the group of the newest generation failed; -1 if unknown."""
        return int(self._store.get(broken_key(self.newest)))

    def waited(self) -> tuple[int, list[int]]:
        """Return how many members of the newest generation have waited too long, and for which others.

        Members for which the fewer have waited are not named: they may wait too, since later.
        """
        waited = [each for each in self._members if self._store.check([waited_key(self.newest, each)])]
        others = [each for each in self._members if each not in waited]
        return len(waited), others if len(others) <= len(waited) else []

    def is_here(self, member: int) -> bool:
        """Whether a member has left the generation before the newest, whose group is gone."""
        return bool(self._store.check([here_key(self.newest, member)]))

    @property
    def starts_again(self) -> bool:
        """Whether members whose group is broken end, and must be started again."""
        return bool(self._store.check([STARTS_AGAIN]))


def generation_key(number: int) -> str:
    """Return the key of the description of a generation."""
    return f"generation {number}"


def here_key(generation: int, member: int) -> str:
    """Return the key of a member that has come to a generation."""
    return f"{generation} has {member}"


def broken_key(generation: int) -> str:
    """Return the key of the steps that were made when the group of a generation failed."""
    return f"{generation} is broken"


def waited_key(generation: int, member: int) -> str:
    """Return the key of a member whose group has waited too long."""
    return f"{generation} has waited in {member}"


def peer_key(member: int) -> str:
    """Return the key of where the launcher of a member serves files."""
    return f"peer of {member}"


def ready_key(member: int) -> str:
    """Return the key of a member that was started and has come."""
    return f"ready {member}"


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
