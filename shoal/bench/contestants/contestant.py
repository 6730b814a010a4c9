"""The interface of a contestant: where its buffers are, and how it does a collective on them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from shoal.bench.collective import Collective

Operation = Callable[[], object]
"""Function that does a collective once, on buffers that it holds."""


class UnsupportedError(Exception):
    """The contestant does not have this collective, type or operator; raised before anything is sent."""


@dataclass(frozen=True, slots=True)
class Buffers:
    """The buffers that one rank gives and gets: one-dimensional, contiguous, one tensor if in place."""

    input: Tensor
    output: Tensor

    def zero(self) -> None:
        """Fill both with zeros, which no number of reductions changes."""
        self.input.zero_()
        self.output.zero_()


class Contestant(ABC):
    """One implementation of the collectives.

    Attributes:
        memory: Kind of memory of its buffers. Contestants with the same kind can share buffers.
        communicates: Whether its results are those of the collective, so that they can be checked.
    """

    memory: str = "cpu"
    communicates: bool = True

    @abstractmethod
    def empty(self, elements: int, like: Tensor) -> Tensor:
        """Return a buffer with that many elements of the type of `like`."""

    @abstractmethod
    def operation(self, collective: Collective, buffers: Buffers, op: str) -> Operation:
        """Prepare a collective, and return a function that does it.

        Args:
            collective: The collective.
            buffers: This rank's buffers, made by `empty`.
            op: Name of the operator.

        Raises:
            UnsupportedError: The contestant does not have it.
        """

    @abstractmethod
    def finish(self) -> None:
        """Wait until all operations are complete."""

    @abstractmethod
    def version(self) -> str:
        """Return name and version of the library, for the facts under the table."""
