"""Check that a table is a schedule: complete, in an order that can run, free of deadlock.

The place of sends and receives between the actions of each rank.

A rank's list holds its own actions and messages in the order of the `CommonOrder` of all ranks. So no list
can deadlock, even if a send waits for its receive: among those not yet done, the first in the common order
has nothing before it on any rank that takes part, and can be done. It also follows that two ranks have the
messages between them, in both directions, in one order, as channels without tags need (NCCL matches by
order).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from shoal.errors import PlanError
from shoal.spec.plan.schedules.common_order import common_order_of
from shoal.spec.plan.schedules.schedule import Action, Schedule, Work


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


_Value = tuple[Payload, int, int]
"""The need of a stage for a micro-batch: its input, or the gradient of its output."""


def require_sound(schedule: Schedule) -> None:
    """Check that every rank can run its row to the end, and that all work is done once, on the right rank.

    Raises:
        PlanError: The placement is not one of `virtual` stages on every rank; work is missing, done twice or
            on a rank that does not hold the stage; or actions wait for one another in a circle.
    """
    _require_placement(schedule)
    _require_complete(schedule)
    require_no_deadlock(transfers(schedule))


def require_no_deadlock(rows: Sequence[Sequence[Step]]) -> None:
    """Run lists of actions, sends and receives in order; a send and its receive wait for each other.

    Also check that each action's input has been received or made before it.

    Args:
        rows: By rank, its actions and messages in order.

    Raises:
        PlanError: The lists stop for good, or an action stands before its input; the error says which.
    """
    last = max((step.stage for row in rows for step in row), default=0)
    positions = [0] * len(rows)
    there: list[set[_Value]] = [set() for _ in rows]
    able = list(range(len(rows)))
    while able:
        rank = able.pop()
        while positions[rank] < len(rows[rank]):
            step = rows[rank][positions[rank]]
            if isinstance(step, Action):
                _do(rank, step, last, there[rank])
            else:
                peer = step.peer
                other = rows[peer][positions[peer]] if positions[peer] < len(rows[peer]) else None
                if not _meet(rank, step, other):
                    break
                is_send = isinstance(step, Send)
                sender, receiver = (rank, peer) if is_send else (peer, rank)
                value = _value(step)
                _require_there(sender, step if is_send else other, value, there[sender])
                there[receiver].add(value)
                positions[peer] += 1
                able.append(peer)
            positions[rank] += 1
    stuck = [rank for rank, row in enumerate(rows) if positions[rank] < len(row)]
    if stuck:
        told = [f"rank {rank} waits at {rows[rank][positions[rank]]}" for rank in stuck]
        raise PlanError(
            f"the lists deadlock when each send waits for its receive: {'; '.join(told)}",
            possible="lists in which both ranks of a message reach it before either waits for a later one",
            change="use the order that `transfers` gives",
        )


def _value(message: Send | Receive) -> _Value:
    """Return the value that the message holds, under the name that its receiver needs."""
    stage = message.target if isinstance(message, Send) else message.stage
    return message.payload, stage, message.microbatch


def _meet(rank: int, message: Send | Receive, other: Step | None) -> bool:
    """Return whether the message's peer stands at the other end of it."""
    expected = Receive if isinstance(message, Send) else Send
    return isinstance(other, expected) and other.peer == rank and _value(other) == _value(message)


def _do(rank: int, action: Action, last: int, there: set[_Value]) -> None:
    """Note what the action makes, if its input is there."""
    stage, microbatch = action.stage, action.microbatch
    if action.work is Work.FORWARD:
        if stage > 0:
            _require_there(rank, action, (Payload.ACTIVATION, stage, microbatch), there)
        there.add((Payload.ACTIVATION, stage + 1, microbatch))
        if stage == last:
            there.add((Payload.GRADIENT, stage, microbatch))
    elif action.work is not Work.WEIGHT:
        _require_there(rank, action, (Payload.GRADIENT, stage, microbatch), there)
        there.add((Payload.GRADIENT, stage - 1, microbatch))


def _require_there(rank: int, step: Step | None, value: _Value, there: set[_Value]) -> None:
    if value not in there:
        raise PlanError(
            f"rank {rank} has {step} before the {value[0].name.lower()} that it needs",
            possible="each action or send comes after the step that makes or receives its input",
            change="use the order that `transfers` gives",
        )


def _require_placement(schedule: Schedule) -> None:
    counts = Counter(schedule.placement)
    if (
        len(schedule.table) != schedule.ranks
        or set(counts) != set(range(schedule.ranks))
        or set(counts.values()) != {schedule.virtual}
    ):
        raise PlanError(
            f"the schedule {schedule.name} has {len(schedule.table)} rows, and places stages on ranks "
            f"{schedule.placement}",
            possible=f"{schedule.ranks} rows, and {schedule.virtual} stages on each of these ranks",
            change="correct the placement or the table",
        )


def _require_complete(schedule: Schedule) -> None:
    done: Counter[Action] = Counter()
    for rank, row in enumerate(schedule.table):
        for action in row:
            if (
                not 0 <= action.stage < schedule.stages
                or not 0 <= action.microbatch < schedule.microbatches
                or schedule.placement[action.stage] != rank
            ):
                raise PlanError(
                    f"the schedule {schedule.name} has {action} on rank {rank}",
                    possible=f"there, stages {', '.join(map(str, schedule.stages_of(rank)))} and "
                    f"micro-batches 0 to {schedule.microbatches - 1}",
                    change="correct or leave out that action",
                )
            done[action] += 1
    for stage in range(schedule.stages):
        for microbatch in range(schedule.microbatches):
            counts = {work.value: done[Action(work, stage, microbatch)] for work in Work}
            if counts not in ({"F": 1, "B": 1, "I": 0, "W": 0}, {"F": 1, "B": 0, "I": 1, "W": 1}):
                told = ", ".join(f"{count} {work}" for work, count in counts.items())
                raise PlanError(
                    f"the schedule {schedule.name} has {told} of stage {stage}, micro-batch {microbatch}",
                    possible="one F and one B, or one F, one I and one W",
                    change="add or leave out actions of that stage and micro-batch",
                )
