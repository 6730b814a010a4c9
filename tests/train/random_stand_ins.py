"""Models and data that draw at random, from the global generators as people's own do."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from shoal.data import MapSamples
from shoal.parallel import Split, TensorLayout
from shoal.train import OptimizerConfig, Runtime, Trainer, TrainingData

BATCH, SAMPLES, STEPS = 8, 32, 6


class Drawing:
    """Pairs `[1, 8]` with noise from every generator that a dataset may draw from."""

    def __init__(self) -> None:
        self._x = torch.randn(SAMPLES, 1, 8, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        noise = torch.randn(8) * 0.1 + random.gauss(0, 0.1) + float(np.random.standard_normal()) * 0.1
        return self._x[index] + noise, self._x[index].sort().values


def collate(items: list[Any]) -> Any:
    """Masks at random, as collators of masked language models do."""
    inputs, targets = (torch.stack(each) for each in zip(*items, strict=True))
    return inputs * (torch.rand(inputs.shape) > 0.1), targets


class Block(nn.Module):
    """Two layers and a user's own dropout of the hidden state that every rank of tp has."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(8, 16), nn.Linear(16, 8), nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.down(F.gelu(self.up(x))))


class Noting(nn.Sequential):
    """Two blocks; notes what its first one gives."""

    tensor_layout = TensorLayout({"[01]": Split({"up": 16}, {"down": 16})}, embedding=None, head=None)

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(Block(), Block())
        self.seen: list[torch.Tensor] = []
        self[0].register_forward_hook(
            lambda module, inputs, output: self.seen.append(output.detach().clone())
        )


class Normed(nn.Module):
    """A layer, and BatchNorm of what its rank sees."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.first(x.squeeze(1)))).unsqueeze(1)


def trainer_of(model: nn.Module, plan: str, **options: Any) -> Trainer:
    samples, workers = options.pop("data", None), options.pop("workers", 0)
    data = TrainingData(samples or MapSamples(Drawing(), collate=collate), workers=workers)
    optimizer = OptimizerConfig(warmup=1, learning_rate=1e-2)
    return Trainer(
        model, data, plan, batch=BATCH, steps=STEPS, seed=5, loss=F.mse_loss, optimizer=optimizer, **options
    )


def interrupted(kind: str, plan: str, folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """A run that was resumed half-way, and the one that was not interrupted."""
    make = {"dropout": Noting, "norm": Normed}[kind]
    trainer = trainer_of(make(), plan)
    for _ in range(STEPS // 2):
        trainer.step()
    path = trainer.save(folder, {})
    whole = _to_the_end(trainer)
    random.seed(1), np.random.seed(2), torch.manual_seed(3)
    resumed = trainer_of(make(), plan)
    resumed.step()
    resumed.load(path)
    return _to_the_end(resumed), whole


def _to_the_end(trainer: Trainer) -> dict[str, Any]:
    results = [trainer.step() for _ in range(STEPS - trainer.step_count)]
    trainer.close()
    buffers = {name: value.tolist() for name, value in trainer.parallel.module.named_buffers()}
    drawn = [torch.rand(()).item(), random.random(), float(np.random.random())]
    return {"losses": [result.loss for result in results], "buffers": buffers, "drawn": drawn}


def save_as(plan: str, folder: Path) -> Path:
    trainer = trainer_of(Noting(), plan)
    trainer.step()
    path = trainer.save(folder, {})
    trainer.close()
    return path


def hidden_after_a_resume(plan: str, path: Path) -> list[torch.Tensor]:
    """What the first block gives with dropout, after a resume under another Plan, once and again."""
    found = []
    for _ in range(2):
        model = Noting()
        trainer = trainer_of(model, plan)
        trainer.load(path)
        model.seen.clear()
        trainer.step()
        trainer.close()
        found += model.seen
    return found


def losses_of(plan: str, workers: int = 0, data: Any = None) -> list[float]:
    torch.manual_seed(0)
    trainer = trainer_of(nn.Sequential(nn.Linear(8, 8)), plan, workers=workers, data=data)
    torch.manual_seed(1)  # what else is drawn changes nothing
    losses = [trainer.step().loss for _ in range(STEPS)]
    trainer.close()
    return losses


def without_collate(plan: str) -> list[float]:
    return losses_of(plan, data=MapSamples(Drawing()))


def norm_saved(plan: str, folder: Path) -> tuple[Path, list[float]]:
    trainer = trainer_of(Normed(), plan)
    trainer.step()
    trainer.step()
    path = trainer.save(folder, {})
    trainer.close()
    return path, trainer.parallel.module.norm.running_mean.tolist()


def norm_loaded(plan: str, path: Path) -> tuple[list[float], int]:
    trainer = trainer_of(Normed(), plan)
    trainer.load(path)
    trainer.close()
    norm = trainer.parallel.module.norm
    return norm.running_mean.tolist(), norm.num_batches_tracked.item()


def norm_synchronised(plan: str) -> tuple[list[float], list[float]]:
    """The statistics of a rank with the setting, and the mean over ranks without it, after a step."""
    together = trainer_of(Normed(), plan, runtime=Runtime(synchronise_buffers=True))
    together.step()
    apart = trainer_of(Normed(), plan)
    apart.step()
    together.close(), apart.close()
    mean = apart.parallel.module.norm.running_mean.clone()
    dist.all_reduce(mean)
    return together.parallel.module.norm.running_mean.tolist(), (mean / dist.get_world_size()).tolist()
