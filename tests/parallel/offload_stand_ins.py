"""Trainings with state outside of the device, and the same ones without."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import torch

from shoal.data import as_samples
from shoal.errors import OffloadError, ShoalError
from shoal.models import build, next_token_loss
from shoal.parallel import OffloadedOptimizer, parallelize
from shoal.parallel.offload import stored_activations
from shoal.train import Optimization, OptimizerConfig, Runtime, Trainer

STEPS, BATCH, SEQUENCE = 5, 8, 12
BLOCK = 4096
"""Elements of a block: the model's largest parameters lie in several."""
SHAPE = {"vocab_size": 64, "layers": 3, "hidden": 48, "heads": 4, "kv_heads": 2, "ffn": 100, "seq": SEQUENCE}
ALL = "offload=optimizer:file+gradients:file+parameters:file"
STATE = "offload=optimizer:file"

Followed = list[tuple[float, float]]
"""Loss and gradient norm of each step."""


def samples() -> Any:
    tokens = torch.randint(64, (48, SEQUENCE + 1), generator=torch.Generator().manual_seed(0))
    return as_samples([(row[:-1], row[1:]) for row in tokens])


def plain_factory(groups: Any, lr: float, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.RMSprop(groups, lr=lr, momentum=0.5, **options)


def whole_factory(groups: Any, lr: float, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(groups, lr=lr, **options)


def trainer_of(
    plan: str, folder: Path, loss: Any = next_token_loss, make: Any = None, **settings: Any
) -> Trainer:
    model = build("tiny", overrides=SHAPE, device="meta")
    options = dict(settings.pop("options", {}))
    if "optimizer:" in plan:
        options["block"] = BLOCK
    return Trainer(
        model,
        samples(),
        plan,
        batch=BATCH,
        steps=STEPS,
        seed=3,
        loss=loss,
        optimizer=Optimization(
            OptimizerConfig(warmup=2, learning_rate=1e-2, options=options, **settings), make=make
        ),
        runtime=Runtime(offload_folder=folder),
    )


def followed(trainer: Trainer, steps: int = STEPS) -> Followed:
    results = [trainer.step() for _ in range(steps)]
    return [(result.loss, result.gradient_norm) for result in results]


def trained(
    plan: str, folder: Path, least: int = 0, **settings: Any
) -> tuple[Followed, dict[str, torch.Tensor]]:
    """Losses and norms, and the whole model after the last step, on rank 0.

    Args:
        plan: The Plan.
        folder: Folder of the files.
        least: Bytes of the smallest activation that moves; 0 for the usual number.
        settings: Settings of the optimizer.
    """
    if least:
        stored_activations._LEAST = least
    trainer = trainer_of(plan, folder, **settings)
    losses = followed(trainer)
    assert not any(folder.iterdir())  # the files have no names
    state = trainer.parallel.full_state_dict()
    trainer.close()
    return losses, state


def interrupted(before: str, after: str, folder: Path) -> tuple[Followed, Followed]:
    """Two steps under one Plan, a checkpoint, and the rest under it and under another one."""
    trainer = trainer_of(before, folder)
    followed(trainer, 2)
    path = trainer.save(folder / "checkpoints")
    went_on = followed(trainer, STEPS - 2)
    trainer.close()
    trainer = trainer_of(after, folder)
    followed(trainer, 1)
    trainer.load(path)
    taken_up = followed(trainer, STEPS - 2)
    trainer.close()
    return went_on, taken_up


class InfiniteOnce:
    """A loss that is infinite in one step."""

    def __init__(self, step: int) -> None:
        self._step = step
        self._calls = 0

    def __call__(self, output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = next_token_loss(output, targets)
        if torch.is_grad_enabled():
            self._calls += 1
            if self._calls == self._step:
                return loss * float("inf")
        return loss


def refusal(plan: str, folder: Path, **settings: Any) -> str:
    """The error that making a trainer raises."""
    try:
        trainer_of(plan, folder, **settings).close()
    except ShoalError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def full_in_the_middle(plan: str, folder: Path) -> tuple[str, Followed, Followed]:
    """The error of a write that fails, and what follows from the checkpoint before it, which is intact."""
    stored_activations._LEAST = 256
    trainer = trainer_of(plan, folder)
    followed(trainer, 2)
    path = trainer.save(folder / "checkpoints")
    write, calls = os.pwritev, 0

    def failing(*arguments: Any) -> int:
        nonlocal calls
        calls += 1
        if calls > 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(*arguments)

    os.pwritev = failing
    said = ""
    try:
        trainer.step()
    except OffloadError as error:
        said = str(error)
    finally:
        os.pwritev = write
    trainer = trainer_of(plan, folder)
    trainer.load(path)
    taken_up = followed(trainer, STEPS - 2)
    trainer.close()
    return said, trained("dp=1", folder / "empty")[0][2:], taken_up


class Frozen(torch.nn.Module):
    """Blocks of which a part is not trained, and a filter whose memory is in another order than its dims."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = torch.nn.ModuleList(
            torch.nn.ModuleList([torch.nn.Linear(32, 32).requires_grad_(False), torch.nn.Linear(32, 32)])
            for _ in range(3)
        )
        self.filter = torch.nn.Conv2d(2, 6, 3).to(memory_format=torch.channels_last)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for fixed, trained_layer in self.blocks:
            x = x + trained_layer(torch.tanh(fixed(x)))
        return self.filter(x.view(-1, 2, 4, 4)).flatten(1)


def frozen_trained(plan: str, folder: Path) -> list[torch.Tensor]:
    """All parameters of `Frozen` after some steps of AdamW."""
    parallel = parallelize(Frozen(), plan, offload_folder=folder)
    trained_only = [each for each in parallel.parameters() if each.requires_grad]
    options = {"lr": 1e-2, "fused": True}
    if "offload" in plan:
        optimizer: Any = OffloadedOptimizer(parallel, trained_only, torch.optim.AdamW, block=BLOCK, **options)
    else:
        optimizer = torch.optim.AdamW(trained_only, **options)
    for step in range(3):
        batch = torch.randn(4, 32, generator=torch.Generator().manual_seed(step))
        parallel(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    state = optimizer.state_dict()["state"]
    parallel.load_full_state_dict(parallel.full_state_dict())
    return [*parallel.full_state_dict().values(), *(state[each]["exp_avg"] for each in sorted(state))]
