"""Local updates with copies, idle parameters and weights from elsewhere: workers stay one training."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shoal
from shoal.errors import WorkerError
from shoal.models import Transformer, TransformerConfig, next_token_loss
from shoal.parallel import LocalUpdates, Outer, Replicas, parallelize

SHAPE = TransformerConfig(
    vocab_size=30, layers=2, hidden=16, heads=4, kv_heads=2, ffn=24, seq=8, tie_embeddings=True
)
KINDS = ["none", "int8", "topk:8", "sign", "random:4", "powersgd:1"]


class Scaled(nn.Module):
    """A matrix and a vector whose rows do not divide, and a factor without dims."""

    def __init__(self):
        super().__init__()
        chance = torch.Generator().manual_seed(0)
        self.weight = nn.Parameter(torch.randn(7, 5, generator=chance))
        self.bias = nn.Parameter(torch.randn(7, generator=chance))
        self.factor = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return (x @ self.weight.t() + self.bias) * self.factor


def changed(parallel, worker, step, *, is_transformer):
    """One backward of a worker's own samples."""
    chance = torch.Generator().manual_seed(10 * step + parallel.axes.dp.index)
    if not is_transformer:
        parallel(torch.randn(4, 5, generator=chance)).square().mean().backward()
        return
    tokens = torch.randint(30, (2, 9), generator=chance)
    parallel.forward_backward(iter([(tokens[:, :-1], tokens[:, 1:])]), 1, next_token_loss)


def departures(layout, kinds):
    """For each kind of compression, whether copies within a worker, and workers, have unlike bits."""
    found = []
    for kind in kinds:
        is_transformer = "zero" not in layout
        model = Transformer(SHAPE) if is_transformer else Scaled()
        if is_transformer:
            model.initialize(0)
        parallel = parallelize(model, f"{layout},exchange=local,every=4,fragments=2,delay=1,compress={kind}")
        optimizer = LocalUpdates(parallel, torch.optim.AdamW(parallel.parameters(), lr=0.02))
        replicas, unlike = Replicas(parallel, 1), []
        for step in range(7):
            changed(parallel, parallel.axes.workers.index, step, is_transformer=is_transformer)
            optimizer.step()
            optimizer.zero_grad()
            unlike.append(replicas.departure(computing=False))
        optimizer.settle()
        unlike.append(replicas.departure(computing=False))
        for each in parallel.owned:
            for tensor in (each.local, *map(local, optimizer.state[each.parameter].values())):
                theirs = torch.empty((parallel.axes.workers.size, *tensor.shape))
                theirs[parallel.axes.workers.index] = tensor
                parallel.axes.workers.all_gather(theirs.view(-1), "test").wait()
                if not (theirs == tensor).all():
                    unlike.append(each.name)
        found.append([str(each) for each in unlike if each is not None])
    return found


def local(state):
    return getattr(state, "_local_tensor", state)


@pytest.mark.parametrize(
    ("layout", "size"),
    [
        ("dp=2,tp=2", 4),
        ("dp=2,tp=2,tensor=plain", 4),
        ("dp=2,pp=2", 4),
        ("dp=4,shard=zero1,replicate=2", 4),
        ("dp=4,shard=zero3,replicate=2", 4),
        ("dp=3,tp=2,tensor=plain", 6),  # three summands: their order depends on the place in a vector
    ],
)
def test_copies_of_a_parameter_and_workers_have_equal_bits_with_every_codec(ranks, layout, size):
    """Copies after each step; workers, with all that their optimizers keep, once they have merged."""
    kinds = KINDS if size == 4 else KINDS[:2]
    for found in ranks.run(departures, size, layout, kinds):
        assert found == [[] for _ in kinds]


# -- parameters that not all workers use -------------------------------------------------------------


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        chance = torch.Generator().manual_seed(0)
        self.experts = nn.ParameterList(torch.randn(3, 4, generator=chance) for _ in range(4))

    def forward(self, used, factor):
        return sum((self.experts[number] * factor).square().sum() for number in used)


def idle(layout, is_dense):
    """This worker's gradients or moments, and merged ones: worker i uses experts i and 2, nobody the last."""
    model = Experts()
    parallel = parallelize(model, f"{layout},exchange=local,every=2,dense={int(is_dense)}")
    worker = parallel.axes.workers.index
    inner = torch.optim.AdamW(parallel.parameters(), lr=0.1, weight_decay=0.0)
    optimizer = LocalUpdates(parallel, inner)

    def held():
        values = {}
        for each in parallel.owned:
            moment = inner.state.get(each.parameter, {})
            value = each.gradient if is_dense else moment.get("exp_avg")
            steps = None if is_dense or not moment else float(moment["step"])
            values[each.name] = None if value is None else (local(value).clone(), steps)
        return values

    if is_dense:
        parallel([worker, 2], worker + 1.0).backward()
        own = held()
        optimizer.average_gradients()
        return own, held()
    for _ in range(2):
        parallel([worker, 2], worker + 1.0).backward()
        optimizer.step()
        optimizer.zero_grad()
    own = held()
    optimizer.settle()
    return own, held()


