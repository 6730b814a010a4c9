"""Copies by way of two buffers: right on a device that works as late as it may, and small in memory."""

from __future__ import annotations

import importlib
import itertools
import mmap
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from cuda_runtime_stand_in import CudaRuntime
from hypothesis import given
from hypothesis import strategies as st
from late_device import LateDevice
from torch import nn

from shoal.checkpoint import (
    Piece,
    Region,
    SingleProcess,
    load,
    load_verified,
    read_manifest,
    save,
    shard,
    verify,
)
from shoal.checkpoint.files import Chunks
from shoal.collectives.host_buffers import BounceBuffers
from shoal.errors import CorruptCheckpointError
from shoal.train.snapshot import Snapshot

NBYTES = 4096
DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float64]


def late(device: LateDevice | None = None, nbytes: int = NBYTES) -> BounceBuffers:
    device = LateDevice() if device is None else device
    return BounceBuffers(nbytes, lambda tensor: True, device.copies, locks_pages=False)


@pytest.fixture
def used(monkeypatch):
    """Everything that uses the buffers takes all tensors for a late device's; returns what was made."""
    made = []

    def make(*arguments):
        made.append(late())
        return made[-1]

    for module in ("checkpoint.load", "checkpoint.shard", "train.snapshot"):
        monkeypatch.setattr(importlib.import_module(f"shoal.{module}"), "BounceBuffers", make)
    return made


@st.composite
def strided(draw):
    """A tensor of random values, with strides that need not be those of its shape."""
    shape = draw(st.lists(st.integers(1, 40), max_size=3))
    order = draw(st.permutations(range(len(shape))))
    dtype = draw(st.sampled_from(DTYPES))
    step = draw(st.integers(1, 2))
    values = torch.randint(-9, 9, [shape[dim] * step for dim in order])
    inverse = [order.index(dim) for dim in range(len(shape))]
    return values.to(dtype)[tuple(slice(None, None, step) for _ in shape)].permute(inverse)


@given(strided(), st.integers(8, 2000))
def test_what_goes_to_the_host_and_back_is_what_it_was(tensor, nbytes):
    with late(nbytes=nbytes) as buffers:
        there = buffers.get(tensor)
        assert there.stride() == torch.empty_like(tensor).stride()
        assert torch.equal(there, tensor)
        back = torch.zeros(tensor.numel() * 2, dtype=tensor.dtype)[::2].view(tensor.shape)
        buffers.put(back, there)
        other = torch.zeros(tensor.shape, dtype=torch.float64)
        buffers.put(other, there)
    assert torch.equal(back, tensor)
    assert torch.equal(other, tensor.double())


def test_values_are_read_in_order_and_a_buffer_is_not_filled_again_before_the_device_has_read_it():
    device, target, firsts = LateDevice(), torch.zeros(3000), []

    def read(first, host):
        firsts.append((first, len(host)))
        torch.arange(first, first + len(host), out=host)

    with late(device) as buffers:
        buffers.fill(target[:2000], torch.float32, read)
        assert not target[1024:].any()  # the device does it later
        buffers.fill(target[2000:], torch.float32, lambda first, host: read(first + 2000, host))
    assert torch.equal(target, torch.arange(3000.0))
    assert firsts == [(0, 1024), (1024, 976), (2000, 1000)]


def test_while_the_host_takes_a_part_the_next_one_is_on_its_way():
    device, source = LateDevice(), torch.arange(5000.0)
    begun = []
    copies = device.copies(torch.device("cpu"))
    read = copies.read
    copies.read = lambda *arguments: begun.append(None) or read(*arguments)
    buffers = BounceBuffers(NBYTES, lambda tensor: True, lambda device: copies, locks_pages=False)
    for number, part in enumerate(buffers.parts(source), 1):
        assert len(begun) == min(number + 1, 5)
        assert torch.equal(part, source[1024 * (number - 1) : 1024 * number])


def test_a_caller_that_ends_early_has_waited_for_the_copies_to_the_buffers():
    device = LateDevice()
    with late(device) as buffers:
        parts = buffers.parts(torch.arange(5000.0))
        next(parts)
        parts.close()
    assert all(stream.done == len(stream.work) for stream in device._streams[1:])


def test_tensors_on_no_device_are_copied_directly():
    buffers = BounceBuffers()
    value = torch.arange(6.0).view(2, 3).T
    copied = buffers.get(value)
    assert torch.equal(copied, value)
    assert copied.data_ptr() != value.data_ptr()
    target = torch.zeros(3, 2, dtype=torch.float64)
    buffers.put(target, value)
    assert torch.equal(target, value.double())


@pytest.mark.parametrize("limit", [1 << 30, 0])
def test_two_buffers_are_locked_whatever_goes_through_them(monkeypatch, limit):
    runtime = CudaRuntime(limit).install(monkeypatch)
    device = LateDevice()
    with BounceBuffers(NBYTES, lambda tensor: True, device.copies) as buffers:
        if limit:
            assert torch.equal(buffers.get(torch.ones(100_000)), torch.ones(100_000))
        else:
            with pytest.warns(UserWarning, match="cannot lock"):
                buffers.get(torch.ones(100_000))
        assert sum(runtime.locked.values()) == (2 * NBYTES if limit else 0)
    runtime.launch()


