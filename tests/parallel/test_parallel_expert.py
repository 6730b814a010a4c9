"""Experts laid over ranks give what one device does: outputs, gradients of inputs, router and experts."""

import pytest
import torch
import torch.distributed as dist
from operator_stand_ins import Waits
from torch import nn
from torch.utils.checkpoint import checkpoint

from shoal.errors import ModelError, PlanError
from shoal.models import Mixture, Transformer, TransformerConfig, auxiliary_loss, next_token_loss
from shoal.parallel import parallelize
from shoal.parallel.communication import Axis
from shoal.parallel.expert.expert import cut_experts, expert_parallel
from shoal.record import NullRecorder
from shoal.spec.plan import Plan

SHAPE = {
    "vocab_size": 61,
    "layers": 2,
    "hidden": 16,
    "heads": 2,
    "kv_heads": 1,
    "ffn": 24,
    "seq": 24,
    "experts": 8,
    "experts_per_token": 2,
    "balance_weight": 1.0,
    "z_weight": 0.01,
}
BATCH, SEQ = 4, 24
STACKED = ("gate", "up", "down")


def config(**changes):
    return TransformerConfig(**(SHAPE | changes))


def mixture(dtype=torch.float32, **changes):
    layer = Mixture(config(**changes))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(0, 0.4, generator=generator)
    return layer.to(dtype)


def states(seed, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(BATCH, SEQ, SHAPE["hidden"], generator=generator).to(dtype)


def axis_of(*groups):
    """The axis of which each of `groups` holds the ranks that differ along it alone."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    made = {
        members: dist.new_group(list(members)) if dist.is_initialized() else None
        for members in groups
        if len(members) > 1
    }
    members = next(members for members in groups if rank in members)
    return Axis("ep", members, rank, made.get(members), NullRecorder())


def world_axis():
    return axis_of(tuple(range(dist.get_world_size() if dist.is_initialized() else 1)))


def cut(model, axis):
    for name, part in cut_experts(model, axis).items():
        layer, _, kind = name.rpartition(".")
        own = part.of(model.get_parameter(name).detach()).clone()
        setattr(model.get_submodule(layer), kind, nn.Parameter(own))


def averaged_gradients(model, axis):
    """Averages over the ranks: made here if a parameter is replicated, and there already if it is not."""
    gradients = {}
    for name, parameter in model.named_parameters():
        gradient = parameter.grad.float()
        if name.rpartition(".")[-1] not in STACKED:
            axis.all_reduce(gradient, name).wait()
            gradient /= axis.size
        gradients[name] = gradient
    return gradients


def run_layer(changes, dtype=torch.float32, recompute=False):
    """This rank's rows of a batch through a mixture whose experts lie over all ranks."""
    axis = world_axis()
    layer = mixture(dtype, **changes)
    cut(layer, axis)
    expert_parallel(layer, axis)
    hidden = states(1, dtype).chunk(axis.size)[axis.index].clone().requires_grad_()
    output = checkpoint(layer, hidden, use_reentrant=False) if recompute else layer(hidden)
    (output * states(2).chunk(axis.size)[axis.index]).mean().backward()
    auxiliary = auxiliary_loss(layer)
    axis.all_reduce(auxiliary, "auxiliary loss").wait()
    results = {"output": output.detach().float(), "input": hidden.grad.float() / axis.size}
    return results, averaged_gradients(layer, axis), auxiliary / axis.size


def compare(ranks, one, tolerance):
    reference, gradients, auxiliary = one
    parts = [result for result, _, _ in ranks]
    for name, whole in reference.items():
        together = torch.cat([part[name] for part in parts])
        torch.testing.assert_close(together, whole, rtol=tolerance, atol=tolerance * whole.abs().max().item())
    for name, whole in gradients.items():
        each = [result[1][name] for result in ranks]
        is_cut = name.rpartition(".")[-1] in STACKED
        for together in [torch.cat(each)] if is_cut else each:
            torch.testing.assert_close(
                together, whole, rtol=tolerance, atol=tolerance * whole.abs().max().item()
            )
    for _, _, value in ranks:
        torch.testing.assert_close(value, auxiliary, rtol=tolerance, atol=0)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"experts_per_token": 1},
        {"experts_per_token": 3, "renormalize": True, "capacity": 0.7},
        {"capacity": 4.0},
    ],
    ids=str,
)
def test_experts_on_ranks_equal_experts_on_one_device(ranks, size, changes):
    # The same sums in another order: some roundings of 6e-8.
    compare(ranks.run(run_layer, size, changes), run_layer(changes), 1e-5)


