"""Gradients that a GPU moves into the sum together, in the place of one by one."""

import pytest
import torch
from operator_stand_ins import INDICES, Operators, Waits
from parallel_stand_ins import SHARDS
from torch import nn

from shoal.parallel import parallelize
from shoal.parallel.data import gradient_sum


def as_on_a_gpu(patch, most):
    patch.setattr(gradient_sum, "batch_bytes", lambda device: most)


class Spare(nn.Module):
    """Layers of which the last has a gradient in some backwards only."""

    def __init__(self, layers):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(layers))

    def forward(self, values, all_layers=True):
        for layer in self.layers if all_layers else self.layers[:-1]:
            values = values + layer(values).tanh()
        return values


def trained(plan, most):
    """Parameters after steps of three micro-batches; the second step keeps the first one's gradients."""
    torch.manual_seed(0)
    with pytest.MonkeyPatch.context() as patch:
        as_on_a_gpu(patch, most)
        parallel = parallelize(Spare(5), plan)
        optimizer = torch.optim.AdamW(parallel.parameters(), lr=0.01)
        for number in range(4):
            batch = torch.randn(6, 6, generator=torch.Generator().manual_seed(number))
            first, second, third = parallel.local(batch).chunk(3)
            with parallel.accumulate():
                parallel(first).square().mean().backward()
                parallel(second, all_layers=number != 2).square().mean().backward()
            parallel(third, all_layers=number == 3).square().mean().backward()
            optimizer.step()
            if number != 1:
                optimizer.zero_grad()
        return parallel.full_state_dict()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("shard", SHARDS)
def test_moving_gradients_together_changes_no_bit(ranks, shard, precision):
    plan = f"dp=2,shard={shard},precision={precision}"
    expected = ranks.run(trained, 2, plan, 0)
    for most in (200, 2**20):  # a few gradients at a time, all of a bucket
        for state, wanted in zip(ranks.run(trained, 2, plan, most), expected, strict=True):
            for name, value in wanted.items():
                assert torch.equal(state[name], value), name


def operators_of_backward(monkeypatch, plan, layers):
    as_on_a_gpu(monkeypatch, 2**20)
    parallel = parallelize(Spare(layers), plan)
    loss = parallel(torch.ones(2, 6)).square().mean()
    with Operators() as operators:
        loss.backward()
    moved = ("aten::copy_", "aten::mul_", "aten::mul.out", "aten::add_", "aten::zero_", "aten::_foreach")
    return sum(name.startswith(moved) for name in operators.names)


@pytest.mark.parametrize("plan", ["dp=1", "dp=1,precision=bf16"])
def test_a_bucket_of_more_parameters_is_moved_by_no_more_operators(monkeypatch, plan):
    assert operators_of_backward(monkeypatch, plan, 12) == operators_of_backward(monkeypatch, plan, 3)


@pytest.mark.parametrize("plan", ["dp=1", "dp=1,precision=bf16"])
def test_gradients_of_later_micro_batches_are_added_by_operators_on_one_dtype(monkeypatch, plan):
    """With two dtypes torch adds tensor by tensor on GPUs."""
    as_on_a_gpu(monkeypatch, 2**20)
    numbers = []
    for layers in (3, 12):
        parallel = parallelize(Spare(layers), plan)
        with parallel.accumulate():
            parallel(torch.ones(2, 6)).square().mean().backward()
        loss = parallel(torch.ones(2, 6)).square().mean()
        with Operators() as operators:
            loss.backward()
        lists = [name for name in operators.names if "_foreach_" in name]
        adds = [dtypes for name, dtypes in zip(lists, operators.dtypes, strict=True) if "add" in name]
        assert adds == ([{torch.float32}] if "bf16" in plan else [])
        numbers.append(len(lists))
    assert numbers[0] == numbers[1]


def waits_of_missing(plan):
    parallel = parallelize(Spare(3), plan)
    loss = parallel(torch.ones(2, 6), all_layers=False).square().mean()
    with Operators() as operators, Waits() as waits:
        loss.backward()
    assert INDICES.isdisjoint(operators.names)
    return waits.names


@pytest.mark.parametrize(
    ("plan", "waits"),
    [
        ("dp=1,precision=bf16", []),  # a rank alone knows what has no gradient
        ("dp=2", ["tolist"]),
        ("dp=2,shard=zero3", ["tolist"]),
    ],
)
def test_a_rank_that_lacks_gradients_waits_at_most_once_for_its_device(ranks, plan, waits):
    for names in ranks.run(waits_of_missing, int(plan[3]), plan):
        assert names == waits
