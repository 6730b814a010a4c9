"""A backend of `torch.distributed`: measures a user's call, including Python."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.bench.collective import Collective
from shoal.bench.contestants.contestant import Buffers, Contestant, Operation, UnsupportedError

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
