"""What an optimizer keeps for each element, found by steps on a small matrix."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from shoal.errors import ConfigError

_ROWS, _COLUMNS = 8, 16
_STEPS = 2


def element_states(
    make: Callable[..., Optimizer], settings: Sequence[Mapping[str, Any]], options: Mapping[str, Any]
) -> dict[str, torch.dtype]:
    """Return the names and types of the states that an optimizer keeps for each element.

    Args:
        make: Makes the optimizer, from groups and options.
        settings: The settings of each of its groups.
        options: Its options.

    Raises:
        ConfigError: It cannot make its step from parts of a parameter, one part after another.
    """
    found: dict[str, torch.dtype] = {}
    for each in settings:
        try:
            whole, states = _trained(make, each, options, parts=1)
            parts, _ = _trained(make, each, options, parts=2)
        except Exception as error:
            raise _refused(make, f"it raised {type(error).__name__}: {error}") from error
        if not torch.equal(whole, parts):
            raise _refused(make, "a matrix gets other values when it is updated in two parts")
        found.update(states)
    return found


def _trained(
    make: Callable[..., Optimizer], settings: Mapping[str, Any], options: Mapping[str, Any], *, parts: int
) -> tuple[torch.Tensor, dict[str, torch.dtype]]:
    """Return a matrix after some steps, whole or as flat parts in turn, and its states for each element."""
    generator = torch.Generator().manual_seed(0)
    value = torch.randn(_ROWS, _COLUMNS, generator=generator)
    held = [nn.Parameter(part, requires_grad=False) for part in _cut(value, parts)]
    optimizer = make([{**settings, "params": held}], **options)
    for _ in range(_STEPS):
        gradient = torch.randn(_ROWS, _COLUMNS, generator=generator)
        for parameter, part in zip(held, _cut(gradient, parts), strict=True):
            parameter.grad = part
            optimizer.param_groups[0]["params"] = [parameter]
            optimizer.step()
    states = {
        key: state.dtype
        for key, state in optimizer.state[held[0]].items()
        if isinstance(state, torch.Tensor) and state.shape == held[0].shape
    }
    return value, states


def _cut(matrix: torch.Tensor, parts: int) -> Sequence[torch.Tensor]:
    """Return the matrix, or flat parts of it that share its memory."""
    return [matrix] if parts == 1 else matrix.view(-1).split(matrix.numel() // parts)


def _refused(make: Callable[..., Optimizer], reason: str) -> ConfigError:
    return ConfigError(
        f"{getattr(make, '__name__', repr(make))} cannot have its state offloaded: {reason}",
        possible="optimizers that change each element by itself, such as adamw, lion, or sgd with momentum",
        change="choose such an optimizer, or leave out offload",
    )
