"""Products in 8 bits: precision=fp8, by torchao (arXiv:2209.05433 for the formats).

The layers of blocks round their operands to 8 bits before each product, with one scale for each tensor that
is computed anew in every step. Weights, sums and all other operators are as with precision=bf16. On a CPU the
rounding is emulated, so that a Plan can be tried there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from shoal.errors import PlanError

_CAPABILITY = (8, 9)
"""CUDA's compute capability of the first devices with products in 8 bits: Ada and Hopper."""

_MULTIPLE = 16
"""Sizes of a product in 8 bits are multiples of this."""


def use_float8(blocks: Sequence[nn.Module], device: torch.device) -> None:
    """Make the linear layers of blocks compute in 8 bits, in place; their parameters stay the same objects.

    Args:
        blocks: The blocks.
        device: Device that will compute.

    Raises:
        PlanError: The device has no such products, or torchao is missing.
    """
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < _CAPABILITY:
        raise PlanError(
            f"precision=fp8 was given, and {torch.cuda.get_device_name(device)} has no products in 8 bits",
            possible="fp8 on GPUs of compute capability 8.9 or higher, such as L40S, H100 and B200",
            change="use precision=bf16",
        )
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError:
        raise PlanError(
            "precision=fp8 was given, and torchao, which makes its products, is not installed",
            possible="pip install 'shoal[fp8]'",
            change="install it, or use precision=bf16",
        ) from None
    config = Float8LinearConfig(emulate=device.type == "cpu")
    for block in blocks:
        convert_to_float8_training(block, config=config, module_filter_fn=_fits)


def _fits(module: Any, name: str) -> bool:
    if type(module) is not nn.Linear:
        return False
    return module.in_features % _MULTIPLE == module.out_features % _MULTIPLE == 0
