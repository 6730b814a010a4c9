"""Models of which some parameters are not trained, under what splits them, and whole models as state_dict."""

import pytest
import torch
import torch.distributed as dist
from parallel_stand_ins import assembled, owned_parts

from shoal.checkpoint import ProcessGroupCoordinator, SingleProcess, load, save
from shoal.errors import ModelError
from shoal.models import Transformer, TransformerConfig, next_token_loss
from shoal.parallel import parallelize
from shoal.spec.plan import Plan
from shoal.train.state import fixed_pieces, pieces_to_load, pieces_to_save

STEPS, BATCH, SEQ = 3, 4, 16
DENSE = {"vocab_size": 61, "layers": 2, "hidden": 32, "heads": 4, "kv_heads": 2, "ffn": 48, "seq": SEQ}
EXPERTS = DENSE | {"experts": 4, "experts_per_token": 2, "expert_ffn": 24, "balance_weight": 0.1}
FROZEN = {
    "the embedding": lambda name: name == "embed.weight",
    "all but norms": lambda name: "norm" not in name,
    "the first block and the head": lambda name: name.startswith(("blocks.0.", "head.")),
    "the experts": lambda name: "feed_forward" in name,
    "nothing": lambda name: False,
}


def built(shape, frozen, seed=3):
    model = Transformer(TransformerConfig(**shape))
    model.initialize(seed)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not FROZEN[frozen](name))
    return model


def train(plan, shape, frozen):
    """Losses, gradient norms, what this rank owns, the whole model, and the dtypes of what is frozen."""
    parallel = parallelize(built(shape, frozen), plan)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(1)
    results = []
    for _ in range(STEPS):
        batch = parallel.local(torch.randint(DENSE["vocab_size"], (BATCH, SEQ + 1), generator=generator))
        inputs, targets = (parallel.local_sequence(each) for each in (batch[:, :-1], batch[:, 1:]))
        loss = next_token_loss(parallel(inputs), targets)
        loss.backward()
        norm = parallel.clip_gradients(0.5)
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        parallel.axes.data.all_reduce(total, "loss").wait()
        results.append((total.item() / parallel.axes.data.size, norm))
    return results, owned_parts(parallel), parallel.full_state_dict()


@pytest.fixture(scope="module")
def alone():
    known = {}

    def trained(shape, frozen):
        key = ("experts" in shape, frozen)
        if key not in known:
            known[key] = train("dp=1", shape, frozen)
        return known[key]

    return trained


def check(ranks, alone, plan, shape, frozen):
    results = ranks.run(train, Plan.parse(plan).ranks, plan, shape, frozen)
    losses, owned, state = alone(shape, frozen)
    for each, _, other in results:
        # fp32 sums in another order, over a few steps of AdamW
        torch.testing.assert_close(torch.tensor(each), torch.tensor(losses), rtol=1e-4, atol=1e-5)
        assert other.keys() == (state.keys() if other is results[0][2] else set())
    whole, reference = assembled([parts for _, parts, _ in results]), assembled([owned])
    assert whole.keys() == reference.keys()
    start = built(shape, frozen).state_dict()
    for name, value in results[0][2].items():
        if FROZEN[frozen](name):
            assert torch.equal(value, start[name])
        else:
            assert torch.equal(value, whole[name])
            torch.testing.assert_close(value, state[name], rtol=1e-3, atol=2e-4)


@pytest.mark.parametrize(
    ("plan", "frozen"),
    [
        ("tp=2", "the embedding"),
        ("tp=2,tensor=plain", "the embedding"),
        ("tp=2", "all but norms"),
        ("tp=2,tensor=plain", "all but norms"),
        ("tp=2,tensor=async,recompute=full", "the first block and the head"),
        ("tp=4,shard=zero3", "the first block and the head"),
        ("dp=2,tp=2,shard=zero1", "all but norms"),
        ("dp=2,tp=2,shard=zero3", "the embedding"),
        ("cp=2", "the first block and the head"),
        ("cp=2,context=ulysses", "all but norms"),
        ("cp=2,tp=2,shard=zero2", "the embedding"),
        ("dp=2,tp=2,shard=zero3", "nothing"),
    ],
)
def test_what_is_frozen_may_be_split(ranks, alone, plan, frozen):
    check(ranks, alone, plan, DENSE, frozen)


