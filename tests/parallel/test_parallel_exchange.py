"""Compressed exchange and local updates: nothing is lost, and local updates of AdamW follow a reference.

Whole trainings against references: `test_parallel_golden.py`.
"""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from shoal.collectives.values import broadcast_value
from shoal.parallel import LocalUpdates, Outer, outer_settings, parallelize
from shoal.parallel.exchange.merge_schedule import Rounds
from shoal.spec.plan import Plan

WORKERS, STEPS, RATE = 4, 5, 0.1
SHAPE = (64, 100)  # two chunks, seven blocks


class Layers(nn.Module):
    """Three matrices and a bias, whose first one has most elements."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(24, 30), nn.Linear(30, 30, bias=False)])
        self.head = nn.Linear(30, 7, bias=False)

    def forward(self, x):
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(x)


def matrix():
    torch.manual_seed(0)
    return nn.Linear(SHAPE[1], SHAPE[0], bias=False)


def layers():
    torch.manual_seed(0)
    return Layers()


def sample(model, step, worker):
    """Inputs and targets of a worker in a step."""
    chance = torch.Generator().manual_seed(100 * step + worker)
    columns, rows = (SHAPE[1], SHAPE[0]) if isinstance(model, nn.Linear) else (24, 7)
    return torch.randn(6, columns, generator=chance), torch.randn(6, rows, generator=chance)


def loss_of(model, like, step, worker):
    inputs, targets = sample(like, step, worker)
    return F.mse_loss(model(inputs), targets)


def compressed_training(text, steps=STEPS):
    """Train a matrix by SGD; return its values, this rank's share of what was left out, and the bits' sum."""
    like = matrix()
    parallel = parallelize(like, text)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=RATE)
    for step in range(steps):
        loss_of(parallel, like, step, dist.get_rank()).backward()
        optimizer.step()
        optimizer.zero_grad()
    with parallel.gathered():
        return like.weight.detach().clone(), left_out(parallel)


def left_out(parallel):
    """The sum of what this rank left out of exchanges; rows of a sum that it owns, or of all that it sent."""
    (reduction,) = [strategy._reduction for strategy in parallel.strategies]
    (held,) = [each.exchange for each in reduction._sums]
    if held.scatter is not None:
        return held.scatter.memory.left.clone()
    return held.sum.give_up(len(held.sum.memories[0][1].left))


KINDS = ["int8", "int4", "fp8", "sign", "topk:64", "random:8", "powersgd:3"]
LAYOUTS = ["dp=4", "dp=4,shard=zero1", "dp=4,shard=zero3,replicate=2"]


@pytest.mark.parametrize(
    ("text", "layout"),
    [(text, layout) for text in KINDS for layout in LAYOUTS if (text, layout) != (KINDS[-1], LAYOUTS[1])],
)
def test_what_was_sent_and_what_was_left_out_is_all(ranks, text, layout):
    """One step: the change of the weights, and what was left out, add up to the mean gradient."""
    plan = Plan.parse(layout)
    results = ranks.run(compressed_training, WORKERS, f"{layout},compress={text}", 1)
    model = matrix()
    sum(loss_of(model, model, 0, worker) for worker in range(WORKERS)).backward()
    mean = model.weight.grad / WORKERS
    changed = (model.weight.detach() - results[0][0]) / RATE
    lefts = [left for _, left in results]
    if plan.replicas == 2:  # ranks 0 and 2 sum the first rows, 1 and 3 the others
        left = torch.cat([lefts[0] + lefts[2], lefts[1] + lefts[3]])
    else:
        left = sum(lefts)
    torch.testing.assert_close(changed + left.view(SHAPE), mean, rtol=0, atol=2e-6)  # rounding of fp32


def test_a_step_that_is_not_finite_leaves_the_memory_as_it_was(ranks):
    for text in ("int8", "topk:64", "powersgd:2", "random:4"):
        for is_nan, before, after in ranks.run(with_a_bad_step, 2, f"dp=2,compress={text}"):
            assert is_nan
            assert torch.equal(before, after)


def with_a_bad_step(text):
    like = matrix()
    parallel = parallelize(like, text)
    loss_of(parallel, like, 0, dist.get_rank()).backward()
    parallel.zero_grad()
    before = left_of_whole(parallel).clone()
    factor = float("nan") if dist.get_rank() == 1 else 1.0
    (loss_of(parallel, like, 1, dist.get_rank()) * factor).backward()
    norm = parallel.gradient_norm()
    if dist.get_rank() == 0:
        return norm != norm, before, before  # its own gradient was finite
    return norm != norm, before, left_of_whole(parallel)


def left_of_whole(parallel):
    (held,) = [each.exchange for each in parallel.strategies[0]._reduction._sums]
    return held.sum.memories[0][1].left


@pytest.mark.parametrize("layout", ["dp=2", "dp=2,shard=zero1", "dp=4,shard=zero3,replicate=2"])
@pytest.mark.parametrize("whole", [True, False])
def test_after_a_load_nothing_is_left_of_earlier_gradients(ranks, layout, whole):
    number, text = Plan.parse(layout).dp, f"{layout},compress=topk:64"
    fresh = ranks.run(loaded_after, number, text, 0, whole, ["first"])
    loaded = ranks.run(loaded_after, number, text, 3, whole, ["first"])
    never = ranks.run(loaded_after, number, text, 3, whole, [])
    back = ranks.run(loaded_after, number, text, 3, whole, ["first", "own"])  # as to evaluate an average
    for one, other in [*zip(loaded, fresh, strict=True), *zip(back, never, strict=True)]:
        assert torch.equal(one, other)
    assert not torch.equal(loaded[0], never[0])


def loaded_after(text, steps, whole, loads):
    """Values after some steps, loads of the first values or of the present ones, and another step."""
    like = matrix()
    states = {"first": {name: each.clone() for name, each in like.state_dict().items()}}
    parallel = parallelize(like, text)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=RATE)
    for step in [*range(steps), STEPS]:
        if step == STEPS:
            states["own"] = broadcast_value(parallel.full_state_dict())
            for load in loads:
                (parallel.load_full_state_dict if whole else parallel.load_state_dict)(states[load])
        loss_of(parallel, like, step, dist.get_rank()).backward()
        optimizer.step()
        optimizer.zero_grad()
    with parallel.gathered():
        return like.weight.detach().clone()


def test_the_first_steps_are_dense(ranks):
    whole = ranks.run(compressed_values, 2, "dp=2", 3)
    dense = ranks.run(compressed_values, 2, "dp=2,compress=topk:64,dense=3", 3)
    assert torch.equal(whole[0], dense[0])
    assert not torch.equal(ranks.run(compressed_values, 2, "dp=2,compress=topk:64,dense=2", 3)[0], dense[0])


def compressed_values(text, steps):
    like = matrix()
    parallel = parallelize(like, text)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=RATE)
    for step in range(steps):
        loss_of(parallel, like, step, dist.get_rank()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return like.weight.detach().clone()


# -- local updates -----------------------------------------------------------------------------------

WARMUP = 2  # rounds in which the outer momentum grows


def local_training(text, steps, rate, momentum):
    like = layers()
    parallel = parallelize(like, text)
    outer = Outer(rate, momentum, WARMUP)
    optimizer = LocalUpdates(parallel, torch.optim.AdamW(parallel.parameters(), lr=1e-2), outer=outer)
    worker = parallel.axes.workers.index
    for step in range(steps):
        loss_of(parallel, like, step, worker).backward()
        if optimizer.is_dense:
            optimizer.average_gradients()
        optimizer.step()
        optimizer.zero_grad()
    with parallel.gathered():
        return worker, [each.detach().clone() for each in like.parameters()]


def local_reference(exchange, workers, steps, rate, momentum, fragment_of):
    """DiLoCo with fragments and delay: the values of every worker after the last step."""
    models = [layers() for _ in range(workers)]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in models]
    anchors = [each.detach().clone() for each in models[0].parameters()]
    momenta = [torch.zeros_like(each) for each in anchors]
    begun = {}  # by the step that ends it: number of the fragment, what each worker changed
    for step in range(1, steps + 1):
        for worker, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            model.zero_grad()
            loss_of(model, model, step - 1, worker).backward()
            optimizer.step()
        made = (step - 1) % exchange.every + 1
        for number in range(exchange.fragments):
            if made == (number + 1) * exchange.every // exchange.fragments:
                changed = [
                    [anchor - each.detach() for anchor, each in zip(anchors, model.parameters(), strict=True)]
                    for model in models
                ]
                begun[step + exchange.delay] = number, changed
        if step in begun:
            number, changed = begun.pop(step)
            for index, anchor in enumerate(anchors):
                if fragment_of[index] != number:
                    continue
                outer = sum(each[index] for each in changed) / workers
                grown = momentum * min(1.0, step / (WARMUP * exchange.every))
                momenta[index].mul_(grown).add_(outer)
                new = anchor - rate * (outer + grown * momenta[index])
                for model, own in zip(models, changed, strict=True):
                    sent = anchor - own[index]
                    list(model.parameters())[index].data.add_(new - sent)
                anchors[index] = new
    return [[each.detach() for each in model.parameters()] for model in models]


@pytest.mark.parametrize(
    ("text", "workers", "rate", "momentum"),
    [
        ("dp=4,exchange=local,every=3", 4, 0.7, 0.9),
        ("dp=4,exchange=local,every=2", 4, 1.0, 0.0),
        ("dp=4,exchange=local,every=4,fragments=2,delay=1", 4, 0.7, 0.9),
        ("dp=4,shard=zero1,replicate=2,exchange=local,every=3", 2, 0.7, 0.9),
        ("dp=4,shard=zero3,replicate=2,exchange=local,every=3", 2, 0.7, 0.9),
    ],
)
def test_local_updates_follow_the_reference(ranks, text, workers, rate, momentum):
    """The ranks of a worker see equal samples here, so that a worker of two ranks trains as one rank."""
    exchange = Plan.parse(text).exchanged
    fragment_of = [0] * 4 if exchange.fragments == 1 else [1, 1, 0, 0]
    results = ranks.run(local_training, 4, text, 7, rate, momentum)
    expected = local_reference(exchange, workers, 7, rate, momentum, fragment_of)
    for worker, values in results:
        for one, other in zip(values, expected[worker], strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=2e-6)


def test_dense_steps_are_steps_of_data_parallelism(ranks):
    local = ranks.run(local_training, 2, "dp=2,exchange=local,every=3,dense=4", 4, 0.7, 0.9)
    plain = ranks.run(plain_training, 2, "dp=2", 4)
    for one, other in zip(local[0][1], plain[0], strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6)


def plain_training(text, steps):
    like = layers()
    parallel = parallelize(like, text)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-2)
    for step in range(steps):
        loss_of(parallel, like, step, dist.get_rank()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [each.detach().clone() for each in like.parameters()]


def test_rounds_merge_every_fragment_once_and_grow_as_the_rate_falls():
    rounds = Rounds(Plan.parse("dp=2,exchange=local,every=6,fragments=4,stretch=3,dense=2").exchanged)
    merged = []
    for _ in range(2 + 6):
        merged.append(rounds.advance())
    assert [each for each in merged if each is not None] == [0, 1, 2, 3]
    assert merged[:2] == [None, None]
    assert rounds.is_at_end
    for rate in (1.0, 0.6):
        rounds.note(rate)
    rounds.begin()  # 1 / 0.6^2 is 2.8
    assert sum(rounds.advance() is not None for _ in range(16)) == 4
    assert rounds.is_at_end
    rounds.note(0.1)
    rounds.begin()  # at most three times as long
    resumed = Rounds(Plan.parse("dp=2,exchange=local,every=6,fragments=4,stretch=3,dense=2").exchanged)
    resumed.set_step(rounds.step, rounds.rates)
    for each in (rounds, resumed):
        for _ in range(17):
            each.advance()
            assert not each.is_at_end
        each.advance()
        assert each.is_at_end


@pytest.mark.parametrize(
    ("compress", "usual"),
    [("", (0.7, 0.9)), ("int8", (0.7, 0.9)), ("topk:8:2bit", (1.0, 0.5)), ("powersgd:2", (1.0, 0.5))],
)
def test_outer_settings_are_those_that_are_given_or_work_with_the_compression(compress, usual):
    exchange = Plan.parse(f"dp=2,exchange=local{compress and ',compress='}{compress}").exchanged
    assert outer_settings(exchange) == (*usual, 20)
    assert outer_settings(exchange, 0.3) == (0.3, usual[1], 20)
    assert outer_settings(exchange, momentum=0.0, warmup=5) == (usual[0], 0.0, 5)


def test_the_outer_momentum_grows_with_the_steps():
    outer = Outer(0.7, 0.9, 5)
    assert [outer.momentum_after(steps, 20) for steps in (0, 50, 100, 900)] == [0.0, 0.45, 0.9, 0.9]
    assert outer._replace(warmup=0).momentum_after(0, 20) == 0.9
