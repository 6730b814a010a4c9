"""Shoal's transformers train under tensor, context and expert parallelism as in one process."""

import pytest
import torch
from parallel_stand_ins import assert_same_training, owned_parts

from shoal.errors import PlanError
from shoal.models import Transformer, TransformerConfig, next_token_loss
from shoal.parallel import Split, TensorLayout, parallelize
from shoal.spec.plan import Plan

STEPS, BATCH, SEQ = 3, 4, 16
SHAPE = {
    "vocab_size": 61,  # does not divide: the last rank has fewer tokens
    "layers": 2,
    "hidden": 32,
    "heads": 4,
    "kv_heads": 2,
    "ffn": 48,
    "seq": SEQ,
}


def batches():
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        yield torch.randint(SHAPE["vocab_size"], (BATCH, SEQ + 1), generator=generator)


def train(text, changes=None, microbatch=2):
    """Losses and gradient norms by step, and what this rank owns at the end."""
    with torch.device("meta"):
        model = Transformer(TransformerConfig(**(SHAPE | (changes or {}))))
    parallel = parallelize(model, text, seed=3)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-2)
    results = []
    for step, batch in enumerate(batches()):
        micro = parallel.local(batch).split(microbatch)
        samples = parallel.local(torch.arange(BATCH) + step * BATCH).split(microbatch)
        parallel.set_micro_batches(len(micro))
        total = torch.zeros(())
        for index, tokens in enumerate(micro):
            inputs, targets = (parallel.local_sequence(each) for each in (tokens[:, :-1], tokens[:, 1:]))
            parallel.set_dropout(7, samples[index], inputs)
            loss = next_token_loss(parallel(inputs), targets) / len(micro)
            total += loss.detach()
            if index + 1 < len(micro):
                with parallel.accumulate():
                    loss.backward()
            else:
                loss.backward()
        norm = parallel.clip_gradients(0.5)
        optimizer.step()
        optimizer.zero_grad()
        parallel.axes.data.all_reduce(total, "loss").wait()
        results.append((total.item() / parallel.axes.data.size, norm))
    return results, owned_parts(parallel)


@pytest.fixture(scope="module")
def alone():
    known = {}

    def trained(**changes):
        key = tuple(sorted(changes.items()))
        if key not in known:
            known[key] = train("dp=1", changes)
        return known[key]

    return trained


def check(ranks, alone, plan, microbatch=2, **changes):
    results = ranks.run(train, Plan.parse(plan).ranks, plan, changes, microbatch)
    expected, owned = alone(**changes)
    assert_same_training(results, expected, owned)


@pytest.mark.parametrize("tensor", ["sequence", "async", "plain"])
@pytest.mark.parametrize("tp", [2, 4])
def test_every_way_trains_as_one_process_does(ranks, alone, tp, tensor):
    check(ranks, alone, f"tp={tp},tensor={tensor}")


@pytest.mark.parametrize("shard", ["none", "zero1", "zero2", "zero3", "zero3-once"])
@pytest.mark.parametrize("tensor", ["sequence", "plain"])
def test_it_composes_with_every_sharding(ranks, alone, shard, tensor):
    check(ranks, alone, f"dp=2,tp=2,tensor={tensor},shard={shard}")


@pytest.mark.parametrize(
    "plan",
    [
        "cp=2",
        "cp=4",
        "cp=2,context=ulysses",
        "cp=2,tp=2",
        "cp=2,tp=2,tensor=async,context=ulysses,shard=zero3",
        "dp=2,cp=2,shard=zero1",
        "dp=2,cp=2,shard=zero2,replicate=2",
        "dp=2,cp=2,shard=zero3,recompute=full",
        "dp=2,cp=2,shard=zero3-once",
    ],
)
def test_it_composes_with_context_parallelism(ranks, alone, plan):
    check(ranks, alone, plan)


EXPERTS = {"experts": 4, "experts_per_token": 2, "expert_ffn": 24, "balance_weight": 0.1, "renormalize": True}


