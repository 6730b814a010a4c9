"""A training by a loop of one's own, saved and taken up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import shoal
from shoal.errors import ShoalError
from shoal.parallel import Parallel, Together, WholeParameters, parallelize
from shoal.train import BackgroundSaves

STEPS, SAVED_AFTER, BATCH = 6, 3, 8


class Net(nn.Module):
    """Rows that do not divide by two, a layer that is not trained, a buffer that all ranks change alike."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 25)
        self.fixed = nn.Linear(25, 25).requires_grad_(False)
        self.down = nn.Linear(25, 3)
        self.register_buffer("calls", torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.down(torch.tanh(self.fixed(torch.tanh(self.up(x)))))


def training(plan: str, kind: str, seed: int) -> tuple[Parallel, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    parallel = parallelize(Net(), plan)
    trained = [each for each in parallel.parameters() if each.requires_grad]
    if kind == "adamw":
        return parallel, torch.optim.AdamW(trained, lr=1e-2)
    matrices = [each for each in trained if each.dim() == 2]
    whole = WholeParameters(parallel, matrices, torch.optim.Adafactor, lr=1e-1)
    rest = [each for each in trained if each.dim() < 2]
    return parallel, Together([whole, torch.optim.SGD(rest, lr=torch.tensor(0.1), momentum=0.9)])


def steps(parallel: Parallel, optimizer: torch.optim.Optimizer, first: int, last: int) -> list[float]:
    """The losses over all samples of some steps."""
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5, last_epoch=-1)
    losses = []
    for step in range(first, last):
        batch = torch.randn(BATCH, 6, generator=torch.Generator().manual_seed(step))
        loss = F.mse_loss(parallel(parallel.local(batch)), parallel.local(batch[:, :3].sort().values))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 1:
            scheduler.step()
        mean = loss.detach().clone()
        parallel.axes.dp.all_reduce(mean, "loss").wait()
        losses.append(mean.item() / parallel.axes.dp.size)
    return losses


def interrupted(plan: str, kind: str, folder: Path) -> tuple[Path, list[float]]:
    parallel, optimizer = training(plan, kind, seed=0)
    steps(parallel, optimizer, 0, SAVED_AFTER)
    path = shoal.save(folder, parallel, optimizer, step=SAVED_AFTER, words=["a", 1, None])
    return path, steps(parallel, optimizer, SAVED_AFTER, STEPS)


def taken_up(plan: str, kind: str, path: Path) -> tuple[dict[str, Any], list[float], float, list[float]]:
    """What was kept, the losses of the other half, the learning rate, and the buffer."""
    parallel, optimizer = training(plan, kind, seed=1)
    state = shoal.load(path, parallel, optimizer)
    rate = float(optimizer.param_groups[0]["lr"])
    calls = parallel.module.calls.tolist()
    return state, steps(parallel, optimizer, state["step"], STEPS), rate, calls


def round_trip(before: str, after: str, folder: Path) -> bool:
    """Whether all that is saved again after a load is bitwise what was saved."""
    parallel, optimizer = training(before, "two", seed=0)
    steps(parallel, optimizer, 0, SAVED_AFTER)
    path = shoal.save(folder / "first", parallel, optimizer)
    parallel, optimizer = training(after, "two", seed=1)
    shoal.load(path, parallel, optimizer)
    shoal.save(folder / "second", parallel, optimizer)
    return True


def saved_beside(plan: str, folder: Path) -> tuple[list[str], Path | None]:
    """Saves twice while steps go on, and once more what a save that waits writes."""
    parallel, optimizer = training(plan, "two", seed=0)
    saves = BackgroundSaves(folder / "beside", parallel, optimizer, keep=1)
    for first in (0, 1):
        steps(parallel, optimizer, first, first + 1)
        shoal.save(folder / "waits", parallel, optimizer, step=first, words=[first])
        saves.save(step=first, words=[first])
    steps(parallel, optimizer, 2, STEPS)
    return [path.name for path in sorted((folder / "waits").glob("step-*"))], saves.finish()


def batch_norms(plan: str, folder: Path) -> tuple[list[float], list[float]]:
    """Statistics that differ between ranks, before a save and after a load."""
    parallel = parallelize(nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1)), plan)
    with torch.no_grad():
        parallel(torch.randn(8, 3) * (1 + parallel.axes.dp.index))
    shoal.save(folder, parallel)
    again = parallelize(nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1)), plan)
    assert shoal.load(folder, again) == {"step": 0}
    return parallel.module[0].running_var.tolist(), again.module[0].running_var.tolist()


def refusal(plan: str, kind: str, path: Path) -> str:
    parallel, optimizer = training(plan, kind, seed=1)
    try:
        shoal.load(path, parallel, optimizer)
    except ShoalError as error:
        return str(error)
    return ""


def refusal_to_count(plan: str, path: Path, of_rank_1: Path) -> str:
    """What a save says whose directory one rank cannot read."""
    parallel, _ = training(plan, "adamw", seed=0)
    try:
        shoal.save(of_rank_1 if dist.get_rank() == 1 else path, parallel)
    except ShoalError as error:
        return str(error)
    return ""
