"""What ranks do in the memory of a device that they share (`late_device.py`)."""

from __future__ import annotations

import contextlib
import os
import random
import time
import warnings
import weakref
from collections.abc import Iterator
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from device_cases import LATE
from fault_ranks import Ended, form
from late_device import LateMemory
from torch.distributed.distributed_c10d import ReduceOp

from shoal.collectives import Stripes, shared_device
from shoal.collectives.host_buffers import DeviceCopies
from shoal.collectives.staging import Staging
from shoal.errors import CollectiveError


@contextlib.contextmanager
def _group(backend: str = "shoal_prompt_shared", **options: Any) -> Iterator[Any]:
    group = dist.new_group(backend=backend, **options)
    yield group
    dist.destroy_process_group(group)


def _is_there(group: Any) -> bool:
    """Whether the group works in the device's memory."""
    return group._staging._one_device._device is not None


def _numbers(count: int, dtype: torch.dtype, rank: int) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(rank)).to(dtype)


def sum_as_the_host_does() -> list[torch.Tensor]:
    """Sums and averages, which are the host's within rounding; for the ranks to compare."""
    rank, size, sums = dist.get_rank(), dist.get_world_size(), []
    with _group() as there, _group("shoal_prompt") as by_host:
        for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
            for op in (ReduceOp.SUM, ReduceOp.AVG):
                sums.append(_numbers(10_007, dtype, rank))
                dist.all_reduce(sums[-1], op, group=there)
                wanted = _numbers(10_007, dtype, rank)
                dist.all_reduce(wanted, op, group=by_host)
                torch.testing.assert_close(sums[-1], wanted)
        terms = [_numbers(5000, torch.bfloat16, each).float() for each in range(size)]
        rounded_once = sum(terms[1:], terms[0]).bfloat16()
        summed = _numbers(5000, torch.bfloat16, rank)
        dist.all_reduce(summed, group=there)
        assert torch.equal(summed, rounded_once)
        assert _is_there(there)
        assert not _is_there(by_host)
    return sums


def work_in_pieces_that_overlap() -> None:
    """Gather and scatter in place, and onto a shifted operand, in many rounds."""
    rank, size, part = dist.get_rank(), dist.get_world_size(), 3001
    wholes = [_numbers(size * part, torch.float32, each) for each in range(size)]
    with _group("shoal_pieces") as group:
        for shift in (0, 1, 700):
            memory = torch.zeros(size * part + shift)
            own = memory[rank * part + shift :][:part].copy_(wholes[rank][:part])
            dist.all_gather_into_tensor(memory[: size * part], own, group=group)
            assert torch.equal(memory[: size * part], torch.cat([each[:part] for each in wholes]))
            memory[: size * part] = wholes[rank]
            result = memory[rank * part + shift :][:part]
            dist.reduce_scatter_tensor(result, memory[: size * part], group=group)
            torch.testing.assert_close(result, sum(wholes)[rank * part :][:part])
        assert group._staging._one_device._shared.capacity == 1 << 12


def move_stripes(seed: int, backend: str) -> None:
    """Random stripes with gaps between them, gathered and summed in place, none by way of the host."""
    rank, size, choose = dist.get_rank(), dist.get_world_size(), random.Random(seed)
    not_there = AssertionError("stripes went by way of the host")
    with _group(backend) as group, mock.patch.object(Staging, "_read", side_effect=not_there):
        for case in range(8):
            places, end = list[tuple[int, int]](), 0
            for _ in range(case):
                places.append((end + choose.randrange(3), choose.choice((0, 1, 7, 333, 4097))))
                end = places[-1][0] + size * places[-1][1]
            dtype = choose.choice((torch.float32, torch.bfloat16, torch.float64))
            stripes = Stripes([(first * dtype.itemsize, part * dtype.itemsize) for first, part in places])
            given = [_whole_numbers(seed + case, each, end + 2, dtype) for each in range(size)]

            wanted = given[rank].clone()
            for first, part in places:
                for each, theirs in enumerate(given):
                    own = slice(first + each * part, first + (each + 1) * part)
                    wanted[own] = theirs[own]
            buffer = given[rank].clone()
            group.all_gather_stripes(buffer, stripes).wait()
            assert torch.equal(buffer, wanted), places

            buffer = given[rank].clone()
            group.reduce_scatter_stripes(buffer, stripes).wait()
            for first, part in places:
                own = slice(first + rank * part, first + (rank + 1) * part)
                assert torch.equal(buffer[own], torch.stack(given).sum(0)[own]), places
        assert _is_there(group)


