"""Stages that are cut by cost fit the memory of their ranks, by formulas that real models obey."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from shoal.errors import PlanError
from shoal.models import Transformer, TransformerConfig, next_token_loss, preset
from shoal.parallel import Batch, apply, device, local_part, parallelize
from shoal.parallel.pipeline.pieces import Room, computed_costs, cut_pieces, with_memory
from shoal.parallel.pipeline.stage_layout import stages_of
from shoal.predict.cost.time import workload_on
from shoal.predict.simulate import simulate
from shoal.spec.cluster import Cluster
from shoal.spec.plan import Plan
from shoal.spec.workload import shape

SEQ, MICROBATCH = 32, 2
SHAPE = TransformerConfig(vocab_size=96, layers=6, hidden=32, heads=4, kv_heads=4, ffn=64, seq=SEQ)
KIB = 1 << 10


def meta(**changes):
    with torch.device("meta"):
        return Transformer(SHAPE.model_copy(update=changes))


def costs_of(model, plan, batch=None):
    layout = stages_of(model)
    return with_memory(computed_costs(model, layout), model, layout, plan, batch)


# What pieces hold


def kept_by(model):
    """Bytes of all storages that a forward keeps for its backward, without the weights'."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage
        return tensor

    tokens = torch.randint(96, (MICROBATCH, SEQ + 1), generator=torch.Generator().manual_seed(0))
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    ours = weights | {inputs.untyped_storage().data_ptr(), targets.untyped_storage().data_ptr()}
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = next_token_loss(model(inputs), targets)
    assert loss.requires_grad
    return sum(storage.nbytes() for pointer, storage in kept.items() if pointer not in ours)


def test_activations_are_what_autograd_keeps():
    """To a hundredth: the counts of tokens and the loss itself are left out of the formula.

    So are the rotary angles, which every stage makes for all its blocks.
    """

    def kept(layers):
        model = Transformer(SHAPE.model_copy(update={"layers": layers}))
        model.initialize(0)
        return kept_by(model)

    one, two = kept(1), kept(2)
    costs = costs_of(meta(), Plan(pp=2, microbatch=MICROBATCH), Batch(8, SEQ))
    angles = 2 * 4 * SEQ * SHAPE.head_dim
    block, end = two - one, 2 * one - two - angles
    assert [cost.activations for cost in costs] == pytest.approx([0.0, *[block] * 6, end], rel=0.01)


def states_held(text):
    """Bytes of weights, gradients and Adam's state of this rank after a step."""
    parallel = parallelize(meta(experts=2 if "ep" in text else 0), text)
    optimizer = torch.optim.AdamW(parallel.parameters())
    tokens = torch.randint(96, (8, SEQ + 1), generator=torch.Generator().manual_seed(0))
    mine = parallel.local(tokens).split(1)
    pairs = ((each[:, :-1], each[:, 1:]) for each in mine)
    parallel.forward_backward(pairs, len(mine), next_token_loss)
    optimizer.step()
    kept = [each for state in optimizer.state.values() for each in state.values() if each.ndim]
    states = [local_part(each) for each in kept]
    weights = [each for each in parallel.module.parameters() if not each.is_meta]
    gradients = {"none": weights, "zero1": weights}.get(
        parallel.plan.shard, [owned.local for owned in parallel.owned]
    )
    return sum(each.nbytes for each in (*states, *weights, *gradients))


@pytest.mark.parametrize(
    "text",
    [
        "pp=2",
        "pp=2,tp=2",
        "pp=2,dp=2,shard=zero1",
        "pp=2,dp=2,shard=zero2",
        "pp=2,dp=2,ep=2",
        "pp=2,schedule=zb-v",
    ],
)
def test_states_are_what_the_ranks_have(ranks, text):
    """To a hundredth: buckets are padded."""
    plan = Plan.parse(text)
    model = meta(experts=2 if "ep" in text else 0)
    layout = stages_of(model)
    cuts = {}
    if plan.tp > 1:
        cuts = apply.cut_tensors(model, apply.layout_of(model), plan, 0).cuts
    costs = with_memory(computed_costs(model, layout), model, layout, plan, None, cuts)
    pieces = cut_pieces(model, plan)
    expected = dict.fromkeys(range(2), 0.0)
    for holder, owned in zip(pieces.placement, pieces.ranges, strict=True):
        expected[holder] += sum(costs[piece].memory for piece in owned)
    found = ranks.run(states_held, plan.ranks, text)
    for rank, held in enumerate(found):
        assert held == pytest.approx(expected[rank * 2 // plan.ranks], rel=0.01)


def test_a_tied_embedding_counts_on_each_rank_that_has_it():
    tied = meta(tie_embeddings=True)
    table = 16 * 96 * 32
    apart, together = (costs_of(tied, Plan(pp=2, schedule=name)) for name in ("1f1b", "zb-v"))
    assert [cost.memory for cost in together[:-1]] == [cost.memory for cost in apart[:-1]]
    assert apart[-1].memory - together[-1].memory == table == apart[0].memory


# How they are cut


def held_by_ranks(model, plan, batch):
    pieces, costs = cut_pieces(model, plan), costs_of(model, plan, batch)
    held = plan.schedule_for(batch.micro_batches(plan)).held_by_stage
    return [
        sum(costs[piece].memory + held[stage] * costs[piece].activations for piece in pieces.ranges[stage])
        for stage in range(plan.stages)
    ]


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "search"])
def test_a_split_keeps_within_the_room_where_the_fastest_one_does_not(schedule):
    plan, batch = Plan(pp=3, schedule=schedule), Batch(24, SEQ)
    model = meta(layers=12, vocab_size=1000)  # the embedding takes memory and no time
    before = held_by_ranks(model, plan, batch)
    limit = 0.97 * max(before)
    pieces = cut_pieces(model, plan, room=Room(limit, batch, {}))
    split = "-".join(str(len(pieces.blocks_of(stage))) for stage in range(3))
    after = held_by_ranks(model, plan.replace(split=split), batch)
    assert max(after) <= limit < max(before)


