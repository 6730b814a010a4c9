"""Optimizers that delegate their step to other optimizers, which hold the state."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import torch
from torch.optim import Optimizer

from shoal.errors import LayoutError
from shoal.parallel.local_shards import Owned, local_part

OptimizerPart = tuple[Optimizer, Sequence[Owned]]
"""An optimizer with a state, and this rank's parts of the parameters that the state belongs to.

`Owned.parameter` is the key of the optimizer's state."""


class Composed(Optimizer, ABC):
    """An optimizer that is used like any other, and delegates its step to others.

    The settings in `param_groups` are passed to those others before each step. `state` and `state_dict()`
    show the others' state on this rank, which a rank with the same Plan can load.

    Args:
        groups: Parameters or groups, as torch optimizers take them.
        defaults: Settings of groups that do not set them.
    """

    def __init__(self, groups: Any, defaults: dict[str, Any]) -> None:
        super().__init__(groups, defaults)
        self.register_state_dict_pre_hook(lambda optimizer: self.show())
        self.register_load_state_dict_post_hook(lambda optimizer: self.take())

    @property
    @abstractmethod
    def title(self) -> str:
        """Return the names of the optimizers that make the step."""

    @abstractmethod
    def parts(self, owned: Sequence[Owned]) -> Sequence[OptimizerPart]:
        """Return the optimizers that make the step, each with this rank's part of its parameters."""

    @abstractmethod
    def show(self) -> None:
        """Show in `state` the state of the optimizers that make the step."""

    @abstractmethod
    def take(self) -> None:
        """Pass these optimizers the `state` that was loaded."""


def parts_of(optimizer: Optimizer, owned: Sequence[Owned]) -> Sequence[OptimizerPart]:
    """Return the optimizers that hold the state of `optimizer`, usually itself, with their parameters."""
    return optimizer.parts(owned) if isinstance(optimizer, Composed) else [(optimizer, owned)]


def title_of(optimizer: Optimizer) -> str:
    """Return the name of an optimizer, or of the ones that make its step."""
    return optimizer.title if isinstance(optimizer, Composed) else type(optimizer).__name__


def copy_settings(source: Sequence[Mapping[str, Any]], target: Sequence[dict[str, Any]]) -> None:
    """Copy all that `source` groups hold, except parameters, to `target` groups.

    Raises:
        LayoutError: The numbers of groups differ.
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
    """Return the result of the closure that an optimizer's step was given, computed with gradients."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def unscaled(optimizer: Optimizer) -> bool:
    """Divide gradients by the scale that torch's GradScaler told an optimizer, as fused optimizers do.

    Returns:
        Whether the step is to be made; False if the GradScaler found a gradient that is not finite.
    """
    told = vars(optimizer)
    if "found_inf" in told and told["found_inf"].item():
        return False
    scale: torch.Tensor | None = told.get("grad_scale")
    if scale is not None:  # None if `unscale_` was called before
        groups = optimizer.param_groups
        graded = (each.grad for group in groups for each in group["params"] if each.grad is not None)
        for gradient in graded:
            local_part(gradient).mul_(scale.double().reciprocal().to(gradient.device, torch.float32))
    return True


@final
class Together(Composed):
    """Step several optimizers one after another; its groups are those of all of them.

    Args:
        optimizers: The optimizers; no two may have the same parameter.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = list(optimizers)
        super().__init__([group for each in optimizers for group in each.param_groups], {})

    @property
    def title(self) -> str:
        """See `Composed.title`."""
        return " and ".join(title_of(each) for each in self._optimizers)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make a step of each optimizer.

        Raises:
            LayoutError: A group was added after construction.
        """
        loss = loss_of(closure)
        copy_settings(self.param_groups, self._groups)
        for each in self._optimizers:
            each.step()
        self.show()
        return loss

    def parts(self, owned: Sequence[Owned]) -> Sequence[OptimizerPart]:
        """See `Composed.parts`."""
        return [part for each in self._optimizers for part in parts_of(each, owned)]

    def show(self) -> None:
        """See `Composed.show`."""
        for each in self._optimizers:
            if isinstance(each, Composed):
                each.show()
        self.state = defaultdict(
            dict, {key: state for each in self._optimizers for key, state in each.state.items()}
        )

    def take(self) -> None:
        """See `Composed.take`."""
        copy_settings(self.param_groups, self._groups)
        self.param_groups = self._groups
        for each in self._optimizers:
            own = {parameter for group in each.param_groups for parameter in group["params"]}
            each.state = defaultdict(dict, {key: state for key, state in self.state.items() if key in own})
            if isinstance(each, Composed):
                each.take()

    @property
    def _groups(self) -> list[dict[str, Any]]:
        return [group for each in self._optimizers for group in each.param_groups]
