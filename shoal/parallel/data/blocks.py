"""The blocks of a model, and the block to which each parameter belongs.

A block is one of a model's repeated parts, such as a transformer layer. Its parameters are used only in its
own forward, so they can be gathered just before it. All other parameters belong to the root, and stay for the
whole of a forward.
"""

from __future__ import annotations

import itertools
from collections.abc import Container, Sequence
from dataclasses import dataclass

from torch import nn

from shoal.parallel.data.bucket import Named
from shoal.parallel.layout import fill_buckets


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive parameters of one block, or of the root.

    Attributes:
        block: Index of the block, or None for the root.
        parameters: The parameters, in the order in which the model registers them.
    """

    block: int | None
    parameters: tuple[Named, ...]


def parameter_runs(model: nn.Module, blocks: Sequence[nn.Module], names: Container[str]) -> list[Run]:
    """Cut the parameters with these names, in order, into runs that belong to one block or to the root.

    A parameter that several blocks use, or a block and the root, belongs to the root.
    """
    block_of = {id(module): index for index, block in enumerate(blocks) for module in block.modules()}
    users: dict[nn.Parameter, set[int | None]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            users.setdefault(parameter, set()).add(block_of.get(id(module)))

    def owner(named: Named) -> int | None:
        using = users[named[1]]
        return next(iter(using)) if len(using) == 1 else None

    chosen = [named for named in model.named_parameters() if named[0] in names]
    return [Run(block, tuple(group)) for block, group in itertools.groupby(chosen, key=owner)]


@dataclass(frozen=True, slots=True)
class Group:
    """The parameters of one bucket.

    Attributes:
        blocks: Indices of the blocks that they belong to; empty for the root.
        parameters: The parameters, in the order in which backward is expected to complete them.
    """

    blocks: tuple[int, ...]
    parameters: tuple[Named, ...]


def groups_by_size(runs: Sequence[Run], capacity: int) -> list[Group]:
    """Return groups of about `capacity` bytes in backward order; blocks may share one, the root never."""
    groups = []
    for is_root, neighbours in itertools.groupby(reversed(runs), key=lambda run: run.block is None):
        items = [(run.block, named) for run in neighbours for named in reversed(run.parameters)]
        sizes = [named[1].numel() * named[1].element_size() for _, named in items]
        for indices in fill_buckets(sizes, capacity):
            chosen = [items[index] for index in indices]
            blocks = () if is_root else tuple(sorted({block for block, _ in chosen if block is not None}))
            groups.append(Group(blocks, tuple(named for _, named in chosen)))
    return groups


def groups_by_block(runs: Sequence[Run]) -> list[Group]:
    """Return one group for each run, in backward order."""
    return [
        Group(() if run.block is None else (run.block,), tuple(reversed(run.parameters)))
        for run in reversed(runs)
    ]
