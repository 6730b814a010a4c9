"""The GPU of a new thread: that of the thread that starts it.

CUDA starts every thread on the first GPU. The thread's first call, even to wait for an event, then makes a
context of half a gigabyte there, although the process may be a rank of another GPU. So a thread that may
touch CUDA sets the device first; a test finds threads that do not.

A thread may start before its rank has a GPU, such as the thread of a logger that a user makes before the
trainer. Such a thread calls `take_device` before each piece of work, and so gets the rank's GPU once there is
one.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")

_thread = threading.local()  # `has_none`: it began before the rank had a GPU
_of_rank: int | None = None


def note_device(index: int) -> None:
    """Note the GPU of this rank, once it is the current one, for threads that began before."""
    global _of_rank
    _of_rank = index


def take_device() -> None:
    """Set the GPU of the rank for this thread, if the rank had none when the thread started."""
    if getattr(_thread, "has_none", False) and _of_rank is not None and torch.cuda.is_initialized():
        torch.cuda.set_device(_of_rank)
        _thread.has_none = False


def callers_device() -> Callable[[], None]:
    """Return a function that gives the thread that calls it this thread's current GPU.

    It is the `initializer` of a pool. If this process has not used CUDA so far, the thread gets that of the
    rank as soon as `take_device` finds one.
    """
    if not torch.cuda.is_initialized():
        return _begin_without
    return functools.partial(torch.cuda.set_device, torch.cuda.current_device())


def on_callers_device(work: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Return the function as the target of a thread, which then starts on this thread's current GPU."""
    set_device = callers_device()

    @functools.wraps(work)
    def begun(*arguments: _Arguments.args, **named: _Arguments.kwargs) -> _Result:
        set_device()
        return work(*arguments, **named)

    return begun


def _begin_without() -> None:
    _thread.has_none = True
    take_device()
