"""The backend "shoal": a process group whose ranks are CPUs.

The methods are c10d's, and do what `torch.distributed` documents of them. They share this: a tensor that is
not contiguous is copied before and after; where nothing is reduced, any type is moved, as bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch._C._distributed_c10d as c10d
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from shoal.collectives.calls import MOVED, dtype_number, reduction_number
from shoal.collectives.core import Core
from shoal.collectives.flat import as_one, joined, spread
from shoal.collectives.named import NamedGroup
from shoal.collectives.native import NativeGroup
from shoal.collectives.operands import (
    bytes_of,
    contiguous_bytes,
    require_dense,
    require_size,
    split_bytes,
    to_be_changed,
    to_be_filled,
)
from shoal.collectives.options import Options
from shoal.collectives.rendezvous import Formed
from shoal.collectives.sparse import all_reduce_sparse
from shoal.collectives.stripes import Stripes
from shoal.collectives.uneven import all_gather_uneven, reduce_scatter_uneven
from shoal.collectives.work import Several
from shoal.errors import CollectiveError

__all__ = ["ProcessGroup"]

Tensors = Sequence[torch.Tensor]


# What is called without options gets those of c10d; they are only read.
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
    """The ranks of a group, as one of them; arguments and errors as `NativeGroup` has them."""

    def __init__(
        self,
        core: Core,
        store: Store,
        rank: int,
        size: int,
        timeout: timedelta,
        options: Options,
        known: Formed | None = None,
    ) -> None:
        super().__init__(rank, size)
        self._native = NativeGroup(core, store, rank, size, timeout, options, known)

    # --- the group as a whole ---

    @property
    def hosts(self) -> int:
        """How many hosts its ranks are on."""
        return self._native.hosts

    @property
    def formed(self) -> Formed:
        """What its ranks know of each other."""
        return self._native.formed

    @property
    def timeout(self) -> timedelta:
        """The time limit of operations that have none of their own."""
        return timedelta(seconds=self._native.timeout)

    def set_timeout(self, timeout: timedelta) -> None:
        """Sets the time limit of operations that have none of their own."""
        self._native.timeout = timeout.total_seconds()

    def abort(self) -> None:
        """Frees every rank that waits; the group cannot be used any more."""
        self._native.abort("abort() was called")

    def shutdown(self) -> None:
        """Leaves the group; nothing of it stays."""
        self._native.close()

    # --- collectives ---

    def allreduce(self, tensors: Tensors, opts: Any = _ALL_REDUCE) -> dist.Work:
        """Reduces one tensor over all ranks, in place."""
        (tensor,) = tensors
        if tensor.is_sparse:
            return all_reduce_sparse(self, tensor, opts)
        return self._all_reduce(tensor, opts, tensors)

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = _ALL_REDUCE) -> dist.Work:
        """Reduces several tensors over all ranks, in place."""
        if len({tensor.dtype for tensor in tensors}) > 1:
            raise CollectiveError("allreduce_coalesced takes tensors of one type", fault="invalid")
        flat = joined(tensors)
        if flat is not None:
            return self._all_reduce(flat, opts, tensors)
        copy = as_one(tensors)
        return self._all_reduce(copy, opts, tensors, lambda: spread(copy, tensors))

    def _all_reduce(
        self, tensor: torch.Tensor, opts: Any, result: Tensors, finish: Callable[[], None] | None = None
    ) -> dist.Work:
        flat, finish = to_be_changed(tensor, finish)
        nbytes = bytes_of(flat)
        return self._run(
            "all_reduce", flat, flat, opts, result,
            nbytes=nbytes, whole=nbytes, slot=nbytes, reduces=flat, finish=finish,
        )  # fmt: skip

    def broadcast(self, tensors: Tensors, opts: Any = _BROADCAST) -> dist.Work:
        """Gives every rank the root's tensor."""
        (tensor,) = tensors
        flat, finish = to_be_changed(tensor)
        nbytes = bytes_of(flat)
        return self._run(
            "broadcast", flat, flat, opts, tensors,
            nbytes=nbytes, whole=nbytes, slot=nbytes, root=opts.rootRank, finish=finish,
        )  # fmt: skip

    def reduce(self, tensors: Tensors, opts: Any = _REDUCE) -> dist.Work:
        """Reduces one tensor over all ranks, to the root's."""
        (tensor,) = tensors
        flat, finish = to_be_changed(tensor)
        nbytes = bytes_of(flat)
        output = flat if self._rank == opts.rootRank else None
        return self._run(
            "reduce", flat, output, opts, tensors, nbytes=nbytes, whole=nbytes, slot=nbytes,
            root=opts.rootRank, reduces=flat, finish=finish if output is not None else None,
        )  # fmt: skip

    def allgather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = _ALL_GATHER) -> dist.Work:
        """Gives every rank everybody's tensor, as a list."""
        (output,), (tensor,) = outputs, inputs
        if any(each.numel() != tensor.numel() for each in output):
            return all_gather_uneven(self, output, tensor, opts)
        flat = joined(output)
        if flat is not None:
            return self._all_gather(flat, tensor, opts, outputs)
        copy = tensor.new_empty(tensor.numel() * self._size)
        return self._all_gather(copy, tensor, opts, outputs, lambda: spread(copy, output))

    def all_gather_single(
        self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = _ALL_GATHER
    ) -> dist.Work:
        """Gives every rank everybody's tensor, one after the other in `output`."""
        return self.all_gather_single_coalesced([output], [tensor], opts)

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = _ALL_GATHER
    ) -> dist.Work:
        """Does `all_gather_single` for several pairs of tensors."""
        works = []
        for output, tensor in zip(outputs, inputs, strict=True):
            require_size(output, tensor.numel() * self._size, "the output of all_gather")
            flat, finish = to_be_filled(output)
            works.append(self._all_gather(flat, tensor, opts, [output], finish))
        return works[0] if len(works) == 1 else Several(works, outputs)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def allgather_coalesced(
        self, output_lists: Sequence[Tensors], inputs: Tensors, opts: Any = _ALL_GATHER
    ) -> dist.Work:
        """Does `allgather` for several tensors; a list for every rank."""
        by_tensor = list(zip(*output_lists, strict=True))
        works = [
            self.allgather([each], [tensor], opts) for each, tensor in zip(by_tensor, inputs, strict=True)
        ]
        return Several(works, output_lists)

    def _all_gather(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        opts: Any,
        result: Sequence[Any],
        finish: Callable[[], None] | None = None,
    ) -> dist.Work:
        nbytes = bytes_of(tensor)
        return self._run(
            "all_gather", tensor.contiguous(), output, opts, result,
            nbytes=nbytes, whole=nbytes * self._size, slot=nbytes, finish=finish,
        )  # fmt: skip

    def reduce_scatter(
        self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any = _REDUCE_SCATTER
    ) -> dist.Work:
        """Reduces a list of tensors over all ranks; rank i gets the i-th."""
        (output,), (parts,) = outputs, inputs
        if any(each.numel() != output.numel() for each in parts):
            return reduce_scatter_uneven(self, output, parts, opts)
        return self._reduce_scatter(output, as_one(parts), opts)

    def reduce_scatter_single(
        self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = _REDUCE_SCATTER
    ) -> dist.Work:
        """Reduces one tensor over all ranks; rank i gets the i-th part."""
        return self.reduce_scatter_single_coalesced([output], [tensor], opts)

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = _REDUCE_SCATTER
    ) -> dist.Work:
        """Does `reduce_scatter_single` for several pairs of tensors."""
        works = []
        for output, tensor in zip(outputs, inputs, strict=True):
            require_size(tensor, output.numel() * self._size, "the input of reduce_scatter")
            works.append(self._reduce_scatter(output, tensor.contiguous(), opts))
        return works[0] if len(works) == 1 else Several(works, outputs)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _reduce_scatter(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any) -> dist.Work:
        flat, finish = to_be_filled(output)
        whole = bytes_of(tensor)
        return self._run(
            "reduce_scatter", tensor, flat, opts, [output],
            nbytes=bytes_of(output), whole=whole, slot=whole, reduces=tensor, finish=finish,
        )  # fmt: skip

    def all_gather_stripes(self, buffer: torch.Tensor, stripes: Stripes) -> dist.Work:
        """Gives every rank everybody's parts of the tensors in a buffer, in place; all are on one host."""
        return self._run(
            "all_gather", buffer, buffer, _ALL_GATHER, [buffer],
            nbytes=contiguous_bytes(buffer), whole=0, slot=0, stripes=stripes,
        )  # fmt: skip

    def reduce_scatter_stripes(self, buffer: torch.Tensor, stripes: Stripes) -> dist.Work:
        """Sums this rank's parts of the tensors in a buffer over all ranks, in place; all are on one host."""
        return self._run(
            "reduce_scatter", buffer, buffer, _REDUCE_SCATTER, [buffer],
            nbytes=contiguous_bytes(buffer), whole=0, slot=0, stripes=stripes, reduces=buffer,
        )  # fmt: skip

    def gather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = _GATHER) -> dist.Work:
        """Gives the root everybody's tensor, as a list."""
        (tensor,) = inputs
        nbytes = bytes_of(tensor)
        flat, finish = None, None
        if self._rank == opts.rootRank:
            (output,) = outputs
            flat = joined(output)
            if flat is None:
                flat = copy = tensor.new_empty(tensor.numel() * self._size)
                finish = lambda: spread(copy, output)  # noqa: E731
        return self._run(
            "gather", tensor.contiguous(), flat, opts, outputs, nbytes=nbytes, whole=nbytes * self._size,
            slot=nbytes, root=opts.rootRank, finish=finish,
        )  # fmt: skip

    def scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any = _SCATTER) -> dist.Work:
        """Gives rank i the i-th tensor of the root's list."""
        (output,) = outputs
        nbytes = bytes_of(output)
        flat, finish = to_be_filled(output)
        given = as_one(inputs[0]) if self._rank == opts.rootRank else None
        if given is not None:
            require_size(given, output.numel() * self._size, "the input of scatter")
        return self._run(
            "scatter", given, flat, opts, outputs, nbytes=nbytes, whole=nbytes * self._size,
            slot=nbytes * self._size, root=opts.rootRank, finish=finish,
        )  # fmt: skip

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = _ALL_TO_ALL) -> dist.Work:
        """Sends the i-th tensor to rank i, and receives the i-th from there."""
        flat = joined(outputs)
        finish = None
        if flat is None:
            flat = copy = outputs[0].new_empty(sum(each.numel() for each in outputs))
            finish = lambda: spread(copy, outputs)  # noqa: E731
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
        """Sends the i-th part of the first dim to rank i, and receives the i-th from there.

        Without splits the parts are equal.
        """
        flat, finish = to_be_filled(output)
        sent = split_bytes(tensor, input_splits, self._size, "input")
        splits = sent, split_bytes(output, output_splits, self._size, "output")
        return self._all_to_all(flat, tensor.contiguous(), splits, opts, [output], finish)

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
        return self._run(
            "all_to_all", tensor, output, opts, result,
            nbytes=0, whole=bytes_of(tensor), slot=0, splits=splits, finish=finish,
        )  # fmt: skip

    def barrier(self, opts: Any = _BARRIER) -> dist.Work:
        """Completes when all ranks have called it."""
        return self._run("barrier", None, None, opts, [], nbytes=0, whole=0, slot=0)

    # --- messages ---

    def send(self, tensors: Tensors, peer: int, tag: int) -> dist.Work:
        """Sends one tensor to a rank."""
        (tensor,) = tensors
        return self._native.send(require_dense(tensor).contiguous(), peer, tag)

    def recv(self, tensors: Tensors, peer: int, tag: int) -> dist.Work:
        """Receives one tensor from a rank."""
        (tensor,) = tensors
        flat, finish = to_be_filled(require_dense(tensor))
        return self._native.receive(flat, peer, tag, finish)

    def recv_anysource(self, tensors: Tensors, tag: int) -> dist.Work:
        """Receives one tensor from whoever sends one first."""
        return self.recv(tensors, -1, tag)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """A barrier that says who did not come.

        Args:
            timeout: For all to come.
            wait_all_ranks: Whether rank 0 waits for everybody before it names those that are missing, rather
                than naming the first.

        Raises:
            CollectiveError: Not all came in time.
        """
        seconds = timeout.total_seconds() if timeout is not None else self._native.timeout
        self._native.monitored_barrier(seconds, wait_all_ranks)

    # --- below ---

    def _run(
        self,
        collective: str,
        input_: torch.Tensor | None,
        output: torch.Tensor | None,
        opts: Any,
        result: Sequence[Any],
        *,
        nbytes: int,
        whole: int,
        slot: int,
        root: int = 0,
        reduces: torch.Tensor | None = None,
        splits: tuple[Sequence[int], Sequence[int]] | None = None,
        stripes: Stripes | None = None,
        finish: Callable[[], None] | None = None,
    ) -> dist.Work:
        self._sequence_number += 1
        if input_ is not None:
            require_dense(input_)
        if output is not None and output is not input_:
            require_dense(output)
        dtype, reduction = MOVED, 0
        if reduces is not None:
            dtype = dtype_number(reduces.dtype)
            reduction = reduction_number(opts.reduceOp, reduces.dtype)
        timeout = opts.timeout.total_seconds()
        return self._native.run(
            collective,
            input_,
            output,
            nbytes=nbytes,
            whole=whole,
            slot=slot,
            timeout=timeout if timeout > 0 else self._native.timeout,
            asynchronous=getattr(opts, "asyncOp", True),
            result=result,
            dtype=dtype,
            reduction=reduction,
            root=root,
            splits=splits,
            stripes=stripes,
            finish=finish,
        )
