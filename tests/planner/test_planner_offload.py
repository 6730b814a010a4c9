"""If nothing fits, the error names a Plan that fits with state outside of the devices."""

import dataclasses
import re

import pytest

from shoal.cluster import Cluster, Host
from shoal.cost import memory_of
from shoal.errors import PlanError
from shoal.plan import SettledPlan
from shoal.planner import choose
from shoal.simulate import simulate
from shoal.workload import shape, workload_of

WORKLOAD = workload_of(shape("350m"))
GIB = 2**30


def laptop(memory, file_bandwidth=2e9):
    cluster = Cluster.preset("laptop", 2)
    device = dataclasses.replace(cluster.device, memory=memory)
    return cluster.replace(device=device, host=Host(devices=2, file_bandwidth=file_bandwidth))


def test_what_fits_with_state_in_files_is_named_with_its_step():
    cluster = laptop(2.5 * GIB)
    with pytest.raises(PlanError, match="does not fit") as raised:
        choose(WORKLOAD, cluster, 4)
    text = re.search(r"these devices with (dp=\S+)", raised.value.possible)
    plan = SettledPlan.of(SettledPlan.parse(text[1]), 4)
    assert plan.tiers.has_files
    (memory,) = memory_of(WORKLOAD, plan, 4, cluster)[:1]
    assert memory.fits(cluster, 0.1)
    assert simulate(WORKLOAD, cluster, plan, 4).seconds > 0


def test_a_cluster_whose_files_are_not_known_gets_no_such_plan():
    with pytest.raises(PlanError, match="does not fit") as raised:
        choose(WORKLOAD, laptop(2.5 * GIB, file_bandwidth=0.0), 4)
    assert "offload" not in raised.value.possible
