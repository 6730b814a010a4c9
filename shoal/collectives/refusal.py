"""How a call that cannot be served is refused."""

from __future__ import annotations

import torch

from shoal.errors import CollectiveError

__all__ = ["described", "refusal", "type_name"]


def refusal(given: str, *, possible: str, change: str) -> CollectiveError:
    """The error for a call that cannot be served. Nothing was sent, and the group goes on.

    Args:
        given: What was given and why it cannot work.
        possible: What would be accepted.
        change: What to change, as an instruction.
    """
    return CollectiveError(f"{given}\n  possible: {possible}\n  change: {change}", fault="invalid")


def described(tensor: torch.Tensor) -> str:
    """The type and shape of a tensor, such as "float32 [2, 3]"."""
    return f"{type_name(tensor.dtype)} {list(tensor.shape)}"


def type_name(dtype: torch.dtype) -> str:
    """The name of a type, such as "float32"."""
    return str(dtype).removeprefix("torch.")
