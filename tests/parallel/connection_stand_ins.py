"""A backend whose ranks connect when they first need it, as NCCL's: a call then waits for the other ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from shoal.collectives import Options, ProcessGroup
from shoal.collectives.ctypes_core import load_core
from shoal.collectives.native import NativeGroup
from shoal.collectives.operation import Operation
from shoal.errors import CommunicationError
from shoal.parallel import Axes, axes, communication
from shoal.parallel.communication import Connections, Pending
from shoal.record import NullRecorder
from shoal.spec.plan import Plan


class ConnectsLate(ProcessGroup):
    """A group whose first collective of a kind, and first message between two ranks, wait for the others."""

    patience = timedelta(seconds=60)

    def __init__(self, store: Any, native: NativeGroup) -> None:
        super().__init__(native)
        self._store = store
        self._connected: set[str] = set()

    def _connect(self, what: str, ranks: Sequence[int]) -> None:
        if what not in self._connected:
            self._connected.add(what)
            self._store.set(f"{what} {self._rank}", "here")
            self._store.wait([f"{what} {rank}" for rank in ranks], self.patience)

    def _run(self, operation: Operation, opts: Any) -> dist.Work:
        self._connect(operation.collective, range(self._size))
        if operation.collective == "all_to_all":  # messages of each rank to each
            self._connected |= {f"{one} to {two}" for one in range(self._size) for two in range(self._size)}
        return super()._run(operation, opts)

    def send(self, tensors: Any, peer: int, tag: int = 0) -> dist.Work:
        self._connect(f"{self._rank} to {peer}", (self._rank, peer))
        return super().send(tensors, peer, tag)

    def recv(self, tensors: Any, peer: int, tag: int = 0) -> dist.Work:
        self._connect(f"{peer} to {self._rank}", (self._rank, peer))
        return super().recv(tensors, peer, tag)


def _create(asked: Any, options: Any) -> ProcessGroup:
    core = load_core()
    assert core is not None
    native = NativeGroup(core, asked.store, asked.group_rank, asked.group_size, asked.timeout, Options())
    return ConnectsLate(asked.store, native)


dist.Backend.register_backend("connects_late", _create, extended_api=True, devices=["cpu"])


@contextmanager
def _as_nccl() -> Iterator[None]:
    """Let `Axes` take the backend for NCCL."""
    new_group = dist.new_group

    def made(members: list[int], *, timeout: timedelta, **of_nccl: Any) -> Any:
        assert of_nccl["backend"] == "nccl"
        return new_group(members, timeout=timeout, backend="connects_late")

    with (
        patch.object(dist, "new_group", made),
        patch.object(axes, "_uses_nccl", lambda: True),
        patch.object(axes, "_device", lambda: torch.device("cpu")),
        patch.object(communication, "_SIZES", (1, 64)),
    ):
        yield


def use_groups_in_other_orders(text: str, *, is_connected: bool) -> str:
    """Each rank begins its collectives and messages with another one; returns the error, if it is one."""
    made: Any = Connections if is_connected else _Never
    with _as_nccl(), patch.object(axes, "Connections", made):
        built = Axes.build(Plan.parse(text), NullRecorder())
    uses = _uses(built)
    turn = dist.get_rank() % len(uses)
    try:
        with patch.object(ConnectsLate, "patience", timedelta(seconds=60 if is_connected else 1)):
            for each in [use() for use in uses[turn:] + uses[:turn]]:
                each.wait()
    except (RuntimeError, CommunicationError) as error:
        return str(error)
    return ""


class _Never:
    def __init__(self, rank: int, device: torch.device | None) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *arguments: None


def _uses(built: Axes) -> list[Callable[[], Pending]]:
    """One use of each group, or two if they are messages; none waits for another one's result."""
    pp, shard, reduce = built.pp, built.dense.shard, built.dense.reduce
    of_group: dict[Any, list[Callable[[], Pending]]] = {
        None: [lambda: built.world.all_reduce(torch.ones(8), "norm")],
        shard.group: [lambda: shard.all_gather(torch.ones(4 * shard.size), "weights")],
        reduce.group: [
            lambda: reduce.reduce_scatter(torch.ones(4), torch.ones(4 * reduce.size), "gradients")
        ],
    }
    if built.tp.size > 1:
        of_group[built.tp.group] = [lambda: built.tp.all_reduce(torch.ones(8), "partial sums")]
    if built.cp.size > 1:
        of_group[built.cp.group] = [lambda: built.cp.shift(torch.ones(4), torch.ones(4), "keys")]
    for other, channel in pp.channels.items():
        of_group[channel] = [
            lambda other=other: pp.send(torch.ones(4), other, "there"),
            lambda other=other: pp.receive(torch.ones(4), other, "back"),
        ]
    return [use for uses in of_group.values() for use in uses]
