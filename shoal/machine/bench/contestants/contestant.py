"""The interface of a contestant: where its buffers are, and how it does a collective on them.

No communication: a lower bound on the time of a collective through shared memory.

A collective within a host has to read and write certain bytes. For example, in a two-shot all-reduce of S
bytes over n ranks, each rank reads S/n bytes from each of n buffers and writes the sum to n buffers. Here
every rank does just these reads and writes on its own memory, all ranks at once. No rank waits for another,
and no cache line belongs to another core. The additional time of a collective is the cost of coordination and
of the traffic between caches.

It works in blocks that fit in a core's own cache, so that a value that is written n times is read from memory
once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.machine.bench.collective import Collective

Operation = Callable[[], object]
"""Function that does a collective once, on buffers that it holds."""


class UnsupportedError(Exception):
    """The contestant does not have this collective, type or operator; raised before anything is sent."""


@dataclass(frozen=True, slots=True)
class Buffers:
    """The buffers that one rank gives and gets: one-dimensional, contiguous, one tensor if in place."""

    input: Tensor
    output: Tensor

    def zero(self) -> None:
        """Fill both with zeros, which no number of reductions changes."""
        self.input.zero_()
        self.output.zero_()


class Contestant(ABC):
    """One implementation of the collectives.

    Attributes:
        memory: Kind of memory of its buffers. Contestants with the same kind can share buffers.
        communicates: Whether its results are those of the collective, so that they can be checked.
    """

    memory: str = "cpu"
    communicates: bool = True

    @abstractmethod
    def empty(self, elements: int, like: Tensor) -> Tensor:
        """Return a buffer with that many elements of the type of `like`."""

    @abstractmethod
    def operation(self, collective: Collective, buffers: Buffers, op: str) -> Operation:
        """Prepare a collective, and return a function that does it.

        Args:
            collective: The collective.
            buffers: This rank's buffers, made by `empty`.
            op: Name of the operator.

        Raises:
            UnsupportedError: The contestant does not have it.
        """

    @abstractmethod
    def finish(self) -> None:
        """Wait until all operations are complete."""

    @abstractmethod
    def version(self) -> str:
        """Return name and version of the library, for the facts under the table."""


_OPERATORS = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.AVG,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "product": dist.ReduceOp.PRODUCT,
}


class TorchGroup(Contestant):
    """A process group of all ranks.

    Args:
        name: Name in the facts.
        group: The group.
        allocate: Function that makes a tensor of a shape, with `dtype=`, such as `torch.empty`.
        memory: Kind of memory of these tensors.
        device: Device of the ranks.
    """

    def __init__(
        self,
        name: str,
        group: dist.ProcessGroup,
        allocate: Callable[..., Tensor] = torch.empty,
        *,
        memory: str = "cpu",
        device: torch.device | None = None,
    ) -> None:
        self.memory = memory
        self._name = name
        self._group = group
        self._allocate = allocate
        self._device = device

    def empty(self, elements: int, like: Tensor) -> Tensor:
        """Return a buffer in the group's kind of memory."""
        placed = {} if self._device is None else {"device": self._device}
        return self._allocate((elements,), dtype=like.dtype, **placed)

    def operation(self, collective: Collective, buffers: Buffers, op: str) -> Operation:
        """Return a call to `torch.distributed` with its arguments."""
        group, given, got = self._group, buffers.input, buffers.output
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        root, after, before = (
            dist.get_global_rank(group, each) for each in (0, (rank + 1) % ranks, (rank - 1) % ranks)
        )
        operator = _OPERATORS[op]
        match collective.name:
            case "all_reduce":
                return partial(dist.all_reduce, got, operator, group)
            case "all_gather":
                return partial(_current("all_gather_single", "all_gather_into_tensor"), got, given, group)
            case "reduce_scatter":
                reduce_scatter = _current("reduce_scatter_single", "reduce_scatter_tensor")
                return partial(reduce_scatter, got, given, operator, group)
            case "all_to_all":
                return partial(dist.all_to_all_single, got, given, group=group)
            case "broadcast":
                return partial(dist.broadcast, got, root, group)
            case "reduce":
                return partial(dist.reduce, got, root, operator, group)
            case "gather":
                return partial(dist.gather, given, list(got.chunk(ranks)) if rank == 0 else None, root, group)
            case "scatter":
                return partial(
                    dist.scatter, got, list(given.chunk(ranks)) if rank == 0 else None, root, group
                )
            case "send_recv":
                return partial(_send_recv, given, got, after, before, group)
            case "barrier":
                return partial(dist.barrier, group)
        raise UnsupportedError(collective.name)

    def finish(self) -> None:
        """Wait for the GPU; on the CPU every call has ended when it returns."""
        if self._device is not None and self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def version(self) -> str:
        """Return the backend, and the version of torch that it belongs to."""
        return f"{self._name} of torch {torch.__version__}"


