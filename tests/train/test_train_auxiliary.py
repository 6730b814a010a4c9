"""The auxiliary loss of transformers' mixtures of experts trains under every Plan as on one device."""

import pytest
import torch
from auxiliary_stand_ins import reference, train

from shoal.errors import WorkerError
from shoal.spec.plan import Plan

PLANS = [
    "dp=1",
    "dp=2,shard=zero3",
    "tp=2",
    "tp=2,tensor=plain",
    "cp=2",
    "pp=2",
    "pp=2,recompute=full,schedule=zb-v,virtual=2",
    "tp=2,cp=2",
    "pp=2,tp=2",
    "pp=2,cp=2",
    "dp=2,shares=3-1,shard=zero2",
    "dp=2,pp=2,shares=3-1",
]
PADDED = [
    "dp=2,shares=3-1,shard=zero2",
    "dp=2,shares=3-1,shard=zero3,recompute=full",
    "dp=2,pp=2,shares=3-1",
    "dp=2,pp=2,shares=1-3,schedule=zb-v,virtual=2",
]


def assert_equal(found, expected):
    # Sums in fp32 in another order, relative to gradients and losses near 1; two steps of SGD.
    for name in ("loss", "norm", "validated"):
        assert found[name] == pytest.approx(expected[name], rel=2e-5)
    for name, value in expected["weights"].items():
        torch.testing.assert_close(found["weights"][name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("plan", PLANS)
def test_pairs_train_the_auxiliary_loss_under_every_plan(ranks, plan, masked):
    found = ranks.run(train, Plan.parse(plan).ranks, "mixtral", plan, masked)[0]
    assert_equal(found, reference("mixtral", masked, found["order"]))


@pytest.mark.parametrize("plan", ["dp=1", "tp=2", "cp=2", "pp=2,schedule=interleaved,virtual=2"])
def test_labels_train_it_as_pairs_do(ranks, plan):
    found = ranks.run(train, Plan.parse(plan).ranks, "qwen3_moe", plan, True, "labels")[0]
    assert_equal(found, reference("qwen3_moe", True, found["order"], "labels"))


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("plan", PADDED)
def test_routers_count_no_micro_batch_that_a_padded_rank_makes_again(ranks, plan, masked):
    found = ranks.run(train, Plan.parse(plan).ranks, "shoal", plan, masked)[0]
    assert_equal(found, train("shoal", "dp=1", masked))


def test_a_padded_pipeline_that_computes_again_takes_no_routers(ranks):
    with pytest.raises(WorkerError, match="routers would count micro-batches that are made again"):
        ranks.run(train, 4, "shoal", "dp=2,pp=2,shares=3-1,recompute=full", False)


def test_a_message_in_the_type_of_the_logits_leaves_the_hidden_state_in_bf16(ranks):
    """Ernie's routers give fp32: the same roundings as in one process, and so the same bits."""
    alone, staged = (
        ranks.run(train, size, "ernie4_5_moe", f"{plan},precision=bf16", True)[0]
        for size, plan in ((1, "dp=1"), (2, "pp=2"))
    )
    assert staged["loss"] == alone["loss"]
