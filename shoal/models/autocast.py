"""What autocast makes of a device's operators; some devices, such as meta, have no autocast to ask."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def autocast_dtype(tensor: Tensor) -> torch.dtype | None:
    """Return the type in which autocast lets products with a tensor be computed; None if it is off."""
    kind = tensor.device.type
    if _has_autocast(kind) and torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return None


def without_autocast(tensor: Tensor) -> AbstractContextManager[object]:
    """Return a context in which products with a tensor are computed in its own type."""
    kind = tensor.device.type
    return torch.autocast(kind, enabled=False) if _has_autocast(kind) else nullcontext()


@torch.compiler.assume_constant_result  # torch 2.11 could not trace it
def _has_autocast(kind: str) -> bool:
    return torch.amp.is_autocast_available(kind)