def test_recomputed_experts_exchange_again(ranks):
    compare(ranks.run(run_layer, 2, {}, torch.float32, True), run_layer({}), 1e-5)


def test_experts_on_ranks_work_in_bf16(ranks):
    one = run_layer({}, torch.bfloat16)
    # Gradients of experts are sums of rows in bf16 products of other lengths: a rounding of 0.4 %.
    compare(ranks.run(run_layer, 2, {}, torch.bfloat16), one, 0.01)


def run_lopsided():
    """All tokens go to expert 0, so that all ranks but the first get no rows at all."""
    axis = world_axis()
    layer = mixture(experts_per_token=1)
    with torch.no_grad():
        layer.router.weight.zero_()
        layer.router.weight[0] = 1.0
    cut(layer, axis)
    expert_parallel(layer, axis)
    hidden = states(1).abs().chunk(axis.size)[axis.index].requires_grad_()
    output = layer(hidden)
    output.square().mean().backward()
    results = {"output": output.detach(), "input": hidden.grad / axis.size}
    return results, averaged_gradients(layer, axis), torch.ones(())


def test_a_rank_whose_experts_get_no_rows_takes_part(ranks):
    compare(ranks.run(run_lopsided, 4), run_lopsided(), 1e-5)


def zigzag(size, index):
    """Of 2 * size chunks of a sample, the i-th and the i-th from the end."""
    chunks = torch.arange(SEQ).chunk(2 * size)
    return torch.cat((chunks[index], chunks[2 * size - 1 - index]))


