"""Checks of groups on one GPU: collectives of two ranks that share it, NCCL with one rank, holds.

Each `check_...` takes a device and returns a line of findings, or raises AssertionError. On a CPU the same
calls are tried with smaller tensors, over the backend's own memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from gpu_device import finish
from torch import Tensor

from shoal.collectives import Options
from shoal.collectives.staging import Staging
from shoal.machine.probe.device import CudaClock
from shoal.parallel.communication import Axis, Striped
from shoal.record import NullRecorder
from shoal.testing import RankPool

# torch 2.13 renames these.
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)

RANKS = 2
LARGE = 72 << 20
"""Elements of fp32 in 288 MiB, which is more than a buffer on the device has."""
TIMED = 16 << 20
"""Elements of fp32 in 64 MiB."""
SHARED_ONES = {"all_reduce", "all_reduce of the mean", "all_gather", "reduce_scatter", "broadcast"}
"""The collectives that take place in the device's memory; they are the first ones of `_cases`."""


class Case(NamedTuple):
    """One call, what it changes, and what that has to be afterwards."""

    name: str
    call: Callable[[], object]
    result: Tensor
    wanted: Tensor


def check_collectives_in_the_gpus_memory(device: torch.device) -> str:
    """Two ranks on one GPU: each collective against a CPU's arithmetic, odd sizes and 288 MiB, and GB/s."""
    return _in_ranks(_collectives, device, True)


def check_collectives_by_way_of_the_host(device: torch.device) -> str:
    """The same with direct_reads=False, as SHOAL_DIRECT_READS=0 sets it: all goes by way of the host."""
    return _in_ranks(_collectives, device, False)


def check_buckets_in_the_gpus_memory(device: torch.device) -> str:
    """Two ranks on one GPU: buckets of zero1 to zero3 are gathered and summed there, none by the host."""
    return _in_ranks(_buckets, device, True)


def check_buckets_by_way_of_the_host(device: torch.device) -> str:
    """Two ranks on one GPU: buckets with direct_reads=False, for the rates beside those in its memory."""
    return _in_ranks(_buckets, device, False)


def check_expandable_segments(device: torch.device) -> str:
    """Two ranks map each other's memory with expandable_segments:True; by which way they went, and GB/s."""
    return _in_ranks(_expandable, device)


def check_nccl_with_one_rank(device: torch.device) -> str:
    """NCCL with one rank: every collective that Shoal calls, also coalesced and in bf16, is right."""
    is_cuda = device.type == "cuda"
    if is_cuda:
        torch.cuda.set_device(device)
    bound = torch.device("cuda", torch.cuda.current_device()) if is_cuda else None
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if is_cuda else "shoal",
        store=dist.HashStore(), rank=0, world_size=1, device_id=bound,
    )  # fmt: skip
    try:
        names = []
        for dtype in (torch.float32, torch.bfloat16):
            for case in (*_cases(None, 70_001, dtype, device), *_coalesced(70_001, dtype, device)):
                _compare(case, f"{case.name} of {dtype}", device)
                names.append(case.name)
    finally:
        dist.destroy_process_group()
    return f"right in fp32 and bf16: {', '.join(dict.fromkeys(names))}"


def check_holds(device: torch.device) -> str:
    """The probe holds the GPU as long as it believes, within 10 %, also in a process that is just started."""
    if device.type != "cuda":
        return "a CPU is not held"
    torch.cuda.set_device(device)
    clock = CudaClock(device)
    found = []
    for wanted in (1e-3, 5e-3, 20e-3):
        clock.finish()
        first = clock.mark()
        clock.hold(wanted)
        second = clock.mark()
        clock.finish()
        seconds = clock.between(first, second)
        found.append(f"{wanted * 1e3:.0f} ms lasts {seconds * 1e3:.3f}")
        assert abs(seconds / wanted - 1) < 0.1, f"a hold of {wanted} s lasted {seconds} s"
    return f"{'; '.join(found)}; {clock._cycles / 1e9:.3f} GHz"


def _in_ranks(function: Callable[..., str], device: torch.device, *arguments: Any) -> str:
    """Return what the first rank finds; all ranks are on one device."""
    with RankPool("shoal") as pool:
        return pool.run(function, RANKS, str(device), *arguments, timeout=90.0)[0]


def _collectives(where: str, is_direct: bool) -> str:
    device = _device(where)
    group = dist.new_group(backend="shoal", pg_options=Options(direct_reads=is_direct))
    is_cuda, count = device.type == "cuda", 0
    for elements, dtypes in (
        (1, (torch.float32,)),
        (1003, (torch.bfloat16, torch.float32)),
        (1_000_003, (torch.bfloat16, torch.float32)),
        (LARGE if is_cuda else 300_007, (torch.float32,)),
    ):
        for dtype in dtypes:
            for case in _cases(group, elements, dtype, device):
                if elements == LARGE and case.name not in SHARED_ONES:
                    break
                _compare(case, f"{case.name} of {elements} {dtype}", device)
                count += 1
            _give_back(device)
    _assert_way(group, is_direct, device)
    rates = [
        f"{case.name} {_rate(case, group, device):.1f}"
        for case in _cases(group, TIMED if is_cuda else 1 << 18, torch.float32, device)
    ]
    return f"{count} results are right; GB/s of a rank's operand: {', '.join(rates)}"


