"""What communications are for."""

import pytest

from shoal.predict.simulate import simulate
from shoal.spec.cluster import Cluster
from shoal.spec.plan import Plan
from shoal.spec.timeline import Kind, Lane, Purpose, Span, Timeline
from shoal.spec.timeline.series import seconds_by_kind
from shoal.spec.workload import ModelShape, workload_of

SHAPE = ModelShape(layers=4, hidden=64, ffn=128, heads=4, vocab=64, seq=32)


@pytest.mark.parametrize(
    ("plan", "experts", "purposes"),
    [
        ("dp=2", 0, {"data"}),
        ("dp=2,exchange=naive", 0, {"data"}),
        ("dp=2,shard=zero3", 0, {"data"}),
        ("tp=2", 0, {"tensor", "data"}),  # the gradients of norms, which every rank has a part of
        ("cp=2", 0, {"context", "data"}),
        ("cp=2,context=ulysses", 0, {"context", "data"}),
        ("pp=2,microbatch=1", 0, {"pipeline"}),
        ("dp=2,ep=2", 4, {"expert", "data"}),
    ],
)
def test_every_axis_communicates_for_itself(plan, experts, purposes):
    workload = workload_of(SHAPE.replace(experts=experts))
    timeline = simulate(workload, Cluster.preset("laptop", 2), Plan.parse(plan), 4).timeline
    found = {span.purpose for span in timeline if span.kind in (Kind.COLLECTIVE, Kind.WAIT)}
    assert found - {"control"} == purposes


def test_what_is_waited_for_is_told_by_purpose_and_adds_up():
    def step(rank, late):
        purposes = (Purpose.TENSOR, Purpose.DATA, Purpose.CONTROL)
        spans = [Span(rank, Lane.COMPUTE, Kind.STEP, "1", 0.0, 10.0)]
        for index, purpose in enumerate(purposes):
            name = f"all_reduce:{index}"
            start, seconds = 1.0 + 2 * index, 1.0 + index / 4
            begun = start + late
            spans += [
                Span(rank, Lane.COMPUTE, Kind.WAIT, name, begun, seconds - late, purpose=purpose),
                Span(rank, Lane.COMMUNICATION, Kind.COLLECTIVE, name, begun, seconds - late, 8, (0, 1)),
            ]
        return spans

    kinds = seconds_by_kind(Timeline([*step(0, 0.0), *step(1, 0.5)]))
    # Rank 0 waits half a second for rank 1 each time, which no link explains.
    assert kinds["tensor"] == pytest.approx(0.5)
    assert kinds["data"] == pytest.approx(0.75)
    assert kinds["control"] == pytest.approx(1.0)
    assert sum(kinds[purpose] for purpose in Purpose) == pytest.approx(kinds["exposed_communication"])
