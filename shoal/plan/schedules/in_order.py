"""Play a CommonOrder: when each action of a step starts, in one pass.

Everything comes after what it waits for, so one loop gives all times. A message travels once it was sent, its
receiver has begun to receive, and the message before it on that link has arrived. What actions do beside
their seconds is left to the caller: an action is handed to it if its seconds are not known, or if something
still travels on its rank when it starts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

from shoal.plan.schedules.action import Action
from shoal.plan.schedules.common_order import NO_MESSAGE, CommonOrder, common_order_of
from shoal.plan.schedules.play import Times
from shoal.plan.schedules.schedule import Schedule

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
