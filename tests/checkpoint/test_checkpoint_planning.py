"""What ranks tell each other to save, counted."""

from __future__ import annotations

import contextlib
import errno
import os
import pickle
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_stand_ins import StoppingFiles, same_bits, share, wholes
from rank_stand_ins import on_ranks

from shoal.checkpoint import (
    Coordinator,
    FileRecord,
    Piece,
    Saver,
    SingleProcess,
    TensorRecord,
    checkpoints,
    load,
    verify,
)
from shoal.checkpoint.manifest import merge
from shoal.checkpoint.save import Part
from shoal.checkpoint.shard import describe
from shoal.errors import CheckpointError


class Simulated:
    """A Coordinator of rank 0, where the other ranks tell what they were given to tell."""

    rank = 0

    def __init__(self, told: list[Any]) -> None:
        self.size, self.told = len(told), told

    def all_gather_object(self, value: Any) -> list[Any]:
        return [value] * self.size

    def gather_object(self, value: Any) -> list[Any]:
        return [value, *self.told[1:]]


def test_what_ranks_plan_grows_with_the_shards_of_one_and_is_done_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A flat bucket of 200 tensors is cut over ranks, as data parallelism does; nothing else is written."""
    tensors, elements = 200, 10_240
    merged: list[int] = []

    def counting(parts: Iterable[Mapping[str, TensorRecord]]) -> dict[str, TensorRecord]:
        records = merge(parts)
        merged.append(sum(len(record.pieces) for record in records.values()))
        return records

    monkeypatch.setattr(sys.modules[Saver.__module__], "merge", counting)
    for ranks in (64, 1024):
        told = []
        for rank in range(ranks):
            file = f"rank-{rank:05d}.safetensors"
            first, last = (tensors * elements * place // ranks for place in (rank, rank + 1))
            pieces = []
            for number in range(first // elements, -(-last // elements)):
                start, stop = max(first - number * elements, 0), min(last - number * elements, elements)
                pieces.append(Piece(f"t{number}", (elements,), start, stop, torch.zeros(stop - start), None))
            files = {file: FileRecord(1, "")}
            told.append((Part(files, describe((file, piece) for piece in pieces)), Part(files, None), pieces))
        sizes = [len(pickle.dumps(part)) for part, _, _ in told]
        assert max(sizes) < 250 * (tensors // ranks + 3)  # of a rank: a line for each of its pieces
        saver = Saver()
        for turn in (0, 1, 1):
            saver.save(tmp_path, ranks, told[0][2], {}, Simulated([parts[turn] for parts in told]))
        assert len(merged) == 1
        assert merged.pop() <= tensors + ranks
        assert len(pickle.dumps(told[0][1])) < 250


class Counting:
    """A Coordinator that counts the bytes of what a rank tells rank 0."""

    def __init__(self, ranks: Coordinator) -> None:
        self.ranks, self.rank, self.size = ranks, ranks.rank, ranks.size
        self.told: list[int] = []

    def all_gather_object(self, value: Any) -> list[Any]:
        return self.ranks.all_gather_object(value)

    def gather_object(self, value: Any) -> list[Any] | None:
        self.told.append(len(pickle.dumps(value)))
        return self.ranks.gather_object(value)


def test_ranks_tell_their_tensors_again_only_if_these_changed_or_a_save_failed(tmp_path: Path) -> None:
    many = {f"model/{number}": torch.full((8,), float(number)) for number in range(100)}
    more = {**many, "model/last": torch.ones(8)}

    def run(ranks: Coordinator) -> list[int]:
        failing = StoppingFiles()
        saver, counting = Saver(failing), Counting(ranks)
        for step, named in enumerate((many, many, more, more, more, more)):
            if step == 4 and ranks.rank == 1:
                failing.at, failing.stop = failing.places, disk_fails
            with contextlib.suppress(CheckpointError):
                saver.save(tmp_path, step, share(named, ranks.rank, 2), {}, counting)
        return counting.told

    for told in on_ranks(2, run):
        assert [number > 5000 for number in told] == [True, False, True, False, False, True]
    assert [path.name for path in checkpoints(tmp_path)] == [
        f"step-0000000{step}" for step in (5, 3, 2, 1, 0)
    ]
    for path in checkpoints(tmp_path):
        named = many if path.name.endswith(("0", "1")) else more
        verify(path)
        read = {name: torch.zeros(8) for name in named}
        load(path, wholes(read), SingleProcess())
        assert same_bits(read, named)


def disk_fails() -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO))
