"""The board alone: quorum and grace, workers that come and go, and the copy that goes on."""

import json
import math
import random
import threading
import time
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.parallel.exchange.server.coordinator import Board
from shoal.parallel.exchange.server.protocol import Terms


def arrive_together(board, workers, clock, weight=1.0):
    """The decision of each worker; None while it waits."""
    decisions = {}
    threads = [
        threading.Thread(
            target=lambda worker=worker: decisions.update({worker: board.arrive(worker, clock, weight)}),
            daemon=True,
        )
        for worker in workers
    ]
    for thread in threads:
        thread.start()
    return decisions, threads


def test_a_quorum_goes_on_and_the_late_one_is_in_the_next_round():
    board = Board(Terms(workers=3, shares=30, quorum=2, grace=0.05))
    tickets = [board.join() for _ in range(3)]
    assert [ticket.shares for ticket in tickets] == [(0,), (1,), (2,)]
    decisions, threads = arrive_together(board, [0, 1], 0)
    for thread in threads:
        thread.join(120)
    assert [member for member, _ in decisions[0].members] == [0, 1]
    late, (thread,) = arrive_together(board, [2], 0, 5.0)
    time.sleep(0.02)
    assert not late  # one alone is no quorum
    decisions, threads = arrive_together(board, [0, 1], 1)
    for each in [thread, *threads]:
        each.join(120)
    assert late[2].members == ((2, 0), (0, 1), (1, 1))  # in the order of their shares
    assert late[2].staleness == (1, 0, 0)
    assert late[2].weights == (5.0, 1.0, 1.0)


def test_a_worker_that_others_wait_for_too_long_is_taken_for_lost():
    board = Board(Terms(workers=2, shares=4, patience=0.2))
    board.join()
    board.join()
    decisions, (thread,) = arrive_together(board, [0], 0)
    thread.join(120)
    assert decisions[0].shares == (1,)  # what the lost one had


@pytest.mark.parametrize("through_copy", [False, True])
def test_if_the_worker_that_saves_is_lost_at_the_end_the_next_one_saves(through_copy):
    kept = []
    board = Board(Terms(workers=3, shares=3, patience=120), keep=kept.append)
    for _ in range(3):
        board.join()
    decisions, threads = arrive_together(board, [0, 1, 2], 0)
    for thread in threads:
        thread.join(120)
    assert [decisions[worker].shares for worker in range(3)] == [(), (), ()]
    assert [decisions[worker].leads for worker in range(3)] == [True, False, False]
    if through_copy:
        board = Board.of(json.loads(json.dumps(kept[-1])), keep=kept.append)
    saves = {}
    threads = [
        threading.Thread(target=lambda worker=worker: saves.update({worker: board.retire(worker)}))
        for worker in (1, 2)
    ]
    for thread in threads:
        thread.start()
    time.sleep(0.02)
    assert not saves  # worker 0 may still save
    board.leave(0)  # its connection ended
    threads[0].join(120)
    assert saves == {1: True}
    last = threading.Thread(target=lambda: board.leave(1, is_last=True))
    last.start()
    threads[1].join(120)
    assert saves == {1: True, 2: False}
    time.sleep(0.02)
    assert last.is_alive()  # it ends the servers once the others are gone
    board.leave(2)
    last.join(120)
    assert board.is_over


def test_one_worker_alone_saves_the_end_though_the_board_tells_them_one_after_the_other():
    board = Board(Terms(workers=2, shares=3, staleness=1, patience=120))
    board.join()
    board.join()
    board.arrive(0, 0, 1.0)
    fast, (thread,) = arrive_together(board, [0], 1)  # two ahead: it waits
    time.sleep(0.02)
    slow = board.arrive(1, 0, 1.0)  # the last share is finished, and this worker hears of it first
    thread.join(120)
    assert slow.shares == fast[0].shares == ()
    assert [slow.leads, fast[0].leads] == [True, False]
    board.leave(1)  # it is lost before it has saved
    assert board.retire(0)


def join_late(board):
    """Let a worker join in a thread; return its Tickets, and the thread, once it waits."""
    tickets = []
    thread = threading.Thread(target=lambda: tickets.append(board.join()), daemon=True)
    thread.start()
    while not (board.state()["idle"] or tickets):
        time.sleep(0.001)
    return tickets, thread


