"""Calls of a group as tables: right ones, and those in which something does not fit, the same on all ranks.

Every tensor lies in the middle of a storage of its own, which shows what a call writes beside its outputs, or
though it is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch._C._distributed_c10d as c10d
import torch.distributed as dist
from torch.distributed.distributed_c10d import ReduceOp

RANKS = 2
MARGIN = 64  # elements before and behind a tensor
COUNT = 4  # elements of one rank's part
WRONG = (torch.float64, torch.float16, torch.int32)  # larger, smaller and as large as float32

Call = Callable[[Any, list[torch.Tensor]], Any]


class Memory:
    """Makes tensors, and knows whether they, and what lies around them, are as they were made."""

    def __init__(self) -> None:
        self._made: list[tuple[torch.Tensor, torch.Tensor]] = []

    def tensor(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """A tensor of whole numbers that differ by element and by rank."""
        count = torch.Size(shape).numel()
        storage = (torch.arange(count + 2 * MARGIN) + 100 * dist.get_rank()).to(dtype)
        self._made.append((storage, storage.clone()))
        return storage[MARGIN : MARGIN + count].view(shape)

    def is_untouched(self) -> bool:
        return all(torch.equal(storage, before) for storage, before in self._made)

    def margins_are_untouched(self) -> bool:
        return all(
            torch.equal(storage[part], before[part])
            for storage, before in self._made
            for part in (slice(0, MARGIN), slice(-MARGIN, None))
        )


def options(kind: Any, **fields: Any) -> Any:
    made = kind()
    for name, value in fields.items():
        setattr(made, name, value)
    return made


ALL_REDUCE, COALESCED = c10d.AllreduceOptions, c10d.AllreduceCoalescedOptions
ALL_GATHER, REDUCE_SCATTER = c10d.AllgatherOptions, c10d.ReduceScatterOptions
TO_ALL = c10d.AllToAllOptions
BROADCAST, REDUCE = c10d.BroadcastOptions, c10d.ReduceOptions
ROOT_1 = {"rootRank": 1}


def is_root() -> bool:
    return dist.get_rank() == 1


# Of each call how many parts its tensors are large, outputs before inputs.
FORMS: dict[str, tuple[Sequence[int], Call]] = {
    "allreduce_coalesced": ((1, 1, 1), lambda g, t: g.allreduce_coalesced(t, COALESCED())),
    "allgather": ((1, 1, 1), lambda g, t: g.allgather([t[:2]], t[2:])),
    "_allgather_base": ((2, 1), lambda g, t: g._allgather_base(*t, ALL_GATHER())),
    "allgather_into_tensor_coalesced": (
        (2, 2, 1, 1),
        lambda g, t: g.allgather_into_tensor_coalesced(t[:2], t[2:], ALL_GATHER()),
    ),
    "allgather_coalesced": (
        (1, 1, 1, 1, 1, 1),
        lambda g, t: g.allgather_coalesced([t[:2], t[2:4]], t[4:], ALL_GATHER()),
    ),
    "reduce_scatter": ((1, 1, 1), lambda g, t: g.reduce_scatter(t[:1], [t[1:]], REDUCE_SCATTER())),
    "_reduce_scatter_base": ((1, 2), lambda g, t: g._reduce_scatter_base(*t, REDUCE_SCATTER())),
    "reduce_scatter_tensor_coalesced": (
        (1, 1, 2, 2),
        lambda g, t: g.reduce_scatter_tensor_coalesced(t[:2], t[2:], REDUCE_SCATTER()),
    ),
    "gather": (
        (1, 1, 1),
        lambda g, t: g.gather([t[:2]] if is_root() else [], t[2:], options(c10d.GatherOptions, **ROOT_1)),
    ),
    "scatter": (
        (1, 1, 1),
        lambda g, t: g.scatter(t[:1], [t[1:]] if is_root() else [], options(c10d.ScatterOptions, **ROOT_1)),
    ),
    "alltoall": ((1, 1, 1, 1), lambda g, t: g.alltoall(t[:2], t[2:], TO_ALL())),
    "alltoall_base": ((2, 2), lambda g, t: g.alltoall_base(*t, [], [], TO_ALL())),
    "alltoall_base, splits": ((2, 2), lambda g, t: g.alltoall_base(*t, [4, 4], [4, 4], TO_ALL())),
}
ROOTED = ("gather", "scatter")
"""Calls whose list the root alone has: the others cannot see that it does not fit."""

GLOO_SERVES_TYPES = ("alltoall_base", "alltoall_base, splits")
"""Calls whose types gloo does not compare. It moves the bytes as if they were of the input's type."""

GLOO_DIES_OF_TYPES = ("reduce_scatter",)
"""Calls of which gloo finds that types differ when a part is on its way, which ends the process."""


def wrong_types(form: str) -> list[tuple[int, torch.dtype]]:
    """Which of a call's tensors can be of which other type, so that they do not fit."""
    return [(position, dtype) for position in range(len(FORMS[form][0])) for dtype in WRONG]


