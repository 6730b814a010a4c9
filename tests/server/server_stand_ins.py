"""Workers and parameter servers as threads of one process, with a model of a few thousand weights."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from shoal.checkpoint import SingleProcess
from shoal.parallel import Outer, ServedUpdates, parallelize
from shoal.parallel.exchange.server import Server, Servers, Terms
from shoal.spec.plan import Compression, Plan

SAMPLES, SHARE = 64, 4
MAKING = threading.Lock()


def data(share: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The samples of a share."""
    generator = torch.Generator().manual_seed(0)
    inputs, targets = (torch.randn(SAMPLES, size, generator=generator) for size in (600, 2))
    first = share * SHARE % SAMPLES
    return inputs[first : first + SHARE], targets[first : first + SHARE]


def make_model() -> nn.Module:
    with MAKING:  # the seed is all threads'
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(600, 8), nn.Tanh(), nn.Linear(8, 2))


def loss_of(model: nn.Module, share: int) -> torch.Tensor:
    inputs, targets = data(share)
    return nn.functional.mse_loss(model(inputs), targets)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    given = list(parameters)
    matrices, vectors = ([each for each in given if (each.dim() > 1) is wide] for wide in (True, False))
    groups = [{"params": matrices, "weight_decay": 0.3}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=1e-2)


@dataclass
class Trained:
    """What came of a training: the last values, and of each step the worker, the share and its staleness."""

    values: list[torch.Tensor] = field(default_factory=list)
    states: list[dict[str, Any]] = field(default_factory=list)
    steps: list[tuple[int, int, int]] = field(default_factory=list)
    errors: list[BaseException] = field(default_factory=list)
    applied: list[dict[str, Any]] = field(default_factory=list)


def train(
    terms: Terms,
    *,
    workers: int,
    servers: int = 1,
    mirrored: bool = False,
    make: Callable[[Any], torch.optim.Optimizer] = adamw,
    outer: Outer | None = None,
    compress: str = "none",
    clip: float | None = None,
    model: Callable[[], nn.Module] = make_model,
    loss: Callable[[Any, int], torch.Tensor] = loss_of,
    before: Callable[[int, int, Sequence[Server]], object] = lambda worker, share, servers: None,
    change: Callable[[int, Servers], object] = lambda worker, way: None,
) -> Trained:
    """Train; `before` is called before each step with the worker's number, its share, and the servers.

    `change` is called with each worker's number and its way to the servers before it begins.
    """
    trained = Trained()
    here = [Server(index, "word", record=trained.applied.append) for index in range(servers)]
    if mirrored:
        for index, server in enumerate(here):
            server.mirror_to(here[(index + 1) % servers].address)
    threads = [threading.Thread(target=server.run, daemon=True) for server in here]

    def work(number: int) -> None:
        way = Servers([server.address for server in here], "word", mirrored=mirrored, timeout=120)
        change(number, way)
        try:
            parallel = parallelize(model(), Plan())
            updates = ServedUpdates(
                parallel,
                make(parallel.parameters()),
                way,
                terms,
                SingleProcess(),
                outer=outer,
                clip=clip,
                compression=Compression.parse(compress),
            )
            while (share := updates.share()) is not None:
                before(number, share, here)
                updates.loss = loss(parallel, share)
                updates.loss.backward()
                updates.step() if updates.loss.isfinite() else updates.pass_over()
                updates.zero_grad()
                trained.steps.append((number, share, updates.staleness))
            if updates.leads:
                updates.settle()
                trained.values = [each.detach().clone() for each in parallel.module.parameters()]
                trained.states = [updates.state[each] for each in parallel.parameters()]
            updates.leave()
        except LostError:
            way.close()
        except BaseException as error:
            trained.errors.append(error)

    working = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(workers)]
    for thread in threads + working:
        thread.start()
    for thread in working:
        thread.join(120)
    assert not any(thread.is_alive() for thread in working)
    for server in here:
        server.close()
    return trained


class LostError(Exception):
    """Raised in a worker that dies."""


def reference(rounds: int, workers: int, make: Callable[[Any], torch.optim.Optimizer] = adamw) -> Any:
    """The values after rounds in which all gradients are averaged, in one process."""
    model = make_model()
    optimizer = make(model.parameters())
    for round in range(rounds):
        optimizer.zero_grad()
        for worker in range(workers):
            (loss_of(model, round * workers + worker) / workers).backward()
        optimizer.step()
    return [each.detach() for each in model.parameters()], [
        optimizer.state[each] for each in model.parameters()
    ]