@pytest.mark.parametrize(
    "plan",
    [
        "dp=2",
        "dp=2,ep=2",
        "dp=4,ep=4",
        "dp=4,ep=2,shard=zero1",
        "dp=4,ep=2,shard=zero3",
        "dp=4,ep=2,shard=zero3-once",
        "dp=4,ep=2,shard=zero2,replicate=2",
        "tp=2",
        "tp=2,tensor=plain",
        "dp=2,tp=2,ep=2",
        "dp=2,tp=2,ep=2,tensor=plain,shard=zero3",
        "dp=2,tp=2,ep=2,tensor=async,shard=zero1",
        "cp=2,ep=2",
        "cp=2,tp=2,ep=2",
        "dp=2,cp=2,ep=4",
        "dp=2,cp=2,ep=2,context=ulysses,shard=zero3,recompute=full",
    ],
)
def test_experts_compose_with_everything(ranks, alone, plan):
    check(ranks, alone, plan, **EXPERTS)


@pytest.mark.parametrize(
    "plan",
    [
        "dp=2,tp=2,ep=2,shard=zero3,order=tp-dp-cp-pp",
        "cp=2,tp=2,ep=2,order=pp-dp-tp-cp",
        "dp=2,cp=2,ep=4,shard=zero1,order=cp-dp-pp-tp",
        "dp=2,cp=2,tp=2,ep=2,order=dp-tp-cp-pp",
    ],
)
def test_the_order_of_the_axes_over_the_ranks_changes_nothing(ranks, alone, plan):
    check(ranks, alone, plan, **EXPERTS, capacity=1.0)


def test_experts_of_a_capacity_drop_the_same_choices(ranks, alone):
    for plan in ("dp=2,ep=2", "cp=2,tp=2,ep=2"):
        check(ranks, alone, plan, **EXPERTS, capacity=1.0)


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_it_composes_with_recomputation(ranks, alone, recompute):
    check(ranks, alone, f"tp=2,recompute={recompute},shard=zero3")


@pytest.mark.parametrize("plan", ["tp=2,shard=zero2", "dp=2,tp=2,shard=zero2,tensor=async"])
def test_it_composes_with_micro_batches_that_are_each_reduced(ranks, alone, plan):
    check(ranks, alone, plan, microbatch=1)
    check(ranks, alone, plan, microbatch=1, **EXPERTS)


def test_it_composes_with_the_naive_exchange(ranks, alone):
    check(ranks, alone, "dp=2,tp=2,exchange=naive")


@pytest.mark.parametrize(
    "plan", ["dp=2", "tp=2", "tp=2,tensor=plain", "cp=2,tp=2,recompute=full", "dp=2,cp=2,context=ulysses"]
)
def test_the_masks_of_dropout_are_the_same(ranks, alone, plan):
    check(ranks, alone, plan, dropout=0.2)


def test_embeddings_may_be_tied(ranks, alone):
    check(ranks, alone, "tp=2", tie_embeddings=True)
    check(ranks, alone, "dp=2,tp=2,shard=zero3", tie_embeddings=True)


def test_bf16_trains_near_fp32(ranks, alone):
    expected, _ = alone()
    for losses, _ in ranks.run(train, 2, "tp=2,precision=bf16"):
        # bf16 has 8 bits: single losses differ by about a percent
        torch.testing.assert_close(
            torch.tensor(losses)[:, 0], torch.tensor(expected)[:, 0], rtol=0.02, atol=0
        )


def refused(plan, layout, changes=None):
    with torch.device("meta"):
        model = Transformer(TransformerConfig(**(SHAPE | (changes or {}))))
    with pytest.raises(PlanError) as caught:
        parallelize(model, plan, layout=layout)
    return str(caught.value)


def test_what_does_not_split_is_refused_with_what_would(ranks):
    odd = {"heads": 6, "kv_heads": 6, "hidden": 24}
    assert "tp=4 does not divide the 6 parts" in ranks.run(refused, 4, "tp=4", None, odd)[0]
    typo = TensorLayout({"blocks.*.attention": Split({"quarry": 4}, {})})
    assert "splits blocks.0.attention.quarry" in ranks.run(refused, 2, "tp=2", typo)[0]
    nowhere = TensorLayout({"layers.*": Split({}, {})})
    assert "no such module" in ranks.run(refused, 2, "tp=2", nowhere)[0]
