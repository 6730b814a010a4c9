"""Checks on a GPU of page-locked memory, of the way of a state to and from the device, and of contexts.

Each check takes the device, returns one line of findings, and raises AssertionError with what was found and
what was wanted. On a CPU each runs with less, as far as it can: that tries the check itself.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from gpu_device import finish
from gpu_outcome import Short

from shoal.checkpoint import Piece, SingleProcess, Staging, load, save
from shoal.collectives.host_buffers import BounceBuffers, HostPages
from shoal.collectives.thread_device import on_callers_device
from shoal.parallel.offload.storage import aligned_buffer
from shoal.record import LiveStorages, MappedFiles
from shoal.train import auto_plan
from shoal.train.snapshot import compute_deterministically

__all__ = [
    "check_deterministic_empty",
    "check_free_memory",
    "check_live_storages",
    "check_load_rate",
    "check_locking_beside_training",
    "check_pinned_size",
    "check_refused_lock",
    "check_thread_device",
    "check_trace_apart",
]

_GIB = 1 << 30


def check_refused_lock(device: torch.device) -> str:
    """A refused page lock gives its reason, and the next kernel works, however the error is cleared."""
    if device.type != "cuda":
        return "no CUDA: not tried"
    from shoal.collectives import host_buffers

    usual = host_buffers._runtime
    assert usual() is not None, "cudaGetLastError was not found by way of libc10_cuda.so; wanted: found"
    refusals = []
    try:
        for runtime in (usual, lambda: None):  # the second as where torch contains the runtime
            host_buffers._runtime = runtime  # type: ignore[assignment]
            pages = HostPages(1 << 20)
            assert pages.lock() == "", "a first lock was refused"
            refusals.append(pages.lock())
            assert "cannot lock" in refusals[-1], f"a second lock gave {refusals[-1]!r}; wanted: a refusal"
            total = torch.ones(1000, device=device).sum().item()
            assert total == 1000, f"a kernel after a refused lock gave {total}; wanted: 1000"
    finally:
        host_buffers._runtime = usual
    torch.cuda.cudart().cudaHostRegister(pages.tensor.data_ptr(), pages.tensor.nbytes, 0)
    try:
        torch.ones(1000, device=device)
        raw = "it works"
    except RuntimeError as error:
        raw = f"it raises {str(error).splitlines()[0]}"
    return f"{refusals[0]}: the next kernel works; uncleared {raw}; with 64 KiB: {_in_a_child(_LIMITED)}"


_LIMITED = """
import resource, torch
from shoal.collectives.host_buffers import HostPages
torch.ones(1, device="cuda")
resource.setrlimit(resource.RLIMIT_MEMLOCK, (1 << 16, 1 << 16))
pages = HostPages(1 << 28)
reason = pages.lock()
assert torch.ones(1000, device="cuda").sum().item() == 1000
copy = pages.tensor.cuda().sum().item()
print(reason or "locked all the same (this user may)")
"""


def check_locking_beside_training(device: torch.device) -> Iterator[str]:
    """Page-locking 4 GiB in a thread barely delays a training that launches kernels meanwhile."""
    nbytes = 4 * _GIB if device.type == "cuda" else 1 << 28
    value = torch.zeros(1 << 20, device=device)

    def longest_step(goes_on: Callable[[], bool]) -> tuple[int, float, float]:
        steps, longest, began = 0, 0.0, time.perf_counter()
        while goes_on():
            at = time.perf_counter()
            for _ in range(100):
                value.add_(1)
            finish(device)
            steps, longest = steps + 1, max(longest, time.perf_counter() - at)
        return steps, longest, time.perf_counter() - began

    until = time.perf_counter() + 1
    alone = longest_step(lambda: time.perf_counter() < until)
    staging = Staging()
    began = time.perf_counter()
    staging.reserve([Piece.whole("state", torch.empty(nbytes, dtype=torch.uint8, device=device))])
    staging.prepare()
    returned = time.perf_counter() - began
    thread = staging._preparing
    assert thread is not None
    beside = longest_step(thread.is_alive)
    staging.release()
    assert returned < 0.5, f"to begin took {returned:.2f} s; wanted: under 0.5"
    yield (
        f"{nbytes / _GIB:.2f} GiB touched and locked in {beside[2]:.2f} s; the call took "
        f"{1e3 * returned:.1f} ms; 100 kernels beside it took {_ms(beside)}, at most {1e3 * beside[1]:.1f}, "
        f"alone {_ms(alone)}, at most {1e3 * alone[1]:.1f}"
    )
    slowed = (beside[2] / max(beside[0], 1)) / (alone[2] / alone[0])
    if device.type == "cuda" and slowed > 3:
        raise Short(f"100 kernels took {slowed:.1f} times as long beside the lock, target 3")


def check_pinned_size(device: torch.device) -> str:
    """A page-locked state of an odd size takes no more of the host's memory than its size."""
    nbytes = (_GIB + (1 << 20)) if device.type == "cuda" else (1 << 26) + 4096
    before = _resident()
    state = aligned_buffer(nbytes // 4, torch.float32, pinned=True).fill_(1)
    took = _resident() - before
    assert took < 1.1 * nbytes, (
        f"a state of {nbytes} bytes took {took} of memory; wanted: at most a tenth more"
    )
    if device.type != "cuda":
        return f"{nbytes >> 20} MiB took {took >> 20} MiB (no CUDA: not locked)"
    assert state.is_pinned(), "torch does not take the state for pinned memory"
    rate = _rate(partial(state.to, device, non_blocking=True), nbytes, device)
    del state
    gc.collect()
    left = _resident() - before
    assert left < 0.1 * nbytes, f"{left} bytes stayed after the state was freed; wanted: a tenth at most"
    other = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    torchs = torch.cuda.host_memory_stats()["allocated_bytes.current"]
    del other
    return (
        f"{nbytes >> 20} MiB took {took >> 20} MiB, by torch's pin_memory {torchs >> 20} MiB; "
        f"copied at {rate:.1f} GB/s"
    )


def check_load_rate(device: torch.device) -> str:
    """A state of 2 GiB comes to the device quicker through two locked buffers than by other memory."""
    elements = (_GIB if device.type == "cuda" else 1 << 24) // 4 // 8
    state = {f"model/{number}": torch.randn(elements, device=device) for number in range(16)}
    nbytes = sum(each.nbytes for each in state.values())
    shared = os.statvfs("/dev/shm")
    folder = "/dev/shm" if shared.f_bavail * shared.f_frsize > 2 * nbytes else None
    with tempfile.TemporaryDirectory(dir=folder) as directory:
        began = time.perf_counter()
        path = save(Path(directory), 1, _wholes(state), {}, SingleProcess())
        saved = nbytes / (time.perf_counter() - began) / 1e9
        into = {name: torch.zeros_like(each) for name, each in state.items()}
        pieces = _wholes(into)
        rates = {}
        for name, way in {"buffers": None, "pageable": _through_pageable_memory}.items():
            for _ in range(2):  # the second time everything is loaded and touched
                finish(device)
                with way() if way is not None else _as_it_is():
                    began = time.perf_counter()
                    load(path, pieces, SingleProcess())
                    finish(device)
                    rates[name] = nbytes / (time.perf_counter() - began) / 1e9
            for each in state:
                assert torch.equal(into[each], state[each]), f"{each} was loaded wrongly by way of {name}"
                into[each].zero_()
    with BounceBuffers() as buffers:
        to_host = _rate(lambda: [buffers.get(each) for each in state.values()], nbytes, device)
    if device.type == "cuda":
        assert rates["buffers"] > 1.2 * rates["pageable"], (
            f"GB/s {rates}; wanted: a fifth more by the buffers"
        )
    return (
        f"{nbytes >> 20} MiB in {folder or tempfile.gettempdir()}, GB/s: {rates['buffers']:.2f} loaded by "
        f"the buffers, {rates['pageable']:.2f} by pageable memory, {saved:.2f} saved, {to_host:.2f} copied "
        "to the host"
    )


def check_deterministic_empty(device: torch.device) -> str:
    """Deterministic computation does not fill new memory."""
    elements = 1 << 28 if device.type == "cuda" else 1 << 20

    def seconds() -> float:
        torch.empty(elements, device=device)  # the allocator has the block from now on
        finish(device)
        began = time.perf_counter()
        for _ in range(20):
            torch.empty(elements, device=device)
        finish(device)
        return (time.perf_counter() - began) / 20

    usual = seconds()
    with compute_deterministically():
        without = seconds()
        setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)  # noqa: B010
        filled = seconds()
    assert not torch.are_deterministic_algorithms_enabled()
    assert without < filled / 3, f"an empty took {without:.2e} s, filled {filled:.2e}; wanted: under a third"
    return (
        f"an empty of {elements * 4 >> 20} MiB: {1e6 * usual:.1f} us usually, {1e6 * without:.1f} us "
        f"deterministic, {1e6 * filled:.1f} us where torch fills it"
    )


