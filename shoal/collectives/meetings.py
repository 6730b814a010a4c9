"""Short messages from every rank to every other, beside the group's collectives and their order."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta

import torch

from shoal.collectives.native import NativeGroup

_TAG = -2
"""Tag of these messages: those of users are not negative, and a monitored barrier has -1."""


class Meetings:
    """The messages of one group. What a rank tells is heard in the order in which it was told.

    Args:
        native: The group.
    """

    def __init__(self, native: NativeGroup) -> None:
        self._native = native
        self._others = [rank for rank in range(native.size) if rank != native.rank]

    def tell(self, numbers: Sequence[int]) -> None:
        """Tell all other ranks some numbers, without a wait."""
        told = torch.tensor(numbers, dtype=torch.int64)
        for rank in self._others:
            self._native.send(told, rank, _TAG)

    def hear(self, count: int, seconds: float) -> dict[int, list[int]]:
        """Return the `count` numbers that each other rank has told.

        Raises:
            CollectiveError: A rank does not tell them in time, or is lost.
        """
        return {
            rank: heard.tolist()
            for rank, heard in self._receive(dict.fromkeys(self._others, count), torch.int64, seconds).items()
        }

    def exchange(self, given: Sequence[bytes], seconds: float) -> list[bytes]:
        """Give each rank one of the texts; return those that the ranks gave to this one, and its own.

        Raises:
            CollectiveError: A rank does not come in time, or is lost.
        """
        self.tell([len(each) for each in given])
        lengths = {rank: told[self._native.rank] for rank, told in self.hear(len(given), seconds).items()}
        sent = [self._native.send(_as_tensor(given[rank]), rank, _TAG) for rank in self._others]
        texts = list(given)
        for rank, text in self._receive(lengths, torch.uint8, seconds).items():
            texts[rank] = bytes(text.tolist())
        for work in sent:
            work.wait()
        return texts

    def _receive(self, counts: dict[int, int], dtype: torch.dtype, seconds: float) -> dict[int, torch.Tensor]:
        deadline = time.monotonic() + seconds
        heard = {rank: torch.empty(count, dtype=dtype) for rank, count in counts.items()}
        works = [self._native.receive(each, rank, _TAG, None) for rank, each in heard.items()]
        for work in works:
            work.wait(timedelta(seconds=max(deadline - time.monotonic(), 1e-3)))
        return heard


def _as_tensor(text: bytes) -> torch.Tensor:
    return torch.tensor(list(text), dtype=torch.uint8)
