"""Ranks that made different numbers of optimizer steps are told, before weights of two steps are mixed."""

import pytest
import torch
from torch import nn

import shoal
from shoal.errors import TrainingError
from shoal.models import Transformer, TransformerConfig, next_token_loss
from shoal.parallel import parallelize
from shoal.spec.plan import Plan

SHAPE = TransformerConfig(vocab_size=32, layers=2, hidden=16, heads=2, kv_heads=2, ffn=16, seq=8)
TOKENS = torch.randint(32, (4, 9), generator=torch.Generator().manual_seed(1))


def words(plan, skipped, end, folder=None):
    """The error of three steps, of which the last rank leaves out those in `skipped`; empty if none."""
    model = Transformer(SHAPE)
    model.initialize(0)
    parallel = parallelize(model, plan)
    world = parallel.axes.world
    # Several optimizers, as many as this rank has parameters, make one step together.
    optimizers = [torch.optim.SGD([each], lr=0.1) for each in parallel.parameters()]
    rows = parallel.local(TOKENS).split(1)
    try:
        for step in range(3):
            pairs = ((each[:, :-1], each[:, 1:]) for each in rows)
            parallel.forward_backward(pairs, len(rows), next_token_loss)
            if end == "norm":
                parallel.clip_gradients(1.0)
            if step not in skipped or world.index < world.size - 1:
                for each in optimizers:
                    each.step()
            parallel.zero_grad()
        if end == "save":
            shoal.save(folder, parallel, step=3)
    except TrainingError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("plan", ["pp=2", "tp=2", "dp=2,shard=zero3", "dp=2,shard=zero1,pp=2"])
def test_a_norm_names_the_rank_that_left_a_step_out(ranks, plan):
    size = Plan.parse(plan).ranks
    assert ranks.run(words, size, plan, (), "norm") == [""] * size
    # After three steps with the second left out: found before the third.
    others = ", ".join(map(str, range(size - 1)))
    for text in ranks.run(words, size, plan, (1,), "norm"):
        assert f"1 on rank {size - 1}; 2 on rank {others}" in text


def test_a_rank_that_never_makes_a_step_is_named(ranks):
    for text in ranks.run(words, 2, "dp=2,shard=zero3", (0, 1, 2), "norm"):
        assert "0 on rank 1; 1 on rank 0" in text


@pytest.mark.parametrize("plan", ["dp=2", "pp=2"])
def test_a_checkpoint_is_not_saved_of_weights_of_two_steps(ranks, plan, tmp_path):
    assert ranks.run(words, 2, plan, (), "save", tmp_path / "equal") == ["", ""]
    for text in ranks.run(words, 2, plan, (2,), "save", tmp_path / "other"):
        assert "2 on rank 1; 3 on rank 0" in text
    assert not list((tmp_path / "other").glob("step-*"))


def gradients_of_one_stage(steps):
    """Norms of a pipeline of which one stage is frozen, and has no optimizer."""
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    for each in list(model)[2:]:
        each.requires_grad_(False)
    parallel = parallelize(model, "pp=2,split=2-2")
    mine = list(parallel.parameters())
    optimizer = torch.optim.SGD(mine, lr=0.1) if any(each.requires_grad for each in mine) else None
    norms = []
    for _ in range(steps):
        pairs = ((torch.ones(1, 4), torch.zeros(1, 4)) for _ in range(2))
        parallel.forward_backward(pairs, 2, nn.functional.mse_loss)
        norms.append(parallel.gradient_norm())
        if optimizer is not None:
            optimizer.step()
        parallel.zero_grad()
    return norms


def test_a_stage_without_an_optimizer_is_not_compared(ranks):
    one, other = ranks.run(gradients_of_one_stage, 2, 3)
    assert one == other
    assert one[2] < one[0]
