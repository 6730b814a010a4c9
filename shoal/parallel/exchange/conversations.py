"""Conversations with parameter servers, as the Timeline shows them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import final

from shoal.parallel.communication import Axis
from shoal.record import NullRecorder, Recorder
from shoal.timeline import Kind, Lane, Purpose


@final
class Conversations:
    """Record the conversations of a rank with the servers.

    Args:
        recorder: Recorder of spans; None for none.
        world: All ranks of the worker.
    """

    def __init__(self, recorder: Recorder | None, world: Axis) -> None:
        self._recorder = NullRecorder() if recorder is None else recorder
        self._group = (world.members[world.index],)

    @contextmanager
    def about(self, name: str, bytes: int) -> Iterator[None]:
        """Record a conversation, for which compute waits."""
        group, purpose = self._group, Purpose.DATA
        lane = Lane.COMMUNICATION
        with (
            self._recorder.span(Kind.COLLECTIVE, name, lane=lane, bytes=bytes, group=group, purpose=purpose),
            self._recorder.span(Kind.WAIT, name, bytes=bytes, group=group, purpose=purpose),
        ):
            yield