def check_thread_device(device: torch.device) -> str:
    """A thread starts on the GPU of the thread that starts it, and makes no further context."""
    if device.type != "cuda":
        return "no CUDA: not tried"
    last = torch.cuda.device_count() - 1
    torch.cuda.set_device(last)
    torch.ones(1, device="cuda")
    event = torch.cuda.Event()
    event.record()
    contexts, free = _contexts(), torch.cuda.mem_get_info(last)[0]
    found: list[int] = []

    def work() -> None:
        found.append(torch.cuda.current_device())
        event.synchronize()

    for target in (on_callers_device(work), work):
        thread = threading.Thread(target=target)
        thread.start()
        thread.join()
        if target is not work:
            assert found == [last], f"the thread was on GPU {found}; wanted: {last}"
            assert _contexts() == contexts, f"contexts on {_contexts()}; wanted: {contexts}"
    took = free - torch.cuda.mem_get_info(last)[0]
    assert took < 64 << 20, f"the threads took {took} bytes of the GPU; wanted: none"
    return (
        f"on GPU {found[0]}, a plain thread on {found[1]}; contexts on {_contexts()}, "
        f"{took >> 20} MiB more are taken"
    )


def check_trace_apart(device: torch.device) -> str:
    """To choose a Plan for a model of a user's own leaves no context in the process that asks."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "own_model.py").write_text(_MODEL)
        cluster = "" if device.type == "cuda" else "laptop"
        began = time.perf_counter()
        said = _in_a_child(_CHOOSE.format(cluster=cluster, device=device.type), folder)
    return f"{said} in {time.perf_counter() - began:.1f} s, with the start of two processes"


def check_free_memory(device: torch.device) -> str:
    """Free memory that is divided among ranks of a GPU leaves room for the context of each."""
    if device.type != "cuda":
        return "no CUDA: not tried"
    sharing, gpus = 4, torch.cuda.device_count()
    given = auto_plan._free_on_gpus(sharing * gpus, 0)
    assert given is not None, "the processes that ask found no GPU"
    free = min(torch.cuda.mem_get_info(each)[0] for each in range(gpus))
    context = free / sharing - given  # this process's own context is not free in either
    assert 100e6 < context < 2e9, f"{context:.3g} bytes are left for a context; wanted: 100 MB to 2 GB"
    return (
        f"{free / 1e9:.2f} GB are free, {given / 1e9:.2f} for each of {sharing} ranks: a fourth less "
        f"{context / 1e6:.0f} MB for a context"
    )


_MODEL = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(256, 64), nn.Linear(64, 256)
        self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))

    def forward(self, tokens):
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = torch.tanh(block(hidden))
        return self.head(hidden)
"""

