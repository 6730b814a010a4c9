"""The branches of a search that may still hold the best Plans, least bound first."""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple, Protocol

from shoal.planner.sized import Fitted, Piped, Sized
from shoal.planner.space import Degrees
from shoal.planner.tree import Branch, Tree

Key = tuple[float, tuple[int, ...]]
"""What branches are sorted by: the bound, and the place in the tree, which begins with the number of the
degrees. Equal bounds come in the order of the tree, whatever the bounds of the branches that they grew from.
"""

NONE_LEFT: Key = (math.inf, ())
"""The key of an empty frontier."""


class Look(NamedTuple):
    """A Plan that was played; None if it does not fit."""

    fitted: Fitted | None


Taken = tuple[Key, Look | None]
"""A branch that was taken out, and the look at it if it was a Plan to play. Otherwise its branches are in."""


class Takes(Protocol):
    """Branches that are taken out one after another."""

    @property
    def top(self) -> Key:
        """The least key."""

    def take(self) -> Look | None:
        """Take out the branch with the least key: play it, or put in the branches that grow from it."""

    def drop(self) -> None:
        """Take out the branch with the least key, without a look."""


class Frontier:
    """The branches of some degrees, in a heap.

    Args:
        tree: The tree of Plans.
        degrees: Degrees, each with its number, by which equal bounds are sorted.
        room: Bytes that a Plan may fill.
        limit: Number of degrees whose best Plans are looked for.
    """

    def __init__(self, tree: Tree, degrees: Iterable[tuple[int, Degrees]], room: float, limit: int) -> None:
        self._room = room
        self._limit = limit
        self._best: dict[Degrees, float] = {}  # seconds of the Plans that were played
        self._ceiling = math.inf  # seconds above which no branch is needed
        self._heap: list[tuple[float, tuple[int, ...], Branch]] = []
        self._ahead = deque[Taken]()  # taken out before they were asked for
        for number, each in degrees:
            self._put(tree.portions(each), (number,))

    @property
    def top(self) -> Key:
        """The least key."""
        return self._ahead[0][0] if self._ahead else self.least

    @property
    def least(self) -> Key:
        """The least key of a branch that nothing took yet."""
        return self._heap[0][:2] if self._heap else NONE_LEFT

    @property
    def may_go_ahead(self) -> bool:
        """Whether to take out that branch before it is asked for.

        A search for the best Plan plays one or two, so it pays to wait until they are asked for.
        """
        if not self._heap or self._heap[0][0] >= self._ceiling:
            return False
        return self._limit > 1 or not isinstance(self._heap[0][2], Sized | Piped)

    def take(self) -> Look | None:
        """Take out the branch with the least key: play it, or put in the branches that grow from it."""
        return (self._ahead.popleft() if self._ahead else self.next())[1]

    def drop(self) -> None:
        """Take out the branch with the least key, without a look."""
        if self._ahead:
            self._ahead.popleft()
        else:
            heapq.heappop(self._heap)

    def go_ahead(self) -> None:
        """Take out the branch with the least key before it is asked for."""
        self._ahead.append(self.next())

    def next(self) -> Taken:
        """Take out the branch with the least key that nothing took yet, and return it."""
        seconds, place, branch = heapq.heappop(self._heap)
        if isinstance(branch, Piped):
            look = Look(branch.fitted(self._room))
            if look.fitted is not None:
                self._note(branch.degrees, look.fitted.seconds)
            return (seconds, place), look
        self._put(branch.branches, place)
        return (seconds, place), None

    def _note(self, degrees: Degrees, seconds: float) -> None:
        """Note a Plan that was played."""
        self._best[degrees] = min(seconds, self._best.get(degrees, math.inf))
        if len(self._best) >= self._limit:
            self._ceiling = sorted(self._best.values())[self._limit - 1]

    def _put(self, branches: Iterable[Branch], place: tuple[int, ...]) -> None:
        heap, room = self._heap, self._room
        for number, branch in enumerate(branches):
            seconds = branch.seconds(room)
            if seconds < math.inf:
                heapq.heappush(heap, (seconds, (*place, number), branch))