@pytest.mark.parametrize("is_dense", [True, False])
@pytest.mark.parametrize("layout", ["dp=2", "dp=4,shard=zero1,replicate=2", "dp=4,shard=zero3,replicate=2"])
def test_a_parameter_that_some_workers_use_is_averaged_with_zeros_of_the_others(ranks, layout, is_dense):
    size = int(layout[3])
    results = ranks.run(idle, size, layout, is_dense)
    (own, merged), (other, merged_there) = results[0], results[size // 2]
    assert merged.keys() == merged_there.keys()
    assert merged["experts.3"] is None
    for name in ("experts.0", "experts.1", "experts.2"):
        parts = [each[name] for each in (own, other) if each[name] is not None]
        assert len(parts) == (2 if name == "experts.2" else 1)
        expected = sum(value for value, _ in parts) / 2
        for value, steps in (merged[name], merged_there[name]):
            assert torch.equal(value, expected)
            assert steps == parts[0][1]  # zeros count as steps


# -- weights from elsewhere --------------------------------------------------------------------------


def matrix():
    torch.manual_seed(0)
    return nn.Linear(6, 4)


def pulled(parallel, optimizer, steps, falls=False):
    """Steps of least squares; each worker has another target, and the learning rate may fall."""
    for step in steps:
        if falls:
            optimizer.param_groups[0]["lr"] = 0.1 / (1 + step)
        chance = torch.Generator().manual_seed(10 * step + dist.get_rank())
        inputs = torch.randn(8, 6, generator=chance)
        (parallel(inputs) - dist.get_rank()).square().mean().backward()
        if getattr(optimizer, "is_dense", False):
            optimizer.average_gradients()
        optimizer.step()
        optimizer.zero_grad()


def made(text):
    parallel = parallelize(matrix(), text)
    inner = torch.optim.SGD(parallel.parameters(), lr=0.1, momentum=0.5)
    return parallel, LocalUpdates(parallel, inner, outer=Outer(0.7, 0.9, warmup=0))


def loaded_between(text, door, folder):
    """Values after steps, weights of 3, and more steps with a rate of 0."""
    parallel, optimizer = made(text)
    pulled(parallel, optimizer, range(7))
    whole = {"weight": torch.full((4, 6), 3.0), "bias": torch.full((4,), 3.0)}
    if door == "load_state_dict":
        parallel.load_state_dict(whole)
    elif door == "load_full_state_dict":
        parallel.load_full_state_dict(whole)
    elif door == "gathered":
        with parallel.gathered():
            for name, parameter in parallel.module.named_parameters():
                parameter.data.copy_(whole[name])
    else:
        other = parallelize(matrix(), "dp=2")
        other.load_state_dict(whole)
        shoal.load(shoal.save(folder, other), parallel)
    optimizer.param_groups[0]["lr"] = 0.0
    pulled(parallel, optimizer, range(7, 14))
    optimizer.settle()
    return [each.local.clone() for each in parallel.owned]


@pytest.mark.parametrize("door", ["load_state_dict", "load_full_state_dict", "shoal.load", "gathered"])
@pytest.mark.parametrize(
    "settings", ["every=4", "every=4,fragments=2,delay=1,compress=topk:8", "every=3,delay=2,compress=int8"]
)
def test_loaded_weights_are_those_that_the_next_merges_begin_with(ranks, tmp_path, settings, door):
    """Neither a merge that was under way moves them, nor momentum, nor what compression left out."""
    for values in ranks.run(loaded_between, 2, f"dp=2,exchange=local,{settings}", door, tmp_path):
        assert all((value == 3.0).all() for value in values)


def evaluated_between(text, is_swapped):
    """Values after steps, in the midst of whose round other weights were loaded and taken back."""
    parallel, optimizer = made(text)
    pulled(parallel, optimizer, range(6))
    if is_swapped:
        own = {name: value.clone() for name, value in parallel.state_dict().items()}
        parallel.load_state_dict({name: torch.zeros_like(value) for name, value in own.items()})
        parallel.load_state_dict(own)
    pulled(parallel, optimizer, range(6, 12))
    optimizer.settle()
    return [each.local.clone() for each in parallel.owned]


def test_own_weights_that_a_worker_takes_back_stay_what_it_changed(ranks):
    text = "dp=2,exchange=local,every=4,compress=int8"
    for one, other in zip(
        ranks.run(evaluated_between, 2, text, True), ranks.run(evaluated_between, 2, text, False), strict=True
    ):
        assert all(torch.equal(first, second) for first, second in zip(one, other, strict=True))


def resumed(text, folder, door, settles=True):
    """Values after 10 steps, in one go and with a change to a new model after 5."""
    is_local = "local" in text
    ended = []
    for is_resumed in (False, True):
        parallel, optimizer = made(text) if is_local else plain(text)
        pulled(parallel, optimizer, range(5), "stretch" in text)
        if is_local and settles:
            optimizer.settle()
        if is_resumed:
            kept = parallel.state_dict(), optimizer.state_dict()
            if door == "shoal.load":
                path = shoal.save(folder, parallel, optimizer)
            parallel, optimizer = made(text) if is_local else plain(text)
            if door == "shoal.load":
                shoal.load(path, parallel, optimizer)
            elif door == "model first":
                parallel.load_state_dict(kept[0])
                optimizer.load_state_dict(kept[1])
            else:
                optimizer.load_state_dict(kept[1])
                parallel.load_state_dict(kept[0])
        pulled(parallel, optimizer, range(5, 10), "stretch" in text)
        if is_local:
            optimizer.settle()
        ended.append([each.local.clone() for each in parallel.owned])
    return ended


def plain(text):
    parallel = parallelize(matrix(), text)
    return parallel, torch.optim.SGD(parallel.parameters(), lr=0.1, momentum=0.5)


@pytest.mark.parametrize(
    ("text", "door"),
    [
        ("dp=2,exchange=local,every=2,dense=3", "shoal.load"),
        ("dp=2,exchange=local,every=2,dense=3,compress=topk:8", "model first"),
        ("dp=2,exchange=local,every=2,dense=3,compress=topk:8", "optimizer first"),
        ("dp=2,exchange=local,every=3,fragments=2,compress=powersgd:1", "shoal.load"),
        ("dp=2,exchange=local,every=1,stretch=9", "shoal.load"),
        ("dp=2,compress=int8,dense=4", "shoal.load"),
    ],
)
def test_a_loop_of_ones_own_goes_on_as_if_it_had_not_ended(ranks, tmp_path, text, door):
    """The checkpoint has the number 0, and the training has made five steps: the next is not dense again."""
    for whole, parted in ranks.run(resumed, 2, text, tmp_path, door):
        assert all(torch.equal(first, second) for first, second in zip(whole, parted, strict=True))


@pytest.mark.parametrize("door", ["model first", "optimizer first"])
@pytest.mark.parametrize(
    "text", ["every=3", "every=4,stretch=3", "every=4,fragments=2", "every=4,delay=1,dense=4"]
)
def test_a_state_of_the_middle_of_a_round_goes_on_there(ranks, text, door):
    """Five steps are no whole round."""
    for whole, parted in ranks.run(resumed, 2, f"dp=2,exchange=local,{text}", None, door, False):
        assert all(torch.equal(first, second) for first, second in zip(whole, parted, strict=True))


@pytest.mark.parametrize("text", ["every=4,delay=2", "every=2,compress=topk:8"])
def test_a_state_that_lacks_a_merge_or_what_was_left_out_is_refused(ranks, text):
    with pytest.raises(WorkerError, match=r"call settle\(\) on all ranks before it"):
        ranks.run(resumed, 2, f"dp=2,exchange=local,{text}", None, "model first", False)


def left_of_all(text, folder, is_resumed):
    """The sum over workers of what compression left out."""
    parallel, optimizer = made(text)
    if is_resumed:
        shoal.load(folder, parallel, optimizer)
    else:
        pulled(parallel, optimizer, range(4))
        optimizer.settle()
    (summed,) = optimizer.exchanges().values()
    total = summed.give_up(28)
    dist.all_reduce(total)
    if not is_resumed:
        summed.take(total / dist.get_world_size())
        shoal.save(folder, parallel, optimizer)
    return total


@pytest.mark.parametrize("workers", [2, 4])
def test_another_number_of_workers_has_as_much_left_to_send(ranks, tmp_path, workers):
    settings = "exchange=local,every=2,compress=topk:8"
    before = ranks.run(left_of_all, 6 - workers, f"dp={6 - workers},{settings}", tmp_path, False)[0]
    after = ranks.run(left_of_all, workers, f"dp={workers},{settings}", tmp_path, True)[0]
    assert before.abs().sum() > 0
    torch.testing.assert_close(after, before, rtol=1e-6, atol=1e-7)  # a division by 2 or 4, and a sum
