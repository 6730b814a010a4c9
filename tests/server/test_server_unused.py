"""Parameters without a gradient stay as they are on servers, with their optimizer's state."""

from typing import Any

import pytest
import torch
from server_stand_ins import adamw, data, train
from torch import nn

from shoal.parallel.exchange.server import Terms

WORKERS, ROUNDS = 2, 6
# Means of two fp32 gradients in another order, after six AdamW steps.
CLOSE = {"rtol": 1e-5, "atol": 1e-6}


class Branches(nn.Module):
    """Branch 0 is used in all shares, branch 1 by worker 0 in rounds 2 and 4, branch 2 never.

    The server's windows cut the first branch in two.
    """

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.branches = nn.ModuleList(nn.Linear(600, 2) for _ in range(3))
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.normal_(0, 0.1, generator=generator)

    def forward(self, inputs: torch.Tensor, share: int) -> torch.Tensor:
        result: torch.Tensor = self.branches[0](inputs)
        return result + self.branches[1](inputs) if share in (4, 8) else result


def loss_of(model: Any, share: int) -> torch.Tensor:
    inputs, targets = data(share)
    return nn.functional.mse_loss(model(inputs, share), targets)


def reference(make: Any, workers: int, rounds: range) -> tuple[list[torch.Tensor], list[dict[str, Any]]]:
    model = Branches()
    optimizer = make(model.parameters())
    for round in rounds:
        optimizer.zero_grad()
        for worker in range(workers):
            (loss_of(model, round * workers + worker) / workers).backward()
        optimizer.step()
    values = list(model.parameters())
    return values, [optimizer.state.get(each, {}) for each in values]


def assert_equal(trained, expected):
    assert not trained.errors
    values, states = expected
    for ours, theirs in zip(trained.values, values, strict=True):
        torch.testing.assert_close(ours, theirs.detach(), **CLOSE)
    for ours, theirs in zip(trained.states, states, strict=True):
        torch.testing.assert_close(dict(ours), dict(theirs), **CLOSE)


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-2, momentum=0.9, weight_decay=0.3)


@pytest.mark.parametrize("mirrored", [False, True])
@pytest.mark.parametrize("make", [adamw, momentum])
def test_servers_decay_and_move_no_parameter_that_nobody_uses(make, mirrored):
    def kill(worker, share, servers):
        if mirrored and share == 5:
            servers[0].close()

    terms = Terms(workers=WORKERS, shares=WORKERS * ROUNDS)
    trained = train(
        terms,
        workers=WORKERS,
        servers=2,
        make=make,
        model=Branches,
        loss=loss_of,
        mirrored=mirrored,
        before=kill,
    )
    assert_equal(trained, reference(make, WORKERS, range(ROUNDS)))
    unused = Branches().branches[2].weight
    assert torch.equal(trained.values[4], unused)
    assert not trained.states[4]


def test_a_stale_contribution_leaves_what_it_does_not_use():
    """One worker, whose contributions are applied at once, is one process with a batch of a share."""
    terms = Terms(workers=1, shares=10, staleness=1)
    trained = train(terms, workers=1, servers=2, model=Branches, loss=loss_of)
    assert_equal(trained, reference(adamw, 1, range(10)))


def test_servers_go_on_with_the_state_of_the_parameters_that_have_one():
    def continued(parameters):
        given = list(parameters)
        optimizer = adamw(given)
        for each in (given[0], given[3]):
            generator = torch.Generator().manual_seed(each.numel())
            optimizer.state[each] = {
                "step": torch.tensor(7.0),
                "exp_avg": torch.randn(each.shape, generator=generator),
                "exp_avg_sq": torch.rand(each.shape, generator=generator),
            }
        return optimizer

    terms = Terms(workers=1, shares=10)
    trained = train(terms, workers=1, servers=2, make=continued, model=Branches, loss=loss_of)
    assert_equal(trained, reference(continued, 1, range(10)))
