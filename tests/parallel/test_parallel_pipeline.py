"""Models train in a pipeline, under every schedule and beside every other axis, as in one process."""

from contextlib import nullcontext

import pytest
import torch
from parallel_stand_ins import ListRecorder, assert_same_training, owned_parts
from torch import nn

from shoal.errors import ModelError, PlanError, TrainingError
from shoal.models import Transformer, TransformerConfig, next_token_loss
from shoal.parallel import parallelize
from shoal.spec.plan import Plan, SettledPlan
from shoal.spec.plan.schedules import NAMES

STEPS, BATCH, SEQ = 2, 8, 16
SHAPE = {
    "vocab_size": 61,
    "layers": 4,
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


def train(text, changes=None, microbatch=1):
    """Losses and gradient norms by step, what this rank owns at the end, and logits of a forward alone."""
    with torch.device("meta"):
        model = Transformer(TransformerConfig(**(SHAPE | (changes or {}))))
    parallel = parallelize(model, text, seed=3)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-2)
    results = []
    for step, batch in enumerate(batches()):
        mine = parallel.local(batch).split(microbatch)
        samples = parallel.local(torch.arange(BATCH) + step * BATCH).split(microbatch)
        pairs = (
            tuple(parallel.local_sequence(each) for each in (tokens[:, :-1], tokens[:, 1:]))
            for tokens in mine
        )

        def prepare(number, inputs, samples=samples):
            parallel.set_dropout(7, samples[number], inputs)

        total = parallel.forward_backward(pairs, len(mine), next_token_loss, prepare)
        norm = parallel.clip_gradients(0.5)
        optimizer.step()
        optimizer.zero_grad()
        parallel.axes.pp.all_reduce(total, "loss").wait()
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


def check(ranks, alone, plan, microbatch=1, **changes):
    results = ranks.run(train, Plan.parse(plan).ranks, plan, changes, microbatch)
    expected, owned = alone(**changes)
    assert_same_training(results, expected, owned)


@pytest.mark.parametrize("schedule", [*NAMES, "search", "search,virtual=2,activations=3"])
def test_every_schedule_trains_as_one_process(ranks, alone, schedule):
    check(ranks, alone, f"pp=2,schedule={schedule}", tie_embeddings=True)


@pytest.mark.parametrize(
    "settings",
    [
        "schedule=1f1b",
        "schedule=zb-h1",
        "schedule=search,split=0-2-2-0",
        "schedule=looped-bfs,virtual=1",
        "schedule=gpipe,split=1-1-2-0",
        "schedule=1f1b,split=0-3-1-0",
    ],
)
def test_four_stages_on_four_ranks(ranks, alone, settings):
    check(ranks, alone, f"pp=4,{settings}")


@pytest.mark.parametrize("schedule", ["interleaved", "zb-v", "dualpipe-v"])
def test_eight_stages_on_four_ranks(ranks, alone, schedule):
    check(ranks, alone, f"pp=4,schedule={schedule}", layers=8)


@pytest.mark.parametrize(
    ("shard", "schedule"),
    [
        ("none", "zb-v"),
        ("zero1", "interleaved"),
        ("zero2", "1f1b"),
        ("zero2", "zb-v"),
        ("zero3", "1f1b"),
        ("zero3", "interleaved"),
        *(("zero3-once", schedule) for schedule in NAMES),
    ],
)
def test_it_composes_with_every_sharding(ranks, alone, shard, schedule):
    check(ranks, alone, f"dp=2,pp=2,shard={shard},schedule={schedule}", tie_embeddings=False)


@pytest.mark.parametrize("shard", ["none", "zero1", "zero3", "zero3-once"])
def test_tied_embeddings_on_two_ranks_are_one(ranks, alone, shard):
    check(ranks, alone, f"dp=2,pp=2,shard={shard}", tie_embeddings=True)


@pytest.mark.parametrize(
    ("shard", "schedule"), [("zero2", "dualpipe-v"), ("zero3", "zb-v"), ("zero3-once", "zb-v")]
)
def test_tied_embeddings_of_two_stages_on_one_rank_are_one(ranks, alone, shard, schedule):
    check(ranks, alone, f"dp=2,pp=2,shard={shard},schedule={schedule}", tie_embeddings=True)


class GatherRecorder(ListRecorder):
    """Keeps collectives, and leaves gradients on in the spans of forwards."""

    def span(self, kind, name="", *, lane=None, bytes=0, group=(), purpose=""):
        return nullcontext()


