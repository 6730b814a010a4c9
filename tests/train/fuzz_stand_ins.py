"""A random training on ranks, through `shoal.Trainer`; with servers, workers are pools of ranks."""

from __future__ import annotations

import hashlib
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from fuzz_cases import BATCH, STEPS, Case
from fuzz_models import RandomSamples, build
from fuzz_reference import CLIP, DECAY, FINAL, OPTIMIZERS, SEED, WARMUP
from torch import Tensor

from shoal.parallel import LocalUpdates
from shoal.parallel.exchange.merge_schedule import fragments_of
from shoal.parallel.exchange.server import Server, Servers
from shoal.spec.plan import Plan
from shoal.testing import RankPool
from shoal.train import OptimizerConfig, Runtime, Trainer

__all__ = ["Pools", "Told", "run_case"]

LIMIT = 90.0
"""Seconds for a phase, which takes one on an idle machine: ranks that wait for ever are a difference."""


@dataclass
class Told:
    """What a rank tells of a phase.

    Attributes:
        worker: Number of its worker.
        losses, norms: Of each step.
        weights: The whole model, on the first rank.
        parts: Digest of each part that it holds, by the part.
        fragments: Fragment of each element, by name, on the first rank.
        checkpoint: What was saved; "" for nothing.
    """

    worker: int
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    parts: dict[str, str] = field(default_factory=dict)
    fragments: dict[str, Tensor] = field(default_factory=dict)
    checkpoint: str = ""


def phase(case: Case, plan: str, addresses: Any, checkpoint: str, folder: Path, save: bool) -> Told:
    """Train under a Plan, from a checkpoint if there is one, to the end; save on the way if asked."""
    trainer = _trainer(case, plan, addresses)
    told = Told(0)
    if checkpoint:
        trainer.load(Path(checkpoint))
    if isinstance(trainer.optimizer, LocalUpdates):
        told.fragments = _fragment_of_each(trainer)
    while trainer.step_count < STEPS:
        result = trainer.step()
        told.losses.append(result.loss)
        told.norms.append(result.gradient_norm)
        if save and not told.checkpoint and trainer.step_count >= case.saved:
            if trainer.exchange.leads:
                told.checkpoint = str(trainer.save(folder))
            told.checkpoint = told.checkpoint or "by another worker"
            if addresses is not None and case.other:
                break  # what others do after it is not compared
    told.worker = trainer.exchange.worker if addresses else trainer.parallel.axes.workers.index
    told.weights = trainer.parallel.full_state_dict()
    told.parts = _digests(trainer)
    if addresses is not None:
        trainer.exchange.retire()
        trainer.exchange.leave()
    trainer.close()
    return told


def _trainer(case: Case, plan: str, addresses: Any) -> Trainer:
    rate, momentum, warmup = case.outer
    name = case.settings["optimizer"]
    config = OptimizerConfig(
        name=name,
        warmup=WARMUP,
        final=FINAL,
        weight_decay=DECAY,
        clip=CLIP if case.settings["clip"] == "on" else None,
        outer_rate=rate,
        outer_momentum=momentum,
        outer_warmup=warmup,
        **OPTIMIZERS[name],
    )
    return Trainer(
        build(case),
        RandomSamples(case.data),
        plan,
        batch=BATCH,
        steps=STEPS,
        seed=SEED,
        optimizer=config,
        runtime=Runtime(
            compare_replicas=1,
            servers=None if addresses is None else Servers(addresses, "word", timeout=60),
        ),
    )


def _fragment_of_each(trainer: Trainer) -> dict[str, Tensor]:
    """Return in which fragment each element is merged: -1 if in none."""
    parallel = trainer.parallel
    cut = fragments_of(parallel, parallel.plan.exchanged.fragments)
    kept = [each.local.clone() for each in parallel.owned]
    for each in parallel.owned:
        each.local.fill_(-1)
    for fragment, owned in enumerate(cut):
        for each in owned:
            each.local.fill_(fragment)
    found = parallel.full_state_dict()
    for each, before in zip(parallel.owned, kept, strict=True):
        each.local.copy_(before)
    parallel.changed()
    return found


def _digests(trainer: Trainer) -> dict[str, str]:
    return {
        f"{each.name}[{each.start}:{each.stop}] of {each.cut}": hashlib.sha256(
            each.local.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        ).hexdigest()
        for each in trainer.parallel.owned
    }


class Pools:
    """Ranks that live on between cases: one pool for trainings in step, one for each worker of servers."""

    def __init__(self) -> None:
        self._pools: list[RankPool] = []

    def run(self, case: Case, plan: str, *given: Any) -> list[Told]:
        """Run a phase on all ranks of a Plan; return what each tells, by worker and rank."""
        parsed = Plan.parse(plan)
        if not parsed.exchanged.is_served:
            return self._pool(0).run(phase, parsed.ranks, case, plan, None, *given, timeout=LIMIT)
        here = [Server(index, "word") for index in range(parsed.exchanged.processes)]
        for each in here:
            threading.Thread(target=each.run, daemon=True).start()
        addresses = [each.address for each in here]
        workers, ranks = parsed.replicas, parsed.ranks // parsed.replicas
        try:
            with ThreadPoolExecutor(workers) as threads:
                started = [
                    threads.submit(pool.run, phase, ranks, case, plan, addresses, *given, timeout=LIMIT)
                    for pool in [self._pool(number) for number in range(workers)]
                ]
                told = [each.result() for each in started]
        finally:
            for each in here:
                each.close()
        return [each for worker in sorted(told, key=lambda ranks: ranks[0].worker) for each in worker]

    def close(self) -> None:
        """End all ranks."""
        for pool in self._pools:
            pool.close()

    def _pool(self, number: int) -> RankPool:
        while len(self._pools) <= number:
            self._pools.append(RankPool("shoal"))
        return self._pools[number]


def run_case(pools: Pools, case: Case, folder: Path) -> list[list[Told]]:
    """Run the phases of a case; return what ranks tell of each.

    The first phase goes on to the end after it has saved, so that the second, under the same Plan, can be
    compared with it.
    """
    first = pools.run(case, case.plan, "", folder, bool(case.saved))
    if not case.other:
        return [first]
    (checkpoint,) = {each.checkpoint for each in first if each.checkpoint not in ("", "by another worker")}
    return [first, pools.run(case, case.other, checkpoint, folder, False)]
