"""The CommonOrder of a step: the actions and messages of all ranks along a pipeline as one list.

`shoal.plan.schedules.transfers` puts all actions and messages in one order, in which nothing comes before
what it waits for. A player that goes through that order never has to come back to a rank, so it takes a
fraction of a microsecond for each action. It gives the times that the event engine gives, and notes nothing;
a test compares the two.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from shoal.plan.schedules import Action, Schedule, Times, Work, make, play
from shoal.simulate.course import NO_MESSAGE, Slot

__all__ = ["CommonOrder", "Entry", "Sent", "common_order_of", "made_order"]


Sent = tuple[int, int, int, int, bool]
"""A message between stages: its number, the places of sender and receiver, the number of the link between
them, and whether the receiver begins to receive before its latest action, and not after it.
"""

Entry = tuple[int, int, int, Sequence[Sent]]
"""An action: its place along the pipeline, the number of its slot, the number of the message that it waits
for (NO_MESSAGE if none), and the messages between the entry before and this one.
"""


class CommonOrder(NamedTuple):
    """A schedule's table as one list.

    Attributes:
        schedule: The schedule.
        slots: The slots, by number.
        entries: The actions of all ranks.
        pairs: By number of the link, sender and receiver.
        rounds: By place, pairs of positions in its list: an action in the middle, and the same one of the
            micro-batches that many later as there are ranks. None if there are none.
    """

    schedule: Schedule
    slots: Sequence[Slot]
    entries: Sequence[Entry]
    pairs: Sequence[tuple[int, int]]
    rounds: Sequence[Sequence[tuple[int, int]]] | None


@lru_cache(maxsize=128)
def made_order(name: str, ranks: int, virtual: int, microbatches: int) -> CommonOrder:
    """Return the CommonOrder of a named schedule; the arguments are those of `make`."""
    return common_order_of(make(name, ranks, virtual, microbatches))


def common_order_of(schedule: Schedule) -> CommonOrder:
    """Return the CommonOrder of a schedule. Receives begin one action early, as in the runtime."""
    made, ranks = _Making(schedule), schedule.ranks
    for key in _keys(schedule):
        if key // ranks % 2:
            made.act(key % ranks)
        else:
            made.send(key % ranks)
    return CommonOrder(schedule, tuple(made.slots), made.entries, tuple(made.links), _rounds(schedule))


class _Making:
    """The entries of a CommonOrder, made one after another."""

    def __init__(self, schedule: Schedule) -> None:
        self.entries: list[Entry] = []
        self.slots: list[Slot] = []
        self.links: dict[tuple[int, int], int] = {}
        self._count = schedule.microbatches
        self._placement = schedule.placement
        self._rows = [iter(row) for row in schedule.table]
        self._latest: list[Action | None] = [None] * schedule.ranks
        self._firsts, self._lasts = _ends(schedule)
        self._numbers: dict[tuple[int, int], int] = {}  # of slots, by stage and kind
        self._coming: dict[int, int] = {}  # numbers of messages, by the action that waits
        self._messages = 0
        self._sent: list[Sent] = []
        # By place, those that messages were exchanged with since its latest action began.
        self._since: list[list[int]] = [[] for _ in schedule.table]

    def act(self, place: int) -> None:
        """Add the next action of a place."""
        action = self._latest[place] = next(self._rows[place])
        work, stage = action.work, action.stage
        is_forward, is_weight = work is Work.FORWARD, work is Work.WEIGHT
        is_first, is_last = self._firsts[stage] is action, self._lasts[stage] is action
        kind = 4 * is_first + 2 * is_last + is_forward + 8 * is_weight + 16 * (work is Work.INPUT)
        slot = self._numbers.get((stage, kind))
        if slot is None:
            slot = self._numbers[stage, kind] = len(self.slots)
            self.slots.append(Slot(work, stage, is_first, is_last))
        needed = NO_MESSAGE
        if not is_weight:
            needed = self._coming.pop(self._waiting(stage, action.microbatch, is_forward), NO_MESSAGE)
        self.entries.append((place, slot, needed, self._sent))
        self._since[place], self._sent = [], []

    def send(self, place: int) -> None:
        """Add the message of the latest action of a place, if another place waits for one."""
        action = self._latest[place]
        assert action is not None, "a result comes after its action"
        is_forward = action.work is Work.FORWARD
        stage = action.stage + (1 if is_forward else -1)
        receiver = self._placement[stage]
        is_early = self._latest[receiver] is not None and place not in self._since[receiver]
        link = self.links.setdefault((place, receiver), len(self.links))
        self._sent.append((self._messages, place, receiver, link, is_early))
        self._coming[self._waiting(stage, action.microbatch, is_forward)] = self._messages
        self._messages += 1
        self._since[place].append(receiver)
        if not is_early:
            self._since[receiver].append(place)

    def _waiting(self, stage: int, microbatch: int, is_forward: bool) -> int:
        """Return what identifies the action that waits for a message."""
        return 2 * (stage * self._count + microbatch) + is_forward


def _keys(schedule: Schedule) -> list[int]:
    """Return the times of all actions and messages, in order, each with its place.

    With equal times, an action has the number (2 x its start + 1) x ranks + place, and a message 2 x the stop
    of its action x ranks + place: messages come before the actions that start when they are sent.
    """
    ranks, placement, last = schedule.ranks, schedule.placement, schedule.stages - 1
    played = play(schedule, Times.equal(schedule.stages))
    down = [stage < last and placement[stage] != placement[stage + 1] for stage in range(last + 1)]
    up = [stage > 0 and placement[stage] != placement[stage - 1] for stage in range(last + 1)]
    found: list[int] = []
    for place, row in enumerate(schedule.table):
        starts, stops = played.starts[place], played.stops[place]
        found += [int(2 * start + 1) * ranks + place for start in starts]
        found += [
            int(2 * stop) * ranks + place
            for action, stop in zip(row, stops, strict=True)
            if action.work is not Work.WEIGHT and (down if action.work is Work.FORWARD else up)[action.stage]
        ]
    found.sort()
    return found


def _ends(schedule: Schedule) -> tuple[dict[int, Action], dict[int, Action]]:
    """Return the first forward of each stage, and the last action that adds to its weights' gradients."""
    firsts: dict[int, Action] = {}
    lasts: dict[int, Action] = {}
    for row in schedule.table:
        for action in row:
            if action.work is Work.FORWARD:
                firsts.setdefault(action.stage, action)
            elif action.work is not Work.INPUT:
                lasts[action.stage] = action
    return firsts, lasts


def _rounds(schedule: Schedule) -> list[list[tuple[int, int]]] | None:
    """Return the rounds of a CommonOrder."""
    ranks, middle = schedule.ranks, schedule.microbatches // 2
    found: list[list[tuple[int, int]]] = []
    for row in schedule.table:
        first: dict[tuple[Work, int, int], int] = {}
        pairs = []
        for position, action in enumerate(row):
            microbatch = action.microbatch
            if middle - ranks <= microbatch < middle:
                first[action.work, action.stage, microbatch + ranks] = position
            elif middle <= microbatch < middle + ranks:
                before = first.get((action.work, action.stage, microbatch))
                if before is None:
                    return None
                pairs.append((before, position))
        found.append(pairs)
    return found
