"""Layers that run a backward inside the model's backward give the gradients that they give on one device."""

import copy

import pytest
import torch
from torch import nn

from shoal.errors import LayoutError
from shoal.parallel import parallelize
from shoal.testing.zoo.reversible import Reversible
from shoal.testing.zoo.vectors import BATCH, error, vectors

RANKS = 2


class Outside(nn.Module):
    """Uses the parameters of its reversible layers once more, outside of these."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.inner = Reversible(is_shared=True)

    def forward(self, inputs):
        return torch.cat(self.inner.couplings[0](*self.inner(inputs).chunk(2, -1)), -1)


class FromSecondStep(Outside):
    """Has reversible layers from its second step on."""

    calls = 0

    def forward(self, inputs):
        self.calls += 1
        return super().forward(inputs) if self.calls > 1 else self.inner.leave(self.inner.enter(inputs))


def deviations(index, plan, model):
    """The largest deviation of this rank's gradients from those on one device, in two backwards each."""
    alone = copy.deepcopy(model)
    parallel = parallelize(model, plan)
    found = []
    for number in range(2):
        batch = vectors(number)
        part = {name: value.chunk(RANKS)[index] for name, value in batch.items()}
        error(alone, batch).backward()
        error(parallel, part).backward()
        expected = {
            name: parameter.grad.flatten()
            for name, parameter in alone.named_parameters()
            if parameter.grad is not None
        }
        found.append(
            max(
                float((owned.gradient.flatten() - expected[owned.name][owned.start : owned.stop]).abs().max())
                for owned in parallel.owned
                if owned.stop > owned.start and owned.name in expected
            )
        )
        alone.zero_grad()
        parallel.zero_grad()
    return found


def ranked(plan, model):
    import torch.distributed as dist

    try:
        return deviations(dist.get_rank(), plan, model)
    except LayoutError as refusal:
        return str(refusal)


@pytest.mark.parametrize("shard", ["none", "zero1", "zero3"])
def test_a_parameter_gets_the_sum_of_its_gradients_from_both_backwards(ranks, shard):
    assert BATCH % RANKS == 0
    for found in ranks.run(ranked, RANKS, f"dp=2,shard={shard}", Outside()):
        assert max(found) < 1e-6, found  # gradients are below 1, and in fp32


@pytest.mark.parametrize(("shard", "model"), [("zero2", Outside), ("none", FromSecondStep)])
def test_a_second_gradient_after_a_reduction_is_refused(ranks, shard, model):
    for found in ranks.run(ranked, RANKS, f"dp=2,shard={shard}", model()):
        assert "runs backwards inside of it" in found
