"""The backend "shoal": a process group whose ranks have their tensors on CPUs, or on GPUs.

The methods are those of c10d, as `torch.distributed` documents them. In all of them a tensor that is not
contiguous is copied before and after the call. Where nothing is reduced, any type is moved, as bytes.
Tensors on GPUs go by way of the host, or stay in a GPU that all ranks share (`staging.py`).
Operands that do not fit are refused before anything is sent (`checks.py`), and the group goes on. If only the
root has operands that do not fit, only the root raises, and the others wait for it to call again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch._C._distributed_c10d as c10d
import torch.distributed as dist

from shoal.collectives.checks import (
    Stripes,
    all_to_be_filled,
    as_one,
    bytes_of,
    contiguous_bytes,
    joined,
    only,
    require_in_group,
    require_list,
    require_parts,
    require_tag,
    require_type,
    split_bytes,
    to_be_changed,
    to_be_filled,
    to_be_read,
    to_spread,
    uneven_own_part,
)
from shoal.collectives.native import NativeGroup
from shoal.collectives.operation import Operation
from shoal.collectives.staging import Staging, require_no_other
from shoal.collectives.uneven import (
    all_gather_lists,
    all_gather_pairs,
    all_gather_uneven,
    all_reduce_sparse,
    reduce_scatter_pairs,
    reduce_scatter_uneven,
)

_Base: Any = dist.ProcessGroup  # it has many overloads; c10d uses one of each


class NamedGroup(_Base):
    """A process group with its rank, size, name and purpose.

    Args:
        rank: This process's rank in the group.
        size: Number of ranks in the group.
    """

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._rank = rank
        self._size = size
        self._name = self._description = ""
        self._sequence_number = 0

    def rank(self) -> int:
        """Return this process's rank in the group."""
        return self._rank

    def size(self) -> int:
        """Return the number of ranks in the group."""
        return self._size

    getRank, getSize = rank, size  # noqa: N815

    def name(self) -> str:
        """Return the backend's name."""
        return "shoal"

    getBackendName = name  # noqa: N815

    supports_splitting = False
    supports_coalescing = False

    @property
    def _device_types(self) -> list[torch.device]:
        devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
        return [torch.device(device) for device in devices]

    def _get_backend(self, device: torch.device) -> NamedGroup:
        return self

    def getGroupName(self) -> str:  # noqa: N802
        """Return the group's name."""
        return self._name

    def setGroupName(self, name: str) -> None:  # noqa: N802
        """Set the group's name."""
        self._name = name

    _set_group_name = setGroupName
    group_name = property(getGroupName)

    def getGroupDesc(self) -> str:  # noqa: N802
        """Return the group's purpose."""
        return self._description

    def setGroupDesc(self, description: str) -> None:  # noqa: N802
        """Set the group's purpose."""
        self._description = description

    _set_group_desc = setGroupDesc
    group_desc = property(getGroupDesc)

    def _get_sequence_number_for_group(self) -> int:
        return self._sequence_number

    def _set_sequence_number_for_group(self) -> None:
        self._sequence_number = 0


Tensors = Sequence[torch.Tensor]


# Default options: those of c10d. They are only read.
_ALL_REDUCE = c10d.AllreduceOptions()
_BROADCAST = c10d.BroadcastOptions()
_REDUCE = c10d.ReduceOptions()
_ALL_GATHER = c10d.AllgatherOptions()
_REDUCE_SCATTER = c10d.ReduceScatterOptions()
_GATHER = c10d.GatherOptions()
_SCATTER = c10d.ScatterOptions()
_ALL_TO_ALL = c10d.AllToAllOptions()
_BARRIER = c10d.BarrierOptions()


