"""LoRA by the package peft: small trained products beside frozen linear layers.

A target `y = W x` becomes `y = W x + alpha / rank * B A x`, with A `[rank, in]` and B `[out, rank]`. Only A
and B are trained; B begins at zero, so that training begins with the model as it was (Hu et al. 2021,
arXiv:2106.09685). The target's own parameters move into its child `base_layer`, and A and B are the weights
of its children `lora_A.default` and `lora_B.default`.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from shoal.errors import MissingExtraError, ModelError, nearest
from shoal.models.experts import Mixture
from shoal.models.task import find_blocks

ALL_LINEAR = "all-linear"
"""Stands for every linear layer of the blocks, as in peft."""

_OWN, _A, _B = ".base_layer.", ".lora_A.default.weight", ".lora_B.default.weight"


def add_adapters(
    model: nn.Module, *, rank: int, alpha: float, targets: Sequence[str], dropout: float, seed: int
) -> None:
    """Freeze a model and put adapters beside some of its layers, in place.

    The first values of an adapter depend on the seed, its name and its shape alone. If the model is on the
    meta device, its method `initialize_parameter` gives them.

    Args:
        model: A model whose blocks have linear layers.
        rank: Width of the adapters.
        alpha: Factor on what they add, times `rank`.
        targets: Names of layers, or the ends of names, such as "q_proj"; or `ALL_LINEAR`.
        dropout: Share of an adapter's input that is zeroed in training.
        seed: Any integer.

    Raises:
        ModelError: A target names no linear layer of the blocks.
        MissingExtraError: peft is not installed.
    """
    try:
        import peft
    except ImportError as error:
        raise MissingExtraError("LoRA", package=error.name or "peft", extra="lora") from error
    found = _find_targets(model, targets)
    modules = dict(model.named_modules())
    initialize = getattr(model, "initialize_parameter", None)
    is_empty = any(parameter.is_meta for parameter in model.parameters())
    factor: Any = alpha  # peft's annotation asks for an integer, its code for a number
    config = peft.LoraConfig(
        r=rank,
        lora_alpha=factor,
        target_modules=[f"model.{name}" for name in found],
        lora_dropout=dropout,
        fan_in_fan_out=any(is_transposed(modules[name]) for name in found),
    )
    # Within a module that has no configuration, peft leaves names and targets as they are given.
    holder = nn.Module()
    holder.model = model
    peft.inject_adapter_in_model(config, holder, low_cpu_mem_usage=is_empty)

    def initialize_parameter(name: str, tensor: torch.Tensor, seed: int) -> None:
        if is_adapter(name):
            _fill(name, tensor, seed)
        else:
            assert initialize is not None
            initialize(plain_name(name), tensor, seed)

    if initialize is not None:
        model.initialize_parameter = initialize_parameter  # type: ignore[assignment]
    if not is_empty:
        for name, parameter in model.named_parameters():
            if is_adapter(name):
                _fill(name, parameter, seed)


def base_layer(layer: nn.Module) -> nn.Module:
    """Return the layer that an adapter stands beside; a layer without an adapter itself."""
    base = getattr(layer, "base_layer", None)
    return base if isinstance(base, nn.Module) and hasattr(layer, "lora_A") else layer


def _find_targets(model: nn.Module, targets: Sequence[str]) -> list[str]:
    """Return the names of the layers that targets name; see `add_adapters`.

    Raises:
        ModelError: A target names no linear layer of the blocks.
    """
    layers = _linear_layers(model)
    found: set[str] = set()
    for target in targets:
        named = {name for name in layers if target == ALL_LINEAR or f".{name}".endswith(f".{target}")}
        if not named:
            kinds = sorted({name.rpartition(".")[-1] for name in layers})
            raise ModelError(
                f"lora.targets names {target!r}, and the blocks of {type(model).__name__} have no such "
                f"linear layer{nearest(target, kinds)}",
                possible=", ".join([*kinds, ALL_LINEAR]) if kinds else "models with linear layers in blocks",
                change=f"correct or remove {target!r}",
            )
        found |= named
    return [name for name in layers if name in found]


def is_adapter(name: str) -> bool:
    """Return whether a parameter of this name is an adapter's."""
    return name.endswith((_A, _B))


def is_transposed(layer: nn.Module) -> bool:
    """Return whether a layer's weight is `[in, out]`, as in GPT-2 of transformers."""
    return type(layer).__name__ == "Conv1D"


def plain_name(name: str) -> str:
    """Return the name that a parameter has in the model without adapters."""
    return name.replace(_OWN, ".")


def _linear_layers(model: nn.Module) -> list[str]:
    """Return the names of the linear layers of the blocks; a `Mixture` reads its router's weight itself."""
    inside = {id(module) for block in find_blocks(model) for module in block.modules()}
    routers = {id(module.router) for module in model.modules() if isinstance(module, Mixture)}
    return [
        name
        for name, module in model.named_modules()
        if id(module) in inside - routers and (type(module) is nn.Linear or is_transposed(module))
    ]


@torch.no_grad()
def _fill(name: str, tensor: torch.Tensor, seed: int) -> None:
    """Give an adapter its first values: B is zero, and A uniform within `1 / sqrt(in)`, as in peft."""
    if name.endswith(_B):
        tensor.zero_()
        return
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    generator = torch.Generator("cpu").manual_seed(int.from_bytes(digest, "little"))
    bound = 1 / math.sqrt(tensor.shape[-1])
    drawn: Any = torch.empty(tensor.shape, dtype=torch.float32).uniform_(-bound, bound, generator=generator)
    tensor.copy_(drawn)