def run_sequence_parts(order, changes, expert_size, sequence_size):
    """Whole samples over dp, parts of them over cp; experts over as many neighbours as `expert_size` says."""
    world = world_axis()
    sequence = axis_of(*_rows(world.size, sequence_size))
    experts = axis_of(*_rows(world.size, expert_size))
    replicas = axis_of(*_columns(world.size, expert_size))
    place = zigzag(sequence_size, sequence.index) if order == "zigzag" else None
    layer = mixture(**changes)
    cut(layer, experts)
    expert_parallel(layer, experts, sequence, None if place is None else lambda seq, device: place.to(device))
    if place is None:
        place = torch.arange(SEQ).chunk(sequence_size)[sequence.index]
    rows = torch.arange(BATCH).chunk(world.size // sequence_size)[world.index // sequence_size]
    hidden = states(1)[rows][:, place].requires_grad_()
    output = layer(hidden)
    (output * states(2)[rows][:, place]).mean().backward()
    for name in STACKED:
        replicas.all_reduce(getattr(layer, name).grad, name).wait()
        getattr(layer, name).grad /= replicas.size
    auxiliary = auxiliary_loss(layer)
    world.all_reduce(auxiliary, "auxiliary loss").wait()
    gradients = averaged_gradients(layer, world)
    return rows, place, output.detach(), hidden.grad / world.size, gradients, auxiliary / world.size


def _rows(ranks, size):
    return [tuple(row) for row in torch.arange(ranks).view(-1, size).tolist()]


def _columns(ranks, size):
    return [tuple(row) for row in torch.arange(ranks).view(-1, size).T.tolist()]


@pytest.mark.parametrize(
    ("order", "experts", "sequence"),
    [("in order", 2, 2), ("zigzag", 4, 4), ("zigzag", 2, 4), ("zigzag", 4, 2), ("zigzag", 1, 4)],
)
def test_parts_of_samples_are_counted_and_limited_as_whole_samples(ranks, order, experts, sequence):
    changes = {"capacity": 0.7}
    results = ranks.run(run_sequence_parts, max(experts, sequence), order, changes, experts, sequence)
    output, gradient = torch.full((2, BATCH, SEQ, SHAPE["hidden"]), torch.nan)
    for rows, place, own_output, own_gradient, _, _ in results:
        output[rows[:, None], place] = own_output
        gradient[rows[:, None], place] = own_gradient
    whole, nothing = {"output": output, "input": gradient}, {"output": output[:0], "input": gradient[:0]}
    # The first ranks, as many as keep all experts.
    parts = [(nothing if rank else whole, *results[rank][4:]) for rank in range(experts)]
    compare(parts, run_layer(changes), 1e-5)


def run_transformer():
    axis = world_axis()
    model = Transformer(config(capacity=1.0))
    model.initialize(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(5)
    cut(model, axis)
    expert_parallel(model, axis)
    tokens = torch.randint(61, (BATCH, SEQ + 1), generator=torch.Generator().manual_seed(0))
    mine = tokens.chunk(axis.size)[axis.index]
    loss = next_token_loss(model(mine[:, :-1]), mine[:, 1:])
    loss.backward()
    auxiliary = auxiliary_loss(model)
    axis.all_reduce(auxiliary, "auxiliary loss").wait()
    total = loss.detach().clone()
    axis.all_reduce(total, "loss").wait()
    return {}, averaged_gradients(model, axis) | {"loss": total / axis.size}, auxiliary / axis.size


@pytest.mark.parametrize("size", [2, 4])
def test_a_transformer_of_experts_has_the_gradients_of_one_device(ranks, size):
    # The same sums in another order through two blocks: some tens of roundings of 6e-8.
    compare(ranks.run(run_transformer, size), run_transformer(), 1e-4)


class StandIn:
    """What of an axis is looked at before anything is communicated."""

    size, index = 3, 0


def waits_of_a_forward(capacity):
    parallel = parallelize(Transformer(config(capacity=capacity)), "dp=2,ep=2")
    with Waits() as waits:
        parallel(torch.ones(1, SEQ, dtype=torch.int64))
    return waits.names


def penalised(plan="dp=1"):
    """Gradients of a loss with a penalty on all weights of the model itself; by name, whole."""
    torch.manual_seed(0)
    model = Transformer(config(layers=1, experts=6, kv_heads=2))
    parallel = parallelize(model, plan)
    tokens = torch.randint(61, (12, SEQ + 1), generator=torch.Generator().manual_seed(1))
    inputs, targets = parallel.local((tokens[:, :-1], tokens[:, 1:]))
    loss = next_token_loss(parallel(inputs), targets)
    (loss + 0.1 * sum(weight.square().sum() for weight in model.parameters())).backward()
    with torch.no_grad():
        for parameter in parallel.parameters():
            parameter.copy_(parameter.grad)
    return parallel.full_state_dict()


@pytest.mark.parametrize(
    "plan", ["dp=2,ep=2", "dp=4,ep=2", "dp=3,ep=3,shard=zero1", "dp=2,ep=2,tp=2,tensor=plain"]
)
def test_a_penalty_on_experts_has_the_factor_that_it_was_given(ranks, plan):
    found = ranks.run(penalised, Plan.parse(plan).ranks, plan)[0]
    for name, value in penalised().items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)  # sums in another order


@pytest.mark.parametrize("capacity", [None, 1.0])
def test_a_layer_waits_for_its_device_once_to_exchange_with_other_ranks(ranks, capacity):
    assert ranks.run(waits_of_a_forward, 2, capacity) == [["tolist"] * SHAPE["layers"]] * 2


def test_an_axis_that_does_not_divide_the_experts_is_refused():
    with pytest.raises(PlanError, match="8 experts do not divide over ep=3 ranks") as refusal:
        expert_parallel(mixture(), StandIn())
    assert refusal.value.possible == "ep of 1, 2, 4, 8"


def test_a_dense_model_is_refused():
    with pytest.raises(ModelError, match="Transformer has no experts"):
        expert_parallel(Transformer(config(experts=0)), StandIn())