_CHOOSE = """
import torch
from shoal.train import TrainConfig, resolve
config = TrainConfig(model="own_model:Model", plan="auto", batch=8, sequence=32, model_options={{}},
                     cluster="{cluster}", device="{device}")
print(resolve(config, 1).plan)
has = getattr(torch._C, "_cuda_hasPrimaryContext", lambda device: False)
contexts = [each for each in range(torch.cuda.device_count()) if has(each)]
assert not contexts, f"contexts on {{contexts}}; wanted: none"
"""


def check_live_storages(device: torch.device) -> str:
    """Memory of the device, and page-locked memory, counts as memory; a mapped file does not."""
    tensors = [torch.ones(1 << n, device=device) for n in range(10, 24, 2)]
    tensors.append(torch.ones(1 << 20, pin_memory=device.type == "cuda"))
    pages = HostPages(1 << 20)
    if device.type == "cuda":
        assert pages.lock() == ""
    tensors.append(pages.tensor)
    files = MappedFiles()
    in_files = [each.device for each in tensors if files.hold(each)]
    assert not in_files, f"tensors on {in_files} count as files; wanted: none"
    with LiveStorages() as live:
        for each in tensors:
            live.take_up(each)
        counted, wanted = live.bytes(), sum(each.untyped_storage().nbytes() for each in tensors)
    assert counted == wanted, f"{counted} bytes were counted; wanted: {wanted}"
    with tempfile.NamedTemporaryFile() as file:
        file.truncate(1 << 16)
        mapped = torch.from_file(file.name, shared=True, size=1 << 16, dtype=torch.uint8)
        assert MappedFiles().hold(mapped), "a mapped file is not found"
    maps = Path("/proc/self/maps").read_text().splitlines()
    named = sorted({each.split()[-1] for each in maps if "/dev/nvidia" in each})
    return f"{counted} bytes in {len(tensors)} tensors counted; maps of {', '.join(named) or 'no device'}"


