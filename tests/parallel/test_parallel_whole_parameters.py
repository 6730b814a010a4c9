"""Optimizers that need whole parameters make the step of one device, or are refused by name."""

import pytest
import torch
from torch import nn

from shoal.errors import LayoutError
from shoal.parallel import Together, WholeParameters, local_part, parallelize

PLANS = {
    "none": "dp=2",
    "zero1": "dp=2,shard=zero1",
    "zero2": "dp=2,shard=zero2",
    "zero3": "dp=2,shard=zero3",
    "hybrid": "dp=4,replicate=2,shard=zero3",
}


class Model(nn.Module):
    """Rows that do not divide by two, fewer rows than ranks, a scalar, three dims, a layer not trained."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(4, 5)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 5)) for _ in range(2)
        )
        self.narrow = nn.Linear(5, 1)
        self.filters = nn.Parameter(torch.randn(3, 2, 4))
        self.fixed = nn.Linear(5, 5).requires_grad_(False)
        self.gain = nn.Parameter(torch.ones(()))


def made():
    torch.manual_seed(0)
    return Model()


def gradient(name, shape, step):
    """None of one parameter in one step; values that fp32 and bf16 both hold."""
    if (name, step) == ("blocks.1.0.weight", 1):
        return None
    seed = sum(map(ord, name)) + 1000 * step
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def is_matrix(parameter):
    return parameter.dim() == 2


def muon(named, whole, parallel):
    """Muon of matrices, and AdamW of the rest; the first without Shoal, on one device."""
    named = [(name, each) for name, each in named if each.requires_grad]
    matrices = [(name, each) for name, each in named if is_matrix(each)]
    rest = [(name, each) for name, each in named if not is_matrix(each)]
    options = {"lr": 0.1, "weight_decay": 0.1}
    first = (
        WholeParameters(parallel, matrices, torch.optim.Muon, **options)
        if whole
        else torch.optim.Muon(matrices, **options)
    )
    return [first, torch.optim.AdamW(rest, lr=0.1)]


def adafactor(named, whole, parallel):
    groups = [
        {"params": [each for _, each in named if is_matrix(each)], "weight_decay": 0.1},
        {"params": [each for _, each in named if not is_matrix(each)]},
    ]
    if whole:
        return [WholeParameters(parallel, groups, torch.optim.Adafactor, lr=0.1)]
    return [torch.optim.Adafactor(groups, lr=0.1)]


class Filling(torch.optim.Optimizer):
    """Takes zeros for missing gradients, as code of Muon in wide use does; scales by a matrix's norm."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for each in group["params"]:
                if each.grad is None:
                    each.grad = torch.zeros_like(each)
                sums = self.state[each].setdefault("sums", torch.zeros_like(each))
                sums.mul_(0.9).add_(each.grad)
                each.mul_(1 - group["lr"] / 10).sub_(group["lr"] * sums / (sums.norm() + 1e-3))


def filling(named, whole, parallel):
    given = [(name, each) for name, each in named if each.requires_grad]
    return [WholeParameters(parallel, given, Filling, lr=0.1) if whole else Filling(given, lr=0.1)]


MAKERS = {"muon": muon, "adafactor": adafactor, "filling": filling}


def step_all(optimizers, number):
    for each in optimizers:
        for group in each.param_groups:
            group["lr"] = 0.1 / number
        each.step()
        each.zero_grad()


def given_gradients(plan, maker):
    """Three steps with gradients that are given, a state dict saved and loaded before the last."""
    parallel = parallelize(made(), plan)
    optimizer = Together(MAKERS[maker](list(parallel.named_parameters()), True, parallel))
    for step in range(1, 4):
        if step == 3:
            state = optimizer.state_dict()
            optimizer = Together(MAKERS[maker](list(parallel.named_parameters()), True, parallel))
            optimizer.load_state_dict(state)
        for owned in parallel.owned:
            whole = gradient(owned.name, owned.shape, step)
            if whole is not None:
                rows = whole.reshape(-1)[owned.start : owned.stop].view(owned.local.shape)
                owned.give(rows.clone())
        step_all([optimizer], step)
    elements = sum(
        local_part(value).numel()
        for state in optimizer.state.values()
        for value in state.values()
        if value.dim() > 0
    )
    return parallel.full_state_dict(), elements


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("sharding", PLANS)
def test_a_step_is_bitwise_that_of_one_device_and_its_state_is_on_one_rank(ranks, sharding, maker, precision):
    model = made()
    optimizers = MAKERS[maker](list(model.named_parameters()), False, None)
    for step in range(1, 4):
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.grad = gradient(name, tuple(parameter.shape), step)
        step_all(optimizers, step)
    kept = sum(
        value.numel()
        for each in optimizers
        for state in each.state.values()
        for value in state.values()
        if value.dim() > 0
    )
    plan = PLANS[sharding]
    results = ranks.run(
        given_gradients, 4 if sharding == "hybrid" else 2, f"{plan},precision={precision}", maker
    )
    for name, value in model.state_dict().items():
        assert torch.equal(results[0][0][name].to(value.dtype), value) or (
            name.startswith("fixed") and precision == "bf16"
        ), name
    copies = {"none": 2, "hybrid": 2}.get(sharding, 1)
    held = [elements for _, elements in results]
    assert sum(held) == copies * kept
    if sharding != "none":
        assert max(held) < 0.7 * kept


