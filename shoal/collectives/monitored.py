"""A barrier whose error names the ranks that did not come."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist

from shoal.errors import CollectiveError

_TAG = -1
"""Tag of the barrier's messages; tags of `torch.distributed` are not negative."""

_PASSED = -1


class Messages(Protocol):
    """A group that can send messages, such as a `NativeGroup`."""

    rank: int
    size: int

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> dist.Work:
        """Begin to send a contiguous tensor."""

    def receive(
        self, tensor: torch.Tensor, peer: int, tag: int, finish: Callable[[], None] | None
    ) -> dist.Work:
        """Begin to receive a contiguous tensor."""


class MonitoredBarrier:
    """A barrier in which rank 0 receives a token from every rank, then tells every rank who is missing.

    If the barrier fails, the group goes on. A receive that got nothing stays for the next barrier, because a
    late rank still sends its token.
    """

    def __init__(self) -> None:
        self._receives: dict[int, tuple[dist.Work, torch.Tensor]] = {}

    def __call__(self, group: Messages, seconds: float, wait_all_ranks: bool) -> None:
        """Return when all ranks have called it.

        Args:
            group: The group, the same in every call.
            seconds: Time limit for all ranks to come.
            wait_all_ranks: Whether rank 0 waits for all ranks and then names every missing one, instead of
                only the first.

        Raises:
            CollectiveError: Not all ranks came in time.
        """
        if group.rank == 0:
            self._collect(group, seconds, wait_all_ranks)
        else:
            self._report(group, seconds)

    def _collect(self, group: Messages, seconds: float, wait_all_ranks: bool) -> None:
        deadline = time.monotonic() + seconds
        others = range(1, group.size)
        for rank in others:
            self._expect(group, rank)
        missing: dict[int, CollectiveError] = {}
        for rank in others:
            left = deadline - time.monotonic()
            if left <= 0 and not missing:
                raise CollectiveError(
                    f"Rank 0 timed out in monitoredBarrier after {seconds:g} s", rank=rank, fault="timeout"
                )
            try:
                self._take(rank, max(left, 1e-3))
            except CollectiveError as failure:
                missing[rank] = failure
                if not wait_all_ranks:
                    break
        answer = next(iter(missing), _PASSED)
        for rank in others:
            if self._has_come(rank):
                _send(group, rank, answer)
        if missing:
            names = ("Ranks " if wait_all_ranks else "Rank ") + ", ".join(map(str, missing))
            first, cause = next(iter(missing.items()))
            raise CollectiveError(
                f"{names} failed to pass monitoredBarrier in {seconds:g} s", rank=first, fault=cause.fault
            ) from cause

    def _report(self, group: Messages, seconds: float) -> None:
        self._expect(group, 0)
        _send(group, 0, group.rank)
        met_trouble = (
            f"Rank {group.rank} successfully reached monitoredBarrier, but received errors while waiting for "
            "send/recv from rank 0"
        )
        try:
            # Wait a little longer than rank 0, because its answer says more.
            missing = self._take(0, seconds + 1)
        except CollectiveError as failure:
            raise CollectiveError(f"{met_trouble}: {failure}", rank=0, fault=failure.fault) from failure
        if missing != _PASSED:
            raise CollectiveError(
                f"{met_trouble}: rank {missing} did not come", rank=missing, fault="timeout"
            )

    def _expect(self, group: Messages, rank: int) -> None:
        if rank not in self._receives:
            token = torch.empty(1, dtype=torch.int64)
            self._receives[rank] = group.receive(token, rank, _TAG, None), token

    def _has_come(self, rank: int) -> bool:
        if rank in self._receives and self._receives[rank][0].is_success():
            del self._receives[rank]
        return rank not in self._receives

    def _take(self, rank: int, seconds: float) -> int:
        work, token = self._receives[rank]
        work.wait(timedelta(seconds=seconds))
        del self._receives[rank]
        return int(token)


def _send(group: Messages, rank: int, number: int) -> None:
    # No wait: a few bytes leave at once.
    group.send(torch.tensor([number]), rank, _TAG)
