"""What ranks do with tensors on a device that works as late as it may (`late_device.py`)."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

import collective_cases
import test_pytorch_calls as calls
import test_pytorch_features as features
import torch
import torch.distributed as dist
from late_device import LateDevice, LateMemory

from shoal.collectives import ProcessGroup, Stripes
from shoal.collectives.ctypes_core import load_core
from shoal.collectives.device_memory import DeviceMemory
from shoal.collectives.host_buffers import HostBuffers
from shoal.collectives.native import NativeGroup
from shoal.collectives.options import Options
from shoal.collectives.shared_device import OneDevice
from shoal.collectives.staging import Staging
from shoal.spec.plan import Plan
from shoal.testing.check import Comparison, Trial

LATE = LateDevice()
PROMPT = LateDevice(is_prompt=True)

Parts = list[torch.Tensor]


def is_on_device(tensor: torch.Tensor) -> bool:
    """Tensors of int64 are the host's."""
    return tensor.dtype is not torch.int64


def _backend(device: LateDevice, memory: DeviceMemory, limit: int = 1 << 24) -> Any:
    def create(asked: Any, options: Any) -> ProcessGroup:
        core = load_core()
        assert core is not None
        native = NativeGroup(core, asked.store, asked.group_rank, asked.group_size, asked.timeout, Options())
        buffers = HostBuffers(locks_pages=False)
        one_device = OneDevice(native, memory, limit, least=0)
        return ProcessGroup(native, Staging(native, is_on_device, device.copies, buffers, one_device))

    return create


BACKENDS = {
    "shoal_late": _backend(LATE, LateMemory("apart")),
    "shoal_prompt": _backend(PROMPT, LateMemory("apart")),
    "shoal_late_shared": _backend(LATE, LateMemory("shared")),
    "shoal_prompt_shared": _backend(PROMPT, LateMemory("shared")),
    "shoal_pieces": _backend(PROMPT, LateMemory("shared"), 1 << 12),
}
for name, create in BACKENDS.items():
    dist.Backend.register_backend(name, create, extended_api=True, devices=["cpu"])


def wait_for_what_is_late(seed: int, backend: str) -> None:
    """Every collective on operands that late kernels make, with results that late kernels read."""
    group = dist.new_group(backend=backend)
    calls = list(_calls(group))
    for turn in range(2):
        begun = []
        for number, call in enumerate(calls):
            begun.append(_begin(call, seed + 100 * turn + number))
            if number % 3 == turn:  # some are waited for at once, others run beside the next
                _consume(begun[-1])
        for each in begun:
            _consume(each)
        LATE.synchronize()
        for each in begun:
            for given, wanted in zip(each["read"], each["wanted"], strict=True):
                collective_cases.same(given, wanted, each["call"].__name__)


def _begin(call: Callable[..., Any], seed: int) -> dict[str, Any]:
    rank, size = dist.get_rank(), dist.get_world_size()
    inputs = [collective_cases.make(seed, each, 12 * size, torch.float32) for each in range(size)]
    own, out = torch.full_like(inputs[rank], torch.nan), torch.full((12 * size * size,), torch.nan)
    LATE.launch(lambda: own.copy_(inputs[rank]))
    LATE.launch(lambda: out.fill_(-1.0))  # an earlier use of the memory that gets the result
    work, results, wanted = call(own, out, inputs)
    return {"call": call, "work": work, "results": results, "wanted": wanted, "read": []}


def _consume(begun: dict[str, Any]) -> None:
    """Wait, read the results by a late kernel, and overwrite them by another one."""
    if begun["read"]:
        return
    begun["work"].wait()
    for result in begun["results"]:
        read = torch.empty_like(result)
        begun["read"].append(read)
        LATE.launch(lambda read=read, result=result: read.copy_(result))
        LATE.launch(lambda result=result: result.fill_(torch.nan))


