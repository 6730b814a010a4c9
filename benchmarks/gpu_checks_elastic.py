"""Checks on one GPU of what elastic training over NCCL relies on; each returns a line of findings."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from gpu_outcome import Short

from shoal.launch.elastic import Membership
from shoal.launch.elastic.roster import Roster
from shoal.launch.local import EXIT_AGAIN
from shoal.train.elastic import _leave, abort, group_failure

__all__ = [
    "check_a_planned_change_leaves_nothing_on_the_device",
    "check_a_process_ends_while_a_kernel_runs",
    "check_a_watchdog_is_heard_before_it_aborts",
]

_ENDS = 3.0  # seconds in which a process should be gone, with what the driver frees
_HANGS = 15.0  # seconds after which it hangs
_LIMIT, _DUMP = 2.0, 3.0  # seconds: of a collective, and from its end to the watchdog's abort
_STARTED = """
import sys, time
import torch
device = torch.device(sys.argv[1])
torch.ones(1024, device=device).sum().item()
print(time.time())
"""


def check_a_process_ends_while_a_kernel_runs(device: torch.device) -> Iterator[str]:
    """The watch of a membership ends the process during a kernel, and a new one has the device."""
    child = _child("_end_while_a_kernel_runs", device)
    announced = float(child.stdout.splitlines()[-1])
    assert child.returncode == EXIT_AGAIN, f"exit code {child.returncode}, not {EXIT_AGAIN}: {child.stderr}"
    ended = time.time() - announced
    assert ended < _HANGS, f"ended {ended:.2f} s after the generation was broken, wanted {_HANGS} s at most"
    took = []
    for program in (_STARTED, f"import shoal.train\n{_STARTED}"):
        began = time.time()
        command = [sys.executable, "-c", program, str(device)]
        after = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert after.returncode == 0, f"a new process cannot use {device}: {after.stderr}"
        took.append(float(after.stdout) - began)
    yield (
        f"ended {ended:.2f} s after the generation was broken, during a kernel of 60 s; a new process has "
        f"its first result after {took[0]:.1f} s, and {took[1]:.1f} s with Shoal imported"
    )
    if ended > _ENDS:
        raise Short(f"a process ends in {ended:.1f} s, target {_ENDS:g} s")


def check_a_watchdog_is_heard_before_it_aborts(device: torch.device) -> str:
    """NCCL's watchdog shows a time-out to Shoal, and ends the process later by SIGABRT."""
    if device.type == "cpu":
        _group(device)
        assert group_failure() == "", f"gloo reports {group_failure()!r}, wanted nothing"
        return "a group on CPUs reports no failure of a watchdog"
    child = _child("_wait_too_long", device, TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC=str(round(1000 * _DUMP / 4)))
    called, heard, failure, has_key = child.stdout.splitlines()[-1].split()
    assert failure == "TIMEOUT", f"the group reports {failure}, wanted TIMEOUT: {child.stderr[-2000:]}"
    assert child.returncode == -6, f"exit code {child.returncode}, wanted -6: {child.stderr[-2000:]}"
    after, later = float(heard) - float(called), time.time() - float(heard)
    assert after < _LIMIT + 3, f"heard {after:.1f} s after the call, wanted {_LIMIT + 3} s at most"
    return (
        f"a collective with a limit of {_LIMIT:g} s is heard of {after:.2f} s after its call; SIGABRT came "
        f"{later:.1f} s later; the watchdog {'set' if has_key == 'True' else 'did not set'} exception_dump"
    )


def check_a_planned_change_leaves_nothing_on_the_device(device: torch.device) -> str:
    """A member that leaves its group cleanly gives back device memory, and forms another group."""
    free, rounds = [], 3
    for number in range(rounds):
        membership = Membership(0, dist.HashStore, -1, abort)
        membership.begin("cpu:gloo,cuda:nccl")
        _group(device)
        tensor = torch.ones(1 << 24, device=device)
        dist.all_reduce(tensor)
        found = tensor[-1].item()
        assert found == 1, f"all-reduce of one rank in group {number} gave {found}, wanted 1"
        del tensor
        _leave(None, membership)
        assert not dist.is_initialized(), "the group is still there"
        if device.type == "cuda":
            reserved = torch.cuda.memory_reserved(device)
            assert reserved <= 2 << 20, f"torch keeps {reserved} bytes, wanted one small block at most"
            free.append(torch.cuda.mem_get_info(device)[0])
    if not free:
        return f"{rounds} groups after each other on {device}"
    lost = (free[0] - free[-1]) / (rounds - 1)
    assert lost < 64 << 20, f"each group leaves {lost / 2**20:.0f} MiB on the device, wanted less than 64"
    return f"{rounds} groups after each other; each leaves {lost / 2**20:.1f} MiB on the device"


def _group(device: torch.device, seconds: float = 60.0) -> dist.Store:
    """Form a group of one rank, and return its store."""
    store = dist.HashStore()
    dist.init_process_group(
        "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl",
        store=store,
        rank=0,
        world_size=1,
        timeout=timedelta(seconds=seconds),
        device_id=None if device.type == "cpu" else device,
    )
    return store


def _end_while_a_kernel_runs(device: torch.device) -> None:
    """Wait for a kernel, as a rank that a lost one leaves waiting; the watch ends this process."""
    store = dist.HashStore()
    roster = Roster(store)
    membership = Membership(0, lambda: store, -1, abort, group_failure)
    roster.announce([0], is_broken=False)
    membership.ready()
    membership.next(10)
    membership.begin("cpu:gloo,cuda:nccl")
    _group(device)
    threading.Timer(1.0, _break, [roster]).start()
    _run_for(device, 60.0)


def _break(roster: Roster) -> None:
    print(time.time(), flush=True)
    roster.announce([], is_broken=True)


def _wait_too_long(device: torch.device) -> None:
    """Call a collective behind a kernel that is longer than its limit."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    store = _group(device, _LIMIT)
    tensor = torch.ones(1024, device=device)
    dist.all_reduce(tensor)
    torch.cuda.synchronize(device)
    called = time.time()

    def hear() -> None:
        while not (failure := group_failure()):
            time.sleep(0.05)
        heard = time.time()
        time.sleep(0.5)
        print(called, heard, failure, store.check(["exception_dump"]), flush=True)

    threading.Thread(target=hear, daemon=True).start()
    torch.cuda._sleep(int(60 * _clock(device)))
    dist.all_reduce(tensor)
    torch.cuda.synchronize(device)


def _run_for(device: torch.device, seconds: float) -> None:
    """Wait for the device, which is busy for so long."""
    if device.type == "cpu":
        time.sleep(seconds)
        return
    torch.cuda._sleep(int(seconds * _clock(device)))
    torch.cuda.synchronize(device)


def _clock(device: torch.device) -> float:
    """Return the cycles of a second, as `torch.cuda._sleep` counts them."""
    cycles = 100_000_000
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(1000)
    torch.cuda.synchronize(device)
    begin.record()
    torch.cuda._sleep(cycles)
    end.record()
    torch.cuda.synchronize(device)
    return cycles / (begin.elapsed_time(end) / 1000)


def _child(name: str, device: torch.device, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a function of this file in a process of its own."""
    command = [sys.executable, str(Path(__file__)), name, str(device)]
    around = {**os.environ, "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3", **environment}
    return subprocess.run(command, env=around, capture_output=True, text=True, timeout=60)


if __name__ == "__main__":
    own = torch.device(sys.argv[2])
    if own.type == "cuda":
        torch.cuda.set_device(own)
    globals()[sys.argv[1]](own)