def _cases(group: Any, elements: int, dtype: torch.dtype, device: torch.device) -> Iterator[Case]:
    """Yield the collectives of flat tensors, each with tensors of its own, which are freed after it."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    given = [_brought(each, elements, dtype) for each in range(size)]
    own, last, total = given[rank], size - 1, torch.stack(given).sum(0)

    def on_device(tensor: Tensor) -> Tensor:
        return tensor.to(device, copy=True)

    changed = on_device(own)
    yield Case("all_reduce", partial(dist.all_reduce, changed, group=group), changed, total)
    mean = partial(dist.all_reduce, changed := on_device(own), dist.ReduceOp.AVG, group)
    yield Case("all_reduce of the mean", mean, changed, total / size)
    got = torch.empty(size * elements, dtype=dtype, device=device)
    gather = partial(_all_gather, got, on_device(own), group=group)
    yield Case("all_gather", gather, got, torch.cat(given))
    del gather, mean
    whole = [torch.cat([each] * size) for each in given]
    got = torch.empty(elements, dtype=dtype, device=device)
    scatter = partial(_reduce_scatter, got, on_device(whole[rank]), group=group)
    yield Case("reduce_scatter", scatter, got, total)
    del scatter, whole
    changed = on_device(own)
    yield Case("broadcast", partial(dist.broadcast, changed, last, group), changed, given[last])
    changed = on_device(own)
    reduce = partial(dist.reduce, changed, last, group=group)
    yield Case("reduce", reduce, changed, total if rank == last else own)
    sent, got = torch.cat([own + each for each in range(size)]).to(device), got.new_empty(size * elements)
    exchange = partial(dist.all_to_all_single, got, sent, group=group)
    yield Case("all_to_all", exchange, got, torch.cat([each + rank for each in given]))
    if size == 1:
        return
    got = got.new_empty(elements)
    ring = partial(_ring, on_device(own), got, (rank + 1) % size, (rank - 1) % size, group)
    yield Case("messages", ring, got, given[rank - 1])


def _ring(sent: Tensor, got: Tensor, after: int, before: int, group: Any) -> None:
    pair = [dist.P2POp(dist.isend, sent, after, group), dist.P2POp(dist.irecv, got, before, group)]
    for work in dist.batch_isend_irecv(pair):
        work.wait()


def _coalesced(elements: int, dtype: torch.dtype, device: torch.device) -> Iterator[Case]:
    """Yield the collectives of a bucket as NCCL gets them; one rank has all parts, and sums only its own."""
    places = [(0, 3), (3, 0), (5, elements), (elements + 8, 1001)]
    whole = _brought(0, elements + 1009, dtype)
    striped = Striped(Axis("all", (0,), 0, None, NullRecorder()), places)
    for is_gather in (True, False):
        buffer = whole.to(device, copy=True)
        start = striped._coalesced(buffer, is_gather=is_gather)
        name = "coalesced " + ("all_gather" if is_gather else "reduce_scatter")
        yield Case(name, lambda start=start: start().wait(), buffer, whole)


def _buckets(where: str, is_direct: bool) -> str:
    device = _device(where)
    group: Any = dist.new_group(backend="shoal", pg_options=Options(direct_reads=is_direct))
    axis = Axis("shard", tuple(range(RANKS)), dist.get_rank(), group, NullRecorder())
    is_cuda, found = device.type == "cuda", []
    # 50 tensors of a block, whose parts are of 1 to some hundred thousand elements; and a vocabulary.
    block = [1 + 7 * number * number * (64 if is_cuda else 1) for number in range(50)]
    for name, parts in (("block", block), ("vocabulary", [LARGE if is_cuda else 100_003, 1])):
        for dtype in (torch.float32, torch.bfloat16):
            case_rates = []
            with mock.patch.object(Staging, "_read", _fails_if(is_direct and is_cuda)):
                for case in _bucket_cases(axis, parts, dtype, device):
                    _compare(case, f"{case.name} of a {name} in {dtype}", device)
                    case_rates.append(f"{case.name} {_rate(case, group, device):.1f}")
            size = sum(parts) * RANKS * dtype.itemsize / 2**20
            found.append(f"{name} of {size:.0f} MiB in {dtype.itemsize} bytes: {', '.join(case_rates)}")
        _give_back(device)
    _assert_way(group, is_direct, device)
    return f"GB/s of the bucket: {'; '.join(found)}"


def _bucket_cases(
    axis: Axis, parts: Sequence[int], dtype: torch.dtype, device: torch.device
) -> Iterator[Case]:
    places, end = [], 0
    for part in parts:
        places.append((end + 1, part))  # a gap before each
        end += 1 + RANKS * part
    given = [_brought(rank, end, dtype) for rank in range(RANKS)]
    striped = Striped(axis, places)
    gathered, summed = given[axis.index].clone(), given[axis.index].clone()
    for first, part in places:
        for rank in range(RANKS):
            own = slice(first + rank * part, first + (rank + 1) * part)
            gathered[own] = given[rank][own]
            if rank == axis.index:
                summed[own] = sum(each[own] for each in given)
    buffer = given[axis.index].to(device, copy=True)
    yield Case("all_gather", lambda: striped.all_gather(buffer, "check").wait(), buffer, gathered)
    other = given[axis.index].to(device, copy=True)

    def scatter() -> None:
        striped.reduce_scatter(other, "check").wait()

    yield Case("reduce_scatter", scatter, _OnlyOwn(other, places, axis.index), summed)


class _OnlyOwn:
    """The parts of one rank in a buffer, whose other elements are undefined after a reduce-scatter."""

    def __init__(self, buffer: Tensor, places: Sequence[tuple[int, int]], rank: int) -> None:
        self.buffer = buffer
        self._own = [slice(first + rank * part, first + (rank + 1) * part) for first, part in places]

    def of(self, tensor: Tensor) -> Tensor:
        return torch.cat([tensor[own] for own in self._own])


def _expandable(where: str) -> str:
    device = _device(where)
    if device.type == "cuda":  # before the first allocation, as PYTORCH_CUDA_ALLOC_CONF does
        torch.cuda.memory._set_allocator_settings("expandable_segments:True")
    group: Any = dist.new_group(backend="shoal", pg_options=Options())
    rates = []
    for elements in (1_000_003, LARGE if device.type == "cuda" else 300_007):
        case = next(_cases(group, elements, torch.float32, device))
        _compare(case, f"{case.name} of {elements}", device)
        rates.append(f"{elements * 4 / 2**20:.0f} MiB {_rate(case, group, device):.1f}")
    way = "a CPU has no such segments"
    if device.type == "cuda":
        segments = torch.cuda.memory_snapshot()
        assert all(each["is_expandable"] for each in segments), "the allocator has other segments"
        shared = group._staging._one_device
        way = (
            "in the GPU's memory" if shared._device is not None else f"by the host: {shared._shared.failure}"
        )
    return f"{way}; all_reduce, GB/s: {', '.join(rates)}"


def _device(where: str) -> torch.device:
    device = torch.device(where)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        device = torch.device("cuda", torch.cuda.current_device())
    return device


def _brought(rank: int, elements: int, dtype: torch.dtype) -> Tensor:
    """Return what a rank brings: whole numbers, small enough that sums and halves are exact in bf16."""
    pattern = (torch.arange(89) + 3 * rank).to(dtype)
    return pattern.repeat(-(-elements // 89))[:elements]


def _compare(case: Case, what: str, device: torch.device) -> None:
    case.call()
    finish(device)
    result: Any = case.result
    given, wanted = result, case.wanted
    if isinstance(result, _OnlyOwn):
        given, wanted = result.of(result.buffer), result.of(wanted)
    given = given.cpu()
    if not torch.equal(given, wanted):
        wrong = (given != wanted).nonzero()
        first = int(wrong[0])
        raise AssertionError(
            f"{what}: {len(wrong)} of {len(wanted)} elements are wrong; element {first} is "
            f"{given[first].item()}, wanted {wanted[first].item()}"
        )


def _rate(case: Case, group: Any, device: torch.device, repeats: int = 3) -> float:
    """Return GB/s of a rank's buffer."""
    result: Any = case.result
    buffer = result.buffer if isinstance(result, _OnlyOwn) else result
    case.call()
    finish(device)
    dist.barrier(group)
    began = time.perf_counter()
    for _ in range(repeats):
        case.call()
    finish(device)
    seconds = (time.perf_counter() - began) / repeats
    return float(buffer.numel() * buffer.element_size() / seconds / 1e9)


def _fails_if(is_wrong: bool) -> Any:
    if is_wrong:
        return mock.Mock(side_effect=AssertionError("a bucket went by way of the host"))
    return Staging._read


def _assert_way(group: Any, is_direct: bool, device: torch.device) -> None:
    shared = group._staging._one_device
    is_there = shared._device is not None
    assert device.type == "cpu" or is_there == is_direct, (
        f"the group works in the GPU's memory: {is_there}, wanted {is_direct}; {shared._shared.failure}"
    )


def _give_back(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.empty_cache()
