"""The makespan of a table whose messages travel as in the runtime.

`play` lets each message travel once it is sent. In the runtime a rank begins to receive one action early, and
the messages between two ranks go one after another (`transfers`). So tables with equal makespans may differ
by some percent of a step.
"""

from __future__ import annotations

from shoal.plan.schedules.action import Action, Work
from shoal.plan.schedules.play import Times
from shoal.plan.schedules.schedule import Schedule
from shoal.plan.schedules.transfers import Payload, Receive, Send, transfers

__all__ = ["received_makespan"]

_Message = tuple[Payload, int, int]
"""What it carries, the stage that waits for it, and its micro-batch."""


def received_makespan(schedule: Schedule, times: Times) -> float:
    """Return when the last action stops.

    Args:
        schedule: A sound schedule.
        times: Times of its stages.
    """
    rows, placement = transfers(schedule, ahead=1), schedule.placement
    now, positions = [0.0] * len(rows), [0] * len(rows)
    begun: dict[_Message, float] = {}  # when one of its two ranks was ready for it
    arrived: dict[_Message, float] = {}
    free: dict[tuple[int, int], float] = {}  # by sender and receiver, when the message before has arrived
    waiting: dict[_Message, int] = {}
    able = list(range(len(rows)))
    while able:
        rank = able.pop()
        row = rows[rank]
        while positions[rank] < len(row):
            step = row[positions[rank]]
            if isinstance(step, Action):
                needed = _needed(step, placement)
                if needed is not None:
                    if needed not in arrived:
                        waiting[needed] = rank
                        break
                    now[rank] = max(now[rank], arrived[needed])
                now[rank] += times.of(step)
            else:
                target = step.target if isinstance(step, Send) else step.stage
                message = step.payload, target, step.microbatch
                if message in begun:
                    link = (step.peer, rank) if isinstance(step, Receive) else (rank, step.peer)
                    start = max(begun[message], now[rank], free.get(link, 0.0))
                    boundary = target - 1 if step.payload is Payload.ACTIVATION else target
                    arrived[message] = free[link] = start + times.transfer[boundary]
                    if message in waiting:
                        able.append(waiting.pop(message))
                else:
                    begun[message] = now[rank]
            positions[rank] += 1
    return max(now)


def _needed(action: Action, placement: tuple[int, ...]) -> _Message | None:
    """Return the message that an action waits for; None if it waits for nothing of another rank."""
    work, stage, microbatch = action
    if work is Work.WEIGHT:
        return None
    payload, other = (
        (Payload.ACTIVATION, stage - 1) if work is Work.FORWARD else (Payload.GRADIENT, stage + 1)
    )
    if not 0 <= other < len(placement) or placement[other] == placement[stage]:
        return None
    return payload, stage, microbatch