KINDS = ["Adafactor", "Muon"]
OF_TENSORS = "Rprop"  # takes each element by itself, and fails with DTensors


def refusals(plan, kinds):
    """What a step by each kind of optimizer says."""
    from parallel_stand_ins import transformer

    parallel = parallelize(transformer(), plan)
    told = []
    for kind in kinds:
        matrices = [each for each in parallel.parameters() if is_matrix(each)]
        try:
            if kind == "whole":
                WholeParameters(parallel, matrices, torch.optim.Muon)
            else:
                getattr(torch.optim, kind)(matrices).step()
        except LayoutError as error:
            told.append(str(error))
        else:
            told.append("")
    return told


def test_what_cannot_be_right_is_refused_by_name(ranks):
    for rows in ranks.run(refusals, 2, "dp=2,shard=zero1", [*KINDS, OF_TENSORS]):
        for kind, text in zip([*KINDS, OF_TENSORS], rows, strict=True):
            assert f"{kind} needs whole parameters, and a rank has rows of " in text
            assert f"make WholeParameters(parallel, parameters, {kind})" in text
    for blocks in ranks.run(refusals, 2, "tp=2", KINDS):
        assert all("and a rank has a block of " in text for text in blocks)
    assert ranks.run(refusals, 2, "tp=2", [OF_TENSORS]) == [[""], [""]]
    for (text,) in ranks.run(refusals, 2, "tp=2", ["whole"]):
        assert "under the Plan dp=1,tp=2 a rank has only a block of" in text


def test_a_parameter_of_another_model_is_refused():
    parallel = parallelize(made(), "dp=1")
    with pytest.raises(LayoutError, match="that the model does not have"):
        WholeParameters(parallel, made().parameters(), torch.optim.Adafactor)
    optimizer = WholeParameters(parallel, parallel.parameters(), torch.optim.Adafactor)
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    with pytest.raises(LayoutError, match="made with 1 groups of parameters has 2 now"):
        optimizer.step()


class Prodigy(torch.optim.SGD):
    """Named as an optimizer that finds one step size from all parameters."""


def refusal_of_all(plan, make):
    from parallel_stand_ins import transformer

    parallel = parallelize(transformer(), plan)
    try:
        if make == "whole":
            WholeParameters(parallel, list(parallel.parameters()), Prodigy, lr=0.1)
        elif make == "lbfgs":
            torch.optim.LBFGS(parallel.parameters()).step(lambda: torch.ones(()))
        else:
            Prodigy(parallel.parameters(), lr=0.1).step()
    except LayoutError as refusal:
        return str(refusal)
    return ""


@pytest.mark.parametrize(
    ("plan", "make"),
    [
        ("tp=2", "plain"),
        ("pp=2", "plain"),
        ("tp=2", "lbfgs"),
        ("pp=2", "whole"),
        ("dp=2,shard=zero1", "whole"),
    ],
)
def test_an_optimizer_of_all_parameters_is_refused_some_of_them(ranks, plan, make):
    for text in ranks.run(refusal_of_all, 2, plan, make):
        assert "makes its step from all parameters together" in text


def fitted(plan, search):
    """Weights after steps of LBFGS, which compares losses."""
    torch.manual_seed(0)
    parallel = parallelize(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)), plan)
    optimizer = torch.optim.LBFGS(parallel.parameters(), lr=0.5, max_iter=4, line_search_fn=search)
    inputs, targets = parallel.local((torch.randn(8, 6), torch.randn(8, 4)))

    def closure():
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(parallel(inputs), targets)
        loss.backward()
        return loss

    losses = [optimizer.step(closure).item() for _ in range(3)]
    return parallel.full_state_dict(), losses


@pytest.mark.parametrize("plan", ["dp=2", "dp=2,shard=zero2"])
@pytest.mark.parametrize("search", [None, "strong_wolfe"])
def test_an_optimizer_that_compares_losses_gets_the_mean_of_all_ranks(ranks, plan, search):
    expected, losses = fitted("dp=1", search)
    one, other = ranks.run(fitted, 2, plan, search)
    assert one[1] == other[1] == pytest.approx(losses, rel=1e-4)
    for name, value in expected.items():
        # Roundings of 6e-8 grow in a line search of 12 iterations.
        torch.testing.assert_close(one[0][name], value, rtol=1e-3, atol=1e-4)
