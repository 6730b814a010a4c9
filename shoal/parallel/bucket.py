"""A bucket of parameters: the weights that compute, and the part of them that this rank owns.

weights    [elements], the type that computes; the model's parameters are views of it
master     [shard_elements], fp32; what the optimizer changes. Where the weights are fp32 too and stay in
           memory, it is this rank's part of them, else it has memory of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from shoal.parallel.axes import Family
from shoal.parallel.communication import Pending, new_buffer
from shoal.parallel.layout import BucketLayout, Cut, Slot

__all__ = ["Bucket", "Fill", "Frozen", "Named", "Owned"]

Named = tuple[str, nn.Parameter]
"""A parameter of the model with its name."""

Fill = Callable[[str, torch.Tensor], None]
"""Writes the first values of the parameter of that name into a tensor of its shape."""


@dataclass(frozen=True, slots=True)
class Owned:
    """The part of one of the model's parameters that this rank's optimizer changes.

    Attributes:
        name: The parameter's name in the model.
        shape: The whole parameter's shape.
        start: First element of the part in the flattened parameter, or in its flattened block.
        stop: Where the part ends.
        parameter: The part, fp32: the model's own parameter if this rank owns it whole and computes in fp32,
            else a flat tensor of `stop - start` elements.
        family: What the parameter is sharded and summed over.
        cut: The block of the parameter that the part is of; None if it is of all of it.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    stop: int
    parameter: nn.Parameter
    family: Family
    cut: Cut | None = None

    @classmethod
    def of(
        cls,
        named: tuple[str, tuple[int, ...]],
        interval: tuple[int, int],
        parameter: nn.Parameter,
        family: Family,
        cuts: Mapping[str, Cut],
    ) -> Owned:
        """The elements `interval` of a parameter, of which this rank has what `cuts` says, or all.

        Args:
            named: Its name, and the shape that it has on this rank.
            interval: Start and stop, in what this rank has.
            parameter: See `Owned`.
            family: See `Owned`.
            cuts: By name.
        """
        name, shape = named
        cut = cuts.get(name)
        return cls(name, shape if cut is None else cut.shape, *interval, parameter, family, cut)

    @property
    def is_first(self) -> bool:
        """Whether the part begins with the parameter's first element."""
        return self.start == 0 and (self.cut is None or self.cut.offset == 0)


@dataclass(frozen=True, slots=True)
class Frozen:
    """What this rank has of a parameter that is not trained: all of it, or its block.

    Attributes:
        name: The parameter's name in the model.
        shape: The whole parameter's shape.
        parameter: The model's own, in the type that computes.
        cut: The block that it is; None if it is all of the parameter.
        is_first_copy: Whether this is the first of the ranks that have the same.
    """

    name: str
    shape: tuple[int, ...]
    parameter: nn.Parameter
    cut: Cut | None
    is_first_copy: bool


class Bucket:
    """Parameters that are gathered, reduced and sharded together.

    Args:
        name: How the Timeline names the bucket's collectives.
        parameters: The model's parameters, in the order of the buffer.
        family: What to communicate over; the bucket is cut into one shard per rank of `family.shard`.
        dtype: Type of the weights that compute.
        resident: Whether the weights stay in memory; if not, they begin dropped.
        fill: Gives the first values.
        cuts: By name, of the parameters of which this rank has a block.
    """

    def __init__(
        self,
        name: str,
        parameters: Sequence[Named],
        *,
        family: Family,
        dtype: torch.dtype,
        resident: bool,
        fill: Fill,
        cuts: Mapping[str, Cut],
    ) -> None:
        self.name = name
        self.family = family
        self._cuts = cuts
        self.parameters = [parameter for _, parameter in parameters]
        shapes = [(name, tuple(parameter.shape)) for name, parameter in parameters]
        self.layout = BucketLayout.of(shapes, family.shard.size)

        # What is dropped at times has to be ordinary memory, which can be emptied.
        allocate = new_buffer if resident else torch.empty
        elements, device = self.layout.elements, self.parameters[0].device
        first = allocate(elements, dtype=torch.float32, device=device).zero_()
        for slot, view in zip(self.layout.slots, self.views(first), strict=True):
            fill(slot.name, view)
        self.weights = first
        if dtype != torch.float32:
            self.weights = allocate(elements, dtype=dtype, device=device).copy_(first)
        self._shares_memory = resident and dtype == torch.float32
        self.master = self.own_part(first) if self._shares_memory else self.own_part(first).clone()
        self.whole = self._shares_memory and family.shard.size == 1 and family.is_mean
        self._show_weights()
        self.owned = self._whole_parameters() if self.whole else self._parts()

        self._gathering: Pending | None = None
        self._absent = torch.full((), torch.nan, dtype=dtype, device=first.device)
        self.dropped = False
        if not resident:
            self.drop_weights()

    def own_part(self, buffer: torch.Tensor) -> torch.Tensor:
        """This rank's shard `[shard_elements]` of a buffer `[elements]`."""
        size = self.layout.shard_elements
        return buffer[self.family.shard.index * size : (self.family.shard.index + 1) * size]

    def views(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """The parts of a buffer `[elements]` that stand for the parameters, in their shapes."""
        return [
            buffer[slot.offset : slot.offset + slot.elements].view(slot.shape) for slot in self.layout.slots
        ]

    def start_gather(self) -> None:
        """Begins to bring the weights up to date with every shard's master."""
        self.finish_gather()
        if self.dropped:
            storage = self.weights.untyped_storage()
            storage.resize_(self.weights.numel() * self.weights.element_size())
            self._show_weights()
            self.dropped = False
        if not self._shares_memory:
            self.own_part(self.weights).copy_(self.master)
        self._gathering = self.family.shard.all_gather(self.weights, self.name)

    def finish_gather(self) -> None:
        """Waits for a gather that was begun, if one was."""
        if self._gathering is not None:
            self._gathering.wait()
            self._gathering = None

    def drop_weights(self) -> None:
        """Frees the weights; until the next gather the model's parameters read as NaN.

        The storage is emptied rather than replaced: what autograd saved of it are views, which are right
        again once the weights are back.
        """
        self.finish_gather()
        for parameter in self.parameters:
            parameter.data = self._absent.expand(parameter.shape)
        self.weights.untyped_storage().resize_(0)
        self.dropped = True

    def _show_weights(self) -> None:
        for parameter, view in zip(self.parameters, self.views(self.weights), strict=True):
            parameter.data = view

    def _whole_parameters(self) -> list[Owned]:
        return [
            self._owned(slot, (0, slot.elements), parameter)
            for slot, parameter in zip(self.layout.slots, self.parameters, strict=True)
        ]

    def _parts(self) -> list[Owned]:
        return [
            self._owned(
                piece.slot,
                (piece.start, piece.stop),
                nn.Parameter(self.master[piece.offset : piece.offset + piece.stop - piece.start]),
            )
            for piece in self.layout.pieces(self.family.shard.index)
        ]

    def _owned(self, slot: Slot, interval: tuple[int, int], parameter: nn.Parameter) -> Owned:
        return Owned.of((slot.name, slot.shape), interval, parameter, self.family, self._cuts)