def _calls(group: Any) -> Iterator[Callable[..., Any]]:
    """Calls that get this rank's tensor, memory for results, and the tensors of all ranks."""
    rank, size = dist.get_rank(), dist.get_world_size()
    given: dict[str, Any] = {"group": group, "async_op": True}

    def all_reduce(own: torch.Tensor, out: torch.Tensor, inputs: Parts) -> Any:
        return dist.all_reduce(own, **given), [own], [sum(inputs)]

    def broadcast(own: torch.Tensor, out: torch.Tensor, inputs: Parts) -> Any:
        return dist.broadcast(own, size - 1, **given), [own], [inputs[-1]]

    def reduce(own: torch.Tensor, out: torch.Tensor, inputs: Parts) -> Any:
        work = dist.reduce(own, size - 1, **given)
        return work, [own], [sum(inputs) if rank == size - 1 else inputs[rank]]

    def all_gather(own: torch.Tensor, out: torch.Tensor, inputs: Parts) -> Any:
        return dist.all_gather_into_tensor(out, own, **given), [out], [torch.cat(inputs)]

    def all_gather_list(own: torch.Tensor, out: torch.Tensor, inputs: Parts) -> Any:
        parts = list(out.chunk(size))
        return dist.all_gather(parts, own, **given), parts, inputs

    def reduce_scatter(own: torch.Tensor, out: torch.Tensor, inputs: Parts) -> Any:
        result = out[:12]
        return dist.reduce_scatter_tensor(result, own, **given), [result], [sum(inputs).chunk(size)[rank]]

    def all_to_all(own: torch.Tensor, out: torch.Tensor, inputs: Parts) -> Any:
        sent = [12 * size - 3 * (size - 1), *[3] * (size - 1)]
        result = out[: sent[rank] * size]
        work = dist.all_to_all_single(result, own, [sent[rank]] * size, sent, **given)
        return work, [result], [torch.cat([each.split(sent)[rank] for each in inputs])]

    def coalesced(own: torch.Tensor, out: torch.Tensor, inputs: Parts) -> Any:
        parts = list(own.chunk(size))[::-1]
        gathered = list(out.chunk(size))
        work = group.allgather_into_tensor_coalesced(gathered, parts)
        wanted = [torch.cat([each.chunk(size)[-1 - index] for each in inputs]) for index in range(size)]
        return work, gathered, wanted

    def ring(own: torch.Tensor, out: torch.Tensor, inputs: Parts) -> Any:
        result = out[: own.numel()]
        pair = [
            dist.P2POp(dist.irecv, result, (rank - 1) % size, group),
            dist.P2POp(dist.isend, own, (rank + 1) % size, group),
        ]
        return _Both(dist.batch_isend_irecv(pair)), [result], [inputs[rank - 1]]

    def of_the_host(own: torch.Tensor, out: torch.Tensor, inputs: Parts) -> Any:
        counted = torch.tensor([rank + 1])
        dist.all_reduce(counted, group=group)
        assert counted.item() == size * (size + 1) // 2
        return dist.barrier(**given), [], []

    places = [(0, 2), (2 * size + 1, 3)]  # first element and elements of a part, of two tensors
    stripes = Stripes([(4 * first, 4 * part) for first, part in places])

    def gather_stripes(own: torch.Tensor, out: torch.Tensor, inputs: Parts) -> Any:
        parts = [own[first : first + size * part] for first, part in places]
        wanted = [
            torch.cat([each[first + index * part :][:part] for index, each in enumerate(inputs)])
            for first, part in places
        ]
        return group.all_gather_stripes(own, stripes), parts, wanted

    def scatter_stripes(own: torch.Tensor, out: torch.Tensor, inputs: Parts) -> Any:
        parts = [own[first + rank * part :][:part] for first, part in places]
        wanted = [sum(inputs)[first + rank * part :][:part] for first, part in places]
        return group.reduce_scatter_stripes(own, stripes), parts, wanted

    yield from (all_reduce, of_the_host, broadcast, reduce, all_gather, all_gather_list, reduce_scatter)
    yield from (all_to_all, coalesced, ring, gather_stripes, scatter_stripes)


class _Both:
    def __init__(self, works: list[dist.Work]) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()


