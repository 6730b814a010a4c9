"""First values of a model that are put off, since a checkpoint is likely to replace them.

To draw them can take longer than to load a checkpoint, as each rank draws all of a parameter of which it has
a part. And values that nobody uses may be replaced while a checkpoint is verified, so it is read once.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, final

import torch
from torch import nn

from shoal.parallel import FirstValues, Frozen, Owned, Parallel


@final
class _PutOff:
    """In place of a model's `initialize_parameter`: leaves parameters as they are, without their values.

    Args:
        initialize: The model's method.
    """

    def __init__(self, initialize: Any) -> None:
        self.initialize = initialize
        self.seed = 0

    def __call__(self, name: str, tensor: torch.Tensor, seed: int) -> None:
        self.seed = seed


def put_off_first_values(model: nn.Module) -> None:
    """Let a model on the meta device leave it without values; `parallelize` comes next."""
    model.initialize_parameter = _PutOff(model.initialize_parameter)  # type: ignore[assignment]


def are_put_off(parallel: Parallel) -> bool:
    """Return whether a model has neither its first values yet, nor those of a checkpoint."""
    return _of(parallel) is not None


def note_loaded(parallel: Parallel) -> None:
    """Note that a model has the values of a checkpoint now."""
    parallel.loads.update(each.name for each in parallel.owned)
    if (put_off := _of(parallel)) is not None:
        parallel.module.initialize_parameter = put_off.initialize


@torch.no_grad()
def give_put_off_values(parallel: Parallel) -> None:
    """Give a model the first values that were put off, if they were, one whole parameter at a time."""
    if (put_off := _of(parallel)) is None:
        return
    parts: list[Owned | Frozen] = [*parallel.owned, *parallel.frozen]
    give = partial(put_off.initialize, seed=put_off.seed)
    values = FirstValues(give, {part.name: part.cut for part in parts if part.cut is not None})
    for part in parts:
        if part.local.numel():
            shape = part.shape if part.cut is None else part.cut.block_shape
            first = part.start // math.prod(shape[1:])
            rows = range(first, first + (len(part.local) if shape else 1))
            values.fill_rows(part.name, shape, rows, part.local)
    parallel.changed()
    note_loaded(parallel)


def _of(parallel: Parallel) -> _PutOff | None:
    found = getattr(parallel.module, "initialize_parameter", None)
    return found if isinstance(found, _PutOff) else None
