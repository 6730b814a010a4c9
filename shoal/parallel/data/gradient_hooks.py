"""Hooks of users on parameters, called once the gradient is final: summed over micro-batches and ranks.

Autograd calls a parameter's hooks when this rank has the gradient of one micro-batch. An optimizer that steps
in such a hook would train with one rank's gradient. So hooks that users register are stored, and called at
the end of the last backward of a step, as FSDP2 calls them. They may be registered before or after the model
is laid over ranks, on the model's own parameter or on the one that the optimizer changes. A hook of
`register_hook` gets this rank's part of the new gradient, without what earlier steps left, and may return
another one. Then a hook of `register_post_accumulate_grad_hook` gets the parameter that the optimizer
changes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, final

import torch
from torch import nn

from shoal.errors import LayoutError
from shoal.parallel.owned import Owned, local_part

_Hook = Callable[[Any], Any]
_Hooks = Mapping[int, _Hook]

_OURS = -1
"""The key of Shoal's own hook; torch's begin at 0."""


class _Stored(OrderedDict[int, _Hook]):
    """A parameter's dict of hooks, of which autograd calls none but Shoal's.

    Autograd reads the dict's memory; torch's functions that add and remove hooks use its methods.

    Args:
        hooks: Where users' hooks are stored.
        called: Shoal's own hook, which autograd calls once there are others.
    """

    def __init__(self, hooks: dict[int, _Hook], called: _Hook | None) -> None:
        super().__init__()
        self._hooks = hooks
        self._called = called

    def call_ours(self) -> None:
        """Make autograd call Shoal's own hook."""
        if self._called is not None:
            super().__setitem__(_OURS, self._called)

    def __setitem__(self, number: int, hook: _Hook) -> None:
        self._hooks[number] = hook
        self.call_ours()

    def __contains__(self, number: object) -> bool:
        return number in self._hooks

    def __delitem__(self, number: int) -> None:
        del self._hooks[number]


@final
class GradientHooks:
    """The hooks of users on one parameter.

    Args:
        owned: This rank's part of the parameter.
        computing: The model's own parameter, which may be `owned.parameter`.
        before: Called before autograd adds to a gradient for which there are hooks of `register_hook`.
        after: Called when autograd has added to the gradient of `computing`.
    """

    def __init__(
        self, owned: Owned, computing: nn.Parameter, before: Callable[[], None], after: _Hook
    ) -> None:
        self._owned = owned
        on_gradient: dict[int, _Hook] = {}
        on_parameter: dict[int, _Hook] = {}
        # The dicts in which hooks were registered earlier are kept: their handles remove hooks from them.
        earlier: _Hooks = computing._backward_hooks or {}
        self._on_gradient = (earlier, on_gradient)
        self._on_parameter: tuple[_Hooks, ...] = (computing._post_accumulate_grad_hooks or {}, on_parameter)

        def before_adding(_: torch.Tensor) -> None:
            before()

        for parameter in (owned.parameter, computing):  # if they are one, the second makes the difference
            gradient_hooks = _Stored(on_gradient, before_adding)
            if earlier:
                gradient_hooks.call_ours()
            parameter_hooks = _Stored(on_parameter, after if parameter is computing else None)
            if parameter is computing:
                parameter_hooks.call_ours()
            parameter._backward_hooks = gradient_hooks
            parameter._post_accumulate_grad_hooks = parameter_hooks

    @property
    def may_change_gradient(self) -> bool:
        """Whether there are hooks of `register_hook`."""
        return any(self._on_gradient)

    @torch.no_grad()
    def call(self, earlier: torch.Tensor | None) -> None:
        """Call the hooks.

        Args:
            earlier: The part's gradient that hooks got before, `[rows, ...]`, to be added to the new one.

        Raises:
            LayoutError: A hook returned a gradient of another shape.
        """
        owned = self._owned
        local, gradient = owned.gradient, owned.parameter.grad
        assert local is not None
        for hooks in self._on_gradient:
            for hook in list(hooks.values()):
                changed = hook(gradient)
                gradient = gradient if changed is None else changed
        if gradient is not owned.parameter.grad:
            local.copy_(self._part_of(gradient))
        if earlier is not None:
            local.add_(earlier)
        for hooks in self._on_parameter:
            for hook in list(hooks.values()):
                hook(owned.parameter)

    def _part_of(self, gradient: Any) -> torch.Tensor:
        """Return this rank's part of what a hook returned."""
        whole: Any = self._owned.parameter
        if hasattr(gradient, "redistribute"):
            gradient = gradient.redistribute(placements=whole.placements)
        part = local_part(gradient)
        if part.shape != self._owned.local.shape:
            raise LayoutError(
                f"a hook on {self._owned.name} returned a gradient of shape {list(part.shape)}",
                possible=f"the shape of what it got, on this rank {list(self._owned.local.shape)}",
                change="compute the new gradient from the one that the hook gets",
            )
        return part