def wait_twice_drop_and_poll(backend: str) -> None:
    """A second stream may wait; nobody need wait; to ask is enough to go on; futures have the tensor."""
    group, rank, size = dist.new_group(backend=backend), dist.get_rank(), dist.get_world_size()
    total = size * (size + 1) / 2

    def begin(elements: int = 70_000) -> tuple[torch.Tensor, Any]:
        own = torch.full((elements,), torch.nan)
        LATE.launch(lambda: own.fill_(rank + 1.0))
        return own, dist.all_reduce(own, group=group, async_op=True)

    own, work = begin()
    work.wait()
    beside, read = LATE.Stream(), torch.zeros(70_000)
    with LATE.stream(beside):
        work.wait()
        LATE.launch(lambda: read.copy_(own))
    beside.run_to(len(beside.work))
    assert torch.all(read == total)

    dropped = [begin()[0] for _ in range(8)]
    gc.collect()
    own, work = begin()
    while not work.is_completed():
        threading.Event().wait(1e-3)
    assert torch.all(own == total)
    assert work.is_success()
    assert len(dropped) == 8

    own, work = begin(3)
    assert work.get_future().wait()[0] is own
    LATE.synchronize()
    assert own.tolist() == [total] * 3


def receive_on_another_stream() -> None:
    """A stream that waits for a message writes it after the uses before the call, on the caller's stream."""
    group, rank = dist.new_group(backend="shoal_late"), dist.get_rank()
    dist.send(torch.full((10,), 1.0 + rank), 1 - rank, group=group)
    received = torch.empty(10)
    LATE.launch(lambda: received.fill_(-1.0))
    work = dist.irecv(received, 1 - rank, group=group)
    with LATE.stream(LATE.Stream()) as beside:
        work.wait()
        beside.run_to(len(beside.work))
    LATE.synchronize()
    assert received.tolist() == [2.0 - rank] * 10


def reuse_host_buffers() -> int:
    """Number of buffers that this rank made for messages, which the device copies late."""
    group: Any = dist.new_group(backend="shoal_late")
    made: list[int] = []
    buffers = group._staging._buffers
    new = buffers._new
    buffers._new = lambda size: made.append(size) or new(size)
    tensors = [torch.full((20_000,), float(number)) for number in range(20)]
    if dist.get_rank() == 0:
        for each in tensors:
            dist.send(each, 1, group=group)
    else:
        received = [torch.empty(20_000) for _ in tensors]
        for each in received:  # the device copies it later, and the next message comes at once
            dist.recv(each, 0, group=group)
        LATE.synchronize()
        assert [each[-1].item() for each in received] == list(range(20))
    return len(made)


def use_another_backend_for_gpus() -> str:
    """The error for a tensor on a device of a group that was asked to have gloo for it."""
    group = dist.new_group(backend="cpu:shoal_late,cuda:gloo")
    try:
        dist.all_reduce(torch.ones(2), group=group)
    except RuntimeError as error:
        return str(error)
    return ""


def use_what_pytorch_builds_on_groups() -> None:
    """DistributedDataParallel, FSDP2, DTensors, functional collectives, objects: over the default group."""
    features.ddp()
    features.fsdp2(True)
    features.redistribute()
    calls.functional_collectives()
    calls.objects()
    calls.messages_in_a_batch()


def refuse_mixed_operands() -> str:
    """The error for an input on the host and an output on the device; the group goes on after it."""
    group: Any = dist.new_group(backend="shoal_late")
    own = torch.ones(2)
    try:
        group._staging._is_on_device = lambda tensor: tensor is own
        dist.all_gather_into_tensor(torch.empty(2 * dist.get_world_size()), own, group=group)
    except RuntimeError as error:
        group._staging._is_on_device = is_on_device
        dist.barrier(group=group)
        return str(error)
    return ""


def run_cases(seed: int, cases: int, backend: str) -> None:
    """Random cases on a device whose own stream is prompt."""
    collective_cases.run_cases(seed, cases, backend=backend)


def compare(plans: list[str]) -> list[str]:
    """On the first rank, how each Plan compares with one device."""
    shape = {"vocab_size": 64, "layers": 4, "hidden": 32, "heads": 4, "kv_heads": 2, "ffn": 48, "seq": 32}
    comparison = Comparison(Trial(model_options=shape, sequence=16, steps=2), torch.device("cpu"))
    verdicts = [comparison.check(Plan.parse(plan)) for plan in plans]
    return [f"{each.outcome} {each.reason}" for each in verdicts if each is not None]
