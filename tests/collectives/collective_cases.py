"""Collectives by random cases, on every rank, against what one process computes from everybody's inputs."""

from __future__ import annotations

import os
import random
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import ReduceOp

from shoal.collectives import Options

DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int8,
    torch.uint8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bool,
)
REDUCTIONS = (ReduceOp.SUM, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT)
BITWISE = (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR)
SIZES = (0, 1, 2, 3, 7, 64, 1000, 4097, 70_001, 300_000)


def make(seed: int, rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Rank `rank`'s input: small whole numbers, so that sums are exact in every type."""
    generator = torch.Generator().manual_seed(seed * 1000 + rank)
    low, high = (0, 2) if dtype in (torch.bool, torch.uint8) else (-3, 4)
    return torch.randint(low, high, (count,), generator=generator).to(dtype)


def misaligned(tensor: torch.Tensor, offset: int) -> torch.Tensor:
    """The same elements, beginning `offset` elements into another storage."""
    storage = torch.empty(tensor.numel() + offset, dtype=tensor.dtype)
    view = storage[offset:]
    view.copy_(tensor)
    return view


def fold(parts: list[torch.Tensor], op: ReduceOp) -> torch.Tensor:
    """The reduction, by one process."""
    dtype = parts[0].dtype
    stacked = torch.stack(parts)
    if op == ReduceOp.MIN:
        return stacked.amin(0)
    if op == ReduceOp.MAX:
        return stacked.amax(0)
    if op in (ReduceOp.SUM, ReduceOp.AVG) and dtype != torch.bool:
        wide = stacked.to(torch.float64 if dtype.is_floating_point else torch.int64).sum(0)
        return (wide if op == ReduceOp.SUM else wide / len(parts)).to(dtype)
    result = parts[0].clone()
    for part in parts[1:]:
        if op == ReduceOp.PRODUCT:
            result = result * part
        elif op == ReduceOp.BAND:
            result = result & part
        elif op == ReduceOp.BXOR:
            result = result ^ part
        else:  # a sum of booleans is "or"
            result = result | part
    return result


def operations_of(dtype: torch.dtype) -> list[ReduceOp]:
    return [*REDUCTIONS, *((ReduceOp.AVG,) if dtype.is_floating_point else BITWISE)]


def same(given: torch.Tensor, wanted: torch.Tensor, what: object) -> None:
    # AVG in 64-bit floats divides in another order than the reference may: one rounding apart.
    if given.dtype.is_floating_point:
        torch.testing.assert_close(given, wanted, msg=lambda text: f"{what}: {text}")
    else:
        assert torch.equal(given, wanted), what


def run_cases(
    seed: int,
    cases: int,
    algorithms: dict[str, str] | None = None,
    ranks_per_host: int | None = None,
    direct_reads: bool = True,
    backend: str | None = None,
    aggregator: str = "",
) -> None:
    """Every collective `cases` times, with random sizes, types, reductions, offsets and roots.

    With `ranks_per_host` the ranks take themselves to be on several hosts, and communicate over the loopback.
    """
    size, rank = dist.get_world_size(), dist.get_rank()
    hosts = (
        {}
        if ranks_per_host is None
        else {"SHOAL_HOST_ID": f"host {rank // ranks_per_host}", "MASTER_ADDR": "127.0.0.1"}
    )
    with mock.patch.dict(os.environ, hosts):
        options = Options(algorithms=algorithms or {}, direct_reads=direct_reads, aggregator=aggregator)
        group = dist.new_group(backend=backend, pg_options=options)
    choose = random.Random(seed)
    for case in range(cases):
        dtype = choose.choice(DTYPES)
        op = choose.choice(operations_of(dtype))
        count = choose.choice(SIZES)
        root = choose.randrange(size)
        offset = choose.randrange(3)
        what = (seed, case, dtype, op, count, root, offset)
        inputs = [make(seed + case, each, count, dtype) for each in range(size)]
        own = misaligned(inputs[rank], offset)

        reduced = own.clone()
        dist.all_reduce(reduced, op, group=group)
        same(reduced, fold(inputs, op), ("all_reduce", *what))

        reduced = own.clone()
        dist.reduce(reduced, root, op, group=group)
        same(reduced, fold(inputs, op) if rank == root else inputs[rank], ("reduce", *what))

        given = own.clone()
        dist.broadcast(given, root, group=group)
        same(given, inputs[root], ("broadcast", *what))

        gathered = torch.empty(size * count, dtype=dtype)
        dist.all_gather_into_tensor(gathered, own, group=group)
        same(gathered, torch.cat(inputs), ("all_gather", *what))

        wholes = [make(seed + case + 7, each, count * size, dtype) for each in range(size)]
        scattered = torch.empty(count, dtype=dtype)
        dist.reduce_scatter_tensor(scattered, wholes[rank], op, group=group)
        same(scattered, fold(wholes, op).chunk(size)[rank] if count else scattered, ("reduce_scatter", *what))

        parts = [torch.empty_like(own) for _ in range(size)] if rank == root else None
        dist.gather(own, parts, root, group=group)
        if parts is not None:
            same(torch.cat(parts), torch.cat(inputs), ("gather", *what))

        part = torch.empty_like(own)
        dist.scatter(
            part,
            list(wholes[root].split(count))
            if rank == root and count
            else ([own] * size if rank == root else None),
            root,
            group=group,
        )
        same(part, wholes[root][rank * count : (rank + 1) * count], ("scatter", *what))

        counts = [[choose.randrange(0, 2 + count // size) for _ in range(size)] for _ in range(size)]
        sent = [make(seed + case + 9, each, sum(counts[each]), dtype) for each in range(size)]
        received = torch.empty(sum(counts[each][rank] for each in range(size)), dtype=dtype)
        dist.all_to_all_single(
            received, sent[rank], [counts[each][rank] for each in range(size)], counts[rank], group=group
        )
        wanted = torch.cat([sent[each].split(counts[each])[rank] for each in range(size)])
        same(received, wanted, ("all_to_all", *what))

        tag = choose.randrange(3)
        work = dist.isend(own, (rank + 1) % size, group=group, tag=tag)
        passed = torch.empty_like(own)
        dist.recv(passed, (rank - 1) % size, group=group, tag=tag)
        work.wait()
        same(passed, inputs[rank - 1], ("send", *what))
    dist.barrier(group=group)
    dist.destroy_process_group(group)
