"""Parameters shared by rows: gather each whole on one rank, and return its rows to all.

Each parameter has one owner among the ranks that share it. Parameters are assigned in order of size, the
largest first, each to the rank with the fewest elements so far. Before an optimizer's step every rank sends
its rows of the gradient and of the value to the owner; after it the owner sends every rank its rows of the
new value. With P elements in total over d ranks, a rank sends 2 P (d - 1) / d^2 elements before the step and
P (d - 1) / d^2 after it, each in one all-to-all, and needs memory for 2 P / d elements meanwhile.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import final

import torch
from torch import nn

from shoal.parallel.communication import Axis
from shoal.parallel.layout import part_of_rows
from shoal.parallel.owned import Owned


@final
class Owners:
    """The parameters that the ranks of one axis share, each with its owner.

    Args:
        axis: The ranks that share the parameters.
        shared: This rank's parts of the parameters; every rank gives the same parameters in the same order.

    Attributes:
        shared: The argument `shared`.
        wholes: A tensor for all of each parameter; on its owner it has values between `collect` and
            `give_back`.
    """

    def __init__(self, axis: Axis, shared: Sequence[Owned]) -> None:
        self._axis = axis
        self.shared = shared
        self._owner: dict[str, int] = {}
        held = [0] * axis.size
        for each in sorted(shared, key=lambda each: math.prod(each.shape), reverse=True):
            least = held.index(min(held))
            held[least] += math.prod(each.shape)
            self._owner[each.name] = least
        self._absent = torch.full((), torch.nan, device=shared[0].local.device)
        self.wholes = [nn.Parameter(self._absent.expand(each.shape)) for each in shared]

    def is_mine(self, owned: Owned) -> bool:
        """Return whether this rank is the owner."""
        return self._owner.get(owned.name) == self._axis.index

    def collect(self) -> None:
        """Fill the `wholes` that this rank owns with values, and with gradients if they have one."""
        sent = [
            part.reshape(-1)
            for rank in range(self._axis.size)
            for owned, _ in self._owned_by(rank)
            for part in (owned.gradient, owned.local)
            if part is not None
        ]
        mine = self._owned_by(self._axis.index)
        for owned, whole in mine:
            whole.data = owned.local.new_empty(owned.shape)
            whole.grad = None if owned.gradient is None else owned.local.new_empty(owned.shape)
        into = [
            self._rows(owned, part, rank)
            for rank in range(self._axis.size)
            for owned, whole in mine
            for part in (whole.grad, whole.data)
            if part is not None
        ]
        here, there = self._elements_here(_tensors), self._elements_there(_tensors)
        self._send(sent, here, into, there, "whole parameters")

    def give_back(self) -> None:
        """Send every rank its rows of the values, and free the whole ones."""
        mine = self._owned_by(self._axis.index)
        sent = [
            self._rows(owned, whole.data, rank).reshape(-1)
            for rank in range(self._axis.size)
            for owned, whole in mine
        ]
        into = [owned.local for rank in range(self._axis.size) for owned, _ in self._owned_by(rank)]
        self._send(sent, self._elements_there(), into, self._elements_here(), "updated parameters")
        for owned, whole in mine:
            whole.grad = None
            whole.data = self._absent.expand(owned.shape)

    def _owned_by(self, rank: int) -> list[tuple[Owned, nn.Parameter]]:
        """Return the parameters that have this owner."""
        pairs = zip(self.shared, self.wholes, strict=True)
        return [pair for pair in pairs if self._owner[pair[0].name] == rank]

    def _send(
        self,
        parts: Sequence[torch.Tensor],
        sent_rows: Sequence[int],
        into: Sequence[torch.Tensor],
        received_rows: Sequence[int],
        name: str,
    ) -> None:
        """Send parts, in the order of the receiving ranks, and put the received parts into `into`."""
        empty = self._absent.new_empty(0)
        received = self._absent.new_empty(sum(received_rows))
        sent = torch.cat([empty, *parts])
        self._axis.all_to_all(received, sent, name, received_rows=received_rows, sent_rows=sent_rows).wait()
        came = received.split([each.numel() for each in into]) if into else ()
        for target, values in zip(into, came, strict=True):
            target.copy_(values.view(target.shape))

    def _rows(self, owned: Owned, whole: torch.Tensor, rank: int) -> torch.Tensor:
        rows = part_of_rows(owned.shape[0], self._axis.size, rank)
        return whole[rows.start : rows.stop]

    def _elements_here(self, tensors: Callable[[Owned], int] = lambda owned: 1) -> list[int]:
        """For each rank, return the elements here of `tensors(owned)` tensors of each that it owns."""
        return [
            sum(tensors(owned) * owned.local.numel() for owned, _ in self._owned_by(rank))
            for rank in range(self._axis.size)
        ]

    def _elements_there(self, tensors: Callable[[Owned], int] = lambda owned: 1) -> list[int]:
        """For each rank, return its elements of `tensors(owned)` tensors of each that this rank owns."""
        size, mine = self._axis.size, self._owned_by(self._axis.index)
        return [
            sum(
                tensors(each) * len(part_of_rows(each.shape[0], size, rank)) * math.prod(each.shape[1:])
                for each, _ in mine
            )
            for rank in range(size)
        ]


def _tensors(owned: Owned) -> int:
    """Return how many tensors of a parameter are collected: its value, and its gradient if it has one."""
    return 1 if owned.gradient is None else 2
