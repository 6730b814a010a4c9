"""What a user relies on beyond equal losses: frozen parts, unused parts, memory, bytes, errors."""

import copy
import functools
import gc
import weakref

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from parallel_stand_ins import SHAPE, SHARDS, ListRecorder, evaluate, one_step, tokens, transformer
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from shoal.errors import LayoutError, ModelError, PlanError, TrainingError
from shoal.models import Transformer, next_token_loss
from shoal.parallel import parallelize
from shoal.parallel.micro_batches import require_padded
from shoal.spec.plan import Plan

# -- gradients -------------------------------------------------------------------------------------------


def accumulate_without_zeroing(text):
    parallel = parallelize(transformer(), text)
    for _ in range(2):
        one_step(parallel, tokens(dist.get_rank()))
    return [(owned.name, owned.start, owned.gradient.flatten()) for owned in parallel.owned]


@pytest.mark.parametrize("shard", SHARDS)
def test_gradients_that_are_not_zeroed_add_up_as_autograd_adds_them(ranks, shard):
    expected = transformer()
    for _ in range(2):
        for rank in range(2):
            batch = tokens(rank)
            (next_token_loss(expected(batch[:, :-1]), batch[:, 1:]) / 2).backward()
    wanted = {name: parameter.grad.flatten() for name, parameter in expected.named_parameters()}
    for pieces in ranks.run(accumulate_without_zeroing, 2, f"dp=2,shard={shard}"):
        for name, start, gradient in pieces:
            part = wanted[name][start : start + len(gradient)]
            torch.testing.assert_close(gradient, part, rtol=1e-4, atol=1e-6)