def test_a_batch_that_holds_more_needs_more_room():
    """With GPipe every micro-batch is held, with 1F1B as many as there are ranks."""
    model = meta()
    room = {}
    for schedule in ("gpipe", "1f1b"):
        for samples in (8, 64):
            plan = Plan(pp=2, schedule=schedule, microbatch=1)
            with pytest.raises(PlanError, match="keeps every rank within") as caught:
                cut_pieces(model, plan, room=Room(0, Batch(samples, SEQ), {}))
            room[schedule, samples] = caught.value.possible
    assert room["gpipe", 8] != room["gpipe", 64]
    assert room["1f1b", 8] == room["1f1b", 64]


def split_within(limit):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(apply, "memory_of_a_rank", lambda model, device: limit)
        try:
            parallel = parallelize(meta(), "pp=2", batch=Batch(8, SEQ))
        except PlanError as error:
            return error.given
    return [name for name, _ in parallel.named_parameters() if name.endswith("norm.weight")]


def test_ranks_are_laid_out_within_what_they_have_or_all_refuse(ranks):
    free, tight, short = (ranks.run(split_within, 2, limit) for limit in (float("inf"), 700 * KIB, 8 * KIB))
    assert free != tight
    assert short == ["no split over 2 stages was found that keeps every rank within 8KiB"] * 2


def laid_out(text, batch):
    with torch.device("meta"):
        model = Transformer(preset("tiny"))
    return parallelize(model, text, batch=batch).plan.split


@pytest.mark.parametrize("text", ["pp=2", "dp=2,pp=2", "pp=2,schedule=zb-v"])
def test_ranks_are_laid_out_as_simulated_on_cores_where_nothing_names_the_machines(ranks, text):
    plan, tiny = Plan.parse(text), shape("tiny")
    cluster = Cluster.preset("laptop").with_devices(plan.ranks)
    expected = simulate(workload_on(cluster, tiny), cluster, plan, 16).plan.split
    assert ranks.run(laid_out, plan.ranks, text, Batch(16, tiny.seq)) == [expected] * plan.ranks


# What there is


def test_a_host_s_memory_is_shared_by_its_ranks_and_the_model_s_own_comes_to_it(monkeypatch, tmp_path):
    (tmp_path / "meminfo").write_text("MemTotal: 99 kB\nMemAvailable:  4096 kB\n")
    monkeypatch.setattr(device, "_FACTS", tmp_path / "meminfo")
    monkeypatch.setattr(device, "_CONTROL_GROUP", tmp_path)
    cpu = torch.device("cpu")
    assert device.memory_of_a_rank(nn.Linear(4, 4, device="meta"), cpu) == 4096 * KIB
    assert device.memory_of_a_rank(nn.Linear(4, 4), cpu) == 4096 * KIB + 4 * (16 + 4)
    for name, value in (("max", 1000 * KIB), ("current", 600 * KIB), ("stat", f"inactive_file {50 * KIB}")):
        (tmp_path / f"memory.{name}").write_text(f"{value}\n")
    assert device.memory_of_a_rank(nn.Linear(4, 4, device="meta"), cpu) == 450 * KIB
    (tmp_path / "memory.max").write_text("max\n")
    assert device.memory_of_a_rank(nn.Linear(4, 4, device="meta"), cpu) == 4096 * KIB
    (tmp_path / "meminfo").unlink()
    assert device.memory_of_a_rank(nn.Linear(4, 4), cpu) is None


def test_of_a_gpu_a_margin_is_left(monkeypatch):
    gpu = SimpleNamespace(uuid="GPU-1", total_memory=80 << 30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    limit = device.memory_of_a_rank(nn.Linear(4, 4, device="meta"), torch.device("cuda"))
    assert limit == pytest.approx(72 << 30)


def memory_on_one_gpu():
    with pytest.MonkeyPatch.context() as patch:
        gpu = SimpleNamespace(uuid="GPU-1", total_memory=80 << 30)
        patch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
        return device.memory_of_a_rank(nn.Linear(4, 4, device="meta"), torch.device("cuda"))


def test_ranks_that_share_a_gpu_leave_room_for_each_other_s_contexts(ranks):
    limits = ranks.run(memory_on_one_gpu, 2)
    assert limits == [pytest.approx((72 - 0.5) * 2**30 / 2)] * 2


def memory_with(free):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device, "available_memory", lambda: free * (1 + torch.distributed.get_rank()))
        return device.memory_of_a_rank(nn.Linear(4, 4, device="meta"), torch.device("cpu"))


def test_ranks_agree_on_the_least(ranks):
    assert ranks.run(memory_with, 2, 1000) == [500.0, 500.0]
