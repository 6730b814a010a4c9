"""Workers of a Trainer that servers join, each a process of its own, and the same training in step."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import nn

from shoal.parallel.exchange.server import Server, Servers
from shoal.testing import RankPool
from shoal.train import OptimizerConfig, Runtime, Trainer

STEPS, SAMPLES = 6, 16


class Pairs(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Samples of 16 features and 2 targets."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(5)
        self._pairs = [torch.randn(SAMPLES, size, generator=generator) for size in (16, 2)]

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, targets = self._pairs
        return inputs[index], targets[index]


class Masked(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Samples of 5 tokens, whose numbers of targets go from 0 to 5, in an order that no shuffle makes even.

    With `classes` a sample has one target, and most have none.
    """

    def __init__(self, classes: bool) -> None:
        generator = torch.Generator().manual_seed(6)
        self._tokens = torch.randint(11, (SAMPLES, 5), generator=generator)
        self._targets = torch.randint(11, (SAMPLES, 5), generator=generator)
        counts = torch.tensor([0, 0, 0, 0, 5, 1, 0, 5, 0, 0, 1, 0, 0, 4, 0, 0])
        self._targets[torch.arange(5) >= counts[:, None]] = -100
        if classes:
            self._targets = self._targets[:, 0]
        self._classes = classes

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._tokens[index], self._targets[index]


class Classes(nn.Module):
    """Logits `[batch, 5, 11]` of tokens, or `[batch, 11]` of samples."""

    def __init__(self, classes: bool) -> None:
        super().__init__()
        self.embed, self.head, self._classes = nn.Embedding(11, 6), nn.Linear(6, 11), classes

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens).tanh()
        logits: torch.Tensor = self.head(hidden.mean(1) if self._classes else hidden)
        return logits


def train_masked(plan: str, addresses: Any, classes: bool) -> dict[str, Any]:
    """Train on samples with few targets, two micro-batches a worker; see `train`."""
    torch.manual_seed(2)
    return trained(
        Trainer(
            Classes(classes),
            Masked(classes),
            f"{plan},microbatch=2",
            batch=8,
            steps=STEPS,
            optimizer=OptimizerConfig(learning_rate=1e-2, clip=1.0, skip=0),
            runtime=Runtime(servers=None if addresses is None else Servers(addresses, "word", timeout=120)),
        )
    )


def train(plan: str, addresses: Any, clip: float | None) -> dict[str, Any]:
    """Train as one rank; return what each step reported, and the last weights."""
    torch.manual_seed(2)
    return trained(
        Trainer(
            nn.Sequential(nn.Linear(16, 32), nn.Dropout(0.5), nn.Tanh(), nn.Linear(32, 2)),
            Pairs(),
            plan,
            batch=8,
            steps=STEPS,
            loss=nn.functional.mse_loss,
            optimizer=OptimizerConfig(learning_rate=1e-2, clip=clip),
            runtime=Runtime(servers=None if addresses is None else Servers(addresses, "word", timeout=120)),
        )
    )


def trained(trainer: Trainer) -> dict[str, Any]:
    """Train to the end; return what each step reported, and the last weights."""
    results = []
    while trainer.step_count < STEPS:
        results.append(trainer.step())
    told = {
        "loss": [each.loss for each in results],
        "gradient_norm": [each.gradient_norm for each in results],
        "worker": trainer.exchange.worker,
        "skipped": trainer.skips.total,
    }
    trainer.exchange.leave()
    trainer.close()
    return {**told, "weights": [each.detach().clone() for each in trainer.parallel.module.parameters()]}


def train_served(
    plan: str, workers: int, servers: int, *given: Any, job: Callable[..., Any] = train
) -> list[dict[str, Any]]:
    """Train with workers that are processes, and servers that are threads; return what the workers tell."""
    here = [Server(index, "word") for index in range(servers)]
    for each in here:
        threading.Thread(target=each.run, daemon=True).start()
    addresses = [each.address for each in here]
    pools = [RankPool() for _ in range(workers)]
    try:
        with ThreadPoolExecutor(workers) as threads:
            started = [threads.submit(pool.run, job, 1, plan, addresses, *given) for pool in pools]
            told = [each.result()[0] for each in started]
    finally:
        for pool in pools:
            pool.close()
        for each in here:
            each.close()
    return sorted(told, key=lambda each: each["worker"])
