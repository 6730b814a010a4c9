"""Advice on a run: what it says would gain is what a step with the change takes."""

import itertools

import pytest

from shoal.analyze.advise import Known, advices
from shoal.analyze.advise.advices import split_advice
from shoal.predict.cost import Costs
from shoal.predict.simulate import StageTimes, played_seconds, simulate
from shoal.spec.cluster import Cluster
from shoal.spec.plan import Plan, SettledPlan
from shoal.spec.timeline import Kind, Lane, Span, Timeline, explain
from shoal.spec.workload import shape, workload_of

STEPS = 12


def steps_of(plan, batch, per_sample, data_wait=0.0, slow_in_turns=False):
    """A data-parallel run: each rank computes its micro-batches, and all meet in one all-reduce of 0.1 s."""
    shares = plan.shared
    group = tuple(range(plan.dp))
    spans, start = [], 0.0
    for index in range(STEPS):
        count = plan.microbatches_of(batch) if shares is None else None
        work = [
            plan.microbatch
            * (count or shares.of_rank(rank))
            * per_sample[(rank + index * slow_in_turns) % plan.dp]
            for rank in group
        ]
        meet = start + data_wait + max(work)
        for rank in group:
            spans += [
                Span(rank, Lane.COMPUTE, Kind.STEP, str(index), start, meet + 0.1 - start),
                Span(rank, Lane.COMPUTE, Kind.DATA_WAIT, "", start, data_wait),
                Span(rank, Lane.COMPUTE, Kind.FORWARD, "", start + data_wait, work[rank] / 3),
                Span(
                    rank,
                    Lane.COMPUTE,
                    Kind.BACKWARD,
                    "",
                    start + data_wait + work[rank] / 3,
                    work[rank] * 2 / 3,
                ),
                Span(
                    rank,
                    *(Lane.COMPUTE, Kind.COLLECTIVE, "all_reduce:0", start + data_wait + work[rank]),
                    *(meet + 0.1 - start - data_wait - work[rank], 1 << 20, group),
                ),
            ]
        start = meet + 0.2
    return Timeline(spans)


def parsed(advice):
    (setting,) = advice.settings
    return Plan.parse(setting.removeprefix('plan="').removesuffix('"'))


def test_slower_ranks_get_fewer_micro_batches_and_the_step_is_as_predicted():
    batch, plan = 24, SettledPlan.of(Plan(dp=3, microbatch=4), 24)
    per_sample = [0.01, 0.01, 0.02]
    timeline = steps_of(plan, batch, per_sample)
    (advice,) = advices(timeline, plan, batch)
    found = SettledPlan.of(parsed(advice), batch)
    assert advice.name == "shares"
    assert advice.before == pytest.approx(explain(timeline).parts.wall)
    assert advice.after == pytest.approx(explain(steps_of(found, batch, per_sample)).parts.wall)
    # No way of giving out samples is better.
    least = min(
        max(count * each for count, each in zip((a, b, batch - a - b), per_sample, strict=True))
        for a, b in itertools.product(range(1, batch - 1), repeat=2)
        if a + b < batch
    )
    assert advice.after - 0.1 == pytest.approx(least, rel=0.1)


def test_ranks_that_are_slow_in_turns_or_equally_quick_are_left_as_they_are():
    plan = SettledPlan.of(Plan(dp=3, microbatch=4), 24)
    assert advices(steps_of(plan, 24, [0.01, 0.01, 0.02], slow_in_turns=True), plan, 24) == []
    assert advices(steps_of(plan, 24, [0.01, 0.0101, 0.01]), plan, 24) == []


def test_a_wait_for_data_is_a_bound():
    plan = SettledPlan.of(Plan(dp=2), 8)
    (advice,) = advices(steps_of(plan, 8, [0.1, 0.1], data_wait=0.5), plan, 8)
    assert (advice.name, advice.is_bound, advice.settings) == ("data", True, ())
    assert advice.before - advice.after == pytest.approx(0.5)
    assert "2 processes" in advice.change


@pytest.mark.parametrize("slow", [1.0, 2.0])
def test_the_split_has_the_least_slowest_stage_of_all_splits(slow):
    """Four stages of 16 blocks; the last has the head, which takes as long as three blocks."""
    batch, plan = 32, SettledPlan.of(Plan(pp=4, microbatch=1, split="4-4-4-4"), 32)
    factors = (1.0, slow, 1.0, 1.0)

    def seconds(blocks):
        return [
            count * each + 3 * (at == 3) for at, (count, each) in enumerate(zip(blocks, factors, strict=True))
        ]

    stages = [
        StageTimes(stage=at, ranks=(at,), forward=1, backward=1, input=None, weight=None, step=batch * each)
        for at, each in enumerate(seconds((4, 4, 4, 4)))
    ]
    wall = (batch + 3) * max(seconds((4, 4, 4, 4)))
    breakdown = explain(
        Timeline([Span(0, Lane.COMPUTE, Kind.STEP, str(at), wall * at, wall) for at in range(9)])
    )
    advice = split_advice(stages, breakdown, plan, batch)
    blocks = tuple(map(int, parsed(advice).split.split("-")))
    least = min(max(seconds(each)) for each in itertools.product(range(1, 14), repeat=4) if sum(each) == 16)
    assert sum(blocks) == 16
    assert max(seconds(blocks)) == pytest.approx(least)
    assert advice.after == pytest.approx((batch + 3) * least)
    even = SettledPlan.of(Plan(pp=4, microbatch=1, split="-".join(map(str, blocks))), 32)
    now = [
        StageTimes(stage=at, ranks=(at,), forward=1, backward=1, input=None, weight=None, step=batch * each)
        for at, each in enumerate(seconds(blocks))
    ]
    assert split_advice(now, breakdown, even, batch) is None


def test_a_wait_for_text_that_is_encoded_meanwhile_names_the_setting_and_its_gain():
    plan = SettledPlan.of(Plan(dp=2), 8)
    timeline = steps_of(plan, 8, [0.1, 0.1], data_wait=0.5)
    config = {"streaming": True, "tokenizer": "t.json", "workers": 0}
    (advice,) = advices(timeline, plan, 8, data=config)
    assert (advice.settings, advice.is_bound) == (("data.workers=2",), False)
    assert advice.before - advice.after == pytest.approx(0.5)
    (more,) = advices(timeline, plan, 8, data=config | {"workers": 2})
    assert more.settings == ("data.workers=4",)
    (plain,) = advices(timeline, plan, 8, data=config | {"tokenizer": "bytes"})
    assert plain.settings == ()


def test_a_bucket_that_is_too_small_is_found_by_playing_and_its_gain_is_that_of_the_play():
    cluster, batch = Cluster.parse("dgx-h100:16"), 32
    workload = workload_of(shape("gpt3-1.3b"))
    plan = SettledPlan.of(Plan(dp=16, shard="zero1", precision="bf16", bucket=1 << 20), batch)
    timeline = simulate(workload, cluster, plan, batch).timeline
    told = {each.name: each for each in advices(timeline, plan, batch, Known(workload, cluster))}
    costs = Costs(workload, cluster)
    found = SettledPlan.of(parsed(told["bucket"]), batch)
    ratio = played_seconds(costs, found, batch) / played_seconds(costs, plan, batch)
    assert found.bucket > plan.bucket
    assert 1 - told["bucket"].gain == pytest.approx(ratio, rel=0.02)
    assert told["plan"].gain >= told["bucket"].gain - 0.02