class Partly(nn.Module):
    """One layer is frozen, one is used by some ranks only, one by none."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.blocks[1].requires_grad_(False)
        self.register_buffer("offset", torch.ones(6))

    def forward(self, x, use_third):
        x = self.blocks[1](self.blocks[0](x)) + self.offset
        return self.blocks[2](x) if use_third else x


def train_partly(text):
    torch.manual_seed(dist.get_rank())  # ranks build different models: rank 0's counts
    parallel = parallelize(Partly(), text)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
    for step in range(3):
        use_third = dist.get_rank() == 0 and "zero3" not in text
        parallel(torch.full((2, 6), step + 1.0), use_third).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    with parallel.gathered():
        return {name: value.detach().clone() for name, value in parallel.module.state_dict().items()}


@pytest.mark.parametrize("shard", SHARDS)
def test_parts_that_are_frozen_or_not_used_everywhere_train_as_in_one_process(ranks, shard):
    torch.manual_seed(0)
    expected = Partly()
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.1)
    for step in range(3):
        for rank in range(2):
            use_third = (
                rank == 0 and "zero3" not in shard
            )  # which gathers in forward, so ranks must run alike
            (expected(torch.full((2, 6), step + 1.0), use_third).square().mean() / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    for weights in ranks.run(train_partly, 2, f"dp=2,shard={shard}"):
        for name, value in expected.state_dict().items():
            torch.testing.assert_close(weights[name], value, rtol=1e-5, atol=1e-6)


def fail_in_backward_then_train(text):
    parallel = parallelize(transformer(), text)
    batch = tokens(dist.get_rank())
    hidden = []
    handle = parallel.module.blocks[1].register_forward_hook(lambda *_: hidden.append(_[-1]))
    loss = next_token_loss(parallel(batch[:, :-1]), batch[:, 1:])
    handle.remove()
    hidden[0].register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loss.backward()
    dist.barrier()
    with pytest.raises(TrainingError, match="zero_grad"):
        one_step(parallel, batch)
    parallel.zero_grad()
    one_step(parallel, batch)
    return parallel.gradient_norm()


@pytest.mark.parametrize("shard", SHARDS[:2])
def test_after_a_backward_that_raised_zero_grad_lets_training_go_on(ranks, shard):
    expected = transformer()
    for rank in range(2):
        batch = tokens(rank)
        (next_token_loss(expected(batch[:, :-1]), batch[:, 1:]) / 2).backward()
    norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in expected.parameters()])
    for result in ranks.run(fail_in_backward_then_train, 2, f"dp=2,shard={shard}"):
        assert result == pytest.approx(norm.item(), rel=1e-4)


def test_reentrant_recompute_is_refused():
    model = transformer()
    for block in model.blocks:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=True)
    parallel = parallelize(model, "")
    with pytest.raises(LayoutError, match="use_reentrant=False"):
        one_step(parallel, tokens())


# -- the same as FSDP2 -----------------------------------------------------------------------------------


def train_both():
    ours = parallelize(transformer(), "dp=2,shard=zero3")
    theirs = transformer()
    for block in theirs.blocks:
        fully_shard(block)
    fully_shard(theirs)
    losses = []
    for model in (ours, theirs):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for step in range(5):
            loss = one_step(model, tokens(10 * step + dist.get_rank()))
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses[:5], losses[5:]


def test_zero3_trains_as_fsdp2_does(ranks):
    for ours, theirs in ranks.run(train_both, 2):
        torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), rtol=1e-5, atol=0)


# -- memory and bytes ------------------------------------------------------------------------------------


def storages(text):
    parallel = parallelize(transformer(), text)
    one_step(parallel, tokens())
    seen = {}
    for parameter in parallel.module.parameters():
        seen[parameter.untyped_storage().data_ptr()] = parameter.untyped_storage().nbytes()
    weights = sum(seen.values())
    owned = sum(owned.local.numel() for owned in parallel.owned)
    gradients = {owned.gradient.untyped_storage().data_ptr(): owned.gradient for owned in parallel.owned}
    return weights, owned, sum(gradient.untyped_storage().nbytes() for gradient in gradients.values())


def test_each_stage_of_zero_keeps_what_it_says_between_steps(ranks):
    parameters = SHAPE.parameter_count()
    padding = 16 * 4 * 40  # a cache line for each parameter and shard, in bytes
    kept = {shard: ranks.run(storages, 2, f"dp=2,shard={shard}")[0] for shard in SHARDS}
    for shard, (weights, owned, gradients) in kept.items():
        whole, half = pytest.approx(4 * parameters, abs=padding), pytest.approx(2 * parameters, abs=padding)
        assert weights == (pytest.approx(0, abs=padding) if "zero3" in shard else whole)
        assert owned * 4 == (whole if shard == "none" else half)
        assert gradients == (whole if shard in ("none", "zero1", "zero3-once") else half)


def moved(text, microbatches):
    recorder = ListRecorder()
    parallel = parallelize(transformer(), text, recorder=recorder)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
    for step in range(2):  # the second begins with the gathers that follow from the first
        if step:
            recorder.collectives.clear()
        for index in range(microbatches):
            if index + 1 < microbatches:
                with parallel.accumulate():
                    one_step(parallel, tokens(dist.get_rank()))
            else:
                one_step(parallel, tokens(dist.get_rank()))
        optimizer.step()
        optimizer.zero_grad()
    totals = {}
    for name, count, _ in recorder.collectives:
        totals[name] = totals.get(name, 0) + count
    return totals


@pytest.mark.parametrize(
    ("layout", "reduced", "gathered"),
    [
        # In units of the parameters' bytes, for two micro-batches (shared notes: elements moved per rank).
        ("dp=2", {"all_reduce": 1}, 0),
        ("dp=2,shard=zero1", {"reduce_scatter": 1}, 1),
        ("dp=2,shard=zero2", {"reduce_scatter": 2}, 1),
        ("dp=2,shard=zero3", {"reduce_scatter": 2}, 4),
        ("dp=2,shard=zero3-once", {"reduce_scatter": 1}, 4),
        ("dp=4,shard=zero1,replicate=2", {"reduce_scatter": 1, "all_reduce": 0.5}, 1),
    ],
)
def test_the_bytes_of_a_step_are_those_of_the_formula(ranks, layout, reduced, gathered):
    size = 4 * SHAPE.parameter_count()
    totals = ranks.run(moved, int(layout[3]), layout, 2)[0]
    assert set(totals) == set(reduced) | ({"all_gather"} if gathered else set())
    for name, share in reduced.items():
        assert totals[name] == pytest.approx(share * size, rel=0.02)  # padding
    if gathered == 4:
        # forward and backward of two micro-batches; the last block stays, and the root stays for both
        root = 4 * (2 * 64 * 32 + 32)
        block = (size - root) / SHAPE.layers
        expected = 2 * (root + block * (2 * SHAPE.layers - 1))
        assert totals["all_gather"] == pytest.approx(expected, rel=0.02)
    elif gathered:
        assert totals["all_gather"] == pytest.approx(gathered * size, rel=0.02)


# -- other models and devices ----------------------------------------------------------------------------


def from_meta(text):
    with torch.device("meta"):
        model = Transformer(SHAPE)
    parallel = parallelize(model, text, seed=7)
    with parallel.gathered():
        return {name: value.detach().clone() for name, value in model.named_parameters()}


@pytest.mark.parametrize("shard", SHARDS)
def test_a_model_from_the_meta_device_has_the_values_of_one_device(ranks, shard):
    expected = Transformer(SHAPE)
    expected.initialize(7)
    for weights in ranks.run(from_meta, 2, f"dp=2,shard={shard}"):
        for name, value in expected.named_parameters():
            assert torch.equal(weights[name], value)


@pytest.mark.parametrize("shard", SHARDS)
def test_a_forward_without_gradients_sees_the_step_before_it(ranks, shard):
    expected = transformer()
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.5)
    for rank in range(2):
        (one_step(expected, tokens(rank)) * 0).detach()
    for parameter in expected.parameters():
        parameter.grad /= 2
    optimizer.step()
    with torch.no_grad():
        wanted = expected(tokens()[:, :-1])
    for output in ranks.run(evaluate, 2, f"dp=2,shard={shard}"):
        torch.testing.assert_close(output, wanted, rtol=1e-4, atol=1e-5)


def train_less_than_one_element_a_rank(text):
    torch.manual_seed(0)
    parallel = parallelize(nn.Linear(2, 1), text)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=0.1, fused=True)
    for _ in range(3):
        parallel(torch.ones(1, 2)).square().sum().backward()
        parallel.clip_gradients(1.0)
        optimizer.step()
        optimizer.zero_grad()
    with parallel.gathered():
        return parallel.module.weight.detach().clone()


@pytest.mark.parametrize("shard", SHARDS[1:])
def test_ranks_that_have_nothing_to_own_take_part(ranks, shard):
    alone = ranks.run(train_less_than_one_element_a_rank, 1, "")[0]
    for weight in ranks.run(train_less_than_one_element_a_rank, 4, f"dp=4,shard={shard}"):
        torch.testing.assert_close(weight, alone)


def train_hugging_face(text):
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32, tie_word_embeddings=True, use_cache=False,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    parallel = parallelize(model, text)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-2)
    losses = []
    for step in range(4):
        losses.append(one_step(parallel, parallel.local(torch.cat([tokens(step), tokens(step + 50)]))).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def test_a_hugging_face_model_trains_alike_under_every_stage(ranks):
    alone = ranks.run(train_hugging_face, 1, "")[0]
    for shard in SHARDS:
        results = ranks.run(train_hugging_face, 2, f"dp=2,shard={shard}")
        mean = torch.tensor(results).mean(0)
        torch.testing.assert_close(mean, torch.tensor(alone), rtol=1e-4, atol=0)


def memory_after_it_is_discarded(text):
    parallel = parallelize(transformer(), text)
    one_step(parallel, tokens())
    alive = [weakref.ref(parallel.module), weakref.ref(next(parallel.parameters()))]
    alive += [weakref.ref(parameter) for parameter in parallel.module.parameters()]
    del parallel
    gc.collect()
    return [reference() is None for reference in alive]


@pytest.mark.parametrize("settings", [*(f"shard={shard}" for shard in SHARDS), "exchange=naive"])
def test_a_model_that_is_discarded_is_freed(ranks, settings):
    for freed in ranks.run(memory_after_it_is_discarded, 2, f"dp=2,{settings}"):
        assert all(freed)


def test_dropped_weights_read_as_nan_with_their_shape():
    model = transformer()
    weight = model.blocks[0].feed_forward.up.weight
    parallel = parallelize(model, "shard=zero3")
    assert weight.shape == (48, 32)
    assert weight.isnan().all()
    with parallel.gathered():
        assert torch.isfinite(weight).all()


def test_plans_that_cannot_be_executed_are_refused_before_anything_changes():
    model = transformer()
    before = copy.deepcopy(model.state_dict())
    for text, named in [("dp=2", "there are 1"), ("tp=2", "tp=2"), ("shard=zero9", "zero9")]:
        with pytest.raises(PlanError) as refusal:
            parallelize(model, text)
        assert named in str(refusal.value)
    for name, value in before.items():
        assert torch.equal(model.state_dict()[name], value)


def test_models_that_cannot_be_trained_are_refused():
    with pytest.raises(ModelError, match="no parameter"):
        parallelize(nn.ReLU(), "")
    with pytest.raises(ModelError, match="float64"):
        parallelize(nn.Linear(2, 2).double(), "")
    with torch.device("meta"):
        model = nn.Linear(2, 2)
    with pytest.raises(ModelError, match="meta device"):
        parallelize(model, "")


def test_floating_inputs_are_cast_for_bf16():
    parallel = parallelize(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1)), "precision=bf16")
    loss = F.mse_loss(parallel(torch.ones(4, 3)).float(), torch.zeros(4, 1))
    loss.backward()
    assert all(parameter.grad.dtype == torch.float32 for parameter in parallel.parameters())


def test_loops_of_the_user_give_padded_ranks_as_many_micro_batches_as_the_others():
    padded = Plan.parse("dp=2,pp=2,shares=2-1")
    require_padded(padded, 2)
    with pytest.raises(PlanError, match="each rank needs 2"):
        require_padded(padded, 1)
    require_padded(Plan.parse("dp=2,shares=2-1"), 1)
