"""The place of sends and receives between the actions of each rank.

A rank's list holds its own actions and messages in the order of the `CommonOrder` of all ranks. So no list
can deadlock, even if a send waits for its receive: among those not yet done, the first in the common order
has nothing before it on any rank that takes part, and can be done. It also follows that two ranks have the
messages between them, in both directions, in one order, as channels without tags need (NCCL matches by
order).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from shoal.plan.schedules.action import Action, Work
from shoal.plan.schedules.common_order import common_order_of
from shoal.plan.schedules.schedule import Schedule


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
    rows: list[list[Step]] = [[] for _ in schedule.table]
    left = [iter(row) for row in schedule.table]
    latest = [row[0] for row in schedule.table]
    for place, _, _, sent in common_order_of(schedule).entries:
        for _, sender, receiver, _, _ in sent:
            work, stage, microbatch = latest[sender]
            payload = Payload.ACTIVATION if work is Work.FORWARD else Payload.GRADIENT
            send = Send(payload, stage, microbatch, receiver)
            rows[sender].append(send)
            _insert(rows[receiver], Receive(payload, send.target, microbatch, sender), ahead)
        latest[place] = next(left[place])
        rows[place].append(latest[place])
    return tuple(map(tuple, rows))


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
