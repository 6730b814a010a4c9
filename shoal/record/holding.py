"""Held steps: which they are, and how long the device is held before each span.

The events of a span do not tell how long the device idled within it because the host had not given the next
kernel yet. In a held step the device is kept busy before each span that computes, for longer than the host
took to give this span in the step before. Then all work of the span is there when the device comes to it, and
its events tell the work's own time: `shoal.timeline.launch` compares the other steps with it.
"""

from __future__ import annotations

from typing import final

from shoal.record.device import DeviceEvents
from shoal.timeline.launch import WORK

_FIRST = 3
"""The first step of a process that is held: those before warm up."""

_MARGIN = 1.5
"""A hold in times of what the host took for the span: a hold is not exact."""

_LONGEST = 0.1
"""Seconds. CUDA takes about 1,024 launches ahead of the device, and these take the host 10 to 20 ms."""


@final
class Holding:
    """Hold the device in the 3rd, 30th, 300th... step of a process.

    Args:
        events: The events of the device.

    Attributes:
        is_on: Whether the present step is held.
        is_next: Whether the next step is; then the host's times of the present one are noted.
    """

    def __init__(self, events: DeviceEvents) -> None:
        self._events = events
        self._steps = 0
        self._host_seconds: dict[tuple[str, str], float] = {}
        self.is_on = self.is_next = False

    def begin_step(self) -> None:
        """Note that a step begins."""
        self._steps += 1
        self.is_on, self.is_next = _is_held(self._steps), _is_held(self._steps + 1)

    def end_step(self) -> None:
        """Note that the step has ended."""
        self.is_on = self.is_next = False

    def before(self, kind: str, name: str) -> None:
        """Hold the device before a span of this kind and name, in a step that is held."""
        if took := self._host_seconds.get((kind, name)):
            self._events.hold(min(_MARGIN * took, _LONGEST))

    def note(self, kind: str, name: str, seconds: float) -> None:
        """Note for how long the host gave the device a span of this kind and name."""
        if kind in WORK:
            self._host_seconds[kind, name] = seconds


def _is_held(count: int) -> bool:
    while count > _FIRST and count % 10 == 0:
        count //= 10
    return count == _FIRST
