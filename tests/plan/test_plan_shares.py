"""Numbers of micro-batches by rank: their text, the order in which they are made, and what they need."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import PlanError
from shoal.spec.plan import Plan, SettledPlan, Shares

NUMBERS = st.lists(st.integers(1, 5), min_size=1, max_size=12)


@given(NUMBERS)
def test_the_text_of_shares_reads_back_and_a_plan_writes_equal_numbers_as_one_run(numbers):
    shares = Shares.of(numbers)
    assert Shares.parse(str(shares)) == Shares.parse("-".join(map(str, numbers))) == shares
    assert [shares.of_rank(rank) for rank in range(shares.ranks)] == numbers
    assert (shares.total, shares.ranks, shares.most) == (sum(numbers), len(numbers), max(numbers))
    plan = Plan(dp=len(numbers), shares="-".join(map(str, numbers)))
    assert Plan.parse(str(plan)) == plan == plan.replace(shares=str(shares))


@given(NUMBERS)
def test_micro_batches_are_handed_out_in_rounds_in_the_order_of_ranks(numbers):
    rounds = [
        (rank, number) for number in range(max(numbers)) for rank, made in enumerate(numbers) if made > number
    ]
    shares = Shares.of(numbers)
    assert [shares.before(rank, number) for rank, number in rounds] == list(range(sum(numbers)))


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("dp=4,shares=3-3", "numbers for 2 ranks, and dp=4"),
        ("dp=2,shares=3-0", "cannot be read"),
        ("dp=2,shares=2x", "3x24 is three on each of 24 ranks"),
        ("dp=2,shares=1-2,ep=2", "exchange tokens"),
        ("dp=2,shares=1-2,exchange=local", "exchange=local"),
        ("dp=2,shares=1-2,compress=int8", "compress=int8"),
    ],
)
def test_shares_that_cannot_be_right_are_refused_by_name(text, named):
    with pytest.raises(PlanError, match=named):
        Plan.parse(text)


@pytest.mark.parametrize(
    ("microbatch", "batch", "change"), [(None, 23, "22"), (2, 11, "22"), (None, 5, "11")]
)
def test_a_batch_that_shares_do_not_add_up_to_is_refused_with_one_that_they_do(microbatch, batch, change):
    with pytest.raises(PlanError, match=f"choose a batch of {change}, or shares whose sum"):
        SettledPlan.of(Plan(dp=4, shares="3-3-3-2", microbatch=microbatch), batch)


@pytest.mark.parametrize(
    ("text", "is_padded"),
    [
        ("", False),
        (",shard=zero1", False),
        (",shard=zero2", True),
        (",shard=zero3-once", True),
        (",pp=2", True),
    ],
)
def test_ranks_that_need_each_other_in_each_micro_batch_are_padded(text, is_padded):
    assert Plan.parse(f"dp=2,shares=1-2{text}").is_padded == is_padded
    assert not Plan.parse(f"dp=2,shares=2x2{text}").is_padded
    assert not Plan.parse(f"dp=2{text}").is_padded


def test_a_schedule_that_cannot_take_the_most_micro_batches_refuses_shares():
    with pytest.raises(PlanError, match="micro-batches"):
        SettledPlan.of(Plan.parse("dp=2,pp=2,schedule=interleaved,shares=3-1"), 4)


@pytest.mark.parametrize(
    ("text", "advice"),
    [
        ("dp=3,shard=zero3", "choose a batch of 15 or 18, or write microbatch=1,shares=6-5x2"),
        ("dp=3,ep=3", "choose a batch of 15 or 18"),
        ("dp=32", "choose a batch of 32"),
    ],
)
def test_a_batch_that_does_not_divide_is_refused_with_shares_that_cut_it(text, advice):
    with pytest.raises(PlanError) as refused:
        SettledPlan.of(Plan.parse(text), 16)
    assert refused.value.change == advice


def test_shares_settle_the_micro_batch_and_the_fullest_rank_counts():
    plan = SettledPlan.of(Plan(dp=4, shares="3-3-3-2"), 22)
    assert (plan.microbatch, plan.microbatches_of(22), str(plan)) == (2, 3, "dp=4,microbatch=2,shares=3x3-2")
