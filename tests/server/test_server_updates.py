"""Trainings through parameter servers against one process: in rounds, with staleness, with losses."""

import copy
import math
import threading

import pytest
import torch
from server_stand_ins import LostError, loss_of, make_model, reference, train

from shoal.parallel import Outer
from shoal.parallel.exchange.server import ServerError, Servers, Terms

CLOSE = {"rtol": 1e-5, "atol": 1e-6}  # sums of a few fp32 gradients in another order, after ten AdamW steps


def assert_trained_as(trained, rounds, workers):
    expected, states = reference(rounds, workers)
    assert not trained.errors
    assert sorted(share for _, share, _ in trained.steps) == list(range(rounds * workers))
    for ours, theirs in zip(trained.values, expected, strict=True):
        torch.testing.assert_close(ours, theirs, **CLOSE)
    for ours, theirs in zip(trained.states, states, strict=True):
        torch.testing.assert_close(dict(ours), dict(theirs), **CLOSE)


@pytest.mark.parametrize(("workers", "servers"), [(1, 1), (3, 2), (2, 3)])
def test_rounds_are_the_steps_of_one_process(workers, servers):
    trained = train(Terms(workers=workers, shares=10 * workers), workers=workers, servers=servers)
    assert_trained_as(trained, 10, workers)
    assert {applied["staleness"] for applied in trained.applied} == {0}
    assert len(trained.applied) == servers * 10 * workers


@pytest.mark.parametrize("victim", [0, 1])
def test_a_dead_server_changes_no_bit_if_another_has_its_copy(victim):
    """The first server has the board, too."""

    def kill(worker, share, servers):
        if share == 12:
            servers[victim].close()

    terms = Terms(workers=3, shares=30)
    with_loss = train(terms, workers=3, servers=2, mirrored=True, before=kill)
    assert_trained_as(with_loss, 10, 3)
    without = train(terms, workers=3, servers=2)
    assert all(torch.equal(*pair) for pair in zip(with_loss.values, without.values, strict=True))


@pytest.mark.parametrize("victim", [0, 1])
def test_a_server_that_dies_after_it_has_measured_changes_no_bit(victim):
    """One worker has heard the norm, and perhaps pulled; the others measure at the copy."""
    here = []

    def change(worker, way):
        measure = way.measure

        def then_kill(position, copies, decision, patience):
            square = measure(position, copies, decision, patience)
            if worker == 1 and decision.round == 4:
                here[0][victim].close()
            return square

        way.measure = then_kill

    terms, clip = Terms(workers=3, shares=30), 0.2
    with_loss, without = (
        train(
            terms,
            workers=3,
            servers=2,
            clip=clip,
            mirrored=each is not None,
            before=lambda worker, share, servers: here.append(servers),
            change=each or (lambda worker, way: None),
        )
        for each in (change, None)
    )
    assert not with_loss.errors + without.errors
    assert all(torch.equal(*pair) for pair in zip(with_loss.values, without.values, strict=True))
    unclipped = train(terms, workers=3, servers=2)
    assert not torch.equal(unclipped.values[0], without.values[0])


def test_a_dead_server_without_a_copy_is_named():
    def kill(worker, share, servers):
        if share == 6:
            servers[1].close()

    trained = train(Terms(workers=1, shares=9), workers=1, servers=2, before=kill)
    (error,) = trained.errors
    assert isinstance(error, ServerError)
    assert "parameter server 1" in str(error)
    assert "mirror=1" in str(error)


@pytest.mark.parametrize("staleness", [0, 2, math.inf])
def test_the_shares_of_a_lost_worker_are_trained_on_by_others(staleness):
    def lose(worker, share, servers):
        if worker == 1 and share >= 9:
            raise LostError

    trained = train(Terms(workers=3, shares=30, staleness=staleness), workers=3, servers=2, before=lose)
    assert not trained.errors
    assert sorted(share for _, share, _ in trained.steps) == list(range(30))


