"""What ranks tell each other to save: simulated ranks, counted."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.checkpoint import FileRecord, Piece, Saver, TensorRecord
from shoal.checkpoint.manifest import merge
from shoal.checkpoint.save import Part
from shoal.checkpoint.shard import describe


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
