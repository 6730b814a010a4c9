"""The blocks of a model: its repeated parts, such as a transformer's layers."""

from __future__ import annotations

import itertools

from torch import nn

_CONTAINERS = (nn.ModuleList, nn.ModuleDict)  # they have no forward of their own


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the elements with parameters of the outermost `ModuleList`s and `Sequential`s, in order."""
    if isinstance(model, nn.ModuleList | nn.Sequential):
        parts = (
            [part] if not isinstance(part, _CONTAINERS) else find_blocks(part) for part in model.children()
        )
        return [block for blocks in parts for block in blocks if any(True for _ in block.parameters())]
    return list(itertools.chain.from_iterable(find_blocks(child) for child in model.children()))
