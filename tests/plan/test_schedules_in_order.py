"""When actions start and messages arrive if a table is played in its common order."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from schedule_stand_ins import made

from shoal.errors import PlanError
from shoal.spec.plan.schedules import (
    NO_MESSAGE,
    Action,
    CommonOrder,
    Message,
    Payload,
    Receive,
    Send,
    Slot,
    Times,
    Work,
    common_order_of,
    make,
    play,
    play_in_order,
    transfers,
)
from shoal.spec.plan.schedules.common_order import received_makespan

LINK = 3.0
FIRST, SECOND = range(2)
"""Places, and the slots of their forwards."""


def played(*entries, takes):
    """Starts by place, where forwards of two stages on two ranks stand in this order."""
    slots = [Slot(Work.FORWARD, stage, False, False) for stage in range(2)]
    order = CommonOrder(make("gpipe", 2, 1, 1), slots, entries, [(FIRST, SECOND)])
    messages = []
    return play_in_order(order, takes, [LINK], messages=messages).starts, messages


def sent(number, *, is_early):
    return (number, FIRST, SECOND, 0, is_early)


def test_a_message_travels_once_it_was_sent_and_its_receiver_has_begun_to_receive():
    one, other = (FIRST, FIRST, NO_MESSAGE, ()), (SECOND, SECOND, 0, (sent(0, is_early=False),))
    starts, messages = played(one, other, takes=(1.0, 5.0))
    assert starts == [[0.0], [1.0 + LINK]]
    assert messages == [Message(1.0, 0.0, 1.0 + LINK)]
    # The receiver is busy with another micro-batch, which came before, when the second is sent.
    again, other = (FIRST, FIRST, NO_MESSAGE, other[3]), (SECOND, SECOND, 0, ())
    late = (SECOND, SECOND, 1, (sent(1, is_early=False),))
    starts, messages = played(one, again, other, late, takes=(1.0, 5.0))
    stop = starts[SECOND][0] + 5.0
    assert messages[1] == Message(2.0, stop, stop + LINK)
    assert starts[SECOND][1] == stop + LINK
    # With its receive before the action, the second arrives meanwhile.
    early = (SECOND, SECOND, 1, (sent(1, is_early=True),))
    starts, messages = played(one, again, other, early, takes=(1.0, 5.0))
    assert messages[1] == Message(2.0, 0.0, 1.0 + 2 * LINK)
    assert starts[SECOND][1] == stop


def test_messages_on_one_link_follow_one_another():
    first, second = sent(0, is_early=False), sent(1, is_early=False)
    one, again = (FIRST, FIRST, NO_MESSAGE, ()), (FIRST, FIRST, NO_MESSAGE, (first,))
    waiting = (SECOND, SECOND, 0, (second,)), (SECOND, SECOND, 1, ())
    starts, messages = played(one, again, *waiting, takes=(1.0, 0.5))
    came = 1.0 + LINK
    assert [message.arrived for message in messages] == [came, came + LINK]  # and not 2.0 + LINK
    assert starts[SECOND] == [came, came + LINK]


def naive_makespan(schedule, times):
    """Each rank goes through its list; a message travels once both its ranks have come to it."""
    rows = [list(row) for row in transfers(schedule, ahead=1)]
    awaited = {message_of(step) for row in rows for step in row if isinstance(step, Receive)}
    now, ready, arrived, free = [0.0] * len(rows), {}, {}, {}
    while any(rows):
        for rank, row in enumerate(rows):
            while row:
                step = row[0]
                if isinstance(step, Action):
                    message = step.stage, step.microbatch, step.work is Work.FORWARD
                    if step.work is not Work.WEIGHT and message in awaited:
                        if message not in arrived:
                            break
                        now[rank] = max(now[rank], arrived[message])
                    now[rank] += times.of(step)
                else:
                    link = (rank, step.peer) if isinstance(step, Send) else (step.peer, rank)
                    ready.setdefault(message_of(step), []).append(now[rank])
                    if len(both := ready[message_of(step)]) == 2:
                        start = max(*both, free.get(link, 0.0))
                        arrived[message_of(step)] = free[link] = start + times.transfer[0]
                row.pop(0)
    return max(now)


def message_of(step):
    """The stage and micro-batch that wait for a message, and whether it is an activation."""
    stage = step.target if isinstance(step, Send) else step.stage
    return stage, step.microbatch, step.payload is Payload.ACTIVATION


seconds = st.floats(1, 2)


@given(made(most_ranks=6), st.data())
def test_it_gives_the_makespan_of_ranks_that_go_through_their_lists(schedule, data):
    if schedule.stages == 1:
        return
    every = st.tuples(*[seconds] * schedule.stages)
    forward, input, weight = data.draw(every), data.draw(every), data.draw(every)
    times = Times(forward, input, weight, (data.draw(st.floats(0, 2)),) * (schedule.stages - 1))
    assert received_makespan(schedule, times) == pytest.approx(naive_makespan(schedule, times), rel=1e-11)


@given(made(most_ranks=6))
def test_actions_and_messages_stand_in_the_order_of_their_times_if_all_work_takes_one_unit(schedule):
    units, done, stood = play(schedule, Times.equal(schedule.stages)), [0] * schedule.ranks, []
    for place, _, _, messages in common_order_of(schedule).entries:
        stood += [(units.stops[sender][done[sender] - 1], 0, sender) for _, sender, *_ in messages]
        stood.append((units.starts[place][done[place]], 1, place))
        done[place] += 1
    assert stood == sorted(stood)
    assert done == list(map(len, schedule.table))


def test_a_table_that_can_never_end_has_no_common_order():
    table = make("1f1b", 2, 1, 2)
    first, second = table.table
    with pytest.raises(PlanError, match="deadlocks"):
        common_order_of(replace(table, table=(first, second[::-1])))
