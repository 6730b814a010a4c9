"""Sends and receives between the actions: never a deadlock, and one order between every two ranks."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from schedule_stand_ins import made

from shoal.errors import PlanError
from shoal.spec.plan.schedules import (
    Action,
    Payload,
    Receive,
    Send,
    make,
    require_no_deadlock,
    require_sound,
    transfers,
)


def channels(rows):
    """By pair of ranks, the messages between them as the lower rank has them, and as the other has."""
    seen = {}
    for rank, row in enumerate(rows):
        for step in row:
            if isinstance(step, Action):
                continue
            pair = min(rank, step.peer), max(rank, step.peer)
            target = step.target if isinstance(step, Send) else step.stage
            goes_up = isinstance(step, Send) == (rank < step.peer)
            seen.setdefault((pair, rank), []).append((goes_up, step.payload, target, step.microbatch))
    return {pair: (seen[pair, pair[0]], seen[pair, pair[1]]) for pair, _ in seen}


@given(made(most_ranks=6))
def test_sends_that_wait_for_their_receives_never_deadlock(schedule):
    require_no_deadlock(transfers(schedule))


@given(made(most_ranks=6), st.integers(0, 4))
def test_two_ranks_have_their_messages_in_one_order_however_early_receives_begin(schedule, ahead):
    rows = transfers(schedule, ahead)
    for lower, upper in channels(rows).values():
        assert lower == upper


@given(made(most_ranks=6), st.integers(0, 4))
def test_each_boundary_between_ranks_is_crossed_once_each_way_by_each_microbatch(schedule, ahead):
    rows = transfers(schedule, ahead)
    assert [tuple(step for step in row if isinstance(step, Action)) for row in rows] == list(schedule.table)
    expected = set()
    for stage in range(schedule.stages - 1):
        if schedule.placement[stage] != schedule.placement[stage + 1]:
            for microbatch in range(schedule.microbatches):
                expected |= {
                    (Send, Payload.ACTIVATION, stage, microbatch),
                    (Receive, Payload.ACTIVATION, stage + 1, microbatch),
                    (Send, Payload.GRADIENT, stage + 1, microbatch),
                    (Receive, Payload.GRADIENT, stage, microbatch),
                }
    found = [
        (type(step), step.payload, step.stage, step.microbatch)
        for row in rows
        for step in row
        if not isinstance(step, Action)
    ]
    assert len(found) == len(set(found))
    assert set(found) == expected


@given(made(most_ranks=6), st.integers(0, 4))
def test_a_send_stands_behind_its_action_and_a_receive_before(schedule, ahead):
    for row in transfers(schedule, ahead):
        places = {str(step): place for place, step in enumerate(row)}
        for step in row:
            if isinstance(step, Action):
                continue
            works = "F" if step.payload is Payload.ACTIVATION else "BI"
            needs = [places.get(f"{step.stage}{work}{step.microbatch}") for work in works]
            (action,) = [place for place in needs if place is not None]
            assert (places[str(step)] > action) == isinstance(step, Send)


def test_receives_begin_an_action_early_but_not_before_a_transfer_with_the_same_peer():
    rows = [" ".join(map(str, row)) for row in transfers(make("1f1b", 2, 1, 3))]
    assert rows == [
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0F2 0SEND_F2 0RECV_B1 0B1 0RECV_B2 0B2",
        "1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1RECV_F2 1SEND_B1 1F2 1B2 1SEND_B2",
    ]
    early = [" ".join(map(str, row)) for row in transfers(make("1f1b", 2, 1, 3), ahead=1)]
    assert early == [
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0F2 0SEND_F2 0RECV_B1 0RECV_B2 0B1 0B2",
        "1RECV_F0 1RECV_F1 1F0 1B0 1SEND_B0 1F1 1RECV_F2 1B1 1SEND_B1 1F2 1B2 1SEND_B2",
    ]


def naive(schedule):
    """Each receive directly before the action that needs it, each send directly behind its action."""
    rows = []
    for row in transfers(schedule):
        receives = {
            (step.payload, step.stage, step.microbatch): step for step in row if isinstance(step, Receive)
        }
        sends = {(step.payload, step.stage, step.microbatch): step for step in row if isinstance(step, Send)}
        steps = []
        for action in row:
            if isinstance(action, Action) and action.work != "W":
                payload = Payload.ACTIVATION if action.work == "F" else Payload.GRADIENT
                key = payload, action.stage, action.microbatch
                steps += [each for each in (receives.get(key), action, sends.get(key)) if each is not None]
        rows.append(steps)
    return rows


def test_naive_blocking_transfers_deadlock_in_the_steady_state_of_1f1b():
    """Two neighbours that each send to the other first: the reason for the common order."""
    require_no_deadlock(naive(make("gpipe", 2, 1, 4)))
    with pytest.raises(PlanError) as caught:
        require_no_deadlock(naive(make("1f1b", 2, 1, 4)))
    assert "rank 0 waits at 0SEND_F1; rank 1 waits at 1SEND_B0" in str(caught.value)


def test_an_action_before_its_message_is_found():
    rows = [list(row) for row in transfers(make("gpipe", 2, 1, 2))]
    rows[1][0], rows[1][1] = rows[1][1], rows[1][0]
    with pytest.raises(PlanError, match="rank 1 has 1F0 before the activation that it needs"):
        require_no_deadlock(rows)


def test_messages_that_miss_each_other_are_found():
    rows = [list(row) for row in transfers(make("gpipe", 3, 1, 1))]
    assert str(rows[0][1]) == "0SEND_F0"
    rows[0][1] = replace(rows[0][1], peer=2)
    with pytest.raises(PlanError, match="rank 0 waits at 0SEND_F0; rank 1 waits at 1RECV_F0"):
        require_no_deadlock(rows)
    rows = [list(row) for row in transfers(make("gpipe", 3, 1, 1))]
    rows[1][0] = replace(rows[1][0], peer=2)
    with pytest.raises(PlanError, match="rank 0 waits at 0SEND_F0; rank 1 waits at 1RECV_F0"):
        require_no_deadlock(rows)


# Tables that are no schedules


def changed(schedule, rank, actions):
    """The schedule with other actions, in their text form, on one rank."""
    table = list(schedule.table)
    table[rank] = tuple(map(Action.parse, actions.split()))
    return replace(schedule, table=tuple(table))


@pytest.mark.parametrize(
    ("rank", "actions", "told"),
    [
        (1, "1F0 1B0 1F1", "1 F, 0 B, 0 I, 0 W of stage 1, micro-batch 1"),
        (1, "1F0 1B0 1F1 1B1 1B1", "1 F, 2 B, 0 I, 0 W of stage 1, micro-batch 1"),
        (1, "1F0 1B0 1F1 1I1", "1 F, 0 B, 1 I, 0 W of stage 1, micro-batch 1"),
        (1, "1F0 1B0 1F1 1B1 1W1", "1 F, 1 B, 0 I, 1 W"),
        (1, "0F0 1B0 1F1 1B1", "has 0F0 on rank 1"),
        (1, "1F0 1B0 1F1 1B2", "has 1B2 on rank 1"),
        (1, "1B0 1F0 1F1 1B1", "rank 1 waits at 1B0 for 1F0, which comes after 1B0 on rank 1"),
        (1, "1F0 1W0 1I0 1F1 1B1", "rank 1 waits at 1W0 for 1I0, which comes after 1W0 on rank 1"),
        (
            0,
            "0F0 0B1 0F1 0B0",
            "rank 0 waits at 0B1 for 1B1, which comes after 1F1 on rank 1; rank 1 waits at 1F1",
        ),
    ],
)
def test_a_table_that_is_no_schedule_is_refused(rank, actions, told):
    with pytest.raises(PlanError) as caught:
        require_sound(changed(make("1f1b", 2, 1, 2), rank, actions))
    assert told in caught.value.given


def test_a_placement_that_is_not_of_so_many_stages_on_every_rank_is_refused():
    schedule = make("1f1b", 2, 1, 2)
    with pytest.raises(PlanError, match=r"places stages on ranks \(0, 0\)"):
        require_sound(replace(schedule, placement=(0, 0)))


@given(made(most_ranks=4, most_microbatches=8), st.randoms(use_true_random=False))
def test_any_order_of_a_row_is_a_schedule_or_refused(schedule, random):
    """A sound verdict is one of the naive definition: some action can always be done next."""
    table = [list(row) for row in schedule.table]
    row = random.choice(table)
    place = random.randrange(len(row) - 1)
    row[place], row[place + 1] = row[place + 1], row[place]
    swapped = replace(schedule, table=tuple(map(tuple, table)))
    if can_end(swapped):
        require_sound(swapped)
    else:
        with pytest.raises(PlanError, match="waits at"):
            require_sound(swapped)


def can_end(schedule):
    """Does whatever can be done, over and over."""
    left = [list(map(str, row)) for row in schedule.table]
    done = set()
    moved = True
    while moved:
        moved = False
        for row in left:
            while row:
                action = Action.parse(row[0])
                stage, microbatch = action.stage, action.microbatch
                if action.work == "F":
                    ready = stage == 0 or f"{stage - 1}F{microbatch}" in done
                elif action.work == "W":
                    ready = f"{stage}I{microbatch}" in done
                else:
                    ready = f"{stage}F{microbatch}" in done and (
                        stage == schedule.stages - 1
                        or bool({f"{stage + 1}B{microbatch}", f"{stage + 1}I{microbatch}"} & done)
                    )
                if not ready:
                    break
                done.add(row.pop(0))
                moved = True
    return not any(left)
