"""Ranks that meet many times, against random walks."""

import random
from statistics import fmean

import pytest

from shoal.predict.cost.time.block import behind_the_mean, seconds_late
from shoal.predict.cost.time.step import Costs
from shoal.predict.simulate import simulate
from shoal.spec.cluster import Cluster
from shoal.spec.plan import SettledPlan
from shoal.spec.workload import ModelShape, workload_of

MODEL = workload_of(ModelShape(layers=4, hidden=64, ffn=256, heads=4, vocab=64, seq=64))
STEADY = Cluster.preset("laptop").with_devices(4)
NOISE = 0.01


@pytest.mark.parametrize(("ranks", "synchronisations", "work"), [(2, 1, 4.0), (2, 16, 1.0), (4, 9, 0.25)])
def test_ranks_wait_for_the_one_whose_random_walk_is_behind(ranks, synchronisations, work):
    chance = random.Random(0)

    def waited():
        """The mean over ranks, until the last of all synchronisations."""
        return sum(
            max(walks) - fmean(walks)
            for walks in (
                [chance.gauss(0.0, NOISE * (work / synchronisations) ** 0.5) for _ in range(ranks)]
                for _ in range(synchronisations)
            )
        )

    found = fmean(waited() for _ in range(4000))
    # A mean of 4,000 is off by a hundredth.
    assert seconds_late(NOISE, work, [(ranks, synchronisations)]) == pytest.approx(found, rel=0.04)


def test_groups_of_two_sizes_each_wait_for_their_own():
    both = seconds_late(NOISE, 1.0, [(2, 3), (4, 3)])
    assert both == pytest.approx(seconds_late(NOISE, 0.5, [(2, 3)]) + seconds_late(NOISE, 0.5, [(4, 3)]))


def test_one_rank_waits_for_nobody():
    assert behind_the_mean(1) == pytest.approx(0.0, abs=1e-9)
    assert seconds_late(NOISE, 1.0, []) == seconds_late(0.0, 1.0, [(2, 3)]) == 0.0


@pytest.mark.parametrize(
    "text", ["tp=4", "tp=2,dp=2,tensor=plain", "cp=4,context=ulysses", "cp=2,dp=2", "tp=4,recompute=full"]
)
def test_what_is_waited_for_makes_a_step_longer_and_is_told_as_straggler_wait(text):
    plan = SettledPlan.parse(f"{text},microbatch=2")
    noisy = STEADY.replace(noise=NOISE)
    late = plan.microbatches_of(8) * Costs(MODEL, noisy).stages(plan, 1)[0].late
    assert late > 0
    still, moving = (simulate(MODEL, each, plan, 8) for each in (STEADY, noisy))
    # A longer backward also hides more of the gradients' exchange.
    assert moving.seconds - still.seconds == pytest.approx(late, rel=0.02)
    assert moving.breakdown.parts.straggler_wait == pytest.approx(late)


def test_data_parallel_ranks_do_not_meet_within_blocks():
    plan = SettledPlan.parse("dp=4,microbatch=2")
    noisy = simulate(MODEL, STEADY.replace(noise=NOISE), plan, 8)
    assert noisy.breakdown.parts.straggler_wait == 0.0
