"""The blocks of a model: one of its repeated parts each, such as a transformer's layer."""

from __future__ import annotations

import itertools

from torch import nn

__all__ = ["find_blocks"]

_CONTAINERS = (nn.ModuleList, nn.ModuleDict)  # they have no forward of their own


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """The elements with parameters of the outermost `ModuleList`s and `Sequential`s, in order."""
    if isinstance(model, nn.ModuleList | nn.Sequential):
        parts = (
            [part] if not isinstance(part, _CONTAINERS) else find_blocks(part) for part in model.children()
        )
        return [block for blocks in parts for block in blocks if any(True for _ in block.parameters())]
    return list(itertools.chain.from_iterable(find_blocks(child) for child in model.children()))
