"""What a data-parallel strategy is given, and what it offers to the one who trains with it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import nn

from shoal.parallel.bucket import Fill, Owned
from shoal.parallel.communication import Axes

__all__ = ["Setup", "Strategy"]


@dataclass(frozen=True, slots=True)
class Setup:
    """What a strategy is given.

    Attributes:
        model: The whole model; its parameters' first values come from `fill`.
        blocks: Its repeated parts, in forward order.
        axes: What to communicate over.
        dtype: Type of the weights that compute.
        bucket: Bytes at which a bucket is closed.
        fill: Gives the first values.
    """

    model: nn.Module
    blocks: Sequence[nn.Module]
    axes: Axes
    dtype: torch.dtype
    bucket: int
    fill: Fill


class Strategy(ABC):
    """A way to share the states of training among data-parallel ranks.

    After a backward, the gradients of what each rank owns are averages over all data-parallel ranks; in a
    forward, the weights are what all owners' optimizers made of them.
    """

    @property
    @abstractmethod
    def owned(self) -> Sequence[Owned]:
        """What this rank's optimizer changes."""

    @abstractmethod
    def accumulate(self) -> AbstractContextManager[None]:
        """Within it, backward adds to the gradients and communicates no more than the strategy must."""

    @abstractmethod
    def gathered(self) -> AbstractContextManager[None]:
        """Within it, every parameter of the model is whole and up to date."""

    @abstractmethod
    def clear(self) -> None:
        """Forgets gradients that were accumulated and not yet given to what is owned."""

    @abstractmethod
    def changed(self) -> None:
        """To be called when owned parameters were changed other than after a backward."""