class ProcessGroup(NamedGroup):
    """A process group of the backend "shoal", on one of its ranks.

    Args:
        native: The native group, which does the work.
        staging: Moves tensors between the devices and the native group.
    """

    def __init__(self, native: NativeGroup, staging: Staging | None = None) -> None:
        super().__init__(native.rank, native.size)
        self._native = native
        self._staging = Staging(native) if staging is None else staging
        self._serves_devices = False  # until it is known that no other backend was asked for
        self.formed = native.formed

    # --- the group as a whole ---

    @property
    def hosts(self) -> int:
        """Number of hosts that its ranks are on."""
        return self._native.hosts

    @property
    def turns(self) -> int:
        """Number of its ranks on one host that share a core: 1 if each has a core of its own."""
        return self._native.turns

    @property
    def timeout(self) -> timedelta:
        """Time limit of operations that have none of their own."""
        return timedelta(seconds=self._native.timeout)

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the time limit of operations that have none of their own."""
        self._native.timeout = timeout.total_seconds()

    def abort(self) -> None:
        """Free every rank that waits; the group cannot be used any more."""
        self._native.abort("abort() was called")

    def shutdown(self) -> None:
        """Leave the group and free its resources."""
        self._staging.close()
        self._native.close()

    # --- collectives ---

    def allreduce(self, tensors: Tensors, opts: Any = _ALL_REDUCE) -> dist.Work:
        """Reduce one tensor over all ranks, in place."""
        tensor = only(tensors, "all_reduce")
        if tensor.is_sparse:
            return all_reduce_sparse(self, tensor, opts)
        return self._all_reduce(tensor, opts, tensors)

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = _ALL_REDUCE) -> dist.Work:
        """Reduce several tensors over all ranks, in place."""
        require_list(tensors, "the list of allreduce_coalesced")
        flat = joined(tensors)
        if flat is not None:
            return self._all_reduce(flat, opts, tensors)
        copy = as_one(tensors)
        return self._all_reduce(copy, opts, tensors, to_spread(copy, tensors))

    def _all_reduce(
        self, tensor: torch.Tensor, opts: Any, result: Tensors, finish: Callable[[], None] | None = None
    ) -> dist.Work:
        flat, finish = to_be_changed(tensor, finish)
        nbytes = bytes_of(flat)
        operation = Operation(
            "all_reduce", flat, flat, result,
            nbytes=nbytes, whole=nbytes, slot=nbytes, reduces=flat.dtype, finish=finish,
        )  # fmt: skip
        return self._run(operation, opts)

    def broadcast(self, tensors: Tensors, opts: Any = _BROADCAST) -> dist.Work:
        """Give every rank the root's tensor."""
        tensor = only(tensors, "broadcast")
        root = require_in_group(opts.rootRank, self._size, "the root of broadcast")
        flat, finish = to_be_changed(tensor)
        nbytes = bytes_of(flat)
        operation = Operation(
            "broadcast", flat, flat, tensors,
            nbytes=nbytes, whole=nbytes, slot=nbytes, root=root, finish=finish,
        )  # fmt: skip
        return self._run(operation, opts)

    def reduce(self, tensors: Tensors, opts: Any = _REDUCE) -> dist.Work:
        """Reduce one tensor over all ranks, into the root's tensor."""
        tensor = only(tensors, "reduce")
        root = require_in_group(opts.rootRank, self._size, "the root of reduce")
        flat, finish = to_be_changed(tensor)
        nbytes = bytes_of(flat)
        output = flat if self._rank == root else None
        operation = Operation(
            "reduce", flat, output, tensors,
            nbytes=nbytes, whole=nbytes, slot=nbytes, root=root, reduces=flat.dtype,
            finish=finish if output is not None else None,
        )  # fmt: skip
        return self._run(operation, opts)

    def allgather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = _ALL_GATHER) -> dist.Work:
        """Give every rank the tensors of all ranks, as a list."""
        output, tensor = only(outputs, "all_gather"), to_be_read(only(inputs, "all_gather"))
        if not require_list(output, "the output list of all_gather", count=self._size, like=tensor):
            return all_gather_uneven(self, output, tensor, opts)
        flat, finish = all_to_be_filled(output)
        return self._all_gather(flat, tensor, opts, outputs, finish)

    def all_gather_single(
        self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = _ALL_GATHER
    ) -> dist.Work:
        """Give every rank the tensors of all ranks, one after the other in `output`."""
        require_type(output, tensor, "all_gather")
        require_parts(output, tensor, self._size, "all_gather")
        flat, finish = to_be_filled(output)
        return self._all_gather(flat, to_be_read(tensor), opts, [output], finish)

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = _ALL_GATHER
    ) -> dist.Work:
        """Do `all_gather_single` for several pairs of tensors."""
        return all_gather_pairs(self, outputs, inputs, opts)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def allgather_coalesced(
        self, output_lists: Sequence[Tensors], inputs: Tensors, opts: Any = _ALL_GATHER
    ) -> dist.Work:
        """Do `allgather` for several tensors; `output_lists` has a list for every rank."""
        return all_gather_lists(self, output_lists, inputs, opts)

    def _all_gather(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        opts: Any,
        result: Sequence[Any],
        finish: Callable[[], None] | None = None,
    ) -> dist.Work:
        nbytes = bytes_of(tensor)
        operation = Operation(
            "all_gather", tensor, output, result,
            nbytes=nbytes, whole=nbytes * self._size, slot=nbytes, finish=finish,
        )  # fmt: skip
        return self._run(operation, opts)

    def reduce_scatter(
        self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any = _REDUCE_SCATTER
    ) -> dist.Work:
        """Reduce a list of tensors over all ranks; rank i gets the i-th."""
        output, parts = only(outputs, "reduce_scatter"), only(inputs, "reduce_scatter")
        if not require_list(parts, "the input list of reduce_scatter", count=self._size, like=output):
            return reduce_scatter_uneven(self, output, parts, opts)
        return self._reduce_scatter(output, as_one(parts), opts)

    def reduce_scatter_single(
        self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = _REDUCE_SCATTER
    ) -> dist.Work:
        """Reduce one tensor over all ranks; rank i gets the i-th part."""
        require_type(output, tensor, "reduce_scatter")
        require_parts(tensor, output, self._size, "reduce_scatter")
        return self._reduce_scatter(output, to_be_read(tensor), opts)

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = _REDUCE_SCATTER
    ) -> dist.Work:
        """Do `reduce_scatter_single` for several pairs of tensors."""
        return reduce_scatter_pairs(self, outputs, inputs, opts)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _reduce_scatter(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any) -> dist.Work:
        flat, finish = to_be_filled(output)
        whole = bytes_of(tensor)
        operation = Operation(
            "reduce_scatter", tensor, flat, [output],
            nbytes=bytes_of(output), whole=whole, slot=whole, reduces=tensor.dtype, finish=finish,
        )  # fmt: skip
        return self._run(operation, opts)

    def all_gather_stripes(self, buffer: torch.Tensor, stripes: Stripes) -> dist.Work:
        """Give every rank all parts of the tensors in a buffer, in place; all ranks are on one host."""
        slot = stripes.part_bytes
        operation = Operation(
            "all_gather", buffer, buffer, [buffer],
            nbytes=contiguous_bytes(buffer), whole=slot * self._size, slot=slot, stripes=stripes,
        )  # fmt: skip
        return self._run(operation, _ALL_GATHER)

    def reduce_scatter_stripes(self, buffer: torch.Tensor, stripes: Stripes) -> dist.Work:
        """Sum this rank's parts of the tensors in a buffer, in place; all ranks are on one host."""
        whole = stripes.part_bytes * self._size
        operation = Operation(
            "reduce_scatter", buffer, buffer, [buffer],
            nbytes=contiguous_bytes(buffer), whole=whole, slot=whole, stripes=stripes, reduces=buffer.dtype,
        )  # fmt: skip
        return self._run(operation, _REDUCE_SCATTER)

    def gather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = _GATHER) -> dist.Work:
        """Give the root the tensors of all ranks, as a list."""
        tensor = only(inputs, "gather")
        root = require_in_group(opts.rootRank, self._size, "the root of gather")
        nbytes = bytes_of(tensor)
        flat, finish = None, None
        if self._rank == root:
            output = only(outputs, "gather")
            require_list(output, "the output list of gather", count=self._size, like=tensor, even=True)
            flat, finish = all_to_be_filled(output)
        operation = Operation(
            "gather", to_be_read(tensor), flat, outputs,
            nbytes=nbytes, whole=nbytes * self._size, slot=nbytes, root=root, finish=finish,
        )  # fmt: skip
        return self._run(operation, opts)

    def scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any = _SCATTER) -> dist.Work:
        """Give rank i the i-th tensor of the root's list."""
        output = only(outputs, "scatter")
        root = require_in_group(opts.rootRank, self._size, "the root of scatter")
        nbytes = bytes_of(output)
        flat, finish = to_be_filled(output)
        given = None
        if self._rank == root:
            parts = only(inputs, "scatter")
            require_list(parts, "the input list of scatter", count=self._size, like=output, even=True)
            given = as_one(parts)
        operation = Operation(
            "scatter", given, flat, outputs,
            nbytes=nbytes, whole=nbytes * self._size, slot=nbytes * self._size, root=root, finish=finish,
        )  # fmt: skip
        return self._run(operation, opts)

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = _ALL_TO_ALL) -> dist.Work:
        """Send the i-th tensor to rank i, and receive the i-th output from it."""
        require_list(outputs, "the output list of all_to_all", count=self._size)
        require_list(inputs, "the input list of all_to_all", count=self._size, like=outputs[0])
        flat, finish = all_to_be_filled(outputs)
        splits = [bytes_of(each) for each in inputs], [bytes_of(each) for each in outputs]
        return self._all_to_all(flat, as_one(inputs), splits, opts, outputs, finish)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        opts: Any = _ALL_TO_ALL,
    ) -> dist.Work:
        """Send the i-th part of the first dim to rank i, and receive the i-th part of the output from it.

        Without splits the parts are equal.
        """
        require_type(output, tensor, "all_to_all")
        flat, finish = to_be_filled(output)
        sent = split_bytes(tensor, input_splits, self._size, "input")
        is_alike = not input_splits and not output_splits and output.shape == tensor.shape
        received = sent if is_alike else split_bytes(output, output_splits, self._size, "output")
        return self._all_to_all(flat, to_be_read(tensor), (sent, received), opts, [output], finish)

    alltoall_base = all_to_all_single

    def _all_to_all(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        splits: tuple[Sequence[int], Sequence[int]],
        opts: Any,
        result: Sequence[Any],
        finish: Callable[[], None] | None,
    ) -> dist.Work:
        if splits[0][self._rank] != splits[1][self._rank]:
            raise uneven_own_part(splits[0][self._rank], splits[1][self._rank])
        operation = Operation(
            "all_to_all", tensor, output, result,
            nbytes=0, whole=sum(splits[0]), slot=0, splits=splits, finish=finish,
        )  # fmt: skip
        return self._run(operation, opts)

    def barrier(self, opts: Any = _BARRIER) -> dist.Work:
        """Wait until all ranks have called this."""
        operation = Operation(
            "barrier", None, None, [],
            nbytes=0, whole=0, slot=0,
        )  # fmt: skip
        return self._run(operation, opts)

    # --- messages ---

    def send(self, tensors: Tensors, peer: int, tag: int) -> dist.Work:
        """Send one tensor to a rank."""
        tensor = only(tensors, "send")
        require_in_group(peer, self._size, "the receiver of send", own=self._rank)
        sent = to_be_read(tensor)
        return self._side(sent, settle=self._staging.settle_messages).send(sent, peer, require_tag(tag))

    def recv(self, tensors: Tensors, peer: int, tag: int) -> dist.Work:
        """Receive one tensor from a rank."""
        require_in_group(peer, self._size, "the sender of recv", own=self._rank)
        return self._receive(tensors, peer, tag)

    def recv_anysource(self, tensors: Tensors, tag: int) -> dist.Work:
        """Receive one tensor from the rank that sends one first."""
        return self._receive(tensors, -1, tag)

    def _receive(self, tensors: Tensors, peer: int, tag: int) -> dist.Work:
        flat, finish = to_be_filled(only(tensors, "recv"))
        side = self._side(flat, settle=self._staging.settle_messages)
        return side.receive(flat, peer, require_tag(tag), finish)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Wait for all ranks; the error names the ranks that did not come.

        Args:
            timeout: Time limit for all ranks to come.
            wait_all_ranks: Whether rank 0 waits for all ranks and then names every missing one, instead of
                only the first.

        Raises:
            CollectiveError: Not all ranks came in time.
        """
        seconds = timeout.total_seconds() if timeout is not None else self._native.timeout
        self._native.monitored_barrier(seconds, wait_all_ranks)

    # --- helpers ---

    def _run(self, operation: Operation, opts: Any) -> dist.Work:
        work = self._side(operation.input, operation.output, settle=self._staging.settle).run(operation, opts)
        self._sequence_number += 1  # counts operations that were not refused
        return work

    def _side(self, *operands: torch.Tensor | None, settle: Callable[[], None]) -> NativeGroup | Staging:
        """Return what moves tensors of the host, or else tensors of a device, and keep the order of calls."""
        if self._staging.takes(*operands):
            if not self._serves_devices:
                require_no_other(dist.get_backend_config(self))
                self._serves_devices = True
            return self._staging
        settle()
        return self._native
