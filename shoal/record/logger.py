"""The interface of all receivers of the values of a step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping


class Logger(ABC):
    """A receiver of the values of steps. One rank has one."""

    @abstractmethod
    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Take values of a step, by name; a step may come more than once, with other names."""

    @abstractmethod
    def close(self) -> None:
        """Write what is still buffered."""
