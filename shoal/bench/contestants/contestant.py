"""What a contestant is: where its buffers live, and how it does a collective on them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from shoal.bench.collective import Collective

__all__ = ["Buffers", "Contestant", "Operation", "UnsupportedError"]

Operation = Callable[[], object]
"""Does a collective once, on buffers that it holds."""


class UnsupportedError(Exception):
    """The contestant does not have this collective, type or operator; raised before anything is sent."""


@dataclass(frozen=True, slots=True)
class Buffers:
    """What one rank gives and gets: one-dimensional, contiguous, the same tensor where it is in place."""

    input: Tensor
    output: Tensor

    def zero(self) -> None:
        """Fills with what stays as it is, however often it is reduced."""
        self.input.zero_()
        self.output.zero_()


class Contestant(ABC):
    """One implementation of the collectives.

    Attributes:
        memory: Where its buffers live. Contestants that say the same can share them.
        communicates: Whether its results are those of the collective, so that they can be checked.
    """

    memory: str = "cpu"
    communicates: bool = True

    @abstractmethod
    def empty(self, elements: int, like: Tensor) -> Tensor:
        """A buffer with that many elements of the type of `like`."""

    @abstractmethod
    def operation(self, collective: Collective, buffers: Buffers, op: str) -> Operation:
        """Prepares a collective.

        Args:
            collective: Which.
            buffers: Of this rank; made by `empty`.
            op: Name of the operator.

        Raises:
            UnsupportedError: The contestant does not have it.
        """

    @abstractmethod
    def finish(self) -> None:
        """Waits until all that was started is done."""

    @abstractmethod
    def version(self) -> str:
        """Name and version of the library, for the facts under the table."""