@pytest.mark.parametrize(
    ("plan", "frozen"),
    [
        ("dp=2,ep=2", "the experts"),
        ("dp=2,ep=2,shard=zero3", "the embedding"),
        ("cp=2,ep=2", "all but norms"),
        ("dp=2,tp=2,ep=2,shard=zero1", "the experts"),
        ("dp=4,ep=2,shard=zero2", "nothing"),
        ("dp=2,cp=2,ep=2,shard=none", "nothing"),
    ],
)
def test_frozen_experts_may_be_split(ranks, alone, plan, frozen):
    check(ranks, alone, plan, EXPERTS, frozen)


def cast(plan):
    parallel = parallelize(built(DENSE, "all but norms"), plan)
    state = parallel.full_state_dict()
    weight = parallel.module.blocks[0].attention.query.weight
    return weight.dtype, weight.shape, {name: value.dtype for name, value in state.items()}


def test_what_is_frozen_has_the_type_that_computes(ranks):
    dtype, shape, dtypes = ranks.run(cast, 2, "tp=2,precision=bf16")[0]
    assert (dtype, shape) == (torch.bfloat16, (16, 32))
    for name, each in dtypes.items():
        assert each == (torch.float32 if "norm" in name else torch.bfloat16)


def save_some(plan, shape, frozen, folder):
    parallel = parallelize(built(shape, frozen), plan)
    optimizer = torch.optim.AdamW(parallel.parameters())
    return save(folder, 1, pieces_to_save(parallel, optimizer), {}, ProcessGroupCoordinator())


def load_some(plan, shape, frozen, checkpoint):
    parallel = parallelize(built(shape, frozen, seed=4), plan)
    wanted = pieces_to_load(parallel)
    load(checkpoint, [*wanted.in_use, *wanted.fresh], ProcessGroupCoordinator())
    wanted.finish()
    parallel.changed()
    return parallel.full_state_dict()


@pytest.mark.parametrize(
    ("shape", "frozen", "saved", "loaded"),
    [
        (DENSE, "all but norms", "tp=2", "dp=2,shard=zero3"),
        (DENSE, "the embedding", "dp=2,tp=2,shard=zero1", "tp=4,tensor=plain"),
        (EXPERTS, "the experts", "dp=2,ep=2,tp=2", "dp=2,shard=zero2"),
        (EXPERTS, "the experts", "dp=2", "dp=4,ep=4"),
    ],
)
def test_checkpoints_hold_what_is_frozen_whole(ranks, tmp_path, shape, frozen, saved, loaded):
    checkpoint = ranks.run(save_some, Plan.parse(saved).ranks, saved, shape, frozen, tmp_path)[0]
    state = ranks.run(load_some, Plan.parse(loaded).ranks, loaded, shape, frozen, checkpoint)[0]
    alone = built(shape, frozen, seed=5)
    load(checkpoint, fixed_pieces(alone), SingleProcess())
    for name, value in built(shape, frozen).state_dict().items():
        assert torch.equal(state[name], value)
        if FROZEN[frozen](name):
            assert torch.equal(alone.state_dict()[name], value)


def export_tied(plan):
    model = built(DENSE | {"tie_embeddings": True}, "nothing")
    model.register_buffer("scale", torch.arange(3.0))
    return parallelize(model, plan).full_state_dict()


def test_a_whole_model_has_the_names_of_its_state_dict(ranks):
    expected = built(DENSE | {"tie_embeddings": True}, "nothing").state_dict()
    state, other = ranks.run(export_tied, 2, "tp=2,shard=zero3")
    assert other == {}
    assert torch.equal(state.pop("scale"), torch.arange(3.0))
    assert state.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(state[name], value)


def run_too_long(plan):
    parallel = parallelize(built(DENSE, "nothing"), plan)
    parallel(parallel.local_sequence(torch.zeros(1, SEQ, dtype=torch.long)))
    with pytest.raises(ModelError, match="longer than the model's context") as caught:
        parallel(parallel.local_sequence(torch.zeros(1, 2 * SEQ, dtype=torch.long)))
    dist.barrier()
    return str(caught.value)


def test_a_sequence_longer_than_the_context_over_all_its_parts_is_refused(ranks):
    for plan in ("cp=2", "cp=2,context=ulysses,tp=2"):
        message = ranks.run(run_too_long, Plan.parse(plan).ranks, plan)[0]
        assert "a sample of 32 tokens" in message
        assert "up to 16 tokens" in message
