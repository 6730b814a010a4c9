import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import PlanError
from shoal.spec.plan import CHOICES, DEFAULT_ORDER, Plan, SettledPlan, divisors
from shoal.spec.plan.schedules import kind_of


@st.composite
def plans(draw):
    replicate = draw(st.sampled_from([1, 2, 4]))
    shard = draw(st.sampled_from(CHOICES["shard"])) if replicate == 1 else "zero3"
    tp = draw(st.integers(1, 4))
    precision = draw(st.sampled_from([each for each in CHOICES["precision"] if each != "fp8" or tp == 1]))
    pp = draw(st.integers(1, 4))
    reduce = draw(st.sampled_from(CHOICES["reduce"]))
    naive = shard == "none" and precision in ("fp32", "tf32") and reduce == "fp32" and pp == 1
    schedule = draw(st.sampled_from(CHOICES["schedule"]))
    virtual = draw(st.sampled_from([None, kind_of(schedule).least_virtual]))
    activations = draw(st.none() | st.integers(1, 9)) if schedule == "search" else None
    stages = pp * kind_of(schedule).least_virtual
    numbers = st.lists(st.integers(1, 9), min_size=stages, max_size=stages).map(
        lambda counts: "-".join(map(str, counts))
    )
    shards, cp = draw(st.integers(1, 8)), draw(st.integers(1, 4))
    ep = draw(st.sampled_from(divisors(shards * cp)))
    apart = () if cp * ep == 1 else ("local", "auto")  # without shards, a worker is one rank
    exchanges = [each for each in CHOICES["exchange"] if each not in apart] if naive else ["bucketed"]
    exchange = draw(st.sampled_from(exchanges))
    offload = (
        ["none"]
        if exchange != "bucketed"
        else ["none", "optimizer:host", "activations:file", "optimizer:file+activations:file:3"]
    )
    if shard == "zero3":
        offload.append("parameters:file+optimizer:file+gradients:file")
    return Plan(
        dp=replicate * shards,
        tp=tp,
        pp=pp,
        cp=cp,
        ep=ep,
        tensor=draw(st.sampled_from(CHOICES["tensor"])),
        context=draw(st.sampled_from(CHOICES["context"])),
        schedule=schedule,
        virtual=virtual,
        activations=activations,
        split=draw(st.sampled_from(["cost", "count"]) | numbers),
        replicate=replicate,
        shard=shard,
        microbatch=draw(st.none() | st.integers(1, 64)),
        exchange=exchange,
        offload=draw(st.sampled_from(offload)),
        bucket=draw(st.integers(1, 1023)) << draw(st.sampled_from([0, 10, 20])),
        recompute=draw(st.sampled_from((*CHOICES["recompute"], "full:1", "selective:12"))),
        precision=precision,
        reduce=reduce,
        compile=draw(st.sampled_from(CHOICES["compile"])),
        order=draw(st.permutations(("pp", "dp", "cp", "tp")).map("-".join)) if ep == 1 else DEFAULT_ORDER,
    )


@given(plans())
def test_the_text_form_reads_back_as_the_same_plan(plan):
    assert Plan.parse(str(plan)) == plan


def test_settings_left_out_have_their_defaults():
    assert Plan.parse("") == Plan()
    assert str(Plan.parse(" shard = zero1 , dp=4 ")) == "dp=4,shard=zero1"


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("dp=2,shrad=zero1", "did you mean 'shard'"),
        ("dp=2,shard=zero4", "did you mean 'zero"),
        ("dp=2,dp=4", "twice"),
        ("dp=two", "whole number"),
        ("dp=0", "dp=0"),
        ("dp", "name=value"),
        ("bucket=25MB", "size such as 25MiB"),
        ("dp=4,replicate=2", "shard=zero3"),
        ("dp=4,replicate=3,shard=zero1", "1, 2, 4"),
        ("dp=2,shard=zero1,exchange=naive", "naive"),
        ("dp=2,ep=3", "ep=3"),
        ("recompute=ful", "did you mean 'full'"),
        ("recompute=full:none", "such as full:8"),
        ("recompute=none:4", "such as full:8"),
        ("recompute=selective:0", "such as full:8"),
        ("offload=activations:file:0", "such as activations:file:8"),
        ("offload=activations:file:some", "such as activations:file:8"),
        ("offload=optimizer:file:2", "is no part"),
        ("dp=4,shard=zero3,replicate=4,ep=2", "the 1 ranks over which shard=zero3 shards a state"),
        ("order=pp-dp-cp", "each of pp, dp, cp and tp once"),
        ("order=pp-dp-cp-tp-ep", "each of pp, dp, cp and tp once"),
        ("dp=3,cp=4,pp=2,ep=6,order=dp-pp-cp-tp", "ep is one of 1, 2, 4, 12"),
        ("pp=2,activations=4", "write schedule=search"),
        ("pp=2,schedule=search,activations=0", "activations=0"),
        ("pp=2,schedule=search,virtual=2,activations=1", "2 or more"),
    ],
)
def test_a_wrong_plan_is_refused_with_what_is_possible(text, named):
    with pytest.raises(PlanError, match="possible") as refusal:
        Plan.parse(text)
    assert named in str(refusal.value)


def test_a_plan_for_other_ranks_is_refused_with_the_degree_that_fits():
    Plan.parse("dp=2,tp=2").require_ranks(4)
    with pytest.raises(PlanError, match="dp=4"):
        Plan.parse("dp=2,tp=2").require_ranks(8)


@given(dp=st.integers(1, 8), microbatch=st.integers(1, 8), steps=st.integers(1, 8))
def test_a_batch_of_whole_microbatches_fits(dp, microbatch, steps):
    plan = Plan(dp=dp, microbatch=microbatch)
    assert SettledPlan.of(plan, dp * microbatch * steps) == plan


def test_the_microbatch_left_out_is_the_whole_of_a_ranks_batch():
    assert SettledPlan.of(Plan(dp=4), 32).microbatch == 8


@pytest.mark.parametrize(
    ("text", "batch", "named"), [("dp=4", 30, "28 or 32"), ("dp=2,microbatch=3", 16, "1, 2, 4, 8")]
)
def test_a_batch_that_does_not_divide_is_refused_with_those_that_do(text, batch, named):
    with pytest.raises(PlanError) as refusal:
        SettledPlan.of(Plan.parse(text), batch)
    assert named in str(refusal.value)
