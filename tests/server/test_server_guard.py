"""The guard of stale gradients: when rounds take their place, and what comes of a training then."""

import math
import random

import pytest
import torch
from server_stand_ins import train
from torch import nn
from turns import Turns

from shoal.parallel.exchange.server import Mode, Terms
from shoal.parallel.exchange.server.coordinator import Guard
from shoal.parallel.exchange.stability import most_stable_step

WORKERS, CURVATURE = 4, torch.tensor([4.0, 1.0, 0.5, 2.0]).repeat(512)


def heard(losses, shares=4000, workers=WORKERS):
    """A guard that has heard these losses."""
    guard = Guard(Terms(workers=workers, shares=shares, staleness=3, guard=True))
    for number, loss in enumerate(losses):
        guard.hear(loss, "", workers, number + 1)
    return guard


@pytest.mark.parametrize("noise", [0.05, 0.5, 2.0])
def test_noise_and_one_worker_without_finite_losses_change_nothing(noise):
    chance = random.Random(0)
    losses = [chance.gauss(3 * math.exp(-at / 3000), noise) for at in range(9600)]
    losses = [math.nan if at % WORKERS == 1 else loss for at, loss in enumerate(losses)]
    mode = heard(losses).mode
    assert mode == Mode(snapshots=1 + 9600 * 3 // 4 // 32)


def test_a_loss_that_rises_by_more_than_a_quarter_brings_rounds_for_a_while():
    guard = heard([2.0] * 64 + [2.49] * 64 + [2.51] * 32)
    assert guard.mode.in_rounds
    assert "rose from 2 to 2.51" in guard.mode.reason
    assert (guard.mode.changes, guard.mode.snapshots, guard.mode.returns) == (1, 5, 1)
    assert guard.until == 160 + 100 * WORKERS  # a tenth of a thousand steps
    guard.close(guard.until - 1)
    assert guard.mode.in_rounds
    guard.close(guard.until)
    assert not guard.mode.in_rounds
    assert guard.mode.snapshots == 6  # of the values that rounds made
    guard.hear(1.0, "the step is too large", WORKERS, 1000)
    assert guard.mode.in_rounds
    assert guard.mode.reason == "the step is too large"
    assert guard.mode.returns == 1
    assert guard.until == 1000 + 200 * WORKERS


def test_losses_of_all_workers_that_are_not_finite_bring_a_snapshot_back():
    guard = heard([2.0] * 40 + [math.nan] * (WORKERS - 1))
    assert not guard.mode.in_rounds
    guard.hear(math.inf, "", WORKERS, 44)
    assert guard.mode.in_rounds
    assert guard.mode.returns == 1


def test_nothing_is_watched_in_rounds_or_when_not_asked():
    for terms in (Terms(workers=2, shares=9, guard=True), Terms(workers=2, shares=9, staleness=1)):
        guard = Guard(terms)
        for _ in range(9):
            guard.hear(math.nan, "", 2, 1)
        assert guard.mode.changes == guard.mode.snapshots == 0


class Spring(nn.Module):
    """Values that are pulled to 1 with different force."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2048))

    def forward(self):
        return (CURVATURE * (self.weight - 1) ** 2).sum() / 2


def spring(rate, guard, loss=lambda model, share: model(), updates=720, **named):
    """The last values, and what was applied."""
    trained = train(
        Terms(workers=WORKERS, shares=updates, staleness=9, guard=guard),
        workers=WORKERS,
        make=lambda parameters: torch.optim.SGD(parameters, lr=rate),
        model=Spring,
        loss=loss,
        **named,
    )
    assert not trained.errors
    assert sorted(share for _, share, _ in trained.steps) == list(range(updates))
    return trained.values[0], trained.applied


def test_a_step_that_is_too_large_for_late_gradients_diverges_and_the_guard_catches_it():
    """It is not too large for gradients that are not late."""
    rate = 1.05 * WORKERS * most_stable_step(4.0, WORKERS - 1)
    assert rate < most_stable_step(4.0, 0)
    diverged, _ = spring(rate, guard=False, change=Turns(WORKERS, 180).guide)
    assert abs(diverged[0] - 1) > 100
    caught, applied = spring(rate, guard=True, change=Turns(WORKERS, 180).guide)
    torch.testing.assert_close(caught, torch.ones(2048))
    late = [each["staleness"] for each in applied]
    first = late.index(0, WORKERS)  # of the rounds, in which nothing is late
    assert 64 <= first < 300
    rounds = next(at for at in range(first, 720) if late[at]) - first
    assert rounds == pytest.approx(100 * WORKERS, abs=2 * WORKERS)


@pytest.mark.parametrize(
    ("compress", "servers", "victim"), [("none", 1, None), ("int8", 1, None), ("none", 2, 0), ("none", 2, 1)]
)
def test_values_that_explode_give_way_to_a_snapshot(compress, servers, victim):
    """Also from the copy of a server that dies in a round after that, or with payloads."""
    lost = []

    def explode(model, share):
        return model() * (1e30 if share == 80 else 1.0)

    def kill(worker, share, servers):
        if victim is not None and share > 150 and not lost:
            lost.append(servers[victim].close())

    values, applied = spring(
        0.2,
        True,
        explode,
        300,
        compress=compress,
        servers=servers,
        mirrored=servers > 1,
        before=kill,
    )
    torch.testing.assert_close(values, torch.ones(2048), rtol=1e-2, atol=1e-2)
    assert applied[-1]["staleness"] == 0