def _whole_numbers(seed: int, rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Whole numbers, whose sums are exact in every type."""
    generator = torch.Generator().manual_seed(100 * seed + rank)
    return torch.randint(-9, 9, (count,), generator=generator).to(dtype)


def refuse_stripes() -> list[str]:
    """The errors for stripes that do not fit their buffer; the group goes on after them."""
    texts = []
    with _group() as group:
        buffer = torch.ones(64)
        for places in ([(0, 132)], [(0, 64), (120, 4)], [(0, 6)]):
            for call in (group.all_gather_stripes, group.reduce_scatter_stripes):
                try:
                    call(buffer, Stripes(places))
                except CollectiveError as failure:
                    texts.append(f"{failure.fault}: {failure}")
        dist.all_reduce(buffer, group=group)
        assert torch.all(buffer == dist.get_world_size())
    return texts


def call_out_of_step() -> None:
    """Messages, the host's tensors and another group pass a collective that a rank has not reached."""
    rank, size = dist.get_rank(), dist.get_world_size()
    with _group("shoal_late_shared") as group, _group("shoal_late_shared") as other:
        for turn in range(2):  # before it is known that the ranks share a device, and after
            own, passed, on_host = torch.full((1000,), rank + 1.0), torch.zeros(10), torch.tensor([1])
            if rank == 0:
                work = dist.all_reduce(own, group=group, async_op=True)
                dist.send(torch.full((10,), 3.0), 1, group=group)
                dist.send(torch.tensor([4]), 1, group=group)
                time.sleep(0.05)  # so that the all-reduce is under way
                if turn == 1:  # once it is known
                    dist.all_reduce(on_host, group=group, async_op=True)
                dist.barrier(group=other)
            else:
                if rank == 1:
                    dist.recv(passed, 0, group=group)
                    dist.recv(counted := torch.zeros(1, dtype=torch.int64), 0, group=group)
                    assert counted.item() == 4
                dist.barrier(group=other)
                work = dist.all_reduce(own, group=group, async_op=True)
                if turn == 1:
                    dist.all_reduce(on_host, group=group)
            work.wait()
            LATE.synchronize()
            assert torch.all(own == size * (size + 1) / 2)
            assert rank != 1 or torch.all(passed == 3)
        assert _is_there(group)


def read_late() -> None:
    """A buffer keeps its content until the slowest rank has read it."""
    rank, compute = dist.get_rank(), DeviceCopies.compute

    def compute_late(*arguments: Any, **named: Any) -> None:
        time.sleep(0.01 * rank)
        compute(*arguments, **named)

    with _group() as group, mock.patch.object(DeviceCopies, "compute", compute_late):
        for turn in range(4):
            given = torch.full((100,), float(turn + rank))
            dist.broadcast(given, 0, group=group)
            assert torch.all(given == turn)
            own = torch.full((100,), float(turn + rank))
            dist.all_reduce(own, group=group)
            assert torch.all(own == 3 * turn + 3)


class _Made(LateMemory):
    """Remembers what it made, while that lives, and can refuse to make more than so many bytes."""

    def __init__(self) -> None:
        super().__init__("shared")
        self.made: list[weakref.ref[Any]] = []
        self.most = 1 << 40
        self.opens = True

    def empty(self, nbytes: int, device: torch.device) -> torch.Tensor:
        if nbytes > self.most:
            raise MemoryError(f"{nbytes} bytes")
        memory = super().empty(nbytes, device)
        self.made.append(weakref.ref(memory.untyped_storage()))
        return memory

    def open(self, exported: bytes) -> torch.Tensor:
        if not self.opens:
            raise OSError("not permitted")
        return super().open(exported)

    def living(self) -> int:
        return sum(each() is not None for each in self.made)


def grow_and_free() -> None:
    """The buffer grows with the operands, once on all ranks; the old one is freed, and all with the group."""
    with _group() as group:
        memory = group._staging._one_device._shared._memory = _Made()
        for elements, capacity in ((10, 1 << 20), (300_000, 1 << 21), (10, 1 << 21), (3_000_000, 1 << 24)):
            own = torch.ones(elements)
            dist.all_reduce(own, group=group)
            assert torch.all(own == dist.get_world_size())
            assert group._staging._one_device._shared.capacity == capacity
        assert len(memory.made) == 3
        assert memory.living() == 1
    assert memory.living() == 0


def do_with_what_there_is() -> list[str]:
    """Warnings where a rank cannot have a buffer; if it cannot have a larger one, operands go in pieces."""
    rank, size = dist.get_rank(), dist.get_world_size()
    texts = []
    for most, opens, is_there in ((1 << 20, True, True), (0, True, False), (1 << 40, False, False)):
        with _group() as group, warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            memory = group._staging._one_device._shared._memory = _Made()
            if rank == 1:
                memory.most, memory.opens = most, opens
            own = torch.ones(600_000)
            for _ in range(2):
                dist.all_reduce(own, group=group)
            assert torch.all(own == size**2)
            assert _is_there(group) == is_there
            texts += [str(each.message) for each in warned]
    return texts


def be_told_to_go_by_the_host() -> bool:
    """Whether a group works in the device's memory of which one rank was told not to."""
    with _group() as group:
        group._native.direct_reads = dist.get_rank() != 1
        own = torch.ones(10)
        dist.all_reduce(own, group=group)
        assert torch.all(own == dist.get_world_size())
        return _is_there(group)


def fail(how: str) -> tuple[str, str, int]:
    """Text, fault and rank of the error where rank 1 does otherwise than the others."""
    is_odd = dist.get_rank() == 1
    group: Any = dist.new_group(backend="shoal_prompt_shared", timeout=timedelta(seconds=1))
    dist.all_reduce(torch.ones(10), group=group)
    dist.barrier()
    try:
        if how == "never comes" and is_odd:
            time.sleep(1.5)
        elif how == "calls another":
            dist.all_reduce(torch.ones(11 if is_odd else 10), group=group)
        elif how == "has other stripes":
            stripes = Stripes([(4, 8), (28, 4)] if is_odd else [(0, 8), (28, 4)])
            group.all_gather_stripes(torch.ones(10), stripes).wait()
        elif how == "fails" and is_odd:
            with mock.patch.object(shared_device, "rounds", side_effect=MemoryError("no memory")):
                dist.all_reduce(torch.ones(10), group=group)
        else:
            dist.all_reduce(torch.ones(10), group=group)
    except CollectiveError as failure:
        return str(failure), failure.fault, failure.rank
    finally:
        dist.barrier()
        dist.destroy_process_group(group)
    return "", "", -1


def leave_what_others_never_call() -> float:
    """Seconds that a rank takes to leave a group in which it waits for others."""
    group: Any = dist.new_group(backend="shoal_prompt_shared")
    dist.all_reduce(torch.ones(10), group=group)
    dist.barrier()
    begun = time.monotonic()
    if dist.get_rank() == 0:
        dropped = dist.all_reduce(torch.ones(10), group=group, async_op=True)
        with mock.patch("shoal.collectives.staging._FAREWELL", 0.2):
            dist.destroy_process_group(group)
        del dropped
    took = time.monotonic() - begun
    dist.barrier()
    if dist.get_rank():
        dist.destroy_process_group(group)
    return took


def be_lost(tell: Connection, rank: int, size: int, store: str, *, is_known: bool) -> None:
    """Wait for a rank that is killed, before or after ranks know that they share a device; tell the end."""
    form(rank, size, store)
    group: Any = dist.new_group(backend="shoal_prompt_shared")
    if is_known:
        dist.all_reduce(torch.ones(10), group=group)
    dist.barrier()
    tell.send(os.getpid())
    if rank == 1:
        time.sleep(3600)
    try:
        dist.all_reduce(torch.ones(10), group=group)
    except CollectiveError as failure:
        tell.send(Ended(time.monotonic(), failure.fault, failure.rank, str(failure)))
