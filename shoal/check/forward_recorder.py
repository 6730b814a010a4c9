"""Finds from spans which micro-batch's forward is running."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, final

from shoal.plan.schedules import Action
from shoal.record import NullRecorder, OpenSpan, Recorder
from shoal.timeline import Kind


@final
class ForwardRecorder(Recorder):
    """Receives a Trainer's spans in one step, and knows which micro-batch's forward is running.

    In a pipeline the name of a forward's span is the schedule's action. Otherwise micro-batches come one
    after the other.

    Attributes:
        microbatch: Number of the micro-batch in the step; None outside of forwards.
    """

    def __init__(self) -> None:
        self.microbatch: int | None = None
        self._begun = 0
        self._nothing = NullRecorder()

    @contextmanager
    def span(self, kind: Kind, name: str = "", **fields: Any) -> Iterator[None]:
        """See `Recorder.span`."""
        if kind is not Kind.FORWARD:
            yield
            return
        self.microbatch = Action.parse(name).microbatch if name else self._begun
        self._begun += 1
        try:
            yield
        finally:
            self.microbatch = None

    def open(self, kind: Kind, name: str = "", **fields: Any) -> OpenSpan:
        """See `Recorder.open`."""
        return self._nothing.open(kind, name, **fields)

    def step(self, index: int) -> AbstractContextManager[None]:
        """See `Recorder.step`."""
        return self._nothing.step(index)

    def close(self) -> None:
        """See `Recorder.close`."""
