"""Recompute in some of the blocks: trainings have the bits of those without."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from offload_stand_ins import trained
from torch import nn

from shoal.models import Transformer, TransformerConfig
from shoal.parallel.compiled import compile_blocks
from shoal.plan import Plan, block_choices
from shoal.plan.recompute import Recompute


@pytest.mark.parametrize(
    ("plan", "recompute"),
    [
        ("dp=1", "full:1"),
        ("dp=1,microbatch=2,precision=bf16", "selective:2"),
        ("dp=2,shard=zero3,microbatch=2", "full:2"),
        ("dp=1,pp=2,microbatch=2,schedule=zb-h1", "full:2"),
    ],
)
def test_recompute_in_some_blocks_changes_no_bit(ranks, tmp_path, plan, recompute):
    size = Plan.parse(plan).ranks
    (losses, state), other = (
        trained(text, tmp_path) if size == 1 else ranks.run(trained, size, text, tmp_path)[0]
        for text in (plan, f"{plan},recompute={recompute}")
    )
    assert other[0] == losses
    for name, value in state.items():
        assert torch.equal(other[1][name], value), name


class Counted(nn.Linear):
    """A block that counts its forwards."""

    calls = 0

    def forward(self, values):
        self.calls += 1
        return super().forward(values)


@pytest.mark.parametrize("policy", ["full", "selective"])
@pytest.mark.parametrize("again", [(), (0,), (0, 2), (0, 1, 2)])
def test_the_blocks_that_recompute_are_made_again(policy, again):
    blocks = [Counted(4, 4) for _ in range(3)]
    compile_blocks(blocks, policy, again=again)
    values = torch.ones(2, 4, requires_grad=True)
    for block in blocks:
        values = block(values).relu()
    values.sum().backward()
    assert [block.calls for block in blocks] == [1 + (number in again) for number in range(3)]


@pytest.mark.parametrize("policy", ["full", "selective"])
@pytest.mark.parametrize(("dropout", "states"), [(0.0, 0), (0.1, 3)])
def test_the_state_of_generators_is_kept_for_blocks_that_may_draw(monkeypatch, policy, dropout, states):
    shape = {"vocab_size": 7, "layers": 3, "hidden": 8, "heads": 2, "kv_heads": 1, "ffn": 8, "seq": 4}
    model = Transformer(TransformerConfig(**shape, dropout=dropout))
    model.initialize(0)
    compile_blocks(list(model.blocks), policy)
    asked, state = [], torch.get_rng_state
    monkeypatch.setattr(torch, "get_rng_state", lambda: asked.append(1) or state())
    model(torch.ones(1, 4, dtype=torch.int64))
    assert len(asked) == states


def test_a_block_of_another_class_may_draw(monkeypatch):
    block = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    compile_blocks([block], "full")
    values = torch.ones(2, 4, requires_grad=True)
    result = block(values)
    torch.rand(3)
    result.sum().backward()
    dropped = result.detach() == 0
    assert torch.equal(block[0].bias.grad, 2.0 * (~dropped).sum(0))


def test_a_stage_has_its_share_of_the_number_rounded_up():
    some = Recompute.parse("full:8")
    assert [some.count(blocks, 24) for blocks in (24, 12, 7, 3, 0)] == [8, 4, 3, 1, 0]
    assert Recompute.parse("full:99").count(12, 24) == 12
    assert Recompute.parse("selective").count(5, 24) == 5
    assert Recompute.parse("none").count(5, 24) == 5


@given(blocks=st.integers(1, 12), recomputed=st.integers(1, 12), stored=st.integers(1, 12))
def test_blocks_in_files_are_spread_evenly_and_the_first_others_recompute(blocks, recomputed, stored):
    plan = Plan.parse(f"recompute=full:{recomputed},offload=activations:file:{stored}")
    again, in_files = block_choices(plan, blocks, 12)
    assert len(again) == plan.recomputed.count(blocks, 12)
    assert len(in_files) == min(blocks, -(-stored * blocks // 12))
    for first in range(blocks + 1):
        assert len([each for each in in_files if each < first]) == math.ceil(first * len(in_files) / blocks)
    others = [each for each in range(blocks) if each not in in_files]
    assert again.intersection(others) == set(others[: len(again)])
    assert again.intersection(in_files) == set(sorted(in_files)[: max(0, len(again) - len(others))])