def bytes_gathered(plan, tied):
    """Of each all-gather in a step."""
    model = Transformer(TransformerConfig(**(SHAPE | {"layers": 8}), tie_embeddings=tied))
    model.initialize(0)
    recorder = GatherRecorder()
    parallel = parallelize(model, plan, recorder=recorder)
    pairs = [(torch.zeros(1, SEQ, dtype=torch.long),) * 2] * 4
    parallel.evaluate(pairs[0][0])
    recorder.collectives.clear()
    parallel.forward_backward(iter(pairs), 4, next_token_loss)
    return [size for name, size, _ in recorder.collectives if name == "all_gather"]


def test_a_tied_embedding_is_gathered_for_its_own_stage_alone(ranks):
    tied, *_ = ranks.run(bytes_gathered, 4, "dp=2,pp=2,shard=zero3,schedule=zb-v", True)
    untied, *_ = ranks.run(bytes_gathered, 4, "dp=2,pp=2,shard=zero3,schedule=zb-v", False)
    rows = SHAPE["vocab_size"] + SHAPE["vocab_size"] % 2  # of both ranks' equal parts
    embedding = rows * SHAPE["hidden"] * 4
    assert tied.count(embedding) == 4  # the forwards of the first stage
    # The last stage's backward, which the embedding has a part in, gathers no block of the first stage.
    assert tied.count(max(tied)) == untied.count(max(untied))


@pytest.mark.parametrize(
    ("tensor", "schedule"), [("sequence", "zb-v"), ("async", "1f1b"), ("async", "zb-v"), ("plain", "zb-h1")]
)
def test_it_composes_with_tensor_parallelism(ranks, alone, tensor, schedule):
    check(ranks, alone, f"tp=2,pp=2,tensor={tensor},schedule={schedule}")


@pytest.mark.parametrize("degrees", ["tp=2,tensor=plain", "cp=2", "dp=2,replicate=2"])
def test_whole_sums_of_cut_weights_compose_with_what_divides_the_rest(ranks, alone, degrees):
    check(ranks, alone, f"{degrees},pp=2,shard=zero3-once,schedule=zb-h1")


@pytest.mark.parametrize(
    "plan",
    [
        "dp=2,pp=2,shard=zero3-once,order=dp-pp-cp-tp",
        "dp=2,pp=2,order=tp-cp-dp-pp,schedule=zb-v",
        "tp=2,pp=2,order=tp-pp-dp-cp",
        "dp=2,cp=2,pp=2,shard=zero1,order=dp-pp-cp-tp",
    ],
)
def test_stages_may_be_neighbours_in_the_node(ranks, alone, plan):
    check(ranks, alone, plan, tie_embeddings=True)


@pytest.mark.parametrize("context", ["ring", "ulysses"])
def test_it_composes_with_context_parallelism(ranks, alone, context):
    check(ranks, alone, f"cp=2,pp=2,context={context},schedule=zb-h1")


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
def test_it_composes_with_expert_parallelism(ranks, alone, schedule):
    changes = {"experts": 4, "experts_per_token": 2, "balance_weight": 0.02, "z_weight": 0.01}
    check(ranks, alone, f"dp=2,pp=2,ep=2,schedule={schedule}", **changes)


@pytest.mark.parametrize(("recompute", "schedule"), [("full", "1f1b"), ("selective", "zb-v")])
def test_it_composes_with_recompute_and_dropout(ranks, alone, recompute, schedule):
    check(ranks, alone, f"pp=2,schedule={schedule},recompute={recompute}", dropout=0.1)


WITHOUT_GRADIENTS = [
    "pp=2",
    "pp=2,schedule=zb-v",
    "tp=2,pp=2",
    "dp=2,pp=2,shard=zero3",
    "dp=2,pp=2,shard=zero3,schedule=zb-v",
]


def forward_alone(text):
    """Logits in a forward without gradients, of two shapes, before and after a step."""
    parallel = parallelize(small(), text)
    tokens = torch.arange(4 * SEQ).view(4, SEQ) % 61
    with torch.no_grad():
        before = parallel(tokens[:2])
    parallel.forward_backward(((part, part) for part in tokens.split(1)), 4, next_token_loss)
    torch.optim.SGD(parallel.parameters(), lr=0.1).step()
    parallel.zero_grad()
    with torch.no_grad():
        return before, parallel(tokens)


