"""The CommonOrder of a step: the actions and messages of all ranks along a pipeline as one list.

All actions and messages stand in the order of their times if every piece of work takes one unit: an action at
its start, a message at the stop of the action that makes it. So nothing comes before what it waits for. The
runtime takes each rank's sends and receives from this order (`transfers`), and a simulation that goes through
it never has to come back to a rank (`play_in_order`).

Play a CommonOrder: when each action of a step starts, in one pass.

Everything comes after what it waits for, so one loop gives all times. A message travels once it was sent, its
receiver has begun to receive, and the message before it on that link has arrived. What actions do beside
their seconds is left to the caller: an action is handed to it if its seconds are not known, or if something
still travels on its rank when it starts.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import NamedTuple

from shoal.spec.plan.schedules.kinds import make
from shoal.spec.plan.schedules.play import Times, awaited_actions, numbered, play
from shoal.spec.plan.schedules.schedule import Action, Schedule, Work

NO_MESSAGE = -1


class Slot(NamedTuple):
    """Actions of a stage that take equally long.

    Attributes:
        work: Kind of the work.
        stage: Number of the stage.
        is_first: Whether it is the stage's first forward of a step.
        is_last: Whether it is the last action that adds to the gradients of the stage's weights.
    """

    work: Work
    stage: int
    is_first: bool
    is_last: bool


Sent = tuple[int, int, int, int, bool]
"""A message between stages: its number, the places of sender and receiver, the number of the link between
them, and whether the receiver begins to receive before its latest action, and not after it.
"""

Entry = tuple[int, int, int, Sequence[Sent]]
"""An action: its place along the pipeline, the number of its slot, the number of the message that it waits
for (NO_MESSAGE if none), and the messages between the entry before and this one.
"""


@dataclass(frozen=True)
class CommonOrder:
    """A schedule's table as one list.

    Attributes:
        schedule: The schedule.
        slots: The slots, by number.
        entries: The actions of all ranks.
        pairs: By number of the link, sender and receiver.
    """

    schedule: Schedule
    slots: Sequence[Slot]
    entries: Sequence[Entry]
    pairs: Sequence[tuple[int, int]]

    @cached_property
    def numbers(self) -> Counter[int]:
        """By slot, how many actions of a step have it."""
        return Counter(entry[1] for entry in self.entries)

    @cached_property
    def rounds(self) -> Sequence[Sequence[tuple[int, int]]] | None:
        """Return, by place, pairs of positions in its list: an action in the middle, and the same one of the
        micro-batches that many later as there are ranks. None if there are none.
        """
        return _rounds(self.schedule, numbered(self.schedule))


@lru_cache(maxsize=128)
def made_order(name: str, ranks: int, virtual: int, microbatches: int) -> CommonOrder:
    """Return the CommonOrder of a named schedule; the arguments are those of `make`."""
    return common_order_of(make(name, ranks, virtual, microbatches))


def common_order_of(schedule: Schedule) -> CommonOrder:
    """Return the CommonOrder of a schedule. Receives begin one action early, as in the runtime."""
    made = _Making(schedule)
    made.run()
    return CommonOrder(schedule, tuple(made.slots), made.entries, tuple(made.links))


class _Making:
    """The entries of a CommonOrder, made one after another. Actions have the numbers of `Precedence`.

    Ranks go through their rows as time goes on; a whole backward takes two units of time, and all else one.
    At each time messages come before the actions that start when they are sent.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.entries: list[Entry] = []
        self.slots: list[Slot] = []
        self.links: dict[tuple[int, int], int] = {}
        self._schedule = schedule
        self._rows = numbered(schedule)
        self._slots = _slots(schedule, self.slots)
        size = schedule.stages * schedule.microbatches
        self._size = size
        self._latest = [-1] * schedule.ranks  # by place, the number of its latest action
        self._coming = [NO_MESSAGE] * (3 * size)  # by number of the action that waits, its message
        self._messages = 0
        self._sent: list[Sent] = []  # messages after the latest entry
        # By place, those that messages were exchanged with since its latest action began.
        self._since: list[list[int]] = [[] for _ in range(schedule.ranks)]

    def run(self) -> None:
        """Add all actions and messages.

        Raises:
            PlanError: The table can never end.
        """
        rows, slots, latest, since = self._rows, self._slots, self._latest, self._since
        coming, entries = self._coming, self.entries
        count = self._schedule.microbatches
        awaited, receivers = awaited_actions(self._schedule.stages, count), _receivers(self._schedule)
        takes_two = [slot.work is Work.BACKWARD for slot in self.slots]
        done = bytearray(len(awaited))
        positions, lengths = [0] * len(rows), [len(row) for row in rows]
        waiting: dict[int, int] = {}  # by number of an action, the place that waits for it
        able = list(range(len(rows)))  # places that may begin an action now, ascending
        soon, later = list[int](), list[int]()  # places whose action ends one and two units later
        while able:
            for place in able:
                position = positions[place]
                if position == lengths[place]:
                    continue
                number = rows[place][position]
                before = awaited[number]
                if before >= 0 and not done[before]:
                    waiting[before] = place
                    continue
                positions[place], latest[place] = position + 1, number
                slot = slots[place][position]
                entries.append((place, slot, coming[number], self._sent or ()))
                if self._sent:
                    self._sent = []
                if since[place]:
                    since[place] = []
                (later if takes_two[slot] else soon).append(place)
            able, soon, later = (soon, later, []) if soon else (later, [], [])
            able.sort()
            freed = []
            for place in able:
                number = latest[place]
                done[number] = True
                receiver = receivers[number // count]
                if receiver >= 0:
                    self._send(number, place, receiver)
                if number in waiting:
                    freed.append(waiting.pop(number))
            if freed:
                able = sorted(able + freed)
        if positions != lengths:
            play(self._schedule, Times.equal(self._schedule.stages))  # raises

    def _send(self, number: int, place: int, receiver: int) -> None:
        """Add the message with the result of this action."""
        latest, since, count = self._latest, self._since, self._schedule.microbatches
        is_early = latest[receiver] >= 0 and place not in since[receiver]
        link = self.links.setdefault((place, receiver), len(self.links))
        self._sent.append((self._messages, place, receiver, link, is_early))
        self._coming[number + count if number < self._size else number - count] = self._messages
        self._messages += 1
        since[place].append(receiver)
        if not is_early:
            since[receiver].append(place)


def _receivers(schedule: Schedule) -> list[int]:
    """Return, by kind of work and stage, the place that waits for the result; -1 for none, or its own."""
    placement = schedule.placement
    after, before = [*placement[1:], -1], [-1, *placement[:-1]]
    return [
        -1 if place == other else place
        for receivers in (after, before)
        for place, other in zip(receivers, placement, strict=True)
    ] + [-1] * len(placement)


def _slots(schedule: Schedule, every: list[Slot]) -> list[list[int]]:
    """Return the number of each action's slot, by place, and add the slots to `every`.

    The first forward of each stage, and the last action that adds to its weights' gradients, have their own.
    """
    found = []
    for row in schedule.table:
        kinds = {
            kind: len(every) + place for place, kind in enumerate(dict.fromkeys([each[:2] for each in row]))
        }
        every += [Slot(work, stage, False, False) for work, stage in kinds]
        slots = [kinds[each[:2]] for each in row]
        found.append(slots)
        lasts: dict[int, int] = {}
        for (work, stage), number in kinds.items():
            if work is Work.FORWARD:
                position = slots.index(number)
                slots[position] = len(every)
                every.append(Slot(work, stage, True, False))
            elif work is not Work.INPUT:
                position = len(slots) - 1 - slots[::-1].index(number)
                lasts[stage] = max(position, lasts.get(stage, -1))
        for position in lasts.values():
            every.append(every[slots[position]]._replace(is_last=True))
            slots[position] = len(every) - 1
    return found


def _rounds(schedule: Schedule, rows: Sequence[Sequence[int]]) -> list[list[tuple[int, int]]] | None:
    """Return the rounds of a CommonOrder."""
    ranks, count = schedule.ranks, schedule.microbatches
    middle = count // 2
    found: list[list[tuple[int, int]]] = []
    for row, actions in zip(rows, schedule.table, strict=True):
        first: dict[tuple[Work, int], int] = {}
        pairs = []
        for position, number in enumerate(row):
            microbatch = number % count
            if middle - ranks <= microbatch < middle:
                first[actions[position].work, number + ranks] = position
            elif middle <= microbatch < middle + ranks:
                before = first.get((actions[position].work, number))
                if before is None:
                    return None
                pairs.append((before, position))
        found.append(pairs)
    return found


UNKNOWN = math.inf
"""The seconds of an action that is handed to the caller."""

Act = Callable[[int, float, float, int], float]
"""Does an action and returns when it stops. It gets the number of its slot, when the action before it on its
rank stopped, when it starts, and the number of the message that it waited for (NO_MESSAGE if none).
"""


class Message(NamedTuple):
    """When a message was sent, when its receiver began to receive, and when it arrived."""

    sent: float
    begun: float
    arrived: float


class InOrder(NamedTuple):
    """The times of a CommonOrder.

    Attributes:
        stops: By place, when the last action stops.
        starts: By place, the start of each action.
        bubbles: By place, the seconds of waits for ranks that had not sent yet.
        transfers: By place, the seconds of waits for messages on their way.
    """

    stops: list[float]
    starts: list[list[float]]
    bubbles: list[float]
    transfers: list[float]


def play_in_order(
    order: CommonOrder,
    seconds: Sequence[float],
    links: Sequence[float],
    *,
    begins: Sequence[float] = (),
    busy: list[float] | None = None,
    acts: Sequence[Act] = (),
    messages: list[Message] | None = None,
) -> InOrder:
    """Play one step.

    Args:
        order: The actions and messages.
        seconds: By slot, the seconds of an action beside which nothing travels; UNKNOWN hands it to `acts`,
            which may change this.
        links: Seconds of a message, by number of its link.
        begins: By place, when the rank begins; empty for 0 everywhere.
        busy: By place, until when something travels beside its actions; `acts` may change it. None for never.
        acts: By place, what does an action that is handed over.
        messages: Where to note each message, in the order of their numbers; None to note nothing.
    """
    now = list(begins) or [0.0] * order.schedule.ranks
    free = list(now) if busy is None else busy
    before = list(now)  # when each rank's latest action was next in its list
    link_free = [0.0] * len(links)
    met: list[float] = []  # by message: when both ends were there
    came: list[float] = []  # by message: when it arrived
    starts: list[list[float]] = [[] for _ in now]
    bubbles, transfers = [0.0] * len(now), [0.0] * len(now)
    for place, slot, needed, sent in order.entries:
        for _, sender, receiver, link, is_early in sent:
            together = now[sender]
            begun = before[receiver] if is_early else now[receiver]
            if begun > together:
                together = begun
            start = link_free[link]
            link_free[link] = arrival = (start if start > together else together) + links[link]
            met.append(together)
            came.append(arrival)
            if messages is not None:
                messages.append(Message(now[sender], begun, arrival))
        start = before[place] = now[place]
        if needed != NO_MESSAGE and (arrival := came[needed]) > start:
            together = met[needed]
            if together > start:
                bubbles[place] += together - start
                transfers[place] += arrival - together
            else:
                transfers[place] += arrival - start
            start = arrival
        starts[place].append(start)
        if free[place] > start or seconds[slot] == UNKNOWN:
            now[place] = acts[place](slot, before[place], start, needed)
        else:
            now[place] = start + seconds[slot]
    return InOrder(now, starts, bubbles, transfers)


def received_makespan(schedule: Schedule, times: Times) -> float:
    """Return when the last action of a table stops whose messages travel as in the runtime.

    `play` lets each message travel once it is sent. In the runtime a rank begins to receive one action early,
    and the messages between two ranks go one after another. So tables with equal makespans may differ by some
    percent of a step. Where several boundaries are between two ranks, the longest transfer counts.

    Args:
        schedule: A sound schedule.
        times: Times of its stages.
    """
    order = common_order_of(schedule)
    seconds = [times.of(Action(*slot[:2], 0)) for slot in order.slots]
    longest: dict[frozenset[int], float] = {}
    for ends, transfer in zip(pairwise(schedule.placement), times.transfer, strict=True):
        longest[frozenset(ends)] = max(transfer, longest.get(frozenset(ends), 0.0))
    links = [longest[frozenset(pair)] for pair in order.pairs]
    return max(play_in_order(order, seconds, links).stops)
