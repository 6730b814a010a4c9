"""Trainers of the library that leave a Run and tell of what they do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from shoal.errors import RunError
from shoal.train import Callbacks, OptimizerConfig, Trainer


def dataset() -> TensorDataset:
    x = torch.randn(32, 6, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, x.sort().values)


def trainer_of(plan: str, folder: Path, **options: Any) -> Trainer:
    torch.manual_seed(0)
    return Trainer(
        nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 6)),
        dataset(),
        plan,
        batch=8,
        steps=8,
        loss=F.mse_loss,
        optimizer=OptimizerConfig(warmup=1),
        run=folder,
        **options,
    )


def leave_a_run(plan: str, folder: Path) -> dict[str, list[Any]]:
    told: dict[str, list[Any]] = {"steps": [], "validations": [], "saved": []}
    trainer = trainer_of(
        plan,
        folder,
        callbacks=Callbacks(
            on_step=lambda result: told["steps"].append(result.step),
            on_validation=lambda step, values: told["validations"].append((step, sorted(values))),
            on_save=lambda path: told["saved"].append(path.name),
        ),
    )
    for _ in range(4):
        trainer.step()
    trainer.evaluate(dataset(), 16, {"far": lambda output, targets: (output - targets).abs().max()})
    trainer.save()
    trainer.close()
    return told


def go_on_with_it(plan: str, folder: Path) -> str:
    """A second Trainer: without its checkpoint it is refused, with it the Run goes on."""
    trainer = trainer_of(plan, folder)
    try:
        trainer.step()
        message = ""
    except RunError as error:
        message = str(error)
    trainer.load(next((folder / "checkpoints").glob("step-*")))
    trainer.step()
    trainer.close()
    return message


def refusal_of(folder: Path) -> str:
    plan = f"dp={dist.get_world_size()}" if dist.is_initialized() else "dp=1"
    try:
        trainer_of(plan, folder)
    except RunError as error:
        return str(error)
    return ""
