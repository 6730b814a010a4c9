"""The benchmark of slow workers: what it predicts comes from what it measured."""

import sys
from pathlib import Path

from shoal.spec.plan import Plan

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import slow_worker


def test_workers_meet_as_their_plan_says():
    for plan in slow_worker.WAYS.values():
        meeting, exchanged = slow_worker.meeting_under(plan, 0.2, 0.4), Plan.parse(plan).exchanged
        assert meeting.alone == (0.1 if exchanged.is_served else 0.2)
        assert (meeting.staleness, meeting.quorum) == (exchanged.staleness, exchanged.quorum)


def test_a_way_trains_on_all_shares():
    rate = slow_worker.measured("dp=2,exchange=server,staleness=inf", [0.001, 0.002], 4)
    assert rate > 0
