"""Auxiliary losses of routers join backward with the factor that a loop puts on the mean loss."""

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F

from shoal.errors import TrainingError
from shoal.models import Transformer, TransformerConfig, logits_of, next_token_loss, set_auxiliary_scale
from shoal.parallel import parallelize
from shoal.spec.plan import Plan

SHAPE = TransformerConfig(
    vocab_size=32,
    layers=2,
    hidden=32,
    heads=4,
    kv_heads=2,
    ffn=48,
    seq=16,
    experts=4,
    expert_ffn=16,
    balance_weight=1.0,
    z_weight=0.1,
)
TOKENS = torch.randint(32, (8, 17), generator=torch.Generator().manual_seed(1))
# The same sums over other parts: roundings of 6e-8 of terms up to a few times as large as the sum.
CLOSE = {"rtol": 1e-4, "atol": 1e-6}


def made():
    model = Transformer(SHAPE)
    model.initialize(0)
    return model


def gradients_alone(weights):
    """The gradients of the weighted sum of the micro-batches' losses, in a loop of torch alone."""
    model = made()
    for part, weight in zip(TOKENS.chunk(len(weights)), weights, strict=True):
        set_auxiliary_scale(model, weight)
        (next_token_loss(model(part[:, :-1]), part[:, 1:]) * weight).backward()
    return {name: each.grad for name, each in model.named_parameters()}


def gradients_of(parallel):
    names = [each.name for each in parallel.owned]
    with torch.no_grad():
        for each in parallel.owned:
            each.local.copy_(each.gradient)
    parallel.changed()
    whole = parallel.full_state_dict()
    return {name: whole[name] for name in names} if whole else {}


def in_own_loop(plan, weights, before=lambda parallel: None):
    parallel = parallelize(made(), plan)
    before(parallel)
    rows = parallel.local(torch.arange(8))
    for number, own in enumerate(rows.chunk(len(weights)), 1):
        inputs, targets = (parallel.local_sequence(each) for each in (TOKENS[own, :-1], TOKENS[own, 1:]))
        with parallel.accumulate() if number < len(weights) else nullcontext():
            (next_token_loss(parallel(inputs), targets) * weights[number - 1]).backward()
    return gradients_of(parallel)


@pytest.mark.parametrize(
    "plan", ["dp=2", "dp=2,shard=zero3", "tp=2", "tp=2,tensor=plain", "cp=2", "dp=2,ep=2"]
)
def test_micro_batches_in_ones_own_loop_train_routers_as_one_batch_does(ranks, plan):
    found = ranks.run(in_own_loop, Plan.parse(plan).ranks, plan, [0.25] * 4)[0]
    for name, expected in gradients_alone([1.0]).items():
        torch.testing.assert_close(found[name], expected, **CLOSE)


def test_routers_take_over_a_weight_that_differs_between_micro_batches():
    found = in_own_loop("dp=1", [0.7, 0.3])
    for name, expected in gradients_alone([0.7, 0.3]).items():
        torch.testing.assert_close(found[name], expected, **CLOSE)


def test_a_pipelines_step_leaves_no_number_to_the_loop_after_it():
    def before(parallel):
        parallel.forward_backward(iter([(TOKENS[:, :-1], TOKENS[:, 1:])] * 3), 3, next_token_loss)
        parallel.zero_grad()

    found = in_own_loop("dp=1", [0.25] * 4, before)
    for name, expected in gradients_alone([1.0]).items():
        torch.testing.assert_close(found[name], expected, **CLOSE)


def test_with_another_loss_several_micro_batches_have_to_be_announced():
    def backward(parallel):
        for number, part in enumerate(TOKENS.chunk(2)):
            logits = logits_of(parallel(part[:, :-1])).flatten(0, 1)
            with nullcontext() if number else parallel.accumulate():
                (F.cross_entropy(logits, part[:, 1:].flatten()) / 2).backward()
        return gradients_of(parallel)

    with pytest.raises(TrainingError, match="set_micro_batches"):
        backward(parallelize(made(), "dp=1"))
    parallel = parallelize(made(), "dp=1")
    parallel.set_micro_batches(2)
    found = backward(parallel)
    for name, expected in gradients_alone([1.0]).items():
        torch.testing.assert_close(found[name], expected, **CLOSE)
