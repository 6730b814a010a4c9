"""Optimizers whose step is made by others, which have the state."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from shoal.errors import LayoutError
from shoal.parallel.owned import Owned

__all__ = ["Composed", "OptimizerPart", "copy_settings", "loss_of", "parts_of", "title_of"]

OptimizerPart = tuple[Optimizer, Sequence[Owned]]
"""An optimizer that has a state, and what this rank has of the parameters that the state is of.

`Owned.parameter` is the key of the state there."""


class Composed(Optimizer, ABC):
    """An optimizer that is used like any other, and leaves its step to others.

    `param_groups` count: their settings are given to those others before each step. `state` and
    `state_dict()` show what the others have on this rank, which a rank with the same Plan can load.

    Args:
        groups: As the optimizers of torch take them.
        defaults: Settings of groups that do not say otherwise.
    """

    def __init__(self, groups: Any, defaults: dict[str, Any]) -> None:
        super().__init__(groups, defaults)
        self.register_state_dict_pre_hook(lambda optimizer: self.show())
        self.register_load_state_dict_post_hook(lambda optimizer: self.take())

    @property
    @abstractmethod
    def title(self) -> str:
        """The names of the optimizers that make the step."""

    @abstractmethod
    def parts(self, owned: Sequence[Owned]) -> Sequence[OptimizerPart]:
        """The optimizers that make the step, each with what this rank has of its parameters."""

    @abstractmethod
    def show(self) -> None:
        """Makes `state` that of the optimizers that make the step."""

    @abstractmethod
    def take(self) -> None:
        """Gives these optimizers the `state` that was loaded."""


def parts_of(optimizer: Optimizer, owned: Sequence[Owned]) -> Sequence[OptimizerPart]:
    """The optimizers that have the state of `optimizer`: itself, as a rule, with what this rank owns."""
    return optimizer.parts(owned) if isinstance(optimizer, Composed) else [(optimizer, owned)]


def title_of(optimizer: Optimizer) -> str:
    """The name of an optimizer, or of those that make its step."""
    return optimizer.title if isinstance(optimizer, Composed) else type(optimizer).__name__


def copy_settings(source: Sequence[Mapping[str, Any]], target: Sequence[dict[str, Any]]) -> None:
    """Gives groups all that other groups hold beside parameters.

    Raises:
        LayoutError: They are not as many.
    """
    if len(source) != len(target):
        raise LayoutError(
            f"an optimizer that was made with {len(target)} groups of parameters has {len(source)} now",
            possible="the groups that it was made with",
            change="make a new optimizer with all groups",
        )
    for group, copy in zip(source, target, strict=True):
        copy.update({key: value for key, value in group.items() if key not in ("params", "param_names")})


def loss_of(closure: Callable[[], Any] | None) -> Any:
    """What a closure that an optimizer's step was given gives, with gradients."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()
