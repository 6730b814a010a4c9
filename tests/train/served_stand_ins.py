"""Workers of a Trainer that servers join, each a process of its own, and the same training in step."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import nn

from shoal.server import Server, Servers
from shoal.testing import RankPool
from shoal.train import OptimizerConfig, Trainer

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


def train(plan: str, addresses: Any, clip: float | None) -> dict[str, Any]:
    """Train as one rank; return what each step reported, and the last weights."""
    torch.manual_seed(2)
    trainer = Trainer(
        nn.Sequential(nn.Linear(16, 32), nn.Dropout(0.5), nn.Tanh(), nn.Linear(32, 2)),
        Pairs(),
        plan,
        batch=8,
        steps=STEPS,
        loss=nn.functional.mse_loss,
        optimizer=OptimizerConfig(learning_rate=1e-2, clip=clip),
        servers=None if addresses is None else Servers(addresses, "word", timeout=120),
    )
    results = []
    while trainer.step_count < STEPS:
        results.append(trainer.step())
    told = {
        "loss": [each.loss for each in results],
        "gradient_norm": [each.gradient_norm for each in results],
        "worker": trainer.workers.number if addresses else 0,
    }
    trainer.workers.leave()
    trainer.close()
    return {**told, "weights": [each.detach().clone() for each in trainer.parallel.module.parameters()]}


def train_served(plan: str, workers: int, servers: int, clip: float | None = None) -> list[dict[str, Any]]:
    """Train with workers that are processes, and servers that are threads; return what the workers tell."""
    here = [Server(index, "word") for index in range(servers)]
    for each in here:
        threading.Thread(target=each.run, daemon=True).start()
    addresses = [each.address for each in here]
    pools = [RankPool() for _ in range(workers)]
    try:
        with ThreadPoolExecutor(workers) as threads:
            started = [threads.submit(pool.run, train, 1, plan, addresses, clip) for pool in pools]
            told = [each.result()[0] for each in started]
    finally:
        for pool in pools:
            pool.close()
        for each in here:
            each.close()
    return sorted(told, key=lambda each: each["worker"])
