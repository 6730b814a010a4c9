"""Collectives of a bucket: several tensors in one buffer, each cut into one part per rank.

If the parts of a rank are not contiguous, one message for each tensor would cost more than the bytes. Between
CPUs of one host the backend "shoal" moves all of them in one operation; NCCL does so in one launch. Elsewhere
the parts are packed into a second buffer, moved, and unpacked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from shoal.collectives import ProcessGroup, Stripes
from shoal.parallel.communication import Axis, Pending, Then, backend_of, new_buffer


class Striped:
    """The collectives of one layout over one axis, all in place.

    Args:
        axis: The ranks; rank i has the i-th part of each tensor.
        stripes: For each tensor, its first element in the buffer and the number of elements of one part.
    """

    def __init__(self, axis: Axis, stripes: Sequence[tuple[int, int]]) -> None:
        self._axis = axis
        self._stripes = stripes
        self._part_elements = sum(part for _, part in stripes)
        self._native: dict[int, Stripes] = {}  # key: bytes of an element

    def all_gather(self, buffer: torch.Tensor, name: str) -> Pending:
        """Give every rank all ranks' parts of the tensors in `buffer`."""
        if self._axis.size == 1 or not self._stripes:
            return self._axis.all_gather(buffer[:0], name)
        if self._is_native:
            stripes = self._native_stripes(buffer)

            group: Any = self._axis.process_group
            return self._axis.begin(
                f"all_gather:{name}", buffer, lambda: group.all_gather_stripes(buffer, stripes)
            )
        if self._coalesces(buffer):
            return self._axis.begin(f"all_gather:{name}", buffer, self._coalesced(buffer, is_gather=True))
        packed = self._packed(buffer)
        self._copy(buffer, packed, [self._axis.index], is_packing=True)
        others = [index for index in range(self._axis.size) if index != self._axis.index]
        return Then(
            self._axis.all_gather(packed, name),
            lambda: self._copy(buffer, packed, others, is_packing=False),
        )

    def reduce_scatter(self, buffer: torch.Tensor, name: str) -> Pending:
        """Sum the tensors in `buffer` over the axis; this rank gets its parts, the others are undefined."""
        if self._axis.size == 1 or not self._stripes:
            return self._axis.reduce_scatter(buffer[:0], buffer[:0], name)
        if self._is_native:
            stripes = self._native_stripes(buffer)

            group: Any = self._axis.process_group
            return self._axis.begin(
                f"reduce_scatter:{name}", buffer, lambda: group.reduce_scatter_stripes(buffer, stripes)
            )
        if self._coalesces(buffer):
            return self._axis.begin(
                f"reduce_scatter:{name}", buffer, self._coalesced(buffer, is_gather=False)
            )
        packed = self._packed(buffer)
        index = self._axis.index
        self._copy(buffer, packed, range(self._axis.size), is_packing=True)
        return Then(
            self._axis.reduce_scatter(packed.chunk(self._axis.size)[index], packed, name),
            lambda: self._copy(buffer, packed, [index], is_packing=False),
        )

    @property
    def _is_native(self) -> bool:
        group = self._axis.process_group
        return isinstance(group, ProcessGroup) and group.hosts == 1

    def _coalesces(self, buffer: torch.Tensor) -> bool:
        return buffer.is_cuda and backend_of(self._axis.process_group, "cuda") == "nccl"

    def _native_stripes(self, buffer: torch.Tensor) -> Stripes:
        size = buffer.element_size()
        if size not in self._native:
            self._native[size] = Stripes([(first * size, part * size) for first, part in self._stripes])
        return self._native[size]

    def _coalesced(self, buffer: torch.Tensor, *, is_gather: bool) -> Callable[[], Any]:
        """Return a function that moves all tensors in one launch, as a coalesced collective of c10d."""
        wholes = [buffer[first : first + part * self._axis.size] for first, part in self._stripes]
        parts = [whole.chunk(self._axis.size)[self._axis.index] for whole in wholes]

        group: Any = self._axis.process_group
        if is_gather:
            return lambda: group.allgather_into_tensor_coalesced(wholes, parts)
        return lambda: group.reduce_scatter_tensor_coalesced(parts, wholes)

    def _packed(self, buffer: torch.Tensor) -> torch.Tensor:
        elements = self._part_elements * self._axis.size
        return new_buffer(elements, dtype=buffer.dtype, device=buffer.device)

    def _copy(
        self, buffer: torch.Tensor, packed: torch.Tensor, ranks: Sequence[int], *, is_packing: bool
    ) -> None:
        """Copy the parts of some ranks between the buffer and a packed buffer, where they are contiguous."""
        apart, together = [], []
        for index in ranks:
            at = index * self._part_elements
            for first, part in self._stripes:
                apart.append(buffer[first + index * part : first + (index + 1) * part])
                together.append(packed[at : at + part])
                at += part
        if is_packing:
            torch._foreach_copy_(together, apart)
        else:
            torch._foreach_copy_(apart, together)
