"""Data and losses that are not finite at times, and what the Trainer makes of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from shoal.errors import TrainingError
from shoal.train import OptimizerConfig, Trainer

SPOILED = 5
BATCH, SAMPLES, STEPS = 4, 16, 8


class Spoiled:
    """Pairs of which one holds an infinite number, if asked for."""

    def __init__(self, *spoiled: int) -> None:
        self._spoiled = spoiled
        self._x = torch.randn(SAMPLES, 6, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = self._x[index]
        return x * float("inf") if index in self._spoiled else x, x.sort().values


class SpoiledGradient(torch.autograd.Function):
    """Passes its input on, and gives it a gradient that is not finite where the input is large."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(inputs)
        return inputs.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (inputs,) = ctx.saved_tensors
        return gradient + (float("inf") if inputs.abs().max() > 50 else 0.0)


class Net(nn.Module):
    """Two layers, statistics of batches between them, and now and then a gradient that is not finite."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = SpoiledGradient.apply(self.first(x))
        return self.last(self.norm(hidden))


def trainer_of(plan: str, data: Any, skip: int, **options: Any) -> Trainer:
    optimizer = OptimizerConfig(warmup=0, learning_rate=1e-2, eps=1e-3, skip=skip)
    settings: dict[str, Any] = {"loss": F.mse_loss, "optimizer": optimizer, **options}
    return Trainer(Net(), data, plan, batch=BATCH, steps=STEPS, **settings)


def steps_beside_a_run_without(plan: str, skip: int) -> dict[str, Any]:
    """A run that meets a spoiled sample, and one that makes its other steps alone."""
    trainer = trainer_of(plan, Spoiled(SPOILED), skip)
    results = [trainer.step() for _ in range(4)]
    trainer.close()
    skipped = [result.step for result in results if result.skipped]

    sound = trainer_of(plan, Spoiled(), skip)
    for result in results:
        if result.step in skipped:  # only the data goes on
            sound.step_count += 1
            sound.position += BATCH
            sound._passes.close()
        else:
            sound.step()
    sound.close()
    pairs = zip(state_of(trainer).items(), state_of(sound).items(), strict=True)
    return {
        "reasons": {result.step: result.skipped for result in results if result.skipped},
        "values": [result.values()["skipped"] for result in results],
        "total": trainer.skips.total,
        "same": all(name == other and torch.equal(a, b) for (name, a), (other, b) in pairs),
        "finite": all(bool(value.isfinite().all()) for value in state_of(trainer).values()),
    }


def state_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    """This rank's part of the weights and the optimizer's state, and its buffers."""
    held = {f"buffer {name}": buffer.clone() for name, buffer in trainer.parallel.module.named_buffers()}
    for owned in trainer.parallel.owned:
        held[f"{owned.name} {owned.start}"] = owned.parameter.detach().clone()
        for key, value in trainer.optimizer.state[owned.parameter].items():
            held[f"{owned.name} {owned.start} {key}"] = value.clone()
    return held


def run_into_too_many(plan: str, skip: int, folder: Path) -> dict[str, Any]:
    """Every sample is spoiled, which is too much for `skip`; then a resume from what is saved."""
    data = Spoiled(*range(SAMPLES))
    trainer = trainer_of(plan, data, skip)
    message = ""
    made = 0
    try:
        for _ in range(STEPS):
            trainer.step()
            made += 1
    except TrainingError as error:
        message = str(error)
    path = trainer.save(folder, {})
    trainer.close()
    resumed = trainer_of(plan, Spoiled(), skip)
    resumed.load(path)
    result = resumed.step()
    resumed.close()
    return {
        "message": message,
        "made": made,
        "step_count": trainer.step_count,
        "resumed": (result.step, result.skipped, resumed.position),
    }


def spoil_the_gradient(plan: str) -> tuple[str, float]:
    """A finite loss whose backward overflows in the first layer."""
    scaled = [(x * 1e3, y) for x, y in (Spoiled()[index] for index in range(SAMPLES))]
    trainer = trainer_of(plan, scaled, 3)
    result = trainer.step()
    trainer.close()
    return result.skipped, result.loss
