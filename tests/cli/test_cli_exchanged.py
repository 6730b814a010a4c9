"""The bytes between workers, in the report of a run."""

import pytest

from shoal.cli.report import exchanged_summary, exchanged_text
from shoal.spec.plan import Plan
from shoal.spec.timeline import Kind, Lane, Purpose, Span, Timeline

PARAMETERS = 3_000_000


def timeline(ranks, *collectives):
    """Two steps of 10 s on each rank; a collective is name, start, bytes and groups, None for its own."""
    spans = [
        Span(rank, Lane.COMPUTE, Kind.STEP, str(index), 20.0 * index, 10.0)
        for rank in range(ranks)
        for index in range(2)
    ]
    for rank in range(ranks):
        for name, start, size, groups in collectives:
            group = (rank,) if groups is None else next(each for each in groups if rank in each)
            place = rank, Lane.COMMUNICATION, Kind.COLLECTIVE
            spans.append(Span(*place, name, start, 1.0, size, group, purpose=Purpose.DATA))
    return Timeline(spans)


def test_what_workers_send_in_steps_is_counted_as_on_the_wire():
    everybody = [(0, 1, 2, 3)]
    merge = [(name, 25.0, 1000, everybody) for name in ("all_to_all:fragment 0", "all_gather:fragment 0")]
    saved = [("all_reduce:state exp_avg", 31.0, 10**9, everybody)]
    found = exchanged_summary(
        Plan.parse("dp=4,exchange=local,every=2,compress=int8"), timeline(4, *merge, *saved), PARAMETERS
    )
    assert found == {"sent": 2000 * 3 / 4 / 2, "whole_gradients": 2 * 3 / 4 * 4 * PARAMETERS}
    assert exchanged_text(found).endswith("1/24,000.0 of whole gradients")


def test_ranks_of_one_worker_are_not_counted():
    within, between = [(0, 1), (2, 3)], [(0, 2), (1, 3)]
    plan = Plan.parse("dp=4,replicate=2,shard=zero2,compress=topk:64")
    spans = timeline(
        4, ("reduce_scatter:bucket 0", 5.0, 10**9, within), ("all_gather:bucket 0", 6.0, 800, between)
    )
    found = exchanged_summary(plan, spans, PARAMETERS)
    assert found == {"sent": 800 / 2 / 2, "whole_gradients": 2 / 2 * 4 * PARAMETERS / 2}


def test_pushes_and_pulls_are_counted_with_servers():
    spans = timeline(2, ("push:gradients", 5.0, 300, None), ("pull:values", 6.0, 300, None))
    found = exchanged_summary(Plan.parse("dp=2,exchange=server"), spans, PARAMETERS)
    assert found == {"sent": 600 / 2, "whole_gradients": pytest.approx(2 * 4 * PARAMETERS)}


@pytest.mark.parametrize("plan", ["dp=2", "dp=2,shard=zero1"])
def test_a_run_of_whole_gradients_has_nothing_to_say(plan):
    spans = timeline(2, ("all_reduce:bucket 0", 5.0, 300, [(0, 1)]))
    assert exchanged_summary(Plan.parse(plan), spans, PARAMETERS) is None
