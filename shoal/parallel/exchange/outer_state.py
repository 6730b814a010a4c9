"""What local updates keep of each parameter, where checkpoints look for the state of optimizers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, final

import torch
from torch.optim import Optimizer

from shoal.parallel.owned import Owned, local_part

_States = defaultdict[Any, dict[str, Any]]


@final
class OuterState(Optimizer):
    """The anchor, the outer momentum and the error memory of each parameter, shaped as the parameter.

    Args:
        owned: This rank's parts of the parameters.
    """

    PREFIX = "outer_"
    """Beginning of the keys of this state alone."""

    def __init__(self, owned: Sequence[Owned]) -> None:
        super().__init__([each.parameter for each in owned], {})

    def step(self, closure: Any = None) -> Any:
        """Do nothing: `LocalUpdates` merges."""

    def anchor(self, owned: Owned) -> torch.Tensor:
        """Return the values `[rows, ...]` that all workers had after the last merge."""
        state = self.state[owned.parameter]
        if "outer_anchor" not in state:
            state["outer_anchor"] = owned.parameter.detach().clone()
        return local_part(state["outer_anchor"])

    def set_anchors(self, owned: Sequence[Owned]) -> None:
        """Make the present values the anchors."""
        for each in owned:
            self.anchor(each).copy_(each.local)

    def momentum(self, owned: Owned) -> torch.Tensor:
        """Return the momentum of the outer gradient, `[rows, ...]`; zeros at first."""
        state = self.state[owned.parameter]
        if "outer_momentum" not in state:
            state["outer_momentum"] = torch.zeros_like(owned.parameter, requires_grad=False)
        return local_part(state["outer_momentum"])

    def give_momentum(self, stepped: Optimizer, owned: Sequence[Owned]) -> None:
        """Give the momentum, where there is one, to the `SGD` that servers step."""
        for each in owned:
            if "outer_momentum" in self.state[each.parameter]:
                stepped.state[each.parameter]["momentum_buffer"] = self.momentum(each)

    def take_momentum(self, stepped: Optimizer, owned: Sequence[Owned]) -> None:
        """Take the momentum, where there is one, of the `SGD` that servers step."""
        for each in owned:
            momentum = stepped.state.get(each.parameter, {}).get("momentum_buffer")
            if momentum is not None:
                self.momentum(each).copy_(local_part(momentum))

    def error(self, owned: Owned) -> torch.Tensor | None:
        """Return what was left out of merges on all workers, `[rows, ...]`, when the state was saved."""
        error = self.state[owned.parameter].get("outer_error")
        return None if error is None else local_part(error)

    def set_error(self, owned: Owned, error: torch.Tensor) -> None:
        """Keep what was left out of merges on all workers, `[rows, ...]`, to be saved."""
        kept = torch.zeros_like(owned.parameter, requires_grad=False)
        local_part(kept).copy_(error)
        self.state[owned.parameter]["outer_error"] = kept

    def forget_errors(self, owned: Sequence[Owned]) -> None:
        """Forget what was left out of merges of these parameters."""
        for each in owned:
            self.state[each.parameter].pop("outer_error", None)


def is_key_of(optimizer: Optimizer, key: str) -> bool:
    """Return whether a state of this name belongs to an optimizer: to an `OuterState`, or to all others."""
    return key.startswith(OuterState.PREFIX) is isinstance(optimizer, OuterState)


def divided(states: Mapping[Any, Mapping[str, Any]]) -> tuple[_States, _States]:
    """Return the states of parameters that an `OuterState` has, and those of the workers' optimizers."""
    outer: _States = defaultdict(dict)
    inner: _States = defaultdict(dict)
    for parameter, state in states.items():
        for key, value in state.items():
            (outer if key.startswith(OuterState.PREFIX) else inner)[parameter][key] = value
    return outer, inner
