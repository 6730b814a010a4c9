"""A model, data and trainings of a few milliseconds; what the tests of the Trainer run on ranks."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shoal.errors import TrainingError
from shoal.models import build, next_token_loss
from shoal.train import OptimizerConfig, Trainer

SAMPLES = 48
SEQUENCE = 12
STEPS = 6
BATCH = 8
SHAPE = {"vocab_size": 64, "layers": 2, "hidden": 24, "heads": 2, "kv_heads": 1, "ffn": 40, "seq": SEQUENCE}


class NumberedSamples:
    """Samples whose first target is their number, so that whoever sees one knows which it is."""

    def __len__(self) -> int:
        return SAMPLES

    def batch(self, indices: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = (indices[:, None] * 7 + np.arange(SEQUENCE + 1) ** 2) % 61
        tokens[:, 1] = indices
        windows = torch.from_numpy(tokens)
        return windows[:, :-1], windows[:, 1:]


class NotingLoss:
    """The usual loss; notes the samples that were trained on, and draws from every random generator."""

    def __init__(self) -> None:
        self.seen: list[int] = []
        self.drawn: list[float] = []

    def __call__(self, output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled():
            self.seen += targets[:, 0].tolist()
            self.drawn += [random.gauss(0, 1), np.random.standard_normal(), torch.rand(()).item()]
        return next_token_loss(output, targets)


def make_trainer(plan: str, *, dropout: float = 0.0, loss: Any = next_token_loss, **options: Any) -> Trainer:
    model = build("tiny", overrides={**SHAPE, "dropout": dropout}, device="meta")
    optimizer = OptimizerConfig(warmup=2, learning_rate=1e-2)
    settings = {"batch": BATCH, "steps": STEPS, "seed": 3, "optimizer": optimizer, **options}
    return Trainer(model, NumberedSamples(), plan, loss=loss, **settings)


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    with trainer.parallel.gathered():
        return {name: value.detach().clone() for name, value in trainer.parallel.module.named_parameters()}


def losses_of(plan: str, steps: int = STEPS, dropout: float = 0.0) -> list[float]:
    trainer = make_trainer(plan, dropout=dropout)
    losses = [trainer.step().loss for _ in range(steps)]
    trainer.close()
    return losses


def go_on(trainer: Trainer, loss: NotingLoss) -> dict[str, Any]:
    """Trains to the end, and gives all that is the same if the run was resumed."""
    loss.seen, loss.drawn = [], []
    results = [trainer.step() for _ in range(STEPS - trainer.step_count)]
    trainer.close()
    return {
        "steps": [
            (result.step, result.loss, result.gradient_norm, result.learning_rate) for result in results
        ],
        "position": trainer.position,
        "seen": loss.seen,
        "drawn": loss.drawn,
        "generators": [torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()],
        "weights": weights(trainer),
    }


def with_and_without_interruption(plan: str, folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    loss = NotingLoss()
    trainer = make_trainer(plan, dropout=0.2, loss=loss)
    for _ in range(STEPS // 2):
        trainer.step()
    checkpoint = trainer.save(folder, {"note": "kept"})
    without = go_on(trainer, loss)

    for reseed in (random.seed, np.random.seed, torch.manual_seed):
        reseed(12345)
    loss = NotingLoss()
    resumed = make_trainer(plan, dropout=0.2, loss=loss)
    resumed.step()  # whatever it did before, the saved state takes its place
    assert resumed.load(checkpoint)["note"] == "kept"
    return go_on(resumed, loss), without


def save_half_way(plan: str, folder: Path) -> tuple[Path, list[int]]:
    loss = NotingLoss()
    trainer = make_trainer(plan, loss=loss)
    for _ in range(STEPS // 2):
        trainer.step()
    trainer.close()
    return trainer.save(folder, {}), loss.seen


def resume_half_way(plan: str, checkpoint: Path) -> tuple[list[float], list[int]]:
    loss = NotingLoss()
    trainer = make_trainer(plan, loss=loss)
    trainer.load(checkpoint)
    result = go_on(trainer, loss)
    return [step[1] for step in result["steps"]], result["seen"]


class FailingLoss:
    """The usual loss, but what `spoil` makes of it from the third step on, on one rank."""

    def __init__(self, rank: int, value: float) -> None:
        self.rank = rank
        self.value = value
        self.calls = 0

    def __call__(self, output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        loss = next_token_loss(output, targets)
        spoils = self.calls > 2 and rank_here() == self.rank
        return loss * self.value if spoils else loss


def rank_here() -> int:
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0


def train_into_a_loss_that_is_not_finite(plan: str, rank: int, value: float) -> tuple[str, bool, int]:
    optimizer = OptimizerConfig(warmup=2, learning_rate=1e-2, skip=0)
    trainer = make_trainer(plan, loss=FailingLoss(rank, value), optimizer=optimizer)
    trainer.step()
    trainer.step()
    before = weights(trainer)
    try:
        trainer.step()
        message = ""
    except TrainingError as error:
        message = str(error)
    trainer.close()
    after = weights(trainer)
    return message, all(torch.equal(before[name], after[name]) for name in before), trainer.step_count


def validated(plan: str, counts: list[int]) -> list[float]:
    trainer = make_trainer(plan, dropout=0.5)
    trainer.step()
    means = [trainer.validate(NumberedSamples(), count) for count in counts]
    trainer.step()  # training goes on after it
    trainer.close()
    assert trainer.parallel.module.training
    return means


def loss_of_each_sample(plan: str) -> list[float]:
    """One sample at a time through the model of a single process, in evaluation mode."""
    trainer = make_trainer(plan, dropout=0.5)
    trainer.step()
    trainer.close()
    model = trainer.parallel.module.eval()
    samples = NumberedSamples()
    with torch.no_grad(), trainer.parallel.gathered():
        batches = [samples.batch(np.array([index])) for index in range(len(samples))]
        return [next_token_loss(model(inputs), targets).item() for inputs, targets in batches]
