"""The launcher's side of generations of members: makes them, in the store of the ranks.

See `shoal.launch.membership`, the side of a member.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import final

from torch.distributed.distributed_c10d import PrefixStore, Store

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