def _current(name: str, before: str) -> Any:
    """Return a function of `torch.distributed` that torch 2.13 renamed."""
    return getattr(dist, name, None) or getattr(dist, before)


def _send_recv(given: Tensor, got: Tensor, after: int, before: int, group: dist.ProcessGroup) -> None:
    pair = [dist.P2POp(dist.isend, given, after, group), dist.P2POp(dist.irecv, got, before, group)]
    for work in dist.batch_isend_irecv(pair):
        work.wait()


_BLOCK_BYTES = 128 << 10

_COMBINE: dict[str, Callable[..., Tensor]] = {
    "sum": torch.add,
    "avg": torch.add,
    "min": torch.minimum,
    "max": torch.maximum,
    "product": torch.mul,
}


class PrivateMemory(Contestant):
    """Does one rank's reads and writes.

    Args:
        rank: This rank.
        ranks: Number of ranks.
    """

    communicates = False

    def __init__(self, rank: int, ranks: int) -> None:
        self._rank = rank
        self._ranks = ranks

    def empty(self, elements: int, like: Tensor) -> Tensor:
        """Return a buffer in ordinary memory."""
        return torch.empty(elements, dtype=like.dtype)

    def operation(self, collective: Collective, buffers: Buffers, op: str) -> Operation:
        """Return a function that does this rank's reads and writes of the collective."""
        given, got = buffers.input, buffers.output
        match collective.name:
            case "all_reduce":
                parts = self._parts(got)
                return partial(_reduce, _blocks(parts), _blocks(parts), _COMBINE[op])
            case "reduce":
                parts = self._parts(got)
                return partial(_reduce, _blocks(parts), _blocks(parts[:1]), _COMBINE[op])
            case "reduce_scatter":
                return partial(_reduce, _blocks(self._parts(given)), _blocks([got]), _COMBINE[op])
            case "barrier":
                return _nothing
            case "broadcast" if self._rank == 0:
                return _nothing
            case "gather" if self._rank != 0:
                return _nothing
        # The other collectives write the whole output, and read the same number of bytes, each once.
        return partial(got.copy_, torch.zeros_like(got))

    def finish(self) -> None:
        """Return at once: every call has ended when it returns."""

    def version(self) -> str:
        """Return what the figures mean."""
        return "memory: the same reads and writes on private memory, all ranks at once"

    def _parts(self, whole: Tensor) -> list[Tensor]:
        """Return one part for each rank, without the elements that do not divide evenly."""
        part = whole.numel() // self._ranks
        return [whole[rank * part : (rank + 1) * part] for rank in range(self._ranks)]


def _blocks(parts: Sequence[Tensor]) -> list[tuple[Tensor, ...]]:
    """Cut the parts into blocks; the n-th entry has the n-th block of each part."""
    elements = max(1, _BLOCK_BYTES // parts[0].element_size())
    return list(zip(*(part.split(elements) for part in parts), strict=True))


def _reduce(
    sources: Sequence[Sequence[Tensor]],
    targets: Sequence[Sequence[Tensor]],
    combine: Callable[..., Tensor],
) -> None:
    """Combine the n-th blocks of all sources, and write the result to the n-th block of every target."""
    for blocks, (result, *copies) in zip(sources, targets, strict=True):
        combine(blocks[0], blocks[-1], out=result)
        for block in blocks[1:-1]:
            combine(result, block, out=result)
        for copy in copies:
            copy.copy_(result)


def _nothing() -> None:
    """Do nothing."""
