"""What people do with a module's state and parameters, done to a model that is laid over ranks."""

import copy
import io
import tempfile

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from parallel_stand_ins import SHARDS
from torch import nn
from torch.distributed.tensor import DTensor

from shoal.errors import LayoutError, ModelError
from shoal.parallel import parallelize


class Model(nn.Module):
    """Blocks whose first dims do not divide by two, a scalar, a buffer, and a layer that is not trained."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(4, 5)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 5)) for _ in range(2)
        )
        self.fixed = nn.Linear(5, 5).requires_grad_(False)
        self.gain = nn.Parameter(torch.ones(()))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.calls += 1
        x = self.embed(x)
        for block in self.blocks:
            x = x + block(x)
        return self.gain * self.fixed(x)


def made(plan):
    torch.manual_seed(0)
    return parallelize(Model(), plan)


def inputs(step=0):
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(step))


def step(model, optimizer, number=0, clip=None):
    model(getattr(model, "local", lambda batch: batch)(inputs(number))).square().mean().backward()
    norm = None if clip is None else torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()
    optimizer.zero_grad()
    return norm.full_tensor().item() if isinstance(norm, DTensor) else None if norm is None else norm.item()


def groups(model):
    """What many training scripts do: no decay for what has fewer than two dims."""
    named = [(name, each) for name, each in model.named_parameters() if each.requires_grad]
    return [
        {"params": [each for _, each in named if each.dim() >= 2], "weight_decay": 0.1},
        {"params": [each for _, each in named if each.dim() < 2], "weight_decay": 0.0},
    ]


def train_as_scripts_do(model):
    optimizer = torch.optim.SGD(groups(model), lr=0.2, momentum=0.9)
    return [step(model, optimizer, number, clip=0.1) for number in range(3)]


def train_under(plan):
    parallel = made(plan)
    norms = train_as_scripts_do(parallel)
    shapes = {name: tuple(each.shape) for name, each in parallel.named_parameters()}
    return norms, shapes, parallel.full_state_dict()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("shard", SHARDS)
def test_groups_by_dims_and_torch_s_clipping_do_what_they_do_on_one_device(ranks, shard, precision):
    torch.manual_seed(0)
    model = Model()
    norms = train_as_scripts_do(model)
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if precision == "fp32" else {"rtol": 0.02, "atol": 0.02}
    for index, (measured, shapes, state) in enumerate(
        ranks.run(train_under, 2, f"dp=2,shard={shard},precision={precision}")
    ):
        torch.testing.assert_close(torch.tensor(measured), torch.tensor(norms), **tolerance)
        assert shapes == {name: tuple(each.shape) for name, each in model.named_parameters()}
        for name, value in (model.state_dict() if index == 0 else {}).items():
            torch.testing.assert_close(state[name], value, **tolerance, check_dtype=False)


def go_through_states(plan, folder):
    """Whether what each way of saving gives, loaded into another model, computes as the first does."""
    parallel = made(plan)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1, momentum=0.9)
    step(parallel, optimizer)
    with torch.no_grad():
        expected = parallel(inputs())
    full = parallel.full_state_dict()

    def outcome(load):
        torch.manual_seed(1)
        other = parallelize(Model(), plan)
        with torch.no_grad():
            other(inputs())  # its weights are in place, and have to be replaced
        load(other)
        with torch.no_grad():
            return torch.equal(other(inputs()), expected)

    def by_dcp(other):
        dcp.save(parallel.state_dict(), checkpoint_id=folder)
        state = other.state_dict()
        dcp.load(state, checkpoint_id=folder)
        other.load_state_dict(state)

    def by_torch_save(other):
        file = io.BytesIO()
        torch.save(parallel.state_dict(), file)
        file.seek(0)
        other.load_state_dict(torch.load(file, weights_only=False))

    def by_copies(other):
        copies = copy.deepcopy(dict(parallel.named_parameters()))
        with torch.no_grad():
            for name, each in other.named_parameters():
                each.copy_(copies[name])
        other.load_state_dict(parallel.saved_buffers(), strict=False)

    told = [full]
    dist.broadcast_object_list(told)
    return {
        "a deep copy": outcome(lambda other: other.load_state_dict(copy.deepcopy(parallel.state_dict()))),
        "deep copies of parameters": outcome(by_copies),
        "torch.save": outcome(by_torch_save),
        "state_dict": outcome(lambda other: other.load_state_dict(parallel.state_dict())),
        "whole tensors": outcome(lambda other: other.load_state_dict(told[0])),
        "full_state_dict": outcome(lambda other: other.load_full_state_dict(full)),
        "torch.distributed.checkpoint": outcome(by_dcp),
    }


@pytest.mark.parametrize("settings", [*(f"shard={shard}" for shard in SHARDS), "shard=zero1,precision=bf16"])
def test_states_are_saved_and_loaded_by_every_way_that_people_know(ranks, settings):
    with tempfile.TemporaryDirectory() as folder:
        for outcomes in ranks.run(go_through_states, 2, f"dp=2,{settings}", folder):
            assert all(outcomes.values()), outcomes


def load_wrongly(plan):
    parallel = made(plan)
    before = parallel.full_state_dict()
    refused = []
    state = {name: torch.zeros(each.shape) for name, each in Model().state_dict().items()}
    for wrong in (
        {**state, "embed.bias": torch.zeros(6)},
        {name: value for name, value in state.items() if name != "gain"},
        {**state, "blocks.9": torch.zeros(1)},
    ):
        for load in (parallel.load_state_dict, parallel.load_full_state_dict):
            with pytest.raises(ModelError) as error:
                load(wrong)
            refused.append(error.value.given)
    after = parallel.full_state_dict()
    return refused, all(torch.equal(after[name], value) for name, value in before.items())


def test_a_state_that_does_not_fit_changes_nothing(ranks):
    for refused, same in ranks.run(load_wrongly, 2, "dp=2,shard=zero3"):
        assert same
        for words, given in zip(("embed.bias", "gain", "blocks.9"), refused[::2], strict=True):
            assert words in given


def misuse(plan):
    torch.manual_seed(0)
    model = Model()
    early = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.1)
    parallel = parallelize(model, plan)
    parallel(inputs()).sum().backward()
    early_works = all(
        each is other for each, other in zip(model.parameters(), parallel.parameters(), strict=True)
    )
    refused = {}
    for name, use in {
        "optimizer": early.step,
        "copy": lambda: copy.deepcopy(parallel),
        "copy of the model": lambda: copy.deepcopy(model),
        "state of the model": model.state_dict,
        "load into the model": lambda: model.load_state_dict({}, strict=False),
        "cast": parallel.half,
        "move": lambda: parallel.to("meta"),
    }.items():
        try:
            use()
        except LayoutError as error:
            refused[name] = error.change
    with parallel.gathered():
        whole = {name: value.shape for name, value in model.state_dict().items()}
    assert parallel.to("cpu") is parallel
    return early_works, refused, whole == {name: value.shape for name, value in Model().state_dict().items()}


@pytest.mark.parametrize("plan", ["dp=2,shard=zero1", "dp=2,shard=zero3", "dp=2,precision=bf16"])
def test_what_would_be_wrong_without_a_word_is_refused(ranks, plan):
    for _, refused, is_whole in ranks.run(misuse, 2, plan):
        assert is_whole
        of_the_model = {"copy of the model", "state of the model", "load into the model"}
        assert set(refused) == {"optimizer", "copy", "cast", "move"} | of_the_model


def lay_two_that_share_an_activation(plan):
    """The second model is copied and saved before it is laid out, and the first after."""
    shared = nn.GELU()

    def build():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 4), shared)

    parallelize(build(), plan)
    second = build()
    copied = copy.deepcopy(second).state_dict()
    return copied, second.state_dict(), parallelize(second, plan).full_state_dict()


def test_models_may_share_a_module_that_holds_no_tensors(ranks):
    """Some of transformers have one activation for all models of a process."""
    copied, alone, laid_out = ranks.run(lay_two_that_share_an_activation, 2, "dp=2,shard=zero3")[0]
    assert copied.keys() == alone.keys() == laid_out.keys()
    for name, value in alone.items():
        assert torch.equal(copied[name], value)
        assert torch.equal(laid_out[name], value)


def test_an_optimizer_of_before_works_where_ranks_share_nothing(ranks):
    for works, refused, _ in ranks.run(misuse, 2, "dp=2"):
        assert works
        assert set(refused) == {"copy", "cast", "move"}


def swap_in_an_average(plan):
    """An average of the weights, evaluated between steps, as copies and by `.data`."""
    parallel = made(plan)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.5)
    average = {name: each.detach().clone() for name, each in parallel.named_parameters()}
    losses = []
    for number in range(2):
        step(parallel, optimizer, number)
        with torch.no_grad():
            losses.append(parallel(inputs()).sum().item())
            raw = {name: each.detach().clone() for name, each in parallel.named_parameters()}
            for name, each in parallel.named_parameters():
                average[name].lerp_(raw[name], 0.5)
                each.data.copy_(average[name])
            losses.append(parallel(inputs()).sum().item())
            for name, each in parallel.named_parameters():
                each.copy_(raw[name])
            losses.append(parallel(inputs()).sum().item())
    return losses


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("shard", SHARDS)
def test_weights_that_are_swapped_between_forwards_count(ranks, shard, precision):
    expected = swap_in_an_average("")
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if precision == "fp32" else {"rtol": 0.05, "atol": 0.1}
    for losses in ranks.run(swap_in_an_average, 2, f"dp=2,shard={shard},precision={precision}"):
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), **tolerance)
        assert losses[0] == losses[2]
        assert abs(losses[0] - losses[1]) > 0.01


def test_what_the_model_alone_has_is_named():
    parallel = made("")
    with pytest.raises(AttributeError, match=r"module\.embed"):
        parallel.embed  # noqa: B018
    with pytest.raises(AttributeError, match="'Parallel' object has no attribute 'nothing'"):
        parallel.nothing  # noqa: B018


def written_through_data(plan):
    """Weights of 0.3 with one element of 5, after a write that torch does not count, and a small addition."""
    parallel = parallelize(nn.Linear(4, 4), plan)
    with torch.no_grad():
        for owned in parallel.owned:
            owned.local.fill_(0.3)
    parallel.changed()
    with parallel.gathered():
        parallel.module.weight.data[1, 2] = 5.0
        parallel.module.bias.data = torch.full((4,), 2.0, dtype=parallel.module.bias.dtype)
    return parallel.full_state_dict()


@pytest.mark.parametrize("plan", ["dp=2", "dp=2,shard=zero2", "dp=2,shard=zero3", "dp=2,precision=bf16"])
def test_a_write_through_data_changes_the_elements_that_were_written(ranks, plan):
    """In bf16 0.3 is another number: elements that were not written keep their fp32 value."""
    state = ranks.run(written_through_data, 2, plan)[0]
    expected = torch.full((4, 4), 0.3)
    expected[1, 2] = 5.0
    assert torch.equal(state["weight"], expected)
    assert torch.equal(state["bias"], torch.full((4,), 2.0))
