"""Runs whose disk fails or is slow, and Trainers that save beside their steps; for the ranks of tests."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from io import FileIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from run_stand_ins import Ended, shoal, shoal_as_rank
from torch import nn

from shoal.checkpoint import Background, RealFiles, SingleProcess, checkpoints
from shoal.train import FOLDER, CheckpointConfig, OptimizerConfig, Trainer, checkpointer
from shoal.train.save_policy import SavePolicy

WRITE, WAIT, BEGIN = RealFiles.write, Background.wait, Background.begin


def shoal_with(
    trouble: str, arguments: list[str], folder: Path, port: int | None = None, rank: int = 0
) -> Ended:
    """Runs the program, with trouble on one rank."""
    own = dist.get_rank() if dist.is_initialized() else 0
    steps_take_nothing = patch.object(checkpointer, "memory_of_steps", lambda: (0, 0))
    with steps_take_nothing, TROUBLES[trouble]() if own == rank else contextlib.nullcontext():
        return shoal(arguments, folder) if port is None else shoal_as_rank(arguments, folder, port)


def failing_disk() -> contextlib.AbstractContextManager[object]:
    """Shards of step 4 cannot be written."""

    def write(self: RealFiles, file: FileIO, data: memoryview) -> None:
        if re.search(r"step-00000004\.\d+\.tmp/rank", str(file.name)):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        WRITE(self, file, data)

    return patch.object(RealFiles, "write", write)


@contextlib.contextmanager
def slow_disk() -> Iterator[None]:
    """A save beside the training takes until training waits for it, and a moment longer."""
    is_waited_for = threading.Event()

    def sync(self: RealFiles, file: FileIO) -> None:
        if threading.current_thread().name == "shoal save":
            is_waited_for.wait(120)
            time.sleep(0.15)

    def wait(self: Background, seconds: float | None = None) -> None:
        is_waited_for.set()
        WAIT(self, seconds)

    def begin(self: Background, *arguments: object) -> None:
        is_waited_for.clear()
        BEGIN(self, *arguments)

    with (
        patch.object(RealFiles, "sync", sync),
        patch.object(Background, "wait", wait),
        patch.object(Background, "begin", begin),
    ):
        yield


def slow_disk_and_a_signal() -> contextlib.AbstractContextManager[object]:
    """While the first shard is written, the process is asked to stop."""
    signals = iter([signal.SIGTERM])

    def sync(self: RealFiles, file: FileIO) -> None:
        for number in signals:
            os.kill(os.getpid(), number)
        time.sleep(0.15)

    return patch.object(RealFiles, "sync", sync)


def little_memory() -> contextlib.AbstractContextManager[object]:
    return patch.object(checkpointer, "available_memory", lambda: 10_000)


def little_beside_steps() -> contextlib.AbstractContextManager[object]:
    """All memory is free, and all but 10,000 bytes are what steps will take again."""
    free = 1 << 40
    return patch.multiple(
        checkpointer, available_memory=lambda: free, memory_of_steps=lambda: (free, free - 10_000)
    )


TROUBLES = {
    "failing disk": failing_disk,
    "slow disk": slow_disk,
    "slow disk and a signal": slow_disk_and_a_signal,
    "little memory": little_memory,
}


def frozen_trainer(folder: Path | None) -> Trainer:
    """A large layer that is not trained, and a small one that is."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 400), nn.Linear(400, 6))
    model[0].requires_grad_(False)
    x = torch.randn(32, 6, generator=torch.Generator().manual_seed(1))
    data = torch.utils.data.TensorDataset(x, x.sort().values)
    return Trainer(
        model, data, "dp=1", batch=8, steps=8, loss=F.mse_loss, optimizer=OptimizerConfig(), run=folder
    )


def policy_of_a_member(disk: Path, config: CheckpointConfig, said: list[str]) -> tuple[Trainer, SavePolicy]:
    """A Trainer of one rank, and when it saves as a member that stays if others are lost."""
    trainer = frozen_trainer(None)
    membership: Any = SimpleNamespace(peers=list, leads_next=lambda seconds: True)
    policy = SavePolicy(trainer, config, disk, {}, SingleProcess(), said.append, membership=membership)
    return trainer, policy


def step(trainer: Trainer, policy: SavePolicy) -> None:
    policy.stepped(trainer.step().seconds, is_made=True)


def save_without_memory(folder: Path) -> tuple[list[str], list[str]]:
    """Saves before members change, on a host that has no file system in memory."""
    said = list[str]()
    trainer, policy = policy_of_a_member(folder, CheckpointConfig(every=1, keep=2), said)
    for before in range(3):
        step(trainer, policy)
        policy.save_if_due(before)
    policy.save_for_others()
    on_change = [path.name for path in checkpoints(folder)]
    step(trainer, policy)
    policy.save_replica(0.0)
    trainer.close()
    assert not [each for each in said if "warning" in each]
    return on_change, [path.name for path in checkpoints(folder)]


def save_in_memory(folder: Path) -> tuple[list[str], list[str], list[str]]:
    """Saves in memory: without room for files, before members change, and if nobody says what is free."""
    said, memory, disk = list[str](), folder / "memory", folder / "disk"
    with patch.dict(os.environ, {FOLDER: str(memory)}):
        trainer, policy = policy_of_a_member(disk, CheckpointConfig(every=0, memory=1), said)
    step(trainer, policy)
    with little_beside_steps():
        policy.save_if_due(0)
        step(trainer, policy)
        policy.save_if_due(1)
        policy.save_for_others()
        step(trainer, policy)
        policy.save_replica(0.0)
    step(trainer, policy)
    with patch.object(checkpointer, "available_memory", lambda: None):
        policy.save_if_due(3)
    trainer.finish_saving()
    step(trainer, policy)
    policy.save_for_others()
    step(trainer, policy)
    policy.save_replica(0.0)
    trainer.close()
    return said, [path.name for path in checkpoints(disk)], [path.name for path in checkpoints(memory)]


def save_beside_steps(folder: Path) -> tuple[list[str], list[float]]:
    """Saves after two steps, trains on, and loads: the state is that of the copy."""
    trainer = frozen_trainer(folder)
    told: list[str] = []
    for _ in range(2):
        trainer.step()
    before = trainer.parallel.module[1].weight.detach().clone()
    begun = trainer.save_in_background(told=lambda ended: told.append(f"{ended.path} {ended.error}"))
    assert begun.in_step == ""
    for _ in range(3):
        trainer.step()
    trainer.finish_saving()
    path = trainer.save()
    assert len(told) == 1
    trainer.load(Path(told[0].split()[0]))
    assert trainer.step_count == 2
    assert torch.equal(trainer.parallel.module[1].weight, before)
    trainer.close()
    constant = [each / "rank-00000-constant.safetensors" for each in (Path(told[0].split()[0]), path)]
    return [path.name, *told], [each.stat().st_ino for each in constant]