@pytest.mark.parametrize("staleness", [0, math.inf])
@pytest.mark.parametrize("through_copy", [False, True])
def test_a_worker_that_comes_when_all_shares_are_handed_out_makes_those_of_lost_ones(staleness, through_copy):
    kept = []
    board = Board(Terms(workers=2, shares=2, staleness=staleness, patience=120), keep=kept.append)
    board.join()
    board.join()
    tickets, thread = join_late(board)
    if through_copy:
        copy = Board.of(json.loads(json.dumps(kept[-1])), keep=kept.append)
        copy.leave(0)
        assert copy.state()["members"][2]["shares"] == [0]
        return
    board.leave(0)
    board.leave(1)
    thread.join(120)
    assert tickets[0].shares == (0,)
    decision = board.arrive(tickets[0].worker, tickets[0].clock, 1.0)
    assert decision.shares == (1,)
    end = board.arrive(tickets[0].worker, tickets[0].clock + 1, 1.0)
    assert end.shares == ()
    assert end.leads
    board.leave(tickets[0].worker, is_last=True)
    assert board.is_over


def test_a_worker_that_comes_too_late_leaves_with_the_others_and_does_not_save():
    board = Board(Terms(workers=1, shares=1, patience=120))
    board.join()
    tickets, thread = join_late(board)
    decision = board.arrive(0, 0, 1.0)
    thread.join(120)
    after, _ = join_late(board)
    assert [decision.leads, tickets[0].leads, after[0].leads] == [True, False, False]
    assert tickets[0].shares == after[0].shares == ()


@pytest.mark.parametrize("comes", [True, False])
def test_a_bound_counts_from_the_beginning_of_workers_that_have_not_come(comes):
    """Until they are given up."""
    board = Board(Terms(workers=2, shares=9, staleness=1, patience=120 if comes else 0.05))
    board.join()
    board.arrive(0, 0, 1.0)
    decisions, (thread,) = arrive_together(board, [0], 1)
    if comes:
        thread.join(0.02)
        assert not decisions
        board.join()
        board.arrive(1, 0, 1.0)
    thread.join(120)
    assert decisions[0].shares


@pytest.mark.parametrize("staleness", [0, math.inf])
def test_a_worker_is_told_the_mean_loss_of_what_came_since_its_last_answer(staleness):
    board = Board(Terms(workers=2, shares=9, staleness=staleness, quorum=0 if staleness else 1, grace=0.0))
    board.join()
    board.join()
    losses = [board.arrive(0, clock, 1.0, float(clock)).loss for clock in range(3)]
    assert losses == [0.0, 1.0, 2.0]
    assert board.arrive(1, 0, 3.0, 9.0).loss == (0 + 1 + 2 + 3 * 9) / 6
    assert board.arrive(0, 3, 0.0, math.nan).loss == 9.0  # one that left its step out is not counted


@mock.patch("shoal.parallel.exchange.server.coordinator._LEAST", 2)
@settings(max_examples=60)
@given(
    seed=st.integers(0, 10**6),
    workers=st.integers(1, 4),
    staleness=st.sampled_from([0, 1, float("inf")]),
    every=st.integers(1, 3),
)
def test_each_share_is_finished_once_whoever_leaves_and_joins(seed, workers, staleness, every):
    """Also where rounds take the place of a bound for a while, and after a copy has gone on."""
    chance = random.Random(seed)
    kept = []
    terms = Terms(workers=workers, shares=24, staleness=staleness, every=every, patience=120, guard=True)
    board = Board(terms, keep=lambda state: kept.append(json.dumps(state)))
    finished = []

    def work(ticket, lifetime):
        worker, clock, shares = ticket.worker, ticket.clock, ticket.shares
        while shares:
            if lifetime == 0:
                board.leave(worker)
                return
            failed = chance.choice(["", "", "the step is too large"])
            decision = board.arrive(worker, clock, 1.0, 0.0, failed)
            finished.extend(shares)
            clock, shares, lifetime = clock + 1, decision.shares, lifetime - 1

    tickets = [board.join() for _ in range(workers)]
    threads = [
        threading.Thread(target=work, args=(ticket, chance.choice([-1, 1, 2])), daemon=True)
        for ticket in tickets
    ]
    for thread in threads:
        thread.start()
    work(board.join(), -1)  # comes later, and stays
    for thread in threads:
        thread.join(120)
    assert sorted(finished) == list(range(24))
    assert board.is_over
    copy = Board.of(json.loads(kept[-1]), keep=lambda state: None)
    assert json.dumps(copy.state()) == json.dumps(board.state())
