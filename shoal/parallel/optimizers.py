"""What optimizers do to the parameters of a model that is laid over ranks."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from shoal.errors import LayoutError
from shoal.parallel.owned import Owned

__all__ = ["follow_optimizers"]

# Marks are attributes of the tensors, so that they end with them.
_COMPUTES = "_shoal_computes"
_CHANGED = "_shoal_changed"


def follow_optimizers(module: nn.Module, owned: Sequence[Owned], changed: Callable[[], None]) -> None:
    """Refuses steps of an optimizer that was made before its model was laid out, and tells of other steps.

    Args:
        module: The model.
        owned: What optimizers may change.
        changed: Called after a step of an optimizer that has some of it; a bound method, not kept alive.
    """
    given = {each.parameter for each in owned}
    for name, parameter in module.named_parameters():
        if parameter not in given:
            setattr(parameter, _COMPUTES, name)
    called = _Told(weakref.WeakMethod(changed))  # type: ignore[arg-type]
    for each in owned:
        setattr(each.parameter, _CHANGED, called)


class _Told:
    """Who is told of a parameter's changes; nobody of those of a copy.

    Args:
        method: Gives the method to call, or None once its object is gone.
    """

    def __init__(self, method: Callable[[], Callable[[], None] | None] = lambda: None) -> None:
        self._method = method

    def __call__(self) -> Callable[[], None] | None:
        return self._method()

    def __reduce__(self) -> tuple[type[_Told], tuple[()]]:
        return _Told, ()


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            name = getattr(parameter, _COMPUTES, None)
            if name is not None and parameter.requires_grad:
                raise LayoutError(
                    f"{type(optimizer).__name__} has the model's own parameter {name}, which only computes: "
                    "it gets no gradient, and what is written to it is lost",
                    possible="an optimizer of the parameters() of what shoal.parallelize returned",
                    change="make the optimizer after shoal.parallelize, from its parameters()",
                )


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    told = {
        method
        for group in optimizer.param_groups
        for parameter in group["params"]
        if (method := getattr(parameter, _CHANGED, None)) is not None
    }
    for method in told:
        changed = method()
        if changed is not None:
            changed()


register_optimizer_step_pre_hook(_before_step)
register_optimizer_step_post_hook(_after_step)