def _wholes(state: dict[str, torch.Tensor]) -> list[Piece]:
    return [Piece.whole(name, each) for name, each in state.items()]


@contextmanager
def _as_it_is() -> Iterator[None]:
    yield


@contextmanager
def _through_pageable_memory() -> Iterator[None]:
    """Let loads take the way of a tensor on no device: new memory of the host, and one copy."""
    module = sys.modules["shoal.checkpoint.load"]
    usual = module.BounceBuffers
    module.BounceBuffers = lambda: usual(is_on_device=lambda tensor: False)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        module.BounceBuffers = usual  # type: ignore[attr-defined]


def _in_a_child(program: str, folder: str = ".") -> str:
    path = os.pathsep.join([str(Path(__file__).parents[1]), folder, os.environ.get("PYTHONPATH", "")])
    ended = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert ended.returncode == 0, f"a process ended with {ended.returncode}: {ended.stderr[-2000:]}"
    return ended.stdout.strip()


def _rate(copy: Callable[[], object], nbytes: int, device: torch.device) -> float:
    """Return the GB/s of a copy; the better of two, of which the first one also touches memory."""
    best = 0.0
    for _ in range(2):
        finish(device)
        began = time.perf_counter()
        copy()
        finish(device)
        best = max(best, nbytes / (time.perf_counter() - began) / 1e9)
    return best


def _resident() -> int:
    """Return the bytes of this process's memory, with locked pages that CUDA's driver maps."""
    gc.collect()
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines["VmRSS"].split()[0]) << 10


def _contexts() -> list[int]:
    """Return the GPUs on which this process has a context."""
    return [each for each in range(torch.cuda.device_count()) if torch._C._cuda_hasPrimaryContext(each)]


def _ms(steps: tuple[int, float, float]) -> str:
    return f"{1e3 * steps[2] / max(steps[0], 1):.2f} ms"
