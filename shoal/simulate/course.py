"""The Course of a step: what each rank along a pipeline does in order, with messages and passages as numbers.

A schedule's table names actions; playing it looks up what each needs again and again. A Course has looked up
all of it, once for each table, so that a step is played in a few microseconds for each action.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from shoal.plan.schedules import Action, Payload, Receive, Schedule, Send, Work, transfers

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
]

ACT, RECEIVE, SEND = range(3)
"""Kinds of an Op."""

NO_MESSAGE = -1

_LAST = (Work.BACKWARD, Work.WEIGHT)


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


Op = tuple[int, int, int, Action | None]
"""An entry of a rank's list.

It has its kind; the number of the message that it receives, sends or, if it acts, waits for (NO_MESSAGE if
none); and if it acts, the number of the passage's slot, and the action.
"""


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

    @property
    def pairs(self) -> set[tuple[int, int]]:
        """The places that send to one another: each pair of a sender and a receiver."""
        return {(each.sender, each.receiver) for each in self.messages}


def course_of(schedule: Schedule) -> Course:
    """Return the Course of a schedule. Receives begin one action early, as in the runtime."""
    rows: Sequence[Sequence[Action | Send | Receive]]
    rows = transfers(schedule, ahead=1) if schedule.ranks > 1 else schedule.table
    slots: dict[Slot, int] = {}
    numbers: dict[int, int] = {}  # of messages, by what identifies one: the waiting stage and micro-batch
    messages: list[Message] = []
    found = []

    def number_of(payload: Payload, stage: int, microbatch: int, sender: int, receiver: int) -> int:
        key = 2 * (stage * schedule.microbatches + microbatch) + (payload is Payload.ACTIVATION)
        number = numbers.get(key)
        if number is None:
            number = numbers[key] = len(messages)
            messages.append(Message(payload, stage, microbatch, sender, receiver))
        return number

    for place, row in enumerate(rows):
        firsts = {each.stage: each for each in reversed(schedule.table[place]) if each.work is Work.FORWARD}
        lasts = {each.stage: each for each in schedule.table[place] if each.work in _LAST}
        froms = _senders(schedule.placement, place)
        ops: list[Op] = []
        for step in row:
            if isinstance(step, Action):
                work, stage = step.work, step.stage
                slot = Slot(work, stage, firsts[stage] is step, lasts.get(stage) is step)
                needed = NO_MESSAGE
                sender = froms.get((stage, work is Work.FORWARD)) if work is not Work.WEIGHT else None
                if sender is not None:
                    payload = Payload.ACTIVATION if work is Work.FORWARD else Payload.GRADIENT
                    needed = number_of(payload, stage, step.microbatch, sender, place)
                ops.append((ACT, needed, slots.setdefault(slot, len(slots)), step))
            elif isinstance(step, Receive):
                number = number_of(step.payload, step.stage, step.microbatch, step.peer, place)
                ops.append((RECEIVE, number, -1, None))
            else:
                number = number_of(step.payload, step.target, step.microbatch, place, step.peer)
                ops.append((SEND, number, -1, None))
        found.append(tuple(ops))
    return Course(schedule, tuple(found), tuple(slots), tuple(messages))


def _senders(placement: Sequence[int], place: int) -> dict[tuple[int, bool], int]:
    """Return the place that a stage's forward (True) or backward waits for, by stage of this place."""
    found = {}
    for stage, holder in enumerate(placement):
        for before, is_forward in ((stage - 1, True), (stage + 1, False)):
            if holder == place and 0 <= before < len(placement) and placement[before] != place:
                found[stage, is_forward] = placement[before]
    return found