def small():
    model = Transformer(TransformerConfig(**SHAPE, tie_embeddings=True))
    model.initialize(0)
    return model


@pytest.mark.parametrize("plan", WITHOUT_GRADIENTS)
def test_a_forward_alone_gives_all_ranks_the_logits(ranks, plan):
    expected = forward_alone("dp=1")
    for logits in ranks.run(forward_alone, Plan.parse(plan).ranks, plan):
        for one, other in zip(logits, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def export(text):
    parallel = parallelize(small(), text)
    return parallel.full_state_dict()


@pytest.mark.parametrize("plan", WITHOUT_GRADIENTS)
def test_the_whole_model_comes_back(ranks, plan):
    whole, *others = ranks.run(export, Plan.parse(plan).ranks, plan)
    expected = small().state_dict()
    assert whole.keys() == expected.keys()
    assert all(torch.equal(whole[name], value) for name, value in expected.items())
    assert not any(others)


class Layer(nn.Module):
    """A block whose output is wider than its input."""

    def __init__(self, width, wider):
        super().__init__()
        self.linear = nn.Linear(width, wider)

    def forward(self, hidden):
        return torch.tanh(self.linear(hidden))


def sequential(text):
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer(width, width + 3) for width in range(4, 16, 3)))
    parallel = parallelize(model, text)
    inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
    targets = torch.ones(8, 16)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.5)
    norms = []
    for _ in range(3):
        pairs = zip(inputs.split(1), targets.split(1), strict=True)
        parallel.forward_backward(pairs, 8, nn.functional.mse_loss)
        norms.append(parallel.gradient_norm())
        optimizer.step()
        optimizer.zero_grad()
    return norms


@pytest.mark.parametrize("plan", ["pp=2", "pp=4", "pp=2,schedule=interleaved", "pp=2,schedule=zb-v"])
def test_stages_may_differ_in_what_they_hand_on(ranks, plan):
    expected = sequential("dp=1")
    for norms in ranks.run(sequential, Plan.parse(plan).ranks, plan):
        assert norms == pytest.approx(expected, rel=1e-5)


def misuse(text):
    parallel = parallelize(small(), text)
    try:
        parallel(torch.zeros(1, SEQ, dtype=torch.long))
    except TrainingError as error:
        return str(error)


def test_a_forward_with_gradients_is_refused(ranks):
    assert all("forward_backward" in text for text in ranks.run(misuse, 2, "pp=2"))


def refused(text, **changes):
    with torch.device("meta"):
        model = Transformer(TransformerConfig(**(SHAPE | changes)))
    parallelize(model, text)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ("pp=8", "4 blocks cannot be cut into 8 stages"),
        ("pp=2,split=1-1", "has 2 blocks, and the model has 4"),
    ],
)
def test_what_cannot_be_cut_is_refused(plan, message):
    with pytest.raises(PlanError, match=message):
        refused(plan, tie_embeddings=True)


def test_a_model_that_nobody_knows_is_refused():
    class Unknown(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(2, 2)

    with pytest.raises(ModelError, match="nothing says how Unknown is cut"):
        parallelize(Unknown(), "pp=2")


@pytest.mark.parametrize(
    ("plan", "batch", "message"),
    [
        ("pp=4,schedule=interleaved,microbatch=2", 12, "a multiple of 4"),
        ("pp=4,schedule=dualpipe-v,microbatch=2", 8, "8 micro-batches or more"),
        ("pp=2,schedule=zb-h1,virtual=2", 8, "exactly 1"),
        ("pp=2,schedule=fastest", 8, "schedule=fastest does not exist"),
        ("pp=2,microbatch=3", 8, "which microbatch=3 does not divide"),
    ],
)
def test_what_a_schedule_cannot_be_made_for_is_refused(plan, batch, message):
    with pytest.raises(PlanError) as caught:
        SettledPlan.of(Plan.parse(plan), batch)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("plan", "batch", "microbatch"),
    [
        ("pp=2", 32, 4),
        ("pp=4", 8, 1),
        ("pp=2,schedule=interleaved", 12, 1),
        ("dp=2,pp=2,schedule=zb-v", 64, 4),
    ],
)
def test_the_micro_batch_follows_from_the_stages(plan, batch, microbatch):
    assert SettledPlan.of(Plan.parse(plan), batch).microbatch == microbatch
