"""The comparison of predicted with measured steps."""

import itertools
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from prediction import PLANS, SHAPES, kendall_tau, predicted_seconds

from shoal.spec.cluster import Cluster


def test_tau_is_that_of_its_definition_over_all_orders_of_four():
    for order in itertools.permutations(range(4)):
        swaps = sum(first > second for first, second in itertools.combinations(order, 2))
        assert kendall_tau(list(enumerate(order))) == pytest.approx(1 - 2 * swaps / 6)


def test_there_are_at_least_twelve_plans_and_each_can_be_predicted():
    cases = [(ranks, case) for ranks in PLANS for case in PLANS[ranks]]
    assert len(cases) >= 12
    assert {case.model for _, case in cases} == set(SHAPES)
    for ranks, case in cases:
        cluster = Cluster.preset("laptop").with_devices(ranks)
        assert predicted_seconds(case, cluster) > 0, case
