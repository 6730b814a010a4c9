"""When messages between stages arrive, with passages that are made up."""

from types import SimpleNamespace

import pytest

from shoal.plan.schedules import Action, Payload, Receive, Send, Work
from shoal.simulate.course import ACT, NO_MESSAGE, RECEIVE, SEND, Course, Message, Slot
from shoal.simulate.engine import Link, RankProgram, play_steps
from shoal.simulate.journal import Journal
from shoal.simulate.passage import Passage

LINK = 3.0


def stage(seconds):
    """A stage whose every action takes as long, and that exchanges nothing."""
    return SimpleNamespace(
        begin_step=list,
        passage=lambda work, is_first, is_last: Passage.of([seconds]),
        keeps_sums=False,
    )


def play(first, second, takes):
    """Starts and stops by rank, where two ranks do these steps and actions of stage s take `takes[s]`."""
    rest = {"finish": (), "norm": None, "merge": None, "update": 0.0, "contention": 0.0}
    programs = [RankProgram(rank=rank, stages={rank: stage(takes[rank])}, **rest) for rank in range(2)]
    course = made_of(first, second)
    played = play_steps(course, programs, {(0, 1): Link(LINK, 8)}, lateness=0.0, journal=Journal())
    return played.actions[0]


def made_of(*rows):
    """The Course of rows that only send activations from rank 0 to rank 1."""
    messages, slots, found = {}, {}, []
    for place, row in enumerate(rows):
        ops = []
        for step in row:
            number = messages.setdefault(step.microbatch, len(messages))
            if isinstance(step, Action):
                slot = slots.setdefault(Slot(step.work, step.stage, False, False), len(slots))
                ops.append((ACT, number if place else NO_MESSAGE, slot, step))
            else:
                ops.append((SEND if isinstance(step, Send) else RECEIVE, number, -1, None))
        found.append(tuple(ops))
    told = tuple(Message(Payload.ACTIVATION, 1, microbatch, 0, 1) for microbatch in messages)
    return Course(None, tuple(found), tuple(slots), told)


def forward(stage, microbatch):
    return Action(Work.FORWARD, stage, microbatch)


def sent(microbatch):
    return Send(Payload.ACTIVATION, 0, microbatch, 1)


def received(microbatch):
    return Receive(Payload.ACTIVATION, 1, microbatch, 0)


def test_a_message_travels_once_it_was_sent_and_its_receiver_has_begun_to_receive():
    early = play([forward(0, 0), sent(0)], [received(0), forward(1, 0)], (1.0, 5.0))
    assert early[1] == [(1.0 + LINK, 1.0 + LINK + 5.0)]
    # The receiver is busy with another micro-batch, which came before, when the second is sent.
    first = [forward(0, 0), sent(0), forward(0, 1), sent(1)]
    late = play(first, [received(0), forward(1, 0), received(1), forward(1, 1)], (1.0, 5.0))
    begun = late[1][0][1]
    assert begun > 2.0  # when the second was sent
    assert late[1][1][0] == pytest.approx(begun + LINK)


def test_messages_on_one_link_follow_one_another():
    first = [forward(0, 0), sent(0), forward(0, 1), sent(1)]
    second = [received(0), received(1), forward(1, 0), forward(1, 1)]
    (_, _), ((came, _), (next_came, _)) = play(first, second, (1.0, 0.5))
    assert came == 1.0 + LINK
    assert next_came == came + LINK  # and not 2.0 + LINK
