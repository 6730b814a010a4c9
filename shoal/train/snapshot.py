"""A copy in host memory of what steps change on a rank, from which they can be made again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Self, final

import torch

from shoal.collectives.bounce_buffers import BounceBuffers
from shoal.parallel import GuidedUpdates, Parallel
from shoal.parallel.owned import local_part
from shoal.train.randomness import random_state, set_random_state


class _State(NamedTuple):
    """The state of one parameter in one optimizer: the optimizer's own, and its values now."""

    held: dict[str, Any]
    copied: dict[str, Any]


@final
class Snapshot:
    """The values of a rank's parts of the parameters, its optimizer's state, buffers and generators.

    Take it and restore it while whole gradients are averaged: what another exchange keeps is not in it.
    """

    def __init__(
        self,
        parallel: Parallel,
        optimizer: GuidedUpdates,
        values: Sequence[torch.Tensor],
        states: Sequence[_State],
    ) -> None:
        self._parallel = parallel
        self._optimizer = optimizer
        self._values = values
        self._states = states
        self._buffers = {name: buffer.clone() for name, buffer in parallel.module.named_buffers()}
        self._random = random_state()
        self._steps = optimizer.steps

    @classmethod
    def take(cls, parallel: Parallel, optimizer: GuidedUpdates) -> Self:
        """Copy what steps change."""
        with BounceBuffers() as buffers:
            values = [buffers.get(each.local) for each in parallel.owned]
            states = [
                _State(held, {key: _copied(value, buffers) for key, value in held.items()})
                for part, places in optimizer.parts(parallel.owned)
                for each in places
                for held in [part.state[each.parameter]]
            ]
        return cls(parallel, optimizer, values, states)

    @torch.no_grad()
    def restore(self) -> None:
        """Make everything what it was."""
        with BounceBuffers() as buffers:
            for each, value in zip(self._parallel.owned, self._values, strict=True):
                buffers.put(each.local, value)
            for held, copied in self._states:
                for key in held.keys() - copied.keys():
                    del held[key]
                for key, value in copied.items():
                    if isinstance(value, torch.Tensor):
                        buffers.put(local_part(held[key]), value)
                    else:
                        held[key] = value
        for name, buffer in self._parallel.module.named_buffers():
            buffer.copy_(self._buffers[name])
        set_random_state(self._random)
        self._optimizer.steps = self._steps
        self._parallel.zero_grad()
        self._parallel.changed()


def _copied(value: Any, buffers: BounceBuffers) -> Any:
    return buffers.get(local_part(value)) if isinstance(value, torch.Tensor) else value
