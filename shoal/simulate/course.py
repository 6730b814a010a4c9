"""The Course of a step: what each rank along a pipeline does in order, with messages and passages as numbers.

A schedule's table names actions; playing it looks up what each needs again and again. A Course has looked up
all of it, once for each table, so that a step is played in a few microseconds for each action.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from shoal.plan.schedules import Action, Payload, Receive, Schedule, Send, Work, make, transfers

__all__ = [
    "ACT",
    "NO_MESSAGE",
    "RECEIVE",
    "SEND",
    "Course",
    "Message",
    "Op",
    "Slot",
    "course_of",
    "made_course",
]

ACT, RECEIVE, SEND = range(3)
"""Kinds of an Op."""

NO_MESSAGE = -1


class Slot(NamedTuple):
    """A kind of passage: equal for all actions that take equally long.

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


class Message(NamedTuple):
    """A message between stages.

    Attributes:
        payload: What it carries.
        stage: The stage that waits for it.
        microbatch: Number of its micro-batch.
        sender, receiver: Places along the pipeline.
    """

    payload: Payload
    stage: int
    microbatch: int
    sender: int
    receiver: int


class Op(NamedTuple):
    """An entry of a rank's list.

    Attributes:
        kind: ACT, RECEIVE (begin to receive) or SEND.
        message: Number of the message that it receives, sends or, if it acts, waits for; NO_MESSAGE if none.
        slot: Number of the passage's slot, if it acts.
        action: The action, if it acts.
    """

    kind: int
    message: int
    slot: int = -1
    action: Action | None = None


class Course(NamedTuple):
    """A schedule's table, ready to be played.

    Attributes:
        schedule: The schedule.
        rows: By place, the list of the rank there.
        slots: The slots, by number.
        messages: The messages, by number.
    """

    schedule: Schedule
    rows: tuple[tuple[Op, ...], ...]
    slots: tuple[Slot, ...]
    messages: tuple[Message, ...]


@lru_cache(maxsize=128)
def made_course(name: str, ranks: int, virtual: int, microbatches: int) -> Course:
    """Return the Course of a named schedule; the arguments are those of `make`."""
    return course_of(make(name, ranks, virtual, microbatches))


def course_of(schedule: Schedule) -> Course:
    """Return the Course of a schedule. Receives begin one action early, as in the runtime."""
    rows: Sequence[Sequence[Action | Send | Receive]]
    rows = transfers(schedule, ahead=1) if schedule.ranks > 1 else schedule.table
    slots: dict[Slot, int] = {}
    messages: dict[Message, int] = {}
    found = []
    for place, row in enumerate(rows):
        ends = (each for each in schedule.table[place] if each.work in (Work.BACKWARD, Work.WEIGHT))
        last = {each.stage: each for each in ends}
        entered: set[int] = set()
        ops = []
        for step in row:
            if isinstance(step, Receive):
                message = Message(step.payload, step.stage, step.microbatch, step.peer, place)
                ops.append(Op(RECEIVE, messages.setdefault(message, len(messages))))
            elif isinstance(step, Send):
                message = Message(step.payload, step.target, step.microbatch, place, step.peer)
                ops.append(Op(SEND, messages.setdefault(message, len(messages))))
            else:
                is_first = step.work is Work.FORWARD and step.stage not in entered
                entered.add(step.stage)
                slot = Slot(step.work, step.stage, is_first, last.get(step.stage) == step)
                needed = _needed(step, place, schedule.placement, messages)
                ops.append(Op(ACT, needed, slots.setdefault(slot, len(slots)), step))
        found.append(tuple(ops))
    return Course(schedule, tuple(found), tuple(slots), tuple(messages))


def _needed(action: Action, place: int, placement: Sequence[int], messages: Mapping[Message, int]) -> int:
    """Return the number of the message that an action waits for."""
    if action.work is Work.WEIGHT:
        return NO_MESSAGE
    is_forward = action.work is Work.FORWARD
    before = action.stage + (-1 if is_forward else 1)
    if not 0 <= before < len(placement) or placement[before] == place:
        return NO_MESSAGE
    payload = Payload.ACTIVATION if is_forward else Payload.GRADIENT
    return messages[Message(payload, action.stage, action.microbatch, placement[before], place)]