# -- checkpoints ------------------------------------------------------------------------------------


def state():
    generator = torch.Generator().manual_seed(1)
    return {
        "model/large": torch.randn(150, 100, generator=generator),
        "model/half": torch.randn(5000, generator=generator).half(),
        "model/scalar": torch.tensor(3.0),
        "model/flags": torch.rand(100, generator=generator) > 0.5,
        "optimizer/moment": torch.randn(70_001, generator=generator),
    }


def blank():
    return {name: torch.zeros_like(each) for name, each in state().items()}


def wholes(tensors):
    return [Piece.whole(name, each) for name, each in tensors.items()]


def test_a_state_on_a_device_is_saved_with_the_bytes_of_one_on_the_host(tmp_path, used, monkeypatch):
    path = save(tmp_path / "device", 1, wholes(state()), {}, SingleProcess())
    assert used
    monkeypatch.undo()
    elsewhere = save(tmp_path / "host", 1, wholes(state()), {}, SingleProcess())
    verify(path)
    assert read_manifest(path).files == read_manifest(elsewhere).files


def test_a_part_of_a_file_is_copied_before_the_next_one_is_asked_for():
    """So its buffer may be filled again, while the chunk that it went to is hashed and written."""
    part = bytearray(mmap.PAGESIZE * 2 + shard._PART)
    start = -torch.frombuffer(part, dtype=torch.uint8).data_ptr() % mmap.PAGESIZE

    def blocks():
        for number in range(9):
            yield memoryview(part)[start : start + shard._PART]
            part[:] = bytes([number + 1]) * len(part)

    content = b"".join(bytes(each) for each in list(Chunks().cut(itertools.islice(blocks(), 4))))
    assert content == b"".join(bytes([number]) * shard._PART for number in range(4))


@pytest.mark.parametrize("verified", [False, True])
def test_a_state_on_a_device_is_loaded_with_the_bits_that_were_saved(tmp_path, used, verified):
    path = save(tmp_path, 1, wholes(state()), {}, SingleProcess())
    into, block, wide = blank(), torch.zeros(20, 100), torch.zeros(5000, dtype=torch.float64)
    region = Region.whole((150, 100)).narrow(1, 30, 20)
    column = torch.zeros(150, 20)
    pieces = [
        *wholes(into),
        Piece("model/large", (150, 100), 1000, 3000, block.view(-1)),
        Piece("model/large", (150, 100), 0, 3000, column.view(-1), region),
        Piece.whole("model/half", wide),
    ]
    used.clear()
    if verified:
        load_verified(path, read_manifest(path), SingleProcess(), fresh=pieces[::2], in_use=pieces[1::2])
    else:
        load(path, pieces, SingleProcess())
    assert used
    for name, each in state().items():
        assert torch.equal(into[name], each), name
    assert torch.equal(block, state()["model/large"][10:30])
    assert torch.equal(column, state()["model/large"][:, 30:50])
    assert torch.equal(wide, state()["model/half"].double())


def test_a_flipped_bit_on_the_way_to_a_device_is_found(tmp_path, used):
    path = save(tmp_path, 1, wholes(state()), {}, SingleProcess())
    [file] = path.glob("*.safetensors")
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)
    with pytest.raises(CorruptCheckpointError):
        load_verified(path, read_manifest(path), SingleProcess(), fresh=wholes(blank()))


# -- a state in memory ------------------------------------------------------------------------------


class Optimizer:
    """The optimizer's interface for a Snapshot, with a moment and a count for each parameter."""

    def __init__(self, parameters):
        self.steps = 0
        self.state = {each: {"moment": torch.randn_like(each), "step": 3} for each in parameters}

    def parts(self, owned):
        return [(self, owned)]


def test_a_snapshot_of_a_state_on_a_device_is_restored(used):
    module = nn.Linear(70, 60)
    owned = [SimpleNamespace(parameter=each, local=each.data) for each in module.parameters()]
    done = []
    parallel = SimpleNamespace(
        module=module, owned=owned, zero_grad=partial(done.append, 0), changed=partial(done.append, 1)
    )
    optimizer = Optimizer(module.parameters())
    values = [each.detach().clone() for each in module.parameters()]
    moments = [optimizer.state[each]["moment"].clone() for each in module.parameters()]
    snapshot = Snapshot.take(parallel, optimizer)
    for each in module.parameters():
        each.data.fill_(1)
        optimizer.state[each]["moment"].fill_(1)
        optimizer.state[each] |= {"step": 4, "other": 5}
    optimizer.steps = 7
    snapshot.restore()
    assert len(used) == 2
    assert all(torch.equal(*pair) for pair in zip(module.parameters(), values, strict=True))
    found = [optimizer.state[each]["moment"] for each in module.parameters()]
    assert all(torch.equal(*pair) for pair in zip(found, moments, strict=True))
    assert {key for each in module.parameters() for key in optimizer.state[each]} == {"moment", "step"}
    assert (optimizer.steps, done) == (0, [0, 1])
