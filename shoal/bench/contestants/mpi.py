"""MPI through mpi4py: the usual reference for collectives on CPUs.

Its ranks are those that `mpirun` started. Where MPI takes part, `mpirun` starts the bench itself, so that the
groups of the other backends are in the same processes. Calls go straight to mpi4py, without torch.
"""

from __future__ import annotations

import importlib
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shoal.bench.collective import Collective
from shoal.bench.contestants.contestant import Buffers, Contestant, Operation, UnsupportedError

_OPERATORS = {"sum": "SUM", "min": "MIN", "max": "MAX", "product": "PROD"}


class MPI(Contestant):
    """All ranks that `mpirun` started."""

    def __init__(self) -> None:
        self._mpi: Any = importlib.import_module("mpi4py.MPI")
        self._communicator = self._mpi.COMM_WORLD

    def empty(self, elements: int, like: Tensor) -> Tensor:
        """Return a buffer in ordinary memory."""
        return torch.empty(elements, dtype=like.dtype)

    def operation(self, collective: Collective, buffers: Buffers, op: str) -> Operation:
        """Return a call to mpi4py with its arguments."""
        world, in_place = self._communicator, self._mpi.IN_PLACE
        if collective.name == "barrier":
            return world.Barrier  # type: ignore[no-any-return]
        given, got = self._array(buffers.input, collective), self._array(buffers.output, collective)
        after, before = (world.rank + 1) % world.size, (world.rank - 1) % world.size
        match collective.name:
            case "all_reduce":
                return partial(world.Allreduce, in_place, got, self._operator(op))
            case "all_gather":
                return partial(world.Allgather, given, got)
            case "reduce_scatter":
                return partial(world.Reduce_scatter_block, given, got, self._operator(op))
            case "all_to_all":
                return partial(world.Alltoall, given, got)
            case "broadcast":
                return partial(world.Bcast, got, 0)
            case "reduce" if world.rank == 0:
                return partial(world.Reduce, in_place, got, self._operator(op), 0)
            case "reduce":
                return partial(world.Reduce, got, None, self._operator(op), 0)
            case "gather":
                return partial(world.Gather, given, got if world.rank == 0 else None, 0)
            case "scatter":
                return partial(world.Scatter, given if world.rank == 0 else None, got, 0)
            case "send_recv":
                return partial(world.Sendrecv, given, after, 0, got, before, 0)
        raise UnsupportedError(collective.name)

    def finish(self) -> None:
        """Return at once: every call has ended when it returns."""

    def version(self) -> str:
        """Return the name that the library gives itself."""
        return str(self._mpi.Get_library_version()).partition(",")[0].strip("\0\n ").splitlines()[0]

    def _array(self, tensor: Tensor, collective: Collective) -> Any:
        """Return the tensor as a numpy array; as bytes if numpy lacks the type and nothing is reduced."""
        if not collective.reduces:
            return tensor.view(torch.uint8).numpy()
        if tensor.dtype in (torch.float16, torch.bfloat16):
            raise UnsupportedError(f"MPI has no {str(tensor.dtype).removeprefix('torch.')} to reduce")
        return tensor.numpy()

    def _operator(self, op: str) -> Any:
        if op not in _OPERATORS:
            raise UnsupportedError(f"MPI has no operator {op}")
        return getattr(self._mpi, _OPERATORS[op])
