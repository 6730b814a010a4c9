"""The board alone: quorum and grace, workers that come and go, and the copy that goes on."""

import json
import math
import random
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.server.board import Board
from shoal.server.terms import Terms


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
        thread.join(10)
    assert [member for member, _ in decisions[0].members] == [0, 1]
    late, (thread,) = arrive_together(board, [2], 0, 5.0)
    time.sleep(0.02)
    assert not late  # one alone is no quorum
    decisions, threads = arrive_together(board, [0, 1], 1)
    for each in [thread, *threads]:
        each.join(10)
    assert late[2].members == ((2, 0), (0, 1), (1, 1))  # in the order of their shares
    assert late[2].staleness == (1, 0, 0)
    assert late[2].weights == (5.0, 1.0, 1.0)


def test_a_worker_that_others_wait_for_too_long_is_taken_for_lost():
    board = Board(Terms(workers=2, shares=4, patience=0.2))
    board.join()
    board.join()
    decisions, (thread,) = arrive_together(board, [0], 0)
    thread.join(10)
    assert decisions[0].shares == (1,)  # what the lost one had


@pytest.mark.parametrize("staleness", [0, math.inf])
def test_a_worker_is_told_the_mean_loss_of_what_came_since_its_last_answer(staleness):
    board = Board(Terms(workers=2, shares=9, staleness=staleness, quorum=0 if staleness else 1, grace=0.0))
    board.join()
    board.join()
    losses = [board.arrive(0, clock, 1.0, float(clock)).loss for clock in range(3)]
    assert losses == [0.0, 1.0, 2.0]
    assert board.arrive(1, 0, 3.0, 9.0).loss == (0 + 1 + 2 + 3 * 9) / 6
    assert board.arrive(0, 3, 0.0, math.nan).loss == 9.0  # one that left its step out is not counted


@settings(max_examples=40)
@given(
    seed=st.integers(0, 10**6),
    workers=st.integers(1, 4),
    staleness=st.sampled_from([0, 1, float("inf")]),
    every=st.integers(1, 3),
)
def test_each_share_is_finished_once_whoever_leaves_and_joins(seed, workers, staleness, every):
    """Also after a copy has gone on from the kept state, as text."""
    chance = random.Random(seed)
    kept = []
    terms = Terms(workers=workers, shares=24, staleness=staleness, every=every, patience=20)
    board = Board(terms, keep=lambda state: kept.append(json.dumps(state)))
    finished = []

    def work(ticket, lifetime):
        worker, clock, shares = ticket.worker, ticket.clock, ticket.shares
        while shares:
            if lifetime == 0:
                board.leave(worker)
                return
            decision = board.arrive(worker, clock, 1.0)
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
        thread.join(20)
    assert sorted(finished) == list(range(24))
    assert board.is_over
    copy = Board.of(json.loads(kept[-1]), keep=lambda state: None)
    assert json.dumps(copy.state()) == json.dumps(board.state())
