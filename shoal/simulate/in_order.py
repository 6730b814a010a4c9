"""The player of a CommonOrder: the times of the event engine (`shoal.simulate.engine`), without a Journal.

Everything comes after what it waits for, so one loop gives all times. An action that begins while none of its
rank's communications travel takes what it took the time before; the others are left to `Rank`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from shoal.simulate.common_order import CommonOrder
from shoal.simulate.course import NO_MESSAGE, Course
from shoal.simulate.rank import Common, Link, Rank, RankProgram

__all__ = ["PlayInOrder", "passes_in_order", "play_in_order"]

_UNKNOWN = math.inf


class PlayInOrder(NamedTuple):
    """A step that was played.

    Attributes:
        end: When the step ends.
        starts: By place, the start of each action.
        waits: As those of `shoal.simulate.engine.Play`.
    """

    end: float
    starts: list[list[float]]
    waits: list[dict[str, float]]


def play_in_order(
    order: CommonOrder,
    programs: Sequence[RankProgram],
    links: Mapping[tuple[int, int], Link],
    *,
    lateness: float,
) -> PlayInOrder:
    """Play one step; the arguments are those of `shoal.simulate.engine.play_steps`."""
    course = Course(order.schedule, ((),) * len(programs), tuple(order.slots), ())
    common = Common(course, programs, {}, None)
    ranks = [Rank(common, place, program) for place, program in enumerate(programs)]
    for rank in ranks:
        rank.begin()
    starts = _play(order, ranks, common.times, [links[pair].seconds for pair in order.pairs])
    for rank in ranks:
        rank.end()
    last = max([rank.now for rank in ranks])
    for rank in ranks:
        rank.finish(0.0, last, last + lateness * last, "")
    return PlayInOrder(max(rank.now for rank in ranks), starts, [rank.waited() for rank in ranks])


def passes_in_order(
    order: CommonOrder, slots: Sequence[float], links: Sequence[float], *, lateness: float
) -> PlayInOrder:
    """Play forwards and backwards beside which nothing travels; what ranks wait for is not counted.

    Args:
        order: The actions and messages.
        slots: Seconds of an action, by number of its slot.
        links: Seconds of a message, by number of its link.
        lateness: As that of `play_in_order`.
    """
    now = [0.0] * order.schedule.ranks
    before = list(now)  # when each rank's latest action was next in its list
    link_free = [0.0] * len(links)
    came: list[float] = []  # when each message arrived
    starts: list[list[float]] = [[] for _ in now]
    for place, slot, needed, sent in order.entries:
        for _, sender, receiver, link, is_early in sent:
            arrival = now[sender]
            begun = before[receiver] if is_early else now[receiver]
            if begun > arrival:
                arrival = begun
            if link_free[link] > arrival:
                arrival = link_free[link]
            link_free[link] = arrival = arrival + links[link]
            came.append(arrival)
        start = before[place] = now[place]
        if needed != NO_MESSAGE and came[needed] > start:
            start = came[needed]
        starts[place].append(start)
        now[place] = start + slots[slot]
    last = max(now)
    return PlayInOrder(last + lateness * last, starts, [])


def _play(
    order: CommonOrder, ranks: Sequence[Rank], times: list[int], seconds: Sequence[float]
) -> list[list[float]]:
    """Play all actions and messages; return the start of each action, by place.

    Args:
        order: The actions and messages.
        ranks: The ranks, whose step has begun.
        times: By slot, how often its passage was not run again; this counts there.
        seconds: Seconds of a message on each link.
    """
    now = [rank.now for rank in ranks]
    before = list(now)  # when each rank's latest action was next in its list
    free = [rank.busy_until for rank in ranks]
    alone = [_UNKNOWN] * len(order.slots)  # seconds of a passage with no communication before it
    link_free = [0.0] * len(order.pairs)
    came: list[tuple[float, float]] = []  # by message: when both ends were there, and when it arrived
    starts: list[list[float]] = [[] for _ in ranks]
    waiting: set[int] = set()
    bubbles, transfers = [0.0] * len(ranks), [0.0] * len(ranks)
    for place, slot, needed, sent in order.entries:
        for _, sender, receiver, link, is_early in sent:
            together = now[sender]
            begun = before[receiver] if is_early else now[receiver]
            if begun > together:
                together = begun
            start = link_free[link]
            arrival = (start if start > together else together) + seconds[link]
            link_free[link] = arrival
            came.append((together, arrival))
        start = before[place] = now[place]
        if needed != NO_MESSAGE:
            together, arrival = came[needed]
            if arrival > start:
                if together > start:
                    bubbles[place] += together - start
                    transfers[place] += arrival - together
                else:
                    transfers[place] += arrival - start
                if place not in waiting:
                    waiting.add(place)
                    ranks[place].add_waits(0.0, 0.0)  # parts of a step are in the order of the first waits
                start = arrival
        starts[place].append(start)
        if free[place] > start or alone[slot] == _UNKNOWN:
            rank = ranks[place]
            now[place] = rank.act(slot, before[place], start)
            free[place], alone[slot] = rank.busy_until, rank.alone(slot)
        else:
            now[place] = start + alone[slot]
            times[slot] += 1
    for place in waiting:
        ranks[place].add_waits(bubbles[place], transfers[place])
    return starts
