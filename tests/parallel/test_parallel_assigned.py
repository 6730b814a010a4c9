"""Weights that are assigned to `.data` are computed with, also where tp or ep sums gradients otherwise."""

import pytest
import torch

from shoal.models import Transformer, TransformerConfig, next_token_loss
from shoal.parallel import parallelize
from shoal.spec.plan import Plan

SHAPE = TransformerConfig(
    vocab_size=32, layers=2, hidden=32, heads=4, kv_heads=2, ffn=48, seq=16, experts=4, expert_ffn=16
)
TOKENS = torch.randint(32, (4, 17), generator=torch.Generator().manual_seed(1))


def train(plan):
    """The weights after three steps, before each of which but the first the first weights are assigned."""
    model = Transformer(SHAPE)
    model.initialize(0)
    parallel = parallelize(model, plan)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=1.0, momentum=0.9)
    first = [each.data.clone() for each in parallel.parameters()]
    rows = parallel.local(TOKENS)
    inputs, targets = (parallel.local_sequence(each) for each in (rows[:, :-1], rows[:, 1:]))
    for step in range(3):
        if step:
            for parameter, value in zip(parallel.parameters(), first, strict=True):
                parameter.data = value.clone()
        parallel.forward_backward(
            zip(inputs.split(1), targets.split(1), strict=True), len(inputs), next_token_loss
        )
        optimizer.step()
        optimizer.zero_grad()
    return parallel.full_state_dict()


@pytest.mark.parametrize(
    "plan", ["tp=2", "dp=2,ep=2", "cp=2,ep=2", "dp=2,tp=2,ep=2", "dp=2,pp=2,ep=2", "dp=2,ep=2,shard=zero3"]
)
def test_weights_that_are_assigned_train_as_on_one_device(ranks, plan):
    found, expected = ranks.run(train, Plan.parse(plan).ranks, plan)[0], train("dp=1")
    for name, value in expected.items():
        # sums of fp32 in another order, in gradients up to 1 that momentum adds up threefold
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5)