@pytest.mark.parametrize("lost", ["arrive", "push"])
def test_what_a_lost_worker_has_sent_is_not_applied_again(lost):
    """It is lost before it arrives, or when one of two servers has its gradient."""

    def change(worker, way):
        ask = way._ask

        def dies(shard, head, *rest, **named):
            if worker == 1 and head["do"] == lost and head["clock"] == 4 and shard != 0:
                raise LostError
            return ask(shard, head, *rest, **named)

        way._ask = dies

    trained = train(Terms(workers=2, shares=30, staleness=2), workers=2, servers=2, change=change)
    assert not trained.errors
    assert [sum(each["shard"] == shard for each in trained.applied) for shard in (0, 1)] == [30, 30]


@pytest.mark.parametrize("bound", [1, 3])
def test_no_worker_is_further_ahead_than_its_bound(bound):
    """The last worker stands still four times, until both others have come as far as they may."""
    have_joined = threading.Barrier(3)  # who joins later begins at the clock of the slowest
    changed = threading.Condition()
    begun, sent = [0, 0, 0], [0, 0, 0]
    ahead = []

    def change(worker, way):
        arrive = way.arrive

        def then_count(*given):
            with changed:
                sent[worker] += 1
                changed.notify_all()
            return arrive(*given)

        way.arrive = then_count

    def count(worker, share, servers):
        if begun[worker] == 0:
            have_joined.wait(120)
        with changed:
            ahead.append(begun[worker] - min(sent))
            begun[worker] += 1
            if worker == 2 and sent[2] < 4:
                assert changed.wait_for(lambda: min(sent[:2]) > sent[2] + bound, timeout=120)

    trained = train(Terms(workers=3, shares=60, staleness=bound), workers=3, before=count, change=change)
    assert not trained.errors
    assert max(ahead) == bound


def test_what_is_applied_late_is_applied_with_a_smaller_step():
    """Each update that a server made is made again in one process, from the record of staleness."""
    trained = train(
        Terms(workers=1, shares=8, staleness=math.inf),
        workers=1,
        make=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )
    model = make_model()
    for share in range(8):
        loss_of(model, share).backward()
        with torch.no_grad():
            for each in model.parameters():
                each -= 0.1 * each.grad
                each.grad = None
    for ours, theirs in zip(trained.values, model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, **CLOSE)


def test_local_steps_are_merged_as_their_formula_says():
    workers, every, rounds = 3, 4, 5
    trained = train(
        Terms(workers=workers, shares=workers * every * rounds, every=every),
        workers=workers,
        servers=2,
        make=lambda parameters: torch.optim.SGD(parameters, lr=0.05),
        outer=Outer(0.7, 0.9, warmup=3),
    )
    assert not trained.errors
    anchor = make_model()
    momenta = [torch.zeros_like(each) for each in anchor.parameters()]
    for round in range(rounds):
        changes = [torch.zeros_like(each) for each in anchor.parameters()]
        for worker in range(workers):
            model = copy.deepcopy(anchor)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
            for step in range(every):
                optimizer.zero_grad()
                loss_of(model, (round * workers + worker) * every + step).backward()
                optimizer.step()
            for change, before, after in zip(changes, anchor.parameters(), model.parameters(), strict=True):
                change += (before - after).detach() / workers
        grown = 0.9 * min(1.0, (round + 1) / 3)
        with torch.no_grad():
            for each, change, momentum in zip(anchor.parameters(), changes, momenta, strict=True):
                momentum.mul_(grown).add_(change)
                each -= 0.7 * (change + grown * momentum)
    for ours, theirs in zip(trained.values, anchor.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, **CLOSE)


def test_a_connection_without_the_word_is_closed():
    trained = []

    def knock(worker, share, servers):
        stranger = Servers([servers[0].address], "another", timeout=120)
        try:
            stranger.join(Terms(workers=1, shares=1), 0)
        except ServerError as error:
            trained.append(str(error))

    assert not train(Terms(workers=1, shares=1), workers=1, before=knock).errors
    assert "cannot be reached" in trained[0]


def test_an_optimizer_from_elsewhere_is_not_imported():
    class Own(torch.optim.SGD):
        pass

    trained = train(Terms(workers=1, shares=1), workers=1, make=lambda parameters: Own(parameters, lr=0.1))
    (error,) = trained.errors
    assert "Own" in str(error)
