"""What a recorder needs of a device whose work runs on streams, and is timed by events on them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from typing import Any


class DeviceEvents(ABC):
    """Events on the streams of one device; nothing here waits for the device.

    Work on one stream runs in order, and streams run beside one another. An event that is recorded on a
    stream completes when the stream comes to it.
    """

    @abstractmethod
    def new_event(self) -> Any:
        """Return an event that can be recorded, again and again."""

    @abstractmethod
    def record(self, event: Any) -> None:
        """Record the event on the calling thread's current stream."""

    @abstractmethod
    def record_alone(self, event: Any) -> None:
        """Record the event on a stream that has no work, so that it completes at once."""

    @abstractmethod
    def is_complete(self, event: Any) -> bool:
        """Return whether the stream has come to the event."""

    @abstractmethod
    def seconds_between(self, first: Any, second: Any) -> float:
        """Return the seconds from one complete event to a later one."""

    @abstractmethod
    def beside(self, name: str) -> AbstractContextManager[object]:
        """Return a context in which a stream of this name is the current one; it is made at first use."""

    @abstractmethod
    def follow(self, name: str) -> None:
        """Make the stream of this name wait for what the current stream has been given."""

    @abstractmethod
    def hold(self, seconds: float) -> None:
        """Keep the current stream busy for about as long, so that the host gets ahead of it."""
