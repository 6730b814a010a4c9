"""The error for a call that cannot be served."""

from __future__ import annotations

import torch

from shoal.errors import CollectiveError


def refusal(given: str, *, possible: str, change: str) -> CollectiveError:
    """Return the error for a call that cannot be served. Nothing was sent, and the group goes on.

    Args:
        given: The operand that was given, and why it cannot work.
        possible: The operands that would be accepted.
        change: The change to make, as an instruction.
    """
    return CollectiveError(f"{given}\n  possible: {possible}\n  change: {change}", fault="invalid")


def described(tensor: torch.Tensor) -> str:
    """Return the type and shape of a tensor, such as "float32 [2, 3]"."""
    return f"{type_name(tensor.dtype)} {list(tensor.shape)}"


def type_name(dtype: torch.dtype) -> str:
    """Return the name of a type, such as "float32"."""
    return str(dtype).removeprefix("torch.")
