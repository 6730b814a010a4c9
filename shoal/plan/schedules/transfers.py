"""The place of sends and receives between the actions of each rank.

All actions and messages of a step are put into one order over all ranks: the order of their times if every
piece of work takes one unit. An action stands at its start, a message at the stop of the action that makes
it. A rank's list holds its own actions and messages, in this order. So no list can deadlock, even if a send
waits for its receive: among those not yet done, the first in the common order has nothing before it on any
rank that takes part, and can be done. It also follows that two ranks have the messages between them, in both
directions, in one order, as channels without tags need (NCCL matches by order).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from shoal.plan.schedules.action import Action, Work
from shoal.plan.schedules.play import Times, play
from shoal.plan.schedules.schedule import Schedule

__all__ = ["Payload", "Receive", "Send", "Step", "transfers"]


class Payload(StrEnum):
    """The content of a message."""

    ACTIVATION = "F"
    """The output of a stage, for the forward of the next stage."""
    GRADIENT = "B"
    """The gradient of a stage's input, for the backward of the previous stage."""


@dataclass(frozen=True, slots=True)
class Send:
    """A message that leaves. Its text form is torch's: `1SEND_F3` is the output of stage 1 for micro-batch 3.

    Attributes:
        payload: Content of the message.
        stage: The stage that made it, on this rank.
        microbatch: Number of its micro-batch.
        peer: The rank that it goes to.
    """

    payload: Payload
    stage: int
    microbatch: int
    peer: int

    @property
    def target(self) -> int:
        """Return the stage that waits for it."""
        return self.stage + (1 if self.payload is Payload.ACTIVATION else -1)

    def __str__(self) -> str:
        return f"{self.stage}SEND_{self.payload.value}{self.microbatch}"


@dataclass(frozen=True, slots=True)
class Receive:
    """A message that arrives. Its text form is torch's: `2RECV_F3` is for F of stage 2, micro-batch 3.

    Attributes:
        payload: Content of the message.
        stage: The stage that waits for it, on this rank.
        microbatch: Number of its micro-batch.
        peer: The rank that it comes from.
    """

    payload: Payload
    stage: int
    microbatch: int
    peer: int

    def __str__(self) -> str:
        return f"{self.stage}RECV_{self.payload.value}{self.microbatch}"


Step = Action | Send | Receive
"""An entry of a rank's list."""


def transfers(schedule: Schedule, ahead: int = 0) -> tuple[tuple[Step, ...], ...]:
    """Return, by rank, its actions with its sends and receives between them.

    With `ahead` = 0 the lists run to the end in order, even if sends wait for their receives. If sends and
    receives only begin at their place, and a rank waits for a receive before the action that needs it, a
    larger `ahead` lets a message arrive while the rank still works: `ahead` = 1 begins each receive before
    the action during which, with equal times, the message is sent. A receive is never moved before another
    transfer with the same peer, so that both ranks keep one order.

    Args:
        schedule: A sound schedule.
        ahead: Number of actions by which each receive is placed earlier.

    Raises:
        PlanError: The table can never end.
    """
    played = play(schedule, Times.equal(schedule.stages))
    # The second number puts a message before the actions that start when it is sent.
    common: list[tuple[float, int, int, int, Action]] = []
    for rank, row in enumerate(schedule.table):
        for action, start, stop in zip(row, played.starts[rank], played.stops[rank], strict=True):
            common.append((start, 1, rank, rank, action))
            peer = _peer(schedule, action)
            if peer is not None:
                common.append((stop, 0, rank, peer, action))
    common.sort(key=lambda entry: entry[:3])
    rows: list[list[Step]] = [[] for _ in schedule.table]
    for _, is_action, rank, peer, action in common:
        if is_action:
            rows[rank].append(action)
            continue
        payload = Payload.ACTIVATION if action.work is Work.FORWARD else Payload.GRADIENT
        send = Send(payload, action.stage, action.microbatch, peer)
        rows[rank].append(send)
        _insert(rows[peer], Receive(payload, send.target, action.microbatch, rank), ahead)
    return tuple(map(tuple, rows))


def _peer(schedule: Schedule, action: Action) -> int | None:
    """Return the rank that waits for the action's result; None if there is none, or it is the same rank."""
    if action.work is Work.WEIGHT:
        return None
    stage = action.stage + (1 if action.work is Work.FORWARD else -1)
    if not 0 <= stage < schedule.stages or schedule.placement[stage] == schedule.placement[action.stage]:
        return None
    return schedule.placement[stage]


def _insert(row: list[Step], receive: Receive, ahead: int) -> None:
    """Insert a receive at the end of the row so far, or `ahead` actions before it."""
    position = len(row)
    for index in range(len(row) - 1, -1, -1):
        step = row[index]
        if ahead == 0 or (not isinstance(step, Action) and step.peer == receive.peer):
            break
        if isinstance(step, Action):
            position = index
            ahead -= 1
    row.insert(position, receive)
