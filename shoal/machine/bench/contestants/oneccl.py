"""Intel's oneCCL on CPUs, through its C interface (`libccl.so.2`, since release 2022).

PyTorch's bindings for oneCCL are discontinued, so calls go straight to the library. It finds its ranks
through a unique id, which rank 0 makes. It moves bytes through Intel MPI, which is quicker than libfabric, so
`mpirun` starts its ranks. The library finds its parts through LD_LIBRARY_PATH. To install it:
pip install oneccl impi-rt impi-devel mpi4py.

MPI through mpi4py: the usual reference for collectives on CPUs.

Its ranks are those that `mpirun` started. Where MPI takes part, `mpirun` starts the bench itself, so that the
groups of the other backends are in the same processes. Calls go straight to mpi4py, without torch.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import sys
from collections.abc import MutableMapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.machine.bench.collective import Collective
from shoal.machine.bench.contestants.contestant import Buffers, Contestant, Operation, UnsupportedError

_UNIQUE_ID_BYTES = 4096

# Numbers of the types and operators, as in oneapi/ccl/v2/types.h.
_TYPES = {
    torch.int8: 0,
    torch.uint8: 1,
    torch.int32: 2,
    torch.int64: 4,
    torch.float16: 6,
    torch.float32: 7,
    torch.float64: 8,
    torch.bfloat16: 9,
}
_OPERATORS = {"sum": 0, "product": 1, "max": 2, "min": 3, "avg": 4}


class _UniqueId(ctypes.Structure):
    _fields_ = [("data", ctypes.c_char * _UNIQUE_ID_BYTES)]


def find_oneccl(prefix: str = sys.prefix) -> Path | None:
    """Return the library in this Python's environment; None if it is not there."""
    library = Path(prefix) / "lib" / "libccl.so.2"
    return library if library.exists() else None


class OneCCL(Contestant):
    """oneCCL on all ranks of the default group, through which rank 0 tells them the id.

    Args:
        library: Path of `libccl.so.2`.
        environment: Environment that gets the variables for CPU and transport, unless it has them already.
    """

    def __init__(self, library: Path, environment: MutableMapping[str, str] = os.environ) -> None:
        environment.setdefault("CCL_PLUGIN", "ONECCL_LEGACY_CPU")
        environment.setdefault("CCL_ATL_TRANSPORT", "mpi")
        environment.setdefault("CCL_LOG_LEVEL", "error")
        # oneCCL's worker threads would compete with the ranks for their cores, and slow other contestants.
        environment.setdefault("CCL_WORKER_OFFLOAD", "0")
        self._library: Any = ctypes.CDLL(str(library))
        self._rank, self._ranks = dist.get_rank(), dist.get_world_size()
        self._communicator = ctypes.c_void_p()
        _check(
            self._library.onecclCommInitRank(
                ctypes.byref(self._communicator), ctypes.c_size_t(self._ranks), self._id(), self._rank
            )
        )

    def empty(self, elements: int, like: Tensor) -> Tensor:
        """Return a buffer in ordinary memory."""
        return torch.empty(elements, dtype=like.dtype)

    def operation(self, collective: Collective, buffers: Buffers, op: str) -> Operation:
        """Return a call to the library with its arguments."""
        given, got = ctypes.c_void_p(buffers.input.data_ptr()), ctypes.c_void_p(buffers.output.data_ptr())
        if buffers.output.dtype not in _TYPES:
            raise UnsupportedError(f"oneCCL has no {buffers.output.dtype}")
        dtype, operator = _TYPES[buffers.output.dtype], _OPERATORS[op]
        whole = ctypes.c_size_t(buffers.output.numel())
        part = ctypes.c_size_t(max(1, min(buffers.input.numel(), buffers.output.numel())))
        share = ctypes.c_size_t(buffers.input.numel() // self._ranks)
        arguments: tuple[Any, ...]
        match collective.name:
            case "all_reduce":
                name, arguments = "AllReduce", (got, got, whole, dtype, operator)
            case "all_gather":
                name, arguments = "AllGather", (given, got, part, dtype)
            case "reduce_scatter":
                name, arguments = "ReduceScatter", (given, got, part, dtype, operator)
            case "all_to_all":
                name, arguments = "AllToAll", (given, got, share, dtype)
            case "broadcast":
                name, arguments = "Broadcast", (got, got, whole, dtype, 0)
            case "reduce":
                name, arguments = "Reduce", (got, got, whole, dtype, operator, 0)
            case "send_recv":
                raise UnsupportedError("oneCCL joins a send and a receive on GPUs only")
            case _:
                raise UnsupportedError(f"oneCCL's C interface has no {collective.name}")
        call = getattr(self._library, f"oneccl{name}")
        return partial(_checked, partial(call, *arguments, self._communicator, None))

    def finish(self) -> None:
        """Return at once: every call has ended when it returns."""

    def version(self) -> str:
        """Return the version that the library reports."""
        code = ctypes.c_int()
        _check(self._library.onecclGetVersion(ctypes.byref(code)))
        return f"oneCCL {code.value // 10000}.{code.value // 100 % 100}"

    def _id(self) -> _UniqueId:
        """Return the id that rank 0 makes."""
        unique = _UniqueId()
        if self._rank == 0:
            _check(self._library.onecclGetUniqueId(ctypes.byref(unique)))
        shared = torch.frombuffer(bytearray(bytes(unique)), dtype=torch.uint8)
        dist.broadcast(shared, 0)
        return _UniqueId.from_buffer_copy(shared.numpy().tobytes())


def _checked(call: partial[int]) -> None:
    _check(call())


def _check(result: int) -> None:
    if result != 0:
        raise RuntimeError(f"oneCCL reports error {result}")


_MPI_OPERATORS = {"sum": "SUM", "min": "MIN", "max": "MAX", "product": "PROD"}


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
        if op not in _MPI_OPERATORS:
            raise UnsupportedError(f"MPI has no operator {op}")
        return getattr(self._mpi, _MPI_OPERATORS[op])
