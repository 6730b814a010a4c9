"""Ranks that are killed while they save beside the training leave the last checkpoint."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from checkpoint_stand_ins import (
    fork,
    reap,
    share,
)

from shoal.checkpoint import (
    Background,
    Piece,
    Saver,
    SingleProcess,
    Staging,
    StoreCoordinator,
    latest,
    load,
)


def kill_at(delay: float, both: bool, folder: Path) -> tuple[int, int]:
    """Kills one or both of two ranks that save without end; returns the steps of the last two that are whole.

    Each checkpoint is full of its own step. Rank 0 tells in a file, before each save, of the one before.
    """
    directory, told = folder / "saved", folder / "told"

    def train(rank: int) -> None:
        ranks = StoreCoordinator(dist.FileStore(str(folder / "store"), 2), rank, 2)
        background, staging = Background(Saver(), ranks), Staging()
        constant = torch.arange(1000.0)
        for step in range(1, 10**6):
            values = {"model/a": torch.full((40_000,), float(step)), "optimizer/b": torch.full((7,), step)}
            pieces = [*share(values, rank, 2), *share_constant(constant, rank)]
            staging.reserve(pieces)
            background.begin(directory, step, staging.copy(pieces), {}, keep=2)
            background.wait()
            ended = background.take()
            assert ended is not None
            assert ended.error is None
            if rank == 0:
                told.write_text(str(step))

    children = [fork(lambda r=rank: train(r)) for rank in range(2)]
    try:
        until = time.monotonic() + 120
        while not (told.exists() and told.read_text()) and time.monotonic() < until:
            time.sleep(0.01)
        time.sleep(delay)
    finally:
        for child in children[: 1 + both]:
            os.kill(child, signal.SIGKILL)
        time.sleep(0 if both else 0.02)  # the other one goes on as far as it can
        for child in children[1 + both :]:
            os.kill(child, signal.SIGKILL)
        assert all(reap(child) == -signal.SIGKILL for child in children)
    sound = int(told.read_text() or 0)
    found = latest(directory, SingleProcess(), pytest.fail)
    assert found is not None
    a, b, constant = torch.zeros(40_000), torch.zeros(7, dtype=torch.int64), torch.zeros(1000)
    wanted = [Piece.whole(n, t) for n, t in (("model/a", a), ("optimizer/b", b), ("fixed/c", constant))]
    load(found, wanted, SingleProcess())
    step = int(found.name.removeprefix("step-"))
    assert (a == step).all()
    assert (b == step).all()
    assert torch.equal(constant, torch.arange(1000.0))
    return sound, step


def share_constant(tensor: torch.Tensor, rank: int) -> list[Piece]:
    return [replace(piece, is_constant=True) for piece in share({"fixed/c": tensor}, rank, 2)]


def kill_at_random(times: int, folder: Path) -> None:
    generator = random.Random(7)
    for number in range(times):
        place = folder / str(number)
        place.mkdir()
        sound, step = kill_at(generator.uniform(0, 0.15), generator.random() < 0.5, place)
        assert step >= sound
        shutil.rmtree(place)


def test_ranks_that_are_killed_while_they_save_leave_the_last_checkpoint(tmp_path: Path) -> None:
    kill_at_random(5, tmp_path)


@pytest.mark.long
def test_ranks_that_are_killed_at_200_random_moments_leave_the_last_checkpoint(tmp_path: Path) -> None:
    kill_at_random(200, tmp_path)
