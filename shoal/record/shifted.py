"""A recorder of a rank whose process group is a part of all ranks."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import final

from shoal.record.recorder import OpenSpan, Recorder
from shoal.timeline.span import Kind, Lane


@final
class ShiftedRecorder(Recorder):
    """Record spans with ranks of groups that count from another rank.

    Args:
        recorder: The recorder of this rank.
        first: Number of the group's rank 0 among all ranks.
    """

    def __init__(self, recorder: Recorder, first: int) -> None:
        self._recorder = recorder
        self._first = first

    def span(
        self,
        kind: Kind,
        name: str = "",
        *,
        lane: Lane = Lane.COMPUTE,
        bytes: int = 0,
        group: tuple[int, ...] = (),
        purpose: str = "",
    ) -> AbstractContextManager[None]:
        """See `Recorder.span`."""
        among_all = self._of(group)
        return self._recorder.span(kind, name, lane=lane, bytes=bytes, group=among_all, purpose=purpose)

    def open(
        self,
        kind: Kind,
        name: str = "",
        *,
        lane: Lane,
        bytes: int = 0,
        group: tuple[int, ...] = (),
        purpose: str = "",
    ) -> OpenSpan:
        """See `Recorder.open`."""
        among_all = self._of(group)
        return self._recorder.open(kind, name, lane=lane, bytes=bytes, group=among_all, purpose=purpose)

    def step(self, index: int) -> AbstractContextManager[None]:
        """See `Recorder.step`."""
        return self._recorder.step(index)

    def close(self) -> None:
        """See `Recorder.close`."""
        self._recorder.close()

    def _of(self, group: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(rank + self._first for rank in group)