def make(memory: Memory, form: str, wrong: tuple[int, torch.dtype] | None = None) -> list[torch.Tensor]:
    tensors = [memory.tensor(parts * COUNT) for parts in FORMS[form][0]]
    if wrong is not None:
        position, dtype = wrong
        tensors[position] = memory.tensor(tensors[position].numel(), dtype=dtype)
    return tensors


def finish(work: Any) -> None:
    if work is not None:
        work.wait(timedelta(seconds=20))


def _reduce(group: Any, memory: Memory, op: Any, dtype: torch.dtype) -> Any:
    return group.allreduce([memory.tensor(COUNT, dtype=dtype)], options(ALL_REDUCE, reduceOp=op))


def _eye() -> torch.Tensor:
    return torch.eye(3).to_sparse()


def _peer() -> int:
    return 1 - dist.get_rank()


# Calls that cannot work, by name; each is made on all ranks.
MISTAKES: dict[str, Callable[[Any, Memory], Any]] = {
    # lists
    "allreduce: no tensor": lambda g, m: g.allreduce([]),
    "allreduce_coalesced: no tensor": lambda g, m: g.allreduce_coalesced([], COALESCED()),
    "broadcast: no tensor": lambda g, m: g.broadcast([], BROADCAST()),
    "reduce: two tensors": lambda g, m: g.reduce([m.tensor(4), m.tensor(4)], REDUCE()),
    "allgather: no list": lambda g, m: g.allgather([], [m.tensor(4)]),
    "allgather: empty list": lambda g, m: g.allgather([[]], [m.tensor(4)]),
    "allgather: short list": lambda g, m: g.allgather([[m.tensor(4)]], [m.tensor(4)]),
    "allgather: long list": lambda g, m: g.allgather([[m.tensor(4) for _ in range(3)]], [m.tensor(4)]),
    "allgather: two inputs": lambda g, m: g.allgather(
        [[m.tensor(4), m.tensor(4)]], [m.tensor(4), m.tensor(4)]
    ),
    "coalesced all-gather: more outputs": lambda g, m: g.allgather_into_tensor_coalesced(
        [m.tensor(8), m.tensor(8)], [m.tensor(4)], ALL_GATHER()
    ),
    "coalesced all-gather: more inputs": lambda g, m: g.allgather_into_tensor_coalesced(
        [m.tensor(8)], [m.tensor(4), m.tensor(4)], ALL_GATHER()
    ),
    "coalesced all-gather: none": lambda g, m: g.allgather_into_tensor_coalesced([], [], ALL_GATHER()),
    "allgather_coalesced: one list": lambda g, m: g.allgather_coalesced(
        [[m.tensor(4)]], [m.tensor(4)], ALL_GATHER()
    ),
    "allgather_coalesced: short lists": lambda g, m: g.allgather_coalesced(
        [[m.tensor(4)], [m.tensor(4)]], [m.tensor(4), m.tensor(4)], ALL_GATHER()
    ),
    "reduce_scatter: short list": lambda g, m: g.reduce_scatter(
        [m.tensor(4)], [[m.tensor(4)]], REDUCE_SCATTER()
    ),
    "reduce_scatter: long list": lambda g, m: g.reduce_scatter(
        [m.tensor(4)], [[m.tensor(4) for _ in range(3)]], REDUCE_SCATTER()
    ),
    "alltoall: short input": lambda g, m: g.alltoall([m.tensor(4), m.tensor(4)], [m.tensor(4)], TO_ALL()),
    "alltoall: short output": lambda g, m: g.alltoall([m.tensor(4)], [m.tensor(4), m.tensor(4)], TO_ALL()),
    # sizes
    "allgather: larger outputs": lambda g, m: g.allgather([[m.tensor(8), m.tensor(8)]], [m.tensor(4)]),
    "allgather: smaller outputs": lambda g, m: g.allgather([[m.tensor(2), m.tensor(2)]], [m.tensor(4)]),
    "_allgather_base: smaller": lambda g, m: g._allgather_base(m.tensor(4), m.tensor(4), ALL_GATHER()),
    "_allgather_base: larger": lambda g, m: g._allgather_base(m.tensor(12), m.tensor(4), ALL_GATHER()),
    "_allgather_base: no dims": lambda g, m: g._allgather_base(m.tensor(), m.tensor(0), ALL_GATHER()),
    "_reduce_scatter_base: smaller": lambda g, m: g._reduce_scatter_base(
        m.tensor(4), m.tensor(4), REDUCE_SCATTER()
    ),
    "_reduce_scatter_base: larger": lambda g, m: g._reduce_scatter_base(
        m.tensor(4), m.tensor(12), REDUCE_SCATTER()
    ),
    "alltoall: own part": lambda g, m: g.alltoall(
        [m.tensor(4), m.tensor(4)], [m.tensor(5), m.tensor(5)], TO_ALL()
    ),
    "alltoall_base: sizes": lambda g, m: g.alltoall_base(m.tensor(4), m.tensor(8), [], [], TO_ALL()),
    "alltoall_base: odd": lambda g, m: g.alltoall_base(m.tensor(3), m.tensor(3), [], [], TO_ALL()),
    "alltoall_base: no dims": lambda g, m: g.alltoall_base(m.tensor(), m.tensor(), [], [], TO_ALL()),
    "alltoall_base: sum of splits": lambda g, m: g.alltoall_base(
        m.tensor(4), m.tensor(4), [2, 3], [2, 2], TO_ALL()
    ),
    "alltoall_base: one split": lambda g, m: g.alltoall_base(m.tensor(4), m.tensor(4), [2, 2], [4], TO_ALL()),
    "alltoall_base: negative split": lambda g, m: g.alltoall_base(
        m.tensor(4), m.tensor(4), [5, -1], [5, -1], TO_ALL()
    ),
    "alltoall_base: own part": lambda g, m: g.alltoall_base(
        m.tensor(6), m.tensor(6), [2, 4], [4, 2], TO_ALL()
    ),
    # ranks and tags
    "broadcast: root 2": lambda g, m: g.broadcast([m.tensor(4)], options(BROADCAST, rootRank=2)),
    "broadcast: root -1": lambda g, m: g.broadcast([m.tensor(4)], options(BROADCAST, rootRank=-1)),
    "reduce: root 2": lambda g, m: g.reduce([m.tensor(4)], options(REDUCE, rootRank=2)),
    "gather: root 2": lambda g, m: g.gather([], [m.tensor(4)], options(c10d.GatherOptions, rootRank=2)),
    "scatter: root -1": lambda g, m: g.scatter([m.tensor(4)], [], options(c10d.ScatterOptions, rootRank=-1)),
    "send: to itself": lambda g, m: g.send([m.tensor(4)], dist.get_rank(), 0),
    "send: to rank 2": lambda g, m: g.send([m.tensor(4)], 2, 0),
    "recv: from rank -1": lambda g, m: g.recv([m.tensor(4)], -1, 0),
    "send: tag -1": lambda g, m: g.send([m.tensor(4)], _peer(), -1),
    # types and reductions
    "allreduce: uint16": lambda g, m: _reduce(g, m, ReduceOp.SUM, torch.uint16),
    "allreduce: MAX of complex": lambda g, m: _reduce(g, m, ReduceOp.MAX, torch.complex64),
    "allreduce: PRODUCT of complex": lambda g, m: _reduce(g, m, ReduceOp.PRODUCT, torch.complex64),
    "reduce: MIN of complex": lambda g, m: g.reduce(
        [m.tensor(4, dtype=torch.complex64)], options(REDUCE, reduceOp=ReduceOp.MIN)
    ),
    "allreduce: BAND of float32": lambda g, m: _reduce(g, m, ReduceOp.BAND, torch.float32),
    "allreduce: AVG of bool": lambda g, m: _reduce(g, m, ReduceOp.AVG, torch.bool),
    "allreduce: AVG of int8": lambda g, m: _reduce(g, m, ReduceOp.AVG, torch.int8),
    "allreduce: AVG of int64": lambda g, m: _reduce(g, m, ReduceOp.AVG, torch.int64),
    "_reduce_scatter_base: AVG of int32": lambda g, m: g._reduce_scatter_base(
        m.tensor(4, dtype=torch.int32),
        m.tensor(8, dtype=torch.int32),
        options(REDUCE_SCATTER, reduceOp=ReduceOp.AVG),
    ),
    "allreduce: PREMUL_SUM": lambda g, m: _reduce(g, m, dist._make_nccl_premul_sum(2.0), torch.float32),
    # memory
    "allreduce: several elements in one place": lambda g, m: g.allreduce([m.tensor(1).expand(4)]),
    "_allgather_base: several elements in one place": lambda g, m: g._allgather_base(
        m.tensor(1).expand(8), m.tensor(4), ALL_GATHER()
    ),
    "allgather: several elements in one place": lambda g, m: g.allgather(
        [[m.tensor(4), m.tensor(1).expand(4)]], [m.tensor(4)]
    ),
    "allreduce: conjugated": lambda g, m: g.allreduce([m.tensor(4, dtype=torch.complex64).conj()]),
    "allreduce: MAX of sparse": lambda g, m: g.allreduce(
        [_eye()], options(ALL_REDUCE, reduceOp=ReduceOp.MAX)
    ),
    "allreduce_coalesced: sparse": lambda g, m: g.allreduce_coalesced([m.tensor(4), _eye()], COALESCED()),
    "broadcast: sparse": lambda g, m: g.broadcast([_eye()], BROADCAST()),
    "allgather: sparse": lambda g, m: g.allgather([[_eye(), _eye()]], [_eye()]),
    "send: sparse": lambda g, m: g.send([_eye()], _peer(), 0),
}

GLOO_SERVES = {
    "alltoall_base: odd",  # leaves the last row out
    "alltoall_base: no dims",  # moves nothing
    "allreduce: several elements in one place",  # writes beside it
    "allreduce: conjugated",  # gives what it was given
}
"""Mistakes that gloo does not find."""

GLOO_DIES = {
    "send: to itself",
    "send: to rank 2",
    "send: tag -1",
    "recv: from rank -1",
    "alltoall_base: negative split",
}
"""Mistakes of which the process ends over gloo, or its group."""
