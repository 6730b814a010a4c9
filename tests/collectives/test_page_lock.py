"""Page-locked memory: exact in size, unlocked when it ends; and a refusal harms nothing that follows."""

from __future__ import annotations

import ast
import ctypes
import gc
import warnings
from pathlib import Path

import pytest
import torch
from cuda_runtime_stand_in import CudaRuntime

import shoal
from shoal.checkpoint import Piece, Staging
from shoal.collectives import host_buffers
from shoal.collectives.host_buffers import HostBuffers, HostPages, lock_pages
from shoal.parallel.offload import storage
from shoal.parallel.offload.storage import aligned_buffer
from shoal.spec.plan import GRANULE

PACKAGE = Path(shoal.__file__).parent

OF_TORCH = {"models/grouped_matmul.py", "train/micro_batch.py", "train/result.py"}
"""Files that may use torch's own page-locked memory: small tensors that come and go in each step."""


def lock_buffer() -> None:
    HostBuffers(locks_pages=True).take(1000, torch.float32)


def lock_staging() -> None:
    pieces = [Piece.whole("a", torch.ones(1000))]
    staging = Staging()
    staging.reserve(pieces)
    staging._is_for_gpu = True
    staging.copy(pieces)


def lock_state() -> None:
    aligned_buffer(1000, torch.float32, pinned=True)


@pytest.mark.parametrize("lock", [lock_buffer, lock_staging, lock_state])
def test_a_refused_lock_is_told_with_its_reason_and_the_next_launch_works(monkeypatch, lock):
    runtime = CudaRuntime(limit=0).install(monkeypatch)
    monkeypatch.setattr(storage.torch.cuda, "is_available", lambda: True)
    with pytest.warns(UserWarning, match=r"cannot lock .*error 304, error number 304.*ulimit -l"):
        lock()
    runtime.launch()


class Launches(torch.overrides.TorchFunctionMode):
    """Makes tensors of a GPU on the CPU. Arithmetic on them launches a kernel, and to fill them does not."""

    def __init__(self, runtime):
        super().__init__()
        self.runtime = runtime

    def __torch_function__(self, function, types, arguments=(), named=None):
        named = dict(named or {})
        named.pop("device", None)
        result = function(*arguments, **named)
        if function in (torch.Tensor.add_, torch.Tensor.mul_):
            self.runtime.launch()
        return result


def test_an_error_is_taken_by_a_launch_where_torch_contains_the_runtime(monkeypatch):
    runtime = CudaRuntime(limit=0).install(monkeypatch)
    monkeypatch.setattr(host_buffers, "_runtime", lambda: None)
    pages = HostPages(4096)
    with Launches(runtime):
        assert "error 304" in pages.lock()
    runtime.launch()


def test_memory_that_cannot_be_unlocked_leaves_no_error_behind(monkeypatch):
    runtime = CudaRuntime().install(monkeypatch)
    pages = HostPages(5000)
    assert pages.lock() == ""
    runtime.locked.clear()
    del pages
    gc.collect()
    runtime.launch()


def test_pages_are_locked_as_long_as_a_view_of_them_lives(monkeypatch):
    runtime = CudaRuntime().install(monkeypatch)
    pages = HostPages(3 * 4096 + 100)
    assert pages.lock() == ""
    view = pages.tensor[4096:8192].view(torch.float32)
    address = pages.tensor.data_ptr()
    assert runtime.locked == {address: 3 * 4096 + 100}
    del pages
    gc.collect()
    assert runtime.locked
    view.fill_(3)
    del view
    gc.collect()
    assert not runtime.locked


def test_a_second_lock_of_the_same_pages_is_refused_and_harms_nothing(monkeypatch):
    runtime = CudaRuntime().install(monkeypatch)
    pages = HostPages(4096)
    assert pages.lock() == ""
    assert "error 712" in lock_pages(pages.tensor, pages)
    runtime.launch()


@pytest.mark.parametrize("elements", [GRANULE, 5 * GRANULE + 1, (1 << 20) + 1])
def test_the_pinned_state_of_an_optimizer_takes_no_more_than_its_size(monkeypatch, elements):
    runtime = CudaRuntime().install(monkeypatch)
    monkeypatch.setattr(storage.torch.cuda, "is_available", lambda: True)
    memory = aligned_buffer(elements, torch.float32, pinned=True)
    wanted = -(-elements // GRANULE) * GRANULE * 4
    assert memory.nbytes == wanted
    assert list(runtime.locked.values()) == [wanted]
    assert memory.untyped_storage().nbytes() == wanted


@pytest.mark.parametrize("nbytes", [1, 65_536, 65_537, (1 << 20) + 4, (1 << 26) + 4, 100_000_000])
def test_a_buffer_for_a_device_is_at_most_an_eighth_larger_than_what_it_is_for(monkeypatch, nbytes):
    runtime = CudaRuntime().install(monkeypatch)
    buffers = HostBuffers(locks_pages=True)
    buffers.take(nbytes, torch.uint8)
    [locked] = runtime.locked.values()
    assert nbytes <= locked <= max(nbytes * 9 / 8, nbytes + (1 << 16))


def test_a_new_buffer_is_used_again_for_one_of_nearly_its_size():
    buffers = HostBuffers(locks_pages=False)
    memory, buffer = buffers.take(1 << 20, torch.uint8)
    del memory
    gc.collect()
    assert buffers.take((1 << 20) - 100, torch.uint8)[1] is buffer


def test_only_one_file_registers_memory_and_only_small_tensors_are_pinned_by_torch():
    for path in PACKAGE.rglob("*.py"):
        name = str(path.relative_to(PACKAGE))
        tree = ast.parse(path.read_text())
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
        called = {each.func.attr for each in calls if isinstance(each.func, ast.Attribute)}
        keywords = {keyword.arg for each in calls for keyword in each.keywords}
        assert name == "collectives/host_buffers.py" or not called & {"cudart", "cudaHostRegister"}, name
        assert name in OF_TORCH or "pin_memory" not in called | keywords, name


def test_the_host_s_pages_are_zero_and_of_the_size_that_was_asked_for():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for nbytes in (0, 1, 4096, 10_000):
            tensor = HostPages(nbytes).tensor
            assert tensor.shape == (nbytes,)
            assert not tensor.any()
            assert tensor.data_ptr() % 4096 == 0


@pytest.mark.skipif(torch.version.cuda is None, reason="this torch is built without CUDA")
def test_the_runtime_that_torch_calls_is_found_without_a_gpu():
    runtime = host_buffers._runtime()
    assert runtime is not None
    address = ctypes.cast(runtime.cudaGetLastError, ctypes.c_void_p).value
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, stop = (int(each, 16) for each in line.split()[0].split("-"))
        if start <= address < stop:
            assert "libcudart" in line
