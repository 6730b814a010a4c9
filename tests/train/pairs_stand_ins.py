"""Trainings that one Plan saves and another goes on with, on ranks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from train_stand_ins import BATCH, NumberedSamples

from shoal.models import build
from shoal.train import OptimizerConfig, Trainer

SAVED_AFTER, LOOKED_AT = 3, 5
"""Steps before the checkpoint, and steps after it whose losses are compared."""


def trainer_of(plan: str, shape: Mapping[str, Any]) -> Trainer:
    model = build("tiny", overrides=dict(shape), device="meta")
    return Trainer(
        model,
        NumberedSamples(),
        plan,
        batch=BATCH,
        steps=SAVED_AFTER + LOOKED_AT,
        seed=3,
        optimizer=OptimizerConfig(warmup=2, learning_rate=1e-2),
    )


def losses_after(trainer: Trainer) -> list[float]:
    losses = [trainer.step().loss for _ in range(LOOKED_AT)]
    trainer.close()
    return losses


def save_and_go_on(plan: str, shape: Mapping[str, Any], folder: Path) -> tuple[Path, list[float]]:
    """The checkpoint, and the losses of the steps after it."""
    trainer = trainer_of(plan, shape)
    for _ in range(SAVED_AFTER):
        trainer.step()
    return trainer.save(folder, {}), losses_after(trainer)


def take_up(plan: str, shape: Mapping[str, Any], checkpoint: Path) -> list[float]:
    """The losses of the steps after a checkpoint."""
    trainer = trainer_of(plan, shape)
    trainer.load(checkpoint)
    return losses_after(trainer)
